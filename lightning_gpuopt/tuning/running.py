"""A loader that runs, under the policy of :mod:`~lightning_gpuopt.tuning.live`: its fetches timed, its workers changed.

The iterators that a loader hands out stay the same objects, with a ``__next__`` of ours around their own. While there
is nothing to look at, that is a counter that goes down.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.timeline.queues import batches_there, in_the_making, lies_ready
from lightning_gpuopt.timeline.worker_clock import nbytes_of
from lightning_gpuopt.tuning.caps import Cap, Room, room, worker_cap, worker_memory
from lightning_gpuopt.tuning.live import LivePolicy, Seen
from lightning_gpuopt.tuning.model import receive_cost, taking
from lightning_gpuopt.tuning.resize import ResizableIterator, ResizeUnsupported, adopt

log = logging.getLogger(__name__)

_PAUSE: Final = 4.0
"""A step whose own work takes so many times the median has a validation, a checkpoint or the like in it."""

_USUAL: Final = 0.75
"""Pauses in a quarter of the steps are none: they belong to training's pace, as where gradients accumulate."""

_NEVER: Final = 1 << 60


class FetchMeter:
    """Times the fetches of one loader, whichever iterator they come from.

    Args:
        skip: fetches to let pass first.
        window: fetches to look at then.
        clock: seconds.

    Attributes:
        asleep: fetches to let pass.
        seen: the window that is complete; None before it is.
    """

    def __init__(self, skip: int, window: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.begin(skip, window)

    def begin(self, skip: int, window: int) -> None:
        """Let ``skip`` fetches pass, then look at ``window`` steps."""
        self.asleep = skip
        self.seen: Seen | None = None
        self._window = window
        self._forget()

    def sleep(self) -> None:
        """Look at nothing until :meth:`begin`."""
        self.begin(_NEVER, self._window)

    def epoch_begins(self, skip: int) -> None:
        """A new iterator delivers: its first batches are no measure, nor is the time between the epochs."""
        if self.seen is None:
            self.asleep = max(self.asleep, skip)
            self._last: float | None = None

    def _forget(self) -> None:
        self._last = None
        self._waits: list[float] = []
        self._owns: list[float] = []
        self._ready: list[float] = []
        self._busy: list[int] = []
        self._cpu_began: tuple[float | None, float] | None = None
        self._bytes = 0.0

    def fetch(self, iterator: Any, take: Callable[[], Any]) -> Any:
        """Take a batch, and note how long that took."""
        workers = getattr(iterator, "_workers", ())
        if self._cpu_began is None:
            self._cpu_began = _cpu_s(workers), time.process_time()
        ready, busy = lies_ready(iterator), in_the_making(iterator)
        began = self._clock()
        batch = take()
        ended = self._clock()
        last, self._last = self._last, ended
        if last is None:
            self._bytes = float(nbytes_of(batch))
            self._cpu_began = _cpu_s(workers), time.process_time()
            return batch
        self._waits.append(ended - began)
        self._owns.append(began - last)
        if ready:
            self._ready.append(ended - began)
        if busy is not None:
            self._busy.append(busy)
        if len(self._waits) >= self._window:
            self.seen = self._close(workers)
            self._forget()
            self.asleep = _NEVER
        return batch

    def _close(self, workers: Any) -> Seen:
        steps = len(self._waits)
        # What a batch that lay ready took to take is no wait.
        taking_s = taking(self._ready) if self._ready else receive_cost(self._bytes)[1] if workers else 0.0
        wait_s = fmean(max(wait - taking_s, 0.0) for wait in self._waits)
        usual_s = median(self._owns)
        usual = [own for own in self._owns if own <= _PAUSE * usual_s]
        own_s = fmean(usual if len(usual) > _USUAL * steps else self._owns)
        assert self._cpu_began is not None
        cpu_before, process_before = self._cpu_began
        cpu_after, process_s = _cpu_s(workers), time.process_time() - process_before
        worker_cpu_s = None if cpu_before is None or cpu_after is None else max(cpu_after - cpu_before, 0.0) / steps
        consumer_cpu_s = process_s / steps
        busy = fmean(self._busy) if self._busy else None
        return Seen(own_s + fmean(self._waits), wait_s, busy, worker_cpu_s, consumer_cpu_s, self._bytes)


class _Timed:
    """In front of an iterator's class: times its fetches."""

    _gpuopt_meter: FetchMeter

    def __next__(self) -> Any:
        meter = self._gpuopt_meter
        if meter.asleep > 0:
            meter.asleep -= 1
            return super().__next__()  # type: ignore[misc]
        return meter.fetch(self, super().__next__)  # type: ignore[misc]


@cache
def _timed(kind: type) -> type:
    return type(f"Timed{kind.__name__}", (_Timed, kind), {})


class _Arrival(FetchMeter):
    """The meter of a new iterator: at its first fetch it is clear who the consumer is.

    Args:
        running: whose iterator it is, if the consumer is the one that is looked at.
    """

    def __init__(self, running: RunningLoader) -> None:
        super().__init__(0, 1)
        self._running = running

    def fetch(self, iterator: Any, take: Callable[[], Any]) -> Any:
        """Take a batch, with the meter that is to stay."""
        try:
            meter = self._running.arrive(iterator)
        except Exception:  # training gets its batch all the same
            log.debug("an iterator could not be taken in", exc_info=True)
            meter = FetchMeter(_NEVER, 1)
        iterator._gpuopt_meter = meter
        if meter.asleep > 0:
            meter.asleep -= 1
            return take()
        return meter.fetch(iterator, take)


class RunningLoader:
    """A DataLoader over a map-style dataset, whose workers follow what its consumer needs.

    Args:
        loader: the loader, before it is iterated.
        policy: decides.
        max_num_workers: never more than so many; None: as :func:`~lightning_gpuopt.tuning.caps.worker_cap` has it.
        local_world_size: ranks on this node.
        depth: batches that the loader asks for ahead as the user has set it; None: as it is now.
        consumes: whether a new iterator is the consumer's own; somebody else may iterate the loader, too. It is given
            that iterator, and the one that the consumer has now.

    Attributes:
        frozen: whether nothing is looked at any more.
        problem: why the running iterator cannot be changed; None where it can.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        policy: LivePolicy,
        max_num_workers: int | None = None,
        local_world_size: int = 1,
        depth: int | None = None,
        consumes: Callable[[Any, Any], bool] = lambda iterator, now: True,
    ) -> None:
        self.loader = loader
        self.policy = policy
        self.meter = FetchMeter(policy.skip, policy.window)
        self.problem: str | None = None
        self.frozen = False
        self._max_num_workers = max_num_workers
        self._local_world_size = local_world_size
        self._consumes = consumes
        # Only the consumer keeps an iterator: its workers end when that lets go of it.
        self._current: weakref.ref[Any] | None = None
        self._new: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pending = False
        self._base_seed: int | None = None
        self._depth = depth_of(loader) if depth is None else depth

    @property
    def _iterator(self) -> Any:
        """What the consumer fetches from; None before its first fetch, and when it has let go of it."""
        return None if self._current is None else self._current()

    def new_iterator(self, create: Callable[[], Any]) -> Any:
        """In place of the loader's ``_get_iterator``: its own iterator, timed and if possible resizable.

        Args:
            create: the loader's own ``_get_iterator``.
        """
        with warnings.catch_warnings():
            if self.loader.num_workers > 1:  # measured: no reason to warn of more workers than CPUs
                warnings.filterwarnings("ignore", message="This DataLoader will create")
            iterator = create() if self._base_seed is None else self._create_as_if_persistent(create)
        self._watch(iterator)
        return iterator

    def arrive(self, iterator: Any) -> FetchMeter:
        """A new iterator is asked for its first batch.

        Returns:
            Its meter from now on.
        """
        self._new.discard(iterator)
        if not self._consumes(iterator, self._iterator):
            return FetchMeter(_NEVER, 1)
        self._current = weakref.ref(iterator)
        # A choice may have been restored since it was made.
        differs = getattr(iterator, "_num_workers", self.loader.num_workers) != self.loader.num_workers
        if differs and isinstance(iterator, ResizableIterator):
            iterator.resize(self.loader.num_workers)
            differs = False
        if differs != self._pending:
            self._pending = differs
            self.look()
        self.epoch_begins()
        return self.meter

    def _create_as_if_persistent(self, create: Callable[[], Any]) -> Any:
        """A new iterator draws its base seed, which one that went on would not have done: not from the user's state."""
        generator, seed = self.loader.generator, self._base_seed
        assert seed is not None
        self.loader.generator = torch.Generator().manual_seed(seed)
        try:
            return create()
        finally:
            self.loader.generator, self._base_seed = generator, None

    def take_over(self, old: RunningLoader) -> None:
        """Go on where the loader that this one replaces has stopped."""
        assign(self.loader, old.loader.num_workers)
        self.meter, self.frozen, self._pending, self._depth = old.meter, old.frozen, old._pending, old._depth
        if self.meter.seen is not None:  # and not acted on: it was not in training that the old one was iterated last
            self.look()

    def epoch_begins(self) -> None:
        """The next fetches are the first of an epoch."""
        self.meter.epoch_begins(max(self.policy.num_workers, 1))

    def _watch(self, iterator: Any) -> None:
        self.problem = None
        try:
            try:
                if (reason := self._why_not_live()) is not None:
                    raise ResizeUnsupported(reason)
                adopt(iterator, self.loader)._gpuopt_depth = self._depth
            except ResizeUnsupported as unsupported:
                self.problem = str(unsupported)
            self._new.add(iterator)
            iterator._gpuopt_meter = _Arrival(self)
            kind: type = type(iterator)
            iterator.__class__ = _timed(kind)
        except Exception as error:  # such as a class whose objects cannot take another
            log.debug("an iterator could not be watched", exc_info=True)
            self.problem = str(error)

    def _why_not_live(self) -> str | None:
        """Why workers should not be started in the running epoch; None where they may."""
        context: Any = self.loader.multiprocessing_context or torch.multiprocessing.get_context()
        if context.get_start_method() != "fork":
            return f"workers started by {context.get_start_method()!r} take seconds, and training would wait for them"
        if self.loader.timeout:
            return f"the first batches of new workers may take longer than the loader's timeout={self.loader.timeout:g}"
        return None

    def decide(self) -> int | None:
        """Take in what was seen since the last time: the number of workers to have, or None before there is news."""
        seen = self.meter.seen
        if seen is None:
            return None
        wanted = self.policy.decide(seen, self.cap(seen.batch_bytes))
        self.look()
        return wanted

    def freeze(self) -> None:
        """Look at nothing from now on: the choice is made."""
        self.frozen = True
        self.meter.sleep()

    def look(self) -> None:
        """Look as the policy would; at nothing while a change waits for the next epoch."""
        if self._pending:
            self.meter.sleep()
        elif not self.frozen:
            self.meter.begin(self.policy.skip, self.policy.window)

    def cap(self, batch_bytes: float) -> Cap:
        """The most workers that fit here now, those that run counted in."""
        running = self._iterator
        workers = running._workers if isinstance(running, ResizableIterator) else []
        factor = int(self.loader.prefetch_factor or 2)
        one = worker_memory(workers[0].pid or 0) if workers else None
        running_here = len(workers) * self._local_world_size
        batches = int((batches_there(running) or 0) * batch_bytes) * self._local_world_size
        free = room()
        memory, shared = free.memory_bytes, free.shared_memory_bytes
        return worker_cap(
            Room(
                free.cpus,
                None if memory is None else memory + running_here * (one or 0) + batches,
                None if shared is None else shared + batches,
            ),
            max_num_workers=self._max_num_workers,
            local_world_size=self._local_world_size,
            worker_bytes=one,
            batch_bytes=batch_bytes or None,
            prefetch_factor=factor,
        )

    def apply(self, num_workers: int) -> int:
        """Have so many workers: now where that can be done, else from the next iterator on.

        Returns:
            The number that runs, or will run.
        """
        iterator = self._iterator
        if isinstance(iterator, ResizableIterator):
            num_workers = iterator.resize(num_workers)
        elif num_workers != self.loader.num_workers:
            assign(self.loader, num_workers)
            self._pending = iterator is not None
        if num_workers != self.policy.num_workers:
            self.policy.set(num_workers)
        self.look()
        return num_workers

    def before_epoch(self) -> None:
        """Persistent workers of another number than the loader should have must go before it is iterated again."""
        iterator: Any = getattr(self.loader, "_iterator", None)
        if not hasattr(iterator, "_shutdown_workers") or iterator in self._new:  # the loop is about to fetch from it
            return
        ahead = self.loader.prefetch_factor or iterator._prefetch_factor
        if isinstance(iterator, ResizableIterator):
            iterator._prefetch_factor = ahead
        if (iterator._num_workers, iterator._prefetch_factor) != (self.loader.num_workers, ahead):
            iterator._shutdown_workers()
            self._base_seed = int(iterator._base_seed)
            self.loader._iterator = None

    def shut_down(self) -> None:
        """End the workers at once: training has failed, and what it failed with may keep the iterator alive."""
        for iterator in (self._iterator, *self._new):
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()


def depth_of(loader: DataLoader[Any]) -> int:
    """Batches that a loader asks for ahead."""
    return max(loader.num_workers * (loader.prefetch_factor or 2), 1)


def assign(loader: DataLoader[Any], num_workers: int) -> None:
    """Set a loader's ``num_workers``, and what goes with it."""
    loader.num_workers = num_workers
    if num_workers and loader.prefetch_factor is None:
        loader.prefetch_factor = 2


def _cpu_s(workers: Any, proc: Path = Path("/proc")) -> float | None:
    """CPU seconds of these processes' main threads; None where that cannot be read."""
    try:
        return sum(int((proc / str(each.pid) / "schedstat").read_text().split()[0]) for each in workers) / 1e9
    except (OSError, ValueError, IndexError):
        return None
