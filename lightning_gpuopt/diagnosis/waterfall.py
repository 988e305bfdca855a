"""What the device waited for, and for how long: one account for every share, finding, prediction and headroom.

On CUDA only the time counts in which the GPU was idle, attributed to what the host did in exactly that time: a host
that works while the GPU is busy costs nothing. On other devices the training process is the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_gpuopt.measurements import phases
from lightning_gpuopt.measurements.gpu import DeviceState, GpuTimes, StepLook, SyncSighting

# NVML's utilization is a mean over up to a second; over so many seconds it says something of the steps
ENOUGH_S: Final = 5.0
_COVERED: Final = 0.5  # a run that is shorter than that has to be covered to this share
_SURE: Final = 0.12  # without a look, less idle time than this share lies within the error of a few of NVML's readings
# what the diagnosis itself costs is no fault of the run's; where it is much, the report says it in a note
_OWN: Final = "StallDetector."
_SYNCS_A_STEP: Final = 0.5  # the user's code waits for the GPU in every second step or more often


@dataclass(frozen=True, slots=True)
class Waterfall:
    """A stretch of a run, as its device saw it; times in seconds."""

    on_gpu: bool  # the GPU's own time; else the training process's
    wall_s: float
    steps: int
    step_s: float | None  # mean, without validation, checkpoints and the set-up of epochs; None without steps
    validation_s: float = 0.0  # wall time on this device, from the end of what was queued before
    work_s: float = 0.0  # the GPU ran steps, copies and hooks' work, less idle time seen inside steps; 0 elsewhere
    # seconds by what the host did: a phase ("transfer": the copy), or a hook, "MyCallback.on_train_batch_end"
    waits: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0  # idle inside the steps since the host issued too slowly
    sync_s: float = 0.0  # idle there after the host had waited for the GPU
    copies_s: float = 0.0  # idle there for copies that the step itself issued
    unsure_s: float = 0.0  # seems idle there, within the error of NVML's readings
    exposed_by: str = ""  # the hook whose wait for the GPU exposed most of ``waits``
    diagnosis_s: float = 0.0  # waits for StallDetector's own hooks; in no other wait

    def share(self, seconds: float) -> float:
        """Seconds of this device as a share of the stretch, 0-1."""
        return min(max(seconds / self.wall_s, 0.0), 1.0) if self.wall_s > 0 else 0.0

    def wait(self, *names: str) -> float:
        return sum(self.waits.get(name, 0.0) for name in names)

    @property
    def idle_s(self) -> float:
        return sum(self.waits.values()) + self.inside_s + self.unsure_s

    @property
    def inside_s(self) -> float:
        """Seconds in which the GPU was idle inside the steps."""
        return self.launch_s + self.sync_s + self.copies_s

    @property
    def step_waits_s(self) -> float:
        """Seconds of those that lie in steps, not between them."""
        return sum(s for name, s in self.waits.items() if in_steps(name)) + self.inside_s


def in_steps(name: str) -> bool:
    """Whether what the host did belongs to every step: not to validation, checkpoints or the beginning of epochs."""
    if "." in name:
        return name.rpartition(".")[2] in phases.STEP_HOOKS
    return name not in (*phases.BETWEEN_STEPS, phases.FIRST_FETCH)


def waterfall_of(
    times: phases.PhaseTimes,
    gpu: GpuTimes | None = None,
    device: DeviceState | None = None,
    look: StepLook | None = None,
    syncs: SyncSighting | None = None,
    *,
    loads_beside: bool = False,
) -> Waterfall:
    """Account for a stretch of a run.

    ``loads_beside``: batches are made beside the training process. While that diagnoses, they go on being made, and
    where it waits for them, it would have waited for so much longer.
    """
    if gpu is None:
        return Waterfall(
            on_gpu=False,
            wall_s=times.wall_s,
            steps=times.steps,
            step_s=times.step_s,
            validation_s=times.phases["validation"],
            waits=_without_own(_process_waits(times)),
            diagnosis_s=_own_s(times.callbacks),
        )
    if not gpu.steps:  # nothing was read yet, or CUDA refuses: the host's own time says nothing about cost
        return Waterfall(True, 0.0, 0, None)
    gpu = _with_waits_seen(gpu)
    diagnosis_s, gpu = _own_s(gpu.idle), replace(gpu, idle=_without_own(gpu.idle))
    if loads_beside and gpu.idle.get("data_wait", 0.0) > diagnosis_s:
        gpu = replace(gpu, idle=gpu.idle | {"data_wait": gpu.idle["data_wait"] + diagnosis_s})
        diagnosis_s = 0.0
    waits = dict(gpu.idle)
    waits["transfer"] = waits.get("transfer", 0.0) + gpu.copy_s
    waits["epoch_setup"] = waits.get("epoch_setup", 0.0) + waits.pop(phases.FIRST_FETCH, 0.0)
    wall_s, aside_s = gpu.seconds, _aside_s(gpu)
    inside_s, sync_share = _inside_the_steps(gpu, wall_s, aside_s, device, look)
    longer_s, least_s = _made_longer_by_pauses(gpu), 0.0 if look is not None else _SURE * wall_s
    paused_s = min(sum(gpu.paused.values()), max(inside_s if inside_s >= least_s else 0.0, longer_s))
    for name, seconds in gpu.paused.items():  # what stopped the host comes first: without it the rest may be hidden
        waits[name] = waits.get(name, 0.0) + paused_s * seconds / max(sum(gpu.paused.values()), 1e-9)
    inside_s, unsure_s = max(inside_s - paused_s, 0.0), 0.0
    if inside_s < least_s:
        unsure_s, inside_s = inside_s, 0.0
    copies_s = _copies_s(gpu, look)
    if sync_share is None:
        sync_share = float(syncs is not None and syncs.steps > 0 and syncs.count >= _SYNCS_A_STEP * syncs.steps)
    return Waterfall(
        on_gpu=True,
        wall_s=wall_s,
        steps=gpu.steps,
        step_s=(wall_s - aside_s) / gpu.steps,
        validation_s=gpu.validation_s,
        work_s=max(gpu.compute_s - inside_s - paused_s - copies_s, 0.0) + gpu.copy_s + gpu.queued_s,
        waits=waits,
        launch_s=inside_s * (1 - sync_share),
        sync_s=inside_s * sync_share,
        copies_s=copies_s,
        unsure_s=unsure_s,
        exposed_by=_exposed_by(gpu),
        diagnosis_s=diagnosis_s,
    )


def _aside_s(gpu: GpuTimes) -> float:
    """Seconds that are no part of a step: validations, and what the GPU waited for or was given between steps."""
    between = (seconds for times in (gpu.idle, gpu.queued) for name, seconds in times.items() if not in_steps(name))
    return gpu.validation_s + sum(between)


def _with_waits_seen(gpu: GpuTimes) -> GpuTimes:
    """With the idle time of hooks that wait for the GPU as seen in their waits; the rest is work that they queued."""
    if not gpu.looked_at:
        return gpu
    idle, queued = dict(gpu.idle), dict(gpu.queued)
    for name, seconds in gpu.looked_at.items():
        seen_s = gpu.looked_idle.get(name, 0.0)
        unseen_s = idle.get(name, 0.0) - seen_s
        if seconds > 0 and unseen_s > 0:
            work_s = unseen_s * (1 - min(seen_s / seconds, 1.0))
            idle[name] -= work_s
            queued[name] = queued.get(name, 0.0) + work_s
    return replace(gpu, idle=idle, queued=queued)


def _without_own(waits: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds for name, seconds in waits.items() if not name.startswith(_OWN)}


def _own_s(waits: Mapping[str, float]) -> float:
    return sum(seconds for name, seconds in waits.items() if name.startswith(_OWN))


def _process_waits(times: phases.PhaseTimes) -> dict[str, float]:
    waits = {name: times.phases[name] for name in ("data_wait", "transfer", "logging", "checkpoint", "epoch_setup")}
    waits["other"] = times.phases["other"] - times.signal_broadcast_s
    waits[phases.SIGNAL_BROADCAST] = times.signal_broadcast_s
    waits["transfer"] -= sum(times.batch_hooks.values())
    waits |= times.callbacks | times.batch_hooks
    for kind, seconds_by in ((phases.GARBAGE_COLLECTION, times.collecting), (phases.RECOMPILATION, times.compiling)):
        waits[kind] = sum(seconds_by.values())
        for name, seconds in seconds_by.items():
            if name in waits:
                waits[name] -= seconds
    return waits


def _inside_the_steps(
    gpu: GpuTimes, wall_s: float, aside_s: float, device: DeviceState | None, look: StepLook | None
) -> tuple[float, float | None]:
    """Seconds of GPU idle time inside the steps, and how much of it followed a wait of the host, 0-1.

    From a look, if there is one. Recording costs the host time, so a look sees more idle time than usual. Therefore
    the lesser counts: the usual step time beyond the look's busy time, or the look's share of idle time.
    """
    # after the host has issued all of a step, the GPU cannot be idle in it any more, but for copies
    max_s = min(gpu.compute_bound_s, gpu.compute_s)
    if look is not None and look.steps:
        longer_s = max(gpu.compute_s - (look.busy_s + look.copy_idle_s) * gpu.steps, 0.0)
        slow_s = look.launch_idle_s + look.sync_idle_s
        own_s = _share_of_step(gpu, look, slow_s)
        # what stops the host now and then may have lain in none of the steps that were looked at
        inside_s = min(longer_s, own_s + sum(gpu.paused.values()), max_s)
        return inside_s, look.sync_idle_s / slow_s if look.calls and slow_s > 0 else None
    if device is None or device.utilization is None or not covers(device, wall_s):
        return 0.0, None
    inside_s = min(_idle_by_utilization(gpu, wall_s, aside_s, device.utilization), max_s)
    return inside_s, None


def _copies_s(gpu: GpuTimes, look: StepLook | None) -> float:
    """Seconds in which the GPU was idle for copies inside the steps: only a look sees them, in full however slow."""
    if look is None or not look.steps:
        return 0.0
    return min(look.copy_idle_s * gpu.steps, max(gpu.compute_s - look.busy_s * gpu.steps, 0.0))


def _share_of_step(gpu: GpuTimes, look: StepLook, seconds: float) -> float:
    """The share of the steps' own work for these seconds of a profiled step."""
    whole_s = look.busy_s + look.idle_s
    return gpu.compute_s * seconds / whole_s if whole_s > 0 else 0.0


def _made_longer_by_pauses(gpu: GpuTimes) -> float:
    """Seconds by which steps in which the host was stopped were longer on the GPU than the others."""
    others = gpu.steps - gpu.paused_steps
    if not gpu.paused_steps or others <= 0:
        return 0.0
    usual_s = (gpu.compute_s - gpu.paused_compute_s) / others
    return min(max(gpu.paused_compute_s - gpu.paused_steps * usual_s, 0.0), sum(gpu.paused.values()))


def _idle_by_utilization(gpu: GpuTimes, wall_s: float, aside_s: float, percent: float) -> float:
    """Idle seconds inside the steps, if the GPU was busy for so many percent of the time.

    What lies between the steps is taken as idle: the benefit of the doubt. NVML counts no copies; they
    are a cause of their own.
    """
    between_s = sum(seconds for name, seconds in gpu.idle.items() if in_steps(name)) + gpu.copy_s
    return max(wall_s * (1 - percent / 100) - aside_s - between_s, 0.0)


def covers(device: DeviceState, wall_s: float) -> bool:
    """Whether NVML was read for long enough to say something of a stretch of so many seconds."""
    return device.seconds >= min(ENOUGH_S, _COVERED * wall_s)


def worth_a_look(gpu: GpuTimes, device: DeviceState | None, threshold: float) -> bool:
    """Whether there is reason to look inside the step, without which nothing can be said of it; threshold 0-1.

    NVML gives one by its figures: SM activity, if there is any, tells more than utilization, which counts any kernel
    however small. If it has no figure (MIG), or counts another program too, it is reason enough that the GPU can be
    idle, by its events and by the host's time to issue the step.
    """
    if device is None or device.utilization is None or device.neighbours:
        return gpu.seconds >= ENOUGH_S and may_idle(gpu, threshold)
    if device.seconds < ENOUGH_S or not gpu.steps:
        return False
    wall_s, aside_s = gpu.seconds, _aside_s(gpu)
    # for its own copies the GPU can be idle however far the host is ahead; to small kernels that does not apply
    idle_s = _idle_by_utilization(gpu, wall_s, aside_s, device.utilization)
    if device.sm_activity is not None and device.sm_activity < device.utilization:
        small_s = _idle_by_utilization(gpu, wall_s, aside_s, device.sm_activity)
        idle_s = max(idle_s, min(small_s, gpu.compute_bound_s))
    return idle_s >= threshold * wall_s


def may_idle(gpu: GpuTimes, threshold: float) -> bool:
    """Whether the GPU could be idle inside the steps for this share of the time; not if the host runs ahead."""
    return gpu.steps > 0 and gpu.compute_bound_s >= threshold * (gpu.compute_s + gpu.idle_s + gpu.copy_s)


def hooks_s(gpu: GpuTimes) -> float:
    """Seconds for which hooks seem to have left the GPU idle."""
    return sum(seconds for name, seconds in gpu.idle.items() if "." in name and not name.startswith(_OWN))


def _exposed_by(gpu: GpuTimes) -> str:
    if not gpu.exposed_by:
        return ""
    hook = max(gpu.exposed_by, key=lambda name: gpu.exposed_by[name])
    return hook if gpu.exposed_by[hook] >= gpu.idle_s / 2 else ""
