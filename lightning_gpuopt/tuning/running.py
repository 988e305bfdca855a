"""A loader that runs, under the policy of :mod:`~lightning_gpuopt.tuning.live`: its workers are changed."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import (
    batches_there,
    end_persistent,
    is_like,
    is_plain,
    persistent_iterator,
    running_workers,
    set_prefetch,
    shut_down,
    workers_of,
)
from lightning_gpuopt.compat.lightning_loops import length_of
from lightning_gpuopt.measurements.loader_model import most_workers, net_saving
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.telemetry.memory_watch import MemoryWatch
from lightning_gpuopt.telemetry.resources import worker_memory
from lightning_gpuopt.tuning.caps import (
    FILES_OF_A_WORKER,
    THREADS_OF_A_WORKER,
    Cap,
    files_wanted,
    room,
    worker_cap,
)
from lightning_gpuopt.tuning.draws import DrawWatch
from lightning_gpuopt.tuning.live import LivePolicy
from lightning_gpuopt.tuning.meter import FetchMeter, place
from lightning_gpuopt.tuning.resize import ResizableIterator, ResizeUnsupported, adopt, first_workers
from lightning_gpuopt.tuning.sampler_draws import Order
from lightning_gpuopt.tuning.self_test import why_not_tried
from lightning_gpuopt.tuning.sharing import WorkersStart, forks, note_own_workers, why_not_shared
from lightning_gpuopt.tuning.stand_ins import Same

log = logging.getLogger(__name__)

_FITS_FOR_S: Final = 5.0
"""Seconds between two checks of the memory left for the workers."""


def _resizes(iterator: Any) -> bool:
    """Whether an iterator of our own changes the number of its workers itself."""
    return bool(getattr(type(iterator), "resizes", False))


class RunningLoader:
    """A DataLoader whose number of workers follows what its consumer needs.

    Args:
        loader: the loader, before it is iterated.
        policy: decides.
        max_num_workers: never more than so many; None: as :func:`~lightning_gpuopt.tuning.caps.worker_cap` has it.
        local_world_size: ranks on this node.
        depth: batches that the loader asks for ahead as the user has set it; 0: it has no workers.
        clock: seconds.
        own_workers: the number that the user has given it; None: what it has now.

    Attributes:
        no_more: why no worker may be added; None if one may.
        order: what was seen of its sampler.
        dataset_changes: whether the dataset was another one when the last two iterators were made.
        frozen: whether measuring has ended.
        problem: why the running iterator cannot be changed; None where it can.
        unknown: what the consumer fetches from, where that cannot be timed; None where it can.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        policy: LivePolicy,
        max_num_workers: int | None = None,
        local_world_size: int = 1,
        depth: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        own_workers: int | None = None,
    ) -> None:
        # Only the Trainer holds a loader, and only the consumer an iterator: their workers end when these drop them.
        self._loader = weakref.ref(loader)
        self._current: weakref.ref[Any] | None = None
        self._has_started = False
        self.policy = policy
        self.no_more: str | None = None
        self.dataset_changes = False
        self._own_workers = loader.num_workers if own_workers is None else own_workers
        self._began: float | None = None
        self._set_up: tuple[float, int] | None = None
        self._started: tuple[float, int] | None = None
        self.meter = FetchMeter(policy.skip, policy.window)
        self.problem: str | None = None
        self.unknown: str | None = None
        self.frozen = False
        self._max_num_workers = max_num_workers
        self._local_world_size = local_world_size
        self._waits_for_next = False
        self._base_seed: int | None = None
        self._depth = depth_of(loader) if depth is None else depth
        self._clock = clock
        self._fits_until = clock() + _FITS_FOR_S
        self._memory = MemoryWatch(lambda pid: worker_memory(pid))
        self._batch: tuple[float, int] = (0.0, 0)
        self._wait_s: float | None = None  # never measured under AutoFix, which judges by the epochs' set-ups
        self._grow_at_epochs: str | None = None
        self._later = 0
        self.order = Order()
        self._draws = DrawWatch()

    def is_of(self, loader: Any) -> bool:
        """Whether this is its loader; None: that is gone."""
        return self._loader() is loader

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader, which is there: whoever asks has seen it in the Trainer."""
        loader = self._loader()
        assert loader is not None
        return loader

    @property
    def num_workers(self) -> int:
        """The loader's number of workers, also once it is gone; where more wait for an epoch to end, as many."""
        loader = self._loader()
        return self._later or (self.policy.num_workers if loader is None else loader.num_workers)

    @property
    def start(self) -> WorkersStart | None:
        """What the running workers got a copy of; None before they were started."""
        start = WorkersStart.of(self.loader)
        is_of_now = self._has_started or persistent_iterator(self.loader) is not None
        return start if is_of_now else None

    @start.setter
    def start(self, start: WorkersStart) -> None:
        start.note(self.loader)
        self._has_started = True

    @property
    def _iterator(self) -> Any:
        """The consumer's iterator; None before its first step, and after the consumer has dropped it."""
        return None if self._current is None else self._current()

    def compare_dataset(self) -> None:
        """See whether the dataset has changed since the workers of the last iterator were started."""
        self.dataset_changes = self.start is not None and self.start.has_changed

    def note_start(self) -> WorkersStart:
        """Remember what the workers that are about to begin an epoch get a copy of."""
        self.start = start = WorkersStart(self.loader, self._own_workers)
        return start

    def new_iterator(self, create: Callable[[], Any]) -> Any:
        """Make an iterator; replaces the loader's ``_get_iterator``.

        Args:
            create: the loader's own ``_get_iterator``.
        """
        self._go_further()
        start = self.note_start()
        self._began = self._clock()
        note_own_workers(self.loader, self._own_workers)
        reason = why_not_shared(self.loader, start.state.held, workers=self._own_workers)
        if self.loader.num_workers > self._own_workers and reason is not None:
            self.no_more = reason
            assign(self.loader, self._own_workers)
            self.policy.set(self.loader.num_workers, settle=True)
        if self.loader.num_workers <= usable_cpus() or self.loader.num_workers == self._own_workers:
            iterator = self._create(create)
        else:
            # What is measured is no reason to warn of more workers than CPUs. Only then: each change of the filters
            # has Python show once more what it has shown once.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                iterator = self._create(create)
        self._started = self._clock() - self._began, self.loader.num_workers
        if is_plain(self.loader):
            self.order.watch(self.loader, iterator)
        return iterator

    def _go_further(self) -> None:
        """The user's own workers until an epoch has shown what the sampler reads; then those that are wanted."""
        loader, reason = self.loader, self.order.why_not_ahead(self.loader)
        if reason is None and self._later:
            assign(loader, min(self._later, self.cap().num_workers))
            self._later = 0
            self.look()
        elif reason is not None and loader.num_workers > self._own_workers:
            self.no_more = reason
            never = self.order.changes or self.order.is_unseen or not is_plain(loader)
            self._later = 0 if never else loader.num_workers
            assign(loader, self._own_workers)
            if self._later:
                self.meter.sleep()
            else:
                self.policy.set(loader.num_workers, settle=True)

    def _create(self, create: Callable[[], Any]) -> Any:
        if self._base_seed is not None:
            return self._create_as_if_persistent(create)
        if not self._depth and self.loader.num_workers and is_plain(self.loader):
            return self._create_first(create)
        return self._create_watched(create)

    def _create_watched(self, create: Callable[[], Any]) -> Any:
        """An iterator whose workers, where they are more than the user's, show it if they draw random numbers."""
        loader = self.loader
        if loader.num_workers <= self._own_workers or forks(loader) is not None or not is_plain(loader):
            return create()
        collate_fn = loader.collate_fn
        loader.collate_fn = self._draws.around(collate_fn)
        try:
            iterator = create()
        finally:
            loader.collate_fn = collate_fn
        if hasattr(iterator, "_collate_fn"):  # from which come workers that are added, and what is fetched here
            iterator._collate_fn = collate_fn
        return iterator

    def _create_first(self, create: Callable[[], Any]) -> Any:
        """An iterator with workers for a loader that had none, which goes on without where none can be started."""
        assert self.start is not None
        given = self.start.state
        states, generator = RandomStates(), self.loader.generator
        state = None if generator is None else generator.get_state()
        try:
            if (reason := why_not_tried()) is not None:
                raise ResizeUnsupported(reason)
            return self._create_watched(lambda: first_workers(self.loader, given))
        except Exception as error:  # another torch than expected; no more processes, memory or files
            trace = not isinstance(error, ResizeUnsupported)
            log.warning("no worker of the DataLoader could be started: %s", error, exc_info=trace)
            states.restore()
            if generator is not None and state is not None:
                generator.set_state(state)
            self.loader.num_workers, self.loader.prefetch_factor = 0, None
            self.policy.set(0, settle=True)
            self.freeze()
            return create()

    @property
    def fetches_here(self) -> bool:
        """Whether the training process makes the batches, since the dataset has changed under its workers."""
        return isinstance(self._iterator, ResizableIterator) and self._iterator.fetches_here

    @property
    def failure(self) -> str | None:
        """What became of a worker that was added; None where they all work."""
        return self._iterator.failure if isinstance(self._iterator, ResizableIterator) else None

    @property
    def draws(self) -> bool:
        """Whether an added worker has drawn random numbers."""
        return self._draws.seen or (isinstance(self._iterator, ResizableIterator) and self._iterator.draws)

    def _create_as_if_persistent(self, create: Callable[[], Any]) -> Any:
        """A new iterator draws a base seed, and iterates its sampler twice: one that continues does neither."""
        loader, seed = self.loader, self._base_seed
        assert seed is not None
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        before = {"generator": loader.generator, name: getattr(loader, name)}
        meanwhile: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed)}
        if is_plain(loader):
            meanwhile[name] = Same(iter(before[name]))
        vars(loader).update(meanwhile)
        try:
            iterator = self._create_watched(create)
        finally:
            vars(loader).update(before)
            self._base_seed = None
        if is_plain(loader):
            iterator._index_sampler = before[name]
        return iterator

    def follow(self, iterator: Any) -> None:
        """Time this iterator, and make it resizable if possible.

        Args:
            iterator: what the consumer has just fetched a batch from.
        """
        if self._iterator is iterator:
            return
        self._current = weakref.ref(iterator)
        self.problem = None
        if self._began is not None:
            self._set_up, self._began = (self._clock() - self._began, self.loader.num_workers), None
        self._look_at_memory()
        try:
            if (reason := self._why_not_live() or why_not_tried()) is not None:
                raise ResizeUnsupported(reason)
            adopted = iterator if _resizes(iterator) else adopt(iterator, self.loader, self._depth)
            if adopted._num_workers != self.loader.num_workers:  # a choice was restored since it was made
                adopted.resize(self.loader.num_workers)
        except ResizeUnsupported as unsupported:
            self.problem = str(unsupported)
        if not place(self.meter, iterator):  # such as a generator: its loader has an __iter__ of its own
            self.unknown = type(iterator).__name__
            return
        waited, self._waits_for_next = self._waits_for_next, False
        if running_workers(self.loader, iterator) != self.loader.num_workers:
            self._waits_for_next = True
        if waited != self._waits_for_next:
            self.look()
        self.meter.epoch_begins(max(self.policy.num_workers, 1))

    def gives_up_growing(self) -> bool:
        """Whether a worker that was started in mid-epoch has turned out not to work; says so once."""
        if self.failure is None or self._grow_at_epochs is not None:
            return False
        self._grow_at_epochs = self.failure
        self.problem = self._why_not_live()
        self.policy.set(self.loader.num_workers)
        self.look()
        return True

    def take_over(self, old: RunningLoader) -> None:
        """Continue with the number and policy of the loader that this one replaces."""
        assign(self.loader, old.num_workers if not old._later else self.loader.num_workers)
        self._own_workers = old._own_workers
        self.meter, self.frozen, self._depth = old.meter, old.frozen, old._depth
        self._waits_for_next, self._batch = old._waits_for_next, old._batch
        self._grow_at_epochs = old._grow_at_epochs
        self.order, self._later = old.order, old._later
        if self.meter.seen is not None:  # and not acted on: it was not in training that the old one was iterated last
            self.look()

    def _why_not_live(self) -> str | None:
        """Why workers should not be started in the running epoch; None where they may."""
        if self._grow_at_epochs is not None:
            return self._grow_at_epochs
        context: Any = self.loader.multiprocessing_context or torch.multiprocessing.get_context()
        if context.get_start_method() != "fork":
            return f"workers started by {context.get_start_method()!r} take seconds, and training would wait for them"
        if self.loader.timeout:
            return f"the first batches of new workers may take longer than the loader's timeout={self.loader.timeout:g}"
        return None

    def decide(self) -> int | None:
        """Take in what was measured since the last call: the number of workers to have; None where nothing was."""
        seen = self.meter.seen
        if seen is None:
            return None
        self._batch, self._wait_s = (seen.batch_bytes, seen.batch_tensors), seen.wait_s
        wanted = self.policy.decide(seen, self.cap())
        self.look()
        return wanted

    def freeze(self) -> None:
        """Stop measuring: the choice is final."""
        self.frozen = True
        self.meter.sleep()

    def look(self) -> None:
        """Measure the policy's next window; nothing while a change waits for the next epoch."""
        if self._waits_for_next or self._later:
            self.meter.sleep()
        elif not self.frozen:
            self.meter.begin(self.policy.skip, self.policy.window)

    def no_longer_fits(self) -> Cap | None:
        """Every few seconds, check the room for the workers: the most that fit if that is fewer than run, else None.

        Forked workers grow as they write to memory shared with their parent, be it only to count its
        references; others on the machine come and go.
        """
        now = self._clock()
        if now < self._fits_until:
            return None
        self._fits_until = now + _FITS_FOR_S
        cap = self.cap(keep=True)
        return cap if cap.num_workers < self.loader.num_workers else None

    def cap(self, *, keep: bool = False) -> Cap:
        """The most workers that fit here now, including the running ones.

        Args:
            keep: how many may stay; more may stay than may be started.
        """
        running = self._iterator
        workers = workers_of(running)
        factor = int(self.loader.prefetch_factor or 2)
        batch_bytes, tensors = self._batch
        self._look_at_memory()
        if not keep:
            self._memory.await_first()
        one = self._memory.largest
        here = len(workers) * self._local_world_size
        lying = int((batches_there(running) or 0) * batch_bytes) * self._local_world_size
        most = self._max_num_workers or most_workers(usable_cpus())
        free = room(files_wanted(most, factor, tensors))
        return worker_cap(
            replace(
                free,
                memory_bytes=None if free.memory_bytes is None else free.memory_bytes + here * (one or 0) + lying,
                shared_memory_bytes=None if free.shared_memory_bytes is None else free.shared_memory_bytes + lying,
                processes=None if free.processes is None else free.processes + here * THREADS_OF_A_WORKER,
                files=None if free.files is None else free.files + len(workers) * FILES_OF_A_WORKER,
            ),
            max_num_workers=self._max_num_workers,
            local_world_size=self._local_world_size,
            worker_bytes=one,
            batch_bytes=batch_bytes or None,
            batch_tensors=tensors,
            prefetch_factor=factor,
            keep=keep,
        )

    def _look_at_memory(self) -> None:
        """Have the memory of a worker read in the background, if that is due."""
        workers = workers_of(self._iterator)
        # the first has run for longest, the last is what another would be like
        self._memory.look([each.pid or 0 for each in {*workers[:1], *workers[-1:]}])

    def apply(self, num_workers: int) -> int:
        """Set the number of workers: now if possible, else from the next iterator on.

        Returns:
            The number that runs, or will run.
        """
        iterator = self._iterator
        fewer = iterator is not None and num_workers < running_workers(self.loader, iterator)
        if num_workers > self.loader.num_workers and not self._may_grow(num_workers):
            num_workers = self.loader.num_workers
            self.policy.set(num_workers, settle=True)
        if (isinstance(iterator, ResizableIterator) or _resizes(iterator)) and (fewer or self.problem is None):
            num_workers = iterator.resize(num_workers)
            assign(self.loader, num_workers)
            self._waits_for_next = running_workers(self.loader, iterator) != num_workers
        elif num_workers != self.loader.num_workers:
            assign(self.loader, num_workers)
            self._waits_for_next = iterator is not None
        if num_workers != self.policy.num_workers:
            self.policy.set(num_workers)
        self.look()
        return num_workers

    def _may_grow(self, num_workers: int) -> bool:
        """Whether workers may be added, now or with the next iterator; else ``no_more`` says why not."""
        if self.start is None and self._iterator is None and persistent_iterator(self.loader) is None:
            return True  # nothing runs yet
        if self.start is None:
            self.no_more = "its workers run since an earlier fit, and their dataset may be another by now"
            return False
        self.no_more = self.start.why_no_more()
        if self.no_more is None and self.order.changes:
            self.no_more = self.order.why_not_ahead(self.loader)
        if self.no_more is None and not self._pays(num_workers):
            self.no_more = (
                f"starting {num_workers} for every epoch would take longer than they save; give the DataLoader "
                "persistent_workers=True"
            )
        if self.no_more is None and self.start.has_changed:
            self.problem = "its dataset may have changed since they were started, and others would see it as it is now"
            if self.loader.persistent_workers:
                self.no_more = "its dataset may have changed since its workers were started, which persist"
        elif self.no_more is None and not self.order.is_known(self.loader):
            self.problem = (
                "its sampler may read what training writes, and is asked further ahead from an epoch's beginning"
            )
        elif self.no_more is None and self.problem is None and not self._pays_now(num_workers):
            self.problem = "the rest of the epoch is shorter than what starting them takes"
        return self.no_more is None

    def _pays_now(self, num_workers: int) -> bool:
        """Whether what is left of the epoch is long enough for workers that are started in it to pay."""
        iterator = self._iterator
        if self._started is None or self._wait_s is None or not isinstance(iterator, ResizableIterator):
            return True
        start_s, before = self._started
        left = iterator.batches_left
        return left is None or not before or left * self._wait_s > start_s * (num_workers - before) / before

    def _pays(self, num_workers: int) -> bool:
        """Whether workers that are not forked, and started anew for each epoch, save more than their start takes."""
        if forks(self.loader) is None or self.loader.persistent_workers or self._set_up is None or self._wait_s is None:
            return True
        set_up_s, before = self._set_up
        steps = length_of(self.loader)
        if steps is None or not before:
            return True
        cpus = max(usable_cpus() / self._local_world_size, 1.0)
        saved_s = net_saving(num_workers, before, step_s=self._wait_s, steps=steps, set_up_s=set_up_s, cpus=cpus)
        return saved_s > -set_up_s

    def before_epoch(self) -> None:
        """Drop an iterator with persistent workers, if their number or their copy of the dataset is out of date."""
        self.meter.epoch_begins(max(self.policy.num_workers, 1))
        iterator: Any = persistent_iterator(self.loader)
        if iterator is None or iterator is not self._iterator:  # the loop is about to fetch from it
            return
        resizable = isinstance(iterator, ResizableIterator)
        if resizable:
            set_prefetch(iterator, self.loader.prefetch_factor)
        if is_like(iterator, self.loader) and not (resizable and iterator.has_failed):
            return
        if self.start is None or self.start.has_changed:  # those that persist go on with what they were given
            assign(self.loader, running_workers(self.loader, iterator))
            self.policy.set(self.loader.num_workers, settle=True)
            return
        self._base_seed = end_persistent(self.loader)

    def let_go(self) -> None:
        """Have iterators leave the loader's ``num_workers`` alone from now on."""
        for iterator in (self._iterator, persistent_iterator(self.loader)):
            if isinstance(iterator, ResizableIterator):
                iterator.let_go()

    def done(self) -> None:
        """End with the fit: the loader keeps its number, and the user's own number is remembered."""
        if self.is_of(None):
            return
        note_own_workers(self.loader, self._own_workers)
        if persistent_iterator(self.loader) is None:
            WorkersStart.forget(self.loader)

    def end(self, running: Sequence[Any] = ()) -> None:
        """End the workers at once: training has failed, and what it failed with may keep the iterator alive.

        Args:
            running: what the consumer fetches from now.
        """
        for iterator in (self._iterator, persistent_iterator(self._loader()), *running):
            shut_down(iterator)


def depth_of(loader: DataLoader[Any]) -> int:
    """Batches that a loader requests ahead."""
    return max(loader.num_workers * (loader.prefetch_factor or 2), 1)


def assign(loader: DataLoader[Any], num_workers: int) -> None:
    """Set a loader's ``num_workers``, and the arguments that depend on it."""
    loader.num_workers = num_workers
    if not num_workers:
        loader.prefetch_factor = None
    elif loader.prefetch_factor is None:
        loader.prefetch_factor = 2
