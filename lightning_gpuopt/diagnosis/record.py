"""What a diagnosis leaves behind, as plain data: findings, proofs, and the record of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_gpuopt._measured import LoaderFacts, StepTimes


@dataclass(frozen=True)
class Finding:
    """One cause of waiting, with its evidence and what to do.

    Attributes:
        cause: one of the causes in the documentation, for example ``"main_process_loading"``.
        share: share of wall time that it takes, 0-1; warm-up steps are left out on both sides.
        evidence: the numbers that show it; the unit is in each name.
        advice: what to change, in one or two sentences.
        settings: ``DataLoader`` arguments under their own names, for example ``{"num_workers": 6}``; empty where the
            remedy is not a loader setting.
        predicted_speedup: steady steps per second after over before, as (low, mid, high); None where it is not
            predicted.
    """

    cause: str
    share: float
    evidence: dict[str, float | str]
    advice: str
    settings: dict[str, Any] = field(default_factory=dict)
    predicted_speedup: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Stretch:
    """A stretch of the run, for the timeline.

    Attributes:
        start_s: its beginning, in seconds since ``on_train_start``.
        wall_s: its length in seconds.
        steps: training batches finished in it.
        phases: exclusive seconds by phase.
        gpu_utilization: what NVML said of this rank's GPU, 0-100 %; None without one.
    """

    start_s: float
    wall_s: float
    steps: int
    phases: dict[str, float]
    gpu_utilization: float | None = None


@dataclass(frozen=True)
class Proof:
    """A setting that was advised and then applied: what was predicted beside what was measured.

    Attributes:
        cause: the finding that advised it.
        settings: what was changed.
        predicted: steady steps per second, after over before, as (low, mid, high); None where it was not predicted.
        measured: the same, measured.
    """

    cause: str
    settings: dict[str, Any]
    predicted: tuple[float, float, float] | None
    measured: float

    @property
    def kept(self) -> bool | None:
        """Whether the measured gain lies in the predicted interval; None where nothing was predicted."""
        return self.predicted[0] <= self.measured <= self.predicted[2] if self.predicted is not None else None


@dataclass(frozen=True)
class RunRecord:
    """Where the time of a run went, and why.

    The fields are described at :class:`~lightning_gpuopt.diagnosis.report.StallReport`, which adds the forms in JSON,
    text and HTML.
    """

    verdict: str
    wall_s: float
    phases: dict[str, float]
    findings: list[Finding]
    steps: int = 0
    step_s: float | None = None
    gpu_idle_s: float | None = None
    headroom: float | None = None
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    step_times: StepTimes = field(default_factory=StepTimes)
    proofs: list[Proof] = field(default_factory=list)
    timeline: list[Stretch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
