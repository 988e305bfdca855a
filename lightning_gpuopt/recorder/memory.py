"""What the processes of a rank hold of memory, read once a second into the rank's ring, and kept as series."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import torch

from lightning_gpuopt.measurements.flight import MemoryReading
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.ring import AT
from lightning_gpuopt.telemetry.memory import MemoryFiles
from lightning_gpuopt.telemetry.resources import private_and_anonymous

_NEW_FAULTS: Final = 256
"""Page faults, of 4 KiB each, after which the private memory of a process is worth a reading."""

_COST: Final = 1000
"""A reading of private memory takes one part in so many of the time: of 2 GiB it takes some 55 ms."""

_COST_AT_FIRST: Final = 100
_AT_FIRST_S: Final = 120.0
"""So long readings are ten times as many: what a run does with memory shows at its beginning."""

_OTHERS_EVERY: Final = 4
"""Workers of a loader do alike: of so many readings one is of another worker than the first."""

_KEPT: Final = 600
"""Readings kept of each process; beyond it every second one goes, and they are taken half as often."""


class Series:
    """Readings of one process, evenly spread over all of its life."""

    def __init__(self) -> None:
        self.readings: deque[MemoryReading] = deque()
        self._every = 1
        self._count = 0

    def add(self, reading: MemoryReading) -> None:
        """Add one; it may be left out where there are many."""
        self._count += 1
        if self._count % self._every:
            return
        self.readings.append(reading)
        if len(self.readings) >= _KEPT:
            self.readings = deque(list(self.readings)[::2])
            self._every *= 2


class MemoryLog:
    """Reads memory, shared memory and descriptors.

    Args:
        board: the rings.
        device: of the rank.
        files: where the kernel's counters are.
        clock: seconds, monotonic.

    Attributes:
        rank: the readings of the training process.
        workers: those of its workers that run, by ring: loader, number in it, process id, readings.
    """

    def __init__(
        self,
        board: Board,
        device: torch.device,
        files: MemoryFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._device = device
        self._files = files or MemoryFiles()
        self._clock = clock
        self._faults: dict[int, int] = {}
        self._looks = 0
        self._began_s = clock()
        self._offset_s = time.time() - clock()
        self._due_s = float("-inf")
        self.rank = Series()
        self.workers: dict[int, tuple[str, int, int, Series]] = {}

    def read(self, workers: Mapping[int, tuple[int, str, int]]) -> None:
        """Take a reading of all.

        Args:
            workers: process id, loader and number in it, by ring.
        """
        now_s = self._clock() + self._offset_s
        own = self._own(now_s)
        self.rank.add(own)
        rows = []
        looked_at = self._next_to_look_at(workers)
        began_s = self._clock()
        for slot, (pid, loader, worker) in workers.items():
            reading = self._worker(now_s, slot, pid, look=slot == looked_at)
            if reading is None:
                continue
            if slot not in self.workers or self.workers[slot][2] != pid:
                self.workers[slot] = (loader, worker, pid, Series())
            self.workers[slot][3].add(reading)
            rows.append([slot, reading.rss, reading.private, reading.faults, reading.samples])
        for gone in self.workers.keys() - workers.keys():
            del self.workers[gone]
        if looked_at is not None:
            ended_s = self._clock()
            cost = _COST_AT_FIRST if ended_s - self._began_s < _AT_FIRST_S else _COST
            self._due_s = ended_s + cost * (ended_s - began_s)
        known = {name: value for name, value in vars(own).items() if value is not None and name != "at_s"}
        self._board.rank.log("memory", **known, **({"workers": rows} if rows else {}))

    def _next_to_look_at(self, workers: Mapping[int, object]) -> int | None:
        """Whose private memory is read now; None: it is too early."""
        if not workers or self._clock() < self._due_s:
            return None
        self._looks += 1
        slots = sorted(workers)
        return slots[self._looks // _OTHERS_EVERY % len(slots) if self._looks % _OTHERS_EVERY == 0 else 0]

    def _own(self, now_s: float) -> MemoryReading:
        files = self._files
        process, group = files.process("self"), files.cgroup()
        shm_free, shm_size = files.shared()
        opened, allowed = files.descriptors()
        return MemoryReading(
            now_s,
            rss=process.rss if process is not None else None,
            faults=process.faults if process is not None else None,
            samples=self._board.rank.numbers[AT["steps"]],
            limit=group.limit,
            current=group.current,
            cache=group.cache,
            peak=group.peak,
            oom_kills=files.oom_kills(),
            available=files.available(),
            shm_free=shm_free,
            shm_size=shm_size,
            files=opened,
            files_limit=allowed,
            **self._gpu(),
        )

    def _gpu(self) -> dict[str, int]:
        """By torch's allocator: to ask the driver could hang with the GPU."""
        if self._device.type != "cuda":
            return {}
        try:
            total = torch.cuda.get_device_properties(self._device).total_memory
            return {"gpu_used": int(torch.cuda.memory_reserved(self._device)), "gpu_total": int(total)}
        except Exception:
            return {}

    def _worker(self, now_s: float, slot: int, pid: int, *, look: bool) -> MemoryReading | None:
        process = self._files.process(pid)
        if process is None or process.dead:
            return None
        ring = self._board.worker(slot)
        if ring.numbers[AT["pid"]] == pid:
            ring.numbers[AT["cpu_ns"]] = max(int(process.cpu_s * 1e9), 1)
        private = anonymous = None
        if look and process.faults - self._faults.get(pid, 0) >= _NEW_FAULTS:
            private, anonymous = private_and_anonymous(pid)
            self._faults[pid] = process.faults
        return MemoryReading(
            now_s,
            rss=process.rss,
            private=private,
            anonymous=anonymous,
            faults=process.faults,
            samples=ring.numbers[AT["samples"]] if ring.numbers[AT["pid"]] == pid else None,
        )
