"""The demo's runs side by side, as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_gpuopt.demo.steps import Step
from lightning_gpuopt.demo.training import DemoSettings, Outcome
from lightning_gpuopt.diagnosis.record import Proof
from lightning_gpuopt.diagnosis.render.text import new_console, text_of

_UNKNOWN: Final = "–"


@dataclass(frozen=True)
class Run:
    settings: DemoSettings
    outcome: Outcome
    step: Step | None = None  # the advice that it applied; None for the first run
    proof: Proof | None = None  # predicted and measured, against the run that it builds upon

    @property
    def name(self) -> str:
        return self.step.name if self.step is not None else "before"

    @property
    def kept(self) -> bool:
        """Whether the runs after this one build upon it: it is not known to be slower than what it builds upon."""
        return self.proof is None or self.proof.measured >= 1.0


def table(runs: list[Run], width: int = 80) -> str:
    """The runs in rows, in their order; a column that no run fills is left out. ``width`` is the terminal's columns."""
    drawn = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("", no_wrap=True)
    columns = {head: [cell(run) for run in runs] for head, cell in _COLUMNS.items()}
    shown = {head: cells for head, cells in columns.items() if any(text is not None for text in cells)}
    for head in shown:
        drawn.add_column(Text(head), justify="right")
    for run, cells in zip(runs, zip(*shown.values(), strict=True), strict=True):
        drawn.add_row(*(Text(text) for text in [title(run.name), *(text or _UNKNOWN for text in cells)]))
    console = new_console(width + 1)  # the last column's padding is cut off
    console.print(drawn)
    return text_of(console).strip("\n")


def title(name: str) -> str:
    return "DALI" if name == "dali" else name.replace("-", " ")


def gain_line(proof: Proof) -> str:
    measured = f"measured {proof.measured:.2f}x"
    if proof.predicted is None:
        return f"{measured} steps per second"
    low, mid, high = proof.predicted
    what = ": outside the interval" if proof.kept is False else " steps per second"
    return f"predicted {mid:.2f}x ({low:.2f}x to {high:.2f}x), {measured}{what}"


def _samples_per_s(run: Run) -> str | None:
    rate = run.outcome.samples_per_s
    return f"{rate:,.0f}" if rate is not None else None


def _step_time(run: Run) -> str | None:
    step_s = run.outcome.report.step_s
    return f"{step_s * 1e3:.1f} ms" if step_s is not None else None


def _data_wait(run: Run) -> str | None:
    measured = run.outcome.report.measured  # as the step's time
    return f"{measured.share('data_wait') * 100:.1f} %" if measured.wall_s > 0 else None


def _gpu_utilization(run: Run) -> str | None:
    found = [value for key, value in run.outcome.gpu.items() if key.endswith("/utilization")]
    return f"{found[0]:.1f} %" if found else None


def _predicted(run: Run) -> str | None:
    predicted = run.step.predicted if run.step is not None else None
    if predicted is None:
        return None
    low, high = (f"{each:.2f}" if each < 10 else f"{each:.0f}" for each in (predicted[0], predicted[2]))
    return f"{predicted[1]:.2f}x\n{low}-{high}"


def _measured(run: Run) -> str | None:
    if run.proof is None:
        return None
    outside = "\noutside" if run.proof.kept is False else ""
    return f"{run.proof.measured:.2f}x{'' if run.kept else '*'}{outside}"


_COLUMNS: Final[dict[str, Callable[[Run], str | None]]] = {
    "samples\nper s": _samples_per_s,
    "step\ntime": _step_time,
    "data\nwait": _data_wait,
    "GPU\nutil.": _gpu_utilization,
    "val.\nacc.": lambda run: f"{run.outcome.accuracy_percent:.1f} %",
    "predicted\ngain": _predicted,
    "measured\ngain": _measured,
}
