"""Two runs side by side: what advice of the first really brought in the second, and whether that is slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from lightning_gpuopt.diagnosis.record import ENOUGH_STEPS, Finding, Proof, RunRecord
from lightning_gpuopt.measurements.phases import BETWEEN_STEPS

Outcome = Literal["passed", "slower", "not_judged"]

# what two runs must have in common for one to prove advice of the other; what a report does not say is in common
_SAME: Final = ("model", "device", "ranks", "strategy", "precision", "accumulate_grad_batches", "batch_size")
# with another of these a step is other work. A changed model, precision or strategy is what a gate has to judge.
_OTHER_WORK: Final = ("device", "ranks", "batch_size")


@dataclass(frozen=True)
class Comparison:
    before: RunRecord
    after: RunRecord
    speedup: float | None  # steady steps per second, after over before; None: too few steady steps
    proofs: list[Proof]  # advice of the earlier run that the later one follows
    differences: list[str] = field(default_factory=list)  # kinds of other steps, such as "model": then no proofs
    steps: tuple[int, int] | None = None  # steady steps measured, before and after; None: not known


def compare(before: RunRecord, after: RunRecord) -> Comparison:
    counts = [each.steps if each.measured_steps is None else each.measured_steps for each in (before, after)]
    steps = (counts[0], counts[1]) if all(counts) else None
    enough = steps is None or min(steps) >= ENOUGH_STEPS
    speedup = before.step_s / after.step_s if before.step_s and after.step_s and enough else None
    first, second = before.environment, after.environment
    differences: list[str] = [
        name for name in _SAME if name in first and name in second and first[name] != second[name]
    ]
    proofs: list[Proof] = []
    if not differences:
        proofs = proofs_of(before.findings, before.step_s, asdict(after.loader), after.step_s, steps)
    return Comparison(before, after, speedup, proofs, differences, steps)


def proofs_of(
    findings: list[Finding],
    step_s_before: float | None,
    loader_after: Mapping[str, Any],
    step_s_after: float | None,
    steps: tuple[int, int] | None = None,
) -> list[Proof]:
    """Which advice is now in force, and what it alone brought; mean steady steps in seconds.

    A number of workers counts as followed when it was changed at least that far. Without ``persistent_workers`` the
    others are still proved: it does not change the steps.
    """
    if not step_s_before or not step_s_after:
        return []
    proofs = []
    for finding in findings:
        in_force = {name: value for name, value in finding.settings.items() if _followed(value, loader_after.get(name))}
        missing = finding.settings.keys() - in_force.keys() - {"persistent_workers"}
        if in_force and not missing and finding.evidence.get("loader") != "validation":
            gain = step_s_before / step_s_after
            proofs.append(Proof(finding.cause, in_force, finding.predicted_speedup, gain, steps))
    return proofs


def _followed(advised: Any, now: Any) -> bool:
    if now is None:
        return False
    if isinstance(advised, bool):
        return bool(now == advised)
    if isinstance(advised, int) and advised:
        return bool(now >= advised)
    return bool(now == advised)


@dataclass(frozen=True)
class Gate:
    outcome: Outcome
    allowed_percent: float
    slower_percent: float | None = None  # of the mean steady step, negative: faster; None: a run has none
    median_slower_percent: float | None = None  # where only the mean is slower, a few long steps are the reason
    phase: str | None = None  # the phase whose host time per step grew most
    phase_before_s: float | None = None  # per step
    phase_after_s: float | None = None  # per step
    reason: str = ""  # why it was not judged; empty if it was


def gate_of(comparison: Comparison, allowed_percent: float) -> Gate:
    """Whether the later run's mean steady step (``step_s``) is slower than allowed; no noise is taken off."""
    before, after = comparison.before, comparison.after
    other = [name for name in comparison.differences if name in _OTHER_WORK]
    if other:
        names = ", ".join(name.replace("_", " ") for name in other)
        return Gate("not_judged", allowed_percent, reason=f"the runs differ in {names}")
    if not before.step_s or not after.step_s:
        which, run = ("later", after) if before.step_s else ("earlier", before)
        why = f". {run.why_not_measured}" if run.why_not_measured else ""
        reason = f"the {which} run has no step after its warm-up{why}".rstrip(".")
        return Gate("not_judged", allowed_percent, reason=reason)
    slower_percent = (after.step_s / before.step_s - 1) * 100
    first, second = before.step_times.median_s, after.step_times.median_s
    grown, before_s, after_s = _phase_that_grew(before, after)
    return Gate(
        # rounding in the last digit is no slow-down
        "slower" if slower_percent > allowed_percent + 1e-9 else "passed",
        allowed_percent,
        slower_percent,
        (second / first - 1) * 100 if first and second else None,
        grown,
        before_s,
        after_s,
    )


def _phase_that_grew(before: RunRecord, after: RunRecord) -> tuple[str | None, float | None, float | None]:
    first, second = before.measured.step_phases_s, after.measured.step_phases_s
    grown = {name: second[name] - first.get(name, 0.0) for name in second if name not in BETWEEN_STEPS}
    phase = max(grown, key=lambda name: grown[name], default=None)
    if phase is None or grown[phase] <= 0:
        return None, None, None
    return phase, first.get(phase, 0.0), second[phase]


def comparison_data(comparison: Comparison, gate: Gate | None = None) -> dict[str, Any]:
    """Two runs side by side as plain data; what is not known is left out, phases are host seconds of a steady step."""
    data = {
        "before": _run(comparison.before),
        "after": _run(comparison.after),
        "speedup": comparison.speedup,
        "differences": comparison.differences,
        "proofs": [asdict(each) for each in comparison.proofs],
        "gate": _known(asdict(gate)) if gate is not None else None,
    }
    return _known(data)


def _run(report: RunRecord) -> dict[str, Any]:
    return _known(
        {
            "verdict": report.verdict,
            "steps": report.steps,
            "step_s": report.step_s,
            "median_step_s": report.step_times.median_s,
            "phases_s_per_step": report.measured.step_phases_s,
        }
    )


def _known(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}
