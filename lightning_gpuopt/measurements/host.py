"""What the host did meanwhile: CPUs, pressure and throttling, collections of garbage, compilations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostActivity:
    """What the CPUs did while the workers were watched; None: a figure that could not be read."""

    usable_cpus: float  # CPUs for this process at once: affinity less a cgroup's quota, shared by the ranks here
    seconds: float  # worker-seconds watched: the time watched, times the workers
    worker_cpu: float | None  # share of a worker's time spent computing, 0-1, mean over the workers
    worker_queued: float | None  # share of a worker's time spent waiting for a CPU, 0-1
    free_cpus: float | None  # usable CPUs that nobody used, all processes counted; mean, this rank's share
    process_cpus: float | None = None  # CPUs that this process used, all its threads; mean
    throttled: float | None = None  # share of the scheduler's periods in which a cgroup's quota stopped us, 0-1
    io_pressure: float | None = None  # share of time in which something here waited for I/O, 0-1 (``/proc/pressure``)
    memory_pressure: float | None = None  # the same for reclaim, and pages that come back from swap
    swapped_in_mib_s: float | None = None  # read from swap on the whole machine
    affinity: int | None = None  # CPUs that this process is bound to, where the machine has more
    # threads of a worker that computed or waited for a CPU for a quarter of the time or more, without idle threads of a
    # pool; mean over the workers
    worker_threads: float | None = None
    worker_runnable: float | None = None  # threads of a worker that computed or waited for a CPU at once, mean
    worker_cpus: float | None = None  # CPUs that a worker used, all its threads; mean over the workers


@dataclass(frozen=True, slots=True)
class Collections:
    """What Python's garbage collector did on the training thread, in its steps."""

    counts: tuple[int, int, int] = (0, 0, 0)  # collections by generation
    seconds: float = 0.0  # of all of them
    longest_s: float = 0.0  # of the longest
    tracked: int | None = None  # objects that it looks through, once it took long; None: not counted
    # function, file and line that call ``gc.collect()``, if that takes most of the time of full collections
    where: str = ""
    where_share: float = 0.0  # share of all collections' time that is due to that, 0-1


@dataclass(frozen=True, slots=True)
class Compilations:
    """What torch.compile did in the steps."""

    count: int = 0
    steps: int = 0  # steps in which there was one
    function: str = ""  # name, file and line for which compiled code did not fit most often; empty: not told
    reason: str = ""  # why it did not fit, the last time
    given_up: tuple[str, ...] = ()  # functions that run eagerly since they had been compiled too often
