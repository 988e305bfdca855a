"""What holds several ranks up: one that is slower than the others, and collectives that nothing hides."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Final

from lightning_gpuopt._measured import RankWork
from lightning_gpuopt.diagnosis.causes import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import speedup_without
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.diagnosis.step_causes import Candidate, per_step

_SLOWER_LOADER: Final = 1.3
"""A rank whose loader needs this much longer for a batch than the others' really has slower data; a rank that merely
happens to wait in everybody's stead does not."""

_LOOK_AT: Final = {
    "data": "its data: the disk, the CPUs and the samples of that process.",
    "compute": "what else runs on its CPUs and GPU, and at work that only this rank does.",
}

_Excess = tuple[str, RankWork, float, float]
"""Kind of work, the slowest rank in it, by how many seconds of a step, and how many the others need."""


def straggler(measurement: Measurement) -> Iterator[Candidate]:
    """The rank whose own work takes longest, if it is slower than the others."""
    waterfall, ranks = measurement.waterfall, measurement.ranks
    if len(ranks) < 2:
        return
    kind, slowest, excess_s, others_s = max(_excesses(ranks), key=lambda candidate: candidate[2])
    if kind == "data" and not _has_slower_loader(slowest, ranks):
        return
    seconds = excess_s * waterfall.steps
    yield (
        waterfall.share(seconds),
        lambda: Finding(
            "straggler",
            waterfall.share(seconds),
            {
                "rank": slowest.rank,
                "kind": kind,
                "ms_per_step": round((others_s + excess_s) * 1e3, 3),
                "ms_per_step_elsewhere": round(others_s * 1e3, 3),
            },
            CAUSES["straggler"].advice.format(rank=slowest.rank) + _LOOK_AT[kind],
            predicted_speedup=speedup_without(measurement, seconds),
        ),
    )


def communication(measurement: Measurement) -> Iterator[Candidate]:
    """Collectives that nothing hides: by the rank that waits least in them, since others wait for a slower one."""
    look, waterfall = measurement.look, measurement.waterfall
    if look is None or not waterfall.on_gpu or measurement.look_pending:
        return
    others = [rank.communication_s for rank in measurement.ranks if rank.communication_s is not None]
    seconds = min([look.communication_s, *others]) * waterfall.steps
    yield (
        waterfall.share(seconds),
        lambda: Finding(
            "communication",
            waterfall.share(seconds),
            per_step(seconds, measurement),
            CAUSES["communication"].advice,
            predicted_speedup=speedup_without(measurement, seconds),
        ),
    )


def _excesses(ranks: tuple[RankWork, ...]) -> list[_Excess]:
    found = [_slowest(ranks, "data", lambda rank: rank.data_wait_s)]
    if all(rank.forward_s is None for rank in ranks):
        found.append(_slowest(ranks, "compute", lambda rank: rank.compute_s))
    else:
        found.append(_slowest(ranks, "compute", lambda rank: rank.compute_s + (rank.forward_s or 0.0)))
    waits = {rank.rank: rank.communication_s for rank in ranks if rank.communication_s is not None}
    if len(waits) == len(ranks) and any(rank.forward_s is None for rank in ranks):
        found.append(_least_waiting(ranks, waits))
    return found


def _slowest(ranks: tuple[RankWork, ...], kind: str, seconds: Callable[[RankWork], float]) -> _Excess:
    """The slowest rank in one kind of work, by how much, and what the others need."""
    slowest = max(ranks, key=seconds)
    others_s = statistics.median(seconds(rank) for rank in ranks if rank is not slowest)
    return kind, slowest, seconds(slowest) - others_s, others_s


def _least_waiting(ranks: tuple[RankWork, ...], waits: dict[int, float]) -> _Excess:
    """The rank that waits least in collectives: the others wait for it there."""
    slowest = min(ranks, key=lambda rank: waits[rank.rank])
    others = [rank for rank in ranks if rank is not slowest]
    excess_s = statistics.median(waits[rank.rank] for rank in others) - waits[slowest.rank]
    # what its own idle time explains is found there, with its right kind
    before_s = slowest.data_wait_s + slowest.compute_s
    excess_s -= max(before_s - statistics.median(rank.data_wait_s + rank.compute_s for rank in others), 0.0)
    return "compute", slowest, excess_s, statistics.median(rank.compute_s for rank in others)


def _has_slower_loader(slowest: RankWork, ranks: tuple[RankWork, ...]) -> bool:
    others = [rank.loader_s for rank in ranks if rank is not slowest and rank.loader_s is not None]
    if slowest.loader_s is None or not others:
        return True
    return slowest.loader_s >= _SLOWER_LOADER * statistics.median(others)
