"""One check of the environment, as plain data, and what a list of them amounts to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

SCHEMA_VERSION: Final = 1

Status = Literal["ok", "note", "problem", "unknown"]

_WEIGHT: Final[tuple[Status, ...]] = ("problem", "note", "unknown", "ok")


@dataclass(frozen=True)
class Check:
    name: str  # of what was looked at, such as ``"gpu0.pcie"``
    status: Status  # "note": worth knowing; "problem": it holds a GPU back, or will; "unknown": not found out
    found: str  # in one line
    measured: dict[str, Any] = field(default_factory=dict)  # the unit is in each name
    why: str = ""  # why it matters; empty if all is well
    fix: str = ""  # a command or a setting; empty if there is none


def not_known(name: str, reason: str, measured: dict[str, Any] | None = None) -> Check:
    return Check(name, "unknown", f"not known: {reason.rstrip('.')}", measured or {})


def by_weight(checks: Iterable[Check]) -> list[Check]:
    """The checks, sorted: problems first and what is well last; else in their order."""
    return sorted(checks, key=lambda check: _WEIGHT.index(check.status))


def tally(checks: Iterable[Check]) -> dict[Status, int]:
    counts: dict[Status, int] = dict.fromkeys(_WEIGHT, 0)
    for check in checks:
        counts[check.status] += 1
    return counts


def as_data(checks: Sequence[Check]) -> dict[str, Any]:
    listed = [asdict(check) for check in by_weight(checks)]
    return {"schema_version": SCHEMA_VERSION, "problems": tally(checks)["problem"], "checks": listed}
