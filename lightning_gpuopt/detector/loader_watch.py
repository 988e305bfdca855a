"""Observes the training loaders of one ``fit``: their workers, their queues, and the host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import running_workers, worker_pids
from lightning_gpuopt.compat.lightning import Trainer, train_iterators, train_loaders
from lightning_gpuopt.loaders.registry import LoaderRegistry, SeenLoader
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.loading import LoaderFacts, Pipelines, WorkerTimes
from lightning_gpuopt.telemetry.host import HostWatch
from lightning_gpuopt.telemetry.process import ProcessReading
from lightning_gpuopt.timeline.loader import facts_of, pipeline_of
from lightning_gpuopt.timeline.queues import QueueProbe
from lightning_gpuopt.timeline.worker_clock import TimedCollate, watch_workers
from lightning_gpuopt.timeline.worker_stacks import WorkerStacks

log = logging.getLogger(__name__)


class LoaderWatch:
    """Wraps each training loader's ``collate_fn`` as it passes, and looks at its queues and workers.

    Args:
        trainer: the Trainer, in ``setup``: before it has asked for its loaders.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._undo: list[Callable[[], None]] = []
        self._clocks: list[tuple[Any, TimedCollate]] = []
        self._pipelines: dict[int, Any] = {}
        self._pipelines_seen = 0
        self._unwatched = False
        self._idle_workers: list[str] = []
        self._running: list[tuple[int, Any, Any, int]] = []
        self._host = HostWatch(local_ranks=trainer.num_devices)
        self.queues = QueueProbe()
        self.facts = LoaderFacts()
        self._undo.append(LoaderRegistry.of(trainer).subscribe(self, trainer))

    def start(self) -> None:
        """Begin to read the host; called when training starts."""
        self._host.start()
        self._undo.append(self._host.stop)

    def release(self) -> None:
        """Drop our references to the ended epoch's iterators, so that their workers can end."""
        self.queues.watch([])
        self._running.clear()

    def epoch_begins(self) -> None:
        """Find the new epoch's iterators, and perhaps new loaders and workers."""
        loaders, iterators = train_loaders(self._trainer), train_iterators(self._trainer)
        self.facts = facts_of(loaders, iterators)
        self._running = [
            (index, loader, iterator, running_workers(loader, iterator))
            for index, (loader, iterator) in enumerate(zip(loaders, iterators, strict=False))
            if isinstance(loader, DataLoader)
        ]
        self._clocks = [(each, clock) for each, clock in self._clocks if any(each is loader for loader in loaders)]
        self._pipelines = {
            key: each for key, each in self._pipelines.items() if any(each is loader for loader in loaders)
        }
        self._idle_workers = [note for _, loader, _, count in self._running if (note := _without_work(loader, count))]
        self.queues.watch(iterators)
        self._host.workers(worker_pids(iterators))

    def resized(self) -> bool:
        """Whether other workers run, or another iterator, than at the last :meth:`epoch_begins`; costs about 1 µs."""
        now = train_iterators(self._trainer)
        for index, loader, iterator, count in self._running:
            if index < len(now) and now[index] is not iterator:
                return True
            if running_workers(loader, iterator) != count:
                return True
        return False

    def reset_host(self) -> None:
        """Reset the host's figures."""
        self._host.reset()

    def host(self) -> HostActivity:
        """What the host did since the last reset."""
        return self._host.activity()

    def process(self) -> ProcessReading:
        """The last reading of this process: memory, files, threads."""
        return self._host.process

    def workers(self) -> dict[int, tuple[LoaderFacts, WorkerTimes]]:
        """What the workers of each loader did since it was first seen, with the loader's settings."""
        readings: dict[int, tuple[LoaderFacts, WorkerTimes]] = {}
        iterators = {id(loader): iterator for _, loader, iterator, _ in self._running}
        for loader, clock in self._clocks:
            facts = facts_of([loader], [iterators.get(id(loader))])
            readings[id(clock)] = (facts, clock.times(facts.num_workers or 1))
        return readings

    def busiest(self) -> tuple[int, WorkerStacks, int] | None:
        """The loader whose workers were busiest: key, stacks, and number of workers."""
        readings = self.workers()
        with_workers = {key: each for key, each in readings.items() if each[0].num_workers}
        for key in sorted(with_workers, key=lambda key: -with_workers[key][1].busy_s):
            stacks = self.stacks_of(key)
            if stacks is not None:
                return key, stacks, with_workers[key][0].num_workers or 1
        return None

    def stacks_of(self, key: int) -> WorkerStacks | None:
        """The sampler of the stacks of a loader's workers; None where the loader is gone.

        Args:
            key: of :meth:`workers`.
        """
        return next((clock.gpuopt_stacks for _, clock in self._clocks if id(clock) == key), None)

    def pipelines(self) -> dict[int, Pipelines]:
        """What each loader that decodes in a pipeline of its own has done so far, by the order in which it was seen."""
        readings = ((key, pipeline_of(loader)) for key, loader in self._pipelines.items())
        return {key: reading for key, reading in readings if reading is not None}

    def notes(self) -> list[str]:
        """What could not be measured, and workers that have nothing to do."""
        notes = list(self._idle_workers)
        if self._unwatched:
            notes.append(
                "A training loader could not be timed inside its workers: it is no DataLoader, or already ran."
            )
        return notes

    def describe_workers(self) -> list[tuple[int, str]]:
        """Process id and current state of each worker."""
        described: list[tuple[int, str]] = []
        clocks = {id(loader): clock for loader, clock in self._clocks}
        loaders = train_loaders(self._trainer)
        for loader, iterator in zip(loaders, train_iterators(self._trainer), strict=False):
            clock = clocks.get(id(loader))
            for number, pid in enumerate(worker_pids([iterator])):
                described.append((pid, clock.doing(number) if clock is not None else "is not watched"))
        return described

    def undo(self) -> None:
        """Remove our hooks and drop loaders and iterators; may be called more than once.

        Workers end when the last reference to their iterator goes: none of ours may keep them.
        """
        while self._undo:
            self._undo.pop()()
        self.release()
        self._clocks.clear()
        self._pipelines.clear()

    def loader_seen(self, seen: SeenLoader) -> None:
        """Watch a loader; the registry calls it."""
        if not seen.is_training:
            return
        loader = seen.loader
        try:
            if pipeline_of(loader) is not None:
                self._pipelines[self._pipelines_seen] = loader
                self._pipelines_seen += 1
                return
            watched = watch_workers(loader)
        except Exception:  # whatever a loader of somebody's own does not like about it
            log.debug("a loader could not be watched", exc_info=True)
            watched = None
        if watched is None:
            self._unwatched = True
            return
        clock, undo = watched
        self._clocks.append((loader, clock))
        self._undo.append(undo)


def _without_work(loader: DataLoader[Any], workers: int) -> str | None:
    """A note if a loader has fewer batches than workers."""
    try:
        batches = len(loader)
    except TypeError:  # an iterable dataset need not have a length
        return None
    except Exception:  # a dataset of somebody's own
        log.debug("the length of a loader is not known", exc_info=True)
        return None
    if not 0 < batches < workers:
        return None
    return (
        f"An epoch has {batches} batches, fewer than the {workers} workers of its loader: {workers - batches} of them "
        f"are started for nothing. num_workers={batches} is enough."
    )
