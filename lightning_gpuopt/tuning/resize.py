"""Changes the number of workers of a DataLoader's iterator while it runs.

torch has no way to do this, so private parts of its iterator are used, which ``compat.dataloader`` names and checks:
:func:`adopt` makes the iterator a :class:`ResizableIterator`, the same object with a few methods of ours around torch's
own. Which index goes into which batch, and the order in which batches come, stay as they are: only who makes a batch
changes.

New workers are started as torch starts them, on the same result queue and with the same seeds (base seed plus worker
number; one that takes the number of a worker that was taken away gets a seed of its own). Workers are taken away from
the highest number down, and in three steps: they get no new work; what they were given is taken from them, for a batch
in shared memory can only be received while its maker lives; then they are told to end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from types import TracebackType
from typing import Any, Final

import torch.multiprocessing
from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import (
    CHECK_EVERY_S,
    WorkersIterator,
    fetcher_here,
    watch_pids,
    why_not_as_expected,
    why_torch_is_not_as_expected,
    worker_process,
)
from lightning_gpuopt.objects.dataset_state import DatasetState
from lightning_gpuopt.tuning.added_workers import AddedWorkers, NoWorkersLeft
from lightning_gpuopt.tuning.draws import DrawWatch
from lightning_gpuopt.tuning.stand_ins import End, Same, raises

log = logging.getLogger(__name__)

_GRACE_S: Final = 1.0
"""Seconds that a worker may take to end before it is killed."""

_SEED_STEP: Final = 0x9E3779B97F4A7C15
_SEEDS: Final = 1 << 63


class ResizeUnsupported(RuntimeError):
    """The number of workers of this iterator cannot be changed while it runs; the message gives the reason."""


class ResizableIterator(AddedWorkers):
    """A running iterator whose workers can become more and fewer; from :func:`adopt` or :func:`first_workers`.

    ``_num_workers`` is the number that gets work. ``_workers`` and the lists beside it may be longer: those above are
    being taken away, and still have work under way.
    """

    def _gpuopt_begin(self, loader: DataLoader[Any], depth: int, workers: int) -> None:
        self._gpuopt_loader: Callable[[], DataLoader[Any] | None] = weakref.ref(loader)
        # Batches requested ahead before any change; 0: there were no workers.
        self._gpuopt_depth = depth
        # Batches of an epoch; None where the sampler does not know.
        self._gpuopt_length: int | None = None
        # Whether to request nothing before the first fetch, since without workers the sampler draws no earlier.
        self._gpuopt_waits = not depth
        # Whether the consumer is at the end of the epoch, so that the sampler may be asked for its end as well.
        self._gpuopt_at_end = False
        # Indices drawn from the sampler and not yet given to a worker, and whether it has ended.
        self._gpuopt_drawn: deque[Any] = deque()
        self._gpuopt_drawn_all = False
        # Workers started so far, by worker number.
        self._gpuopt_starts = dict.fromkeys(range(workers), 1)
        # Processes that were told to end, with their index queues.
        self._gpuopt_ended: list[tuple[Any, Any]] = []
        # Detects draws of the workers that were started here.
        self._gpuopt_draws = DrawWatch()
        # Makes the batches in this process, since the dataset has changed; None before.
        self._gpuopt_fetch: Callable[[Any], Any] | None = None
        self._gpuopt_added, self._gpuopt_new, self._gpuopt_again = set(), {}, {}
        self._gpuopt_stuck, self._gpuopt_given = [], {}
        self._gpuopt_state, self._gpuopt_resetting, self.failure = None, False, None

    @property
    def as_without_workers(self) -> bool:
        """Whether workers stand in for the training process: each batch must match the dataset at its fetch."""
        return self._gpuopt_state is not None

    @property
    def fetches_here(self) -> bool:
        """Whether the training process makes the batches, since the dataset has changed under the workers."""
        return self._gpuopt_fetch is not None

    @property
    def has_failed(self) -> bool:
        """Whether a worker that was added here is gone, or of no use."""
        return self.failure is not None or bool(self._dead_of_added())

    @property
    def draws(self) -> bool:
        """Whether a worker that was started here was seen to draw random numbers."""
        return self._gpuopt_draws.seen

    def resize(self, num_workers: int) -> int:
        """Set the number of workers; call it between two batches, on the consumer's thread.

        The loader's ``num_workers`` follows, for the epochs to come.

        Args:
            num_workers: at least 1.

        Returns:
            The workers that get work now: fewer than asked for where the system does not let more start.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers: expected at least 1, got {num_workers}")
        if self._shutdown:
            return self._num_workers
        before = self._num_workers
        if num_workers < before:
            self._set_active(num_workers)
            self._end_drained()
        elif num_workers > before:
            if self.failure is not None or not self._is_work_left():
                self._follow(num_workers)
                return num_workers
            self._start_workers(num_workers)
            self._set_active(min(num_workers, len(self._workers)))
            self._prime()
        self._follow(self._num_workers)
        return self._num_workers

    def let_go(self) -> None:
        """Leave the loader's ``num_workers`` alone from now on: it was given another, for the iterators to come."""
        self._gpuopt_loader = lambda: None

    def _follow(self, num_workers: int) -> None:
        loader = self._gpuopt_loader()
        if loader is not None:
            loader.num_workers = num_workers

    def _is_work_left(self) -> bool:
        """Whether this epoch has batches that no worker was asked for yet."""
        return bool(self._gpuopt_drawn) or self._gpuopt_length is None or self._gpuopt_length > self._send_idx

    @property
    def batches_left(self) -> int | None:
        """Batches of this epoch that no worker was asked for yet; None where the sampler does not know its length."""
        return None if self._gpuopt_length is None else self._gpuopt_length - self._send_idx

    def _set_active(self, count: int) -> None:
        self._num_workers = count
        self._worker_queue_idx_cycle = itertools.cycle(range(count))

    # -- starting workers

    def _start_workers(self, count: int) -> None:
        """Start workers up to this number; if one cannot be started, go on with the running ones."""
        loader = self._gpuopt_loader()
        context = (loader.multiprocessing_context if loader is not None else None) or torch.multiprocessing
        started = False
        try:
            while len(self._workers) < count:
                self._start_worker(context, len(self._workers), count)
                started = True
        except Exception:  # no more processes, memory, files or threads
            log.warning("a worker of the DataLoader could not be started", exc_info=True)
        finally:
            if started:
                self._watch_pids()

    def _watch_pids(self) -> None:
        """Have torch raise when a worker of the user's own ends; of the others too where their work cannot be saved."""
        ours = self._gpuopt_added if self.saves_work else set()
        watch_pids(self, [worker for worker in self._workers if worker not in ours])

    def _start_worker(self, context: Any, worker_id: int, num_workers: int) -> None:
        index_queue = context.Queue()
        index_queue.cancel_join_thread()
        earlier = self._gpuopt_starts.get(worker_id, 0)
        seed = (int(self._base_seed) + earlier * _SEED_STEP) % _SEEDS
        collate_fn = self._collate_fn
        if context.get_start_method() == "fork":
            self._collate_fn = self._gpuopt_draws.around(collate_fn)
        try:
            worker = worker_process(self, context, index_queue, worker_id, num_workers, seed)
        finally:
            self._collate_fn = collate_fn
        try:
            worker.start()
        except BaseException:
            if worker.pid is not None:
                worker.terminate()
            index_queue.close()
            raise
        self._gpuopt_starts[worker_id] = earlier + 1
        self._gpuopt_new[worker] = time.monotonic()
        self._gpuopt_added.add(worker)
        self._index_queues.append(index_queue)
        self._workers.append(worker)
        self._workers_status.append(True)
        # Since torch 2.6. The entry of a worker that has left stays: batches of its may lie here, not yet handed out.
        if hasattr(self, "_workers_num_tasks") and len(self._workers_num_tasks) == worker_id:
            self._workers_num_tasks.append(0)

    def _prime(self) -> None:
        """Give new workers their share of the work."""
        active, factor = self._num_workers, self._prefetch_factor
        given = [0] * len(self._workers)
        for info in self._task_info.values():
            if len(info) == 1:
                given[info[0]] += 1
        free = [worker for level in range(factor) for worker in range(active) if given[worker] <= level]
        in_turn = itertools.cycle(range(active))
        self._worker_queue_idx_cycle = itertools.chain(free, in_turn)  # type: ignore[assignment]
        for _ in range(factor * active - len(self._task_info)):
            self._try_put_index()
        if self._num_workers == active:
            self._worker_queue_idx_cycle = in_turn

    # -- distributing work

    @property
    def _handed_out(self) -> int:
        """Number of batches that the consumer has taken."""
        return self._send_idx - len(self._task_info)

    def _would_end_too_early(self) -> bool:
        """Whether the next index is the one after the sampler's last, and more workers only ask for it sooner.

        torch's samplers draw from their generator once more as they end. In an epoch that is left before its end they
        may do so only where they would have with the workers that it began with.
        """
        if self._gpuopt_at_end or self._gpuopt_length is None or self._send_idx != self._gpuopt_length:
            return False
        return self._handed_out + self._gpuopt_depth <= self._gpuopt_length

    def _next_index(self) -> Any:
        if not self._gpuopt_drawn:
            self._draw()
        return self._gpuopt_drawn[0]

    def _draw(self) -> None:
        try:
            self._gpuopt_drawn.append(super()._next_index())  # type: ignore[no-untyped-call]
        except StopIteration:
            self._gpuopt_drawn_all = True
            raise
        except Exception as error:
            if self._gpuopt_at_end or (self._gpuopt_depth and self._handed_out + self._gpuopt_depth > self._send_idx):
                raise
            # Raised later, at the batch where training would have met it without the change.
            self._sampler_iter = raises(error.with_traceback(self._without_us(error.__traceback__)))
            self._gpuopt_length = self._send_idx
            raise StopIteration from None

    def _draw_as_far_as_before(self) -> None:
        """Ask the sampler as far ahead as before the workers became fewer."""
        while not self._gpuopt_drawn_all:
            drawn = self._send_idx + len(self._gpuopt_drawn)
            if drawn >= self._handed_out + self._gpuopt_depth:
                return
            with contextlib.suppress(StopIteration):
                self._draw()

    def _without_us(self, trace: TracebackType | None) -> TracebackType | None:
        """A traceback without the frames that hold this iterator, which would then hold itself."""
        while trace is not None and trace.tb_frame.f_locals.get("self") is self:
            trace = trace.tb_next
        return trace

    def _try_put_index(self) -> None:
        if self._gpuopt_waits:
            return
        self._put_one()
        self._draw_as_far_as_before()

    def _put_one(self) -> None:
        if not self._gpuopt_drawn and self._would_end_too_early():
            return
        active = self._num_workers
        leaving = len(self._workers) > active
        if leaving:
            self._end_drained()
        if len(self._task_info) >= self._prefetch_factor * active:
            return  # there were more workers, whose batches are still under way or wait here
        status, number = self._workers_status, self._send_idx
        if leaving:
            # Without an order torch shares the work out among all that it counts here.
            self._workers_status = status[:active] + [False] * (len(status) - active)
        try:
            super()._try_put_index()
        except Exception:
            self._workers_status = status
            # An index that was drawn and found no worker is kept for the next time.
            if not self._gpuopt_drawn or not self._drop_unused():
                raise
            self._put_one()
            return
        self._workers_status = status
        if self._send_idx > number:
            if len(self._gpuopt_given) > 2 * len(self._task_info):
                self._gpuopt_given = {each: self._gpuopt_given.get(each) for each in self._task_info}
            self._gpuopt_given[number] = self._gpuopt_drawn.popleft()

    def _drop_unused(self) -> bool:
        """Let go of new workers that could be given nothing: the system lets no thread start that feeds their queue.

        Returns:
            Whether there were some, and others are left.
        """
        used = {self._workers[info[0]] for info in self._task_info.values()}
        unused = [worker for worker in self._gpuopt_new if worker not in used]
        if not unused or len(unused) == len(self._workers):
            return False
        log.warning("%d new workers of the DataLoader could not be given work", len(unused))
        for worker in unused:
            self._give_up(worker, "a worker that was started in mid-epoch could be given no work")
            worker.terminate()
        return True

    # -- receiving batches

    def _next_data(self) -> Any:
        if self._is_out_of_date():
            self._fetch_from_here_on()
        if self._gpuopt_fetch is not None:
            return self._gpuopt_fetch(self._next_index_here())
        if self._gpuopt_waits:
            self._gpuopt_waits = False
            for _ in range(self._prefetch_factor * self._num_workers):
                self._try_put_index()
        if not self._gpuopt_depth and not self._task_info and not self._shutdown:
            self._gpuopt_at_end = True  # without workers the sampler is asked now
            self._try_put_index()
        with contextlib.suppress(NoWorkersLeft):
            return super()._next_data()  # type: ignore[no-untyped-call]
        fetch: Any = self._gpuopt_fetch
        return fetch(self._next_index_here())

    def _is_out_of_date(self) -> bool:
        """Whether workers that stand in for the training process have an outdated dataset."""
        state = self._gpuopt_state
        if state is None or self._gpuopt_fetch is not None or self._shutdown:
            return False
        given = chain.from_iterable(each if isinstance(each, (list, tuple)) else (each,) for each in self._ahead())
        return state.has_changed_for(given)

    def _ahead(self) -> Iterable[Any]:
        """Indices of the batches that were requested from workers and not yet taken by the consumer."""
        return (index for number, index in self._gpuopt_given.items() if number in self._task_info)

    def _fetch_from_here_on(self) -> None:
        """Make this batch and all later ones in the training process, since the workers' dataset is outdated."""
        self._gpuopt_fetch = fetcher_here(self)
        given = [index for number, index in sorted(self._gpuopt_given.items()) if number in self._task_info]
        self._gpuopt_drawn.extendleft(reversed(given))
        self._gpuopt_given.clear()
        self._shutdown_workers()
        self._set_active(0)
        loader = self._gpuopt_loader()
        if loader is not None:
            loader.num_workers, loader.prefetch_factor = 0, None

    def _next_index_here(self) -> Any:
        if self._gpuopt_drawn:
            return self._gpuopt_drawn.popleft()
        return next(self._sampler_iter)

    # -- ending workers

    def _give_up(self, worker: Any, why: str) -> None:
        """Remove a worker from all lists; its work has to go to another one."""
        number = self._workers.index(worker)
        index_queue = self._index_queues.pop(number)
        self._gpuopt_stuck.append((self._workers.pop(number), index_queue))
        self.failure = why
        del self._workers_status[number]
        if hasattr(self, "_workers_num_tasks"):
            del self._workers_num_tasks[number]
        self._gpuopt_new.pop(worker, None)
        self._gpuopt_added.discard(worker)
        for task, (owner, *data) in self._task_info.items():
            self._task_info[task] = (owner - (owner > number), *data)
        self._set_active(self._num_workers - (number < self._num_workers))
        self._follow(self._num_workers)
        self._watch_pids()

    def _at_work(self) -> bool:
        """Whether a new or leaving worker still has a batch that was not received."""
        active, new = self._num_workers, self._gpuopt_new
        owners = {info[0] for info in self._task_info.values() if len(info) == 1}
        return any(owner >= active or self._workers[owner] in new for owner in owners)

    def _end_drained(self) -> None:
        """Ask leaving workers to end, once all their batches were received."""
        active = self._num_workers
        if len(self._workers) == active:
            return
        if any(len(info) == 1 and info[0] >= active for info in self._task_info.values()):
            return
        leaving = list(zip(self._workers[active:], self._index_queues[active:], strict=True))
        for each in (self._workers, self._index_queues, self._workers_status):
            del each[active:]
        self._watch_pids()
        self._gpuopt_ended = [ended for ended in self._gpuopt_ended if ended[0].is_alive()] + leaving
        for worker, index_queue in leaving:
            self._gpuopt_new.pop(worker, None)
            self._gpuopt_added.discard(worker)
            index_queue.put(End())

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:  # without workers the sampler is iterated once
            sampler, self._index_sampler = self._index_sampler, Same(self._sampler_iter)
            try:
                super()._reset(loader, first_iter)
            finally:
                self._index_sampler = sampler
            self._measure()
            return
        try:
            self._look_after_dead()
            self._begin_anew(loader, first_iter)
        except NoWorkersLeft:
            raise RuntimeError(f"DataLoader workers exited unexpectedly between two epochs: {self.failure}") from None
        finally:
            self._gpuopt_resetting = False

    def _begin_anew(self, loader: Any, first_iter: bool) -> None:
        # An epoch that was left early has work under way. torch waits for its workers here, but not for these.
        while self._at_work():
            index, _ = self._get_data()  # type: ignore[no-untyped-call]
            self._tasks_outstanding -= 1
            self._task_info[index] += (None,)
        self._end_drained()
        for worker in list(self._gpuopt_new):  # it had nothing to do, and may be stuck: torch would wait for it
            self._give_up(worker, "a worker that was started in mid-epoch never gave a batch")
        self._join_ended()  # what they may still send would be taken for batches of the new epoch
        self._gpuopt_drawn.clear()
        self._gpuopt_drawn_all = False
        self._gpuopt_again.clear()
        self._gpuopt_given.clear()
        self._measure()
        self._gpuopt_resetting = True  # torch counts who answers: one that dies now is an error
        super()._reset(loader, first_iter)

    def _measure(self) -> None:
        """Record the length of the epoch."""
        self._gpuopt_length = None
        with contextlib.suppress(TypeError, NotImplementedError):
            self._gpuopt_length = len(self._index_sampler)

    def _shutdown_workers(self) -> None:
        was_shut_down = getattr(self, "_shutdown", True)
        try:
            super()._shutdown_workers()
        finally:
            if not was_shut_down and self._shutdown:  # else Python itself is about to end, and ends them
                self._join_ended()

    def _join_ended(self) -> None:
        for _, index_queue in self._gpuopt_stuck:
            with contextlib.suppress(Exception):  # no thread may start that feeds the queue
                index_queue.put(End())  # should its worker only be slow
        for worker, index_queue in (*self._gpuopt_stuck, *self._gpuopt_ended):
            worker.join(timeout=_GRACE_S)
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=CHECK_EVERY_S)
            index_queue.cancel_join_thread()
            index_queue.close()
        self._gpuopt_ended.clear()
        self._gpuopt_stuck = [(worker, queue) for worker, queue in self._gpuopt_stuck if worker.is_alive()]

    def __del__(self) -> None:
        self._shutdown_workers()


def adopt(iterator: Any, loader: DataLoader[Any], depth: int | None = None) -> ResizableIterator:
    """Make a running iterator resizable.

    Args:
        iterator: what ``iter(loader)`` gave.
        loader: its loader, over a map-style dataset.
        depth: batches that the loader asks for ahead as the user has set it; None: as it is now.

    Returns:
        The same object.

    Raises:
        ResizeUnsupported: it is not as expected; nothing was changed.
    """
    if isinstance(iterator, ResizableIterator):
        iterator._gpuopt_loader = weakref.ref(loader)
        return iterator
    reason = why_not_as_expected(iterator)
    if reason is not None:
        raise ResizeUnsupported(reason)
    iterator.__class__ = ResizableIterator
    adopted: ResizableIterator = iterator
    now = adopted._prefetch_factor * adopted._num_workers
    adopted._gpuopt_begin(loader, depth or now, adopted._num_workers)
    adopted._measure()
    try:
        adopted._draw_as_far_as_before()
    except Exception as error:  # the sampler's: whoever takes the next batch meets it
        adopted._sampler_iter = raises(error.with_traceback(adopted._without_us(error.__traceback__)))
    return adopted


def first_workers(loader: DataLoader[Any], state: DatasetState) -> ResizableIterator:
    """An iterator with workers for a loader that had none until now, in place of the one that it would have made.

    What the loader draws from random states, and when, is as without workers: nothing is asked of the sampler until the
    first batch is asked for. Before each batch the dataset is compared with what the workers were given: once it has
    changed, that batch and all later ones are made in the training process, and the loader has no workers any more.

    Args:
        loader: over a map-style dataset; its ``num_workers`` and ``prefetch_factor`` say what is wanted now.
        state: what the workers are given, taken down before they start.

    Raises:
        ResizeUnsupported: this torch is not as expected.
    """
    reason = why_torch_is_not_as_expected()
    if reason is not None:
        raise ResizeUnsupported(reason)
    iterator = ResizableIterator.__new__(ResizableIterator)
    iterator._gpuopt_begin(loader, 0, loader.num_workers)
    iterator._gpuopt_state = state
    WorkersIterator.__init__(iterator, loader)
    iterator._gpuopt_added = set(iterator._workers)
    try:
        iterator._watch_pids()
        fetcher_here(iterator)
    except Exception as error:
        iterator._shutdown_workers()
        raise ResizeUnsupported(f"this torch makes no batches here: {error}") from error
    return iterator
