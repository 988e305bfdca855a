"""What a run's loader and step cost per batch, as a report keeps it for questions that are asked later."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[float, float, float]
"""A figure and its uncertainty: (low, mid, high)."""


@dataclass(frozen=True, slots=True)
class LoaderCosts:
    """Costs since the last change, in seconds per batch. What was not measured is None.

    Attributes:
        num_workers: worker processes; 0: the training process loaded by itself.
        prefetch_factor: batches that each worker prepared ahead; None without workers.
        batches: batches that were measured.
        data_s: time in dataset access.
        data_cpu_s: CPU time of the thread in it.
        collate_s: time in ``collate_fn``.
        worker_cpu_s: CPU time of a whole worker: that of other threads and child processes counts, too.
        queued_s: for so long a worker waited for a CPU meanwhile.
        consumer_s: the step without its wait for data.
        consumer_cpu_s: CPU time of the training process for a step, without loading.
        receive_s: the training process's own cost of taking a batch from a worker: (low, mid, high).
        usable_cpus: CPUs that might be used.
        free_cpus: those of them that this run used or that nobody did; the rest was other processes'.
        spread: relative uncertainty of a worker's time.
        edges_s: the batches' times as a histogram: lower edges of its bins, and the upper edge of the last.
        counts: batches in each bin.
    """

    num_workers: int
    prefetch_factor: int | None
    batches: int
    data_s: float
    data_cpu_s: float
    collate_s: float
    worker_cpu_s: float
    queued_s: float | None
    consumer_s: float
    consumer_cpu_s: float | None
    receive_s: Interval
    usable_cpus: float | None
    free_cpus: float | None
    spread: float
    edges_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    @property
    def batch_s(self) -> float:
        """Seconds in which a batch is made, without what a worker waited for a CPU."""
        took_s = self.data_s + self.collate_s
        return max(took_s - (self.queued_s or 0.0), min(self.worker_cpu_s, took_s))
