"""The report as a table for the terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

if TYPE_CHECKING:
    from lightning_gpuopt.diagnosis.report import StallReport

_BAR_WIDTH: Final = 30


def render_text(report: StallReport, width: int = 80) -> str:
    """Draw a report as plain text.

    Args:
        report: what to draw.
        width: columns of the terminal.

    Returns:
        The verdict, the table of phases and the findings, without a newline at the end.
    """
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(_headline(report))
    if report.wall_s > 0:
        console.print(_phase_table(report))
    for number, finding in enumerate(report.findings, start=1):
        console.print(f"{number}. {finding.cause}: {finding.share * 100:.0f} % of the time")
        console.print(Padding(escape(finding.advice), (0, 0, 0, 3)))
        facts = ", ".join(f"{name}={value}" for name, value in finding.evidence.items())
        console.print(Padding(escape(f"({facts})"), (0, 0, 0, 3)))
    for note in report.notes:
        console.print(escape(f"Note: {note}"))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _headline(report: StallReport) -> str:
    step = f", {report.step_s * 1e3:.1f} ms a step" if report.step_s is not None else ""
    return escape(f"Verdict: {report.verdict}   ({report.steps} steps in {report.wall_s:.1f} s{step})")


def _phase_table(report: StallReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("where the time went")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", min_width=_BAR_WIDTH)
    for phase, seconds in sorted(report.phases.items(), key=lambda item: item[1], reverse=True):
        share = seconds / report.wall_s
        if seconds > 0:
            table.add_row(phase, f"{seconds:.2f}", f"{share * 100:.1f} %", "█" * round(share * _BAR_WIDTH))
    return table
