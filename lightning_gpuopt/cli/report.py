"""``lightning-gpuopt report``: a saved report as a table and as a page, or two of them side by side."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import PROBLEM_FOUND, UsageError, writing_to

if TYPE_CHECKING:
    from lightning_gpuopt.diagnosis.report import StallReport

_PLACES: Final = ("report.json", "*/report.json", "*/*/report.json")

SUMMARY = "show a report.json that StallDetector wrote, or compare two of them"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=str, help="a report.json, or a folder with one; with a second one, the run before")
    add("after", type=str, nargs="?", help="the report of the run after")
    add("--html", type=str, metavar="OUT", help="also write a self-contained HTML page")
    add("--json", action="store_true", help="as JSON")
    add(
        "--fail-if-slower",
        type=str,
        metavar="PERCENT",
        help="exit code 1 if the mean steady step of the run after is slower by more than this, such as 5",
    )


def run(options: Namespace) -> int:
    """Print the report, or the comparison, and write the page; 1: slower, or not judged, with ``--fail-if-slower``."""
    allowed = _percentage(options.fail_if_slower) if options.fail_if_slower is not None else None
    if allowed is not None and options.after is None:
        raise UsageError("--fail-if-slower: expected two reports to compare, got one; give the one of the run after")
    first = load_report(options.file)
    second = load_report(options.after) if options.after is not None else None
    if second is None:
        print(first.to_json() if options.json else _table(first))
        failed = False
    else:
        failed = _compare(first, second, allowed, as_json=options.json)
    if options.html is not None:
        _write_page(Path(options.html), first, second)
    return PROBLEM_FOUND if failed else 0


def _table(report: StallReport) -> str:
    from lightning_gpuopt.diagnosis.render.text import render_text

    return render_text(report, shutil.get_terminal_size().columns)


def _compare(first: StallReport, second: StallReport, allowed: float | None, *, as_json: bool) -> bool:
    """Print the comparison; whether the gate, if there is one, did not let it pass."""
    from lightning_gpuopt.diagnosis.compare import compare, comparison_data, gate_of
    from lightning_gpuopt.diagnosis.render.text import render_comparison
    from lightning_gpuopt.diagnosis.render.wording import gate_line

    comparison = compare(first, second)
    gate = gate_of(comparison, allowed) if allowed is not None else None
    if as_json:
        print(json.dumps(comparison_data(comparison, gate), indent=2, allow_nan=False))
    else:
        print(render_comparison(comparison, shutil.get_terminal_size().columns))
    if gate is None:
        return False
    if gate.outcome != "passed":
        print(gate_line(gate), file=sys.stderr)
        return True
    if not as_json:
        print(gate_line(gate))
    return False


def _percentage(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"--fail-if-slower: expected a percentage, 0 or more, got {text}; give one such as 5%")
    return value


def _write_page(target: Path, first: StallReport, second: StallReport | None) -> None:
    from lightning_gpuopt.diagnosis.render.html import render_html
    from lightning_gpuopt.utils.whole_file import write_whole

    page = render_html(first) if second is None else render_html(second, baseline=first)
    with writing_to("--html", target):
        write_whole(target, page)


def load_report(name: str) -> StallReport:
    """Read a report of ``StallDetector``, or the last one in a folder that ``post-mortem`` takes; else UsageError."""
    from lightning_gpuopt.diagnosis.report import StallReport

    try:
        return StallReport.from_json(report_file(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"expected a report.json, got {name}: {error.strerror}; StallDetector leaves one in its report_dir"
        ) from error
    except ValueError as error:
        raise UsageError(f"{name}: {error}; give a report.json that StallDetector wrote") from error


def report_file(name: str) -> Path:
    """The file of a report: itself, or the last one in a folder; UsageError if none is in that."""
    path = Path(name)
    if not path.is_dir():
        return path
    for place in _PLACES:
        found = max(path.glob(place), key=lambda each: each.stat().st_mtime, default=None)
        if found is not None:
            return found
    raise UsageError(f"expected a report.json, got {path}: none in that folder; StallDetector leaves one in report_dir")
