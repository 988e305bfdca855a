"""Why a pipeline that decodes by itself is late: files, its CPU threads, or the GPU's decoder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from lightning_gpuopt.diagnosis.causes.common import at_most, exposed_by, host_evidence, memory_is_short, rounded
from lightning_gpuopt.diagnosis.causes.loader import cpu_cause, kind_evidence, wait_evidence
from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import pipeline_model, speedup_of_threads
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.measurements.loader_model import HEADROOM_LEFT
from lightning_gpuopt.measurements.loading import Pipelines

STORAGE: Final = "storage"
CPU_THREADS: Final = "CPU threads"
DECODE_ENGINE: Final = "decode engine"

# CPU threads that compute for less than this share of the time are not what a pipeline on the GPU waits for
_BUSY: Final = 0.6
_BUSY_WITHOUT_CPUS: Final = 0.25  # the same if no CPU is free: threads that queue for one compute less
_COMPUTES: Final = 0.5  # threads that read and whose time is CPU time for less than this share are blocked on storage
# files that are waited for longer than this share of the wait for the pipeline would soon hold up more threads
_ALONE: Final = 0.2


def pipeline_findings(measurement: Measurement, threshold: float) -> Iterator[Finding]:
    """Name what late pipelines wait for; it has no settings, since those are a DataLoader's arguments."""
    share = measurement.waterfall.share(measurement.waterfall.wait("data_wait"))
    if share < threshold:
        return
    bottleneck = bottleneck_of(measurement)
    cause = {STORAGE: "slow_storage", DECODE_ENGINE: "slow_transform"}.get(bottleneck) or cpu_cause(measurement)
    threads = _threads_needed(measurement) if bottleneck == CPU_THREADS and cause == "slow_transform" else None
    parts = [_remedy(bottleneck, cause, measurement, threads), *at_most(measurement)]
    yield Finding(
        cause,
        share,
        {"bottleneck": bottleneck, **_evidence(measurement), **kind_evidence(measurement)},
        " ".join(parts),
        predicted_speedup=_prediction(measurement, threads),
    )


def bottleneck_of(measurement: Measurement) -> str:
    """What late pipelines wait for; ``late_pipelines`` is set."""
    pipelines = _late(measurement)
    busy, lacks_cpus = _threads_busy(measurement), cpu_cause(measurement) != "slow_transform"
    if _waits_for_files(pipelines):
        # threads that queue for a CPU look blocked
        is_blocked = pipelines.times.read_cpu_s < _COMPUTES * pipelines.times.read_wall_s
        return STORAGE if is_blocked and not (lacks_cpus and busy >= _BUSY) else CPU_THREADS
    if not pipelines.on_gpu or busy >= (_BUSY_WITHOUT_CPUS if lacks_cpus else _BUSY):
        return CPU_THREADS
    return DECODE_ENGINE


def _late(measurement: Measurement) -> Pipelines:
    pipelines = measurement.late_pipelines
    assert pipelines is not None
    return pipelines


def _waits_for_files(pipelines: Pipelines) -> bool:
    return pipelines.times.read_wait_s > pipelines.times.wait_s


def _threads_busy(measurement: Measurement) -> float:
    """Share of their time that the pipelines' CPU threads compute, 0-1; there is no work for them in validation."""
    pipelines, times = _late(measurement), measurement.times
    seconds = times.wall_s - times.phases["validation"] - times.phases["checkpoint"]
    return min(pipelines.times.decode_cpu_s / max(pipelines.num_threads * seconds, 1e-9), 1.0)


def _threads_needed(measurement: Measurement) -> int | None:
    """CPU threads for one pipeline, as far as CPUs are free; None if more would not help, or not measured."""
    pipelines, host, model = _late(measurement), measurement.host, pipeline_model(measurement)
    if model is None or host is None or host.free_cpus is None or _waits_for_files(pipelines):
        return None
    now, now_s = pipelines.num_threads, measurement.waterfall.step_s
    most = min(now + max(int(host.free_cpus), 1), math.ceil(host.usable_cpus))
    if pipelines.batch_size is not None:  # an image is one thread's
        most = min(most, pipelines.batch_size)
    if most <= now or now_s is None:
        return None
    threads = max(now + 1, model.workers_needed(most))
    return threads if now_s >= (1 + HEADROOM_LEFT) * model.step_s(threads)[1] else None


def _prediction(measurement: Measurement, threads: int | None) -> Interval | None:
    """The speed-up with so many CPU threads; None if something else may hold the pipeline up."""
    pipelines = _late(measurement)
    if threads is None or pipelines.on_gpu:  # the GPU's decoder may be the next bottleneck
        return None
    files_wait = pipelines.times.read_wait_s > _ALONE * pipelines.times.wait_s
    return None if files_wait or _threads_busy(measurement) < _BUSY else speedup_of_threads(measurement, threads)


def _evidence(measurement: Measurement) -> dict[str, float | str]:
    pipelines = _late(measurement)
    times = pipelines.times
    found: dict[str, float | None] = {
        "num_threads": pipelines.num_threads,
        "threads_busy_percent": _threads_busy(measurement) * 100,
    }
    for name, seconds in (
        ("pipeline_wait", times.wait_s),
        ("decode_cpu", times.decode_cpu_s),
        ("read_wait", times.read_wait_s),
        ("read", times.read_wall_s),
        ("read_cpu", times.read_cpu_s),
    ):
        found[f"{name}_ms_per_batch"] = seconds / times.batches * 1e3
    return rounded(wait_evidence(measurement) | found | host_evidence(measurement)) | exposed_by(measurement.waterfall)


_BUILD: Final = "lightning-gpuopt lmdb build SRC DST"
_SMALLER: Final = f"Build an LMDB of smaller images ({_BUILD} --image-size N), which DALIDataModule(DST) reads too"


def _remedy(bottleneck: str, cause: str, measurement: Measurement, threads: int | None) -> str:
    pipelines, cases = _late(measurement), CAUSES[cause].cases
    if bottleneck == STORAGE:
        return cases["pipeline_memory" if memory_is_short(measurement) else "pipeline"].format(build=_BUILD)
    if bottleneck == DECODE_ENGINE:
        return cases["decode_engine"].format(busy=_threads_busy(measurement), smaller=_SMALLER)
    if _waits_for_files(pipelines) and cause == "slow_transform":
        return cases["pipeline_files"].format(build=_BUILD)
    gpu = _on_the_gpu(measurement)
    gpu = f"; or {gpu}" if gpu else ""
    if threads is not None:
        return cases["pipeline_threads"].format(threads=threads, gpu=gpu)
    more = "CPUs are free: raise num_threads. " if pipelines.loaders > 1 else ""
    return cases["pipeline"].format(more=more, smaller=_SMALLER, gpu=gpu)


def _on_the_gpu(measurement: Measurement) -> str:
    """How to let the GPU do what the CPU does; empty if there is none, or nothing is known to help."""
    if measurement.gpu is None:
        return ""
    if _late(measurement).on_gpu:
        return "raise hw_decoder_load: the hardware decoder takes no CPU"
    return 'let the GPU decode (device="gpu")'
