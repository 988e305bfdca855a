"""What a loader's workers do with their time, measured inside them, through the ``collate_fn`` that every batch passes.

The loader's ``collate_fn`` is wrapped before workers start. In each worker the wrapper times its own call, and the call
of the fetcher around it, and adds the figures to a block of shared memory that the training process reads whenever it
likes. Batches pass through untouched.
"""

from __future__ import annotations

import copy
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context, sharedctypes
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, get_worker_info

_MOST_WORKERS: Final = 256
_BYTES_EVERY: Final = 8
_ITEMS_COUNTED: Final = 64

# The fields of a worker's row in the shared block.
_BATCHES, _DATA_WALL, _DATA_CPU, _COLLATE_WALL, _COLLATE_CPU, _BYTES, _SIZED, _DOING, _SINCE, _SQUARES = range(10)
_FIELDS: Final = 10

_IDLE, _FETCHING, _COLLATING = 0.0, 1.0, 2.0
_DOING_NAMES: Final = {_IDLE: "waits for work", _FETCHING: "reads samples", _COLLATING: "collates"}


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """What all workers of the watched loaders did, summed up. Without workers it is the training process itself.

    Attributes:
        batches: batches made.
        data_wall_s: seconds spent in dataset access (``__getitem__``, ``__getitems__``, or the iterable's ``next``).
        data_cpu_s: CPU seconds of the worker's own thread in it; far less than wall means blocked on I/O or a lock.
        collate_wall_s: seconds spent in ``collate_fn``.
        collate_cpu_s: CPU seconds in it.
        bytes: bytes of the tensors and arrays in ``sized`` of the batches.
        sized: batches whose bytes were counted.
        squares_s2: sum of the squares of the seconds that each batch took, for their spread.
    """

    batches: int = 0
    data_wall_s: float = 0.0
    data_cpu_s: float = 0.0
    collate_wall_s: float = 0.0
    collate_cpu_s: float = 0.0
    bytes: int = 0
    sized: int = 0
    squares_s2: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which workers made batches."""
        return self.data_wall_s + self.collate_wall_s

    @property
    def cpu_s(self) -> float:
        """CPU seconds for it."""
        return self.data_cpu_s + self.collate_cpu_s

    @property
    def batch_bytes(self) -> float | None:
        """Mean bytes of a batch; None before one was counted."""
        return self.bytes / self.sized if self.sized else None

    @property
    def unevenness(self) -> float | None:
        """Variance of the seconds that a batch takes over the square of their mean: 0 is even; None before a batch."""
        if not self.batches or not self.busy_s:
            return None
        mean = self.busy_s / self.batches
        return max(self.squares_s2 / self.batches / mean**2 - 1.0, 0.0)

    def __add__(self, other: WorkerTimes) -> WorkerTimes:
        return WorkerTimes(
            self.batches + other.batches,
            self.data_wall_s + other.data_wall_s,
            self.data_cpu_s + other.data_cpu_s,
            self.collate_wall_s + other.collate_wall_s,
            self.collate_cpu_s + other.collate_cpu_s,
            self.bytes + other.bytes,
            self.sized + other.sized,
            self.squares_s2 + other.squares_s2,
        )

    def __sub__(self, earlier: WorkerTimes) -> WorkerTimes:
        return WorkerTimes(
            self.batches - earlier.batches,
            self.data_wall_s - earlier.data_wall_s,
            self.data_cpu_s - earlier.data_cpu_s,
            self.collate_wall_s - earlier.collate_wall_s,
            self.collate_cpu_s - earlier.collate_cpu_s,
            self.bytes - earlier.bytes,
            self.sized - earlier.sized,
            self.squares_s2 - earlier.squares_s2,
        )


_OWN: Final = frozenset({"collate_fn", "_rows", "_row", "_fetch_began"})


class TimedCollate:
    """Stands in for a loader's ``collate_fn``: calls it, hands back what it returns, and notes how long things took.

    Attributes are the wrapped function's own, to read and to set: a program that changes its ``collate_fn`` as it goes
    changes that. Picklable wherever the wrapped function is. A copy that is made for anything but a worker process
    notes nothing.

    Args:
        collate_fn: the loader's own.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn
        self._rows: Any = sharedctypes.RawArray("d", _MOST_WORKERS * _FIELDS)
        self._begin()

    def _begin(self) -> None:
        self._fetch_began: tuple[int, int] | None = None
        self._row: int | None = None

    def __call__(self, *samples: Any, **options: Any) -> Any:
        """Collate, and note how long that and the access to the samples took."""
        rows = self._rows
        if rows is None:
            return self.collate_fn(*samples, **options)
        if self._row is None:
            self._row = self._find_row()
        row = self._row
        if row < 0:
            return self.collate_fn(*samples, **options)
        began = self._fetch_began
        self._fetch_began = None
        wall = time.perf_counter_ns()
        cpu = time.thread_time_ns()
        rows[row + _DOING] = _COLLATING
        batch = self.collate_fn(*samples, **options)
        rows[row + _DOING] = _IDLE
        wall_after = time.perf_counter_ns()
        rows[row + _SINCE] = wall_after
        if began is None:  # the fetcher is new: from its next batch on it tells us when it begins
            self._watch_fetcher(row)
            return batch
        cpu_after = time.thread_time_ns()
        rows[row + _DATA_WALL] += wall - began[0]
        rows[row + _DATA_CPU] += cpu - began[1]
        rows[row + _COLLATE_WALL] += wall_after - wall
        rows[row + _COLLATE_CPU] += cpu_after - cpu
        rows[row + _SQUARES] += (wall_after - began[0]) ** 2
        if rows[row + _BATCHES] % _BYTES_EVERY == 0:
            rows[row + _BYTES] += nbytes_of(batch)
            rows[row + _SIZED] += 1
        rows[row + _BATCHES] += 1
        return batch

    def _find_row(self) -> int:
        worker = get_worker_info()
        number = worker.id if worker is not None else 0
        return number * _FIELDS if number < _MOST_WORKERS else -1

    def _watch_fetcher(self, row: int) -> None:
        """Have the fetcher that called us note when it begins a batch.

        Reads the local ``self`` of ``fetch`` in ``torch/utils/data/_utils/fetch.py`` (torch 2.4 to 2.13). Where it is
        not as expected, nothing is noted, and the diagnosis does without.
        """
        fetcher = sys._getframe(2).f_locals.get("self")
        if not callable(getattr(type(fetcher), "fetch", None)) or getattr(fetcher, "collate_fn", None) is not self:
            return
        rows = self._rows
        original = type(fetcher).fetch  # type: ignore[union-attr]
        # Held weakly, or the fetcher would hold itself, and a generator behind it would stay open after its last use.
        behind = weakref.ref(fetcher)

        def timed_fetch(index: Any) -> Any:
            rows[row + _DOING] = _FETCHING
            began = time.perf_counter_ns()
            rows[row + _SINCE] = began
            self._fetch_began = (began, time.thread_time_ns())
            try:
                return original(behind(), index)
            except BaseException:  # the end of the data, or an error in it: no batch came of this
                self._fetch_began = None
                rows[row + _DOING] = _IDLE
                raise

        fetcher.fetch = timed_fetch  # type: ignore[union-attr]

    def times(self, workers: int = _MOST_WORKERS) -> WorkerTimes:
        """What the workers have noted so far; called in the training process.

        Args:
            workers: how many workers there have been at most.
        """
        rows = self._rows[: max(min(workers, _MOST_WORKERS), 1) * _FIELDS]
        total = [sum(rows[field::_FIELDS]) for field in range(_FIELDS)]
        return WorkerTimes(
            int(total[_BATCHES]),
            total[_DATA_WALL] / 1e9,
            total[_DATA_CPU] / 1e9,
            total[_COLLATE_WALL] / 1e9,
            total[_COLLATE_CPU] / 1e9,
            int(total[_BYTES]),
            int(total[_SIZED]),
            total[_SQUARES] / 1e18,
        )

    def doing(self, worker: int) -> str:
        """What a worker does now and since when, in words; called in the training process.

        Args:
            worker: the worker's number, from 0.
        """
        if not 0 <= worker < _MOST_WORKERS:
            return "is not watched"
        row = worker * _FIELDS
        if not self._rows[row + _SINCE]:
            return "has made no batch yet"
        seconds = (time.perf_counter_ns() - self._rows[row + _SINCE]) / 1e9
        return f"{_DOING_NAMES.get(self._rows[row + _DOING], 'works')} for {seconds:.1f} s"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        return getattr(self.collate_fn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.collate_fn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.collate_fn, name)

    def __getstate__(self) -> dict[str, Any]:
        # Shared memory can be handed to a process that is being started, and to nobody else.
        rows = self._rows if context.get_spawning_popen() is not None else None
        return {"collate_fn": self.collate_fn, "_rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> TimedCollate:
        twin = TimedCollate.__new__(TimedCollate)
        twin.__setstate__({"collate_fn": copy.deepcopy(self.collate_fn, memo), "_rows": None})
        return twin


def watch_workers(loader: Any) -> tuple[TimedCollate, Callable[[], None]] | None:
    """Wrap the ``collate_fn`` of a loader, before its workers start.

    Args:
        loader: any loader; one that is no ``torch.utils.data.DataLoader`` is left alone.

    Returns:
        The clock, and the undo that gives the loader its own ``collate_fn`` back; None where nothing can be measured.
    """
    original = getattr(loader, "collate_fn", None)
    if not isinstance(loader, DataLoader) or not callable(original) or isinstance(original, TimedCollate):
        return None
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:  # persistent workers of an earlier fit still run, and still have its wrapper
        known = getattr(iterator, "_collate_fn", None)
        return (known, lambda: None) if isinstance(known, TimedCollate) else None
    clock = TimedCollate(original)
    loader.collate_fn = clock

    def undo() -> None:
        if loader.collate_fn is clock:
            loader.collate_fn = original

    return clock, undo


def nbytes_of(batch: Any, depth: int = 3) -> int:
    """Bytes of the tensors and arrays in a batch; of long sequences, the first items stand for all."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, (bytes, bytearray, str)):
        return len(batch)
    if isinstance(getattr(batch, "nbytes", None), int):  # numpy and its kin
        return int(batch.nbytes)
    if depth and isinstance(batch, dict):
        return nbytes_of(list(batch.values()), depth - 1)
    if depth and isinstance(batch, (list, tuple)) and batch:
        counted = batch[:_ITEMS_COUNTED]
        return sum(nbytes_of(item, depth - 1) for item in counted) * len(batch) // len(counted)
    return 0
