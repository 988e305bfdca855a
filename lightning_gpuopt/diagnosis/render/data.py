"""Comparisons as data, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_gpuopt.diagnosis.compare import Comparison
from lightning_gpuopt.diagnosis.gate import Gate
from lightning_gpuopt.diagnosis.record import RunRecord


def comparison_data(comparison: Comparison, gate: Gate | None = None) -> dict[str, Any]:
    """Two runs side by side as plain data; what is not known is left out, phases are host seconds of a steady step."""
    data = {
        "before": _run(comparison.before),
        "after": _run(comparison.after),
        "speedup": comparison.speedup,
        "differences": comparison.differences,
        "proofs": [asdict(each) for each in comparison.proofs],
        "gate": known(asdict(gate)) if gate is not None else None,
    }
    return known(data)


def _run(report: RunRecord) -> dict[str, Any]:
    return known(
        {
            "verdict": report.verdict,
            "steps": report.steps,
            "step_s": report.step_s,
            "median_step_s": report.step_times.median_s,
            "phases_s_per_step": report.measured.step_phases_s,
        }
    )


def known(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}
