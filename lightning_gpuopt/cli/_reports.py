"""Reports as subcommands read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_gpuopt.cli._parser import UsageError

if TYPE_CHECKING:
    from lightning_gpuopt.diagnosis.report import StallReport


def load_report(name: str) -> StallReport:
    """Read a report that ``StallDetector`` wrote.

    Args:
        name: its path.

    Raises:
        UsageError: it is not there, or no report.
    """
    from lightning_gpuopt.diagnosis.report import StallReport

    try:
        return StallReport.from_json(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"expected a report.json, got {name}: {error.strerror}; StallDetector leaves one in its report_dir"
        ) from error
    except ValueError as error:
        raise UsageError(f"{name}: {error}; give a report.json that StallDetector wrote") from error
