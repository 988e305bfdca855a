"""The charts of the page: numbers from a report in, plotly figures out. ``var(--...)`` is the page's colour."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import plotly.graph_objects as go

from lightning_gpuopt.diagnosis.compare import Comparison
from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.diagnosis.render import wording
from lightning_gpuopt.measurements.phases import PHASES, StepTimes

PHASE_COLORS: Final[Mapping[str, str]] = {
    "data_wait": "#d55e00",
    "transfer": "#e69f00",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "optimizer": "#009e73",
    "callbacks": "#cc79a7",
    "logging": "#a55aff",
    "validation": "#4b00e1",
    "checkpoint": "#961e00",
    "epoch_setup": "#693c5a",
    "other": "#c3c3a5",
}
"""Six colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), and five that stay apart from them and from each
other under every kind of colour blindness."""

_UNKNOWN_PHASE: Final = "#888888"
_INK: Final = "var(--ink)"
_PAPER: Final = "var(--paper)"
_GRID: Final = "var(--grid)"
_LEGEND: Final = {"orientation": "h", "yanchor": "top", "traceorder": "normal"}
_ROW_PX: Final = 28
_MAX_TICKS: Final = 7
_TIME_UNITS: Final = (("hours", 3600), ("minutes", 60), ("seconds", 1))


@dataclass(frozen=True)
class Chart:
    """A chart and what the page needs to place it.

    Attributes:
        name: id of its element.
        alt: what it shows, for those who cannot see it.
        height_px: its height.
        figure: plotly's ``data`` and ``layout``.
    """

    name: str
    alt: str
    height_px: int
    figure: dict[str, Any]


def color_of(phase: str) -> str:
    """The colour of a phase, the same everywhere."""
    return PHASE_COLORS.get(phase, _UNKNOWN_PHASE)


def timeline_chart(report: RunRecord) -> Chart | None:
    """Where the time went over the run, stretch by stretch, with the GPU's utilization over it where it is known."""
    stretches = [stretch for stretch in report.timeline if stretch.wall_s > 0]
    if not stretches:
        return None
    # A stretch is drawn from its beginning to the next one's; the last value again, at the end of the last stretch.
    ends = [*stretches, stretches[-1]]
    edges_s = [stretch.start_s for stretch in stretches] + [stretches[-1].start_s + stretches[-1].wall_s]
    unit, unit_s = next((unit, unit_s) for unit, unit_s in _TIME_UNITS if edges_s[-1] >= 2 * unit_s or unit_s == 1)
    times = [round(edge_s / unit_s, 4) for edge_s in edges_s]
    figure = go.Figure()
    for phase in _in_order({phase for stretch in stretches for phase, seconds in stretch.phases.items() if seconds}):
        shares = [round(100 * stretch.phases.get(phase, 0.0) / stretch.wall_s, 2) for stretch in ends]
        figure.add_scatter(
            x=times,
            y=shares,
            name=html.escape(phase),
            stackgroup="phases",
            mode="lines",
            line={"shape": "hv", "width": 0},
            fillcolor=color_of(phase),
            hovertemplate="%{y:.1f} %",
        )
    alt = f"Share of each phase in wall time over {wording.duration(report.wall_s)}, in {len(stretches)} stretches."
    utilization = [stretch.gpu_utilization for stretch in ends]
    known = [value for value in utilization if value is not None]
    if known:
        line = {"x": times, "y": utilization, "mode": "lines", "name": "GPU utilization"}
        figure.add_scatter(
            **line, line={"shape": "hv", "width": 3.5, "color": _PAPER}, showlegend=False, hoverinfo="skip"
        )
        figure.add_scatter(**line, line={"shape": "hv", "width": 1.5, "color": _INK}, hovertemplate="%{y:.0f} %")
        alt += f" GPU utilization between {min(known):.0f} and {max(known):.0f} %."
    figure.update_layout(hovermode="x", legend=_LEGEND | {"y": -0.18})
    figure.update_xaxes(title={"text": f"{unit} into the run", "standoff": 8}, range=[times[0], times[-1]])
    figure.update_yaxes(range=[0, 100], ticksuffix=" %")
    return _chart("timeline", alt, 440, figure)


def step_time_chart(report: RunRecord) -> Chart | None:
    """How long steps take, on a logarithmic axis, with the outliers as ticks below."""
    times = report.step_times
    if not times.counts or times.median_s is None:
        return None
    most = max(times.counts)
    figure = go.Figure()
    figure.add_scatter(
        x=list(times.edges_s),
        y=[*times.counts, 0],
        mode="lines",
        line={"shape": "hv", "width": 1, "color": _INK},
        fill="tozeroy",
        fillcolor="var(--fill)",
        customdata=[
            f"{wording.duration(low)} to {wording.duration(high)}"
            for low, high in zip(times.edges_s[:-1], times.edges_s[1:], strict=True)
        ],
        hovertemplate="%{y} steps took %{customdata}<extra></extra>",
    )
    axis_s = (times.edges_s[0] / 1.3, times.edges_s[-1] * 1.3)
    marks = {"median": (times.median_s, "solid"), "p90": (times.p90_s, "dash"), "p99": (times.p99_s, "dot")}
    for row, (name, (seconds, dash)) in enumerate(marks.items()):
        if seconds is not None:
            figure.add_scatter(**_mark(name, seconds, dash, most * (1.32 - 0.12 * row), axis_s))
    outliers = times.outliers
    if outliers:
        figure.add_scatter(
            x=[outlier.seconds for outlier in outliers],
            y=[0] * len(outliers),
            yaxis="y2",
            mode="markers",
            marker={
                "symbol": "line-ns",
                "size": 16,
                "line": {"width": 2, "color": [color_of(outlier.phase) for outlier in outliers]},
            },
            customdata=[
                f"step {each.step}: {wording.duration(each.seconds)}, {html.escape(each.phase)}" for each in outliers
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    figure.update_layout(
        showlegend=False,
        xaxis={
            "type": "log",
            "range": [math.log10(end) for end in axis_s],
            "title": {"text": "time of a step" + (", outliers below" if outliers else "")},
            **_time_ticks(*axis_s),
            "anchor": "y2" if outliers else "y",
        },
        yaxis={"range": [0, most * 1.4], "domain": [0.14 if outliers else 0, 1], "title": {"text": "steps"}},
        yaxis2={"domain": [0, 0.08], "visible": False, "fixedrange": True},
    )
    return _chart("step-times", _alt_of_steps(times), 380, figure)


def phase_chart(report: RunRecord) -> Chart | None:
    """Seconds by phase, of the measured steps where they are not the run, the longest on top."""
    name, stretch = wording.time_bases(report)[0]
    phases = sorted((item for item in stretch.phases.items() if item[1] > 0), key=lambda item: item[1])
    if not phases or stretch.wall_s <= 0:
        return None
    texts = [f"{wording.duration(seconds)} ({wording.percent(stretch.share(phase))})" for phase, seconds in phases]
    figure = go.Figure()
    figure.add_bar(
        x=[seconds for _, seconds in phases],
        y=[html.escape(phase) for phase, _ in phases],
        orientation="h",
        text=texts,
        textposition="outside",
        cliponaxis=False,
        marker={"color": [color_of(phase) for phase, _ in phases]},
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    figure.update_xaxes(visible=False, range=[0, phases[-1][1] * 1.6])
    figure.update_yaxes(showgrid=False, ticksuffix="  ")
    alt = "; ".join(f"{phase} {text}" for (phase, _), text in zip(reversed(phases), reversed(texts), strict=True))
    return _chart("phases", f"Seconds by phase, {name}: {alt}.", _ROW_PX * len(phases) + 40, figure)


def comparison_chart(comparison: Comparison) -> Chart | None:
    """Milliseconds of a step by phase, before and after, of the measured steps."""
    runs = [run.measured for run in (comparison.after, comparison.before) if run.steps]
    if len(runs) < 2:
        return None
    names = ["after", "before"]
    figure = go.Figure()
    for phase in _in_order({phase for run in runs for phase, seconds in run.phases.items() if seconds > 0}):
        figure.add_bar(
            x=[1e3 * run.phases.get(phase, 0.0) / run.steps for run in runs],
            y=names,
            orientation="h",
            name=html.escape(phase),
            marker={"color": color_of(phase)},
            hovertemplate="%{x:.3s} ms",
        )
    figure.update_layout(barmode="stack", legend=_LEGEND | {"y": -0.5})
    figure.update_xaxes(title={"text": "milliseconds per step", "standoff": 8})
    figure.update_yaxes(showgrid=False, ticksuffix="  ")
    walls = [wording.duration(run.wall_s / run.steps) for run in runs]
    return _chart("comparison", f"Wall time per step: {walls[1]} before, {walls[0]} after.", 300, figure)


def _chart(name: str, alt: str, height_px: int, figure: go.Figure) -> Chart:
    clear = "rgba(0,0,0,0)"
    figure.update_layout(
        template=None,
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        font={"family": "system-ui, sans-serif", "color": _INK},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        hoverlabel={"bgcolor": _PAPER, "bordercolor": _GRID, "font": {"color": _INK}},
    )
    figure.update_xaxes(gridcolor=_GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False, automargin=True)
    return Chart(name, alt, height_px, figure.to_plotly_json())


def _mark(name: str, seconds: float, dash: str, top: float, axis_s: tuple[float, float]) -> dict[str, Any]:
    """A vertical line with its name beside its top, on the side where there is room."""
    on_the_right = seconds < (axis_s[0] * axis_s[1]) ** 0.5
    return {
        "x": [seconds, seconds],
        "y": [0, top],
        "mode": "lines+text",
        "line": {"dash": dash, "width": 2, "color": _INK},
        "text": ["", f" {name} {wording.duration(seconds)} "],
        "textposition": "middle right" if on_the_right else "middle left",
        "hoverinfo": "skip",
    }


def _time_ticks(low_s: float, high_s: float) -> dict[str, Any]:
    """Round ticks in units that people read, as many as fit on a phone."""
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1,)):
        ticks = [step * 10.0**decade for decade in range(-6, 6) for step in steps]
        ticks = [tick for tick in ticks if low_s <= tick <= high_s]
        if len(ticks) <= _MAX_TICKS:
            break
    return {"tickvals": ticks, "ticktext": [wording.duration(tick) for tick in ticks]}


def _alt_of_steps(times: StepTimes) -> str:
    parts = {"median": times.median_s, "p90": times.p90_s, "p99": times.p99_s, "slowest": times.slowest_s}
    known = ", ".join(f"{name} {wording.duration(value)}" for name, value in parts.items() if value is not None)
    return f"Distribution of {sum(times.counts)} step times: {known}; {times.outlier_count} outliers."


def _in_order(phases: set[str]) -> Sequence[str]:
    return [phase for phase in PHASES if phase in phases] + sorted(phases - set(PHASES))
