"""The report as a page: one file that needs nothing else, neither a network nor a server."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from inspect import isfunction
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lightning_gpuopt.diagnosis.causes.table import cause_of
from lightning_gpuopt.diagnosis.compare import Comparison, compare
from lightning_gpuopt.diagnosis.record import RunRecord
from lightning_gpuopt.diagnosis.render import wording
from lightning_gpuopt.diagnosis.render.charts import Chart, color_of, comparison_chart, step_time_chart, timeline_chart

_PACKAGE: Final = "lightning_gpuopt.diagnosis.render"
_FOLDER: Final = "page"


def render_html(report: RunRecord, baseline: RunRecord | None = None) -> str:
    """A report as one page that loads nothing else (a content security policy), all of its text escaped."""
    comparison = compare(baseline, report) if baseline is not None else None
    page: str = (
        _environment()
        .get_template("page.html")
        .render(
            report=report,
            meaning=cause_of(report.verdict).meaning,
            comparison=comparison,
            key_numbers=_key_numbers(report),
            outlier_rows=_outlier_rows(report),
            charts=_charts(report, comparison),
            css=_own("page.css"),
            js=_own("page.js"),
        )
    )
    return page


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(_PACKAGE, _FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: each for name, each in vars(wording).items() if isfunction(each)}
    environment.filters |= {"unbroken": _unbroken, "color": color_of}
    return environment


def _unbroken(cell: str) -> str:
    """A table's cell that is wrapped before a bracket only."""
    return cell.replace(" ", "\u00a0").replace("\u00a0(", " (")


def _own(name: str) -> Markup:
    return Markup((files(_PACKAGE) / _FOLDER / name).read_text(encoding="utf-8"))


def _charts(report: RunRecord, comparison: Comparison | None) -> dict[str, Chart]:
    charts = [timeline_chart(report), step_time_chart(report)]
    if comparison is not None:
        charts.append(comparison_chart(comparison))
    return {chart.name: chart for chart in charts if chart is not None}


def _key_numbers(report: RunRecord) -> list[tuple[str, str]]:
    """What stands in the tiles; a number that is not known has none."""
    numbers = [("Steps", f"{report.steps:,}"), ("Run", wording.duration(report.wall_s))]
    if report.step_s is not None:
        part = f" ({part})" if (part := wording.measured_part(report)) else ""
        numbers.append((f"Time of a step{part}", wording.duration(report.step_s)))
    measured = wording.time_bases(report)[0][1]
    if measured.wall_s > 0:
        numbers.append(("Waiting for data", wording.percent(measured.share("data_wait"))))
        if report.gpu_idle_s is not None:
            numbers.append(("GPU idle", wording.percent(min(report.gpu_idle_s / measured.wall_s, 1.0))))
    if report.headroom is not None:
        numbers.append(("Headroom in a step", wording.percent(report.headroom)))
    return numbers


def _outlier_rows(report: RunRecord) -> list[tuple[str, ...]]:
    return [
        (
            f"{each.step:,}",
            wording.duration(each.at_s),
            wording.duration(each.seconds),
            each.phase,
            wording.duration(each.phase_s),
        )
        for each in report.step_times.outliers
    ]
