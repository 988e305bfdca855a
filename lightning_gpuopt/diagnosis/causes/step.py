"""What holds a step up beside its data: hooks, loggers, the copy to the device, the inside of the step, clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_gpuopt.diagnosis.causes.common import (
    bound_to_one_cpu,
    finding_of,
    hook_name,
    host_evidence,
    memory_is_short,
    per_step,
    rounded,
)
from lightning_gpuopt.diagnosis.causes.table import CAUSES, MEASURING
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import speedup_without
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.diagnosis.waterfall import Waterfall, in_steps
from lightning_gpuopt.measurements.code_location import in_shares
from lightning_gpuopt.measurements.phases import SIGNAL_BROADCAST

_CAPPED: Final = 10.0  # percent of the time for which a power cap is worth a note

_OFTEN: Final = 0.5  # from so many retries of the allocator a step on the host waits for it
_FREE: Final = 0.2  # a single CPU with less than this left is full


def callbacks(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Each callback, and each module or data module by its hooks."""
    hooks_of: dict[str, dict[str, float]] = {}
    for name, seconds in measurement.waterfall.waits.items():
        callback, _, hook = name.rpartition(".")
        if callback:
            hooks_of.setdefault(callback, {})[hook] = seconds
    for callback, hooks in hooks_of.items():
        if measurement.waterfall.share(sum(hooks.values())) >= threshold:
            yield _callback(measurement, callback, hooks)


def _callback(measurement: Measurement, callback: str, hooks: dict[str, float]) -> Finding:
    waterfall = measurement.waterfall
    slowest = max(hooks, key=lambda hook: hooks[hook])
    every_step_s = sum(seconds for hook, seconds in hooks.items() if in_steps(f"{callback}.{hook}"))
    all_s = sum(hooks.values())
    where: dict[str, float | str] = {"callback": callback, "hook": slowest}
    if every_step_s >= all_s / 2:
        evidence = per_step(all_s, measurement) | where
        own = measurement.times.callbacks | measurement.times.batch_hooks
        host_s = sum(s for name, s in own.items() if name.rpartition(".")[0] == callback)
        prediction = speedup_without(measurement, every_step_s, host_s)
    else:
        evidence = where | {"hooks_s": round(all_s, 3)}
        prediction = None
    row = CAUSES["callback"]
    if callback == "NumWorkersFinder":
        advice = row.cases["finder"]
    elif callback in MEASURING:
        advice = row.cases["measuring"]
    else:
        advice = row.cases["batch_transfer"] if slowest.endswith("_batch_transfer") else row.advice
    advice = advice.format(callback=callback, hook=slowest)
    return Finding("callback", waterfall.share(all_s), evidence, advice, predicted_speedup=prediction)


def logging(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Calls of the loggers, and metrics that are reduced over the ranks in each step."""
    waterfall, metrics, sync_s = measurement.waterfall, measurement.metrics, measurement.metric_sync_s
    seconds = waterfall.wait("logging")
    if not waterfall.on_gpu:  # some of it may be the wait for a slower rank
        seconds = max(seconds - metrics.seconds, 0.0) + sync_s
    if waterfall.share(seconds) >= threshold:
        yield Finding(
            "logging",
            waterfall.share(seconds),
            per_step(seconds, measurement) | _reduced(measurement, sync_s),
            CAUSES["logging"].cases["metrics"] if 2 * sync_s >= seconds else CAUSES["logging"].advice,
            predicted_speedup=speedup_without(measurement, seconds, measurement.times.phases["logging"]),
        )


def _reduced(measurement: Measurement, seconds: float) -> dict[str, float | str]:
    metrics, steps = measurement.metrics, measurement.waterfall.steps
    if not seconds:
        return {}
    named = {"metric": ", ".join(metrics.names)} if metrics.names else {}
    return {
        **named,
        "sync_ms_per_step": round(seconds / steps * 1e3, 3),
        "syncs_per_step": round(metrics.calls / steps, 2),
    }


def between_steps(measurement: Measurement, threshold: float, restarts: float) -> Iterator[Finding]:
    """Validation by its wall time less ``restarts``, the share that is a finding of its own, and checkpoints."""
    waterfall = measurement.waterfall
    checkpoint_s = waterfall.wait("checkpoint")
    validation = waterfall.share(waterfall.validation_s) - restarts
    if validation >= threshold:
        yield _validation(measurement, validation, restarted=restarts > 0)
    if waterfall.share(checkpoint_s) >= threshold:
        yield _checkpoint(measurement, checkpoint_s)


def _validation(measurement: Measurement, share: float, *, restarted: bool) -> Finding:
    setup_s = measurement.times.validation_setup_s
    evidence: dict[str, float | str] = {"validation_s": round(measurement.waterfall.validation_s, 3)}
    advice = CAUSES["validation"].advice
    if setup_s:
        evidence["validation_setup_s"] = round(setup_s, 3)
    if setup_s > measurement.times.phases["validation"] / 2 and not restarted:
        advice = CAUSES["validation"].cases["set_up"] + advice
    return Finding("validation", share, evidence, advice)


def _checkpoint(measurement: Measurement, seconds: float) -> Finding:
    evidence: dict[str, float | str] = {"checkpoint_s": round(seconds, 3)}
    row = CAUSES["checkpoint"]
    advice = row.advice + row.cases["background" if measurement.async_saves_copy else "upgrade"]
    if measurement.hyperparameters:
        evidence["hyperparameters"] = ", ".join(measurement.hyperparameters)
        advice = f"{hyperparameters_note(measurement.hyperparameters)} {advice}"
    return Finding("checkpoint", measurement.waterfall.share(seconds), evidence, advice)


def hyperparameters_note(kept: Sequence[str]) -> str:
    """What to do about data that ``save_hyperparameters`` has taken in, each as ``"dataset (Photos)"``."""
    names = ", ".join(repr(each.partition(" ")[0]) for each in kept)
    return (
        f"save_hyperparameters() keeps {', '.join(kept)}: it is copied when the module is created, and written with "
        f"every checkpoint. Exclude it: save_hyperparameters(ignore=[{names}])."
    )


def host_to_device(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    waterfall, pinned, ahead = measurement.waterfall, measurement.loader.pin_memory, measurement.ahead
    seconds = waterfall.wait("transfer")
    if waterfall.share(seconds) < threshold:
        return
    gained_s, cases = seconds, CAUSES["host_to_device"].cases
    settings: dict[str, Any] = {}
    evidence: dict[str, float | str] = {}
    if not waterfall.on_gpu:  # moving a batch to where it is already costs the walk through it
        advice = cases["no_gpu"]
    else:
        evidence["pin_memory"] = str(bool(pinned))
        advice = CAUSES["host_to_device"].advice
        with_workers = " (num_workers=1 or more)" if measurement.loader.num_workers == 0 else ""
        if ahead.copies:
            work_s = max((waterfall.step_s or 0.0) - seconds / max(waterfall.steps, 1), 0.0)
            too_long = ahead.copy_s / ahead.copies >= work_s
            advice = cases["ahead"] + cases["ahead_too_long" if too_long else "ahead_too_late"]
            evidence["copy_ms"] = round(ahead.copy_s / ahead.copies * 1e3, 3)
            evidence["exposed_copy_ms"] = round(ahead.exposed_s / ahead.copies * 1e3, 3)
        elif pinned:
            advice += cases["pinned"].format(with_workers=with_workers)
            # A copy can be hidden behind the rest of the step, no more: (S + C) / max(S, C).
            gained_s = max(min(seconds, (waterfall.step_s or 0.0) * waterfall.steps - seconds), 0.0)
        else:
            advice += cases["not_pinned"].format(with_workers=with_workers)
            settings = {"pin_memory": True} if pinned is not None else {}
    yield Finding(
        "host_to_device",
        waterfall.share(seconds),
        per_step(seconds, measurement) | evidence,
        advice,
        settings,
        speedup_without(measurement, gained_s),
    )


def copies_ahead_note(measurement: Measurement) -> str | None:
    ahead = measurement.ahead
    if not ahead.copies or not measurement.waterfall.on_gpu:
        return None
    copy_ms, exposed_ms = (seconds / ahead.copies * 1e3 for seconds in (ahead.copy_s, ahead.exposed_s))
    return f"CudaPrefetcher: the copy took {copy_ms:.1f} ms a step, {exposed_ms:.1f} ms of it exposed."


def inside_the_step(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """The GPU's idle time inside the steps: the host waited for it, or is too slow. Nothing while a look is to come."""
    waterfall = measurement.waterfall
    if not waterfall.on_gpu or measurement.look_pending:
        return
    if waterfall.share(waterfall.launch_s) >= threshold:
        if _retries_a_step(measurement) >= _OFTEN:
            yield _waits_for_memory(measurement, waterfall)
        elif _one_full_cpu(measurement):
            yield _one_cpu(measurement, waterfall)
        else:
            yield _launch_bound(measurement, waterfall)
    if waterfall.share(waterfall.sync_s) >= threshold:
        yield _gpu_sync(measurement, waterfall)
    if waterfall.share(waterfall.copies_s) >= threshold:
        yield _device_copies(measurement, waterfall)


def _retries_a_step(measurement: Measurement) -> float:
    """Times a step that torch's allocator ran out of memory and freed some, which waits for the GPU."""
    records = [record for record in measurement.history if "alloc_retries" in record.held]
    if len(records) < 2:
        return 0.0
    first, last = records[0], records[-1]
    return (last.held["alloc_retries"] - first.held["alloc_retries"]) / (last.end_step - first.end_step)


def _one_full_cpu(measurement: Measurement) -> bool:
    """Whether the process may use only one of the machine's CPUs, and that one is never idle."""
    host = measurement.host
    return host is not None and host.affinity == 1 and host.free_cpus is not None and host.free_cpus < _FREE


def _waits_for_memory(measurement: Measurement, waterfall: Waterfall) -> Finding:
    evidence = _inside_evidence(waterfall.launch_s, measurement)
    evidence["alloc_retries_per_step"] = round(_retries_a_step(measurement), 2)
    evidence["where"] = "torch's allocator of GPU memory"
    return finding_of("gpu_sync", waterfall.launch_s, measurement, evidence, CAUSES["gpu_sync"].cases["memory"])


def _one_cpu(measurement: Measurement, waterfall: Waterfall) -> Finding:
    evidence = _inside_evidence(waterfall.launch_s, measurement) | rounded(host_evidence(measurement))
    advice = " ".join([CAUSES["cpu_saturated"].cases["step"], *bound_to_one_cpu(measurement)])
    return finding_of("cpu_saturated", waterfall.launch_s, measurement, evidence, advice)


def _inside_evidence(seconds: float, measurement: Measurement) -> dict[str, float | str]:
    evidence = per_step(seconds, measurement)
    device, look = measurement.device, measurement.look
    if device is not None and device.utilization is not None:
        evidence["gpu_utilization_percent"] = round(device.utilization, 1)
    if look is not None:
        evidence["busy_ms_per_step"] = round(look.busy_s * 1e3, 3)
    return evidence


def _launch_bound(measurement: Measurement, waterfall: Waterfall) -> Finding:
    advice = [CAUSES["launch_bound"].advice]
    evidence = _inside_evidence(waterfall.launch_s, measurement)
    if memory_is_short(measurement):
        evidence |= rounded(host_evidence(measurement))
        advice.append(CAUSES["launch_bound"].cases["memory"])
    if bound_to_one_cpu(measurement):
        evidence["cpu_affinity"] = 1
    advice += bound_to_one_cpu(measurement)
    return finding_of("launch_bound", waterfall.launch_s, measurement, evidence, " ".join(advice))


def _gpu_sync(measurement: Measurement, waterfall: Waterfall) -> Finding:
    syncs = measurement.syncs
    evidence = _inside_evidence(waterfall.sync_s, measurement)
    where = "a call in the step"
    if syncs is not None and syncs.steps:
        evidence["syncs_per_step"] = round(syncs.count / syncs.steps, 1)
        if syncs.places:
            where = syncs.places[0][0]
            evidence["where"] = in_shares(syncs.places, syncs.count)
    advice = CAUSES["gpu_sync"].advice.format(where=where)
    return finding_of("gpu_sync", waterfall.sync_s, measurement, evidence, advice)


def _device_copies(measurement: Measurement, waterfall: Waterfall) -> Finding:
    seconds, cases = waterfall.copies_s, CAUSES["device_copies"].cases
    evidence, advice = _inside_evidence(seconds, measurement), CAUSES["device_copies"].advice
    copies = measurement.look.copies if measurement.look is not None else None
    direction = copies.direction if copies is not None else "host to device"
    if copies is not None:
        evidence["direction"] = direction
        evidence["copies_ms_per_step"] = round(copies.seconds * 1e3, 3)
        if copies.bytes is not None:
            evidence["bytes_per_step"] = round(copies.bytes)
            evidence["gb_per_s"] = round(copies.bytes / copies.seconds / 1e9, 2)
        advice = {"both": cases["both"], "device to host": cases["to_host"]}.get(direction, advice)
        advice += cases["pageable"] if copies.pageable else ""
    words = direction.replace("host", "the host").replace("device", "the device")
    # a copy can be hidden behind the rest of the step, no more
    rest_s = max((waterfall.step_s or 0.0) * waterfall.steps - seconds, 0.0)
    finding = finding_of("device_copies", min(seconds, rest_s), measurement, evidence, advice.format(direction=words))
    return replace(finding, share=waterfall.share(seconds))


def signal_broadcast(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Lightning's broadcast before each step; on a GPU nothing, since there only the idle time after it counts."""
    waterfall = measurement.waterfall
    seconds = waterfall.wait(SIGNAL_BROADCAST)
    if not waterfall.on_gpu and waterfall.share(seconds) >= threshold:
        evidence = per_step(seconds, measurement) | {"where": hook_name(SIGNAL_BROADCAST)}
        yield finding_of("gpu_sync", seconds, measurement, evidence, CAUSES["gpu_sync"].cases["broadcast"])


def gpu_throttled(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Clocks that are reduced for heat or by the hardware, against the highest that the device has."""
    device = measurement.device
    if device is None or not device.throttled_percent or not device.sm_clock_mhz or not device.sm_clock_mhz_max:
        return
    share = min(max(1 - device.sm_clock_mhz / device.sm_clock_mhz_max, 0.0), device.throttled_percent / 100)
    if share < threshold:
        return
    evidence: dict[str, float | str] = {
        "throttled_percent": round(device.throttled_percent, 1),
        "sm_clock_mhz": round(device.sm_clock_mhz),
        "sm_clock_mhz_max": round(device.sm_clock_mhz_max),
    }
    yield Finding("gpu_throttled", share, evidence, CAUSES["gpu_throttled"].advice)


def power_cap_note(measurement: Measurement) -> str | None:
    """That the GPU stays within its power limit, which is normal for one that works hard."""
    device = measurement.device
    if device is None or (device.power_capped_percent or 0.0) < _CAPPED:
        return None
    clocks = ""
    if device.sm_clock_mhz and device.sm_clock_mhz_max:
        clocks = f" (mean clock {device.sm_clock_mhz:.0f} of {device.sm_clock_mhz_max:.0f} MHz)"
    return (
        f"For {device.power_capped_percent:.0f} % of the time the GPU lowered its clocks to stay within its power "
        f"limit{clocks}: normal for a busy GPU."
    )
