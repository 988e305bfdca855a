"""What is measured of a GPU, as plain data: its own clock, copies to it, NVML's figures, close looks at a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_gpuopt.measurements.kernels import StepKernels
from lightning_gpuopt.measurements.summed import Summed


@dataclass(frozen=True, slots=True)
class GpuTimes(Summed):
    """What the GPU did in the steps whose events have been read, on its compute stream.

    Attributes:
        steps: training batches read.
        compute_s: seconds from the beginning of a step's own work to its end.
        compute_bound_s: seconds of those in which the GPU could have been idle at most: from the beginning of the
            step's work until the host had issued all of it.
        copy_s: seconds of the batches' copies to the device; no other work runs meanwhile.
        queued: seconds of work that was queued outside of the step (EMA, GPU augmentation), by the phase or hook that
            did it.
        forward_s: seconds of ``training_step``'s own kernels, where it was asked for.
        wait_s: seconds in Lightning's broadcast before each step, in which ranks wait for one another.
        validation_s: seconds from the beginning of validations to their end.
        idle: seconds in which no kernel ran, outside of the step's own work and of copies, by what the host did in
            exactly that time: a phase, or a hook such as ``"MyCallback.on_train_batch_end"``.
        looked_at: seconds of ``idle`` that hooks would have been given in steps in which their waits for the GPU were
            seen, had they not been, by hook.
        looked_idle: what they were given in those steps.
        exposed_by: seconds of ``idle`` after a hook in which the host had waited for the GPU, by that hook.
        paused: seconds inside the steps in which the GPU could have been idle since the host collected garbage or
            compiled, by which of them.
        paused_steps: steps in which it did so for long enough to be seen in the length of a step.
        paused_compute_s: seconds of ``compute_s`` in those steps.
    """

    steps: int = 0
    compute_s: float = 0.0
    compute_bound_s: float = 0.0
    copy_s: float = 0.0
    forward_s: float = 0.0
    wait_s: float = 0.0
    validation_s: float = 0.0
    queued: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    looked_at: dict[str, float] = field(default_factory=dict)
    looked_idle: dict[str, float] = field(default_factory=dict)
    exposed_by: dict[str, float] = field(default_factory=dict)
    paused: dict[str, float] = field(default_factory=dict)
    paused_steps: int = 0
    paused_compute_s: float = 0.0

    @property
    def idle_s(self) -> float:
        """All of ``idle``, in seconds."""
        return sum(self.idle.values())

    @property
    def queued_s(self) -> float:
        """All of ``queued``, in seconds."""
        return sum(self.queued.values())

    @property
    def seconds(self) -> float:
        """All of the stretch, in seconds."""
        return self.compute_s + self.copy_s + self.queued_s + self.wait_s + self.validation_s + self.idle_s


@dataclass(frozen=True, slots=True)
class AheadCopies(Summed):
    """The copies of batches that were made ahead of their turn, on a stream of their own.

    Attributes:
        copies: batches.
        copy_s: seconds of their copies.
        exposed_s: seconds for which the computation waited for them.
    """

    copies: int = 0
    copy_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What NVML reported of this rank's GPU. A figure that the GPU does not give is None.

    Attributes:
        utilization: time in which a kernel was resident, 0-100 %.
        sm_activity: mean share of the multiprocessors that worked, 0-100 %; Hopper and later.
        seconds: for how long it was read.
        throttled_percent: time in which the clocks were reduced for heat or by the hardware's power brake, 0-100 %.
        power_capped_percent: time in which they were reduced to stay within the power limit, 0-100 %.
        sm_clock_mhz: mean clock of the multiprocessors.
        sm_clock_mhz_max: highest clock that the device can have.
        neighbours: other processes on the GPU, each as ``"python (pid 4711)"``.
    """

    utilization: float | None = None
    sm_activity: float | None = None
    seconds: float = 0.0
    throttled_percent: float | None = None
    power_capped_percent: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_mhz_max: float | None = None
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncSighting:
    """What a close look at a few steps saw of the host waiting for the GPU inside the step.

    Attributes:
        steps: steps looked at.
        count: synchronizing calls made by the user's own code in them.
        places: function, file and line of each place that made them, ``"Model.training_step (model.py:12)"``, with
            their number; the most frequent first.
    """

    steps: int
    count: int
    places: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StepCopies:
    """Copies between host and device that a mean step has issued itself.

    Attributes:
        direction: ``"host to device"``, ``"device to host"``, or ``"both"``.
        seconds: how long they ran.
        bytes: what they moved; None where the records do not tell.
        pageable: whether most of their time goes to copies of pageable memory, which block the host.
    """

    direction: str
    seconds: float
    bytes: float | None = None
    pageable: bool = False


@dataclass(frozen=True, slots=True)
class StepLook:
    """What torch.profiler's activity records said of a few steps: from the beginning of their work to its end.

    Attributes:
        steps: steps looked at.
        busy_s: seconds of a mean step in which a kernel ran; a collective that waits counts.
        launch_idle_s: seconds of a mean step in which the GPU was idle since the host issued too slowly.
        sync_idle_s: seconds of a mean step in which it was idle after a call in which the host had waited for it.
        copy_idle_s: seconds of a mean step in which it was idle for a copy that the step had issued.
        copies: those copies; None where there were none.
        communication_s: seconds of a mean step in which collectives ran, and nothing else.
        calls: calls of the CUDA runtime in a mean step; 0 where none were recorded, and so no waits were seen.
        forward_collectives: whether a collective ran in the forward: ``sync_dist=True`` puts one there.
        correlated: whether the records tie what ran on the GPU to the calls that issued it.
        kernels: what the steps' work consists of.
    """

    steps: int
    busy_s: float
    launch_idle_s: float
    sync_idle_s: float
    copy_idle_s: float = 0.0
    copies: StepCopies | None = None
    communication_s: float = 0.0
    calls: float = 0.0
    forward_collectives: bool = False
    correlated: bool = True
    kernels: StepKernels | None = None

    @property
    def idle_s(self) -> float:
        """Seconds of a mean step in which the GPU was idle, for whatever reason."""
        return self.launch_idle_s + self.sync_idle_s + self.copy_idle_s
