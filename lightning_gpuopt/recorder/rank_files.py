"""A rank's files in a report's folder: a copy of its rings, and the stacks that its processes write.

A file system may never answer: nothing here is waited for without end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.ring_file import RingFile
from lightning_gpuopt.recorder.ring_reader import STACKS_SUFFIX, SUFFIX, header_in, remove
from lightning_gpuopt.recorder.stacks import StackWriter
from lightning_gpuopt.utils.time_limit import NoAnswerError, within

log = logging.getLogger(__name__)

MAX_WAIT_S: Final = 10.0  # a ``fit`` is held up no longer at its beginning, and at its end, whatever a file system does


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
