"""What a loader's worker notes of itself: which sample it reads, since when, where, and how it failed."""

from __future__ import annotations

import json
import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import context
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

from lightning_gpuopt.compat.fetchers import is_fetched_by_sample, set_fatal_handlers, when_fetcher_is_made
from lightning_gpuopt.loaders import sample_keys
from lightning_gpuopt.measurements.code_location import Call
from lightning_gpuopt.measurements.flight import COLLATES, READS, STARTS, WAITS
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.ring import AT, DOING, NO_INDEX, Ring
from lightning_gpuopt.recorder.stacks import StackWriter, start_ticks
from lightning_gpuopt.timeline.frames import calls_of, innermost_frames, is_own, name_of, raw_frames

log = logging.getLogger(__name__)

BEAT_S: Final = 0.25
_MAX_INDICES: Final = 48
_MAX_MESSAGE: Final = 2000
_MAX_FRAMES: Final = 12

_DOING: Final = AT["doing"]
_SINCE: Final = AT["since_ns"]
_HAS_INDEX: Final = AT["has_index"]
_SAMPLES: Final = AT["samples"]
_BATCHES: Final = AT["batches_read"]
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
        parent: the training process.
    """

    before: Callable[[int], object] | None
    board: Board
    loader: str
    words: dict[str, str]
    numbers: dict[str, int]
    stacks: StackWriter | None
    parent: int = field(default_factory=os.getpid)

    def __call__(self, worker: int) -> object:
        """Called in the worker, before its dataset is used."""
        try:
            self._begin(worker)
        except Exception:  # without a ring, then
            log.debug("a worker is not recorded", exc_info=True)
        return None if self.before is None else self.before(worker)

    def _begin(self, worker: int) -> None:
        slot = self.board.slot(self.loader, worker)
        if slot is None:
            return
        forked = self.stacks is not None and self.stacks.process != os.getpid()
        stacks = self.stacks
        if stacks is not None:
            stacks.in_worker(set_fatal_handlers)
        ring = self.board.worker(slot)
        ring.begin(
            {**self.words, "loader": self.loader},
            **self.numbers,
            worker=worker,
            pid=os.getpid(),
            start_ticks=start_ticks(),
            fork=int(os.getppid() == self.parent and forked),
            doing=DOING.index(STARTS),
            since_ns=time.monotonic_ns(),
            written_ns=time.monotonic_ns(),
            stack_signal=stacks.signal if stacks is not None else 0,
        )
        when_fetcher_is_made(lambda fetcher: note_fetches(fetcher, ring, whole=True))
        sample_keys.noted = lambda keys: Keys(keys, ring, whole=True)
        Beat(ring, threading.get_ident()).start()

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is spawned; whoever else copies an iterator's arguments gets the loader's own function."""
        if context.get_spawning_popen() is None:
            return {**vars(self), "board": None, "stacks": None}
        return vars(self)


class Beat(threading.Thread):
    """Shows four times a second that a process runs, and where its main thread is.

    Args:
        ring: where.
        thread: the main thread's identifier.
    """

    def __init__(self, ring: Ring, thread: int) -> None:
        super().__init__(name="gpuopt-recorder", daemon=True)
        self._ring = ring
        self._main = thread
        self._place = ""

    def run(self) -> None:
        """Beat until the process ends."""
        wait = threading.Event().wait
        while not wait(BEAT_S):
            try:
                self.beat()
            except Exception:
                log.debug("a worker is recorded no more", exc_info=True)
                return

    def beat(self) -> None:
        """One beat."""
        self._ring.numbers[AT["written_ns"]] = time.monotonic_ns()
        place = place_of(innermost_frames().get(self._main))
        if place != self._place:
            self._place = place
            self._ring.write("place", place)


def place_of(frame: FrameType | None) -> str:
    """Where a thread is: the innermost frame of the user's own, else the innermost one; empty where only loops are.

    Args:
        frame: the thread's innermost frame.
    """
    calls = calls_of(raw_frames(frame))
    own = next((each for each in calls if each.own), None)
    return own.at if own is not None else calls[0].at if calls else ""


def described(error: BaseException) -> dict[str, Any]:
    """An exception, as a ring's log has it: type, message, where, and the frames, the innermost last."""
    calls = [
        Call(name_of(frame).rpartition("<locals>.")[2], file, line, is_own(file))
        for frame, line in walk_tb(error.__traceback__)
        for file in (frame.f_code.co_filename,)
    ]
    own = [each for each in calls if each.own]
    kind = type(error)
    place = (own or calls)[-1].at if calls else ""
    return {
        "type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "message": str(error)[:_MAX_MESSAGE],
        "where": place,
        "frames": [each.at for each in calls[-_MAX_FRAMES:]],
    }


class Keys:
    """The keys of a batch, each of which is noted as it is taken."""

    __slots__ = ("_keys", "_ring", "_whole")

    def __init__(self, keys: Any, ring: Ring, *, whole: bool) -> None:
        self._keys = keys
        self._ring = ring
        self._whole = whole

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        ring = self._ring
        numbers, note = ring.numbers, ring.index
        for key in self._keys:
            note(key)
            yield key
            numbers[_SAMPLES] += 1
        numbers[_HAS_INDEX] = NO_INDEX
        if self._whole:
            numbers[_DOING] = _COLLATES


class _Counted(Keys):
    """The same for an iterable dataset, whose samples have no keys: they are numbered."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        ring = self._ring
        numbers = ring.numbers
        for key in self._keys:
            ring.index(numbers[_SAMPLES])
            yield key
            numbers[_SAMPLES] += 1
        numbers[_HAS_INDEX] = NO_INDEX


def note_fetches(fetcher: Any, ring: Ring, *, whole: bool) -> None:
    """Have a loader's fetcher note which sample it reads, and what it raises.

    The dataset is asked for the very same keys. Where it takes a batch of them at once, only the batch is noted.

    Args:
        fetcher: torch's own.
        ring: where.
        whole: whether the ring is a worker's, which does nothing else.
    """
    original = type(fetcher).fetch
    behind = weakref.ref(fetcher)  # or the fetcher would hold itself
    by_sample = is_fetched_by_sample(fetcher)
    kind = {None: None, True: Keys, False: _Counted}[by_sample]
    numbers = ring.numbers

    def fetch(keys: Any) -> Any:
        if whole:
            numbers[_SINCE] = time.monotonic_ns()
            numbers[_DOING] = _READS
        batched = _begin_batch(ring, keys)
        if not batched and by_sample is not False:
            ring.index(keys)
        try:
            batch = original(behind(), kind(keys, ring, whole=whole) if kind is not None and batched else keys)
        except StopIteration:
            numbers[_DOING] = _WAITS if whole else numbers[_DOING]
            raise
        except BaseException as error:
            _failed(ring, error)
            raise
        if whole:
            numbers[_SINCE] = time.monotonic_ns()
            numbers[_DOING] = _WAITS
        if numbers[_HAS_INDEX] != NO_INDEX or kind is None:
            numbers[_SAMPLES] += len(keys) if batched else 1
            numbers[_HAS_INDEX] = NO_INDEX
        numbers[_BATCHES] += 1
        return batch

    fetcher.fetch = fetch


def _begin_batch(ring: Ring, keys: Any) -> bool:
    """Note the keys of a batch; False where it is the key of a sample."""
    if not isinstance(keys, (list, tuple)):
        return hasattr(keys, "__len__") and not isinstance(keys, (str, bytes, dict))
    ring.write("indices", json.dumps([_plain(key) for key in islice(keys, _MAX_INDICES)]))
    return True


def _plain(key: Any) -> int | str:
    if type(key) is int:
        return key
    try:
        return int(operator.index(key))
    except TypeError:
        return str(key)[:16]


def _failed(ring: Ring, error: BaseException) -> None:
    try:
        ring.log("exception", **described(error), index=ring.noted_index())
    except Exception:
        log.debug("an exception was not recorded", exc_info=True)
