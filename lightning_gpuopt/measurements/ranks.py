"""What is known of the collectives between ranks, as plain data: the reduction of gradients, and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpuopt.measurements.summed import Summed


@dataclass(frozen=True, slots=True)
class ReducerTimes(Summed):
    """What DDP's reducer did on the CPU, where the training thread waits for it at the end of the backward pass.

    Attributes:
        backwards: backward passes that reduced gradients.
        sampled: those of them that were timed.
        exposed_s: seconds of the timed ones from the last gradient until all were reduced.
    """

    backwards: int = 0
    sampled: int = 0
    exposed_s: float = 0.0

    @property
    def all_exposed_s(self) -> float | None:
        """Seconds of all backward passes, as far as the timed ones tell; None before the first."""
        return self.exposed_s / self.sampled * self.backwards if self.sampled else None


@dataclass(frozen=True, slots=True)
class GradientSync:
    """How gradients are reduced. What is not known, or does not apply to the strategy, is None or empty.

    Attributes:
        bytes: of the gradients that a reduction sends.
        buckets: collectives that they are sent in.
        dtype: of the gradients, ``"float32"``; several are joined by commas.
        hook: DDP's communication hook.
        find_unused_parameters: whether DDP looks for parameters without a gradient in each step.
        unused: whether it found some.
        bucket_view: whether gradients are views of the buckets, which saves a copy.
        static_graph: whether DDP was told that the graph is the same in each step.
        accumulate_grad_batches: batches between two reductions.
        link: between the ranks: ``"NVLink"``, ``"PCIe"``, or ``"network"`` between several nodes.
    """

    bytes: int | None = None
    buckets: int | None = None
    dtype: str = ""
    hook: str = ""
    find_unused_parameters: bool | None = None
    unused: bool | None = None
    bucket_view: bool | None = None
    static_graph: bool | None = None
    accumulate_grad_batches: int = 1
    link: str = ""


@dataclass(frozen=True, slots=True)
class MetricSync(Summed):
    """Metrics that were reduced over the ranks inside of steps, as ``self.log(..., sync_dist=True)`` asks for.

    Attributes:
        calls: reductions.
        seconds: in which the training thread waited for them.
    """

    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank did in a mean step, in seconds.

    Attributes:
        rank: global rank.
        data_wait_s: it waited for its loader; on CUDA: its GPU was idle while it did.
        compute_s: its own work on the training thread, without backward and optimizer, in which ranks wait for one
            another; on CUDA: its GPU's other idle time between steps, and the copy.
        loader_s: its loader needs for a batch: the workers' time over their number; None where not measured.
        forward_s: its GPU needs for ``training_step``; None on other devices, and where ranks wait in it for one
            another.
        communication_s: its GPU ran collectives and nothing else, in the close look: a slower rank waits less in them.
            None without a look; on the CPU: it waited in DDP's reducer.
        metric_sync_s: it waited in reductions of metrics; None on CUDA.
        batch_bytes: mean bytes of its batches; None where not measured.
    """

    rank: int
    data_wait_s: float
    compute_s: float
    loader_s: float | None = None
    forward_s: float | None = None
    communication_s: float | None = None
    metric_sync_s: float | None = None
    batch_bytes: float | None = None
