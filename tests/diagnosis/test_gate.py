"""The gate on two runs, by numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.compare import Gate, compare, comparison_data, gate_of
from lightning_gpuopt.diagnosis.render.wording import gate_line
from lightning_gpuopt.diagnosis.report import StallReport, Stretch
from lightning_gpuopt.measurements.phases import StepTimes
from tests.diagnosis.reports import after, before, phases


def run_of(step_s: float, median_s: float | None = None, **host: float) -> StallReport:
    """A hundred steps, of which each takes so long in each phase; before them ten of warm-up, ten times as slow."""
    steady = phases(**{name: 100 * seconds for name, seconds in host.items()})
    return StallReport(
        "compute_bound",
        200.0,
        {name: 2 * seconds for name, seconds in steady.items()},
        [],
        steps=110,
        step_s=step_s,
        step_times=StepTimes(median_s=median_s),
        timeline=[Stretch(0.0, 100.0, 10, steady), Stretch(100.0, 100.0, 100, steady)],
    )


FAST = run_of(0.1, 0.1, data_wait=0.02, forward=0.08, validation=0.0)
SLOW = run_of(0.12, 0.12, data_wait=0.05, forward=0.07, validation=9.0)


@pytest.mark.parametrize(("allowed", "outcome"), [(0.0, "slower"), (19.9, "slower"), (20.0, "passed"), (50, "passed")])
def test_the_mean_steady_step_decides(allowed: float, outcome: str) -> None:
    gate = gate_of(compare(FAST, SLOW), allowed)
    assert (gate.outcome, gate.slower_percent) == (outcome, pytest.approx(20))
    assert (gate.phase, gate.phase_before_s, gate.phase_after_s) == ("data_wait", 0.02, 0.05)


def test_a_faster_run_passes() -> None:
    gate = gate_of(compare(SLOW, FAST), 0)
    assert (gate.outcome, gate.slower_percent) == ("passed", pytest.approx(-100 / 6))
    assert gate_line(gate) == "Faster by 16.7 %, 0 % allowed."


def test_the_same_run_passes_with_nothing_allowed() -> None:
    assert gate_of(compare(FAST, FAST), 0) == Gate("passed", 0, 0.0, 0.0)


def test_phases_leave_the_warm_up_out_where_the_timeline_does() -> None:
    assert FAST.measured.step_phases_s["forward"] == pytest.approx(0.08)
    only = replace(FAST, timeline=FAST.timeline[:1])
    assert only.measured.step_phases_s["forward"] == pytest.approx(0.8)
    assert replace(FAST, timeline=[]).measured.step_phases_s["forward"] == pytest.approx(16 / 110)
    assert StallReport("compute_bound", 0.0, {}, []).measured.step_phases_s == {}


@pytest.mark.parametrize(("measured", "steps"), [(20, 20), (70, 70), (120, 120), (69, 70), (1, 20), (None, 110)])
def test_the_measured_steps_are_the_last_of_the_timeline(measured: int | None, steps: int) -> None:
    parts = [Stretch(0.0, 1.0, 10, {}), Stretch(1.0, 2.0, 40, {}), Stretch(3.0, 2.0, 50, {}), Stretch(5.0, 1.0, 20, {})]
    run = replace(FAST, steps=120, timeline=parts, measured_steps=measured)
    assert run.measured.steps == steps
    assert replace(run, step_s=None, measured_steps=None).measured == run.whole


@pytest.mark.parametrize("name", ["device", "ranks", "batch_size"])
def test_runs_of_other_work_are_not_judged(name: str) -> None:
    first, second = replace(FAST, environment={name: "1"}), replace(SLOW, environment={name: "2"})
    gate = gate_of(compare(first, second), 50)
    assert gate == Gate("not_judged", 50, reason=f"the runs differ in {name.replace('_', ' ')}")
    assert gate_line(gate) == f"Not judged: the runs differ in {name.replace('_', ' ')}."


@pytest.mark.parametrize("name", ["model", "strategy", "precision", "accumulate_grad_batches"])
def test_what_a_change_of_the_code_may_change_is_judged(name: str) -> None:
    first, second = replace(FAST, environment={name: "1"}), replace(SLOW, environment={name: "2"})
    assert gate_of(compare(first, second), 5).outcome == "slower"


def test_without_a_steady_step_nothing_is_judged() -> None:
    none = replace(FAST, step_s=None)
    assert gate_of(compare(FAST, none), 5).reason == "the later run has no step after its warm-up"
    assert gate_of(compare(none, FAST), 5).reason == "the earlier run has no step after its warm-up"


def test_the_line_names_the_phase() -> None:
    gate = gate_of(compare(FAST, SLOW), 5)
    assert gate_line(gate) == "Slower by 20.0 %, 5 % allowed: data_wait takes 50 ms a step, 20 ms before."


def test_a_few_long_steps_are_told_apart() -> None:
    gate = gate_of(compare(FAST, replace(SLOW, step_times=StepTimes(median_s=0.1))), 5)
    assert gate.median_slower_percent == 0
    assert gate_line(gate).endswith("20 ms before; the median step is not, so few long steps make the difference.")


def test_where_no_phase_grew_it_is_the_device() -> None:
    gate = gate_of(compare(FAST, replace(FAST, step_s=0.2, step_times=StepTimes())), 5)
    assert gate.phase is None
    assert gate_line(gate) == (
        "Slower by 100.0 %, 5 % allowed: no phase of the training process grew, the device's own work takes longer."
    )


def test_a_comparison_as_data() -> None:
    comparison = compare(before(), after())
    data = comparison_data(comparison, gate_of(comparison, 5))
    assert data["before"]["verdict"] == "slow_storage"
    assert (data["before"]["step_s"], data["before"]["median_step_s"]) == (0.1, 0.1)
    assert "median_step_s" not in data["after"]
    assert data["after"]["phases_s_per_step"]["forward"] == pytest.approx(0.039)
    assert (data["speedup"], data["differences"]) == (2.0, [])
    assert data["proofs"][0]["measured"] == 2.0
    assert data["gate"] == {"outcome": "passed", "allowed_percent": 5, "slower_percent": -50, "reason": ""} | {
        name: value for name, value in data["gate"].items() if name.startswith("phase")
    }
    assert "gate" not in comparison_data(comparison)
