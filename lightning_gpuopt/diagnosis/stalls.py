"""Why training waits: measurements in, findings out. Pure: no torch, no clock, no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from lightning_gpuopt.diagnosis.data import data_finding
from lightning_gpuopt.diagnosis.measurement import Measurement, RankWork
from lightning_gpuopt.diagnosis.predict import speedup_without
from lightning_gpuopt.diagnosis.report import Finding
from lightning_gpuopt.timeline.actions import STEP_HOOKS
from lightning_gpuopt.timeline.phases import PhaseTimes

_SLOWER_LOADER: Final = 1.3
"""A rank whose loader needs this much longer for a batch than the others' really has slower data; a rank that merely
happens to wait in everybody's place does not."""

CAUSES: Final = (
    "main_process_loading",
    "slow_storage",
    "slow_transform",
    "cpu_saturated",
    "cpu_throttled",
    "head_of_line",
    "worker_transfer",
    "pin_memory",
    "host_to_device",
    "gpu_sync",
    "launch_bound",
    "callback",
    "logging",
    "checkpoint",
    "validation",
    "epoch_restart",
    "straggler",
    "gpu_throttled",
)


class StallError(RuntimeError):
    """A stall was found under ``StallDetector(on_stall="raise")``; the text names the cause and the cure."""


def diagnose(measurement: Measurement, threshold: float) -> list[Finding]:
    """Find every cause that takes at least ``threshold`` of the wall time.

    Args:
        measurement: what was measured, without warm-up.
        threshold: share of wall time, 0-1.

    Returns:
        The findings, largest share first.
    """
    findings = [build() for share, build in _causes(measurement, threshold) if share >= threshold]
    return sorted(findings, key=lambda finding: finding.share, reverse=True)


def count_stalls(measurement: Measurement, threshold: float) -> int:
    """How many findings :func:`diagnose` would have, without making them."""
    return sum(share >= threshold for share, _ in _causes(measurement, threshold))


def verdict_of(findings: list[Finding]) -> str:
    """The cause of the largest finding, or ``"compute_bound"``."""
    return findings[0].cause if findings else "compute_bound"


def remarks(measurement: Measurement, threshold: float) -> list[str]:
    """What takes at least ``threshold`` of the time and is none of the causes.

    Args:
        measurement: what was measured, without warm-up.
        threshold: share of wall time, 0-1.
    """
    times, loader = measurement.times, measurement.loader
    notes = []
    restarts = loader.num_workers and not loader.persistent_workers
    if measurement.share(times.phases["epoch_setup"]) >= threshold and not restarts:
        notes.append(
            f"{measurement.share(times.phases['epoch_setup']):.0%} of the time goes to the beginning of epochs: the "
            "sampler, and the first batch of each epoch. Fewer, longer epochs make it rarer."
        )
    others = measurement.share(times.phases["other"] - times.signal_broadcast_s)
    if others >= threshold:
        notes.append(
            f"{others:.0%} of the time lies between the actions that Lightning tells of: its own work around each "
            "step, and what the program does outside of hooks."
        )
    return notes


_Candidate = tuple[float, Callable[[], Finding]]
"""Share of wall time, and how the finding is made if that is enough."""


def _causes(measurement: Measurement, threshold: float) -> Iterator[_Candidate]:
    times = measurement.times
    if times.wall_s <= 0 or not times.steps:
        return
    phases, share = times.phases, measurement.share
    yield share(phases["data_wait"] * measurement.exposed), lambda: data_finding(measurement)
    yield from _callbacks(measurement)
    yield share(phases["logging"] * measurement.exposed), lambda: _logging(measurement)
    yield share(phases["validation"]), lambda: _validation(measurement)
    yield share(phases["checkpoint"]), lambda: _checkpoint(measurement)
    if measurement.loader.num_workers and not measurement.loader.persistent_workers and times.epochs:
        yield share(phases["epoch_setup"]), lambda: _epoch_restart(measurement)
    yield from _host_to_device(measurement)
    yield from _inside_the_step(measurement)
    yield from _gpu_throttled(measurement)
    stragglers = list(_straggler(measurement))
    yield from stragglers
    if not any(each >= threshold for each, _ in stragglers):  # else this is the wait for that rank
        yield share(times.signal_broadcast_s), lambda: _signal_broadcast(measurement)


def _per_step(seconds: float, times: PhaseTimes) -> dict[str, float | str]:
    return {"ms_per_step": round(seconds / times.steps * 1e3, 3), "step_ms": round((times.step_s or 0.0) * 1e3, 3)}


def _between_steps(measurement: Measurement, seconds: float) -> dict[str, float | str]:
    """Evidence of something that the host does between two steps."""
    evidence = _per_step(seconds, measurement.times)
    if measurement.gpu is not None and measurement.gpu.gaps:
        evidence["gpu_idle_ms_per_step"] = round(measurement.gpu.idle_s / measurement.gpu.gaps * 1e3, 3)
    return evidence


def _callbacks(measurement: Measurement) -> Iterator[_Candidate]:
    hooks_of: dict[str, dict[str, float]] = {}
    for name, seconds in measurement.times.callbacks.items():
        callback, _, hook = name.rpartition(".")
        hooks_of.setdefault(callback, {})[hook] = seconds
    for callback, hooks in hooks_of.items():
        in_steps_s = sum(seconds for hook, seconds in hooks.items() if hook in STEP_HOOKS) * measurement.exposed
        between_s = sum(seconds for hook, seconds in hooks.items() if hook not in STEP_HOOKS)
        build = partial(_callback, measurement, callback, hooks, in_steps_s, between_s)
        yield measurement.share(in_steps_s + between_s), build


def _callback(
    measurement: Measurement, callback: str, hooks: dict[str, float], in_steps_s: float, between_s: float
) -> Finding:
    slowest = max(hooks, key=lambda hook: hooks[hook])
    where: dict[str, float | str] = {"callback": callback, "hook": slowest}
    if in_steps_s >= between_s:
        evidence = _between_steps(measurement, sum(hooks.values())) | where
        prediction = speedup_without(measurement, in_steps_s)
    else:
        evidence = where | {"hooks_s": round(sum(hooks.values()), 3)}
        prediction = None
    advice = f"{callback}.{slowest} holds up training: do its work less often, or in a thread."
    if callback == "NumWorkersFinder":
        advice = (
            "NumWorkersFinder started workers, or tried how many are needed: it does so at the beginning, which counts "
            "in a run as short as this. Set the num_workers that it found, and take it out."
        )
    return Finding(
        "callback",
        measurement.share(in_steps_s + between_s),
        evidence,
        advice,
        predicted_speedup=prediction,
    )


def _logging(measurement: Measurement) -> Finding:
    seconds = measurement.times.phases["logging"]
    return Finding(
        "logging",
        measurement.share(seconds * measurement.exposed),
        _between_steps(measurement, seconds),
        "The logger's own calls hold up training: log less often with Trainer(log_every_n_steps=...), or let the "
        "logger write in the background.",
        predicted_speedup=speedup_without(measurement, seconds * measurement.exposed),
    )


def _validation(measurement: Measurement) -> Finding:
    seconds = measurement.times.phases["validation"]
    return Finding(
        "validation",
        measurement.share(seconds),
        {"validation_s": round(seconds, 3)},
        "Validation takes this share of the run: validate less often (check_val_every_n_epoch, val_check_interval), "
        "on fewer batches (limit_val_batches), or with more workers in the validation loader.",
    )


def _checkpoint(measurement: Measurement) -> Finding:
    seconds = measurement.times.phases["checkpoint"]
    return Finding(
        "checkpoint",
        measurement.share(seconds),
        {"checkpoint_s": round(seconds, 3)},
        "Saving checkpoints takes this share of the run: save less often (ModelCheckpoint(every_n_train_steps=...)), "
        "only the weights (save_weights_only=True), to a faster disk, or in the background (AsyncCheckpointIO).",
    )


def _epoch_restart(measurement: Measurement) -> Finding:
    times = measurement.times
    seconds = times.phases["epoch_setup"]
    return Finding(
        "epoch_restart",
        measurement.share(seconds),
        {"epoch_setup_s_per_epoch": round(seconds / times.epochs, 3), "epochs": times.epochs},
        "The workers are started again for every epoch: keep them with persistent_workers=True.",
        {"persistent_workers": True},
    )


def _host_to_device(measurement: Measurement) -> Iterator[_Candidate]:
    gpu, times, pinned = measurement.gpu, measurement.times, measurement.loader.pin_memory
    settings: dict[str, Any] = {}
    evidence: dict[str, float | str] = {}
    if gpu is None:  # moving a batch to where it is already costs the walk through it
        seconds = times.phases["transfer"]
        advice = "Walking through the batch to move it takes long: make batches of few large tensors, not many objects."
    else:
        seconds = measurement.copy_s
        evidence["pin_memory"] = str(bool(pinned))
        advice = "The GPU does nothing else while batches are copied to it: "
        if pinned:
            advice += "send smaller types (uint8, and normalise on the GPU)."
        else:
            advice += "copy from page-locked memory (pin_memory=True)."
            settings = {"pin_memory": True} if pinned is not None else {}
    yield (
        measurement.share(seconds),
        lambda: Finding(
            "host_to_device",
            measurement.share(seconds),
            _per_step(seconds, times) | evidence,
            advice,
            settings,
            speedup_without(measurement, seconds),
        ),
    )


def _inside_the_step(measurement: Measurement) -> Iterator[_Candidate]:
    """The GPU's idle time that does not lie between two steps, by what the host did in it."""
    gpu, device, times = measurement.gpu, measurement.device, measurement.times
    if gpu is None or not gpu.gaps or device is None or device.utilization is None:
        return
    steps_s = (times.step_s or 0.0) * times.steps
    # What lies between the steps (validation, checkpoints) is taken as busy: the benefit of the doubt. NVML does not
    # count copies as work; they are a cause of their own.
    idle_s = times.wall_s * (1 - device.utilization / 100) - (times.wall_s - steps_s) - measurement.copy_s
    inside_s = min(max(idle_s - gpu.idle_s / gpu.gaps * times.steps, 0.0), steps_s)
    yield measurement.share(inside_s), lambda: _sync_or_launch(measurement, device.utilization or 0.0, inside_s)


def _sync_or_launch(measurement: Measurement, utilization: float, inside_s: float) -> Finding:
    evidence = _per_step(inside_s, measurement.times) | {"gpu_utilization_percent": round(utilization, 1)}
    syncs = measurement.syncs
    if syncs is not None and syncs.count >= syncs.steps > 0:
        return Finding(
            "gpu_sync",
            measurement.share(inside_s),
            evidence | {"syncs_per_step": round(syncs.count / syncs.steps, 1), "where": syncs.where},
            f"The host waits for the GPU inside the step, at {syncs.where}, so the GPU waits for the host afterwards: "
            "leave out .item(), .cpu() and prints of tensors there, or do them every n steps.",
            predicted_speedup=speedup_without(measurement, inside_s),
        )
    return Finding(
        "launch_bound",
        measurement.share(inside_s),
        evidence,
        "The GPU finishes kernels faster than the host starts them: use larger batches, torch.compile "
        '(mode="reduce-overhead" uses CUDA graphs), and fused optimizers (fused=True).',
        predicted_speedup=speedup_without(measurement, inside_s),
    )


def _signal_broadcast(measurement: Measurement) -> Finding:
    seconds = measurement.times.signal_broadcast_s
    return Finding(
        "gpu_sync",
        measurement.share(seconds),
        _per_step(seconds, measurement.times) | {"where": "Lightning's _broadcast_sigterm_tensor"},
        "Before every step Lightning broadcasts whether a signal told it to stop, and waits for the answer. No setting "
        "switches it off; larger batches make it rarer.",
        predicted_speedup=speedup_without(measurement, seconds),
    )


def _gpu_throttled(measurement: Measurement) -> Iterator[_Candidate]:
    device = measurement.device
    if device is None or not device.throttled_percent or not device.sm_clock_mhz or not device.sm_clock_mhz_max:
        return
    share = min(max(1 - device.sm_clock_mhz / device.sm_clock_mhz_max, 0.0), device.throttled_percent / 100)
    evidence: dict[str, float | str] = {
        "throttled_percent": round(device.throttled_percent, 1),
        "sm_clock_mhz": round(device.sm_clock_mhz),
        "sm_clock_mhz_max": round(device.sm_clock_mhz_max),
    }
    advice = (
        "The GPU's clocks are reduced for heat or power: look at its cooling and power limit (nvidia-smi -q -d "
        "PERFORMANCE)."
    )
    yield share, lambda: Finding("gpu_throttled", share, evidence, advice)


def _straggler(measurement: Measurement) -> Iterator[_Candidate]:
    times, ranks = measurement.times, measurement.ranks
    if len(ranks) < 2:
        return
    candidates = [
        _slowest(ranks, "data", lambda rank: rank.data_wait_s),
        _slowest(ranks, "compute", lambda rank: rank.compute_s),
    ]
    kind, slowest, excess_s, others_s = max(candidates, key=lambda candidate: candidate[2])
    if kind == "data" and not _has_slower_loader(slowest, ranks):
        return
    share = measurement.share(excess_s * times.steps)
    yield (
        share,
        lambda: Finding(
            "straggler",
            share,
            {
                "rank": slowest.rank,
                "kind": kind,
                "ms_per_step": round((others_s + excess_s) * 1e3, 3),
                "ms_per_step_elsewhere": round(others_s * 1e3, 3),
            },
            f"Rank {slowest.rank} is slower than the others, and they wait for it: look at "
            + ("its data: the disk, the CPUs and the samples of that process." if kind == "data" else _SLOW_RANK),
            predicted_speedup=speedup_without(measurement, excess_s * times.steps),
        ),
    )


_SLOW_RANK: Final = "what else runs on its CPUs and GPU, and at work that only this rank does."


def _slowest(
    ranks: tuple[RankWork, ...], kind: str, seconds: Callable[[RankWork], float]
) -> tuple[str, RankWork, float, float]:
    """The slowest rank in one kind of work, by how much, and what the others need."""
    slowest = max(ranks, key=seconds)
    others_s = statistics.median(seconds(rank) for rank in ranks if rank is not slowest)
    return kind, slowest, seconds(slowest) - others_s, others_s


def _has_slower_loader(slowest: RankWork, ranks: tuple[RankWork, ...]) -> bool:
    others = [rank.loader_s for rank in ranks if rank is not slowest and rank.loader_s is not None]
    if slowest.loader_s is None or not others:
        return True
    return slowest.loader_s >= _SLOWER_LOADER * statistics.median(others)
