"""What the flight recorder has read of memory, with what is known of the run: for the rules of risks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import psutil

from lightning_gpuopt.compat.lightning import Trainer, local_ranks_of, train_loaders
from lightning_gpuopt.compat.lightning_loops import batches_left, place_in_epoch
from lightning_gpuopt.detector.loader_watch import LoaderWatch
from lightning_gpuopt.detector.risk_watch import RiskWatch
from lightning_gpuopt.measurements.risks import BatchesInFlight, RiskInputs, WorkerMemory
from lightning_gpuopt.objects.growing import Growing
from lightning_gpuopt.recorder.flight import FlightRecorder

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 10.0
_AT_FIRST_S: Final = 120.0
_LOOK_AT_FIRST_S: Final = 2.0  # so much more often at first: what is used up fast ends a run before long
_GROWN: Final = 64 << 20  # bytes that the training process has grown by before it is looked at what grows in it


class MemoryRisks:
    """Looks for risks in what the recorder has read; on the recorder's thread, and once more at the end of a fit."""

    def __init__(
        self,
        trainer: Trainer,
        recorder: FlightRecorder,
        loader: LoaderWatch,
        risks: RiskWatch,
        owners: Callable[[], dict[str, object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self._loader = loader
        self._risks = risks
        self._owners = owners
        self._clock = clock
        self._growing: Growing | None = None
        self._began_s = self._due_s = clock()

    def look(self) -> None:
        if self._clock() < self._due_s:
            return
        now_s = self._clock()
        self._due_s = now_s + (_LOOK_AT_FIRST_S if now_s - self._began_s < _AT_FIRST_S else LOOK_EVERY_S)
        if self._growing is None:
            sizes = self._sizes()
            self._growing = Growing(self._owners(), process=sizes[-1] if sizes else 0)
        self._look()

    def look_now(self) -> None:
        """Look for the last time: rank 0 gets to know of what was found on the others."""
        self._look()
        self._risks.send()

    def _look(self) -> None:
        try:
            self._risks.look(self._inputs())
        except Exception:
            log.debug("no risks could be looked for", exc_info=True)

    def _inputs(self) -> RiskInputs:
        memory, facts = self._recorder.memory, self._loader.facts
        of_training = [each for each in list(memory.workers.items()) if each[1][0].startswith("train")]
        rank = tuple(memory.rank.items)
        sizes = self._sizes()
        grown = bool(sizes) and sizes[-1] - min(sizes) >= _GROWN
        grows = self._growing.why(sizes[-1]) if grown and self._growing is not None else ""
        memory.note_leak(grows)
        return RiskInputs(
            workers=tuple(
                WorkerMemory(worker, tuple(series.items), *self._recorder.leak_of(slot))
                for slot, (_, worker, _, series) in of_training
            ),
            rank=rank,
            num_workers=facts.num_workers,
            ranks_here=local_ranks_of(self._trainer),
            forked=any(self._recorder.is_forked(slot) for slot, _ in of_training),
            grows=grows,
            in_flight=self._in_flight(facts.prefetch_factor),
            machine_bytes=psutil.virtual_memory().total,
            **self._ahead(len(of_training)),
        )

    def _sizes(self) -> list[int]:
        return [each.rss for each in tuple(self._recorder.memory.rank.items) if each.rss is not None]

    def _in_flight(self, prefetch_factor: int | None) -> BatchesInFlight | None:
        for reading in self._loader.readings().values():
            if prefetch_factor and reading.workers.sized:
                return BatchesInFlight(reading.workers.bytes // reading.workers.sized, prefetch_factor)
        return None

    def _ahead(self, workers: int) -> dict[str, Any]:
        """What is left of the run, as far as its end can be foreseen."""
        left = batches_left(self._trainer)
        _, done, batches = place_in_epoch(self._trainer)
        steps = self._recorder.steps
        known: dict[str, Any] = {}
        if left is not None and steps:
            known["remaining_s"] = left * (self._clock() - self._began_s) / steps
        loaders = train_loaders(self._trainer)
        size = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
        persists = bool(loaders) and bool(getattr(loaders[0], "persistent_workers", False))
        to_read = left if persists else batches - done if batches is not None else left
        if to_read is not None and isinstance(size, int) and workers:
            known["samples_ahead"] = max(to_read, 0) * size // workers
        return known
