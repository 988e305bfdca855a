"""``lightning-gpuopt report``: a saved report as a table and as a page, or two of them side by side."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import UsageError

if TYPE_CHECKING:
    from lightning_gpuopt.diagnosis.report import StallReport

SUMMARY = "show a report.json that StallDetector wrote, or compare two of them"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    add = parser.add_argument
    add("file", type=str, help="a report.json; with a second one, the run before")
    add("after", type=str, nargs="?", help="the report.json of the run after")
    add("--html", type=str, metavar="OUT", help="write a page that needs no network, too")


def run(options: Namespace) -> int:
    """Print the report, or the comparison, and write the page where one is asked for.

    Returns:
        The exit code 0.

    Raises:
        UsageError: a file is not there or holds no report, or the page cannot be written.
    """
    from lightning_gpuopt.diagnosis.compare import compare
    from lightning_gpuopt.diagnosis.render.text import render_comparison, render_text

    first = _read(options.file)
    second = _read(options.after) if options.after is not None else None
    width = shutil.get_terminal_size().columns
    if second is None:
        print(render_text(first, width))
    else:
        print(render_comparison(compare(first, second), width))
    if options.html is not None:
        _write_page(Path(options.html), first, second)
    return 0


def _read(name: str) -> StallReport:
    from lightning_gpuopt.diagnosis.report import StallReport

    try:
        return StallReport.from_json(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"expected a report.json, got {name}: {error.strerror}; StallDetector leaves one in its report_dir"
        ) from error
    except ValueError as error:
        raise UsageError(f"{name}: {error}; give a report.json that StallDetector wrote") from error


def _write_page(target: Path, first: StallReport, second: StallReport | None) -> None:
    from lightning_gpuopt.diagnosis.render.html import render_html
    from lightning_gpuopt.diagnosis.report import write_whole

    page = render_html(first) if second is None else render_html(second, baseline=first)
    try:
        write_whole(target, page)
    except OSError as error:
        raise UsageError(
            f"--html: expected a place to write to, got {target}: {error.strerror}; name another"
        ) from error
