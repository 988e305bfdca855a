"""A rank's files in a report's folder: a copy of its rings, and the stacks that its processes write.

The copy is for whoever looks when nobody holds the rings' memory any more. A file system may never answer: nothing
here is waited for without end.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.ring import RANK_BYTES, WORKER_BYTES, header_bytes_of, number_in
from lightning_gpuopt.recorder.ring_reader import STACKS_SUFFIX, SUFFIX, header_in, remove
from lightning_gpuopt.recorder.stacks import StackWriter
from lightning_gpuopt.utils.time_limit import NoAnswerError, within

log = logging.getLogger(__name__)

MAX_WAIT_S: Final = 10.0  # a ``fit`` is held up no longer at its beginning, and at its end, whatever a file system does
_PATIENCE_S: Final = 2.0
_AFTER_FAILURE_S: Final = 10.0


class RankFiles:
    """Use :meth:`open`; ``path`` is the rings' file, whose folder is made. OSError: the files cannot be made."""

    def __init__(self, path: Path, run: str, rank: int, board: Board) -> None:
        self._run = run
        path.parent.mkdir(parents=True, exist_ok=True)
        for earlier in path.parent.glob(f"rank-*{SUFFIX}"):
            record = header_in(earlier)
            if record is not None and (record.run, record.rank) == (run, rank):
                remove(earlier)  # of a job that has started again under the same name
        path.parent.mkdir(parents=True, exist_ok=True)  # it goes with the last one in it
        self.stacks = StackWriter(str(path.with_suffix(STACKS_SUFFIX).absolute()))
        try:
            self._rings = RingFile(path, board)
        except OSError:
            self.stacks.close()
            raise

    @classmethod
    def open(cls, path: Path, run: str, rank: int, board: Board) -> RankFiles | None:
        """Make the files; None if that fails, or nothing answers: the rings are in memory still."""

        def make(still_wanted: Callable[[], float]) -> RankFiles:
            files = cls(path, run, rank, board)
            try:
                still_wanted()
            except BaseException:
                files.close()
                raise
            return files

        try:
            return within(MAX_WAIT_S, make, time.monotonic, clean_up_s=0.0)
        except (OSError, RuntimeError, NoAnswerError):  # no thread can be started
            log.debug("no rings are written to %s", path.parent, exc_info=True)
            return None

    def write(self) -> None:
        self._rings.write()

    def close(self) -> None:
        self._rings.close()
        self.stacks.close()

    def remove(self) -> None:
        """Remove the rings of all ranks, once all have ended well: while others run, how this one ended may matter."""
        own = self._rings.path
        rings = {}
        for path in own.parent.glob(f"rank-*{SUFFIX}"):
            record = header_in(path)
            if record is not None and record.run == self._run:
                rings[path] = record.ended
        if all(ended == "ok" for ended in rings.values()):
            for path in rings:
                remove(path)


class RingFile:
    """Writes what has changed since the last time to a file, made anew; OSError if it cannot be made.

    By ``pwrite``: a mapping of a file would end the process where the disk is full, or a network file is gone.
    """

    def __init__(self, path: Path, board: Board, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._board = board
        self._clock = clock
        self._written: dict[int | None, int] = {}
        self._not_before_s = float("-inf")
        self._writing = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self) -> None:
        """Bring the file up to date; where that fails, it is tried again a while later."""
        if self._clock() < self._not_before_s:
            return
        if not self._writing.acquire(timeout=_PATIENCE_S):  # another thread is held up in its write
            return
        try:
            for slot in (None, *range(self._board.slots)):
                self._write(slot)
        except OSError:
            log.debug("the rings could not be written", exc_info=True)
            self._not_before_s = self._clock() + _AFTER_FAILURE_S
        finally:
            self._writing.release()

    def _write(self, slot: int | None) -> None:
        ring = self._board.copy_of(slot)
        if ring is None:
            return
        at = 0 if slot is None else RANK_BYTES + slot * WORKER_BYTES
        header = header_bytes_of(ring)
        room = len(ring) - header
        head = bytes(ring[:header])
        logged = number_in(head, "logged")
        before = self._written.get(slot, 0)
        if logged < before or logged - before >= room:  # begun anew, or gone round
            before = max(logged - room, 0)
        while before < logged:  # before the head, which says that it is there
            begin = before % room
            end = min(begin + logged - before, room)
            _write_all(self._file, ring[header + begin : header + end], at + header + begin)
            before += end - begin
        _write_all(self._file, head, at)
        self._written[slot] = logged

    def close(self) -> None:
        os.close(self._file)


def _write_all(file: int, data: bytes | memoryview, at: int) -> None:
    if os.pwrite(file, data, at) < len(data):
        raise OSError("a part was written only")
