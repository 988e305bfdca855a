"""How many workers this machine, this container and this job leave room for."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil
import torch.multiprocessing

from lightning_gpuopt.telemetry.host import cgroups, usable_cpus
from lightning_gpuopt.telemetry.process import entries
from lightning_gpuopt.timeline.worker_clock import tensors_in
from lightning_gpuopt.tuning.model import most_workers
from lightning_gpuopt.tuning.workers import LimitedBy

_PART_OF_MEMORY: Final = 0.5
"""Share of the available memory for workers; the training process, the page cache and workers' caches grow later."""

_PART_TO_KEEP: Final = 0.95
"""Workers are removed where they and their batches fill more than this share of the memory."""

_PART_FOR_BATCHES: Final = 0.25
"""Share of the available memory for batches that are prepared ahead."""

_PART_OF_SHARED_MEMORY: Final = 0.8
"""Share of the free bytes of /dev/shm; a worker that finds no room there is killed by a bus error."""

FILES_OF_A_WORKER: Final = 4
"""Descriptors of a worker in the training process: both ends of its index queue's pipe, and its sentinel."""

_FILES_FOR_OTHERS: Final = 64
"""Descriptors kept free for checkpoints, logs and sockets."""

THREADS_OF_A_WORKER: Final = 4
"""Threads of a worker: its main thread, one that sends batches, one that serves their files; one here feeds it."""

_THREADS_FOR_OTHERS: Final = 32

BY_NAME: Final = (
    "each tensor on its way is an open file, and this process may open no more: put "
    "torch.multiprocessing.set_sharing_strategy('file_system') at the beginning of the program, or raise `ulimit -n`"
)
"""What helps where descriptors run out."""


@dataclass(frozen=True, slots=True)
class Cap:
    """The most workers that fit.

    Attributes:
        num_workers: the number, at least 1.
        limited_by: the resource that sets it.
        remedy: what would leave room for more; empty where nothing simple does.
    """

    num_workers: int
    limited_by: LimitedBy
    remedy: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"limited by {self.limited_by}" + f" ({self.remedy})" * bool(self.remedy)


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has for the workers of all its ranks. A figure that could not be read is None.

    Attributes:
        cpus: CPUs that this process may use at once (affinity, cgroup quota); may be a fraction.
        memory_bytes: memory that is available here, to this process's cgroup.
        shared_memory_bytes: free bytes in ``/dev/shm``.
        processes: processes and threads that this process's cgroup still allows.
        files: files that this process may still open.
    """

    cpus: float
    memory_bytes: int | None = None
    shared_memory_bytes: int | None = None
    processes: int | None = None
    files: int | None = None


def room(files: int = 0) -> Room:
    """Read the room of this node now, before any worker of ours runs.

    Args:
        files: files that are wanted: where fewer may be opened, the process's soft limit becomes its hard one.
    """
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
    """The most workers that one rank's loader should have.

    Args:
        room: what the node has.
        max_num_workers: not more than so many (None: min(32, 8 × usable CPUs)).
        local_world_size: ranks on this node, which share the room.
        worker_bytes: what another worker process takes, from :func:`worker_memory`; None where not known.
        batch_bytes: bytes of a batch, which lies in shared memory until it is taken; None where not known.
        batch_tensors: open files of a batch until it is taken, from :func:`files_of`.
        prefetch_factor: batches that each worker prepares ahead.
        keep: of workers that run already: how many may stay. Only what is really short counts then, and no reserve.
    """
    most = max_num_workers if max_num_workers is not None else most_workers(room.cpus / local_world_size)
    caps = [Cap(sys.maxsize if keep else most, "max_num_workers")]
    of_memory, of_shared = (_PART_TO_KEEP,) * 2 if keep else (_PART_OF_MEMORY, _PART_OF_SHARED_MEMORY)
    if room.memory_bytes is not None and worker_bytes:
        each = worker_bytes + prefetch_factor * (batch_bytes or 0.0)
        caps.append(Cap(int(of_memory * room.memory_bytes / local_world_size / each), "memory"))
    if room.shared_memory_bytes is not None and batch_bytes:
        fits = of_shared * room.shared_memory_bytes / local_world_size / batch_bytes
        # one more batch is with the consumer
        caps.append(Cap(int((fits - 1) / prefetch_factor), "shared_memory"))
    if room.files is not None:
        none, one = (files_wanted(count, prefetch_factor, batch_tensors) for count in (0, 1))
        remedy = BY_NAME if batch_tensors else ""
        caps.append(Cap((room.files - (0 if keep else none)) // (one - none), "shared_memory", remedy))
    if room.processes is not None:
        left = room.processes // local_world_size - (0 if keep else _THREADS_FOR_OTHERS)
        caps.append(Cap(left // THREADS_OF_A_WORKER, "max_num_workers"))
    least = min(caps, key=lambda cap: cap.num_workers)
    return replace(least, num_workers=max(least.num_workers, 1))


def files_wanted(workers: int, prefetch_factor: int, batch_tensors: int) -> int:
    """Descriptors that so many workers leave for batches on their way."""
    # one more batch is with the consumer
    batches = workers * prefetch_factor + 1
    return _FILES_FOR_OTHERS + workers * FILES_OF_A_WORKER + batches * batch_tensors


def prefetch_that_fits(room: Room, *, workers: int, batch_bytes: float, local_world_size: int = 1) -> int | None:
    """The largest ``prefetch_factor`` for which there is room, at least 1; None where that cannot be known.

    Of ``/dev/shm``, what lies in it; of memory no more than a quarter of what is available.
    """
    if room.shared_memory_bytes is None or not batch_bytes:
        return None
    bytes_left = _PART_OF_SHARED_MEMORY * room.shared_memory_bytes
    if room.memory_bytes is not None:
        bytes_left = min(bytes_left, _PART_FOR_BATCHES * room.memory_bytes)
    return max(int((bytes_left / local_world_size / batch_bytes - 1) / workers), 1)


def worker_memory(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Bytes that only this process uses (its private dirty pages), in bytes; None where they cannot be read.

    The resident or proportional set size would not do: a forked worker shares its parent's dataset, and mapped files
    are page cache. Counting those would forbid a second worker beside a large array or LMDB file.
    """
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
        sizes = dict(line.split()[:2] for line in lines[1:])  # the first is the range of addresses
        return (int(sizes["Private_Dirty:"]) + int(sizes.get("Swap:", 0))) * 1024
    except (OSError, ValueError, KeyError):
        return None


def files_of(batch: Any) -> int:
    """Descriptors that a batch holds on its way from a worker and while it is used: one for each tensor.

    0 where torch shares tensors by name (``set_sharing_strategy("file_system")``).
    """
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    return tensors_in(batch) if strategy == "file_descriptor" else 0


def files_left(wanted: int = 0, proc: Path = Path("/proc")) -> int | None:
    """Files that this process may still open; None where that cannot be read.

    Args:
        wanted: where fewer are left, the soft limit is raised to the hard one first.
        proc: where procfs is mounted.
    """
    if (opened := entries(f"{proc}/self/fd")) is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft - opened < wanted and soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == resource.RLIM_INFINITY else max(soft - opened, 0)


def processes_left(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Processes and threads that this process's cgroup, and its parents, still allow; None where they set no limit.

    Args:
        cgroup_root: where the cgroup file systems (v2, or v1's ``pids`` controller) are mounted.
        proc: where procfs is mounted.
    """
    left = []
    for group in cgroups("pids", cgroup_root, proc):
        with contextlib.suppress(OSError, ValueError):  # also "max"
            left.append(int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()))
    return max(min(left), 0) if left else None


def free_shared_memory(path: Path = Path("/dev/shm")) -> int | None:
    """Free bytes in ``/dev/shm``; None where there is no such place."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def available_memory(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Bytes that are available to this process: the machine's, less where its cgroup, or a parent of it, allows less.

    Args:
        cgroup_root: where the cgroup file systems (v2, or v1's ``memory`` controller) are mounted.
        proc: where procfs is mounted.
    """
    left = [_left_in(group) for group in cgroups("memory", cgroup_root, proc)]
    return min([psutil.virtual_memory().available, *(each for each in left if each is not None)])


def _left_in(group: Path) -> int | None:
    """Bytes that a cgroup still allows, its page cache counted as free; None where it sets no limit."""
    try:
        v2 = (group / "memory.max").exists()
        limit, used = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        left = int((group / limit).read_text()) - int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(left + int(stat.get("total_inactive_file", stat.get("inactive_file", 0))), 0)
    except (OSError, ValueError):  # also "max"; v1 has a number larger than any machine's memory instead
        return None
