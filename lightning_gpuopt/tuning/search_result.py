"""What a search for the number of workers found: its trials, its choice, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LimitedBy = Literal["consumer", "cpu", "memory", "shared_memory", "max_num_workers", "time"]
"""Why not more workers.

- ``consumer``: the loader is as fast as its consumer; also if the limit is the cost of taking a batch from a worker.
- ``cpu``: more workers gain nothing: the CPUs, or another resource the workers share (a disk, a lock), are fully used.
- ``memory``: another worker would not fit.
- ``shared_memory``: its batches would not fit into ``/dev/shm``, or their tensors would exceed the limit of open files.
- ``max_num_workers``: the limit was set by the argument or its default, or by the container's process limit.
- ``time``: the time budget ran out before the choice was verified.
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """The measured speed of the loader with this many workers.

    Attributes:
        num_workers: worker processes.
        batches_per_s: batches per second that the consumer received.
        data_wait_s: seconds per batch that the consumer waited for the loader.
    """

    num_workers: int
    batches_per_s: float
    data_wait_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a trial, per batch."""

    trial: Trial
    service_s: float  # wall time of a worker
    cpu_s: float  # CPU time in it
    consumer_s: float  # the consumer's own
    consumer_cpu_s: float
    unevenness: float = 0.0  # variance of a worker's time over the square of its mean
    batch_bytes: float | None = None
    batch_tensors: int = 0  # files that a batch keeps open
    worker_bytes: int | None = None
    startup_s: float = 0.0  # until the first batch of each worker
    startup_cpu_s: float = 0.0  # for which each used the CPU until then


@dataclass(frozen=True, slots=True)
class NumWorkersResult:
    """Settings for a DataLoader, and the reason.

    Attributes:
        num_workers: the smallest number of workers that is as fast as the best, within the tolerance; 0 only if worker
            processes cannot run at all.
        trials: the measurements, in their order.
        limited_by: what limits it.
        predicted_batches_per_s: expected batches per second; None if nothing could be measured.
        prefetch_factor: batches that each worker prepares ahead; None without workers.
        pin_memory: whether to put batches into page-locked memory.
        persistent_workers: whether to keep workers between epochs.
    """

    num_workers: int
    trials: tuple[Trial, ...]
    limited_by: LimitedBy
    predicted_batches_per_s: float | None = None
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False

    @property
    def settings(self) -> dict[str, int | bool | None]:
        """The choice as arguments of a ``DataLoader``, under their own names."""
        return {
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.persistent_workers,
        }


@dataclass(frozen=True)
class WorkersChoice:
    """The choice for a loader."""

    num_workers: int
    settled: bool  # the search is over
    before: int  # what the user had set
    trials: tuple[Trial, ...] = ()
    limited_by: LimitedBy = "consumer"
    prefetch_factor: int | None = None
    making_s: float | None = None  # for a batch in the training process, where the user had set no workers

    def __str__(self) -> str:
        ahead = "" if self.prefetch_factor is None else f", prefetch_factor={self.prefetch_factor}"
        if self.num_workers == self.before:
            return f"num_workers {self.before} is kept{ahead}: limited by {self.limited_by}"
        text = f"num_workers {self.before} → {self.num_workers}{ahead}: "
        if (gain := self._gain) >= 1.05:
            text += f"{gain:.1f}× faster input, "
        return f"{text}limited by {self.limited_by}"

    @property
    def _gain(self) -> float:
        """Batches per second, over those with the user's own number; 0 if that is not known."""
        best = {each.num_workers: each for each in sorted(self.trials, key=lambda each: each.batches_per_s)}
        now, own = best.get(self.num_workers), best.get(self.before)
        if now is None:
            return 0.0
        if own is not None:
            return now.batches_per_s / own.batches_per_s if own.batches_per_s else 0.0
        if self.before or self.making_s is None:
            return 0.0
        step_s = max(1 / now.batches_per_s - now.data_wait_s, 0.0)
        return (step_s + self.making_s) * now.batches_per_s
