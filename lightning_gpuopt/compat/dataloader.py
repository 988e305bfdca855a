"""The door to torch's DataLoader: what is private of its iterators is read and checked here.

Nothing of it is changed but what :class:`WorkerBatches` puts off. ``loading/engine/iterator.py`` and
``tuning/segments.py`` have iterators of their own, of torch's classes in name: for those who ask for the class.

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
``_shutdown_workers``                            2.4 - 2.13   workers end when the last reference to the iterator goes
``_shutdown``                                    2.4 - 2.13   a worker that was killed may end a moment later
``_utils.pin_memory.pin_memory``                 2.4 - 2.13   the loader's pin-memory thread is left off
``DataLoader._iterator``, ``_get_iterator``,     2.4 - 2.13   the loader's workers are left as they are
``_reset``
``_MultiProcessingDataLoaderIter``               2.4 - 2.13   Lightning drops persistent workers without ending them
===============================================  ===========  ==========================================================
"""

from __future__ import annotations

import inspect
import queue
import time
import weakref
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

try:
    from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter
except ImportError:
    _BaseDataLoaderIter = _MultiProcessingDataLoaderIter = object  # type: ignore[assignment,misc]

BaseIterator: Any = _BaseDataLoaderIter
# the kind of iterator that Lightning has end its workers as it drops a loader; nothing else of it is used
WorkersIterator: Any = _MultiProcessingDataLoaderIter
_MAP: Final = 0  # ``_DatasetKind.Map``
_KILLED_S: Final = 5.0  # at most, for a worker that torch killed: torch 2.4 does not wait until it is gone
_MAP_PIPES: Final = tuple(filter(None, [getattr(torch.utils.data, "MapDataPipe", None)]))
# what a subclass leaves alone that iterates as a DataLoader does, and so do copies of it
_ITERATES_BY: Final = frozenset(
    {
        *(name for name in vars(DataLoader) if not name.startswith("__")),
        *inspect.signature(DataLoader).parameters,
        *("__iter__", "__del__", "__getattribute__"),
    }
)
_QUEUES: Final = ("_data_queue", "_worker_result_queue", "_task_info", "_rcvd_idx")
_AHEAD: Final = ("_data_queue", "_dataset_kind", "_persistent_workers", "_rcvd_idx", "_send_idx", "_task_info")

# -- the workers of an iterator, and its queues


def parts(iterator: Any) -> list[Any]:
    """The iterators of torch's behind one, first the one whose batches come; one that is not of several is its own."""
    return getattr(iterator, "gpuopt_parts", None) or [iterator]


def number_from(iterator: Any, first: int) -> None:
    """Give the workers of an iterator numbers from ``first`` on, in reports."""
    if first:
        iterator.gpuopt_first = first


def _first(iterator: Any) -> int:
    return int(getattr(iterator, "gpuopt_first", 0))


def running_workers(loader: Any, iterator: Any) -> int:
    """The workers behind an iterator; what its loader has, if it is not torch's own."""
    workers = getattr(iterator, "_num_workers", None)
    return int(getattr(loader, "num_workers", 0) if workers is None else workers)


def workers_of(iterator: Any) -> list[Any]:
    """The worker processes that run behind an iterator; none if it is not torch's own."""
    return [worker for _, worker in numbered_workers(iterator)]


def numbered_workers(iterator: Any) -> list[tuple[int, Any]]:
    """The same, each with its number in reports."""
    behind = [(_first(part), getattr(part, "_workers", ())) for part in parts(iterator)]
    return [(first + number, worker) for first, workers in behind for number, worker in enumerate(workers)]


def worker_pids(iterators: list[Any]) -> list[int]:
    pids = [getattr(worker, "pid", None) for iterator in iterators for worker in workers_of(iterator)]
    return [pid for pid in pids if pid is not None]


def shut_down(iterator: Any) -> None:
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()
    if getattr(iterator, "_shutdown", False):
        for worker in workers_of(iterator):
            worker.join(_KILLED_S)


def wait_at_most(iterator: Any, seconds: float) -> None:
    """Have an iterator's next batch end in torch's error after so many seconds, unless its own ``timeout`` is less."""
    if not iterator._timeout or seconds < iterator._timeout:
        iterator._timeout = seconds


def has_queues(iterator: Any) -> bool:
    """Whether an iterator's queues are as expected: then the functions below know them."""
    return all(map(_has_queues, parts(iterator)))


def _has_queues(part: Any) -> bool:
    if not all(hasattr(part, name) for name in _QUEUES) or not isinstance(part._task_info, dict):
        return False
    try:
        part._data_queue.qsize()
        part._worker_result_queue.qsize()
    except (NotImplementedError, OSError):  # macOS has no qsize
        return False
    return True


def awaited_worker(iterator: Any) -> int | None:
    """The number of the worker that makes the next batch; None if no worker was asked for it."""
    part = parts(iterator)[0]
    task = part._task_info.get(part._rcvd_idx)
    return _first(part) + task[0] if task else None


def waiting(iterator: Any) -> tuple[int, bool]:
    """How many batches can be taken, and whether others lie behind the pin-memory thread."""
    part = parts(iterator)[0]
    ready = int(part._data_queue.qsize())
    pins = not ready and part._worker_result_queue is not part._data_queue
    return ready, pins and part._worker_result_queue.qsize() > 1


def shares_of_others(iterator: Any, worker: int | None) -> tuple[int, int]:
    """What the workers but this one were asked for: batches, and how many of them have come."""
    part = parts(iterator)[0]
    but = None if worker is None else worker - _first(part)
    others = [info for info in part._task_info.values() if info[0] != but]
    return len(others), sum(len(info) == 2 for info in others) + int(part._data_queue.qsize())


def lies_ready(iterator: Any) -> bool | None:
    """Whether there is a batch to take, perhaps not the one whose turn it is; None: the iterator is not as expected."""
    if not has_queues(iterator):
        return None
    part = parts(iterator)[0]
    task = part._task_info.get(part._rcvd_idx, ())
    return len(task) < 2 and part._data_queue.qsize() > 0


def in_the_making(iterator: Any) -> int | None:
    """Batches that workers were asked for and have not sent; None for an iterator that is not as expected."""
    counts = [_in_the_making(part) for part in parts(iterator)]
    return None if None in counts else sum(each or 0 for each in counts)


def _in_the_making(part: Any) -> int | None:
    asked_for = getattr(part, "_tasks_outstanding", None)
    if not isinstance(asked_for, int) or not _has_queues(part):
        return None
    queues = {part._data_queue, part._worker_result_queue}  # two where batches are pinned
    return max(asked_for - sum(int(each.qsize()) for each in queues), 0)


def batches_there(iterator: Any) -> int | None:
    """Batches that workers have sent and nobody has taken yet; None for an iterator that is not as expected."""
    there = 0
    for part in parts(iterator):
        making = _in_the_making(part)
        if making is None:
            return None
        received = sum(len(info) == 2 for info in part._task_info.values())
        there += max(int(part._tasks_outstanding) - making, 0) + received
    return there


class WorkerBatches:
    """The batches that worker processes have made for an iterator, and the next of them taken ahead of its turn.

    When torch hands out a batch it asks the sampler for one more index. Taken ahead, that waits until the turn of the
    batch has come (:meth:`ask_for_more`): so the sampler is asked, and draws its random numbers, exactly when it would
    have been. The batches of an iterable dataset have no indices to draw; there the workers are asked at once.
    """

    __slots__ = ("_asked", "_indexed", "iterator")

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self._indexed = parts(iterator)[0]._dataset_kind == _MAP
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
        return bool(parts(self.iterator)[0]._task_info)

    @property
    def is_next_ready(self) -> bool:
        part = parts(self.iterator)[0]
        awaited = part._rcvd_idx
        info = part._task_info.get(awaited)
        if info is None:
            return False
        if len(info) == 2:
            return True
        received = part._data_queue
        if isinstance(received, queue.Queue):  # behind the pin-memory thread
            if getattr(part, "_in_order", True):
                return any(item[0] == awaited for item in tuple(received.queue))
            return bool(received.qsize())
        try:
            waiting: int = received.qsize()
        except (NotImplementedError, OSError):  # macOS has none
            return False
        if not waiting or not getattr(part, "_in_order", True):
            return bool(waiting)
        # More than the other workers can have sent: then it is among them, since each worker sends in order.
        worker = info[0]
        others = sum(len(each) == 1 and each[0] != worker for each in part._task_info.values())
        return bool(waiting > others)

    def take_ahead(self) -> None:
        """From here on, until :meth:`taken`, what is taken is taken ahead of its turn."""
        if self._indexed:
            self._asked = 0
            self.iterator._try_put_index = self._count

    def taken(self) -> int:
        """It was taken; gives how often the workers are to be asked for more when its turn has come."""
        if not self._indexed:
            return 0
        vars(self.iterator).pop("_try_put_index", None)
        return self._asked

    def ask_for_more(self, times: int) -> None:
        """The turn of a batch that was taken ahead has come."""
        for _ in range(times):
            self.iterator._try_put_index()


def has_workers(iterator: Any) -> bool:
    """Whether worker processes feed this iterator, in the way that :class:`WorkerBatches` knows.

    Not where they do so in place of the training process: there a batch must be as the dataset is when its turn comes.
    """
    return not getattr(iterator, "as_without_workers", False) and all(
        all(hasattr(part, name) for name in _AHEAD)
        and isinstance(part._task_info, dict)
        and callable(getattr(part, "_try_put_index", None))
        and callable(getattr(type(part), "_next_data", None))
        and hasattr(part, "__dict__")
        for part in parts(iterator)
    )


def may_pin(loader: Any) -> bool:
    """Whether a loader's own pin-memory thread can be switched on, and batches of workers stay of their types."""
    if not isinstance(loader, DataLoader) or loader.pin_memory or not loader.num_workers:
        return False
    if loader.collate_fn is default_collate:
        return True
    try:  # torch 2.4 makes lists of tuples; ``default_collate`` gives none
        from torch.utils.data._utils.pin_memory import pin_memory

        return type(pin_memory(("",))) is tuple  # type: ignore[no-untyped-call]
    except Exception:
        return False


def pin_batch(batch: Any, device: str | None) -> Any:
    """A batch in page-locked memory, as a loader's own pin-memory thread makes it."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch, device)  # type: ignore[no-untyped-call]


# -- copies of a loader, which iterate as it does


def is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader iterates as torch's own, over a map-style dataset: its class changes nothing of that."""
    kinds = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    changed = {name for kind in kinds for name in vars(kind)} & _ITERATES_BY
    return not changed and not isinstance(loader.dataset, (IterableDataset, *_MAP_PIPES))


def copy_of(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """A loader with this one's attributes, whatever they are, but for these; without iterator, by no constructor."""
    twin: DataLoader[Any] = object.__new__(type(loader))
    left = iterator_maker(loader)
    # Lightning notes in "__pl_..." how a loader was made, and what was set on it: an iterator would hold itself in it.
    own = {name: value for name, value in vars(loader).items() if name != left and not name.startswith("__pl_")}
    vars(twin).update({**own, "_iterator": None, **changed})
    return twin


def iterator_maker(loader: Any) -> str | None:
    """The name of the method with which a loader makes its iterators; None if it has none."""
    return "_get_iterator" if callable(getattr(loader, "_get_iterator", None)) else None


def persistent_iterator(loader: Any) -> Any:
    """The iterator of a loader whose workers persist; None before its first epoch, and where they do not persist."""
    return getattr(loader, "_iterator", None)


# -- how long an iterator keeps its caller waiting


def time_fetches(iterator: Any, spent_ns: list[int]) -> bool:
    """Add the nanoseconds of each fetch from an iterator to ``spent_ns[0]``; False for one that is not torch's own."""
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
