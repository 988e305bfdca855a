"""The checks as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from lightning_gpuopt.diagnosis.render.text import new_console, text_of
from lightning_gpuopt.doctor.check import Check, Status, by_weight, tally

_HEADING: Final[dict[Status, str]] = {"problem": "PROBLEM", "note": "note", "unknown": "?", "ok": "ok"}
_MIN_WIDTH: Final = 20
_COLUMN: Final = max(map(len, _HEADING.values())) + 1


def render_checks(checks: Sequence[Check], width: int = 80) -> str:
    """Draw the checks as plain text of so many columns: how many of each kind, then each, problems first."""
    lines = [_summary(checks)]
    for check in by_weight(checks):
        parts = [f"{check.name}: {check.found}"]
        parts += [f"{label}: {text}" for label, text in (("why", check.why), ("fix", check.fix)) if text]
        body = new_console(max(width - _COLUMN, _MIN_WIDTH))
        for part in parts:
            body.print(Text(part))
        first, *rest = text_of(body).splitlines()
        lines += [f"{_HEADING[check.status]:{_COLUMN}}{first}", *(f"{'':{_COLUMN}}{line}" for line in rest)]
    return "\n".join(lines)


def _summary(checks: Sequence[Check]) -> str:
    counts = tally(checks)
    parts = [
        f"{counts['problem']} {'problem' if counts['problem'] == 1 else 'problems'}",
        f"{counts['note']} {'note' if counts['note'] == 1 else 'notes'}",
        f"{counts['ok']} ok",
    ]
    if counts["unknown"]:
        parts.append(f"{counts['unknown']} not known")
    return ", ".join(parts)
