"""More or fewer workers for a DataLoader's iterator while it runs.

torch has no way to do this, so the private parts of its ``_MultiProcessingDataLoaderIter`` (torch 2.4 to 2.13) are
used: :func:`adopt` checks that they are as expected, and makes the iterator a :class:`ResizableIterator`, the same
object with a few methods of ours around torch's own. Which index goes into which batch, and the order in which batches
come, stay as they are: only who makes a batch changes.

New workers are started as torch starts them, on the same result queue and with the same seeds (base seed plus worker
number). Workers are taken away from the highest number down, and in three steps: they get no new work; what they were
given is taken from them, for a batch in shared memory can only be received while its maker lives; then they are told
to end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable
from inspect import signature
from types import TracebackType
from typing import Any, Final

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

_missing: str | None = None
try:
    from torch._C import _remove_worker_pids, _set_worker_pids
    from torch.utils.data import _DatasetKind
    from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
    from torch.utils.data._utils.worker import _worker_loop
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
except ImportError as error:
    _missing = str(error)
    _MultiProcessingDataLoaderIter = object  # type: ignore[assignment,misc]

log = logging.getLogger(__name__)

_MAP_PIPES: Final = getattr(torch.utils.data, "MapDataPipe", ())
_ATTRIBUTES: Final[dict[str, type | tuple[type, ...]]] = {
    "_auto_collation": bool,
    "_base_seed": int,
    "_drop_last": bool,
    "_index_queues": list,
    "_num_workers": int,
    "_persistent_workers": bool,
    "_prefetch_factor": int,
    "_rcvd_idx": int,
    "_send_idx": int,
    "_shutdown": bool,
    "_task_info": dict,
    "_tasks_outstanding": int,
    "_worker_pids_set": bool,
    "_worker_queue_idx_cycle": itertools.cycle,
    "_workers": list,
    "_workers_status": list,
}
_PRESENT: Final = (
    "_sampler_iter",
    "_collate_fn",
    "_data_queue",
    "_dataset",
    "_dataset_kind",
    "_index_sampler",
    "_shared_seed",
    "_worker_init_fn",
    "_worker_result_queue",
    "_workers_done_event",
)
_METHODS: Final = {
    "_get_data": ["self"],
    "_reset": ["self", "loader", "first_iter"],
    "_shutdown_workers": ["self"],
    "_try_put_index": ["self"],
}
_WORKER_LOOP: Final = [
    "dataset_kind",
    "dataset",
    "index_queue",
    "data_queue",
    "done_event",
    "auto_collation",
    "collate_fn",
    "drop_last",
    "base_seed",
    "init_fn",
    "worker_id",
    "num_workers",
    "persistent_workers",
    "shared_seed",
]


class ResizeUnsupported(RuntimeError):
    """This iterator cannot be given other workers while it runs; the message says why."""


class _End:
    """Sent to a worker in place of work: as it unpickles this, it leaves its loop as it would at a Ctrl-C.

    torch has a way to end one worker only for iterable datasets, or with all the others. At a KeyboardInterrupt the
    worker's loop ends without a word, its results are flushed, and its exit code is 0.
    """

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _leave, ()


class _Raises:
    """In place of a sampler's iterator: raises what that has raised."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:
        raise self._error


def _leave() -> None:
    raise KeyboardInterrupt


class ResizableIterator(_MultiProcessingDataLoaderIter):
    """A running iterator whose workers can become more and fewer; made by :func:`adopt` from one that torch made.

    ``_num_workers`` is the number that gets work. ``_workers`` and the lists beside it may be longer: those above are
    being taken away, and still have work under way.
    """

    _gpuopt_loader: weakref.ref[DataLoader[Any]]
    _gpuopt_ended: list[tuple[Any, Any]]
    """Processes that were told to end, with their index queues."""
    _gpuopt_length: int | None
    """Batches of an epoch; None where the sampler does not know."""
    _gpuopt_depth: int
    """Batches that were asked for ahead before anything was changed."""

    def resize(self, num_workers: int) -> int:
        """Have so many workers; call it between two batches, on the thread that takes them.

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
            if not self._persistent_workers and not self._is_work_left():
                self._follow(num_workers)
                return num_workers
            self._start_workers(num_workers)
            self._set_active(min(num_workers, len(self._workers)))
            self._prime()
        self._follow(self._num_workers)
        return self._num_workers

    def _follow(self, num_workers: int) -> None:
        loader = self._gpuopt_loader()
        if loader is not None:
            loader.num_workers = num_workers

    def _is_work_left(self) -> bool:
        """Whether this epoch has batches that no worker was asked for yet."""
        return self._gpuopt_length is None or self._gpuopt_length > self._send_idx

    def _set_active(self, count: int) -> None:
        self._num_workers = count
        self._worker_queue_idx_cycle = itertools.cycle(range(count))

    def _start_workers(self, count: int) -> None:
        """Start workers until there are so many, as ``_MultiProcessingDataLoaderIter.__init__`` does."""
        loader = self._gpuopt_loader()
        context = (loader.multiprocessing_context if loader is not None else None) or torch.multiprocessing
        started = False
        try:
            while len(self._workers) < count:
                self._start_worker(context, len(self._workers), count)
                started = True
        except OSError:  # no more processes, memory or files: what runs is enough to go on
            log.warning("a worker of the DataLoader could not be started", exc_info=True)
        finally:
            if started:
                self._watch_pids()

    def _start_worker(self, context: Any, worker_id: int, num_workers: int) -> None:
        index_queue = context.Queue()
        index_queue.cancel_join_thread()
        worker = context.Process(
            target=_worker_loop,
            args=(
                self._dataset_kind,
                self._dataset,
                index_queue,
                self._worker_result_queue,
                self._workers_done_event,
                self._auto_collation,
                self._collate_fn,
                self._drop_last,
                self._base_seed,
                self._worker_init_fn,
                worker_id,
                num_workers,
                self._persistent_workers,
                self._shared_seed,
            ),
        )
        worker.daemon = True
        try:
            worker.start()
        except BaseException:
            if worker.pid is not None:
                worker.terminate()
            raise
        self._index_queues.append(index_queue)
        self._workers.append(worker)
        self._workers_status.append(True)
        # Since torch 2.6. The entry of a worker that has left stays: batches of its may lie here, not yet handed out.
        if hasattr(self, "_workers_num_tasks") and len(self._workers_num_tasks) == worker_id:
            self._workers_num_tasks.append(0)

    def _watch_pids(self) -> None:
        """Have torch's SIGCHLD handler know the workers that there are; it takes a set of them only once."""
        if self._worker_pids_set:
            _remove_worker_pids(id(self))
        _set_worker_pids(id(self), tuple(worker.pid for worker in self._workers if worker.pid is not None))
        self._worker_pids_set = True

    def _prime(self) -> None:
        """Fill up those that have less than their share of work: the new ones."""
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
        self._worker_queue_idx_cycle = in_turn

    def _without_us(self, trace: TracebackType | None) -> TracebackType | None:
        """A traceback without the frames that hold this iterator, which would then hold itself."""
        while trace is not None and trace.tb_frame.f_locals.get("self") is self:
            trace = trace.tb_next
        return trace

    def _would_end_too_early(self) -> bool:
        """Whether the next index is the one after the sampler's last, and more workers only ask for it sooner.

        torch's samplers draw from their generator once more as they end. In an epoch that is left before its end they
        may do so only where they would have with the workers that it began with.
        """
        if self._gpuopt_length is None or self._send_idx != self._gpuopt_length:
            return False
        return self._rcvd_idx + self._gpuopt_depth <= self._gpuopt_length

    def _try_put_index(self) -> None:
        if self._would_end_too_early():
            return
        active = self._num_workers
        leaving = len(self._workers) > active
        if leaving:
            self._end_drained()
        if len(self._task_info) >= self._prefetch_factor * active:
            return  # there were more workers, whose batches are still under way or wait here
        status = self._workers_status
        if leaving:
            # Without an order torch shares the work out among all that it counts here, and loses what it cannot place.
            self._workers_status = status[:active] + [False] * (len(status) - active)
        try:
            super()._try_put_index()
        except Exception as error:
            if self._rcvd_idx + self._gpuopt_depth > self._send_idx:
                raise
            # The sampler's: training meets it where it would have with the workers that it began with.
            self._sampler_iter = _Raises(error.with_traceback(self._without_us(error.__traceback__)))
            self._gpuopt_length = self._send_idx
        finally:
            self._workers_status = status

    def _at_work(self) -> bool:
        """Whether a worker that is being taken away has something that was not received yet."""
        active = self._num_workers
        return any(len(info) == 1 and info[0] >= active for info in self._task_info.values())

    def _end_drained(self) -> None:
        """Tell the workers that are being taken away to end, once nothing of theirs is missing."""
        active = self._num_workers
        if len(self._workers) == active or self._at_work():
            return
        leaving = list(zip(self._workers[active:], self._index_queues[active:], strict=True))
        for each in (self._workers, self._index_queues, self._workers_status):
            del each[active:]
        self._watch_pids()
        self._gpuopt_ended = [ended for ended in self._gpuopt_ended if ended[0].is_alive()] + leaving
        for _, index_queue in leaving:
            index_queue.put(_End())

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # An epoch that was left early has work under way. torch waits for its workers here, but not for these.
        while self._at_work():
            index, _ = self._get_data()  # type: ignore[no-untyped-call]
            self._tasks_outstanding -= 1
            self._task_info[index] += (None,)
        self._end_drained()
        self._measure()
        super()._reset(loader, first_iter)

    def _measure(self) -> None:
        """See how long the epoch will be."""
        self._gpuopt_length = None
        with contextlib.suppress(TypeError, NotImplementedError):
            self._gpuopt_length = len(self._index_sampler)

    def _shutdown_workers(self) -> None:
        was_shut_down = self._shutdown
        try:
            super()._shutdown_workers()
        finally:
            if self._shutdown and not was_shut_down:  # else Python itself is about to end, and ends them
                self._join_ended()

    def _join_ended(self) -> None:
        while self._gpuopt_ended:
            worker, index_queue = self._gpuopt_ended.pop()
            worker.join(timeout=MP_STATUS_CHECK_INTERVAL)
            if worker.is_alive():
                worker.terminate()
                worker.join(timeout=MP_STATUS_CHECK_INTERVAL)
            index_queue.cancel_join_thread()
            index_queue.close()

    def __del__(self) -> None:
        self._shutdown_workers()


def adopt(iterator: Any, loader: DataLoader[Any]) -> ResizableIterator:
    """Make a running iterator resizable.

    Args:
        iterator: what ``iter(loader)`` gave.
        loader: its loader, over a map-style dataset.

    Returns:
        The same object.

    Raises:
        ResizeUnsupported: it is not as expected; nothing was changed.

    Example::

        iterator = adopt(iter(loader), loader)
        first = next(iterator)
        iterator.resize(4)
    """
    if isinstance(iterator, ResizableIterator):
        return iterator
    reason = _why_not(iterator)
    if reason is not None:
        raise ResizeUnsupported(reason)
    iterator.__class__ = ResizableIterator
    iterator._gpuopt_loader = weakref.ref(loader)
    iterator._gpuopt_ended = []
    iterator._gpuopt_depth = iterator._prefetch_factor * iterator._num_workers
    adopted: ResizableIterator = iterator
    adopted._measure()
    return adopted


def _why_not(iterator: Any) -> str | None:
    """Why this iterator cannot be resized; None where it can."""
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    if numbers[0] != "2" or not numbers[1].isdigit() or int(numbers[1]) < 4:
        return f"torch {torch.__version__} is none of those that this was made for (2.4 and later 2.x)"
    if _missing is not None:
        return f"torch {torch.__version__} is not as expected: {_missing}"
    if type(iterator) is not _MultiProcessingDataLoaderIter:
        return f"{type(iterator).__name__} is not torch's own iterator over worker processes"
    missing = [name for name in _PRESENT if not hasattr(iterator, name)]
    missing += [name for name, kind in _ATTRIBUTES.items() if not isinstance(getattr(iterator, name, None), kind)]
    if missing:
        return f"in torch {torch.__version__} the iterator's {', '.join(missing)} is not as expected"
    for name, parameters in _METHODS.items():
        with contextlib.suppress(TypeError, ValueError):
            if list(signature(getattr(type(iterator), name, None)).parameters) == parameters:  # type: ignore[arg-type]
                continue
        return f"in torch {torch.__version__} the iterator's {name} is not as expected"
    if list(signature(_worker_loop).parameters) != _WORKER_LOOP:
        return f"in torch {torch.__version__} a worker is started in another way than expected"
    if iterator._dataset_kind != _DatasetKind.Map or isinstance(iterator._dataset, _MAP_PIPES):
        return "the dataset shares its samples out among the workers itself"
    running = iterator._num_workers
    beside = (iterator._workers, iterator._index_queues, iterator._workers_status)
    if any(len(each) != running for each in beside):
        return f"in torch {torch.__version__} the iterator's lists of workers are not as expected"
    return None
