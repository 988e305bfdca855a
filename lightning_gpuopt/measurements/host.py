"""What the host did meanwhile: CPUs, pressure and throttling, collections of garbage, compilations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostActivity:
    """What the CPUs did while the workers were watched. A figure that could not be read is None.

    Attributes:
        usable_cpus: CPUs that this process may use at once, its share where several ranks run on this machine: its
            affinity, less what a cgroup's quota forbids.
        seconds: worker-seconds watched: the time watched, times the workers.
        worker_cpu: share of a worker's time spent computing, 0-1, mean over the workers.
        worker_queued: share of a worker's time spent waiting for a CPU, 0-1.
        free_cpus: usable CPUs that nobody used, this process, its workers and all others counted; mean, and this rank's
            share.
        process_cpus: CPUs that this process used, all its threads; mean.
        throttled: share of the scheduler's periods in which a cgroup's quota stopped us, 0-1.
        cpu_pressure: share of the time in which something on this machine waited for a CPU, 0-1 (``/proc/pressure``).
        io_pressure: the same for I/O.
        memory_pressure: the same for memory: reclaim, and pages that come back from swap.
        swapped_in_mib_s: MiB read from swap per second, on the whole machine.
        affinity: CPUs that this process is bound to, where the machine has more.
        worker_threads: threads of a worker that computed, or waited for a CPU, for at least a quarter of the time; mean
            over the workers. Threads of a pool that have nothing to do do not count.
        worker_runnable: threads of a worker that computed or waited for a CPU at once, mean.
        worker_cpus: CPUs that a worker used, all its threads; mean over the workers.
    """

    usable_cpus: float
    seconds: float
    worker_cpu: float | None
    worker_queued: float | None
    free_cpus: float | None
    process_cpus: float | None = None
    throttled: float | None = None
    cpu_pressure: float | None = None
    io_pressure: float | None = None
    memory_pressure: float | None = None
    swapped_in_mib_s: float | None = None
    affinity: int | None = None
    worker_threads: float | None = None
    worker_runnable: float | None = None
    worker_cpus: float | None = None


@dataclass(frozen=True, slots=True)
class Collections:
    """What Python's garbage collector did on the training thread, in its steps.

    Attributes:
        counts: collections by generation.
        seconds: of all of them.
        longest_s: seconds of the longest.
        tracked: objects that the collector looks through, once it took long; None where they were not counted.
        where: function, file and line of the program that calls ``gc.collect()``, where most of the time of full
            collections is due to that; else empty.
        where_share: share of all collections' time that is due to that, 0-1.
    """

    counts: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 0.0
    longest_s: float = 0.0
    tracked: int | None = None
    where: str = ""
    where_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Compilations:
    """What torch.compile did in the steps.

    Attributes:
        count: compilations.
        steps: steps in which there was one.
        function: name, file and line of the function for which compiled code did not fit most often; empty where torch
            did not tell.
        reason: why it did not fit, the last time; empty where torch did not tell.
        given_up: functions that run eagerly since they had been compiled too often.
    """

    count: int = 0
    steps: int = 0
    function: str = ""
    reason: str = ""
    given_up: tuple[str, ...] = ()
