"""What a diagnosis leaves behind, as plain data: findings, proofs, and the record of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal

from lightning_gpuopt.measurements.code_location import CodeLocation
from lightning_gpuopt.measurements.kernels import KernelShare
from lightning_gpuopt.measurements.loader_costs import LoaderCosts
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import StepTimes

ENOUGH_STEPS: Final = 30  # steps on either side below which a measured gain proves nothing


@dataclass(frozen=True)
class Finding:
    """One cause of waiting, with its evidence and what to do.

    Attributes:
        cause: one of the causes in the documentation, for example ``"main_process_loading"``.
        share: its share of wall time, 0-1; warm-up steps are excluded from both.
        evidence: the numbers that show it; the unit is in each name.
        advice: what to change, in one or two sentences.
        settings: ``DataLoader`` arguments under their own names, for example ``{"num_workers": 6}``; empty if the fix
            is not a loader setting.
        predicted_speedup: steady steps per second after over before, as (low, mid, high); None if not predicted.
        confidence: how reliable it is, from the agreement of its sources, the length of the run, and noise; None in
            reports of versions without it.
    """

    cause: str
    share: float
    evidence: dict[str, float | str]
    advice: str
    settings: dict[str, Any] = field(default_factory=dict)
    predicted_speedup: tuple[float, float, float] | None = None
    confidence: Literal["high", "medium", "low"] | None = None


@dataclass(frozen=True)
class Hint:
    """A setting of the script that could speed up the run; not a cause of waiting.

    Attributes:
        name: its topic: ``"precision"``, ``"cudnn_benchmark"``.
        text: the observation, and what it means.
        setting: the code or option to set.
        evidence: the numbers that show it; the unit is in each name.
    """

    name: str
    text: str
    setting: str
    evidence: dict[str, float] = field(default_factory=dict)


Verdict = Literal[
    "compute_bound", "not_measured", "unknown",
    "main_process_loading", "slow_storage", "slow_transform", "cpu_saturated", "cpu_throttled", "head_of_line",
    "worker_transfer", "pin_memory", "host_to_device", "gpu_sync", "launch_bound", "callback", "logging", "checkpoint",
    "validation", "epoch_restart", "straggler", "gpu_throttled", "communication", "slowdown", "recompilation",
    "garbage_collection", "device_copies",
]  # fmt: skip

RiskName = Literal["worker_memory", "process_memory", "shared_memory", "open_files", "uneven_ranks"]


@dataclass(frozen=True)
class Risk:
    """A problem that is likely to end or block the run later.

    Attributes:
        risk: what runs out, or ``"uneven_ranks"``.
        text: the observation, and when it will end or block the run, if that can be estimated.
        evidence: the numbers that show it; the unit is in each name.
        advice: what to change, in one or two sentences.
    """

    risk: RiskName
    text: str
    evidence: dict[str, float | str]
    advice: str


@dataclass(frozen=True)
class HotSpots:
    """The places in the code that take a finding's time, from stack samples of the thread that spends it.

    Attributes:
        finding: its cause, for a callback with its name: ``"callback MyCallback"``.
        process: where it was sampled: ``"training process"``, ``"worker 0"``.
        seconds: sampled time.
        samples: number of samples.
        places: those in the code, those with most time first.
    """

    finding: str
    process: str
    seconds: float
    samples: int
    places: tuple[CodeLocation, ...]


@dataclass(frozen=True)
class Stretch:
    """A stretch of the run, for the timeline.

    Attributes:
        start_s: its beginning, in seconds since ``on_train_start``.
        wall_s: its length in seconds.
        steps: training batches finished in it.
        phases: exclusive seconds by phase.
        gpu_utilization: what NVML reported of this rank's GPU, 0-100 %; None without one.
    """

    start_s: float
    wall_s: float
    steps: int
    phases: dict[str, float]
    gpu_utilization: float | None = None

    def share(self, phase: str) -> float:
        """A phase's share of its time, 0-1."""
        return self.phases.get(phase, 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def step_phases_s(self) -> dict[str, float]:
        """Host seconds of a mean step, by phase; empty without steps."""
        return {name: seconds / self.steps for name, seconds in self.phases.items()} if self.steps else {}


@dataclass(frozen=True)
class Proof:
    """A setting that was advised and then applied, with its predicted and measured gain.

    Attributes:
        cause: the finding that advised it.
        settings: what was changed.
        predicted: steady steps per second, after over before, as (low, mid, high); None if not predicted.
        measured: the same, measured.
        steps: number of measured steps, before and after; None if unknown.
    """

    cause: str
    settings: dict[str, Any]
    predicted: tuple[float, float, float] | None
    measured: float
    steps: tuple[int, int] | None = None

    @property
    def enough(self) -> bool:
        """Whether there are enough steps on both sides to prove something."""
        return self.steps is None or min(self.steps) >= ENOUGH_STEPS

    @property
    def kept(self) -> bool | None:
        """Whether the measured gain lies in the predicted interval; None if unknown."""
        if self.predicted is None or not self.enough:
            return None
        return self.predicted[0] <= self.measured <= self.predicted[2]


@dataclass(frozen=True)
class Change:
    """A setting that AutoFix has tried while training ran, or can only advise.

    Attributes:
        setting: its name.
        from_: its value before; ``"from"`` in JSON and as a key.
        to: its new value.
        predicted: steady steps per second, after over before, as (low, mid, high); for ``persistent_workers``, whole
            epochs per second. None if not predicted.
        measured: the same, measured. None if it never took effect.
        kept: whether it was kept; None if it never took effect.
        why: why it was undone, or never took effect; for a kept one, why it was not predicted.
        cause: the finding that asked for it; empty in reports of versions without it.
        windows: windows of steps by which it was measured.
        interval: 95 % interval of ``measured``, as (low, high), if its windows are independent of each other; None if
            they were too few, and for ``persistent_workers``.
    """

    setting: str
    from_: Any
    to: Any
    predicted: tuple[float, float, float] | None = None
    measured: float | None = None
    kept: bool | None = None
    why: str = ""
    cause: str = field(default="", compare=False)
    windows: int = field(default=0, compare=False)
    interval: tuple[float, float] | None = field(default=None, compare=False)

    def __getitem__(self, name: str) -> Any:
        """A field by its name in JSON: ``change["from"]``."""
        return getattr(self, "from_" if name == "from" else name)


@dataclass(frozen=True)
class Remedy:
    """An edit of the user's code, or of a configuration, that brings a setting from the start.

    Attributes:
        kind: the setting.
        file: the file's path; empty if there is no edit.
        line: the edit's first line; 0 if there is no edit.
        before: the lines that it replaces.
        after: the lines that it puts there.
        proved: whether the setting was kept with a proven gain.
        changes: what else it changes: ``"nothing"``, ``"order"`` of samples, or ``"results"``: what is learned.
        why: why there is no edit, and what brings the setting instead; empty if there is one.
    """

    kind: str
    file: str = ""
    line: int = 0
    before: str = ""
    after: str = ""
    proved: bool = False
    changes: Literal["nothing", "order", "results"] = "nothing"
    why: str = ""


@dataclass(frozen=True)
class RunRecord:
    """Where the time of a run went, and why.

    The fields are described at :class:`~lightning_gpuopt.diagnosis.report.StallReport`, which adds the forms in JSON,
    text and HTML.
    """

    verdict: Verdict
    wall_s: float
    phases: dict[str, float]
    findings: list[Finding]
    steps: int = 0
    step_s: float | None = None
    measured_steps: int | None = None
    gpu_idle_s: float | None = None
    headroom: float | None = None
    lightning_work: dict[str, float] = field(default_factory=dict)
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    step_times: StepTimes = field(default_factory=StepTimes)
    proofs: list[Proof] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    hot_spots: list[HotSpots] = field(default_factory=list)
    timeline: list[Stretch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    loader_costs: LoaderCosts | None = None
    kernels: list[KernelShare] = field(default_factory=list)
    kernel_kinds: dict[str, float] = field(default_factory=dict)
    kernel_summary: dict[str, float] = field(default_factory=dict)
    idle_shares: dict[str, float] = field(default_factory=dict)
    risks: list[Risk] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)

    @property
    def measured(self) -> Stretch:
        """The stretch that ``step_s`` and the findings are of: the steps after warm-up, and since the last change.

        Stretches of the timeline end where it begins; where they were joined since, the nearest end counts. The whole
        run where no step was measured.
        """
        if self.step_s is None or not self.timeline:
            return self.whole
        parts = self.timeline[1:] or self.timeline
        if self.measured_steps is not None:
            steps = list(accumulate(each.steps for each in reversed(self.timeline)))
            nearest = min(range(len(steps)), key=lambda index: abs(steps[index] - (self.measured_steps or 0)))
            parts = self.timeline[-nearest - 1 :]
        if not any(each.steps for each in parts):
            return self.whole
        phases = {name: sum(each.phases.get(name, 0.0) for each in parts) for name in self.phases}
        return Stretch(parts[0].start_s, sum(each.wall_s for each in parts), sum(each.steps for each in parts), phases)

    @property
    def whole(self) -> Stretch:
        """The whole run."""
        return Stretch(0.0, self.wall_s, self.steps, self.phases)

    @property
    def why_not_measured(self) -> str:
        """Why there is no verdict, and what a verdict needs; empty if there is one."""
        return self.notes[0] if self.verdict == "not_measured" and self.notes else ""
