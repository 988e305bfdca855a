"""The report: plain data, its JSON form and the schema of that form."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

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
    """

    start_s: float
    wall_s: float
    steps: int
    phases: dict[str, float]


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
    timeline: list[Stretch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The whole report as JSON text, as :data:`REPORT_SCHEMA` describes it; an unknown value is left out."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        fields["findings"] = [
            {name: value for name, value in finding.items() if value is not None} for finding in fields["findings"]
        ]
        return json.dumps({"schema_version": SCHEMA_VERSION, **fields}, indent=2, allow_nan=False)

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file, whole or not at all; folders are made as needed.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(self.to_json() + "\n", encoding="utf-8")
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)

    def __str__(self) -> str:
        from lightning_gpuopt.diagnosis.render_text import render_text

        return render_text(self)


_SECONDS: Final = {"type": "number", "minimum": 0}
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
                    "predicted_speedup": {
                        "type": "array",
                        "items": {"type": "number"},
                        "minItems": 3,
                        "maxItems": 3,
                    },
                },
            },
        },
        "steps": {"type": "integer", "minimum": 0},
        "step_s": _SECONDS,
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
                    "steps": {"type": "integer", "minimum": 0},
                    "phases": _PHASES,
                },
            },
        },
        "notes": {"type": "array", "items": {"type": "string"}},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
