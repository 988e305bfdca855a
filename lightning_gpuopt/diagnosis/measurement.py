"""All that a diagnosis looks at: plain numbers, from one rank after warm-up, and a few from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # reading a report must not load torch
    from lightning_gpuopt.telemetry.host import HostActivity
    from lightning_gpuopt.timeline.gpu_clock import GpuTimes
    from lightning_gpuopt.timeline.loader import LoaderFacts
    from lightning_gpuopt.timeline.phases import PhaseTimes
    from lightning_gpuopt.timeline.queues import QueueTimes
    from lightning_gpuopt.timeline.worker_clock import WorkerTimes


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What NVML said of this rank's GPU. A figure that the GPU does not give is None.

    Attributes:
        utilization: time in which a kernel was resident, 0-100 %.
        throttled_percent: time in which the clocks were reduced for heat or power, 0-100 %.
        sm_clock_mhz: mean clock of the multiprocessors.
        sm_clock_mhz_max: highest clock seen in this run.
    """

    utilization: float | None = None
    throttled_percent: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_mhz_max: float | None = None


@dataclass(frozen=True, slots=True)
class SyncSighting:
    """What a close look at a few steps saw of the host waiting for the GPU.

    Attributes:
        steps: steps looked at.
        count: synchronizing calls in them.
        where: file and line of the most frequent one; empty when there was none.
    """

    steps: int
    count: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank did in a mean step, in seconds.

    Attributes:
        rank: global rank.
        data_wait_s: it waited for its loader.
        compute_s: its own work on the training thread, without backward and optimizer, in which ranks wait for one
            another.
        loader_s: its loader needs for a batch: the workers' time over their number; None where not measured.
    """

    rank: int
    data_wait_s: float
    compute_s: float
    loader_s: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One stretch of a run.

    Attributes:
        times: the phases.
        loader: settings of the training loaders.
        host: what workers and CPUs did; None where not measured.
        gpu: what the GPU's event clock saw; None without a GPU.
        workers: what was timed inside the workers, or inside the training process where it loads by itself.
        queues: what was seen of the loader's queues.
        device: what NVML said.
        syncs: what a close look for synchronizing calls saw; None where there was no look.
        ranks: the work of all ranks; empty on one.
    """

    times: PhaseTimes
    loader: LoaderFacts
    host: HostActivity | None = None
    gpu: GpuTimes | None = None
    workers: WorkerTimes | None = None
    queues: QueueTimes | None = None
    device: DeviceState | None = None
    syncs: SyncSighting | None = None
    ranks: tuple[RankWork, ...] = ()

    @property
    def exposed(self) -> float:
        """Which part of the host's time between two steps the GPU really waited through, 0-1.

        A host that runs ahead of the GPU loads and logs while the GPU still works: that costs nothing. Without a GPU,
        or before a gap was measured, all of it counts.
        """
        gpu, times = self.gpu, self.times
        if gpu is None or not gpu.gaps:
            return 1.0
        host_s = sum(times.phases[phase] for phase in ("data_wait", "logging", "other")) + times.step_hooks_s
        if host_s <= 0:
            return 1.0
        return min(gpu.idle_s / gpu.gaps * times.steps / host_s, 1.0)

    @property
    def copy_s(self) -> float:
        """Seconds in which the GPU took batches in and did nothing else."""
        if self.gpu is None or not self.gpu.steps:
            return 0.0
        return self.gpu.copy_s / self.gpu.steps * self.times.steps

    def share(self, seconds: float) -> float:
        """Seconds as a share of this stretch's wall time, 0-1."""
        return min(max(seconds / self.times.wall_s, 0.0), 1.0) if self.times.wall_s > 0 else 0.0
