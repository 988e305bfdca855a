"""Advice that a trial in the same run has refuted is not given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_gpuopt.diagnosis.record import Change, Finding

TOO_SHORT: Final = "training ended before a gain was proven"
INTERRUPTED: Final = "the number of workers has changed meanwhile"
COSTS_MORE: Final = "starting the workers takes longer than they save"  # reasons for which a change is not kept


def without_refuted(findings: Sequence[Finding], changes: Sequence[Change]) -> list[Finding]:
    """The findings, without the advice that was tried in the same run and did not help."""
    no_proof = (TOO_SHORT, INTERRUPTED)
    in_vain = [
        each for each in changes if each.why.startswith(COSTS_MORE) or (each.kept is False and each.why not in no_proof)
    ]
    return [_without(finding, in_vain) for finding in findings]


def _without(finding: Finding, in_vain: Sequence[Change]) -> Finding:
    for change in in_vain:
        advised = finding.settings.get(change.setting)
        if advised is None or not _is_as_far(advised, change):
            continue
        measured = "" if change.measured is None else f", and measured {change.measured:.2f}x"
        tried = f"was tried in this run{measured}: it" if change.kept is not None else "would not be worth it: it"
        advice = f"{change.setting} {change.from_} → {change.to} {tried} is not advised ({change.why})."
        return replace(finding, advice=advice, settings={}, predicted_speedup=None)
    return finding


def _is_as_far(advised: Any, change: Change) -> bool:
    """Whether what is advised is what was tried, or goes further in the same direction."""
    numbers = (advised, change.from_, change.to)
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in numbers):
        return bool(advised == change.to)
    return bool(advised >= change.to > change.from_ or advised <= change.to < change.from_)
