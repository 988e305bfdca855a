"""The risks of one fit: those that its processes' readings show, and ranks with different numbers of batches."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning_gpuopt.compat.lightning import Trainer
from lightning_gpuopt.diagnosis.record import Risk, RiskName
from lightning_gpuopt.diagnosis.risks import risks_of
from lightning_gpuopt.measurements.risks import CopiedObject, RiskInputs
from lightning_gpuopt.objects.copied import copied_object
from lightning_gpuopt.utils.rank_channel import Gathered, RankGather

log = logging.getLogger(__name__)

_GROWN: int = 8 << 20  # bytes that a worker's private memory has grown by before the dataset is looked at


_FIRST_COMPARED_S: float = 2.0


class RiskWatch:
    """Keeps the risks of a fit, on any thread; ``found`` is called once for each kind, on the thread that found it."""

    def __init__(
        self,
        datasets: Callable[[], Iterable[object]],
        rank: int = 0,
        world_size: int = 1,
        found: Callable[[Risk], None] = lambda risk: None,
    ) -> None:
        self._datasets = datasets
        self._found = found
        self._risks: dict[RiskName, Risk] = {}
        self._lock = threading.Lock()
        self._copied: CopiedObject | None = None
        self._looked = self._has_begun = False
        self._compared = threading.Event()
        self._gather = RankGather("risks", rank, world_size, self._compare) if world_size > 1 else None

    @property
    def risks(self) -> list[Risk]:
        with self._lock:
            return list(self._risks.values())

    def look(self, observed: RiskInputs) -> list[Risk]:
        """Look for risks; returns those of new kinds. Takes a few ms; 50 ms once, when workers' memory has grown."""
        if observed.copied is None and observed.forked and _have_grown(observed):
            observed = replace(observed, copied=self._object())
        return self._add(risks_of(observed))

    def epoch_begins(self, trainer: Trainer) -> None:
        """Send this rank's number of batches on its way to rank 0, which compares.

        Before the first batch of a fit rank 0 waits for it, for two seconds at most, so that it warns before the ranks
        meet in a collective; else nobody waits.
        """
        if self._gather is None:
            return
        batches, is_first = _batches_of(trainer), not self._has_begun
        self._has_begun = True
        self._gather.post(trainer.current_epoch, batches)
        if is_first and batches is not None and self._gather.rank == 0 and self._gather.problem is None:
            self._compared.wait(_FIRST_COMPARED_S)

    def send(self) -> None:
        """At the end: send this rank's risks on their way to rank 0, which reports those of a kind that it has not."""
        if self._gather is not None:
            self._gather.post(-1, [asdict(each) for each in self.risks])

    def close(self, timeout_s: float = 1.0) -> None:
        """Compare what has come, after at most ``timeout_s`` for the others' last numbers, and no more; idempotent."""
        if self._gather is not None:
            self._gather.close(timeout_s)

    def _object(self) -> CopiedObject | None:
        if not self._looked:
            self._looked = True
            try:
                self._copied = copied_object(self._datasets())
            except Exception:  # they are the user's
                log.debug("the datasets could not be looked at", exc_info=True)
        return self._copied

    def _compare(self, gathered: Gathered) -> None:
        """Called on the gather's thread: the training thread may wait in the very collective that is warned of."""
        sent = {rank: each for rank, each in gathered.by_rank.items() if isinstance(each, list)}
        batches = {rank: each for rank, each in gathered.by_rank.items() if isinstance(each, int)}
        if self._gather is not None and len(batches) == self._gather.world_size:
            self._add(risks_of(RiskInputs(batches=batches)))
        known = {each.risk for each in self.risks}
        self._add([each for each in _with_ranks(sent) if each.risk not in known])
        self._compared.set()

    def _add(self, risks: list[Risk]) -> list[Risk]:
        with self._lock:
            new = [each for each in risks if each.risk not in self._risks]
            self._risks |= {each.risk: each for each in risks}
        for each in new:
            try:
                self._found(each)
            except Exception:  # a warning that is an error: there is nobody here to catch it
                log.debug("nobody could be told of %s", each.risk, exc_info=True)
        return new


def _have_grown(observed: RiskInputs) -> bool:
    for worker in observed.workers:
        private = [each.private for each in worker.readings if each.private is not None]
        if private and private[-1] - min(private) >= _GROWN:
            return True
    return False


def _with_ranks(sent: Mapping[int, list[dict[str, Any]]]) -> list[Risk]:
    """Of each kind of risk the one of the first rank that has it, with the numbers of all that have."""
    ranks: dict[RiskName, list[int]] = {}
    first: dict[RiskName, Risk] = {}
    for rank in sorted(sent):
        for each in sent[rank]:
            risk = Risk(**each)
            ranks.setdefault(risk.risk, []).append(rank)
            first.setdefault(risk.risk, risk)
    found = []
    for kind, risk in first.items():
        numbers = ", ".join(map(str, ranks[kind]))
        text = f"On rank{'s' * (len(ranks[kind]) > 1)} {numbers}: {risk.text}"
        found.append(replace(risk, text=text, evidence={**risk.evidence, "on_ranks": numbers}))
    return found


def _batches_of(trainer: Trainer) -> int | None:
    """Batches of this epoch, no more than ``max_steps`` leaves; None if their number is not known."""
    batches = trainer.num_training_batches
    if batches == math.inf:
        return None
    if trainer.max_steps > 0:
        batches = min(batches, (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return int(batches)
