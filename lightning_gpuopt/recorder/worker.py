"""What a loader's worker notes of itself: which sample it reads, since when, where, and how it failed."""

from __future__ import annotations

import inspect
import json
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from multiprocessing import context
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_gpuopt.compat.fetchers import is_fetched_by_sample, is_stream, set_fatal_handlers, when_fetcher_is_made
from lightning_gpuopt.loaders import sample_keys
from lightning_gpuopt.measurements.code_location import Call
from lightning_gpuopt.measurements.flight import COLLATES, READS, STARTS, WAITS
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.containers import attributes_of
from lightning_gpuopt.recorder.growing_containers import Growing
from lightning_gpuopt.recorder.memory import PrivateMemory, in_ring
from lightning_gpuopt.recorder.ring import AT, DOING, NO_INDEX, NUMBER, Ring, key_of
from lightning_gpuopt.recorder.stacks import StackWriter, start_ticks
from lightning_gpuopt.telemetry.memory import MemoryFiles, ProcessTimes
from lightning_gpuopt.telemetry.resources import private_and_anonymous
from lightning_gpuopt.timeline.frames import (
    bare_name,
    calls_of,
    innermost_frames,
    is_own,
    is_pythons,
    name_of,
    raw_frames,
)
from lightning_gpuopt.timeline.worker_clock import TimedCollate

log = logging.getLogger(__name__)

BEAT_S: Final = 0.25
_FIRST_BEATS_S: Final = (0.01, 0.02, 0.04, 0.08)
"""What ends a worker often does so at its first sample."""

_LOOK_EVERY: Final = 4
"""Beats between two looks at the memory of the process."""

_GROWN: Final = 8 << 20
_NEW_FAULTS: Final = 1024
"""Page faults, of 4 KiB or more each, after which it is looked at what grows; or so many bytes that are resident."""

_AT_FIRST_S: Final = 120.0
_LATER_S: Final = 5.0
"""What a worker does with memory shows at its beginning: later it is looked at less often, unless it grows by much."""

_MUCH: Final = 64 << 20

_COST_AT_FIRST: Final = 100
_COST: Final = 1000
"""A look takes one part in so many of a core: to read private memory of 2 GiB takes some 55 ms."""

_MAX_AT_START: Final = 4 << 30
"""Of a process that has more resident memory, private memory is not read as it starts."""

_MAX_NESTED: Final = 4
_MAX_INDICES: Final = 48
_MAX_MESSAGE: Final = 2000
_MAX_FRAMES: Final = 12
_OURS: Final = str(Path(__file__).parents[1]) + os.sep

_DOING: Final = AT["doing"]
_SINCE: Final = AT["since_ns"]
_HAS_INDEX: Final = AT["has_index"]
_SAMPLES: Final = AT["samples"]
_BATCHES: Final = AT["batches_read"]
_INDEX: Final = AT["index"]
_SLOW_NS: Final = 30_000
"""A sample that takes so long is worth the tenth of a microsecond that its note takes."""

_PLAIN_BATCHES: Final = frozenset((list, tuple, range, np.ndarray, torch.Tensor))
"""Keys of a batch that can be gone through as often as one likes. An iterator is used up by it."""

_READS, _COLLATES, _WAITS = (DOING.index(each) for each in (READS, COLLATES, WAITS))


@dataclass
class WorkerStart:
    """Stands in for a loader's ``worker_init_fn`` while an iterator is made: begins the worker's ring, and calls it.

    Attributes:
        before: the loader's own; None: it has none.
        board: where the ring is.
        loader: the loader's name.
        words: what else a ring says in words.
        numbers: the rank's numbers.
        stacks: has the training process write its stacks; None where nothing does.
        spawned: whether this is a copy in a process that was started anew.
    """

    before: Callable[[int], object] | None
    board: Board | None
    loader: str
    words: dict[str, str]
    numbers: dict[str, int]
    stacks: StackWriter | None
    spawned: bool = False

    def __call__(self, worker: int) -> object:
        """Called in the worker, before its dataset is used."""
        try:
            self._begin(worker)
        except Exception:  # without a ring, then
            log.debug("a worker is not recorded", exc_info=True)
        return None if self.before is None else self.before(worker)

    def _begin(self, worker: int) -> None:
        slot = self.board.slot(self.loader, worker) if self.board is not None else None
        if self.board is None or slot is None:
            return
        self.board.open()
        forked = not self.spawned
        stacks = self._stacks_here()
        ring = self.board.worker(slot)
        info = get_worker_info()
        dataset = info.dataset if info is not None else None
        reads = place_of_reading(dataset)
        ring.begin(
            {**self.words, "loader": self.loader, "place": reads, "reads": reads},
            **self.numbers,
            worker=worker,
            pid=os.getpid(),
            start_ticks=start_ticks(),
            fork=int(forked),
            doing=DOING.index(STARTS),
            since_ns=time.monotonic_ns(),
            written_ns=time.monotonic_ns(),
            stack_signal=stacks.signal if stacks is not None else 0,
        )
        beat = Beat(ring, threading.get_ident(), dataset, stacks)

        def made(fetcher: Any) -> None:
            if fetcher.dataset is not dataset:  # of a loader that the dataset has for itself
                return
            note_fetches(fetcher, ring, whole=True)
            beat.collates(fetcher.collate_fn)

        when_fetcher_is_made(made)
        note_samples_of_ours(ring)
        beat.start()

    def _stacks_here(self) -> StackWriter | None:
        stacks, path = self.stacks, self.words.get("stacks")
        if self.spawned and path:
            try:
                stacks = StackWriter(path)
            except OSError:  # the folder has gone
                return None
        if stacks is not None:
            stacks.in_worker(set_fatal_handlers)
        return stacks

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is spawned; whoever else copies an iterator's arguments gets the loader's own function.

        Nothing is opened while it is read there: a worker that cannot read its arguments would end the training.
        """
        gone = context.get_spawning_popen() is None or self.board is None or self.board.file < 0
        return {**vars(self), "board": None if gone else self.board, "stacks": None, "spawned": True}


class Beat(threading.Thread):
    """Shows four times a second that a process runs, and where its main thread is; at first more often.

    Args:
        ring: where.
        thread: the main thread's identifier.
        dataset: the worker's copy, in which containers may grow.
        stacks: writes the stacks of this process; None: nothing does.
    """

    def __init__(self, ring: Ring, thread: int, dataset: Any = None, stacks: StackWriter | None = None) -> None:
        super().__init__(name="gpuopt-recorder", daemon=True)
        self._ring = ring
        self._main = thread
        self._place = ""
        self._owners: dict[str, object] = {type(each).__name__: each for each in _nested(dataset)}
        self._growing: Growing | None = None
        self._files = MemoryFiles()
        self._stacks = stacks
        self._answered = ring.numbers[AT["asked"]]
        self._faults = self._rss = self._beats = 0
        self._first: PrivateMemory | None = None
        self._too_large = False
        self._began_s = self._looked_s = time.monotonic()
        self._due_s = 0.0

    def collates(self, collate_fn: Any) -> None:
        """What makes batches of samples may grow as well; to be said before the first beat.

        Args:
            collate_fn: the loader's.
        """
        self._owners["collate_fn"] = collate_fn.collate_fn if isinstance(collate_fn, TimedCollate) else collate_fn

    def run(self) -> None:
        """Beat until the process ends."""
        wait = threading.Event().wait
        beats = chain([self.begin], repeat(self.beat))
        for beat, wait_s in zip(beats, chain([0.0], _FIRST_BEATS_S, repeat(BEAT_S)), strict=False):
            wait(wait_s)
            try:
                beat()
            except Exception:
                log.debug("a beat of a worker was left out", exc_info=True)

    def begin(self) -> None:
        """Read what this process has of its own now: a forked worker has copied nothing yet."""
        process = self._files.process("self")
        if process is None or process.rss > _MAX_AT_START:
            self._too_large = process is not None
            return
        began_s = time.thread_time()
        self._read_private()
        self._due_s = time.monotonic() + _COST_AT_FIRST * (time.thread_time() - began_s)

    def beat(self) -> None:
        """One beat."""
        numbers = self._ring.numbers
        numbers[AT["written_ns"]] = time.monotonic_ns()
        if self._stacks is not None and numbers[AT["asked"]] != self._answered:
            self._answered = numbers[AT["asked"]]
            self._stacks.write(self._main)
        place = place_of(innermost_frames().get(self._main))
        if place and place != self._place:
            self._place = place
            self._ring.write("place", place)
        self._beats += 1
        if self._beats > len(_FIRST_BEATS_S) and self._beats % _LOOK_EVERY == 1:
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        """Read private memory, and see which container grows, where the process may have grown since the last look."""
        now_s = time.monotonic()
        process = self._files.process("self") if self._growing is None or now_s >= self._due_s else None
        if process is None:
            return
        faults, rss = process.faults - self._faults, process.rss - self._rss
        if self._growing is None:
            unknown = 0 if self._too_large else process.rss  # a process so large was forked, and has copied little
            self._grows(unknown if self._first is None else self._first.private, process)
            return
        early = now_s - self._began_s >= _AT_FIRST_S and now_s - self._looked_s < _LATER_S and rss < _MUCH
        if early or (faults < _NEW_FAULTS and rss < _GROWN):
            return
        began_s = time.thread_time()
        private = self._read_private()
        self._grows(process.rss if private is None else private, process)
        cost = _COST_AT_FIRST if now_s - self._began_s < _AT_FIRST_S else _COST
        self._looked_s, self._due_s = now_s, time.monotonic() + cost * (time.thread_time() - began_s)

    def _grows(self, held: int, process: ProcessTimes) -> None:
        """See which container grows.

        Args:
            held: bytes that this process has of its own.
            process: its page faults and resident bytes.
        """
        self._faults, self._rss = process.faults, process.rss
        try:
            if self._growing is None:
                self._growing = Growing(self._owners, process=held)
            else:
                self._ring.write("leak", self._growing.why(held))
        except Exception:  # they are the user's; the beats go on
            log.debug("it was not seen what grows", exc_info=True)

    def _read_private(self) -> int | None:
        """Read private memory, and show it in the ring beside what it was at first; None where it cannot be read."""
        samples = self._ring.numbers[_SAMPLES]
        private, anonymous = private_and_anonymous("self")
        if private is None:
            return None
        now = PrivateMemory(samples, private, anonymous)
        self._first = self._first or now
        self._ring.write("memory", in_ring(self._first, now))
        return private


def _nested(dataset: Any) -> Iterator[Any]:
    """A dataset, and those inside of it."""
    for _ in range(_MAX_NESTED):
        if dataset is None:
            return
        yield dataset
        dataset = attributes_of(dataset)[0].get("dataset")


def place_of(frame: FrameType | None) -> str:
    """Where a thread is: the innermost frame of the user's own, else of a library; empty where only loops are.

    Args:
        frame: the thread's innermost frame.
    """
    calls = calls_of(raw_frames(frame))
    libraries = (each for each in calls if not is_pythons(each.file) and not each.file.startswith(_OURS))
    return next((each.at for each in (*(own for own in calls if own.own), *libraries)), "")


def place_of_reading(dataset: object) -> str:
    """Where the first method of the user's own begins that reads samples; empty where there is none."""
    return place_of_methods(("__getitem__", "__getitems__", "__iter__"), *_nested(dataset))


def place_of_methods(names: Sequence[str], *owners: object) -> str:
    """Where the first of some methods is that is the user's own; empty where none is.

    Args:
        names: of the methods.
        owners: objects that may have them.
    """
    for owner in owners:
        for name in names:
            function: Any = getattr(type(owner), name, None)
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None and is_own(code.co_filename):
                return Call(function.__qualname__, code.co_filename, code.co_firstlineno).at
    return ""


def described(error: BaseException) -> dict[str, Any]:
    """An exception, as a ring's log has it: type, message, where, and the frames, the innermost last."""
    calls = [
        Call(bare_name(name_of(frame)), file, line, is_own(file))
        for frame, line in walk_tb(error.__traceback__)
        for file in (frame.f_code.co_filename,)
    ]
    own = [each for each in calls if each.own]
    kind = type(error)
    place = own[-1].at if own else ""
    return {
        "type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "message": _message(error)[:_MAX_MESSAGE],
        "where": place,
        "frames": [each.at for each in calls[-_MAX_FRAMES:]],
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # one of the user's own, which fails at that
        return ""


class Reading:
    """What a process reads of a dataset, batch by batch; it stands in for a batch's keys while they are gone through.

    Args:
        ring: where it is noted.
        whole: whether the ring is a worker's, which does nothing else. In a training process each sample is noted where
            samples are slow; of fast ones, whoever looks from beside (:meth:`show`) sees how far the batch has come.
        numbered: whether samples have no keys, and are numbered.

    Attributes:
        keys: of the batch that is read; None where none is.
    """

    __slots__ = ("_each", "_first", "_iterator", "_numbered", "_ring", "_whole", "keys")

    def __init__(self, ring: Ring, *, whole: bool, numbered: bool = False) -> None:
        self._ring = ring
        self._whole = whole
        self._numbered = numbered
        self._each = True
        self._first = 0
        self._iterator: Any = None
        self.keys: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        if self._each:
            return self._note_each()
        self._iterator = iter(self.keys)
        return self._iterator  # type: ignore[no-any-return]

    def begin(self, keys: Any) -> None:
        """A batch is to be read.

        Args:
            keys: of its samples.
        """
        self.keys = keys
        self._first = self._ring.numbers[_SAMPLES]

    def end(self, took_ns: int) -> None:
        """It is read.

        Args:
            took_ns: nanoseconds that it took.
        """
        count = len(self.keys)
        self._each = self._whole or took_ns >= _SLOW_NS * count
        self.keys = self._iterator = None
        numbers = self._ring.numbers
        numbers[_SAMPLES] += count
        numbers[_HAS_INDEX] = NO_INDEX

    def _note_each(self) -> Iterator[Any]:
        ring = self._ring
        numbers = ring.numbers
        given = self.keys
        numbers[_HAS_INDEX] = NUMBER
        for index, key in enumerate(given, self._first) if self._numbered else zip(given, given, strict=True):
            try:
                numbers[_INDEX] = index
            except (TypeError, ValueError):  # no number, or none that fits
                ring.index(index)
                yield key
                numbers[_HAS_INDEX] = NUMBER
                continue
            yield key
        numbers[_HAS_INDEX] = NO_INDEX
        if self._whole:
            numbers[_DOING] = _COLLATES

    def show(self) -> None:
        """Note from beside which sample is read; exact where it is called in the reading thread."""
        keys, iterator = self.keys, self._iterator
        if keys is None or self._each:
            return
        if iterator is None:  # all at once
            self.note_batch(keys)
            return
        at = len(keys) - operator.length_hint(iterator) - 1
        if 0 <= at < len(keys):
            self._ring.index(self._first + at if self._numbered else keys[at])

    def note_batch(self, keys: Any) -> None:
        """Note the keys of a batch that the dataset is asked for at once."""
        self._ring.write("indices", json.dumps(_shown(keys)))

    def failed(self, error: BaseException) -> None:
        """Note an exception of the dataset's."""
        try:
            self.show()
            index = self._ring.noted_index()
            keys = {} if index is not None or self.keys is None else {"indices": _shown(self.keys)}
            self._ring.log("exception", **described(error), index=index, **keys)
        except Exception:
            log.debug("an exception was not recorded", exc_info=True)


def note_fetches(fetcher: Any, ring: Ring, *, whole: bool) -> Reading:
    """Have a loader's fetcher note which sample it reads, and what it raises.

    The dataset is asked for the very same keys. Where it takes a batch of them at once, only the batch is noted. Of a
    batch that cannot be gone through twice, or whose class may do work of its own then, nothing is.

    Args:
        fetcher: torch's own.
        ring: where.
        whole: whether the ring is a worker's, which does nothing else.

    Returns:
        What is read.
    """
    original = type(fetcher).fetch
    behind = weakref.ref(fetcher)  # or the fetcher would hold itself
    by_sample = is_fetched_by_sample(fetcher)
    reading = Reading(ring, whole=whole, numbered=by_sample is False)
    batched, stream = bool(fetcher.auto_collation), is_stream(fetcher)
    numbers = ring.numbers

    def fetch(keys: Any) -> Any:
        began = time.monotonic_ns()
        plain = type(keys) in _PLAIN_BATCHES
        if whole:
            numbers[_SINCE] = began
            numbers[_DOING] = _READS
        if not batched:
            keys = (keys,)
            numbers[_HAS_INDEX] = NO_INDEX
            ring.index(numbers[_SAMPLES] if stream else keys[0])
        elif by_sample is None and whole and plain:
            reading.note_batch(keys)
        reading.begin(keys if plain or not batched else ())
        try:
            given = keys[0] if not batched else reading if by_sample is not None and plain else keys
            batch = original(behind(), given)
        except BaseException as error:
            if stream and isinstance(error, StopIteration):  # its end
                numbers[_HAS_INDEX] = NO_INDEX
            else:
                reading.failed(error)
            reading.keys = None
            if whole:
                numbers[_DOING] = _WAITS
            raise
        now = time.monotonic_ns()
        reading.end(now - began)
        if whole:
            numbers[_SINCE] = now
            numbers[_DOING] = _WAITS
            numbers[_BATCHES] += 1
        return batch

    fetcher.fetch = fetch
    return reading


class _KeysOfOurs:
    """Notes samples of a dataset of ours, which takes the keys of a batch at once, and goes through them."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def __call__(self, keys: Any) -> Iterator[Any]:
        ring = self._ring
        for key in keys:
            ring.index(key)
            yield key
        ring.numbers[_HAS_INDEX] = NO_INDEX


def note_samples_of_ours(ring: Ring | None) -> None:
    """Have the samples of our own datasets noted in this process; None: no more."""
    sample_keys.noted = _KeysOfOurs(ring) if ring is not None else None


def _shown(keys: Any) -> list[int | str]:
    return [_plain(key) for key in islice(keys, _MAX_INDICES)]


def _plain(key: Any) -> int | str:
    key = key_of(key)
    return key if type(key) is int else str(key)[:16]
