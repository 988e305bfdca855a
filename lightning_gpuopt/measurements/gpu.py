"""What is measured of a GPU, as plain data: its own clock, copies to it, NVML's figures, close looks at a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_gpuopt.measurements.counters import Summed
from lightning_gpuopt.measurements.kernels import StepKernels


@dataclass(frozen=True, slots=True)
class GpuTimes(Summed):
    """What the GPU did on its compute stream in the steps whose events have been read; all but counts in seconds."""

    steps: int = 0
    compute_s: float = 0.0  # from the beginning of a step's own work to its end
    compute_bound_s: float = 0.0  # of those, could be idle at most: until the host had issued all of the step
    copy_s: float = 0.0  # the batches' copies to the device; no other work runs meanwhile
    forward_s: float = 0.0  # ``training_step``'s own kernels, where it was asked for
    wait_s: float = 0.0  # Lightning's broadcast before each step, in which ranks wait for one another
    validation_s: float = 0.0
    # work queued outside of the step (EMA, GPU augmentation), by phase or hook
    queued: dict[str, float] = field(default_factory=dict)
    # no kernel ran, outside of the step's work and copies, by what the host did then: a phase, or a hook such as
    # "MyCallback.on_train_batch_end"
    idle: dict[str, float] = field(default_factory=dict)
    # ``idle`` that hooks would have been given in steps in which their waits for the GPU were seen, had they not been
    looked_at: dict[str, float] = field(default_factory=dict)
    looked_idle: dict[str, float] = field(default_factory=dict)  # what hooks were given in those steps
    # ``idle`` after a hook in which the host had waited for the GPU, by that hook
    exposed_by: dict[str, float] = field(default_factory=dict)
    # inside the steps, the GPU could be idle while the host collected garbage or compiled, by which
    paused: dict[str, float] = field(default_factory=dict)
    paused_steps: int = 0  # steps in which that was long enough to be seen in their length
    paused_compute_s: float = 0.0  # ``compute_s`` in those steps

    @property
    def idle_s(self) -> float:
        return sum(self.idle.values())

    @property
    def queued_s(self) -> float:
        return sum(self.queued.values())

    @property
    def seconds(self) -> float:
        return self.compute_s + self.copy_s + self.queued_s + self.wait_s + self.validation_s + self.idle_s


@dataclass(frozen=True, slots=True)
class AheadCopies(Summed):
    """The copies of batches that were made ahead of their turn, on a stream of their own."""

    copies: int = 0  # batches
    copy_s: float = 0.0
    exposed_s: float = 0.0  # for which the computation waited for them


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What NVML reported of this rank's GPU; None: a figure that the GPU does not give."""

    utilization: float | None = None  # time in which a kernel was resident, 0-100 %
    sm_activity: float | None = None  # mean share of the multiprocessors that worked, 0-100 %; Hopper and later
    seconds: float = 0.0  # for how long it was read
    throttled_percent: float | None = None  # of the time, clocks were reduced for heat or by the power brake
    power_capped_percent: float | None = None  # of the time, they were reduced to stay within the power limit
    sm_clock_mhz: float | None = None  # mean
    sm_clock_mhz_max: float | None = None  # highest that the device can have
    neighbours: tuple[str, ...] = ()  # other processes on the GPU, each as "python (pid 4711)"


@dataclass(frozen=True, slots=True)
class SyncSighting:
    """What a close look at a few steps saw of the host waiting for the GPU inside the step."""

    steps: int  # steps looked at
    count: int  # synchronizing calls of the user's own code in them
    places: tuple[tuple[str, int], ...] = ()  # "Model.training_step (model.py:12)" with its number of calls, most first


@dataclass(frozen=True, slots=True)
class StepCopies:
    """Copies between host and device that a mean step has issued itself."""

    direction: str  # "host to device", "device to host", or "both"
    seconds: float
    bytes: float | None = None  # None if the records do not tell
    pageable: bool = False  # most of the time goes to copies of pageable memory, which block the host


@dataclass(frozen=True, slots=True)
class StepLook:
    """What torch.profiler recorded of a few steps, from their work's beginning to its end; seconds of a mean step."""

    steps: int  # steps looked at
    busy_s: float  # a kernel ran; a collective that waits counts
    launch_idle_s: float  # idle since the host issued too slowly
    sync_idle_s: float  # idle after a call in which the host had waited for the GPU
    copy_idle_s: float = 0.0  # idle for a copy that the step had issued
    copies: StepCopies | None = None
    communication_s: float = 0.0  # collectives ran, and nothing else
    calls: float = 0.0  # of the CUDA runtime; 0: none were recorded, and so no waits were seen
    forward_collectives: bool = False  # a collective ran in the forward: ``sync_dist=True`` puts one there
    correlated: bool = True  # whether records tie what ran on the GPU to the calls that issued it
    kernels: StepKernels | None = None

    @property
    def idle_s(self) -> float:
        return self.launch_idle_s + self.sync_idle_s + self.copy_idle_s
