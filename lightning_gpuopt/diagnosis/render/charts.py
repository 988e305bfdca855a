"""Charts of the page as SVG shapes in percent of a chart's width and height; ``var(--...)`` is the page's colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.diagnosis.compare import Comparison
from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.diagnosis.render import wording
from lightning_gpuopt.measurements.phases import PHASES, StepTimes

# okabe and Ito's six colours (https://jfly.uni-koeln.de/color/) and five more, apart under any colour blindness
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
_UNKNOWN_PHASE: Final = "#888888"
_INK: Final = "var(--ink)"
_PAPER: Final = "var(--paper)"
_MAX_TICKS: Final = 6
_TIME_UNITS: Final = (("hours", 3600), ("minutes", 60), ("seconds", 1))
_HISTOGRAM_TOP, _HISTOGRAM_BOTTOM, _OUTLIERS_TOP = 26.0, 86.0, 92.0
_BARS: Final = ((10.0, 42.0), (58.0, 90.0))


@dataclass(frozen=True)
class Shape:
    """A path of a chart, with attributes as in SVG."""

    path: str  # as in SVG's ``d``
    title: str = ""  # shown beside the mouse
    fill: str = "none"
    stroke: str = "none"
    width_px: float = 1.0
    dash: str = "none"


@dataclass(frozen=True)
class Chart:
    """A chart and what the page needs to draw it."""

    name: str  # id of its element
    alt: str  # what it shows, for those who cannot see it
    height_px: int
    shapes: Sequence[Shape]  # drawn in this order
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, float, str]] = ()  # labels in the chart: place from the left and from the top, text
    legend: Sequence[tuple[str, str]] = ()  # names and colours
    x_title: str = ""
    grid: bool = True  # whether lines are drawn at the ticks on the left


def color_of(phase: str) -> str:
    return PHASE_COLORS.get(phase, _UNKNOWN_PHASE)


def timeline_chart(report: RunRecord) -> Chart | None:
    """Where the time went over the run, stretch by stretch, with the GPU's utilization over it where it is known."""
    stretches = [stretch for stretch in report.timeline if stretch.wall_s > 0]
    if not stretches:
        return None
    begin_s, end_s = stretches[0].start_s, stretches[-1].start_s + stretches[-1].wall_s
    edges = [100 * (each.start_s - begin_s) / (end_s - begin_s) for each in stretches] + [100.0]
    names = _in_order({phase for stretch in stretches for phase, seconds in stretch.phases.items() if seconds})
    below = [0.0] * len(stretches)
    shapes = []
    for name in names:
        above = [low + 100 * each.share(name) for low, each in zip(below, stretches, strict=True)]
        outline = f"{_steps(edges, above)}{_steps(edges, below, back=True)}Z"
        shapes.append(Shape(outline, name, fill=color_of(name)))
        below = above
    alt = f"Share of each phase in wall time over {wording.duration(report.wall_s)}, in {len(stretches)} stretches."
    legend = [(name, color_of(name)) for name in names]
    known = [each.gpu_utilization for each in stretches if each.gpu_utilization is not None]
    if known:
        line, goes_on = "", False
        for at, each in enumerate(stretches):
            if each.gpu_utilization is not None:
                on = "V" if goes_on else f"M{edges[at]:.2f} "
                line += f"{on}{100 - each.gpu_utilization:.2f}H{edges[at + 1]:.2f}"
            goes_on = each.gpu_utilization is not None
        shapes += [Shape(line, stroke=_PAPER, width_px=3.5), Shape(line, "GPU utilization", stroke=_INK, width_px=1.5)]
        legend.append(("GPU utilization", _INK))
        alt += f" GPU utilization between {min(known):.0f} and {max(known):.0f} %."
    unit, unit_s = next((unit, unit_s) for unit, unit_s in _TIME_UNITS if end_s >= 2 * unit_s or unit_s == 1)
    ticks = [(100 * (tick * unit_s - begin_s) / (end_s - begin_s), f"{tick:g}") for tick in _round(end_s / unit_s)]
    return Chart(
        *("timeline", alt, 300, shapes, [tick for tick in ticks if tick[0] >= 0]),
        [(100.0 - share, f"{share} %") for share in (0, 25, 50, 75, 100)],
        legend=legend,
        x_title=f"{unit} into the run",
    )


def step_time_chart(report: RunRecord) -> Chart | None:
    """How long steps take, on a logarithmic axis, with the outliers as ticks below."""
    times = report.step_times
    if not times.counts or times.median_s is None:
        return None
    axis_s = (times.edges_s[0] / 1.3, times.edges_s[-1] * 1.3)

    def at(seconds: float) -> float:
        return 100 * math.log(seconds / axis_s[0]) / math.log(axis_s[1] / axis_s[0])

    most = max(times.counts)
    bottom = _HISTOGRAM_BOTTOM if times.outliers else 100.0
    scale = (bottom - _HISTOGRAM_TOP) / most
    edges = [at(edge) for edge in times.edges_s]
    heights = [100 - bottom + scale * count for count in times.counts]
    area = f"{_steps(edges, heights)}V{bottom:g}H{edges[0]:.2f}Z"
    shapes = [Shape(area, fill="var(--fill)", stroke=_INK)]
    shapes += [
        Shape(
            f"M{edges[index]:.2f} {bottom:g}V{_HISTOGRAM_TOP:g}H{edges[index + 1]:.2f}V{bottom:g}Z",
            f"{count} steps took {wording.duration(times.edges_s[index])} to "
            f"{wording.duration(times.edges_s[index + 1])}",
            fill="transparent",
        )
        for index, count in enumerate(times.counts)
        if count
    ]
    marks = []
    named = {"median": (times.median_s, "none"), "p90": (times.p90_s, "6 4"), "p99": (times.p99_s, "2 3")}
    for row, (name, (seconds, dash)) in enumerate(named.items()):
        if seconds is not None:
            top = 2 + 8.0 * row
            shapes.append(Shape(f"M{at(seconds):.2f} {top:g}V{bottom:g}", stroke=_INK, width_px=2, dash=dash))
            marks.append((round(at(seconds), 2), top, f"{name} {wording.duration(seconds)}"))
    shapes += [
        Shape(
            f"M{at(each.seconds):.2f} {_OUTLIERS_TOP:g}V100",
            f"step {each.step}: {wording.duration(each.seconds)}, {each.phase}",
            stroke=color_of(each.phase),
            width_px=2,
        )
        for each in times.outliers
    ]
    return Chart(
        *("step-times", _alt_of_steps(times), 300, shapes, [(at(tick), label) for tick, label in _time_ticks(*axis_s)]),
        [(bottom - scale * count, f"{count:g}") for count in _round(most) if count == int(count)],
        marks,
        x_title="time of a step" + (", outliers below" if times.outliers else ""),
    )


def comparison_chart(comparison: Comparison) -> Chart | None:
    """Milliseconds of a step by phase, before and after, of the measured steps."""
    runs = [run.measured for run in (comparison.before, comparison.after) if run.steps]
    longest_s = max((sum(run.step_phases_s.values()) for run in runs), default=0.0)
    if len(runs) < 2 or longest_s <= 0:
        return None
    shapes = []
    names = _in_order({phase for run in runs for phase, seconds in run.phases.items() if seconds > 0})
    for run, (top, bottom) in zip(runs, _BARS, strict=True):
        left = 0.0
        for name in names:
            seconds = run.step_phases_s.get(name, 0.0)
            right = left + 100 * seconds / longest_s
            box = f"M{left:.2f} {top:g}H{right:.2f}V{bottom:g}H{left:.2f}Z"
            shapes.append(Shape(box, f"{name} {wording.duration(seconds)}", fill=color_of(name)))
            left = right
    walls = [wording.duration(run.wall_s / run.steps) for run in runs]
    return Chart(
        *("comparison", f"Wall time per step: {walls[0]} before, {walls[1]} after.", 140, shapes),
        [(tick / longest_s / 10, f"{tick:g}") for tick in _round(1e3 * longest_s)],
        [(sum(bar) / 2, name) for bar, name in zip(_BARS, ("before", "after"), strict=True)],
        legend=[(name, color_of(name)) for name in names],
        x_title="milliseconds per step",
        grid=False,
    )


def _steps(edges: Sequence[float], heights: Sequence[float], *, back: bool = False) -> str:
    """A line from edge to edge at so many percent from the bottom; ``back``: on from another, from right to left."""
    points = [(edges[at], edges[at + 1], 100 - height) for at, height in enumerate(heights)]
    if back:
        return "".join(f"V{y:.2f}H{left:.2f}" for left, _, y in reversed(points))
    return f"M{points[0][0]:.2f} {points[0][2]:.2f}" + "".join(f"V{y:.2f}H{right:.2f}" for _, right, y in points)


def _round(most: float) -> list[float]:
    """Round numbers from 0 to so many, at most six."""
    decade = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    step = next(step for step in (decade / 5, decade / 2, decade, 2 * decade) if most / step < _MAX_TICKS)
    return [round(number * step, 10) for number in range(int(most / step + 1e-9) + 1)]


def _time_ticks(low_s: float, high_s: float) -> Iterable[tuple[float, str]]:
    """Round ticks in units that people read, as many as fit on a phone, and their labels."""
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1,)):
        ticks = [step * 10.0**decade for decade in range(-6, 6) for step in steps]
        ticks = [tick for tick in ticks if low_s <= tick <= high_s]
        if len(ticks) <= _MAX_TICKS:
            break
    every = -(-len(ticks) // _MAX_TICKS)
    return [(tick, wording.duration(tick)) for tick in ticks[::every]]


def _alt_of_steps(times: StepTimes) -> str:
    parts = {"median": times.median_s, "p90": times.p90_s, "p99": times.p99_s, "slowest": times.slowest_s}
    known = ", ".join(f"{name} {wording.duration(value)}" for name, value in parts.items() if value is not None)
    return f"Distribution of {sum(times.counts)} step times: {known}; {times.outlier_count} outliers."


def _in_order(phases: set[str]) -> Sequence[str]:
    return [phase for phase in PHASES if phase in phases] + sorted(phases - set(PHASES))
