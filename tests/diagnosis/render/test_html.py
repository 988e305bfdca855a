"""The page: whole, self-contained, escaped, and every chart with the report's own numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lightning_gpuopt.diagnosis.causes.table import cause_of
from lightning_gpuopt.diagnosis.compare import compare
from lightning_gpuopt.diagnosis.record import Change
from lightning_gpuopt.diagnosis.render.charts import (
    PHASE_COLORS,
    color_of,
    comparison_chart,
    step_time_chart,
    timeline_chart,
)
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.diagnosis.report import Finding, HotSpots, StallReport, Stretch
from lightning_gpuopt.measurements.code_location import CodeLocation
from lightning_gpuopt.measurements.phases import PHASES
from tests.diagnosis.reports import after, before, largest, phases

HOSTILE = "</script><script>alert('x')</script>&\"<b>"


class Page(HTMLParser):
    """A page as its reader sees it: elements with their attributes, scripts, and the text of the rest."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self.scripts[-1] += data
        elif inside != "style" and "svg" not in self._open and data.strip():
            self.texts.append(data.strip().replace("\N{NO-BREAK SPACE}", " "))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if attributes.get("class") == name]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render_html(before()))


@pytest.fixture(scope="module")
def comparison_page() -> Page:
    return Page(render_html(after(), baseline=before()))


def headings(page: Page) -> list[str]:
    ids = [attributes.get("id") or "" for attributes in page.all("h2")]
    return [name.removeprefix("h-") for name in ids if name not in ("h-kernels", "h-hints", "h-risks")]


def rows_after(page: Page, *head: str) -> Iterator[str]:
    """The texts that follow a table's head."""
    starts = range(len(page.texts) - len(head) + 1)
    start = next(number for number in starts if page.texts[number : number + len(head)] == list(head))
    return iter(page.texts[start + len(head) :])


def test_the_page_goes_from_the_verdict_to_the_versions(page: Page, comparison_page: Page) -> None:
    assert page.texts[:5] == [
        "slow_storage | stall report",
        "Stall report ·",
        "slow_storage",
        "Slow storage",
        "The loader spends most of its time waiting for storage.",
    ]
    order = ["proofs", "numbers", "phases", "findings", "timeline", "step-times", "notes", "environment"]
    assert headings(page) == order
    assert headings(comparison_page) == ["comparison", "proofs", "numbers", "phases", "findings"]


def test_what_was_changed_comes_first_and_then_what_is_left() -> None:
    kept = Change("num_workers", 1, 6, (3.5, 4.0, 4.5), 3.9, kept=True)
    tried = Change("prefetch_factor", 2, 8, None, 1.0, kept=False, why="no gain")
    page = Page(render_html(replace(before(), changes=[kept, tried])))
    start = page.texts.index("Changed: num_workers 1 → 6 (3.9x)")
    assert page.texts[start + 1] == "Changes while training ran"
    assert headings(page)[:5] == ["changes", "proofs", "left", "numbers", "phases"]
    assert page.texts[page.texts.index("Now: Slow storage") + 1] == cause_of("slow_storage").meaning
    assert "No change was kept" in Page(render_html(replace(before(), changes=[tried]))).texts
    lines = str(replace(before(), changes=[kept, tried])).splitlines()
    assert lines[:3] == [
        "Changes while training ran:",
        "  num_workers 1 → 6: predicted 4.0x (3.5x to 4.5x), measured 3.9x, kept",
        "  prefetch_factor 2 → 8: measured 1.00x, undone (no gain)",
    ]
    starts = ("To have them", "main_process_loading: num_workers=2", "Verdict: ", "1. ", "2. ", " where the time went")
    found = [next(number for number, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert found == sorted(found)


def test_it_loads_nothing(page: Page) -> None:
    assert all(attributes.keys().isdisjoint({"src", "href", "srcset"}) for _, attributes in page.elements)
    assert {"link", "img", "iframe"}.isdisjoint(tag for tag, _ in page.elements)
    policy = next(meta for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'")
    style = render_html(before()).partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in style
    assert "url(" not in style
    assert len(page.scripts) == 1


def test_it_is_made_for_phones_and_for_the_dark(page: Page) -> None:
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    style = render_html(after()).partition("<style>")[2].partition("</style>")[0]
    assert "@media (prefers-color-scheme: dark)" in style
    assert len(page.with_class("scroll")) == len(page.all("table"))


def test_every_chart_says_what_it_shows(page: Page, comparison_page: Page) -> None:
    assert {chart["id"]: chart["aria-label"] for chart in page.with_class("chart")} == {
        "timeline": "Share of each phase in wall time over 10 s, in 2 stretches. GPU utilization between 40 and 40 %.",
        "step-times": (
            "Distribution of 100 step times: median 100 ms, p90 110 ms, p99 300 ms, slowest 400 ms; 2 outliers."
        ),
    }
    (comparison,) = comparison_page.with_class("chart")
    assert comparison["aria-label"] == "Wall time per step: 100 ms before, 50 ms after."
    assert {chart.get("role") for chart in page.with_class("chart")} == {"img"}


def test_key_numbers(page: Page) -> None:
    assert list(itertools.islice(rows_after(page, "Key numbers"), 12)) == [
        *("Steps", "100", "Run", "10 s", "Time of a step", "100 ms", "Waiting for data", "60 %"),
        *("GPU idle", "55 %", "Headroom in a step", "62 %"),
    ]


def test_what_is_not_known_is_absent() -> None:
    page = Page(render_html(StallReport("compute_bound", 0.0, {}, [])))
    assert headings(page) == ["numbers", "findings"]
    assert list(rows_after(page, "Key numbers")) == [
        *("Steps", "0", "Run", "0 s", "Findings", "Nothing takes enough of the time to be called a stall."),
    ]
    assert page.all("svg") == []


def test_a_finding_has_advice_settings_prediction_and_folded_evidence(page: Page) -> None:
    assert list(itertools.islice(rows_after(page, "Findings"), 19)) == [
        *("1. Slow storage", "60 % of the time", "More workers read more at once: num_workers=6."),
        *("DataLoader(..., num_workers=6, persistent_workers=True)", "Copy"),
        *("Predicted speed-up:", "2.1x (1.8x to 2.4x)", "time per step 60 ms, workers busy 97.2 %"),
        *("All evidence (3)", "Evidence", "Value", "time per step", "60 ms", "num workers", "2"),
        *("workers busy", "97.2 %", "2. Callback", "12 % of the time"),
    ]
    assert len(page.with_class("copy")) == 1
    assert len(page.all("details")) == 3


def test_at_the_top_are_the_date_the_device_and_the_command() -> None:
    known = {"device": "cpu (x86_64)", "date": "2026-11-27 18:00:00 +0000", "command": "python train.py --lr 1"}
    assert Page(render_html(replace(before(), environment=known))).texts[2:6] == [
        *("slow_storage", "· 2026-11-27 18:00:00 +0000 · cpu (x86_64)", "python train.py --lr 1", "Slow storage")
    ]


def test_a_line_of_code_is_shown_whole_on_a_phone() -> None:
    path = f"/home/{'long/' * 30}augment.py"
    spots = HotSpots("slow_storage", "worker 0", 3.0, 300, (CodeLocation("blur", path, 48, 3.0, "Blur"),))
    text = render_html(replace(before(), hot_spots=[spots]))
    assert f"<li>100 % <strong>blur</strong> in Blur <code>{path}:48</code></li>" in text
    scrolled = text.partition('<ul class="places">')[0].rpartition('class="scroll"')[2]
    assert "</table>" in scrolled  # the last one that scrolls is closed


def test_what_a_step_computes(page: Page) -> None:
    assert list(itertools.islice(rows_after(page, "What a step computes"), 17)) == [
        "Kernels of a step, 80 ms: elementwise 60 %, matmul 30 %, copy 10 %. 10 are under 10 µs (2.0 % of the time). "
        "40 % could not be attributed to a module.",
        *("Name", "Kind", "Share", "Calls a step", "Module"),
        *("void at::native::vectorized<4, <values>>", "elementwise", "60 %", "12", "net.0"),
        *("ampere_sgemm_128x64_tn", "matmul", "30 %", "2"),
        "Notes",
        "[nothing] could be read",
    ]


def test_predicted_beside_measured(page: Page, comparison_page: Page) -> None:
    assert next(rows_after(page, "Advice that was followed")) == (
        "main_process_loading: num_workers=2: predicted 1.20x (1.10x to 1.30x), measured 1.5x, outside the interval"
    )
    assert next(rows_after(comparison_page, "Advice that was followed")) == (
        "slow_storage: num_workers=6, persistent_workers=True: predicted 2.1x (1.8x to 2.4x), measured 2.0x "
        "(100 steps before, 100 after)"
    )


def test_a_proof_that_the_report_has_already_is_there_once() -> None:
    report = after().with_proofs(compare(before(), after()).proofs)
    texts = Page(render_html(report, baseline=before())).texts
    assert sum("predicted 2.1x" in text for text in texts) == 1


def test_where_nothing_is_left_to_gain_it_says_so(page: Page, comparison_page: Page) -> None:
    line = "Nothing is left to gain: 98 % of a step is its own work."
    assert line in comparison_page.texts
    assert line not in page.texts


def test_before_and_after(comparison_page: Page) -> None:
    rows = rows_after(comparison_page, "Per step (share of time)", "Before", "After")
    assert list(itertools.islice(rows, 15)) == [
        *("step time", "100 ms", "50 ms", "steps per second", "10", "20"),
        *("forward", "30 ms (30 %)", "39 ms (78 %)", "data_wait", "60 ms (60 %)", "1 ms (2.0 %)"),
        *("other", "10 ms (10 %)", "10 ms (20 %)"),
    ]
    chart = comparison_chart(compare(before(), after()))
    assert chart is not None
    assert [(shape.title, shape.path) for shape in chart.shapes] == [
        ("data_wait 60 ms", "M0.00 10H60.00V42H0.00Z"),
        ("forward 30 ms", "M60.00 10H90.00V42H60.00Z"),
        ("other 10 ms", "M90.00 10H100.00V42H90.00Z"),
        ("data_wait 1 ms", "M0.00 58H1.00V90H0.00Z"),
        ("forward 39 ms", "M1.00 58H40.00V90H1.00Z"),
        ("other 10 ms", "M40.00 58H50.00V90H40.00Z"),
    ]
    assert (chart.x_ticks[-1], chart.y_ticks) == ((pytest.approx(100), "100"), [(26.0, "before"), (74.0, "after")])


def test_the_timeline_is_stacked_shares_with_the_gpu_over_them(page: Page) -> None:
    chart = timeline_chart(before())
    assert chart is not None
    *stack, halo, gpu = chart.shapes
    assert [(shape.title, shape.path) for shape in stack] == [
        ("data_wait", "M0.00 40.00V40.00H50.00V40.00H100.00V100.00H50.00V100.00H0.00Z"),
        ("forward", "M0.00 10.00V10.00H50.00V10.00H100.00V40.00H50.00V40.00H0.00Z"),
        ("other", "M0.00 0.00V0.00H50.00V0.00H100.00V10.00H50.00V10.00H0.00Z"),
    ]
    assert (gpu.title, gpu.path, halo.path) == ("GPU utilization", "M0.00 60.00H50.00", "M0.00 60.00H50.00")
    assert [each["d"] for each in page.all("path")][1:6] == [shape.path for shape in chart.shapes]
    labels = list(itertools.islice(rows_after(page, "The run over time"), 13))
    assert labels[:5] == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert labels[5:] == [*("0", "2", "4", "6", "8", "10"), "seconds into the run", "data_wait"]


def test_a_long_run_is_in_minutes_and_without_a_gpu_there_is_no_line() -> None:
    report = replace(after(), timeline=[Stretch(0.0, 60.0, 1, phases(forward=60.0)), Stretch(60.0, 60.0, 1, phases())])
    chart = timeline_chart(report)
    assert chart is not None
    assert [(shape.title, shape.path) for shape in chart.shapes] == [
        ("forward", "M0.00 0.00V0.00H50.00V100.00H100.00V100.00H50.00V100.00H0.00Z")
    ]
    assert (chart.x_title, chart.x_ticks[-1]) == ("minutes into the run", (100.0, "2"))


def test_the_distribution_marks_quantiles_and_outliers(page: Page) -> None:
    chart = step_time_chart(before())
    assert chart is not None
    titles = [shape.title for shape in chart.shapes]
    assert titles[1:4] == [
        *("40 steps took 80 ms to 100 ms", "58 steps took 100 ms to 120 ms", "2 steps took 120 ms to 500 ms")
    ]
    assert [label for _, _, label in chart.marks] == ["median 100 ms", "p90 110 ms", "p99 300 ms"]
    assert titles[-2:] == ["step 17: 300 ms, data_wait", "step 71: 400 ms, data_wait"]
    assert [shape.stroke for shape in chart.shapes[-2:]] == [color_of("data_wait")] * 2
    assert [shape.path.split()[0] for shape in chart.shapes[-5:]] == ["M20.60", "M24.64", "M67.20", "M67.20", "M79.40"]
    assert list(rows_after(page, "Step", "Ended at", "Took", "Slow phase", "Time in it"))[:10] == [
        *("17", "1.9 s", "300 ms", "data_wait", "250 ms", "71", "7.5 s", "400 ms", "data_wait", "360 ms")
    ]


def test_the_time_axis_has_a_few_round_ticks_whatever_its_span() -> None:
    chart, wide = step_time_chart(before()), step_time_chart(largest())
    assert chart is not None
    assert wide is not None
    assert [label for _, label in chart.x_ticks] == ["100 ms", "200 ms", "500 ms"]
    assert [label for _, label in wide.x_ticks] == ["10 µs", "1 ms", "100 ms", "10 s", "17 min"]


def test_the_longest_phase_is_on_top_of_a_table_with_bars(page: Page) -> None:
    assert list(itertools.islice(rows_after(page, "Phase", "the whole run"), 6)) == [
        *("data_wait", "6 s (60 %)", "forward", "3 s (30 %)", "other", "1 s (10 %)")
    ]
    assert [bar["style"] for bar in page.with_class("bar")] == [
        f"--share: {share}; --color: {PHASE_COLORS[phase]}"
        for phase, share in (("data_wait", 0.6), ("forward", 0.3), ("other", 0.1))
    ]


def test_a_phase_has_one_colour_everywhere() -> None:
    charts = [timeline_chart(before()), comparison_chart(compare(before(), after()))]
    seen = {name for chart in charts if chart is not None for name in chart.legend}
    assert seen - {("GPU utilization", "var(--ink)")} == {
        (phase, PHASE_COLORS[phase]) for phase in ("data_wait", "forward", "other")
    }
    assert tuple(PHASE_COLORS) == PHASES


# Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
VISION = {
    "typical": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Ottosson's Oklab: distances in it are as the eye sees them; 0.02 can just be told apart.
LMS = [[0.41222147, 0.53633254, 0.05144599], [0.21190350, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.62997870]]
LAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.97799850, -2.42859221, 0.45059371],
    [0.02590404, 0.78277177, -0.80867577],
]


@pytest.mark.parametrize("vision", VISION)
def test_phases_can_be_told_apart_by_the_colour_blind(vision: str) -> None:
    def seen(color: str) -> np.ndarray:
        srgb = np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)]) / 255
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        return LAB @ np.cbrt(LMS @ np.clip(np.array(VISION[vision]) @ linear, 0, 1))

    colors = [seen(color) for color in PHASE_COLORS.values()]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colors, 2)) > 0.06


def hostile() -> StallReport:
    report = before()
    stretch = Stretch(0.0, 10.0, 100, {HOSTILE: 10.0})
    outlier = replace(report.step_times.outliers[0], phase=HOSTILE)
    return replace(
        report,
        verdict=HOSTILE,
        phases={HOSTILE: 10.0},
        findings=[Finding(HOSTILE, 0.5, {HOSTILE: HOSTILE}, HOSTILE, {HOSTILE: HOSTILE})],
        step_times=replace(report.step_times, outliers=(outlier,)),
        proofs=[replace(report.proofs[0], cause=HOSTILE, settings={HOSTILE: HOSTILE})],
        timeline=[stretch],
        notes=[HOSTILE],
        environment={HOSTILE: HOSTILE},
    )


def test_nothing_in_a_report_becomes_part_of_the_page() -> None:
    page = Page(render_html(hostile(), baseline=hostile()))
    plain = Page(render_html(before(), baseline=before()))
    assert page.scripts == plain.scripts
    assert {"b"}.isdisjoint(tag for tag, _ in page.elements)
    assert page.texts.count(HOSTILE) >= 5


def test_the_largest_report_is_a_small_page_whose_charts_need_no_script(tmp_path: Path) -> None:
    largest().save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 500_000
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [len(page.all("svg")), "path" in page.scripts[0]] == [2, False]
    assert sum(str(each.get("d")).count("H") for each in page.all("path")) > 513 * len(PHASES)
