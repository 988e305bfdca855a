"""What this machine, and this process's container, still allow: memory, processes, open files, ``/dev/shm``."""

from __future__ import annotations

import contextlib
import resource
import shutil
from pathlib import Path

import psutil

from lightning_gpuopt.telemetry.host import cgroups
from lightning_gpuopt.telemetry.memory import entries, read_group


def worker_memory(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Bytes that only this process uses (its private dirty pages); None if they cannot be read.

    The resident or proportional set size would not do: a forked worker shares its parent's dataset, and mapped files
    are page cache. Counting those would forbid a second worker beside a large array or LMDB file.
    """
    return private_and_anonymous(pid, proc)[0]


def private_and_anonymous(pid: int | str, proc: Path = Path("/proc")) -> tuple[int | None, int | None]:
    """Bytes of :func:`worker_memory`, and those of no file, shared with the parent or not; None: unknown.

    A page that a fork shared and that is written to becomes private; it was anonymous before. New memory is both.
    """
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
        sizes = dict(line.split()[:2] for line in lines[1:])  # the first is the range of addresses
        swap = int(sizes.get("Swap:", 0))
        anonymous = (int(sizes["Anonymous:"]) + swap) * 1024 if "Anonymous:" in sizes else None
        return (int(sizes["Private_Dirty:"]) + swap) * 1024, anonymous
    except (OSError, ValueError, KeyError):
        return None, None


def files_left(wanted: int = 0, proc: Path = Path("/proc")) -> int | None:
    """Files that this process may still open (None: unknown); for ``wanted`` ones the soft limit is raised."""
    if (opened := entries(f"{proc}/self/fd")) is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft - opened < wanted and soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == resource.RLIM_INFINITY else max(soft - opened, 0)


def processes_left(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int | None:
    """Processes and threads that this process's cgroup, and its parents, still allow; None if they set no limit."""
    left = []
    for group in cgroups("pids", cgroup_root, proc):
        with contextlib.suppress(OSError, ValueError):  # also "max"
            left.append(int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()))
    return max(min(left), 0) if left else None


def free_shared_memory(path: Path = Path("/dev/shm")) -> int | None:
    """Free bytes in ``/dev/shm``; None if there is no such place."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def available_memory(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Bytes available to this process: the machine's, less where its cgroup, or a parent of it, allows less."""
    known = [each for group in cgroups("memory", cgroup_root, proc) if (each := read_group(group)) is not None]
    # v1 has a number larger than any machine's memory where it sets no limit
    left = [max(each.limit - (each.current or 0) + (each.cache or 0), 0) for each in known if each.limit is not None]
    return min([psutil.virtual_memory().available, *left])
