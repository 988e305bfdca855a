"""A running loader, under the policy of :mod:`~lightning_gpuopt.tuning.running_search`: its workers are changed."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import (
    batches_there,
    is_plain,
    persistent_iterator,
    running_workers,
    shut_down,
    workers_of,
)
from lightning_gpuopt.compat.lightning_loops import length_of
from lightning_gpuopt.loaders.registry import Create
from lightning_gpuopt.loading.engine.engine import CannotServe
from lightning_gpuopt.measurements.loader_model import most_workers, net_saving
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.telemetry.memory_watch import MemoryWatch
from lightning_gpuopt.telemetry.resources import worker_memory
from lightning_gpuopt.tuning.fetch_times import FetchMeter, place
from lightning_gpuopt.tuning.running_search import LivePolicy
from lightning_gpuopt.tuning.seen_order import SeenOrder
from lightning_gpuopt.tuning.segments import SegmentedIterator, Segments, without_hint
from lightning_gpuopt.tuning.sharing import ForkSnapshot, forks, note_own_workers, why_not_shared
from lightning_gpuopt.tuning.worker_limits import (
    FILES_OF_A_WORKER,
    THREADS_OF_A_WORKER,
    Cap,
    files_wanted,
    room,
    worker_cap,
)

log = logging.getLogger(__name__)

_FITS_FOR_S: Final = 5.0  # seconds between two checks of the memory left for the workers


def _resizes(iterator: Any) -> bool:
    return bool(getattr(type(iterator), "resizes", False))


@dataclass(frozen=True)
class LostWorkers:
    """Why a loader has fewer workers than were asked for."""

    kind: Literal["dataset", "growth", "draws", "room", "order", "samples"]
    why: str


class RunningLoader:
    """A DataLoader whose number of workers follows what its consumer needs; the user has given it ``own_workers``."""

    def __init__(
        self,
        loader: DataLoader[Any],
        policy: LivePolicy,
        max_num_workers: int | None = None,
        local_world_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
        own_workers: int | None = None,
    ) -> None:
        # Only the Trainer holds a loader, and only the consumer an iterator: their workers end when these drop them.
        self._loader = weakref.ref(loader)
        self._current: weakref.ref[Any] | None = None
        self._has_started = False
        self.policy = policy
        self.meter = FetchMeter(policy.skip, policy.window)
        self.no_more: str | None = None  # why no worker may be added
        self.problem: str | None = None  # why the running iterator cannot be changed
        self.unknown: str | None = None  # what the consumer fetches from, if that cannot be timed
        self.dataset_changes = False  # it was another one when the last two iterators were made
        self.frozen = False  # measuring has ended
        self._own_workers = loader.num_workers if own_workers is None else own_workers
        self._began: float | None = None
        self._set_up: tuple[float, int] | None = None
        self._max_num_workers = max_num_workers
        self._local_world_size = local_world_size
        self._waits_for_next = False
        self._depth = self._own_workers * (loader.prefetch_factor or 2)
        self._clock = clock
        self._fits_until = clock() + _FITS_FOR_S
        self._memory = MemoryWatch(lambda pid: worker_memory(pid))
        self._batch: tuple[float, int] = (0.0, 0)
        self._wait_s: float | None = None  # never measured under AutoFix, which judges by the epochs' set-ups
        self._grow_at_epochs: str | None = None
        self._later = 0
        self.shared = Segments.of(loader)

    def is_of(self, loader: Any) -> bool:
        """Whether this is its loader; None: the loader is gone."""
        return self._loader() is loader

    @property
    def order(self) -> SeenOrder:
        return self.shared.order

    @property
    def draws(self) -> bool:
        return self.shared.draws.seen

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader, which exists: the caller has seen it in the Trainer."""
        loader = self._loader()
        assert loader is not None
        return loader

    @property
    def num_workers(self) -> int:
        """The loader's number of workers, also once it is gone; if more wait for an epoch's end, their number."""
        loader = self._loader()
        return self._later or (self.policy.num_workers if loader is None else loader.num_workers)

    @property
    def start(self) -> ForkSnapshot | None:
        """The state that the running workers copied; None before they were started."""
        is_of_now = self._has_started or persistent_iterator(self.loader) is not None
        return ForkSnapshot.of(self.loader) if is_of_now else None

    @property
    def _iterator(self) -> Any:
        """The consumer's iterator; None before its first step, and after the consumer has dropped it."""
        return None if self._current is None else self._current()

    def compare_dataset(self) -> None:
        """See whether the dataset has changed since the workers of the last iterator were started."""
        self.dataset_changes = self.start is not None and self.start.has_changed

    def note_start(self) -> ForkSnapshot:
        """Remember the state that the workers of the next epoch copy."""
        start = ForkSnapshot(self.loader, self._own_workers)
        start.note(self.loader)
        self._has_started, self._began = True, self._clock()
        return start

    def iterator_wanted(self) -> Callable[[Create], Any]:
        """Set the number of workers: the loop is about to iterate the loader. Returns the iterator's factory."""
        self._go_further()
        start = self.note_start()
        note_own_workers(self.loader, self._own_workers)
        reason = why_not_shared(self.loader, start.state.held, workers=self._own_workers)
        if self.loader.num_workers > self._own_workers and reason is not None:
            self.no_more = reason
            assign(self.loader, self._own_workers)
            self.policy.set(self.loader.num_workers, settle=True)
        return self._iterate

    def _iterate(self, create: Create) -> Any:
        loader, start = self.loader, self.start
        if not is_plain(loader):
            with without_hint(loader.num_workers, self._own_workers):
                return create()
        assert start is not None
        return SegmentedIterator(
            loader, create, own_workers=self._own_workers, depth=self._depth, changed=start.has_changed_for
        )

    def _go_further(self) -> None:
        """The user's own workers until one epoch has shown what the sampler reads; then the wanted number."""
        loader, reason = self.loader, self.order.why_not_ahead(self.loader)
        if reason is None and self._later:
            assign(loader, min(self._later, self.cap().num_workers))
            self._later = 0
            self.look()
        elif reason is not None and (self._later or loader.num_workers > self._own_workers):
            never = self.order.bound is not None or not is_plain(loader)
            self.no_more = reason if never else None
            self._later = 0 if never else max(self._later, loader.num_workers)
            assign(loader, self._own_workers)
            if self._later:
                self.meter.sleep()
            else:
                self.policy.set(loader.num_workers, settle=True)

    def follow(self, iterator: Any) -> None:
        """Time the iterator that the consumer has just fetched from."""
        if self._iterator is iterator:
            return
        self._current = weakref.ref(iterator)
        if self._began is not None:
            self._set_up, self._began = (self._clock() - self._began, self.loader.num_workers), None
        self._look_at_memory()
        self.problem = self._why_not_live()
        if self.problem is None and not _resizes(iterator):
            self.problem = f"its {type(iterator).__name__} was not created here"
        elif self.problem is None and running_workers(self.loader, iterator) != self.loader.num_workers:
            restored = self.loader.num_workers  # since it was made
            assign(self.loader, running_workers(self.loader, iterator))
            self.apply(restored)
        if not place(self.meter, iterator):  # such as a generator: its loader has an __iter__ of its own
            self.unknown = type(iterator).__name__
            return
        waited, self._waits_for_next = self._waits_for_next, False
        if running_workers(self.loader, iterator) != self.loader.num_workers:
            self._waits_for_next = True
        if waited != self._waits_for_next:
            self.look()
        self.meter.epoch_begins(max(self.policy.num_workers, 1))

    def lost(self) -> LostWorkers | None:
        """The fate of added workers; for those added in mid-epoch, once."""
        iterator = self._iterator
        if not isinstance(iterator, SegmentedIterator):
            return None
        if iterator.samples_differ and self.shared.by_sample:
            self.read_by_sample(False)
            self.shared.why_by_batch = "its samples differ in shape or type"
        if self.shared.why_by_batch is not None:
            why, self.shared.why_by_batch = self.shared.why_by_batch, None
            return LostWorkers("samples", why)
        if iterator.failure is None:
            return None
        if iterator.fetches_here:
            return LostWorkers("dataset", iterator.failure)
        if self._grow_at_epochs is not None:
            return None
        self.problem = self._grow_at_epochs = iterator.failure
        self.policy.set(self.loader.num_workers)
        self.look()
        return LostWorkers("growth", iterator.failure)

    def go_on_with(self, loader: DataLoader[Any]) -> None:
        """Continue with a loader that replaces this one, and has the user's own number of workers yet."""
        old, number = self.shared, self._own_workers if self._later else self.num_workers
        self._loader, self._current, self._has_started, self.no_more = weakref.ref(loader), None, False, None
        self.shared = Segments.of(loader)
        self.shared.draws = old.draws
        self.shared.why_by_batch = "the loader was replaced by another one" if old.by_sample else None
        if old.order.holds_for(loader):
            self.shared.order = old.order
        self._depth = self._own_workers * (loader.prefetch_factor or 2)
        assign(loader, number)
        if self.meter.seen is not None:  # and not acted on: it was not in training that the old one was iterated last
            self.look()

    def _why_not_live(self) -> str | None:
        if self._grow_at_epochs is not None:
            return self._grow_at_epochs
        context: Any = self.loader.multiprocessing_context or torch.multiprocessing.get_context()
        if context.get_start_method() != "fork":
            return f"workers started by {context.get_start_method()!r} take seconds, and training would wait for them"
        if self.loader.timeout:
            return f"the first batches of new workers may take longer than the loader's timeout={self.loader.timeout:g}"
        return None

    def decide(self) -> int | None:
        """Process new measurements: returns the wanted number of workers; None if there were none."""
        seen = self.meter.seen
        if seen is None:
            return None
        self._batch, self._wait_s = (seen.batch_bytes, seen.batch_tensors), seen.wait_s
        wanted = self.policy.decide(seen, self.cap())
        self.look()
        return wanted

    def freeze(self) -> None:
        self.frozen = True
        self.meter.sleep()

    def look(self) -> None:
        """Measure the policy's next window; does nothing while a change waits for the next epoch."""
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

    def cap(self, *, keep: bool = False, beside: bool = False) -> Cap:
        """The most workers that fit here now, or fit ``beside`` the running ones; with ``keep``, that may stay."""
        running = None if beside else self._iterator
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
        """Read a worker's memory in the background, if due."""
        workers = workers_of(self._iterator)
        # the first has run for longest, the last is what another would be like
        self._memory.look([each.pid or 0 for each in {*workers[:1], *workers[-1:]}])

    def apply(self, num_workers: int) -> None:
        """Set the number of workers: now if possible, else from the next iterator on."""
        iterator = self._iterator
        if num_workers > self.loader.num_workers and not self._may_grow(num_workers):
            num_workers = self.loader.num_workers
            self.policy.set(num_workers, settle=True)
        problem = self.problem if num_workers == self.loader.num_workers else self._why_not_now(num_workers)
        if _resizes(iterator) and problem is None:
            if isinstance(iterator, SegmentedIterator):
                num_workers = iterator.resize(num_workers, overlap=num_workers <= self.cap(beside=True).num_workers)
            else:
                num_workers = iterator.resize(num_workers)
            assign(self.loader, num_workers)
            self._waits_for_next = running_workers(self.loader, iterator) != num_workers
        elif num_workers != self.loader.num_workers:
            self.problem = problem
            assign(self.loader, num_workers)
            self._waits_for_next = iterator is not None
        if num_workers != self.policy.num_workers:
            self.policy.set(num_workers)
        self.look()

    def read_by_sample(self, value: bool) -> bool:
        """Have each sample be a task of the workers, or each batch: True if so now, False if with the next iterator.

        Raises CannotServe: the samples cannot be tasks.
        """
        iterator, shared = self._iterator, self.shared
        now = isinstance(iterator, SegmentedIterator) and self._why_not_now(self.loader.num_workers + value) is None
        if not now:
            shared.by_sample = value
            return False
        iterator.read_by_sample(value, overlap=self.loader.num_workers <= self.cap(beside=True).num_workers)
        why, shared.why_by_batch = shared.why_by_batch, None
        if why is not None:
            raise CannotServe(why)
        return bool(iterator.reads_by_sample == value)

    @property
    def reads_by_sample(self) -> bool:
        """Whether each sample is a task of the workers that run."""
        iterator = self._iterator
        return isinstance(iterator, SegmentedIterator) and iterator.reads_by_sample

    def _may_grow(self, num_workers: int) -> bool:
        """Whether workers can be added, now or with the next iterator; else ``no_more`` says why not."""
        if self.start is None and self._iterator is None and persistent_iterator(self.loader) is None:
            return True  # nothing runs yet
        if self.start is None:
            self.no_more = "its workers were started by an earlier fit, and their dataset may have changed since"
            return False
        self.no_more = self.start.why_no_more() or self.order.why_bound(self.loader)
        if self.no_more is None and not self._pays(num_workers):
            self.no_more = (
                f"starting {num_workers} for every epoch would take longer than they save; give the DataLoader "
                "persistent_workers=True"
            )
        if self.no_more is None and self.loader.persistent_workers and self.start.has_changed:
            self.no_more = "its dataset may have changed since its persistent workers started"
        return self.no_more is None

    def _why_not_now(self, num_workers: int) -> str | None:
        """Why new workers should not take over in the running epoch; None if they can."""
        if self.problem is not None or self.start is None:
            return self.problem
        if self.start.has_changed:
            return "its dataset may have changed since they started, and new workers would see the new state"
        if self.start.state.seeds_by_number:
            return "they seed themselves by their number, and new ones in the same epoch would draw the same numbers"
        if num_workers > self.loader.num_workers:
            if not self.order.is_known(self.loader):
                return "its sampler may read what training writes, and is read further ahead from an epoch's start"
            if not self._pays_now(num_workers):
                return "starting them takes longer than the rest of the epoch"
        return None

    def _pays_now(self, num_workers: int) -> bool:
        """Whether the rest of the epoch is long enough to repay the start of new workers."""
        iterator = self._iterator
        if self._wait_s is None or not isinstance(iterator, SegmentedIterator) or iterator.started is None:
            return True
        (start_s, before), left = iterator.started, iterator.batches_left
        return left is None or left * self._wait_s > start_s * num_workers / before

    def _pays(self, num_workers: int) -> bool:
        """Whether workers that are not forked, and start again in each epoch, save more time than their start takes."""
        if forks(self.loader) is None or self.loader.persistent_workers or self._set_up is None or self._wait_s is None:
            return True
        set_up_s, before = self._set_up
        steps = length_of(self.loader)
        if steps is None or not before:
            return True
        cpus = max(usable_cpus() / self._local_world_size, 1.0)
        saved_s = net_saving(num_workers, before, step_s=self._wait_s, steps=steps, set_up_s=set_up_s, cpus=cpus)
        return saved_s > -set_up_s

    def before_epoch(self, prefetch_factor: int | None = None) -> bool:
        """Before an epoch, replace persisting workers as needed; False if they stay, since the dataset changed."""
        loader = self.loader
        self.meter.epoch_begins(max(self.policy.num_workers, 1))
        iterator: Any = persistent_iterator(loader)
        if iterator is None:
            return True
        self._go_further()
        wanted = prefetch_factor or loader.prefetch_factor
        given = running_workers(loader, iterator), getattr(iterator, "prefetch_factor", wanted)
        if (loader.num_workers, wanted) == given:
            return True
        if not _resizes(iterator) or self.start is None or self.start.has_changed:
            assign(loader, given[0])
            self.policy.set(given[0], settle=True)
            return False
        loader.prefetch_factor = wanted
        iterator.begins_anew, iterator.changed = True, self.note_start().has_changed_for
        return True

    def done(self) -> None:
        """End with the fit: the loader keeps its number, and the user's own number is remembered."""
        if self.is_of(None):
            return
        note_own_workers(self.loader, self._own_workers)
        if persistent_iterator(self.loader) is None:
            ForkSnapshot.forget(self.loader)

    def end(self, running: Sequence[Any] = ()) -> None:
        """End the workers at once, also of ``running``: training has failed, and its error may keep iterators alive."""
        for iterator in (self._iterator, persistent_iterator(self._loader()), *running):
            shut_down(iterator)


def assign(loader: DataLoader[Any], num_workers: int) -> None:
    loader.num_workers = num_workers
    if not num_workers:
        loader.prefetch_factor = None
    elif loader.prefetch_factor is None:
        loader.prefetch_factor = 2
