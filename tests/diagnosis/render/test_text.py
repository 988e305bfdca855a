"""What the terminal shows of a report, and of two."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_gpuopt.diagnosis.compare import compare
from lightning_gpuopt.diagnosis.render import wording
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.diagnosis.render.text import render_comparison, render_text
from lightning_gpuopt.diagnosis.report import Finding, StallReport
from lightning_gpuopt.measurements.phases import StepTimes
from tests.diagnosis.reports import after, before

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("measured", "step_s", "part"),
    [
        (90, 0.1, "the last 90 in 9.0 s"),
        (40, 0.05, "the last 40 in 2.0 s"),
        (1, 0.05, "the last in 0.1 s"),
        (100, 0.05, "the steps alone 5.0 s"),
        (99, 0.1, ""),
        (None, 0.05, ""),
    ],
)
def test_the_headline_says_which_steps_it_is_of_where_they_are_not_the_run(
    measured: int | None, step_s: float, part: str
) -> None:
    report = replace(before(), measured_steps=measured, step_s=step_s)
    part_, step = f"; {part}" if part else "", f"{step_s * 1e3:.1f} ms a step"
    assert render_text(report, 120).splitlines()[1] == (f"Verdict: slow_storage   (100 steps in 10.0 s{part_}, {step})")
    assert (f"Time of a step ({part})" in render_html(report)) == bool(part)


def test_the_headline_leaves_out_what_was_between_the_measured_steps() -> None:
    report = replace(before(), measured_steps=95, step_s=0.05, phases=before().phases | {"checkpoint": 4.0})
    assert "(100 steps in 10.0 s; the last 95 alone 4.8 s, 50.0 ms a step)" in render_text(report, 120)


def test_the_report() -> None:
    assert [re.sub("─+", "─", line) for line in str(before()).splitlines()] == [  # older versions of rich draw one more
        "main_process_loading: num_workers=2: predicted 1.20x (1.10x to 1.30x), measured",
        "1.5x, outside the interval",
        "Verdict: slow_storage   (100 steps in 10.0 s, 100.0 ms a step)",
        "1. slow_storage: 60 % of the time",
        "   More workers read more at once: num_workers=6.",
        "   (time per step 60 ms, workers busy 97.2 %)",
        "   predicted: 2.1x (1.8x to 2.4x)",
        "2. callback: 12 % of the time",
        "   Slow.on_train_batch_end holds up training.",
        "   (callback Slow)",
        "",
        " where the time went   seconds    share",
        " ─",
        " data_wait                6.00   60.0 %   ██████████████████",
        " forward                  3.00   30.0 %   █████████",
        " other                    1.00   10.0 %   ███",
        "",
        "2 steps took far longer than the rest; the slowest, step 71, 400 ms. Most of",
        "them lost it in data_wait.",
        "Kernels of a step, 80 ms: elementwise 60 %, matmul 30 %, copy 10 %. 10 are under",
        "10 µs (2.0 % of the time). 40 % could not be attributed to a module.",
        "",
        " dearest                                  kind          share   a step   module",
        " ─",
        " void at::native::vectorized<4, <value…   elementwise    60 %       12   net.0",
        " ampere_sgemm_128x64_tn                   matmul         30 %        2",
        "",
        "Note: [nothing] could be read",
    ]


def test_a_report_of_nothing_has_no_table() -> None:
    assert str(StallReport("compute_bound", 0.0, {}, [])) == "Verdict: compute_bound   (0 steps in 0.0 s)"


def test_the_width_is_kept() -> None:
    lines = render_text(before(), width=50).splitlines()
    assert max(map(len, lines)) <= 50
    assert len(lines) > len(render_text(before(), width=80).splitlines())


def test_where_nothing_is_left_to_gain_it_says_so() -> None:
    assert "Nothing is left to gain: 98 % of a step is its own work." in str(after()).splitlines()
    assert "left to gain" not in str(replace(after(), headroom=0.03))
    assert "left to gain" not in str(replace(after(), headroom=None))
    assert "left to gain" not in str(replace(after(), findings=[Finding("checkpoint", 0.4, {}, "")]))


def test_one_outlier_is_told_of_as_one() -> None:
    times = before().step_times
    alone = replace(after(), step_times=replace(times, outliers=times.outliers[:1], outlier_count=1))
    line = "1 step took far longer than the rest; the slowest, step 17, 300 ms. It lost it in data_wait."
    assert wording.outlier_line(alone) == line
    assert wording.outlier_line(replace(alone, step_times=StepTimes())) is None


def test_two_runs_side_by_side() -> None:
    assert render_comparison(compare(before(), after())).splitlines() == [
        "Verdict: slow_storage → compute_bound",
        "Measured speed-up: 2.0x",
        "Measured: 100 steps before, 100 steps after (without warm-up, since the last",
        "change).",
        "",
        " per step (share of time)         before          after",
        " ──────────────────────────────────────────────────────",
        " step time                        100 ms          50 ms",
        " steps per second                     10             20",
        " forward                    30 ms (30 %)   39 ms (78 %)",
        " data_wait                  60 ms (60 %)   1 ms (2.0 %)",
        " other                      10 ms (10 %)   10 ms (20 %)",
        "",
        "slow_storage: num_workers=6, persistent_workers=True: predicted 2.1x (1.8x to",
        "2.4x), measured 2.0x (100 steps before, 100 after)",
    ]


@pytest.mark.parametrize(("steps", "enough"), [(29, False), (30, True)])
def test_a_gain_of_too_few_steps_is_no_figure(steps: int, enough: bool) -> None:
    comparison = compare(before(), replace(after(), measured_steps=steps))
    (proof,) = comparison.proofs
    assert (comparison.speedup, proof.kept) == ((2.0, True) if enough else (None, None))
    sides = f"100 steps before, {steps} after"
    figure = f"2.0x ({sides})" if enough else f"not enough steps ({sides})"
    line = "Measured speed-up: 2.0x" if enough else f"Measured speed-up: not enough steps ({sides}, 30 each are needed)"
    shown = render_comparison(comparison, 200).splitlines()
    assert shown[1] == line
    assert shown[-1].endswith(f", measured {figure}")
    page = render_html(replace(after(), measured_steps=steps), baseline=before())
    assert f"<strong>{line}</strong>" in page
    assert f", measured {figure}</li>" in page
    assert ("2.0x" in page) is enough


def test_a_comparison_of_what_was_not_measured() -> None:
    nothing = StallReport("compute_bound", 0.0, {}, [])
    assert render_comparison(compare(nothing, nothing)).splitlines() == [
        "Verdict: compute_bound → compute_bound",
        "Measured: none of 0 steps before, none of 0 steps after (without warm-up, since",
        "the last change).",
        "",
        " per step (share of time)    before     after",
        " ────────────────────────────────────────────",
        " step time                  unknown   unknown",
        " steps per second           unknown   unknown",
        "",
        "None of the settings advised before is used in the run after.",
    ]


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("ms_per_step", 60.04, ("time per step", "60 ms")),
        ("step_ms", 1234.5678, ("step", "1235 ms")),
        ("gpu_idle_ms_per_step", 0.012345, ("gpu idle per step", "0.0123 ms")),
        ("epoch_setup_s_per_epoch", 1.5, ("epoch setup per epoch", "1.5 s")),
        ("batch_mib", 36.7891, ("batch", "36.8 MiB")),
        ("sm_clock_mhz_max", 1980, ("sm clock max", "1980 MHz")),
        ("cpu_throttled_percent", 12.5, ("cpu throttled", "12.5 %")),
        ("syncs_per_step", 2.0, ("syncs per step", "2")),
        ("usable_cpus", 16.0, ("usable cpus", "16")),
        ("callback", "Slow[red]", ("callback", "Slow[red]")),
        ("gb_per_s", 1.12, ("rate", "1.12 GB/s")),
        ("swap_mib_per_s", 8.0, ("swap", "8 MiB/s")),
    ],
)
def test_evidence_has_its_unit_and_three_digits(name: str, value: float | str, fact: tuple[str, str]) -> None:
    assert wording.evidence(Finding("x", 0.5, {name: value}, "")) == [fact]


def test_the_terminal_shows_the_four_figures_that_decided_and_the_page_all() -> None:
    many = {"num_workers": 2.0, "worker_cpu_percent": 3.0, "workers_busy_percent": 97.0, "io_pressure_percent": 1.0}
    evidence = {**many, "step_ms": 80.0, "ms_per_step": 60.0, "where": "100 % read (train.py:7)"}
    report = replace(before(), findings=[Finding("slow_storage", 0.6, evidence, "Read more at once.")])
    shown = str(report).splitlines()
    assert shown[5:8] == [
        "   where: 100 % read (train.py:7)",
        "   (time per step 60 ms, step 80 ms, workers busy 97 %, worker cpu 3 %)",
        "",
    ]
    page = render_html(report)
    assert [what for what, _ in wording.evidence(report.findings[0]) if f">{what}<" not in page] == []


def test_of_a_cause_of_another_version_the_first_four_are_shown() -> None:
    finding = Finding("of_another_version", 0.5, {"where": "a.py:1", "a_ms": 1, "b_ms": 2, "c": 3, "d": 4, "e": 5}, "")
    assert wording.deciding_evidence(finding) == [("a", "1 ms"), ("b", "2 ms"), ("c", "3"), ("d", "4")]


class TestStandstill:
    """The line on GPU-hours."""

    FINDINGS = (
        Finding("slow_storage", 0.5, {}, ""),
        Finding("callback", 0.25, {"callback": "Slow"}, ""),
        Finding("straggler", 0.125, {}, ""),
        Finding("gpu_throttled", 0.4, {}, ""),
    )

    @pytest.fixture(autouse=True)
    def no_price(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GPUOPT_GPU_HOUR_PRICE", raising=False)

    def report(self, wall_s: float, ranks: str = "1", device: str = "cuda (NVIDIA H100)") -> StallReport:
        environment = {"device": device, "ranks": ranks}
        return replace(before(), wall_s=wall_s, findings=list(self.FINDINGS), environment=environment)

    @pytest.mark.parametrize(
        ("wall_s", "ranks", "line"),
        [
            (14400.0, "1", "The GPU idled for 3 GPU-hours: slow_storage 2, callback Slow 1."),
            (
                14400.0,
                "4",
                "The GPUs idled for 13.5 GPU-hours: slow_storage 8, callback Slow 4, straggler 1.5.",
            ),
            (240.0, "1", "The GPU idled for 3 GPU-minutes: slow_storage 2, callback Slow 1."),
            (79.0, "1", None),
        ],
    )
    def test_it_sums_up_the_findings_in_which_gpus_wait(self, wall_s: float, ranks: str, line: str | None) -> None:
        assert wording.standstill_line(self.report(wall_s, ranks)) == line

    def test_a_trainer_on_the_cpu_has_none(self) -> None:
        assert wording.standstill_line(self.report(14400.0, device="cpu (x86_64)")) is None
        assert wording.standstill_line(replace(self.report(14400.0), environment={})) is None

    def test_with_a_price_it_says_what_that_cost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPUOPT_GPU_HOUR_PRICE", "2.50")
        report = replace(self.report(14400.0, "4"), findings=list(self.FINDINGS[:2]))
        text = str(report)
        assert "idled for 12 GPU-hours: slow_storage 8, callback Slow 4 (about 30.00 at\n2.50 a GPU-hour)." in text
        example = (DOCS / "reports.md").read_text(encoding="utf-8").partition("GPU_HOUR_PRICE=2.50`")[2]
        assert example.partition("```text\n")[2].partition("\n```")[0] in text

    @pytest.mark.parametrize("price", ["", "2,50", "nan", "inf", "-1", "two €"])
    def test_what_is_no_price_is_said_in_a_sentence(self, monkeypatch: pytest.MonkeyPatch, price: str) -> None:
        monkeypatch.setenv("GPUOPT_GPU_HOUR_PRICE", price)
        assert wording.standstill_line(self.report(14400.0)) == (
            "The GPU idled for 3 GPU-hours: slow_storage 2, callback Slow 1. GPUOPT_GPU_HOUR_PRICE should be the "
            f"price of one GPU-hour, a number such as 2.50, got {price!r}."
        )

    def test_terminal_and_page_have_it(self) -> None:
        report = self.report(240.0)
        assert "The GPU idled for 3 GPU-minutes: slow_storage 2, callback Slow 1." in str(report).splitlines()
        assert "The GPU idled for 3 GPU-minutes: slow_storage 2, callback Slow 1." in render_html(report)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.34567e-5, "23.5 µs"),
        (0.0123456, "12.3 ms"),
        (1.98765, "1.99 s"),
        (373.2, "6 min 13 s"),
        (3600.0, "60 min"),
        (9000.0, "2 h 30 min"),
    ],
)
def test_durations_are_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.0001, "< 0.1 %"), (0.034, "3.4 %"), (0.0996, "10 %"), (0.456, "46 %")]
)
def test_percentages(share: float, text: str) -> None:
    assert wording.percent(share) == text


def test_a_small_gain_keeps_two_digits() -> None:
    assert wording.gain((1.05, 1.13, 1.2)) == "1.13x (1.05x to 1.20x)"
    assert wording.gain((1.8, 2.1, 2.4)) == "2.1x (1.8x to 2.4x)"
    assert (wording.speedup(1.04), wording.speedup(2.04)) == ("1.04x", "2.0x")


def test_runs_that_cannot_prove_anything_say_why() -> None:
    first = replace(before(), environment={"model": "Net (5 parameters)", "batch_size": "32"})
    second = replace(after(), environment={"model": "Net (6 parameters)", "batch_size": "64"})
    last = render_comparison(compare(first, second)).replace("\n", " ")
    assert last.endswith("The runs differ in model, batch size: this comparison does not verify the earlier advice.")
    page = render_html(second, first)
    assert "The runs differ in model, batch size" in page
