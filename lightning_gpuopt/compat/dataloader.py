"""The door to torch's DataLoader: what is private of its iterators is read and checked here.

``tuning/resize.py`` and ``added_workers.py`` alone go behind it, with a subclass of torch's iterator, for what
``why_not_as_expected`` checks; and ``loading/engine/iterator.py``, with one of its base, which is as old as DataLoader.

Read in torch 2.4 to 2.13 (``_MultiProcessingDataLoaderIter``) and torchdata 0.11 (``StatefulDataLoader``'s own). What
is looked at, where it was read, and what happens when it is gone or other than expected:

===============================================  ===========  ==========================================================
name                                             torch        when it is gone
===============================================  ===========  ==========================================================
``_num_workers``                                 2.4 - 2.13   the loader's ``num_workers`` counts
``_workers``                                     2.4 - 2.13   its workers are not watched
``_data_queue``, ``_worker_result_queue``,       2.4 - 2.13   its queues are not looked at
``_task_info``, ``_rcvd_idx``
``_tasks_outstanding``                           2.4 - 2.13   batches in the making are not counted
``_send_idx``, ``_dataset_kind``,                2.4 - 2.13   nothing is taken ahead of its turn
``_persistent_workers``, ``_next_data``,
``_in_order``, ``_try_put_index``
``_timeout``                                     2.4 - 2.13   a trial may wait longer than its deadline
``_base_seed``, ``_prefetch_factor``             2.4 - 2.13   persistent workers keep their number
``_shutdown_workers``                            2.4 - 2.13   workers end when the last reference to the iterator goes
``_utils.pin_memory.pin_memory``                 2.4 - 2.13   the loader's pin-memory thread is left off
``DataLoader._iterator``, ``_get_iterator``      2.4 - 2.13   the loader's workers are left as they are
``ITERATOR_KINDS``, ``ITERATOR_METHODS``,        2.4 - 2.13   workers are not changed while they run, but from the
``_worker_loop``'s parameters, ``torch._C``'s                 next epoch on; ``dataset`` is ``dataset_holder`` in 2.15
``_set_worker_pids``, ``_remove_worker_pids``
``_workers_num_tasks``                           2.6 - 2.13   there is nothing to count (before 2.6)
``_DatasetKind.create_fetcher``,                 2.4 - 2.13   a loader without workers is given none
``_pin_memory``, ``_pin_memory_device``
===============================================  ===========  ==========================================================
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
import weakref
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, Final

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, default_collate

_missing: str | None = None
try:
    from torch._C import _remove_worker_pids, _set_worker_pids
    from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
    from torch.utils.data._utils.worker import _worker_loop
    from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter
except ImportError as error:
    _missing = str(error)
    _MultiProcessingDataLoaderIter = object  # type: ignore[assignment,misc]
    _BaseDataLoaderIter = object  # type: ignore[assignment,misc]
    MP_STATUS_CHECK_INTERVAL = 5.0

BaseIterator: Any = _BaseDataLoaderIter
WorkersIterator = _MultiProcessingDataLoaderIter
CHECK_EVERY_S: Final = float(MP_STATUS_CHECK_INTERVAL)

_MAP: Final = 0
"""``_DatasetKind.Map``."""

_MAP_PIPES: Final = getattr(torch.utils.data, "MapDataPipe", ())

_QUEUES: Final = ("_data_queue", "_worker_result_queue", "_task_info", "_rcvd_idx")
_AHEAD: Final = ("_data_queue", "_dataset_kind", "_persistent_workers", "_rcvd_idx", "_send_idx", "_task_info")

ITERATOR_KINDS: Final[dict[str, type]] = {
    "_auto_collation": bool,
    "_base_seed": int,
    "_collate_fn": object,
    "_data_queue": object,
    "_dataset": object,
    "_dataset_kind": int,
    "_drop_last": bool,
    "_index_queues": list,
    "_index_sampler": object,
    "_num_workers": int,
    "_persistent_workers": bool,
    "_prefetch_factor": int,
    "_rcvd_idx": int,
    "_sampler_iter": object,
    "_send_idx": int,
    "_shared_seed": object,
    "_shutdown": bool,
    "_task_info": dict,
    "_tasks_outstanding": int,
    "_timeout": (int, float),  # type: ignore[dict-item]
    "_worker_init_fn": object,
    "_worker_pids_set": bool,
    "_worker_queue_idx_cycle": itertools.cycle,
    "_worker_result_queue": object,
    "_workers": list,
    "_workers_done_event": object,
    "_workers_status": list,
}
ITERATOR_METHODS: Final = {
    "_get_data": ["self"],
    "_next_data": ["self"],
    "_next_index": ["self"],
    "_reset": ["self", "loader", "first_iter"],
    "_shutdown_workers": ["self"],
    "_try_get_data": ["self", "timeout"],
    "_try_put_index": ["self"],
}
WORKER_LOOP: Final = [
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


# -- the workers of an iterator, and its queues


def running_workers(loader: Any, iterator: Any) -> int:
    """The workers behind an iterator; what its loader has, where it is not torch's own."""
    workers = getattr(iterator, "_num_workers", None)
    return int(getattr(loader, "num_workers", 0) if workers is None else workers)


def workers_of(iterator: Any) -> list[Any]:
    """The worker processes that run behind an iterator; none where it is not torch's own."""
    return list(getattr(iterator, "_workers", ()))


def worker_pids(iterators: list[Any]) -> list[int]:
    """Process ids of the workers that run behind these iterators."""
    pids = [getattr(worker, "pid", None) for iterator in iterators for worker in workers_of(iterator)]
    return [pid for pid in pids if pid is not None]


def shut_down(iterator: Any) -> None:
    """End the workers of an iterator, where it has some; it gives nothing more."""
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def wait_at_most(iterator: Any, seconds: float) -> None:
    """Have an iterator's next batch end in torch's error after so many seconds, unless its own ``timeout`` is less.

    Raises:
        AttributeError: it has none of its own.
    """
    if not iterator._timeout or seconds < iterator._timeout:
        iterator._timeout = seconds


def has_queues(iterator: Any) -> bool:
    """Whether an iterator's queues are as expected: then the functions below know them."""
    if not all(hasattr(iterator, name) for name in _QUEUES) or not isinstance(iterator._task_info, dict):
        return False
    try:
        iterator._data_queue.qsize()
        iterator._worker_result_queue.qsize()
    except (NotImplementedError, OSError):  # macOS has no qsize
        return False
    return True


def awaited_worker(iterator: Any) -> int | None:
    """Who makes the batch whose turn it is; None where nobody was asked for it."""
    task = iterator._task_info.get(iterator._rcvd_idx)
    return task[0] if task else None


def waiting(iterator: Any) -> tuple[int, bool]:
    """How many batches can be taken, and whether others lie behind the pin-memory thread."""
    ready = int(iterator._data_queue.qsize())
    pins = not ready and iterator._worker_result_queue is not iterator._data_queue
    return ready, pins and iterator._worker_result_queue.qsize() > 1


def shares_of_others(iterator: Any, worker: int | None) -> tuple[int, int]:
    """What the workers but this one were asked for: batches, and how many of them have come."""
    others = [info for info in iterator._task_info.values() if info[0] != worker]
    return len(others), sum(len(info) == 2 for info in others) + int(iterator._data_queue.qsize())


def lies_ready(iterator: Any) -> bool | None:
    """Whether there is a batch to take from the queue; None for an iterator that is not as expected.

    It may be another than the one whose turn it is: where they come out of order, that one is still waited for.
    """
    if not has_queues(iterator):
        return None
    task = iterator._task_info.get(iterator._rcvd_idx, ())
    return len(task) < 2 and iterator._data_queue.qsize() > 0


def in_the_making(iterator: Any) -> int | None:
    """Batches that workers were asked for and have not sent; None for an iterator that is not as expected."""
    asked_for = getattr(iterator, "_tasks_outstanding", None)
    if not isinstance(asked_for, int) or not has_queues(iterator):
        return None
    queues = {iterator._data_queue, iterator._worker_result_queue}  # two where batches are pinned
    return max(asked_for - sum(int(each.qsize()) for each in queues), 0)


def batches_there(iterator: Any) -> int | None:
    """Batches that workers have sent and nobody has taken yet; None for an iterator that is not as expected."""
    making = in_the_making(iterator)
    if making is None:
        return None
    received = sum(len(info) == 2 for info in iterator._task_info.values())
    return max(int(iterator._tasks_outstanding) - making, 0) + received


class WorkerBatches:
    """The batches that worker processes have made for an iterator, and the next of them taken ahead of its turn.

    When torch hands out a batch it asks the sampler for one more index. Taken ahead, that waits until the turn of the
    batch has come (:meth:`ask_for_more`): so the sampler is asked, and draws its random numbers, exactly when it would
    have been. The batches of an iterable dataset have no indices to draw; there the workers are asked at once.

    Args:
        iterator: of a DataLoader; :func:`has_workers` must be true for it.
    """

    __slots__ = ("_asked", "_indexed", "iterator")

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self._indexed = iterator._dataset_kind == _MAP
        self._asked = 0

    def _count(self) -> None:
        self._asked += 1

    @property
    def may_be_taken_ahead(self) -> bool:
        """Whether a worker was asked for the next batch; else taking it would end the iterator.

        Not where workers over an iterable dataset live on: one batch more would have been drawn if the epoch is left.
        """
        if not self._indexed:
            return not self.iterator._persistent_workers
        return bool(self.iterator._task_info)

    @property
    def is_next_ready(self) -> bool:
        """Whether the next batch can be taken without waiting for a worker."""
        iterator = self.iterator
        awaited = iterator._rcvd_idx
        info = iterator._task_info.get(awaited)
        if info is None:
            return False
        if len(info) == 2:
            return True
        received = iterator._data_queue
        if isinstance(received, queue.Queue):  # behind the pin-memory thread
            if getattr(iterator, "_in_order", True):
                return any(item[0] == awaited for item in tuple(received.queue))
            return bool(received.qsize())
        try:
            waiting: int = received.qsize()
        except (NotImplementedError, OSError):  # macOS has none
            return False
        if not waiting or not getattr(iterator, "_in_order", True):
            return bool(waiting)
        # More than the other workers can have sent: then it is among them, since each worker sends in order.
        worker = info[0]
        others = sum(len(each) == 1 and each[0] != worker for each in iterator._task_info.values())
        return bool(waiting > others)

    def take_ahead(self) -> None:
        """From here on, until :meth:`taken`, what is taken is taken ahead of its turn."""
        if self._indexed:
            self._asked = 0
            self.iterator._try_put_index = self._count

    def taken(self) -> int:
        """It was taken.

        Returns:
            How often the workers are to be asked for more when its turn has come.
        """
        if not self._indexed:
            return 0
        vars(self.iterator).pop("_try_put_index", None)
        return self._asked

    def ask_for_more(self, times: int) -> None:
        """The turn of a batch that was taken ahead has come.

        Raises:
            Exception: what the sampler raises, where it would have raised it.
        """
        for _ in range(times):
            self.iterator._try_put_index()


def has_workers(iterator: Any) -> bool:
    """Whether worker processes feed this iterator, in the way that :class:`WorkerBatches` knows.

    Not where they do so in place of the training process: there a batch must be as the dataset is when its turn comes.
    """
    return (
        all(hasattr(iterator, name) for name in _AHEAD)
        and not getattr(iterator, "as_without_workers", False)
        and isinstance(iterator._task_info, dict)
        and callable(getattr(iterator, "_try_put_index", None))
        and callable(getattr(type(iterator), "_next_data", None))
        and hasattr(iterator, "__dict__")
    )


def may_pin(loader: Any) -> bool:
    """Whether a loader's own pin-memory thread can be switched on and batches stay of the types that they have.

    Where workers make the batches. In torch 2.4 that thread makes lists of tuples; ``default_collate`` gives
    none.
    """
    if not isinstance(loader, DataLoader) or loader.pin_memory or not loader.num_workers:
        return False
    if loader.collate_fn is default_collate:
        return True
    try:
        from torch.utils.data._utils.pin_memory import pin_memory

        return type(pin_memory(("",))) is tuple  # type: ignore[no-untyped-call]
    except Exception:
        return False


def pin_batch(batch: Any, device: str | None) -> Any:
    """A batch in page-locked memory, as a loader's own pin-memory thread makes it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch, device)  # type: ignore[no-untyped-call]


# -- other workers for an iterator that runs


def is_plain(loader: DataLoader[Any]) -> bool:
    """Whether torch itself makes this loader's iterators, over a map-style dataset."""
    ours = getattr(type(loader), "_get_iterator", None) is getattr(DataLoader, "_get_iterator", None)
    return ours and getattr(loader, "_dataset_kind", None) == _MAP and not isinstance(loader.dataset, _MAP_PIPES)


def iterator_maker(loader: Any) -> str | None:
    """The name of the method with which a loader makes its iterators; None where it has none."""
    return "_get_iterator" if callable(getattr(loader, "_get_iterator", None)) else None


def persistent_iterator(loader: Any) -> Any:
    """The iterator of a loader whose workers persist; None before its first epoch, and where they do not persist."""
    return getattr(loader, "_iterator", None)


def is_like(iterator: Any, loader: DataLoader[Any]) -> bool:
    """Whether an iterator has the workers, and the batches ahead, that its loader should have."""
    ahead = loader.prefetch_factor or getattr(iterator, "_prefetch_factor", None)
    now = getattr(iterator, "_num_workers", None), getattr(iterator, "_prefetch_factor", None)
    return now == (loader.num_workers, ahead)


def set_prefetch(iterator: Any, factor: int | None) -> None:
    """Have the workers of an iterator prepare so many batches ahead, from its next epoch on."""
    if factor:
        iterator._prefetch_factor = factor


def as_persistent(loader: DataLoader[Any], create: Callable[[], Any]) -> Any:
    """An iterator whose workers live on when its epoch ends, of a loader that does not say so itself.

    Args:
        loader: the loader; it says so for as long as its iterator is made.
        create: makes it.
    """
    before = loader.persistent_workers
    vars(loader)["persistent_workers"] = True  # an assignment is refused once a loader is made
    try:
        return create()
    finally:
        vars(loader)["persistent_workers"] = before


def reset_persistent(iterator: Any, loader: DataLoader[Any]) -> None:
    """Have an iterator of :func:`as_persistent` begin another epoch; :func:`why_not_reset` must be None.

    A new iterator would have drawn a base seed: that is drawn here, so that what is drawn after it stays the same.
    """
    iter(iterator._index_sampler)  # as a new iterator has it: once before the seed, and once after it
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    iterator._reset(loader)


def why_not_reset() -> str | None:
    """Why an iterator of :func:`as_persistent` cannot begin another epoch with this torch; None where it can."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        if list(signature(WorkersIterator._reset).parameters) == ITERATOR_METHODS["_reset"]:
            return None
    return f"in torch {torch.__version__} the iterator's _reset is not as expected"


def end_persistent(loader: DataLoader[Any]) -> int | None:
    """End the persistent workers of a loader, between epochs; it makes others when it is iterated.

    Returns:
        The seed that its workers had.
    """
    iterator: Any = loader._iterator
    if not hasattr(iterator, "_base_seed") or not hasattr(iterator, "_shutdown_workers"):
        return None
    iterator._shutdown_workers()
    loader._iterator = None
    return int(iterator._base_seed)


def why_not_as_expected(iterator: Any) -> str | None:
    """Why an iterator's workers cannot be changed while they run; None where all that it takes is as expected."""
    reason = why_torch_is_not_as_expected()
    if reason is not None:
        return reason
    if type(iterator) is not WorkersIterator:
        return f"{type(iterator).__name__} is not torch's own iterator over worker processes"
    missing = [
        name
        for name, kind in ITERATOR_KINDS.items()
        if not hasattr(iterator, name) or not isinstance(getattr(iterator, name), kind)
    ]
    if missing:
        return f"in torch {torch.__version__} the iterator's {', '.join(missing)} is not as expected"
    if iterator._dataset_kind != _MAP or isinstance(iterator._dataset, _MAP_PIPES):
        return "the dataset shares its samples out among the workers itself"
    if any(
        len(each) != iterator._num_workers
        for each in (iterator._workers, iterator._index_queues, iterator._workers_status)
    ):
        return f"in torch {torch.__version__} the iterator's lists of workers are not as expected"
    return None


def why_torch_is_not_as_expected() -> str | None:
    """Why no iterator's workers can be changed with this torch; None where its classes are as expected."""
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    if numbers[0] != "2" or not numbers[1].isdigit() or int(numbers[1]) < 4:
        return f"torch {torch.__version__} is none of those that this was made for (2.4 and later 2.x)"
    if _missing is not None:
        return f"torch {torch.__version__} is not as expected: {_missing}"
    for name, parameters in ITERATOR_METHODS.items():
        with contextlib.suppress(TypeError, ValueError):
            if list(signature(getattr(WorkersIterator, name)).parameters) == parameters:
                continue
        return f"in torch {torch.__version__} the iterator's {name} is not as expected"
    if _parameters_of_a_worker() != WORKER_LOOP:
        return f"in torch {torch.__version__} a worker is started in another way than expected"
    return None


def _parameters_of_a_worker() -> list[str]:
    """Of ``_worker_loop``; its ``dataset`` is ``dataset_holder`` since 2.15, a list that the worker empties."""
    return [name.replace("dataset_holder", "dataset") for name in signature(_worker_loop).parameters]


def watch_sampler(iterator: Any, around: Callable[[Any], Any]) -> None:
    """Put something around what an iterator draws its indices from, in this epoch and in those of its workers to come.

    Args:
        iterator: torch's own.
        around: makes a sampler of the loader's; it has a method ``rest``, which goes on with an iterator.
    """
    if hasattr(iterator, "_index_sampler") and hasattr(iterator, "_sampler_iter"):
        watched = around(iterator._index_sampler)
        iterator._index_sampler, iterator._sampler_iter = watched, watched.rest(iterator._sampler_iter)


def worker_process(
    iterator: Any, context: Any, index_queue: Any, worker_id: int, num_workers: int, base_seed: int
) -> Any:
    """A worker for an iterator, as torch makes them, not yet started."""
    held = "dataset_holder" in signature(_worker_loop).parameters
    worker = context.Process(
        target=_worker_loop,
        args=(
            iterator._dataset_kind,
            [iterator._dataset] if held else iterator._dataset,
            index_queue,
            iterator._worker_result_queue,
            iterator._workers_done_event,
            iterator._auto_collation,
            iterator._collate_fn,
            iterator._drop_last,
            base_seed,
            iterator._worker_init_fn,
            worker_id,
            num_workers,
            iterator._persistent_workers,
            iterator._shared_seed,
        ),
    )
    worker.daemon = True
    return worker


def fetcher_here(iterator: Any) -> Callable[[Any], Any]:
    """What makes the batches of an iterator in this process, as an iterator without workers does.

    Raises:
        AttributeError: this torch has no such thing.
    """
    create: Any = torch.utils.data._DatasetKind.create_fetcher
    fetcher = create(
        iterator._dataset_kind, iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last
    )

    pins, device = iterator._pin_memory, iterator._pin_memory_device  # and not the iterator, which will hold this

    def fetch(index: Any) -> Any:
        batch = fetcher.fetch(index)
        if not pins:
            return batch
        return pin_batch(batch, device)

    return fetch


def watch_pids(iterator: Any, workers: list[Any]) -> None:
    """Have torch's SIGCHLD handler raise where one of these workers ends; it takes a set of them only once."""
    if iterator._worker_pids_set:
        _remove_worker_pids(id(iterator))
    _set_worker_pids(id(iterator), tuple(worker.pid for worker in workers if worker.pid is not None))
    iterator._worker_pids_set = True


def result_reader(iterator: Any) -> Any:
    """The end of the pipe from which an iterator reads results itself; None behind the pin-memory thread."""
    results = iterator._worker_result_queue
    return getattr(results, "_reader", None) if iterator._data_queue is results else None


@contextlib.contextmanager
def raises_for(workers: list[Any]) -> Iterator[None]:
    """Have torch's SIGCHLD handler raise in the training thread where one of these workers ends meanwhile."""
    key = id(workers)
    _set_worker_pids(key, tuple(worker.pid for worker in workers))
    try:
        yield
    finally:
        _remove_worker_pids(key)


def may_write(iterator: Any, seconds: float) -> bool:
    """Whether workers can still send to an iterator: none has died with the lock of its result queue."""
    lock = getattr(iterator._worker_result_queue, "_wlock", None)
    if lock is None:
        return True
    if not lock.acquire(timeout=seconds):
        return False
    lock.release()
    return True


# -- how long an iterator keeps its caller waiting


def time_fetches(iterator: Any, spent_ns: list[int]) -> bool:
    """Add the nanoseconds of each fetch from an iterator to ``spent_ns[0]``; False for one that is not torch's own.

    Args:
        iterator: of a DataLoader; it is held weakly.
        spent_ns: a list of one number.
    """
    if not callable(getattr(type(iterator), "_next_data", None)) or not hasattr(iterator, "__dict__"):
        return False
    if "_next_data" in vars(iterator):
        return True
    behind = weakref.ref(iterator)

    def next_data() -> Any:
        began = time.perf_counter_ns()
        here: Any = behind()
        try:
            return type(here)._next_data(here)
        finally:
            spent_ns[0] += time.perf_counter_ns() - began

    iterator._next_data = next_data
    return True
