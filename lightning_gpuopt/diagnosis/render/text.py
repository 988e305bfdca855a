"""Reports as tables for the terminal."""

from __future__ import annotations

import io
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_gpuopt.diagnosis.compare import Comparison
from lightning_gpuopt.diagnosis.record import Finding, RunRecord
from lightning_gpuopt.diagnosis.render import wording

_BAR_WIDTH: Final = 30


def render_text(report: RunRecord, width: int = 80) -> str:
    """A report as plain text, ``width`` columns wide, without a newline at the end."""
    console = new_console(width)
    _print_changes(console, report)
    for proof in report.proofs:
        console.print(Text(wording.proof_line(proof)))
    console.print(Text(_headline(report)))
    if report.why_not_measured:
        console.print(Text(report.why_not_measured))
    for count, finding in enumerate(report.findings, start=1):
        _print_finding(console, count, finding)
    if report.wall_s > 0:
        console.print(_phase_table(report))
    for risk in report.risks:
        console.print(Text(f"Risk: {risk.risk}"))
        for text in (risk.text, risk.advice):
            console.print(Padding(Text(text), (0, 0, 0, 3)))
    for line in (
        wording.standstill_line(report),
        wording.headroom_line(report),
        wording.outlier_line(report),
        wording.lightning_line(report),
    ):
        if line is not None:
            console.print(Text(line))
    _print_kernels(console, report)
    for hint in report.hints:
        console.print(Text(f"Hint: {hint.text} {hint.setting}"))
    for note in report.notes[1:] if report.why_not_measured else report.notes:
        console.print(Text(f"Note: {note}"))
    return text_of(console)


def _print_kernels(console: Console, report: RunRecord) -> None:
    kinds = wording.kernel_kinds_line(report)
    if kinds is None:
        return
    console.print(Text(kinds))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("dearest", no_wrap=True, overflow="ellipsis", ratio=1)
    for column in ("kind", "share", "a step", "module"):
        table.add_column(column, justify="right" if column in ("share", "a step") else "left", no_wrap=True)
    for row in wording.kernel_rows(report):
        table.add_row(*map(Text, row))
    console.print(table)


def _print_changes(console: Console, report: RunRecord) -> None:
    if not report.changes:
        return
    console.print(Text("Changes while training ran:"))
    for change in report.changes:
        console.print(Padding(Text(wording.change_line(change)), (0, 0, 0, 2)))
    code = wording.kept_code(report.changes)
    if code:
        console.print(Text("To have them from the start:"))
    for line in code:
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def render_comparison(comparison: Comparison, width: int = 80) -> str:
    """Two runs side by side as plain text, ``width`` columns wide, without a newline at the end."""
    before, after = comparison.before, comparison.after
    console = new_console(width)
    console.print(Text(f"Verdict: {before.verdict} → {after.verdict}"))
    if (line := wording.speedup_line(comparison)) is not None:
        console.print(Text(line))
    console.print(Text(wording.comparison_base(comparison)))
    console.print(_comparison_table(comparison))
    for proof in wording.all_proofs(after, comparison):
        console.print(Text(wording.proof_line(proof)))
    unproved = wording.no_proof_line(comparison)
    if unproved is not None:
        console.print(Text(unproved))
    return text_of(console)


def new_console(width: int) -> Console:
    """A console of so many columns, whose text is read by :func:`text_of`."""
    return Console(file=io.StringIO(), width=width, color_system=None, highlight=False)


def text_of(console: Console) -> str:
    """What was printed, without blanks at the ends of lines."""
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _headline(report: RunRecord) -> str:
    steps = "1 step" if report.steps == 1 else f"{report.steps} steps"
    part = f"; {part}" if (part := wording.measured_part(report)) else ""
    step = f", {report.step_s * 1e3:.1f} ms a step" if report.step_s is not None else ""
    return f"Verdict: {report.verdict}   ({steps} in {report.wall_s:.1f} s{part}{step})"


def _print_finding(console: Console, count: int, finding: Finding) -> None:
    sure = "" if finding.confidence in (None, "high") else f" ({finding.confidence} confidence)"
    console.print(Text(f"{count}. {finding.cause}: {wording.percent(finding.share)} of the time{sure}"))
    facts = wording.deciding_facts(finding)
    where = finding.evidence.get("where")
    for line in (finding.advice, f"where: {where}" if where else "", f"({facts})" if facts else ""):
        if line:
            console.print(Padding(Text(line), (0, 0, 0, 3)))
    if finding.predicted_speedup is not None:
        console.print(Padding(Text(f"predicted: {wording.gain(finding.predicted_speedup)}"), (0, 0, 0, 3)))


def _phase_table(report: RunRecord) -> Table:
    bases = wording.time_bases(report)
    several = len(bases) > 1
    width, unit = (_BAR_WIDTH // 5, " s") if several else (_BAR_WIDTH, "")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("where the time went")
    for name, _ in bases:
        table.add_column(name if several else "seconds", justify="right")
        table.add_column("share", justify="right")
    table.add_column("", min_width=width)
    first = bases[0][1]
    for phase in sorted(report.phases, key=first.share, reverse=True):
        if report.phases[phase] > 0:
            pairs = [(f"{each.phases[phase]:.2f}{unit}", f"{each.share(phase) * 100:.1f} %") for _, each in bases]
            table.add_row(Text(phase), *sum(pairs, ()), "█" * round(first.share(phase) * width))
    return table


def _comparison_table(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("per step (share of time)")
    for column in ("before", "after"):
        table.add_column(column, justify="right")
    for row in wording.comparison_rows(comparison):
        table.add_row(*map(Text, row))
    return table
