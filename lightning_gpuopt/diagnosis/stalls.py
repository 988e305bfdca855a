"""Why training waits: measurements in, findings out. Pure: no torch, no clock, no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Final

from lightning_gpuopt.diagnosis.data import data_finding
from lightning_gpuopt.diagnosis.measurement import Measurement, RankWork
from lightning_gpuopt.diagnosis.predict import speedup_without
from lightning_gpuopt.diagnosis.report import Finding
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
    if measurement.times.wall_s <= 0 or not measurement.times.steps:
        return []
    findings = [finding for finding in _causes(measurement) if finding.share >= threshold]
    return sorted(findings, key=lambda finding: finding.share, reverse=True)


def verdict_of(findings: list[Finding]) -> str:
    """The cause of the largest finding, or ``"compute_bound"``."""
    return findings[0].cause if findings else "compute_bound"


def _causes(measurement: Measurement) -> Iterator[Finding]:
    yield data_finding(measurement)
    yield from _callbacks(measurement)
    yield _logging(measurement)
    yield _validation(measurement)
    yield _checkpoint(measurement)
    yield from _epoch_restart(measurement)
    yield from _host_to_device(measurement)
    yield from _inside_the_step(measurement)
    yield from _gpu_throttled(measurement)
    straggler = list(_straggler(measurement))
    yield from straggler
    if not straggler:  # else the wait in the broadcast is the wait for that rank
        yield _signal_broadcast(measurement)


def _per_step(seconds: float, times: PhaseTimes) -> dict[str, float | str]:
    return {"ms_per_step": round(seconds / times.steps * 1e3, 3), "step_ms": round((times.step_s or 0.0) * 1e3, 3)}


def _between_steps(measurement: Measurement, seconds: float) -> tuple[float, dict[str, float | str]]:
    """Share and evidence of something that the host does between two steps."""
    evidence = _per_step(seconds, measurement.times)
    if measurement.gpu is not None and measurement.gpu.gaps:
        evidence["gpu_idle_ms_per_step"] = round(measurement.gpu.idle_s / measurement.gpu.gaps * 1e3, 3)
    return measurement.share(seconds * measurement.exposed), evidence


def _callbacks(measurement: Measurement) -> Iterator[Finding]:
    hooks_of: dict[str, dict[str, float]] = {}
    for name, seconds in measurement.times.callbacks.items():
        callback, _, hook = name.rpartition(".")
        hooks_of.setdefault(callback, {})[hook] = seconds
    for callback, hooks in hooks_of.items():
        seconds = sum(hooks.values())
        slowest = max(hooks, key=lambda hook: hooks[hook])
        share, evidence = _between_steps(measurement, seconds)
        yield Finding(
            "callback",
            share,
            evidence | {"callback": callback, "hook": slowest},
            f"{callback}.{slowest} holds up training: do its work less often, or in a thread.",
            predicted_speedup=speedup_without(measurement, seconds * measurement.exposed),
        )


def _logging(measurement: Measurement) -> Finding:
    seconds = measurement.times.phases["logging"]
    share, evidence = _between_steps(measurement, seconds)
    return Finding(
        "logging",
        share,
        evidence,
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


def _epoch_restart(measurement: Measurement) -> Iterator[Finding]:
    times, loader = measurement.times, measurement.loader
    if not loader.num_workers or loader.persistent_workers or not times.epochs:
        return
    seconds = times.phases["epoch_setup"]
    yield Finding(
        "epoch_restart",
        measurement.share(seconds),
        {"epoch_setup_s_per_epoch": round(seconds / times.epochs, 3), "epochs": times.epochs},
        "The workers are started again for every epoch: keep them with persistent_workers=True.",
        {"persistent_workers": True},
    )


def _host_to_device(measurement: Measurement) -> Iterator[Finding]:
    gpu, times, loader = measurement.gpu, measurement.times, measurement.loader
    if gpu is None:  # moving a batch to where it is already costs the walk through it
        yield Finding(
            "host_to_device",
            measurement.share(times.phases["transfer"]),
            _per_step(times.phases["transfer"], times),
            "Walking through the batch to move it takes long: make batches of few large tensors, not of many objects.",
            predicted_speedup=speedup_without(measurement, times.phases["transfer"]),
        )
        return
    if not gpu.steps:
        return
    seconds = gpu.copy_s / gpu.steps * times.steps
    pinned = loader.pin_memory
    yield Finding(
        "host_to_device",
        measurement.share(seconds),
        {**_per_step(seconds, times), "pin_memory": str(bool(pinned))},
        "The GPU does nothing else while batches are copied to it: "
        + ("send smaller types (uint8, and normalise on the GPU)." if pinned else "copy from page-locked memory."),
        {} if pinned or pinned is None else {"pin_memory": True},
        speedup_without(measurement, seconds),
    )


def _inside_the_step(measurement: Measurement) -> Iterator[Finding]:
    """The GPU's idle time that does not lie between two steps, by what the host did in it."""
    gpu, device, times = measurement.gpu, measurement.device, measurement.times
    if gpu is None or not gpu.gaps or device is None or device.utilization is None:
        return
    steps_s = (times.step_s or 0.0) * times.steps
    aside_s = times.wall_s - steps_s
    # What lies between the steps (validation, checkpoints) is taken as busy: the benefit of the doubt.
    idle_s = times.wall_s * (1 - device.utilization / 100)
    between_s = gpu.idle_s / gpu.gaps * times.steps
    inside_s = min(max(idle_s - between_s - aside_s, 0.0), steps_s)
    evidence = _per_step(inside_s, times) | {"gpu_utilization_percent": round(device.utilization, 1)}
    syncs = measurement.syncs
    if syncs is not None and syncs.count >= syncs.steps > 0:
        yield Finding(
            "gpu_sync",
            measurement.share(inside_s),
            evidence | {"syncs_per_step": round(syncs.count / syncs.steps, 1), "where": syncs.where},
            f"The host waits for the GPU inside the step, at {syncs.where}, so the GPU waits for the host afterwards: "
            "leave out .item(), .cpu() and prints of tensors there, or do them every n steps.",
            predicted_speedup=speedup_without(measurement, inside_s),
        )
        return
    yield Finding(
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


def _gpu_throttled(measurement: Measurement) -> Iterator[Finding]:
    device = measurement.device
    if device is None or not device.throttled_percent or not device.sm_clock_mhz or not device.sm_clock_mhz_max:
        return
    slower = max(1 - device.sm_clock_mhz / device.sm_clock_mhz_max, 0.0)
    yield Finding(
        "gpu_throttled",
        min(slower, device.throttled_percent / 100),
        {
            "throttled_percent": round(device.throttled_percent, 1),
            "sm_clock_mhz": round(device.sm_clock_mhz),
            "sm_clock_mhz_max": round(device.sm_clock_mhz_max),
        },
        "The GPU's clocks are reduced for heat or power: look at its cooling and power limit (nvidia-smi -q -d "
        "PERFORMANCE).",
    )


def _straggler(measurement: Measurement) -> Iterator[Finding]:
    times, ranks = measurement.times, measurement.ranks
    if len(ranks) < 2 or times.step_s is None:
        return
    candidates = [
        _slowest(ranks, "data", lambda rank: rank.data_wait_s),
        _slowest(ranks, "compute", lambda rank: rank.compute_s),
    ]
    kind, slowest, excess_s, others_s = max(candidates, key=lambda candidate: candidate[2])
    if kind == "data" and not _has_slower_loader(slowest, ranks):
        return
    share = measurement.share(excess_s * times.steps)
    yield Finding(
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
