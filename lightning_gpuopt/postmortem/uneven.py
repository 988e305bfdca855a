"""Ranks with different numbers of batches: one leaves the epoch, the others wait for it in a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpuopt.measurements.flight import TRAINS, FlightRecord
from lightning_gpuopt.postmortem.wording import ranks as in_words


@dataclass(frozen=True)
class Uneven:
    """Ranks that ended their epoch before others."""

    early: tuple[FlightRecord, ...]  # those ranks, the one with the fewest batches first
    others: tuple[FlightRecord, ...]  # the ranks that were left
    fewest: int  # batches of the first of ``early``
    most: int | None  # batches of the rank with the most; None: not known

    @property
    def text(self) -> str:
        """``"rank 5 ended its epoch 12 batches early (988, not 1,000)"``; where lengths are unknown ``"9 or more"``."""
        whose = "its epoch" if len(self.early) == 1 else "their epochs"
        by = 0 if self.most is None else self.most - self.fewest
        early = f"{by:,} batch{'es' if by != 1 else ''} early" if by else "early"
        most = f"{self.most:,}" if by else f"{max(each.batch for each in self.others) + 1:,} or more"
        return f"{in_words(each.rank for each in self.early)} ended {whose} {early} ({self.fewest:,}, not {most})"


def uneven_of(ranks: Sequence[FlightRecord]) -> Uneven | None:
    """Which ranks have left an epoch that others are still in, by records of training processes."""
    if len(ranks) < 2:
        return None
    numbers = _numbers(ranks)
    most = max(numbers.values(), default=0)
    late = [each for each in ranks if not _left(each)]
    early = [each for each in ranks if _left(each) and _behind(each, late, numbers, most)]
    early.sort(key=lambda each: (numbers.get(each.rank, each.batch), each.rank))
    others = tuple(each for each in ranks if each not in early)
    if not early or not others:
        return None
    fewest = numbers.get(early[0].rank, early[0].batch)
    return Uneven(tuple(early), others, fewest, most if most > fewest else None)


def _numbers(ranks: Sequence[FlightRecord]) -> dict[int, int]:
    """Batches of an epoch by rank, as far as they are known."""
    numbers = {each.rank: each.batches for each in ranks if each.batches is not None}
    for record in ranks:
        for event in record.events:
            told = event.get("batches") if event.get("event") == "uneven_ranks" else None
            pairs = told.items() if isinstance(told, Mapping) else enumerate(told or ())
            numbers |= {int(rank): int(number) for rank, number in pairs if number is not None}
    return numbers


def _left(record: FlightRecord) -> bool:
    """Whether a rank is outside of the batches of its epoch, having had some."""
    if record.ended == "ok":
        return True
    if record.batches is not None and record.batch < record.batches:
        return False
    return record.doing != TRAINS and record.batch > 0 and record.ended == ""


def _behind(record: FlightRecord, late: Sequence[FlightRecord], numbers: Mapping[int, int], most: int) -> bool:
    """Whether the others still had batches when it left."""
    if record.rank in numbers and len(set(numbers.values())) > 1:
        return numbers[record.rank] < most
    if record.rank in numbers and all(each.rank in numbers for each in late):
        return False
    if record.ended == "ok":
        return bool(late)
    return any(each.epoch == record.epoch and each.batch >= record.batch for each in late)
