"""What the processes of a rank hold of memory, read once a second into the rank's ring, and kept as series.

What a worker has of its own it reads itself, into its ring: from its first moment on, and all workers as often.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Final, NamedTuple

import torch

from lightning_gpuopt.measurements.flight import OF_A_WORKER, MemoryReading
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.ring import AT
from lightning_gpuopt.telemetry.memory import MemoryFiles, ProcessTimes
from lightning_gpuopt.timeline.windows import BoundedSeries

_KEPT: Final = 600  # readings kept of each process; beyond it every second one goes
_LESS_SHM: Final = 8 << 20
_MORE_FILES: Final = 32
_MANY_FILES: Final = 4096  # to count more of them takes a millisecond: that is left to the readings


class PrivateMemory(NamedTuple):
    """What a worker has of its own; names as in a :class:`~lightning_gpuopt.measurements.flight.MemoryReading`."""

    samples: int  # that it had read
    private: int  # bytes
    anonymous: int | None  # bytes; None: not known


def in_ring(first: PrivateMemory, now: PrivateMemory) -> str:
    """The word ``memory`` of a worker's ring, from its first and its newest reading."""
    return json.dumps([first, now], separators=(",", ":"))


def out_of_ring(word: str) -> tuple[PrivateMemory, PrivateMemory] | None:
    """The first and the newest reading; None if there is none, or where it is half there."""
    try:
        first, now = json.loads(word or "[]")
        return PrivateMemory(*first), PrivateMemory(*now)
    except (ValueError, TypeError):
        return None


def new_series() -> BoundedSeries[MemoryReading]:
    """For readings of one process, evenly spread over all of its life."""
    return BoundedSeries(_KEPT, lambda reading, next_one: reading)


class MemoryLog:
    """Reads memory, shared memory and descriptors; ``workers`` by ring: loader, number in it, process id, readings."""

    def __init__(self, board: Board, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._device = device
        self._files = MemoryFiles()
        self._clock = clock
        self._newest: dict[int, PrivateMemory] = {}
        self._least_free, self._most_files = math.inf, 0
        self._offset_s = time.time() - clock()
        self.rank = new_series()
        self.workers: dict[int, tuple[str, int, int, BoundedSeries[MemoryReading]]] = {}

    def read(self, workers: Mapping[int, tuple[int, str, int]]) -> None:
        """Take a reading of all; ``workers`` by ring: process id, loader and number in it."""
        now_s = self._clock() + self._offset_s
        own = self._own(now_s)
        self._least_free = min(self._least_free, math.inf if own.shm_free is None else own.shm_free)
        self._most_files = max(self._most_files, own.files or 0)
        self.rank.add(own)
        rows = []
        for slot, (pid, loader, worker) in workers.items():
            process = self._files.process(pid)
            if process is None or process.dead or not process.rss:  # it ends, and has let go of all
                continue
            if slot not in self.workers or self.workers[slot][2] != pid:
                self._newest.pop(slot, None)
                self.workers[slot] = (loader, worker, pid, new_series())
            reading = self._worker(now_s, slot, pid, process)
            self.workers[slot][3].add(reading)
            rows.append([slot, *(getattr(reading, name) for name in OF_A_WORKER)])
        for gone in self.workers.keys() - workers.keys():
            del self.workers[gone]
        known = {name: value for name, value in vars(own).items() if value is not None and name != "at_s"}
        self._board.rank.log("memory", **known, **({"workers": rows} if rows else {}))

    def is_used_up(self) -> bool:
        """Whether there is less shared memory than ever, or more files are open, by as much as a reading is worth."""
        free, files = self._files.shared()[0], None if self._most_files > _MANY_FILES else self._files.descriptors()[0]
        less = free is not None and free <= self._least_free - _LESS_SHM
        return less or (files is not None and files >= self._most_files + _MORE_FILES)

    def note_leak(self, leak: str) -> None:
        """Note what grows in the training process, for people; empty: nothing is known to."""
        self._board.rank.show("leak", leak)

    def _own(self, now_s: float) -> MemoryReading:
        files = self._files
        process = files.process("self")
        shm_free, shm_size = files.shared()
        opened, allowed = files.descriptors()
        return MemoryReading(
            now_s,
            rss=process.rss if process is not None else None,
            faults=process.faults if process is not None else None,
            samples=self._board.rank.numbers[AT["steps"]],
            oom_kills=files.oom_kills(),
            available=files.available(),
            shm_free=shm_free,
            shm_size=shm_size,
            files=opened,
            files_limit=allowed,
            **asdict(files.cgroup()),
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

    def _worker(self, now_s: float, slot: int, pid: int, process: ProcessTimes) -> MemoryReading:
        files, allowed = self._files.descriptors(pid)
        reading = MemoryReading(now_s, rss=process.rss, faults=process.faults, files=files, files_limit=allowed)
        ring, series = self._board.worker(slot), self.workers[slot][3]
        if ring.numbers[AT["pid"]] != pid:  # it has not begun it
            return reading
        ring.numbers[AT["cpu_ns"]] = max(int(process.cpu_s * 1e9), 1)
        first, newest = out_of_ring(ring.read("memory")) or (None, None)
        if newest is None or newest == self._newest.get(slot):
            return replace(reading, samples=ring.numbers[AT["samples"]])
        if first is not None and first != newest and slot not in self._newest:  # it has gone on since
            series.add(_with(first, MemoryReading(ring.numbers[AT["created_ns"]] / 1e9 + self._offset_s)))
        self._newest[slot] = newest
        return _with(newest, reading)


def _with(own: PrivateMemory, reading: MemoryReading) -> MemoryReading:
    return replace(reading, samples=own.samples, private=own.private, anonymous=own.anonymous)
