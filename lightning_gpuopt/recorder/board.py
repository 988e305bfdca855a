"""The memory of one training process's rings: its own, and one for each worker that it starts."""

from __future__ import annotations

import mmap
import os
from multiprocessing import context, reduction
from typing import Any, Final

from lightning_gpuopt.recorder.ring import (
    MAX_WORKERS,
    RANK_BYTES,
    TOTAL_BYTES,
    WORKER_BYTES,
    WORKER_HEADER_BYTES,
    Ring,
    is_used,
)

_NAME: Final = "gpuopt-recorder"


class Board:
    """Rings in anonymous memory: it goes with the last process that holds it, and is not limited by ``/dev/shm``.

    Forked workers have it from their parent; one that is spawned is handed the descriptor ``file``. OSError: the system
    gives no such memory.
    """

    def __init__(self) -> None:
        self._handed: Any = None
        self.file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, TOTAL_BYTES)
            self._map()
        except OSError:
            os.close(self.file)
            raise
        self._slots: dict[tuple[str, int], int] = {}

    def _map(self) -> None:
        self._memory = memoryview(mmap.mmap(self.file, TOTAL_BYTES))
        self.rank = Ring(self._memory[:RANK_BYTES])

    def slot(self, loader: str, worker: int) -> int | None:
        """Which of the workers' rings is a worker's: the same one again for its successor; None if all are taken."""
        if (loader, worker) not in self._slots and len(self._slots) >= MAX_WORKERS:
            return None
        return self._slots.setdefault((loader, worker), len(self._slots))

    @property
    def slots(self) -> int:
        return len(self._slots)

    def worker(self, slot: int) -> Ring:
        return Ring(self._part(slot), WORKER_HEADER_BYTES)

    def _part(self, slot: int) -> memoryview:
        at = RANK_BYTES + slot * WORKER_BYTES
        return self._memory[at : at + WORKER_BYTES]

    def copy_of(self, slot: int | None) -> memoryview | None:
        """The bytes of a ring (None: the training process's own), as they are; None if nobody has begun it."""
        part = self._memory[:RANK_BYTES] if slot is None else self._part(slot)
        return part if is_used(part) else None

    def __getstate__(self) -> dict[str, Any]:
        if context.get_spawning_popen() is None:
            raise TypeError("a flight recorder's rings are handed to worker processes only")
        return {"file": reduction.DupFd(self.file), "slots": dict(self._slots)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._handed, self._slots = state["file"], state["slots"]

    def open(self) -> None:
        """Called in a worker that was handed the descriptor, not forked; OSError if it is of no use."""
        if self._handed is not None:
            self.file = self._handed.detach()
            self._handed = None
            self._map()

    def close(self) -> None:
        """Close the descriptor. The memory goes with the last ring in use."""
        os.close(self.file)
        self.file = -1
