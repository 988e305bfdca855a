"""What a run's loader and step cost per batch, as a report keeps it for questions that are asked later."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[float, float, float]  # a figure and its uncertainty: (low, mid, high)


@dataclass(frozen=True, slots=True)
class LoaderCosts:
    """Costs since the last change, in seconds per batch; None: not measured."""

    num_workers: int  # 0: the training process loaded by itself
    prefetch_factor: int | None  # None without workers
    batches: int  # batches that were measured
    data_s: float  # time in dataset access
    data_cpu_s: float  # CPU time of the thread in it
    collate_s: float  # time in ``collate_fn``
    worker_cpu_s: float  # of a whole worker, with other threads and child processes
    queued_s: float | None  # for so long a worker waited for a CPU meanwhile
    consumer_s: float  # the step without its wait for data
    consumer_cpu_s: float | None  # CPU time of the training process for a step, without loading
    receive_s: Interval  # the training process's own cost of taking a batch: (low, mid, high)
    usable_cpus: float | None  # CPUs that might be used
    free_cpus: float | None  # of those, used by this run or by nobody; the rest was other processes'
    spread: float  # relative uncertainty of a worker's time
    edges_s: tuple[float, ...] = ()  # of a histogram of batch times: lower edges of its bins, and the last upper edge
    counts: tuple[int, ...] = ()  # batches in each bin

    @property
    def batch_s(self) -> float:
        """Seconds in which a batch is made, without what a worker waited for a CPU."""
        took_s = self.data_s + self.collate_s
        return max(took_s - (self.queued_s or 0.0), min(self.worker_cpu_s, took_s))
