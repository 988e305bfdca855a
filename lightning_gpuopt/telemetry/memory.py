"""What there is of memory, shared memory and descriptors, and who holds it: the kernel's own counters.

Read on a thread of ours. What cannot be read is absent.
"""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from lightning_gpuopt.telemetry.host import cgroups

_V2: Final = ("memory.max", "memory.current", "memory.peak", "inactive_file")
_V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "total_inactive_file")
_NO_LIMIT: Final = 1 << 60  # cgroup v1 has a number of this size where there is no limit


@dataclass(frozen=True)
class ProcessTimes:
    start_ticks: int  # when it began, in clock ticks since boot
    cpu_s: float  # CPU of its main thread
    faults: int  # minor page faults so far, of all threads
    rss: int  # resident bytes
    dead: bool  # whether it is a zombie


@dataclass(frozen=True)
class CgroupMemory:
    """What the memory cgroup says. Attributes as in :class:`~lightning_gpuopt.measurements.flight.MemoryReading`."""

    limit: int | None = None
    current: int | None = None
    cache: int | None = None
    peak: int | None = None


class MemoryFiles:
    """Where procfs, cgroups and shared memory are mounted."""

    def __init__(
        self, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup"), shm: Path = Path("/dev/shm")
    ) -> None:
        self._proc = proc
        self._shm = shm
        self._groups = cgroups("memory", cgroup_root, proc)
        self._no_limit = min(_NO_LIMIT, psutil.virtual_memory().total)

    def process(self, pid: int | str) -> ProcessTimes | None:
        """A process; None if it is gone."""
        try:
            fields = self._stat(f"{pid}")
            main = self._stat(f"{pid}/task/{os.getpid() if pid == 'self' else pid}")
            ticks = float(os.sysconf("SC_CLK_TCK"))
            return ProcessTimes(
                start_ticks=int(fields[19]),
                cpu_s=(int(main[11]) + int(main[12])) / ticks,
                faults=int(fields[7]),
                rss=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
                dead=fields[0] in "ZX",
            )
        except (OSError, ValueError, IndexError):
            return None

    def _stat(self, process: str) -> list[str]:
        return (self._proc / process / "stat").read_text().rpartition(")")[2].split()

    def cgroup(self) -> CgroupMemory:
        """Our cgroup, or the one of its parents that limits it most; without a limit, our own figures."""
        known = [each for group in self._groups if (each := read_group(group, self._no_limit)) is not None]
        limited = [each for each in known if each.limit is not None]
        if limited:
            return min(limited, key=lambda each: (each.limit or 0) - (each.current or 0) + (each.cache or 0))
        return known[0] if known else CgroupMemory()

    def oom_kills(self) -> int | None:
        """How many processes of our own cgroup the kernel has ended so far because memory ran out."""
        for group in self._groups:
            for file in ("memory.events.local", "memory.events", "memory.oom_control"):
                if (count := _number_of(group / file, "oom_kill")) is not None:
                    return count
        return None

    def available(self) -> int | None:
        """Bytes available on the machine."""
        kib = _number_of(self._proc / "meminfo", "MemAvailable:")
        return None if kib is None else kib * 1024

    def shared(self) -> tuple[int | None, int | None]:
        """Free bytes of shared memory, and its size."""
        try:
            found = os.statvfs(self._shm)
        except OSError:
            return None, None
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def descriptors(self, pid: int | str = "self") -> tuple[int | None, int | None]:
        """Open descriptors of a process, and how many it may have."""
        try:
            soft = resource.prlimit(0 if pid == "self" else int(pid), resource.RLIMIT_NOFILE)[0]
        except OSError:  # it is gone
            soft = resource.RLIM_INFINITY
        return entries(f"{self._proc}/{pid}/fd"), None if soft == resource.RLIM_INFINITY else soft


def read_group(group: Path, no_limit: float = math.inf) -> CgroupMemory | None:
    """What a cgroup's folder says; None if it says nothing. A limit from ``no_limit`` bytes on is none."""
    for limit, current, peak, cache in (_V2, _V1):
        used = _int_of(group / current)
        if used is not None:
            allowed = _int_of(group / limit)
            return CgroupMemory(
                limit=allowed if allowed is not None and allowed < no_limit else None,
                current=used,
                cache=_number_of(group / "memory.stat", cache),
                peak=_int_of(group / peak),
            )
    return None


def entries(folder: str) -> int | None:
    """How many entries a folder has; None if it cannot be read."""
    try:
        return len(os.listdir(folder))
    except OSError:
        return None


def _int_of(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # also "max"
        return None


def _number_of(file: Path, key: str) -> int | None:
    try:
        lines = (line.split() for line in file.read_text().splitlines())
        return next((int(line[1]) for line in lines if len(line) > 1 and line[0] == key), None)
    except (OSError, ValueError):
        return None
