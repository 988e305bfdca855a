"""What the host does: usable CPUs, how busy they are, and what the loader's workers do with their time.

Linux's ``/proc`` and cgroup files, read on a thread of ours. If a file cannot be read, its figure is absent.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from lightning_gpuopt.measurements.host import HostActivity

_READ_EVERY_S = 0.2

# readings for which a worker's list of threads is kept; a thread that began since then is read from the next on
_LIST_THREADS_EVERY = 5
# a thread that computes, or waits for a CPU, for a smaller share of the time is not busy: it may only send batches
_BUSY = 0.25
# of a process's threads, by file: nanoseconds that each has computed, and has waited for a CPU
_Times = dict[str, tuple[int, int]]
_WAIT_PER_CPU_S = 200  # seconds of wait per second of CPU that a reading takes: 0.5 % of a core, up to the longest wait
_MAX_WAIT_S = 20.0  # however much a reading took: a garbage collection that falls into one is not a cost of reading

_MIB = 1024 * 1024
_MAX_BYTES = 4096  # more than any file has that is read whole, again and again


def usable_cpus(cgroup_root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> float:
    """CPUs that this process may use at once; a cgroup's quota (v2, or v1's ``cpu``) can make it a fraction."""
    return min(float(allowed_cpus()), quota_cpus(cgroup_root, proc))


def allowed_cpus() -> int:
    """CPUs that this process may run on, whatever its quota."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux
        return os.cpu_count() or 1


def _sharers(local_ranks: int) -> int:
    """Ranks that share the CPUs this process may run on.

    All local ones if these are the whole machine. If they are a part of it, a launcher has pinned the ranks, and
    each has its own.
    """
    return local_ranks if allowed_cpus() >= (os.cpu_count() or 1) else 1


def quota_cpus(cgroup_root: Path, proc: Path) -> float:
    """CPUs that the quotas of our cgroup and its parents allow; infinite where none is set."""
    quotas = (_quota_of(group) for group in cgroups("cpu", cgroup_root, proc))
    return min((quota for quota in quotas if quota is not None), default=math.inf)


def cgroups(controller: str, cgroup_root: Path, proc: Path) -> list[Path]:
    """The folders of our cgroup and its parents, innermost first; empty: not known. v2 has one hierarchy for all."""
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
        elif controller in controllers.split(","):
            mounts = [cgroup_root / name for name in (controllers, controller)]
            base = next((mount for mount in mounts if mount.is_dir()), cgroup_root)
        else:
            continue
        # Inside a container the path may be the host's, while only our own group is mounted at the root.
        folder = base / path.strip("/")
        while True:
            groups.append(folder)
            if folder == base:
                break
            folder = folder.parent
    return groups


def _quota_of(group: Path) -> float | None:
    """CPUs that a cgroup allows; None if it sets no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        return quota_us / int((group / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    except (OSError, ValueError):
        return None


def _text_of(path: str) -> bytes:
    """A small file's content, by the shortest way there is: most of what a reading costs; may raise OSError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)


def throttling(files: Sequence[str]) -> tuple[int, int] | None:
    """The scheduler's periods under a quota, and those in which it stopped us; None without a quota.

    Periods, since the throttled time in the same ``cpu.stat`` is summed over CPUs and can exceed the wall's.
    """
    for file in files:
        try:
            fields = dict(line.split() for line in _text_of(file).decode().splitlines())
            if periods := int(fields.get("nr_periods", 0)):
                return periods, int(fields["nr_throttled"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _pressure_s(file: str) -> float | None:
    """Seconds for which something has waited, from a file in ``/proc/pressure``."""
    try:
        some = _text_of(file).splitlines()[0]
        return int(some.rpartition(b"total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def _swapped_in_mib(file: str) -> float | None:
    """MiB that the machine has read from swap, from ``/proc/vmstat``."""
    try:
        with open(file, "rb", buffering=0) as stream:
            pages = stream.read().partition(b"pswpin ")[2].partition(b"\n")[0]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / _MIB
    except (AttributeError, OSError, ValueError):
        return None


def _threads_of(pid: int, proc: str) -> list[str]:
    """The ``schedstat`` files of all threads of a process; empty when it is gone."""
    folder = f"{proc}/{pid}/task"
    try:
        return [f"{folder}/{thread}/schedstat" for thread in os.listdir(folder)]
    except OSError:
        return []


def times_of(threads: Sequence[str]) -> _Times | None:
    """What threads have computed, and have waited for a CPU; None when one of them is gone."""
    times: _Times = {}
    try:
        for thread in threads:
            fields = _text_of(thread).split()
            times[thread] = int(fields[0]), int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
    return times


def _sums(times: _Times) -> tuple[int, int]:
    """Nanoseconds that all threads together have computed, and have waited for a CPU."""
    return sum(ran for ran, _ in times.values()), sum(queued for _, queued in times.values())


def _busy(before: _Times, now: _Times, span_s: float) -> int:
    """How many threads were busy between two readings."""
    gained = (sum(times) - sum(before[thread]) for thread, times in now.items() if thread in before)
    return sum(each >= _BUSY * span_s * 1e9 for each in gained) if span_s > 0 else 0


def _idle_s(file: str) -> float | None:
    """Seconds that the CPUs we may run on have been idle, summed up, from ``/proc/stat``."""
    try:
        allowed = {b"cpu%d" % index for index in os.sched_getaffinity(0)}
        ticks = 0
        with open(file, "rb") as lines:
            for line in lines:
                if not line.startswith(b"cpu"):
                    break  # the CPUs come first; after them, a line of a number for each interrupt of the machine
                fields = line.split(None, 5)
                if fields[0] in allowed:
                    ticks += int(fields[4])
        return ticks / float(os.sysconf("SC_CLK_TCK"))
    except (AttributeError, OSError, ValueError, IndexError):
        return None


def held_by_this_process() -> dict[str, float]:
    """What this process holds: resident memory in MiB, open files, threads. Empty if it cannot be read.

    Costs some 60 µs, and more with thousands of open files.
    """
    try:
        own = psutil.Process()
        held = {"open_files": own.num_fds(), "threads": own.num_threads()}
        return {"rss_mib": own.memory_info().rss / _MIB, **held}
    except (psutil.Error, OSError):
        return {}


def wait_after(reading_cpu_s: float, interval_s: float) -> float:
    """Seconds to wait after a reading, so that readings of up to 0.1 s never take more than 0.5 % of a core."""
    return max(interval_s, min(_WAIT_PER_CPU_S * reading_cpu_s, _MAX_WAIT_S))


class HostWatch:
    """Watches the loader's workers and the CPUs, on a daemon thread.

    Readings are ``interval_s`` apart, more where one is dear, see :func:`wait_after`. ``local_ranks`` are processes of
    this run on this machine. They share a quota; and the CPUs, idle ones as well, unless this process may run on a part
    of the machine only: then its CPUs are taken to be its own. ``cpu_clock`` is seconds of CPU of the calling thread:
    what a reading takes by a clock on the wall would count its waits for the interpreter's lock too, and with busy
    training leave minutes between readings.
    """

    def __init__(
        self,
        interval_s: float = _READ_EVERY_S,
        proc: Path = Path("/proc"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        local_ranks: int = 1,
    ) -> None:
        self._interval_s = interval_s
        self._proc = str(proc)
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sharers = _sharers(local_ranks)
        self._quota_cpus = quota_cpus(cgroup_root, proc) / local_ranks
        self._usable_cpus = min(max(allowed_cpus() / self._sharers, 1.0), self._quota_cpus)
        self._affinity = allowed_cpus() if allowed_cpus() < (os.cpu_count() or 1) else None
        self._cpu_stats = [f"{group}/cpu.stat" for group in cgroups("cpu", cgroup_root, proc)]
        self._sources: dict[str, Callable[[], float | None]] = {
            "idle": lambda: _idle_s(f"{proc}/stat"),
            "process": time.process_time,
            **{kind: partial(_pressure_s, f"{proc}/pressure/{kind}") for kind in ("io", "memory")},
            "swapped_in": lambda: _swapped_in_mib(f"{proc}/vmstat"),
        }
        self.process: dict[str, float] = {}  # what this process holds
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pids: tuple[int, ...] = ()
        self._own_threads: frozenset[int] = frozenset()
        self._threads: dict[int, list[str]] = {}
        self._readings = 0
        self._last: dict[int, tuple[float, _Times]] = {}
        # what each source has counted, and when it was asked: at the last reset, or for the first time, and now
        self._before: dict[str, tuple[float, float]] = {}
        self._newest: dict[str, tuple[float, float]] = {}
        self._forget_workers()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="gpuopt-host", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what was read stays."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=3.0)
            self._thread = None

    def workers(self, pids: Sequence[int], threads: Sequence[int] = ()) -> None:
        """Say which processes, and which threads of this process, are the workers from now on."""
        self._own_threads = frozenset(threads)
        self._pids = (*pids, *threads)

    def reset(self) -> None:
        """Forget what was read so far, for example at the end of warm-up."""
        with self._lock:
            self._before = dict(self._newest)
            self._forget_workers()

    def _forget_workers(self) -> None:
        self._worker_s = self._ran_s = self._queued_s = self._busy_threads_s = 0.0
        self._together_s = self._longest_s = 0.0  # what processes have computed, and for how long they were watched

    def activity(self) -> HostActivity:
        """What has been read since the last :meth:`reset`.

        ``usable_cpus`` and ``free_cpus`` are this rank's share, see ``local_ranks``. The share of the machine's CPUs is
        at least one; that of a quota can be less.
        """
        with self._lock:
            seconds = self._worker_s
            gained = {name: self._gained(name) for name in self._newest}
            rates = {name: total / span_s for name, (span_s, total) in gained.items() if span_s}
            periods, stopped = (gained[name][1] if name in gained else 0.0 for name in ("periods", "throttled"))
            return HostActivity(
                usable_cpus=self._usable_cpus,
                seconds=seconds,
                worker_cpu=min(self._ran_s / seconds, 1.0) if seconds else None,
                worker_queued=min(self._queued_s / seconds, 1.0) if seconds else None,
                free_cpus=self._free_cpus(rates),
                process_cpus=rates.get("process"),
                throttled=min(stopped / periods, 1.0) if periods else None,
                io_pressure=min(rates["io"], 1.0) if "io" in rates else None,
                memory_pressure=min(rates["memory"], 1.0) if "memory" in rates else None,
                swapped_in_mib_s=rates.get("swapped_in"),
                affinity=self._affinity,
                worker_threads=self._busy_threads_s / seconds if seconds else None,
                worker_runnable=(self._ran_s + self._queued_s) / seconds if seconds else None,
                worker_cpus=self._ran_s / seconds if seconds else None,
            )

    def _free_cpus(self, rates: dict[str, float]) -> float | None:
        """This rank's share of what its CPUs have idle, as far as its share of the quota leaves room for it."""
        if "idle" not in rates:
            return None
        own = rates["process"] + (self._together_s / self._longest_s if self._longest_s else 0.0)
        return min(rates["idle"] / self._sharers, self._usable_cpus, max(self._quota_cpus - own, 0.0))

    def _gained(self, name: str) -> tuple[float, float]:
        """Seconds since the last reset, and what a source has counted in them."""
        (then, before), (now, value) = self._before[name], self._newest[name]
        return now - then, max(value - before, 0.0)

    def read(self) -> None:
        pids = self._pids
        asked = ((name, source()) for name, source in self._sources.items())
        totals = {name: (self._clock(), value) for name, value in asked if value is not None}
        if (throttled := throttling(self._cpu_stats)) is not None:
            totals |= {name: (0.0, count) for name, count in zip(("periods", "throttled"), throttled, strict=True)}
        if self._readings % _LIST_THREADS_EVERY == 0:
            self._threads.clear()
            self.process = held_by_this_process()
        self._readings += 1
        readings = {pid: (self._clock(), times) for pid in pids if (times := self._worker_times(pid))}
        with self._lock:
            self._add_workers(readings)
            self._newest |= totals
            self._before = totals | self._before
            self._last = readings

    def _add_workers(self, readings: dict[int, tuple[float, _Times]]) -> None:
        longest_s = together_s = 0.0
        for pid, (now, times) in readings.items():
            if pid in self._last:
                then, before = self._last[pid]
                (ran, queued), (ran_before, queued_before) = _sums(times), _sums(before)
                ran_s = max(ran - ran_before, 0) / 1e9  # a thread that ended takes its time along
                self._worker_s += now - then
                self._ran_s += ran_s
                self._queued_s += max(queued - queued_before, 0) / 1e9
                if pid not in self._own_threads:  # whose time is this process's own
                    longest_s, together_s = max(longest_s, now - then), together_s + ran_s
                    self._busy_threads_s += _busy(before, times, now - then) * (now - then)
        self._longest_s += longest_s
        self._together_s += together_s

    def _worker_times(self, pid: int) -> _Times | None:
        """What the threads of a process have computed, and have waited for a CPU."""
        if pid in self._own_threads:
            return times_of([f"{self._proc}/self/task/{pid}/schedstat"])
        known = self._threads.get(pid)
        if known and (times := times_of(known)):
            return times
        threads = self._threads[pid] = _threads_of(pid, self._proc)
        return times_of(threads) if threads else None

    def _run(self) -> None:
        while True:
            before_s = self._cpu_clock()
            self.read()
            if self._stop.wait(wait_after(self._cpu_clock() - before_s, self._interval_s)):
                return
