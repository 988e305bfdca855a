"""Reports as subcommands read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_gpuopt.cli._parser import UsageError

if TYPE_CHECKING:
    from lightning_gpuopt.diagnosis.report import StallReport

_PLACES: Final = ("report.json", "*/report.json", "*/*/report.json")


def load_report(name: str) -> StallReport:
    """Read a report of ``StallDetector``, or the last one in a folder that ``post-mortem`` takes; else UsageError."""
    from lightning_gpuopt.diagnosis.report import StallReport

    try:
        return StallReport.from_json(_file(Path(name)).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"expected a report.json, got {name}: {error.strerror}; StallDetector leaves one in its report_dir"
        ) from error
    except ValueError as error:
        raise UsageError(f"{name}: {error}; give a report.json that StallDetector wrote") from error


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for place in _PLACES:
        found = max(path.glob(place), key=lambda each: each.stat().st_mtime, default=None)
        if found is not None:
            return found
    raise UsageError(f"expected a report.json, got {path}: none in that folder; StallDetector leaves one in report_dir")
