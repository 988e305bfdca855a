"""A training process's rings, copied to a file: for whoever looks when nobody holds their memory any more.

By ``pwrite``: a mapping of a file would end the process where the disk is full, or a network file is gone.
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

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 2.0
_AFTER_FAILURE_S: Final = 10.0


class RingFile:
    """Writes what has changed since the last time to a file, made anew; OSError if it cannot be made."""

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
