"""The demo's runs side by side, as text."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_gpuopt.cli._demo_steps import Step
from lightning_gpuopt.cli._demo_training import Outcome, Settings
from lightning_gpuopt.diagnosis.record import Proof

_UNKNOWN: Final = "–"


@dataclass(frozen=True)
class Run:
    """One training of the demo.

    Attributes:
        settings: what it was told.
        outcome: what it showed.
        step: the advice that it applied; None for the first run.
        proof: what was predicted of that and what was measured, against the run before; None where there is none.
    """

    settings: Settings
    outcome: Outcome
    step: Step | None = None
    proof: Proof | None = None


def table(runs: list[Run], width: int = 80) -> str:
    """The runs in columns, in the order in which they were made.

    Args:
        runs: the first is the one before any advice.
        width: columns of the terminal.

    Returns:
        Lines without a newline at the end.
    """
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("")
    for run in runs:
        drawn.add_column("before" if run.step is None else title(run.step), justify="right")
    for what, cell in _ROWS.items():
        cells = [cell(run) for run in runs]
        if any(text is not None for text in cells):
            drawn.add_row(*(Text(text) for text in [what, *(text or _UNKNOWN for text in cells)]))
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, highlight=False).print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def title(step: Step) -> str:
    """A step's name as words."""
    return step.name.replace("-", " ")


def _samples_per_s(run: Run) -> str | None:
    rate = run.outcome.samples_per_s
    return f"{rate:,.0f}" if rate is not None else None


def _step_time(run: Run) -> str | None:
    step_s = run.outcome.report.step_s
    return f"{step_s * 1e3:.1f} ms" if step_s is not None else None


def _data_wait(run: Run) -> str | None:
    report = run.outcome.report
    return f"{report.phases['data_wait'] / report.wall_s * 100:.1f} %" if report.wall_s > 0 else None


def _gpu_utilization(run: Run) -> str | None:
    found = [value for key, value in run.outcome.gpu.items() if key.endswith("/utilization")]
    return f"{found[0]:.1f} %" if found else None


def _predicted(run: Run) -> str | None:
    predicted = run.step.predicted if run.step is not None else None
    return f"{predicted[1]:.2f}x" if predicted is not None else None


def _interval(run: Run) -> str | None:
    predicted = run.step.predicted if run.step is not None else None
    return f"{predicted[0]:.2f}x to {predicted[2]:.2f}x" if predicted is not None else None


def _measured(run: Run) -> str | None:
    return f"{run.proof.measured:.2f}x" if run.proof is not None else None


_ROWS: Final[dict[str, Callable[[Run], str | None]]] = {
    "samples per second": _samples_per_s,
    "step time": _step_time,
    "waiting for data": _data_wait,
    "GPU utilization": _gpu_utilization,
    "the whole training": lambda run: f"{run.outcome.report.wall_s:.1f} s",
    "validation accuracy": lambda run: f"{run.outcome.accuracy_percent:.1f} %",
    "predicted gain": _predicted,
    "in the interval": _interval,
    "measured gain": _measured,
}
