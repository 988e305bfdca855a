"""What the host does: usable CPUs, how busy they are, and what the loader's workers do with their time.

Linux's ``/proc`` and cgroup files, read on a thread of ours. Where a file cannot be read, its figure is absent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_READ_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class HostActivity:
    """What the CPUs did while the workers were watched. A figure that could not be read is None.

    Attributes:
        usable_cpus: CPUs that this process may use at once: its affinity, less what a cgroup's quota forbids.
        seconds: worker-seconds watched: the time watched, times the workers.
        worker_cpu: share of a worker's time spent computing, 0-1, mean over the workers.
        worker_queued: share of a worker's time spent waiting for a CPU, 0-1.
        free_cpus: usable CPUs that nobody used, this process, its workers and all others counted; mean.
    """

    usable_cpus: float
    seconds: float
    worker_cpu: float | None
    worker_queued: float | None
    free_cpus: float | None


def usable_cpus(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> float:
    """CPUs that this process may use at once; a cgroup's quota can make it a fraction.

    Args:
        cgroup_root: where the cgroup file systems (v2, or v1's ``cpu`` controller) are mounted.
        proc: where procfs is mounted.
    """
    try:
        count = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # not Linux
        count = float(os.cpu_count() or 1)
    quota = _cgroup_quota(cgroup_root, proc)
    return min(count, quota) if quota is not None else count


def _cgroup_quota(cgroup_root: Path, proc: Path) -> float | None:
    """The tightest CPU quota on the way from our cgroup to the root, in CPUs; None where there is none."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = cgroup_root / "unified" if (cgroup_root / "unified").is_dir() else cgroup_root
        elif "cpu" in controllers.split(","):
            base = next(
                (cgroup_root / name for name in (controllers, "cpu") if (cgroup_root / name).is_dir()), cgroup_root
            )
        else:
            continue
        folder = base / path.strip("/")
        # Inside a container the path may be the host's, while only our own group is mounted at the root.
        for group in [folder, *folder.parents]:
            quotas += _quota_of(group)
            if group == base:
                break
    return min(quotas, default=None)


def _quota_of(group: Path) -> list[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return [] if quota == "max" else [int(quota) / int(period)]
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        return [quota_us / int((group / "cpu.cfs_period_us").read_text())] if quota_us > 0 else []
    except (OSError, ValueError):
        return []


def _worker_times(pid: int, proc: Path) -> tuple[int, int] | None:
    """Nanoseconds that all threads of a process have computed, and have waited for a CPU."""
    ran = queued = 0
    try:
        for task in (proc / str(pid) / "task").iterdir():
            fields = (task / "schedstat").read_text().split()
            ran += int(fields[0])
            queued += int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
    return ran, queued


def _idle_ticks(proc: Path) -> int | None:
    """Clock ticks that the CPUs we may run on have been idle."""
    try:
        allowed = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        lines = (proc / "stat").read_text().splitlines()
        return sum(int(fields[4]) for line in lines if (fields := line.split()) and fields[0] in allowed)
    except (AttributeError, OSError, ValueError, IndexError):
        return None


class HostWatch:
    """Watches the loader's workers and the CPUs, on a daemon thread.

    Args:
        interval_s: seconds between readings.
        proc: where procfs is mounted.
        clock: a monotonic clock, in seconds.

    Example::

        watch = HostWatch()
        watch.start()
        watch.workers([4711, 4712])
        watch.activity().worker_cpu
        watch.stop()
    """

    def __init__(
        self,
        interval_s: float = _READ_EVERY_S,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval_s = interval_s
        self._proc = proc
        self._clock = clock
        self._usable_cpus = usable_cpus(proc=proc)
        self._ticks_per_s = float(os.sysconf("SC_CLK_TCK"))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pids: tuple[int, ...] = ()
        self._last: dict[int, tuple[float, int, int]] = {}
        self._last_idle: tuple[float, int] | None = None
        self._worker_s = 0.0
        self._ran_s = 0.0
        self._queued_s = 0.0
        self._idle_s = 0.0
        self._idle_span_s = 0.0

    def start(self) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._run, name="gpuopt-host", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was read stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=3.0)
            self._thread = None

    def workers(self, pids: Sequence[int]) -> None:
        """Say which processes are the workers from now on."""
        self._pids = tuple(pids)

    def reset(self) -> None:
        """Forget what was read so far, for example at the end of warm-up."""
        with self._lock:
            self._worker_s = self._ran_s = self._queued_s = self._idle_s = self._idle_span_s = 0.0

    def activity(self) -> HostActivity:
        """What has been read since the last :meth:`reset`."""
        with self._lock:
            seconds = self._worker_s
            free = None
            if self._idle_span_s:
                free = min(self._idle_s / self._idle_span_s, self._usable_cpus)
            return HostActivity(
                usable_cpus=self._usable_cpus,
                seconds=seconds,
                worker_cpu=min(self._ran_s / seconds, 1.0) if seconds else None,
                worker_queued=min(self._queued_s / seconds, 1.0) if seconds else None,
                free_cpus=free,
            )

    def read(self) -> None:
        """Take one reading."""
        pids = self._pids
        idle = _idle_ticks(self._proc)
        idle_at = self._clock()
        readings = {pid: (self._clock(), *times) for pid in pids if (times := _worker_times(pid, self._proc))}
        with self._lock:
            for pid, (now, ran, queued) in readings.items():
                if pid in self._last:
                    then, ran_before, queued_before = self._last[pid]
                    self._worker_s += now - then
                    # a thread that ended takes its time along
                    self._ran_s += max(ran - ran_before, 0) / 1e9
                    self._queued_s += max(queued - queued_before, 0) / 1e9
            if idle is not None:
                if self._last_idle is not None:
                    self._idle_span_s += idle_at - self._last_idle[0]
                    self._idle_s += (idle - self._last_idle[1]) / self._ticks_per_s
                self._last_idle = (idle_at, idle)
            self._last = readings

    def _run(self) -> None:
        while True:
            self.read()
            if self._stop.wait(self._interval_s):
                return
