"""The report: plain data, its JSON form and the schema of that form."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.timeline.loader import LoaderFacts
from lightning_gpuopt.timeline.steps import Outlier, StepTimes

SCHEMA_VERSION: Final = 1


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
class StallReport:
    """Where the time of a run went, and why.

    Attributes:
        verdict: ``"compute_bound"``, or the cause of the largest finding.
        wall_s: seconds from ``on_train_start`` to ``on_train_end``, or to now while training runs.
        phases: exclusive seconds by phase, over the whole run; they sum to ``wall_s``.
        findings: the causes above the threshold, largest first.
        steps: training batches finished.
        step_s: mean seconds per training batch after warm-up, without validation, checkpoints and the set-up of epochs;
            None while there is no such step.
        gpu_idle_s: seconds after warm-up in which the GPU had nothing to do between two steps; None without a GPU.
        headroom: share of the steady step, 0-1, that is not the step's own work: what could be gained at most.
        loader: settings of the training loaders, as they were last.
        step_times: distribution of the steps after warm-up, and the steps that stood out.
        proofs: advice that was followed, predicted and measured.
        timeline: the run in stretches, oldest first.
        notes: what could not be measured, and why.
        environment: machine and versions.

    Example::

        detector = StallDetector()
        trainer = Trainer(callbacks=[detector])
        trainer.fit(model, train_dataloader)
        print(detector.report)
        detector.report.save_json("report.json")
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

    def to_json(self) -> str:
        """The whole report as JSON text, as :data:`REPORT_SCHEMA` describes it; an unknown value is left out."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **_known(asdict(self))}, indent=2, allow_nan=False)

    def with_proofs(self, proofs: list[Proof]) -> StallReport:
        """The same report with more proofs.

        Args:
            proofs: of an earlier run's advice.
        """
        return replace(self, proofs=[*self.proofs, *proofs])

    @classmethod
    def from_json(cls, text: str) -> StallReport:
        """Read what :meth:`to_json` wrote.

        Args:
            text: the JSON text.

        Raises:
            ValueError: the text is no report, or one of another schema.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"expected a stall report in JSON, got something else: {error}") from None
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"expected a stall report of schema version {SCHEMA_VERSION}, got {found!r}")
        try:
            return cls(
                **_only(cls, data)
                | {
                    "findings": [Finding(**_tupled(each, "predicted_speedup")) for each in data["findings"]],
                    "proofs": [Proof(**_tupled({"predicted": None} | each, "predicted")) for each in data["proofs"]],
                    "timeline": [Stretch(**each) for each in data["timeline"]],
                    "loader": LoaderFacts(**data["loader"]),
                    "step_times": _step_times(data["step_times"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"expected a whole stall report, got one with a part missing or strange: {error}"
            ) from None

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file, whole or not at all; folders are made as needed.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.to_json() + "\n")

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained page, whole or not at all; folders are made as needed.

        Args:
            path: the file, of about 5 MB.

        Raises:
            OSError: the file cannot be written.

        Example::

            detector.report.save_html("report.html")
        """
        from lightning_gpuopt.diagnosis.render_html import render_html

        write_whole(Path(path), render_html(self))

    def __str__(self) -> str:
        from lightning_gpuopt.diagnosis.render_text import render_text

        return render_text(self)


def write_whole(target: Path, text: str) -> None:
    """Write a file whole or not at all; folders are made as needed.

    Args:
        target: the file.
        text: what it shall hold.

    Raises:
        OSError: the file cannot be written.
    """
    target = target.absolute()  # "." has no name
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _known(value: Any) -> Any:
    """The same without what is None, all the way down."""
    if isinstance(value, dict):
        return {name: _known(each) for name, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_known(each) for each in value]
    return value


def _only(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    return {each.name: data[each.name] for each in fields(cls) if each.name in data}


def _tupled(data: dict[str, Any], name: str) -> dict[str, Any]:
    return data | {name: tuple(data[name])} if data.get(name) is not None else data


def _step_times(data: dict[str, Any]) -> StepTimes:
    lists = {"edges_s": tuple(data["edges_s"]), "counts": tuple(data["counts"])}
    return StepTimes(**data | lists | {"outliers": tuple(Outlier(**each) for each in data["outliers"])})


_SECONDS: Final = {"type": "number", "minimum": 0}
_COUNT: Final = {"type": "integer", "minimum": 0}
_INTERVAL: Final = {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}
_PHASES: Final = {"type": "object", "additionalProperties": {"type": "number"}}

REPORT_SCHEMA: Final[dict[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "lightning-gpuopt stall report",
    "type": "object",
    "required": [
        "schema_version",
        "verdict",
        "wall_s",
        "phases",
        "findings",
        "steps",
        "timeline",
        "notes",
        "environment",
        "loader",
        "step_times",
        "proofs",
    ],
    "additionalProperties": False,
    "properties": {
        "schema_version": {"const": SCHEMA_VERSION},
        "verdict": {"type": "string"},
        "wall_s": _SECONDS,
        "phases": _PHASES,
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["cause", "share", "evidence", "advice", "settings"],
                "additionalProperties": False,
                "properties": {
                    "cause": {"type": "string"},
                    "share": {"type": "number", "minimum": 0, "maximum": 1},
                    "evidence": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
                    "advice": {"type": "string"},
                    "settings": {"type": "object"},
                    "predicted_speedup": _INTERVAL,
                },
            },
        },
        "steps": _COUNT,
        "step_s": _SECONDS,
        "headroom": {"type": "number", "minimum": 0, "maximum": 1},
        "loader": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "num_workers": _COUNT,
                "persistent_workers": {"type": "boolean"},
                "prefetch_factor": _COUNT,
                "pin_memory": {"type": "boolean"},
            },
        },
        "step_times": {
            "type": "object",
            "required": ["edges_s", "counts", "outliers", "outlier_count", "outlier_s"],
            "additionalProperties": False,
            "properties": {
                "edges_s": {"type": "array", "items": _SECONDS},
                "counts": {"type": "array", "items": _COUNT},
                "median_s": _SECONDS,
                "p90_s": _SECONDS,
                "p99_s": _SECONDS,
                "slowest_s": _SECONDS,
                "outlier_count": _COUNT,
                "outlier_s": {"type": "number"},
                "outliers": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["step", "at_s", "seconds", "phase", "phase_s"],
                        "additionalProperties": False,
                        "properties": {
                            "step": _COUNT,
                            "at_s": _SECONDS,
                            "seconds": _SECONDS,
                            "phase": {"type": "string"},
                            "phase_s": _SECONDS,
                        },
                    },
                },
            },
        },
        "proofs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["cause", "settings", "measured"],
                "additionalProperties": False,
                "properties": {
                    "cause": {"type": "string"},
                    "settings": {"type": "object"},
                    "predicted": _INTERVAL,
                    "measured": {"type": "number"},
                },
            },
        },
        "gpu_idle_s": _SECONDS,
        "timeline": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["start_s", "wall_s", "steps", "phases"],
                "additionalProperties": False,
                "properties": {
                    "start_s": _SECONDS,
                    "wall_s": _SECONDS,
                    "steps": _COUNT,
                    "phases": _PHASES,
                    "gpu_utilization": {"type": "number"},
                },
            },
        },
        "notes": {"type": "array", "items": {"type": "string"}},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
