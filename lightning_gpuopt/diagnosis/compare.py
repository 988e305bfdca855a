"""Two runs side by side: what was advised in the first, applied in the second, and what it really brought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from lightning_gpuopt.diagnosis.record import ENOUGH_STEPS, Finding, Proof, RunRecord

# what two runs must have in common for one to prove advice of the other; what a report does not say is in common
_SAME: Final = ("model", "device", "ranks", "strategy", "precision", "accumulate_grad_batches", "batch_size")


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
