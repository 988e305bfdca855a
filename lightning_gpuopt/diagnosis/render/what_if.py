"""A forecast as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lightning_gpuopt.diagnosis.render import wording
from lightning_gpuopt.diagnosis.render.text import new_console, text_of

if TYPE_CHECKING:
    from lightning_gpuopt.diagnosis.what_if import Forecast

LIMITS: Final = {
    "step": "the step's own work",
    "workers": "the workers",
    "cpus": "the CPUs",
    "handing_over": "handing batches over",
    "order": "slow batches, since they come in order",
    "training_process": "loading in the training process",
}


def render_forecast(forecast: Forecast, width: int = 80) -> str:
    console = new_console(width)
    console.print(_table(forecast))
    console.print(Text(f"Expected: {wording.gain(forecast.speedup)} the samples per second"))
    for note in forecast.notes:
        console.print(Text(f"Note: {note}"))
    return text_of(console)


def _table(forecast: Forecast) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for column in ("as it was", "what if"):
        table.add_column(column, justify="right")
    for name, value in forecast.after.items():
        before = forecast.before.get(name)
        table.add_row(name, wording.number(before) if before is not None else "–", wording.number(value))
    low_s, mid_s, high_s = forecast.step_s
    interval = f"{wording.duration(mid_s)} ({wording.duration(low_s)} to {wording.duration(high_s)})"
    table.add_row("step time", wording.duration(forecast.measured_step_s), interval)
    table.add_row("  simulated", wording.duration(forecast.simulated_step_s), "")
    table.add_row("limited by", LIMITS[forecast.limit_before], LIMITS[forecast.limit])
    return table
