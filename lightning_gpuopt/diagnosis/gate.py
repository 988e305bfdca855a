"""A gate on two runs: whether the later one is slower, by more than is allowed, and in which phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lightning_gpuopt.diagnosis.compare import Comparison
from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.measurements.phases import BETWEEN_STEPS

Outcome = Literal["passed", "slower", "not_judged"]

# with another of these a step is other work. A changed model, precision or strategy is what a gate has to judge.
_OTHER_WORK: Final = ("device", "ranks", "batch_size")


@dataclass(frozen=True)
class Gate:
    outcome: Outcome
    allowed_percent: float
    slower_percent: float | None = None  # of the mean steady step, negative: faster; None: a run has none
    median_slower_percent: float | None = None  # where only the mean is slower, a few long steps are the reason
    phase: str | None = None  # the phase whose host time per step grew most
    phase_before_s: float | None = None  # per step
    phase_after_s: float | None = None  # per step
    reason: str = ""  # why it was not judged; empty where it was


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
