"""Observes the training loaders of one ``fit``, of whatever kind: their workers, their queues, and the host."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_gpuopt.compat.dataloader import numbered_workers, parts, running_workers, time_fetches, worker_pids
from lightning_gpuopt.compat.lightning import (
    Trainer,
    replace_train_iterator,
    train_iterator_is,
    train_iterators,
    train_loader_keys,
    train_loaders,
)
from lightning_gpuopt.detector.downloads import DownloadWatch
from lightning_gpuopt.loaders.describe import describe
from lightning_gpuopt.loaders.helpers import helpers_of
from lightning_gpuopt.loaders.registry import LoaderRegistry, SeenLoader
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.loading import LoaderFacts, LoaderReading, Pipelines, WorkerTimes
from lightning_gpuopt.telemetry.host import HostWatch
from lightning_gpuopt.timeline.loader_facts import facts_of, pipeline_of
from lightning_gpuopt.timeline.probe import Probe
from lightning_gpuopt.timeline.queues import QueueProbe
from lightning_gpuopt.timeline.worker_clock import WorkerClock, watch_workers
from lightning_gpuopt.timeline.worker_stacks import WorkerStacks
from lightning_gpuopt.tuning.managed import changes_of
from lightning_gpuopt.utils.weak_reference import weakly

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Watched:
    seen: SeenLoader
    number: int  # in the order in which loaders were seen
    clock: WorkerClock | None = None  # in its workers; None if nothing can be timed there
    loader: LoaderDescription = field(default_factory=LoaderDescription)  # as of its current iterator
    # for which the training process waited, if there are several
    waited_ns: list[int] = field(default_factory=lambda: [0])
    # the same for the DataLoader inside a loader of another kind
    inner_ns: list[int] = field(default_factory=lambda: [0])
    rows: int = 1  # as many workers' rows of the clock are in use
    changes: tuple[dict[str, str], str | None] | None = None  # what ``changes_of`` says; None before it was asked
    undo: Callable[[], None] = field(default=lambda: None, repr=False)  # takes the clock away

    def look_at_changes(self) -> None:
        """See which settings may be changed, and when; once, since much of the dataset is looked at for it."""
        if self.changes is None and self.seen.inner is not None:
            self.changes = changes_of(self.seen.inner)

    def reading(self, *, several: bool) -> LoaderReading:
        facts = facts_of([self.loader])
        if self.changes is not None:
            self.loader = replace(self.loader, changes=self.changes[0], unshared=self.changes[1])
        wraps = self.seen.inner is not None and self.seen.inner is not self.seen.loader
        return LoaderReading(
            self.loader,
            facts,
            self.clock.times(max(self.rows, facts.num_workers or 1)) if self.clock is not None else WorkerTimes(),
            self.waited_ns[0] / 1e9 if several else None,
            self.inner_ns[0] / 1e9 if wraps else None,
        )


class _Running(NamedTuple):
    """A loader's iterators: the one that the loop asks, and that of the DataLoader which makes the batches."""

    watched: _Watched
    outer: Callable[[], Any]  # held weakly
    inner: Callable[[], Any]  # held weakly; None if that is not known
    workers: tuple[int, int]  # workers behind ``inner``, and iterators of torch's that they are in


def _workers_behind(watched: _Watched, inner: Any) -> tuple[int, int]:
    return (0, 0) if inner is None else (running_workers(watched.seen.inner, inner), len(parts(inner)))


class _TimedIterator:
    """Stands in for an iterator among several, and adds up how long the loop waits for it."""

    def __init__(self, iterator: Any, spent_ns: list[int]) -> None:
        self.iterator = iterator
        self._spent_ns = spent_ns

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter_ns()
        try:
            return next(self.iterator)
        finally:
            self._spent_ns[0] += time.perf_counter_ns() - began

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)


class LoaderWatch(Probe):
    """Wraps each training loader's ``collate_fn`` as it passes, from ``setup`` on; looks at its queues and workers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._undo: list[Callable[[], None]] = []
        self._watched: list[_Watched] = []
        self._current: list[_Watched] = []
        self._validation: _Watched | None = None
        self._seen = 0
        self._unwatched = False
        self._running: list[_Running] = []
        self._host = HostWatch(local_ranks=trainer.num_devices)
        self.queues = QueueProbe()
        self._downloads = DownloadWatch()
        self.facts = LoaderFacts()
        self.threads: tuple[int, ...] = ()  # identifiers of those that loaders of other kinds have in this process
        self._registry = LoaderRegistry.of(trainer)
        self._undo.append(self._registry.subscribe(self, trainer))

    @override
    def restart(self) -> None:
        self._host.reset()

    @override
    def read(self) -> dict[str, Any]:
        return {
            "loaders": self.readings(),
            "pipelines": self._pipelines(),
            "validation": self._validation.reading(several=False) if self._validation is not None else None,
            "queues": self.queues.times(),
        }

    @override
    def known(self) -> dict[str, Any]:
        return {"loader": self.facts, "host": self._host.activity()}

    def start(self) -> None:
        self._host.start()
        self._undo.append(self._host.stop)

    def release(self) -> None:
        """The epoch has ended, and with it what its iterators are asked for."""
        self.queues.watch([])
        for index, each in enumerate(train_iterators(self._trainer)):
            if isinstance(each, _TimedIterator):
                replace_train_iterator(self._trainer, index, each.iterator)
        self._running.clear()

    def epoch_begins(self) -> None:
        """Find the new epoch's iterators, and perhaps new loaders and workers."""
        loaders, keys = train_loaders(self._trainer), train_loader_keys(self._trainer)
        self._registry.forget_dropped()
        self._current = [self._find(each) for each in loaders]
        for dropped in [each for each in self._watched if each not in self._current]:
            dropped.undo()
        self._watched = list(self._current)
        self._running = []
        threads: list[Any] = []
        pids: list[int] = []
        for index, (watched, iterator) in enumerate(zip(self._current, train_iterators(self._trainer), strict=False)):
            running = self._follow(index, watched, iterator, several=len(loaders) > 1)
            self._running.append(running)
            pids += worker_pids([running.inner()])
        inner = {id(each.watched): each.inner() for each in self._running}
        for watched, key in zip(self._current, keys, strict=True):
            watched.loader = describe(watched.seen.loader, inner.get(id(watched)), key=key)
            self._downloads.begin(watched.loader.caches)
        for running in self._running:
            if running.watched.loader.kind in ("nodes", "iterable"):
                own = helpers_of(running.watched.seen.loader, running.outer())
                threads += own[0]
                pids += [each.pid for each in own[1]]
                running.watched.loader = _with_helpers(running.watched.loader, *own)
        self.facts = facts_of([each.loader for each in self._current])
        self.threads = tuple(each.ident for each in threads)
        self.queues.watch([each.inner() for each in self._running])
        self._host.workers(pids, [each.native_id for each in threads])

    def _find(self, loader: Any) -> _Watched:
        known = [each for each in self._watched if each.seen.loader is loader]
        if known:
            return known[0]
        self._seen += 1
        return _Watched(SeenLoader(loader, is_training=True), self._seen)

    def _follow(self, index: int, watched: _Watched, outer: Any, *, several: bool) -> _Running:
        is_torchs = hasattr(outer, "_num_workers")
        inner = outer if is_torchs else watched.seen.iterator
        if not is_torchs and inner is not None:
            time_fetches(inner, watched.inner_ns)
        is_timed = not several or isinstance(outer, _TimedIterator)
        if not is_timed and not (is_torchs and time_fetches(outer, watched.waited_ns)):
            outer = _TimedIterator(outer, watched.waited_ns)
            replace_train_iterator(self._trainer, index, outer)
        workers = _workers_behind(watched, inner)
        watched.rows = max([watched.rows, *(number + 1 for number, _ in numbered_workers(inner))])
        return _Running(watched, weakly(outer), weakly(inner), workers)

    def resized(self) -> bool:
        """Whether other workers run, or another iterator, than at the last :meth:`epoch_begins`; costs about 1 µs."""
        for index, (watched, outer, behind, workers) in enumerate(self._running):
            asked, inner = outer(), behind()
            if not train_iterator_is(self._trainer, index, asked):
                return True
            if inner is not None and _workers_behind(watched, inner) != workers:
                return True
            if inner is not asked and watched.seen.iterator not in (inner, None):
                return True
        return False

    def process(self) -> dict[str, float]:
        return self._host.process

    def readings(self) -> dict[int, LoaderReading]:
        several = len(self._watched) > 1
        return {each.number: each.reading(several=several) for each in self._watched}

    def with_changes(self, loader: LoaderDescription) -> LoaderDescription:
        """A training loader's description, as of :meth:`readings`, with which of its settings may be changed."""
        watched = next((each for each in self._watched if each.loader.key == loader.key), None)
        if watched is None:
            return loader
        watched.look_at_changes()
        return watched.reading(several=False).loader

    def busiest(self, key: str = "") -> tuple[int, WorkerStacks, int] | None:
        """The loader whose workers were busiest: number, stacks, number of workers; an empty ``key`` is any loader."""
        readings = {
            number: each
            for number, each in self.readings().items()
            if each.facts.num_workers and key in ("", each.loader.key)
        }
        for number in sorted(readings, key=lambda number: -readings[number].workers.busy_s):
            stacks = self.stacks_of(number)
            if stacks is not None:
                return number, stacks, readings[number].facts.num_workers or 1
        return None

    def stacks_of(self, number: int) -> WorkerStacks | None:
        """The sampler of the stacks of a loader's workers, by its number; None if the loader is gone."""
        clocks = (each.clock for each in self._watched if each.number == number)
        return next((clock.stacks for clock in clocks if clock is not None), None)

    def _pipelines(self) -> dict[int, Pipelines]:
        readings = ((each.number, pipeline_of(each.seen.loader)) for each in self._watched)
        return {number: reading for number, reading in readings if reading is not None}

    @property
    @override
    def notes(self) -> list[str]:
        notes = [note for each in self._current for note in each.loader.notes] + self._downloads.notes()
        if self._unwatched:
            notes.append(
                "A training loader could not be timed inside its workers: it is not a DataLoader, or it was already "
                "running."
            )
        return notes

    def describe_workers(self) -> list[tuple[int, str]]:
        """Process id and current state of each worker."""
        described: list[tuple[int, str]] = []
        for each in self._running:
            clock = each.watched.clock
            for number, worker in numbered_workers(each.inner()):
                described.append((worker.pid, clock.doing(number) if clock is not None else "is not monitored"))
        return described

    @override
    def close(self) -> None:
        """Remove our hooks and drop loaders and iterators: a reference of ours would keep workers alive. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self.release()
        for each in (*self._watched, *filter(None, [self._validation])):
            each.undo()
        self._watched.clear()
        self._current.clear()
        self._validation = None
        self.threads = ()

    def loader_seen(self, seen: SeenLoader) -> None:
        self._seen += 1
        watched = _Watched(seen, self._seen)
        if not seen.is_training:
            self._see_validation(watched)
            return
        self._watched.append(watched)
        try:
            if pipeline_of(seen.loader) is not None:
                return
            found = self._clock_of(seen.inner)
        except Exception:  # whatever a loader of somebody's own does not like about it
            log.debug("a loader could not be watched", exc_info=True)
            found = None
        if found is None:
            self._unwatched = True
            return
        watched.clock, watched.undo = found

    def _clock_of(self, loader: Any) -> tuple[WorkerClock, Callable[[], None]] | None:
        """The clock in a loader's workers: a new one, or the one of the validation that reads the same loader."""
        validation = self._validation
        if validation is not None and validation.clock is not None and validation.seen.inner is loader:
            validation.undo()
        return watch_workers(loader)

    def _see_validation(self, watched: _Watched) -> None:
        inner = watched.seen.inner
        if inner is None or not (self._trainer.validating or self._trainer.sanity_checking):
            return
        if self._validation is not None:
            self._validation.undo()
        self._validation = None
        if inner.num_workers and not inner.persistent_workers and (found := watch_workers(inner)) is not None:
            watched.clock, watched.undo = found
            watched.loader = LoaderDescription("torch", key="validation", num_workers=inner.num_workers)
            self._validation = watched


def _with_helpers(loader: LoaderDescription, threads: list[Any], processes: list[Any]) -> LoaderDescription:
    """An iterable of somebody's own by who works for it, as far as that is seen."""
    if loader.kind != "iterable" or not (threads or processes):
        return loader
    return replace(loader, work="processes" if processes else "threads")
