"""What several sources say of the GPU's idle time, where they disagree and why that may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.waterfall import covers

_APART: Final = 0.1  # shares of idle time that differ by more are worth a note


def idle_shares(measurement: Measurement) -> dict[str, float]:
    """Share of idle time, 0-1, by source; a source that says nothing is absent.

    ``"events"``: what CUDA events between the steps show, the least. ``"host"``: with all of the time in which the host
    issued a step, the most. ``"records"``: with what a look inside steps saw. ``"nvml"``: without NVML's utilization.
    """
    waterfall, gpu, device = measurement.waterfall, measurement.gpu, measurement.device
    if gpu is None or not waterfall.on_gpu or waterfall.wall_s <= 0:
        return {}
    outside_s = sum(waterfall.waits.values())
    shares = {
        "events": waterfall.share(outside_s),
        "host": waterfall.share(outside_s + min(gpu.compute_bound_s, gpu.compute_s)),
    }
    if measurement.look is not None and not measurement.look_pending:
        shares["records"] = waterfall.share(outside_s + waterfall.inside_s)
    if device is not None and device.utilization is not None and covers(device, waterfall.wall_s):
        shares["nvml"] = 1 - device.utilization / 100
    return shares


def disagreement(shares: dict[str, float]) -> float:
    """By how much NVML's share lies outside of what the others allow, signed; see :func:`idle_shares`."""
    if "nvml" not in shares:
        return 0.0
    least = shares.get("records", shares["events"])
    most = shares.get("records", shares["host"])
    return min(shares["nvml"] - least, 0.0) or max(shares["nvml"] - max(most, least), 0.0)


def witness_note(measurement: Measurement) -> str | None:
    """Explain why NVML and the GPU's own clock disagree; None if they agree."""
    shares = idle_shares(measurement)
    apart = disagreement(shares)
    if abs(apart) <= _APART:
        return None
    own = shares.get("records", shares["events"] if apart < 0 else shares["host"])
    source = "torch.profiler's records and CUDA events" if "records" in shares else "CUDA events"
    reasons = " or ".join(_reasons(measurement, apart))
    return (
        f"NVML has the GPU idle for {shares['nvml']:.0%} of the time, {source} for {own:.0%}: {reasons}. This report "
        "uses the latter."
    )


def _reasons(measurement: Measurement, apart: float) -> Iterator[str]:
    neighbours = measurement.device.neighbours if measurement.device is not None else ()
    if apart < 0:
        if neighbours:
            yield f"another process computes on it, which NVML counts: {', '.join(neighbours)}"
            return
        yield "NVML counts work on other streams, and of other processes (MPS)"
        yield "gaps between kernels are too short for its samples"
    else:
        yield "copies, which NVML does not count as work"
        if "records" not in idle_shares(measurement):
            yield "gaps inside the steps, which were not profiled"
        yield "its samples are too few for this run"
