"""What is known of the collectives between ranks, as plain data: the reduction of gradients, and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpuopt.measurements.counters import Summed


@dataclass(frozen=True, slots=True)
class ReducerTimes(Summed):
    """What DDP's reducer did on the CPU, where the training thread waits for it at the end of the backward pass."""

    backwards: int = 0  # those that reduced gradients
    sampled: int = 0  # those of them that were timed
    exposed_s: float = 0.0  # of the timed ones, from the last gradient until all were reduced

    @property
    def all_exposed_s(self) -> float | None:
        return self.exposed_s / self.sampled * self.backwards if self.sampled else None


@dataclass(frozen=True, slots=True)
class GradientSync:
    """How gradients are reduced; None or empty: not known, or nothing of the strategy's."""

    bytes: int | None = None  # of the gradients that a reduction sends
    buckets: int | None = None  # collectives that they are sent in
    dtype: str = ""  # "float32"; several are joined by commas
    hook: str = ""  # DDP's communication hook
    find_unused_parameters: bool | None = None  # DDP looks for parameters without a gradient in each step
    unused: bool | None = None  # whether it found some
    bucket_view: bool | None = None  # gradients are views of the buckets, which saves a copy
    static_graph: bool | None = None  # DDP was told that the graph is the same in each step
    accumulate_grad_batches: int = 1
    link: str = ""  # "NVLink", "PCIe", or "network" between several nodes


@dataclass(frozen=True, slots=True)
class MetricSync(Summed):
    """Metrics that were reduced over the ranks inside of steps, as ``self.log(..., sync_dist=True)`` asks for."""

    calls: int = 0  # reductions
    seconds: float = 0.0  # in which the training thread waited for them
    names: tuple[str, ...] = ()  # of the metrics


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank did in a mean step, in seconds."""

    rank: int
    data_wait_s: float  # it waited for its loader; on CUDA: its GPU was idle while it did
    # its own work on the training thread, without backward and optimizer, in which ranks wait for one another; on CUDA:
    # its GPU's other idle time between steps, and the copy
    compute_s: float
    loader_s: float | None = None  # for a batch: the workers' time over their number; None: not measured
    # on the GPU for ``training_step``; None: no GPU, or ranks wait in it for one another
    forward_s: float | None = None
    # GPU ran collectives and nothing else, in the close look (None without): a slower rank waits less in them; on the
    # CPU: it waited in DDP's reducer
    communication_s: float | None = None
    metric_sync_s: float | None = None  # it waited in reductions of metrics; None on CUDA
    batch_bytes: float | None = None  # mean; None: not measured
