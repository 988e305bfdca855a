"""How far a finding can be relied on: agreement of the sources, length of the run, noise."""

from __future__ import annotations

import math
from typing import Final, Literal

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.witnesses import disagreement, idle_shares

Confidence = Literal["high", "medium", "low"]

_LEVELS: Final[tuple[Confidence, ...]] = ("high", "medium", "low")
_INSIDE: Final = ("gpu_sync", "launch_bound", "device_copies")
_APART: Final = 0.1
_SHORT_S: Final = 5.0
_FEW_STEPS: Final = 30
_VERY_FEW_STEPS: Final = 10
_NOISY: Final = 0.15  # standard error of a step's mean time by windows, as a share of it


def confidence_of(cause: str, share: float, measurement: Measurement, threshold: float) -> Confidence:
    """``"high"``, less one level for each doubt.

    Doubts are: a run after warm-up of less than 5 s or 30 steps (of less than 10 steps: two levels); windows whose
    steps differ by more than 15 % of their mean time; a share within a tenth of the threshold; NVML against CUDA
    events; a cause inside the step that nobody has looked at.
    """
    steps, wall_s = measurement.times.steps, measurement.times.wall_s
    lost = (steps < _FEW_STEPS or wall_s < _SHORT_S) + (steps < _VERY_FEW_STEPS)
    lost += noise(measurement) > _NOISY
    lost += share < 1.1 * threshold
    lost += abs(disagreement(idle_shares(measurement))) > _APART
    lost += cause in _INSIDE and measurement.waterfall.on_gpu and measurement.look is None
    return _LEVELS[min(lost, 2)]


def noise(measurement: Measurement) -> float:
    """Standard error of the mean time of a step, as a share of it, by windows; 0 with less than three."""
    means = [each.seconds / each.steps for each in measurement.history if each.steps]
    if len(means) < 3 or measurement.growth is not None:
        return 0.0
    mean = sum(means) / len(means)
    variance = sum((each - mean) ** 2 for each in means) / (len(means) - 1)
    return math.sqrt(variance / len(means)) / mean if mean > 0 else 0.0
