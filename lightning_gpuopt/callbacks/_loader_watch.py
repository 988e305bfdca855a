"""The training loaders of one ``fit`` under observation: inside their workers, at their queues, and on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gpuopt._lightning import Trainer, shadow, train_iterators, train_loaders
from lightning_gpuopt.telemetry.host import HostActivity, HostWatch
from lightning_gpuopt.timeline.loader import LoaderFacts, facts_of, worker_pids
from lightning_gpuopt.timeline.queues import QueueProbe, QueueTimes
from lightning_gpuopt.timeline.worker_clock import TimedCollate, WorkerTimes, watch_workers


class LoaderWatch:
    """Wraps each training loader's ``collate_fn`` as it passes, and looks at its queues and workers.

    Args:
        trainer: the Trainer, in ``setup``: before it has asked for its loaders.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._undo: list[Callable[[], None]] = []
        self._clocks: list[tuple[Any, TimedCollate]] = []
        self._unwatched = False
        self._host = HostWatch()
        self._retired = WorkerTimes()
        self.queues = QueueProbe()
        self.facts = LoaderFacts()
        strategy = trainer.strategy
        process = strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            processed = process(dataloader)
            if trainer.training:
                self._watch(processed)
            return processed

        self._undo.append(shadow(strategy, "process_dataloader", process_dataloader))

    def start(self) -> None:
        """Begin to read the host; called when training starts."""
        self._host.start()
        self._undo.append(self._host.stop)

    def epoch_begins(self) -> None:
        """New iterators, and perhaps new workers, feed the loop."""
        self.facts = facts_of(train_loaders(self._trainer))
        iterators = train_iterators(self._trainer)
        self.queues.watch(iterators)
        self._host.workers(worker_pids(iterators))

    def reset_host(self) -> None:
        """Forget what the host did so far."""
        self._host.reset()

    def host(self) -> HostActivity:
        """What the host did since the last reset."""
        return self._host.activity()

    def workers(self) -> WorkerTimes:
        """What the workers did since training started."""
        return sum((clock.times() for _, clock in self._clocks), self._retired)

    def queue_times(self) -> QueueTimes:
        """What the queues looked like since training started."""
        return self.queues.times()

    def notes(self) -> list[str]:
        """What could not be measured."""
        if self._unwatched:
            return ["A training loader could not be timed inside its workers: it is no DataLoader, or already ran."]
        return []

    def describe_workers(self) -> list[tuple[int, str]]:
        """Process id, and what it is doing, for each worker."""
        described: list[tuple[int, str]] = []
        clocks = {id(loader): clock for loader, clock in self._clocks}
        loaders = train_loaders(self._trainer)
        for loader, iterator in zip(loaders, train_iterators(self._trainer), strict=False):
            clock = clocks.get(id(loader))
            for number, pid in enumerate(worker_pids([iterator])):
                described.append((pid, clock.doing(number) if clock is not None else "is not watched"))
        return described

    def undo(self) -> None:
        """Take away all that was placed, and let go of loaders and iterators; may be called more than once.

        Workers end when the last reference to their iterator goes: none of ours may keep them.
        """
        while self._undo:
            self._undo.pop()()
        self.queues.watch([])
        self._retired = self.workers()
        self._clocks.clear()

    def _watch(self, loader: Any) -> None:
        current = {id(each) for each in train_loaders(self._trainer)}
        # a loader that was replaced (reload_dataloaders_every_n_epochs) has said all it will
        kept = []
        for each, clock in self._clocks:
            if id(each) in current or each is loader:
                kept.append((each, clock))
            else:
                self._retired += clock.times()
        self._clocks = kept
        watched = watch_workers(loader)
        if watched is None:
            self._unwatched |= not any(each is loader for each, _ in self._clocks)
            return
        clock, undo = watched
        self._clocks.append((loader, clock))
        self._undo.append(undo)
