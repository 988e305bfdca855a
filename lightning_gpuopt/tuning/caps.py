"""How many workers this machine, this container and this job leave room for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.model import most_workers
from lightning_gpuopt.tuning.workers import LimitedBy

_PART_OF_MEMORY: Final = 0.5
"""Workers may take so much of what is available; the training process, the page cache and caches in workers grow."""

_PART_OF_SHARED_MEMORY: Final = 0.8
"""So much of what is free in /dev/shm: what does not fit there kills a worker with a bus error."""

_NO_LIMIT: Final = 1 << 60
"""cgroup v1 has no word for "no limit", only a number that no machine has."""

_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Cap:
    """The most workers that fit.

    Attributes:
        num_workers: the number, at least 1.
        limited_by: what sets it.
    """

    num_workers: int
    limited_by: LimitedBy


@dataclass(frozen=True, slots=True)
class Room:
    """What a node has for the workers of all its ranks. A figure that could not be read is None.

    Attributes:
        cpus: CPUs that this process may use at once (affinity, cgroup quota); may be a fraction.
        memory_bytes: memory that is available here, to this process's cgroup.
        shared_memory_bytes: free bytes in ``/dev/shm``.
    """

    cpus: float
    memory_bytes: int | None = None
    shared_memory_bytes: int | None = None


def room() -> Room:
    """What there is now, before any worker of ours runs."""
    return Room(usable_cpus(), available_memory(), free_shared_memory())


def worker_cap(
    room: Room,
    *,
    max_num_workers: int | None = None,
    local_world_size: int = 1,
    worker_bytes: int | None = None,
    batch_bytes: float | None = None,
    prefetch_factor: int = 2,
) -> Cap:
    """The most workers that one rank's loader should have.

    Args:
        room: what the node has.
        max_num_workers: not more than so many (None: min(32, 8 × usable CPUs)).
        local_world_size: ranks on this node, which share the room.
        worker_bytes: memory of a worker process (its proportional set size); None where not known.
        batch_bytes: bytes of a batch; None where not known.
        prefetch_factor: batches that each worker prepares ahead.

    Example::

        >>> worker_cap(Room(cpus=4.0), local_world_size=2)
        Cap(num_workers=16, limited_by='max_num_workers')
        >>> worker_cap(Room(cpus=4.0, memory_bytes=8 << 30), worker_bytes=1 << 30)
        Cap(num_workers=4, limited_by='memory')
    """
    most = max_num_workers if max_num_workers is not None else most_workers(room.cpus / local_world_size)
    caps: list[tuple[int, LimitedBy]] = [(most, "max_num_workers")]
    if room.memory_bytes is not None and worker_bytes:
        caps.append((int(_PART_OF_MEMORY * room.memory_bytes / local_world_size / worker_bytes), "memory"))
    if room.shared_memory_bytes is not None and batch_bytes:
        fits = _PART_OF_SHARED_MEMORY * room.shared_memory_bytes / local_world_size / batch_bytes
        # one more batch is with the consumer
        caps.append((int((fits - 1) / prefetch_factor), "shared_memory"))
    number, limited_by = min(caps, key=lambda cap: cap[0])
    return Cap(max(number, 1), limited_by)


def prefetch_that_fits(room: Room, *, workers: int, batch_bytes: float, local_world_size: int = 1) -> int | None:
    """The largest ``prefetch_factor`` for which ``/dev/shm`` has room, at least 1; None where that cannot be known."""
    if room.shared_memory_bytes is None or not batch_bytes:
        return None
    fits = _PART_OF_SHARED_MEMORY * room.shared_memory_bytes / local_world_size / batch_bytes
    return max(int((fits - 1) / workers), 1)


def worker_memory(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Bytes of a process, pages that it shares with others counted in part (PSS); None where it cannot be read."""
    try:
        for line in (proc / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def free_shared_memory(path: Path = _SHARED_MEMORY) -> int | None:
    """Free bytes in ``/dev/shm``; None where there is no such place."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def available_memory(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Bytes that are available to this process: the machine's, less where its cgroup, or a parent of it, allows less.

    Args:
        cgroup_root: where the cgroup file systems (v2, or v1's ``memory`` controller) are mounted.
        proc: where procfs is mounted.
    """
    left = [_left_in(group) for group in _memory_groups(cgroup_root, proc)]
    return min([psutil.virtual_memory().available, *(each for each in left if each is not None)])


def _memory_groups(cgroup_root: Path, proc: Path) -> list[Path]:
    """The folders of our memory cgroup and its parents; empty where they cannot be known."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = cgroup_root / "unified" if (cgroup_root / "unified").is_dir() else cgroup_root
        elif "memory" in controllers.split(","):
            base = cgroup_root / "memory"
        else:
            continue
        inner = base / path.strip("/")
        groups += [inner, *(parent for parent in inner.parents if parent.is_relative_to(base))]
    return groups


def _left_in(group: Path) -> int | None:
    """Bytes that a cgroup still allows, its page cache counted as free; None where it sets no limit."""
    try:
        if (group / "memory.max").exists():
            text = (group / "memory.max").read_text().strip()
            if text == "max":
                return None
            limit, used = int(text), int((group / "memory.current").read_text())
        else:
            limit = int((group / "memory.limit_in_bytes").read_text())
            used = int((group / "memory.usage_in_bytes").read_text())
        if limit >= _NO_LIMIT:
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
    return max(limit - used + cache, 0)
