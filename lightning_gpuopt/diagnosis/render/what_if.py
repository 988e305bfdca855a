"""Forecasts, on one GPU and on several, as text for the terminal."""

from __future__ import annotations

from typing import Final

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_gpuopt.diagnosis.render import wording
from lightning_gpuopt.diagnosis.render.text import new_console, text_of
from lightning_gpuopt.diagnosis.scaling import LinkForecast, Scaling
from lightning_gpuopt.diagnosis.what_if import Forecast
from lightning_gpuopt.measurements.loader_costs import Interval

_MIB: Final = 1024 * 1024
_LIMITS: Final = {
    "step": "the step's own work",
    "workers": "the workers",
    "cpus": "the CPUs",
    "handing_over": "handing batches over",
    "order": "slow batches, since they come in order",
    "training_process": "loading in the training process",
    "reduction": "the reduction of gradients",
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
    for column in ("measured", "what if"):
        table.add_column(column, justify="right")
    for name, value in forecast.after.items():
        before = forecast.before.get(name)
        table.add_row(name, wording.number(before) if before is not None else "–", wording.number(value))
    low_s, mid_s, high_s = forecast.step_s
    interval = f"{wording.duration(mid_s)} ({wording.duration(low_s)} to {wording.duration(high_s)})"
    table.add_row("step time", wording.duration(forecast.measured_step_s), interval)
    table.add_row("  simulated", wording.duration(forecast.simulated_step_s), "")
    table.add_row("limited by", _LIMITS[forecast.limit_before], _LIMITS[forecast.limit])
    return table


def render_scaling(scaling: Scaling, width: int = 80) -> str:
    console = new_console(width)
    console.print(Text(_run(scaling)))
    for each in scaling.links:
        console.print(Text(f"{scaling.ranks} GPUs, {_link(each)}:"))
        for line in _over(scaling.ranks, each):
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    for note in scaling.notes:
        console.print(Text(f"Note: {note}"))
    return text_of(console)


def _run(scaling: Scaling) -> str:
    buckets = "1 bucket" if scaling.buckets == 1 else f"{scaling.buckets} buckets"
    mib = wording.number(scaling.gradient_bytes / _MIB)
    cpus = ""
    if scaling.cpus_per_rank is not None:
        cpus = f", {wording.number(scaling.cpus_per_rank)} CPUs for each of {scaling.ranks} ranks of a machine"
    return (
        f"One GPU, measured: a step of {wording.duration(scaling.measured_step_s)}, of it "
        f"{wording.duration(scaling.own_step_s)} its own work; {mib} MiB of gradients in {buckets}"
        f"{cpus}."
    )


def _link(forecast: LinkForecast) -> str:
    link = forecast.link
    low, mid, high = (wording.number(each) for each in link.gb_per_s)
    assumed = "" if low == high else f" assumed ({low} to {high})"
    return f"{link.name}, {mid} GB/s{assumed}{', a machine for each GPU' if link.own_cpus else ''}"


def _over(ranks: int, forecast: LinkForecast) -> list[str]:
    low_s, mid_s, high_s = (wording.duration(each) for each in forecast.step_s)
    slower = ": slower than one GPU" if forecast.speedup[1] < 1 else ""
    return [
        f"{wording.gain(forecast.speedup)} the samples per second, {forecast.linear_percent:.0f} % of linear{slower}",
        f"a step of {mid_s} ({low_s} to {high_s}), limited by {_LIMITS[forecast.limit]}",
        f"{ranks} GPUs are slower than one below a step of {_about(forecast.slower_below_s)}",
    ]


def _about(seconds: Interval) -> str:
    low, mid, high = (wording.duration(each) for each in seconds)
    return f"about {mid} ({low} to {high})"
