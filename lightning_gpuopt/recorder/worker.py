"""A loader's worker under record: what begins its ring as it starts, and what beats beside its main thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from multiprocessing import context
from typing import Any, Final

from torch.utils.data import get_worker_info

from lightning_gpuopt.compat.fetchers import set_fatal_handlers, when_fetcher_is_made
from lightning_gpuopt.measurements.flight import STARTS
from lightning_gpuopt.objects.growing import Growing
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.code_places import nested, place_of, place_of_reading
from lightning_gpuopt.recorder.memory_series import PrivateMemory, in_ring
from lightning_gpuopt.recorder.ring import AT, DOING, Ring
from lightning_gpuopt.recorder.sample_notes import note_fetches, note_samples_of_ours
from lightning_gpuopt.recorder.stacks import StackWriter, start_ticks
from lightning_gpuopt.telemetry.memory import MemoryFiles, ProcessTimes
from lightning_gpuopt.telemetry.resources import private_and_anonymous
from lightning_gpuopt.timeline.frames import innermost_frames
from lightning_gpuopt.timeline.worker_clock import TimedCollate, untimed
from lightning_gpuopt.timeline.worker_numbers import worker_number
from lightning_gpuopt.utils.replaced_method import hide_us

log = logging.getLogger(__name__)

BEAT_S: Final = 0.25
_FIRST_BEATS_S: Final = (0.01, 0.02, 0.04, 0.08)  # what ends a worker often does so at its first sample
_LOOK_EVERY: Final = 4  # beats between two looks at the memory of the process
# page faults, of 4 KiB or more each, after which it is looked at what grows; or so many bytes that are resident
_GROWN: Final = 8 << 20
_NEW_FAULTS: Final = 1024
# what a worker does with memory shows at its beginning: later it is looked at less often, unless it grows by much
_AT_FIRST_S: Final = 120.0
_LATER_S: Final = 5.0
_MUCH: Final = 64 << 20

_COST_AT_FIRST: Final = 100
_COST: Final = 1000  # a look takes one part in so many of a core: to read private memory of 2 GiB takes some 55 ms
_MAX_AT_START: Final = 4 << 30  # of a process that has more resident memory, private memory is not read as it starts


@dataclass
class WorkerStart:
    """Stands in for a loader's ``worker_init_fn`` while an iterator is made: begins the worker's ring, and calls it."""

    before: Callable[[int], object] | None  # the loader's own; None: it has none
    board: Board | None
    loader: str  # the loader's name
    words: dict[str, str]  # what else a ring says in words
    numbers: dict[str, int]  # the rank's numbers
    stacks: StackWriter | None  # has the training process write its stacks; None: nothing does
    spawned: bool = False  # whether this is a copy in a process that was started anew

    def __call__(self, worker: int) -> object:
        """Called in the worker, before its dataset is used."""
        try:
            self._begin(worker_number() or worker)
        except Exception:  # without a ring, then
            log.debug("a worker is not recorded", exc_info=True)
        try:
            return None if self.before is None else self.before(worker)
        except BaseException as error:
            hide_us(error)
            raise

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

        def is_of_the_loader(read: Any) -> bool:  # and of none that the dataset has for itself
            return getattr(read, "reads_for", read) is dataset

        def begins(read: Any, collate_fn: Any) -> None:
            if is_of_the_loader(read) and isinstance(collate_fn, TimedCollate):
                collate_fn.epoch_begins()

        def made(fetcher: Any) -> None:
            if is_of_the_loader(fetcher.dataset):
                note_fetches(fetcher, ring, whole=True)
                beat.collates(fetcher.collate_fn)

        when_fetcher_is_made(begins, made)
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
    """Shows four times a second, at first more often, that a process runs, and where its main thread is."""

    def __init__(self, ring: Ring, thread: int, dataset: Any = None, stacks: StackWriter | None = None) -> None:
        super().__init__(name="gpuopt-recorder", daemon=True)
        self._ring = ring
        self._main = thread
        self._owners: dict[str, object] = {type(each).__name__: each for each in nested(dataset)}
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
        """What makes batches of samples may grow as well; to be said before the first beat."""
        self._owners["collate_fn"] = untimed(collate_fn)

    def run(self) -> None:
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
        numbers = self._ring.numbers
        numbers[AT["written_ns"]] = time.monotonic_ns()
        if self._stacks is not None and numbers[AT["asked"]] != self._answered:
            self._answered = numbers[AT["asked"]]
            self._stacks.write(self._main)
        if place := place_of(innermost_frames().get(self._main)):
            self._ring.show("place", place)
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
        """See which container grows; ``held`` are bytes that this process has of its own."""
        self._faults, self._rss = process.faults, process.rss
        try:
            samples = self._ring.numbers[AT["samples"]]
            if self._growing is None:
                self._growing = Growing(self._owners, process=held, samples=samples)
            else:
                self._ring.write("leak", self._growing.why(held, samples))
                self._ring.numbers[AT["keeps_per_mille"]] = round(1000 * self._growing.keeps)
        except Exception:  # they are the user's; the beats go on
            log.debug("it was not seen what grows", exc_info=True)

    def _read_private(self) -> int | None:
        """Read private memory, and show it in the ring beside what it was at first; None if it cannot be read."""
        samples = self._ring.numbers[AT["samples"]]
        private, anonymous = private_and_anonymous("self")
        if private is None:
            return None
        now = PrivateMemory(samples, private, anonymous)
        self._first = self._first or now
        self._ring.write("memory", in_ring(self._first, now))
        return private
