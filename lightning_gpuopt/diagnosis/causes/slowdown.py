"""The finding of a run that gets slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.growth import Growth
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import speedup_without
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.phases import GARBAGE_COLLECTION, GPU_WORK

_MEMORY_MIB: Final = 64.0
_FILES: Final = 16
_THREADS: Final = 4  # growth of what the process holds that is worth a word
_CLOCK: Final = 0.95

_LOOK_AT: Final = {  # by the part that grows
    "data_wait": "Look for a dataset that keeps what it reads, worker memory that is copied little by little (Python "
    "lists in the dataset: use arrays), and storage that others use.",
    "logging": "Check what the logger keeps: flush it, log less often, or log in the background.",
    GARBAGE_COLLECTION: "More and more Python objects are alive: look for lists, dicts and tensors that are never "
    "dropped.",
    GPU_WORK: "Look for longer sequences, graphs that are kept (retain_graph), and work added in each epoch.",
}


def slowdown(measurement: Measurement, growth: Growth, threshold: float) -> Iterator[Finding]:
    share = measurement.waterfall.share(growth.lost_s)
    if share < threshold:
        return
    evidence: dict[str, float | str] = {
        "from_ms": round(growth.from_s * 1e3, 3),
        "to_ms": round(growth.to_s * 1e3, 3),
        "since_step": growth.since_step,
        "phase": growth.part,
        "phase_from_ms": round(growth.part_from_s * 1e3, 3),
        "phase_to_ms": round(growth.part_to_s * 1e3, 3),
    }
    evidence |= _held(growth)
    if measurement.grows:
        evidence["grows"] = measurement.grows
    part = "the GPU's own work" if growth.part == GPU_WORK else growth.part
    begun = CAUSES["slowdown"].advice.format(
        from_ms=growth.from_s * 1e3, to_ms=growth.to_s * 1e3, since=f"{growth.since_step:,}", part=part
    )
    advice = " ".join(each for each in (begun, *_remedies(measurement, growth, evidence)) if each)
    yield Finding("slowdown", share, evidence, advice, predicted_speedup=speedup_without(measurement, growth.lost_s))


def _held(growth: Growth) -> dict[str, float | str]:
    """What the process and the GPU hold more of than at the beginning."""
    found: dict[str, float | str] = {}
    for name, least in (
        ("rss_mib", _MEMORY_MIB),
        ("open_files", _FILES),
        ("threads", _THREADS),
        ("gpu_allocated_mib", _MEMORY_MIB),
        ("gpu_reserved_mib", _MEMORY_MIB),
        ("alloc_retries", 1),
    ):
        before, now = growth.first.held.get(name), growth.last.held.get(name)
        if before is not None and now is not None and now - before >= least:
            found[f"{name}_grown"] = round(now - before, 1)
    before, now = growth.first.held.get("sm_clock_mhz"), growth.last.held.get("sm_clock_mhz")
    if before and now and now <= _CLOCK * before:
        found |= {"sm_clock_from_mhz": round(before), "sm_clock_to_mhz": round(now)}
    return found


def _remedies(measurement: Measurement, growth: Growth, evidence: Mapping[str, float | str]) -> Iterator[str]:
    if measurement.grows:
        yield f"{measurement.grows}."
        if "autograd graphs" in measurement.grows:
            yield "Keep loss.detach(), or a number every n steps, instead of the tensor with its graph."
        else:
            yield "Keep less of it, or empty it at the end of an epoch."
    if "alloc_retries_grown" in evidence:
        yield (
            "torch's allocator frees and requests GPU memory repeatedly, which waits for the GPU: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use a smaller batch."
        )
    if "sm_clock_to_mhz" in evidence:
        yield "The GPU's clock fell meanwhile: check its temperature and power limit."
    if not measurement.grows:
        of_a_hook = f"Look for what {growth.part} iterates over or keeps, and what grows from step to step."
        of_the_rest = "Look for a growing list, hook or graph that the step goes through."
        yield _LOOK_AT.get(growth.part, of_a_hook if "." in growth.part else of_the_rest)
