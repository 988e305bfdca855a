"""Why training waits: measurements in, findings out. Pure: no torch, no clock, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.diagnosis.report import Finding
from lightning_gpuopt.telemetry.host import HostActivity
from lightning_gpuopt.timeline.gpu_clock import GpuTimes
from lightning_gpuopt.timeline.loader import LoaderFacts
from lightning_gpuopt.timeline.phases import PhaseTimes

_HEADROOM: Final = 1.1
"""Workers are advised for a tenth more than the step needs, so that one slow batch does not stall it."""

_MOST_WORKERS: Final = 32
_MOST_WORKERS_PER_CPU: Final = 8

_BUSY: Final = 0.5
"""A worker that computes, or queues for a CPU, for at least this share of its time is busy; below it, it is blocked."""

_A_FREE_CPU: Final = 0.5
"""So much CPU has to be left over before another worker is worth starting."""


class StallError(RuntimeError):
    """A stall was found under ``StallDetector(on_stall="raise")``; the text names the cause and the cure."""


@dataclass(frozen=True)
class Measurement:
    """All that a diagnosis looks at.

    Attributes:
        times: the phases, without warm-up.
        loader: settings of the training loaders.
        host: what workers and CPUs did; None where that was not measured.
        gpu: what the GPU did; None without one.
    """

    times: PhaseTimes
    loader: LoaderFacts
    host: HostActivity | None = None
    gpu: GpuTimes | None = None


def diagnose(measurement: Measurement, threshold: float) -> list[Finding]:
    """Find every cause that takes at least ``threshold`` of the wall time.

    Args:
        measurement: what was measured.
        threshold: share of wall time, 0-1.

    Returns:
        The findings, largest share first.
    """
    times = measurement.times
    if times.wall_s <= 0 or not times.steps:
        return []
    findings = [finding for finding in _causes(measurement) if finding.share >= threshold]
    return sorted(findings, key=lambda finding: finding.share, reverse=True)


def verdict_of(findings: list[Finding]) -> str:
    """The cause of the largest finding, or ``"compute_bound"``."""
    return findings[0].cause if findings else "compute_bound"


def _causes(measurement: Measurement) -> Iterator[Finding]:
    times = measurement.times
    yield _data(measurement)
    yield from _callbacks(measurement)
    yield _logging(measurement)
    yield _validation(times)
    yield _checkpoint(times)
    if measurement.loader.num_workers and not measurement.loader.persistent_workers and times.epochs:
        yield _epoch_restart(times)


def _share(seconds: float, times: PhaseTimes) -> float:
    return min(max(seconds / times.wall_s, 0.0), 1.0)


def _exposed(measurement: Measurement) -> float:
    """Which part of the host's time between two steps the GPU really waited through, 0-1.

    A host that runs ahead of the GPU loads and logs while the GPU still works: that costs nothing.
    """
    gpu, times = measurement.gpu, measurement.times
    if gpu is None or not gpu.gaps:
        return 1.0
    host_s = times.phases["data_wait"] + times.phases["callbacks"] + times.phases["logging"]
    if host_s <= 0:
        return 1.0
    idle_s = gpu.idle_s / gpu.gaps * times.steps
    return min(idle_s / host_s, 1.0)


def _per_step(seconds: float, times: PhaseTimes) -> dict[str, float | str]:
    return {"ms_per_step": round(seconds / times.steps * 1e3, 3), "step_ms": round((times.step_s or 0.0) * 1e3, 3)}


def _gpu_evidence(measurement: Measurement) -> dict[str, float | str]:
    gpu = measurement.gpu
    if gpu is None or not gpu.gaps:
        return {}
    return {"gpu_idle_ms_per_step": round(gpu.idle_s / gpu.gaps * 1e3, 3)}


def _data(measurement: Measurement) -> Finding:
    times, loader, host = measurement.times, measurement.loader, measurement.host
    wait_s = times.phases["data_wait"]
    evidence = _per_step(wait_s, times) | _gpu_evidence(measurement)
    if loader.num_workers is not None:
        evidence["num_workers"] = loader.num_workers
    if host is not None:
        evidence["usable_cpus"] = round(host.usable_cpus, 2)
        if host.free_cpus is not None:
            evidence["free_cpus"] = round(host.free_cpus, 2)
        if host.worker_cpu is not None:
            evidence["worker_cpu_percent"] = round(host.worker_cpu * 100, 1)
        if host.worker_queued is not None:
            evidence["worker_queued_percent"] = round(host.worker_queued * 100, 1)
    share = _share(wait_s * _exposed(measurement), times)
    cause = _data_cause(loader, host)
    workers = _advised_workers(cause, measurement)
    settings = {"num_workers": workers} if workers is not None else {}
    if workers is not None and not loader.persistent_workers:
        settings["persistent_workers"] = True
    return Finding(cause, share, evidence, _data_advice(cause, loader, workers), settings)


def _data_cause(loader: LoaderFacts, host: HostActivity | None) -> str:
    if not loader.num_workers:
        return "main_process_loading"
    if host is None or host.worker_cpu is None:
        return "slow_transform"
    busy = host.worker_cpu + (host.worker_queued or 0.0) >= _BUSY
    starved = host.free_cpus is not None and host.free_cpus < _A_FREE_CPU
    if busy:
        return "cpu_saturated" if starved else "slow_transform"
    return "slow_storage"


def _advised_workers(cause: str, measurement: Measurement) -> int | None:
    """The number of workers that keeps up with the step, as far as the CPUs allow; None where more would not help."""
    times, loader, host = measurement.times, measurement.loader, measurement.host
    if cause == "cpu_saturated" or loader.num_workers is None:
        return None
    wait_s = times.phases["data_wait"] / times.steps
    consumer_s = max((times.step_s or 0.0) - wait_s, 1e-6)
    cpus = max(host.usable_cpus, 1.0) if host is not None else float(_MOST_WORKERS)
    if cause == "main_process_loading":
        return max(1, min(math.ceil(_HEADROOM * wait_s / consumer_s), math.ceil(cpus), _MOST_WORKERS))
    now = loader.num_workers
    need = math.ceil(_HEADROOM * now * (wait_s + consumer_s) / consumer_s)
    most = int(min(_MOST_WORKERS, _MOST_WORKERS_PER_CPU * cpus))
    if cause == "slow_transform" and host is not None and host.free_cpus is not None and host.worker_cpu:
        most = min(most, now + math.ceil(host.free_cpus / host.worker_cpu))
    return max(now + 1, min(need, most))


def _data_advice(cause: str, loader: LoaderFacts, workers: int | None) -> str:
    if cause == "main_process_loading":
        if workers is None:
            return "The loader works in the training process and is no DataLoader: let it prepare batches ahead."
        return f"The training process loads the data itself. Load in worker processes: num_workers={workers}."
    if cause == "cpu_saturated":
        return (
            "The workers use all the CPU there is: more of them would not help. Decode and transform less or cheaper, "
            "move transforms to the GPU, or store the data ready to use."
        )
    if cause == "slow_storage":
        return (
            f"The workers mostly wait for storage, not for the CPU. More of them read more at once: "
            f"num_workers={workers}. If that is not enough, move the data to a faster disk or into fewer, larger files."
        )
    return f"The workers compute all the time and CPUs are free: num_workers={workers}."


def _callbacks(measurement: Measurement) -> Iterator[Finding]:
    times = measurement.times
    hooks_of: dict[str, dict[str, float]] = {}
    for name, seconds in times.callbacks.items():
        callback, _, hook = name.rpartition(".")
        hooks_of.setdefault(callback, {})[hook] = seconds
    for callback, hooks in hooks_of.items():
        seconds = sum(hooks.values())
        slowest = max(hooks, key=lambda hook: hooks[hook])
        evidence = _per_step(seconds, times) | _gpu_evidence(measurement)
        yield Finding(
            "callback",
            _share(seconds * _exposed(measurement), times),
            evidence | {"callback": callback, "hook": slowest},
            f"{callback}.{slowest} holds up training: do its work less often, or in a thread.",
        )


def _logging(measurement: Measurement) -> Finding:
    times = measurement.times
    seconds = times.phases["logging"]
    return Finding(
        "logging",
        _share(seconds * _exposed(measurement), times),
        _per_step(seconds, times) | _gpu_evidence(measurement),
        "The logger's own calls hold up training: log less often with Trainer(log_every_n_steps=...), or let the "
        "logger write in the background.",
    )


def _validation(times: PhaseTimes) -> Finding:
    seconds = times.phases["validation"]
    return Finding(
        "validation",
        _share(seconds, times),
        {"validation_s": round(seconds, 3)},
        "Validation takes this share of the run: validate less often (check_val_every_n_epoch, val_check_interval), "
        "on fewer batches (limit_val_batches), or with more workers in the validation loader.",
    )


def _checkpoint(times: PhaseTimes) -> Finding:
    seconds = times.phases["checkpoint"]
    return Finding(
        "checkpoint",
        _share(seconds, times),
        {"checkpoint_s": round(seconds, 3)},
        "Saving checkpoints takes this share of the run: save less often (ModelCheckpoint(every_n_train_steps=...)), "
        "only the weights (save_weights_only=True), to a faster disk, or in the background (AsyncCheckpointIO).",
    )


def _epoch_restart(times: PhaseTimes) -> Finding:
    seconds = times.phases["epoch_setup"]
    return Finding(
        "epoch_restart",
        _share(seconds, times),
        {"epoch_setup_s_per_epoch": round(seconds / times.epochs, 3), "epochs": times.epochs},
        "The workers are started again for every epoch: keep them with persistent_workers=True.",
        {"persistent_workers": True},
    )
