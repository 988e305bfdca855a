"""Computes how many workers this machine, container and job have room for."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch.multiprocessing

from lightning_gpuopt.measurements.loader_model import most_workers
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.telemetry.resources import available_memory, files_left, free_shared_memory, processes_left
from lightning_gpuopt.timeline.worker_clock import tensors_in
from lightning_gpuopt.tuning.search_result import LimitedBy

_PART_OF_MEMORY: Final = 0.5  # share of the available memory for workers; other memory grows later
_PART_TO_KEEP: Final = 0.95  # workers are removed where they and their batches fill more than this share of the memory
_PART_FOR_BATCHES: Final = 0.25  # share of the available memory for batches that are prepared ahead
PART_OF_SHARED_MEMORY: Final = 0.8  # share of what is free in /dev/shm; a worker without room there gets a bus error
FILES_OF_A_WORKER: Final = 4  # descriptors here: both ends of its index queue's pipe, and its sentinel
_FILES_FOR_OTHERS: Final = 64  # descriptors kept free for checkpoints, logs and sockets
THREADS_OF_A_WORKER: Final = 4  # its main thread, those that send batches and serve their files; one here feeds it
_THREADS_FOR_OTHERS: Final = 32
BY_NAME: Final = (
    "each tensor in flight is an open file, and this process cannot open more: call "
    "torch.multiprocessing.set_sharing_strategy('file_system') at the start of the program, or raise `ulimit -n`"
)


@dataclass(frozen=True, slots=True)
class Cap:
    """The most workers that fit, at least 1; ``remedy`` is a simple way to fit more, if there is one."""

    num_workers: int
    limited_by: LimitedBy
    remedy: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"limited by {self.limited_by}" + f" ({self.remedy})" * bool(self.remedy)


@dataclass(frozen=True, slots=True)
class Room:
    """The cgroup's free resources for workers of all ranks of the node; processes count threads; None: unknown."""

    cpus: float
    memory_bytes: int | None = None
    shared_memory_bytes: int | None = None
    processes: int | None = None
    files: int | None = None


def room(files: int = 0) -> Room:
    """This node's room now; if fewer ``files`` can be opened, the process's soft limit is raised to its hard one."""
    return Room(usable_cpus(), available_memory(), free_shared_memory(), processes_left(), files_left(files))


def worker_cap(
    room: Room,
    *,
    max_num_workers: int | None = None,
    local_world_size: int = 1,
    worker_bytes: int | None = None,
    batch_bytes: float | None = None,
    batch_tensors: int = 0,
    prefetch_factor: int = 2,
    keep: bool = False,
) -> Cap:
    """The most workers that one rank's loader should have, by default at most min(32, 8 × usable CPUs).

    ``keep``: how many of the running ones can stay. Then only a real shortage counts, without a reserve.
    """
    most = max_num_workers if max_num_workers is not None else most_workers(room.cpus / local_world_size)
    caps = [Cap(sys.maxsize if keep else most, "max_num_workers")]
    of_memory, of_shared = (_PART_TO_KEEP,) * 2 if keep else (_PART_OF_MEMORY, PART_OF_SHARED_MEMORY)
    if room.memory_bytes is not None and worker_bytes:
        each = worker_bytes + prefetch_factor * (batch_bytes or 0.0)
        caps.append(Cap(int(of_memory * room.memory_bytes / local_world_size / each), "memory"))
    if room.shared_memory_bytes is not None and batch_bytes:
        share = of_shared * room.shared_memory_bytes / local_world_size
        caps.append(Cap(workers_in(share, batch_bytes, prefetch_factor), "shared_memory"))
    if room.files is not None:
        none, one = (files_wanted(count, prefetch_factor, batch_tensors) for count in (0, 1))
        remedy = BY_NAME if batch_tensors else ""
        caps.append(Cap((room.files - (0 if keep else none)) // (one - none), "shared_memory", remedy))
    if room.processes is not None:
        left = room.processes // local_world_size - (0 if keep else _THREADS_FOR_OTHERS)
        caps.append(Cap(left // THREADS_OF_A_WORKER, "max_num_workers"))
    least = min(caps, key=lambda cap: cap.num_workers)
    return replace(least, num_workers=max(least.num_workers, 1))


def workers_in(shared_bytes: float, batch_bytes: float, prefetch_factor: int) -> int:
    """Workers whose batches, and one that is with the consumer, lie in so many bytes of shared memory; may be 0."""
    return max(0, int((shared_bytes / batch_bytes - 1) / prefetch_factor))


def files_wanted(workers: int, prefetch_factor: int, batch_tensors: int) -> int:
    """Descriptors for so many workers, their batches and one that is with the consumer, and for others."""
    return _FILES_FOR_OTHERS + workers * FILES_OF_A_WORKER + (workers * prefetch_factor + 1) * batch_tensors


def prefetch_that_fits(room: Room, *, workers: int, batch_bytes: float, local_world_size: int = 1) -> int | None:
    """The largest ``prefetch_factor`` for which there is room, at least 1; None if that cannot be known."""
    if room.shared_memory_bytes is None or not batch_bytes:
        return None
    bytes_left = PART_OF_SHARED_MEMORY * room.shared_memory_bytes
    if room.memory_bytes is not None:
        bytes_left = min(bytes_left, _PART_FOR_BATCHES * room.memory_bytes)
    return max(int((bytes_left / local_world_size / batch_bytes - 1) / workers), 1)


def files_of(batch: Any) -> int:
    """Descriptors of a batch until it is freed: one for each tensor; none if torch shares tensors by name."""
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    return tensors_in(batch) if strategy == "file_descriptor" else 0
