"""What a loader's workers do with their time, measured inside them, through the ``collate_fn`` that every batch passes.

The loader's ``collate_fn`` is wrapped before workers start. In each worker the wrapper times its own call, and the call
of the fetcher around it, and adds the figures to a block of shared memory that the training process reads whenever it
likes. Batches pass through untouched.

The clock on the wall is read at every batch, the thread's CPU clock, which is a system call, only at some where batches
are fast: what the others took of the CPU is reckoned from their wall time and the share that was measured so far.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing import context, sharedctypes
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_gpuopt.compat.dataloader import parts
from lightning_gpuopt.compat.fetchers import calling_fetcher
from lightning_gpuopt.measurements.loading import WorkerTimes
from lightning_gpuopt.timeline.worker_numbers import worker_number
from lightning_gpuopt.timeline.worker_stacks import WorkerLook, WorkerStacks
from lightning_gpuopt.utils.replaced_method import hide_us

_MAX_WORKERS: Final = 256
_BYTES_EVERY: Final = 8
_ALL_MEASURED: Final = 64  # batches of a worker that are all measured in full
# batches that take less than this in the mean are measured in full only now and then after that
_FAST_NS: Final = 1_000_000
_MAX_SKIPPED: Final = 14  # skipped at random, up to so many in a row, so that no rhythm of the data falls in with ours
_ITEMS_COUNTED: Final = 64

# The fields of a worker's row in the shared block.
_BATCHES, _DATA_WALL, _DATA_CPU, _COLLATE_WALL, _COLLATE_CPU, _BYTES, _SIZED, _DOING, _SINCE, _SQUARES = range(10)
# the first of the bins that count batches by the time that they took: each fourth bin begins at twice the time
_BINS: Final = 10
_FIELDS: Final = _BINS + 4 * 40
_MAX_NS: Final = 2**40 - 1
_QUARTERS: Final = (2**-0.75, 2**-0.5, 2**-0.25)

_IDLE, _FETCHING, _COLLATING = 0.0, 1.0, 2.0
_DOING_NAMES: Final = {_IDLE: "waits for work", _FETCHING: "reads samples", _COLLATING: "collates"}


_OWN: Final = frozenset({"collate_fn", "gpuopt_clock", "_looking", "_meter", "_number"})


class _Meter:
    """What a worker knows of its batches; of its own class, since setting an attribute of a TimedCollate is dear."""

    __slots__ = (
        *("_measured", "_random", "collate_share", "data_share", "fetch_began", "fetch_cpu", "number", "row", "skip"),
    )

    def __init__(self, number: int, block: Any) -> None:
        self.number = number
        # a memoryview is read and set faster than the ctypes array behind it
        self.row = memoryview(block).cast("B").cast("d")[number : number + _FIELDS]
        # of the fetch under way: nanoseconds, and of the thread's CPU; 0: unknown
        self.fetch_began = self.fetch_cpu = 0
        self.skip = 0  # batches that go without a reading of the CPU clock
        self.data_share = self.collate_share = 0.0  # CPU over wall time in batches that were measured in full
        self._measured = [0, 0, 0, 0]
        self._random = random.Random(0)  # the global one is the program's

    def add_batch(self, took_ns: int) -> None:
        row = self.row
        row[_SQUARES] += took_ns**2
        row[_BINS + _bin_of(took_ns if 0 < took_ns < _MAX_NS else _MAX_NS)] += 1
        row[_BATCHES] += 1

    def add_cpu(self, data_wall: int, data_cpu: int, collate_wall: int, collate_cpu: int) -> None:
        """A batch was measured in full: nanoseconds."""
        row, measured = self.row, self._measured
        row[_DATA_CPU] += data_cpu
        row[_COLLATE_CPU] += collate_cpu
        measured[0] += data_wall
        measured[1] += data_cpu
        measured[2] += collate_wall
        measured[3] += collate_cpu
        batches = row[_BATCHES]
        if batches >= _ALL_MEASURED and row[_DATA_WALL] + row[_COLLATE_WALL] < _FAST_NS * batches:
            self.skip = int(self._random.random() * (_MAX_SKIPPED + 1))
            self.data_share = min(measured[1] / max(measured[0], 1), 1.0)
            self.collate_share = min(measured[3] / max(measured[2], 1), 1.0)


class WorkerClock:
    """What a loader's workers have noted of their time, in shared memory; nothing of the loader."""

    def __init__(self) -> None:
        self.stacks = WorkerStacks()
        self._rows: Any = sharedctypes.RawArray("d", _MAX_WORKERS * _FIELDS)

    def meter(self, number: int) -> _Meter:
        """What notes a worker's batches, from field ``number`` on; called in the worker."""
        return _Meter(number, self._rows)

    def times(self, workers: int = _MAX_WORKERS) -> WorkerTimes:
        """What the workers, at most so many, have noted so far; called in the training process."""
        rows = self._rows[: max(min(workers, _MAX_WORKERS), 1) * _FIELDS]
        total = rows if len(rows) == _FIELDS else [sum(rows[field::_FIELDS]) for field in range(_FIELDS)]
        return WorkerTimes(
            int(total[_BATCHES]),
            total[_DATA_WALL] / 1e9,
            total[_DATA_CPU] / 1e9,
            total[_COLLATE_WALL] / 1e9,
            total[_COLLATE_CPU] / 1e9,
            int(total[_BYTES]),
            int(total[_SIZED]),
            total[_SQUARES] / 1e18,
            {number: int(count) for number, count in enumerate(total[_BINS:]) if count},
        )

    def doing(self, worker: int) -> str:
        """What a worker does now and since when, in words; called in the training process."""
        if not 0 <= worker < _MAX_WORKERS:
            return "is not monitored"
        row = worker * _FIELDS
        if not self._rows[row + _SINCE]:
            return "has made no batch yet"
        seconds = (time.perf_counter_ns() - self._rows[row + _SINCE]) / 1e9
        return f"{_DOING_NAMES.get(self._rows[row + _DOING], 'works')} for {seconds:.1f} s"


class TimedCollate:
    """Stands in for a loader's ``collate_fn``: calls it, hands back what it returns, and notes how long things took.

    Attributes are the wrapped function's own, to read and to set: a program that changes its ``collate_fn`` as it goes
    changes that. Picklable wherever the wrapped function is. A copy that is made for anything but a worker process
    notes nothing: its ``gpuopt_clock`` is None.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], clock: WorkerClock | None = None) -> None:
        self.collate_fn = collate_fn
        self.gpuopt_clock: WorkerClock | None = clock or WorkerClock()
        self._begin()

    def _begin(self) -> None:
        self._meter: _Meter | None = None
        self._number: int | None = None
        self._looking: WorkerLook | None = None

    def __call__(self, *samples: Any, **options: Any) -> Any:
        meter = self._meter
        if meter is None:
            if self.gpuopt_clock is None or (number := self._find_row()) < 0:
                return self.collate_fn(*samples, **options)
            meter = self._meter = self.gpuopt_clock.meter(number)
        rows = meter.row
        data_began, data_cpu = meter.fetch_began, meter.fetch_cpu
        meter.fetch_began = 0
        cpu = time.thread_time_ns() if data_cpu else 0
        wall = time.perf_counter_ns()
        rows[_DOING] = _COLLATING
        try:
            batch = self.collate_fn(*samples, **options)
        except BaseException as error:
            hide_us(error)
            raise
        after = time.perf_counter_ns()
        rows[_DOING] = _IDLE
        rows[_SINCE] = after
        if not data_began:  # the fetcher is new: from its next batch on it tells us when it begins
            if self._looking is not None:
                self._looking.first_batch_made()
            if -1 < (number := self._find_row()) != meter.number:  # forked from a process that loaded itself
                meter = self._meter = self.gpuopt_clock.meter(number)  # type: ignore[union-attr]
            self._watch_fetcher(meter)
            return batch
        rows[_DATA_WALL] += wall - data_began
        rows[_COLLATE_WALL] += after - wall
        if data_cpu:
            meter.add_cpu(wall - data_began, cpu - data_cpu, after - wall, time.thread_time_ns() - cpu)
            if self._number is None and rows[_BATCHES] % _BYTES_EVERY == 0:
                rows[_BYTES] += nbytes_of(batch)
                rows[_SIZED] += 1
        else:
            rows[_DATA_CPU] += meter.data_share * (wall - data_began)
            rows[_COLLATE_CPU] += meter.collate_share * (after - wall)
        if self._number is None:
            meter.add_batch(after - data_began)
        return batch

    def batch_done(self, took_ns: int, num_bytes: int) -> None:
        """A batch is whole to which this thread has read the last sample; all its samples took ``took_ns``."""
        if self._meter is not None:
            self._meter.add_batch(took_ns)
            self._meter.row[_BYTES] += num_bytes
            self._meter.row[_SIZED] += 1

    def epoch_begins(self) -> None:
        """In a worker: the dataset is to be gone through from its beginning."""
        number = self._find_row()
        if self.gpuopt_clock is None or number < 0:
            return
        self._meter = meter = self.gpuopt_clock.meter(number)
        meter.row[_DOING], meter.row[_SINCE] = _FETCHING, time.perf_counter_ns()
        look = self._look(meter)
        if look is not None:
            look.epoch_begins()

    def _find_row(self) -> int:
        number = self._number
        if number is None:
            number = worker_number() or 0
        return number * _FIELDS if number < _MAX_WORKERS else -1

    def _watch_fetcher(self, meter: _Meter) -> None:
        """Have the fetcher that called us note when it begins a batch; one that is not as expected notes nothing."""
        fetcher = calling_fetcher(self, sys._getframe(2))
        if fetcher is None:
            return
        rows = meter.row
        look = self._look(meter)
        original = type(fetcher).fetch
        placed = vars(fetcher).get("fetch")  # by the flight recorder
        # Held weakly, or the fetcher would hold itself, and a generator behind it would stay open after its last use.
        behind = weakref.ref(fetcher)

        def timed_fetch(index: Any) -> Any:
            if look is not None and look.wanted[0] != look.seen:
                look.batch_begins()
            rows[_DOING] = _FETCHING
            if meter.skip:
                meter.skip -= 1
                meter.fetch_cpu = 0
            else:
                meter.fetch_cpu = time.thread_time_ns()
            meter.fetch_began = began = time.perf_counter_ns()
            rows[_SINCE] = began
            try:
                return original(behind(), index) if placed is None else placed(index)
            except BaseException as error:  # the end of the data, or an error in it: no batch came of this
                meter.fetch_began = 0
                rows[_DOING] = _IDLE
                hide_us(error)
                raise

        fetcher.fetch = timed_fetch

    def _look(self, meter: _Meter) -> WorkerLook | None:
        """Samples this process's stacks on request; None in the training process."""
        worker, rows = get_worker_info(), meter.row
        if worker is None or self.gpuopt_clock is None:
            return None
        if self._looking is None:
            self._looking = WorkerLook(
                self.gpuopt_clock.stacks, meter.number // _FIELDS, lambda: rows[_DOING] != _IDLE, lambda: rows[_BATCHES]
            )
        return self._looking

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
        clock = self.gpuopt_clock if context.get_spawning_popen() is not None else None
        return {"collate_fn": self.collate_fn, "gpuopt_clock": clock}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __deepcopy__(self, memo: dict[int, Any]) -> TimedCollate:
        twin = TimedCollate.__new__(TimedCollate)
        twin.__setstate__({"collate_fn": copy.deepcopy(self.collate_fn, memo), "gpuopt_clock": None})
        return twin


def untimed(collate_fn: Any) -> Any:
    """The ``collate_fn`` that was wrapped."""
    while isinstance(collate_fn, TimedCollate):
        collate_fn = collate_fn.collate_fn
    return collate_fn


def clock_of(collate_fn: Any, number: int) -> TimedCollate | None:
    """The clock of a thread, by its number over all processes, that reads samples of many batches, or None."""
    if not isinstance(collate_fn, TimedCollate):
        return None
    clock = TimedCollate.__new__(TimedCollate)
    clock.__setstate__({**vars(collate_fn), "collate_fn": _no_batch})
    clock._number = number
    return clock


def _no_batch(samples: Any) -> None:
    """Samples are in their rows already."""


def watch_workers(loader: Any) -> tuple[WorkerClock, Callable[[], None]] | None:
    """Wrap a DataLoader's ``collate_fn`` before its workers start; returns the clock and the undo, or None for others.

    The loader is not kept alive.
    """
    original = getattr(loader, "collate_fn", None)
    if not isinstance(loader, DataLoader) or not callable(original) or isinstance(original, TimedCollate):
        return None
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:  # persistent workers of an earlier fit still run, and still have its wrapper
        known = getattr(parts(iterator)[0], "_collate_fn", None)
        before = known.gpuopt_clock if isinstance(known, TimedCollate) else None
        return None if before is None else (before, lambda: None)
    clock = WorkerClock()
    timed = TimedCollate(original, clock)
    loader.collate_fn = timed
    behind, placed = weakref.ref(loader), weakref.ref(timed)

    def undo() -> None:
        loader, timed = behind(), placed()
        if loader is not None and timed is not None and loader.collate_fn is timed:
            loader.collate_fn = timed.collate_fn

    return clock, undo


def _bin_of(took_ns: int) -> int:
    """Four times the binary logarithm, rounded down; ``math.log2`` takes ten times as long where its code is cold."""
    mantissa, exponent = math.frexp(took_ns)
    return 4 * exponent - 4 + (mantissa >= _QUARTERS[0]) + (mantissa >= _QUARTERS[1]) + (mantissa >= _QUARTERS[2])


def tensors_in(batch: Any, depth: int = 6) -> int:
    """Tensors in a batch; of long sequences, the first items stand for all."""
    if isinstance(batch, torch.Tensor):
        return 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if depth and isinstance(batch, (list, tuple)) and batch:
        counted = batch[:_ITEMS_COUNTED]
        return sum(tensors_in(item, depth - 1) for item in counted) * len(batch) // len(counted)
    fields = getattr(batch, "__dict__", None)
    return tensors_in(fields, depth - 1) if depth and isinstance(fields, dict) else 0


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
