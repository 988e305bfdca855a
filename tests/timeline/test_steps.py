"""Step times in bounded memory, and the steps that stand out."""

from __future__ import annotations

import pytest

from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.steps import StepClock
from tests.timeline.test_phases import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    timeline = Timeline(clock_ns=clock, callback_names={"Slow": "Slow"})
    timeline.start()
    return timeline


def step(timeline: Timeline, steps: StepClock, clock: Clock, **extra_s: float) -> None:
    actions = {
        "forward": "[Strategy]S.training_step",
        "validation": "[Strategy]S.validation_step",
        "callbacks": "[Callback]Slow.on_train_batch_end",
        "data_wait": "[_TrainingEpochLoop].train_dataloader_next",
    }
    for phase, seconds in ({"forward": 0.01} | extra_s).items():
        with timeline.span(actions[phase]):
            clock.advance(seconds)
    timeline.step_done()
    steps.step_done()


def test_quantiles_are_true_within_three_percent(timeline: Timeline, clock: Clock) -> None:
    steps = StepClock(timeline, warmup_steps=0)
    for number in range(1, 1001):
        step(timeline, steps, clock, forward=number / 1e4)
    times = steps.times()
    assert times.median_s == pytest.approx(0.05, rel=0.035)
    assert times.p90_s == pytest.approx(0.09, rel=0.035)
    assert times.p99_s == pytest.approx(0.099, rel=0.035)
    assert times.slowest_s == pytest.approx(0.1)
    assert sum(times.counts) == 1000
    assert len(times.edges_s) == len(times.counts) + 1
    assert times.edges_s[0] <= 1e-4
    assert times.edges_s[-1] >= 0.1


def test_warm_up_and_what_lies_between_steps_is_left_out(timeline: Timeline, clock: Clock) -> None:
    steps = StepClock(timeline, warmup_steps=2)
    for _ in range(2):
        step(timeline, steps, clock, forward=5.0)
    for _ in range(10):
        step(timeline, steps, clock, validation=3.0)
    times = steps.times()
    assert sum(times.counts) == 10
    assert times.slowest_s == pytest.approx(0.01)


def test_an_outlier_is_kept_with_its_time_and_phase(timeline: Timeline, clock: Clock) -> None:
    steps = StepClock(timeline, warmup_steps=0)
    for _ in range(50):
        step(timeline, steps, clock, data_wait=0.001)
    steps.window_done()
    step(timeline, steps, clock, data_wait=0.5)
    step(timeline, steps, clock, callbacks=0.3)
    times = steps.times()
    assert [(each.step, each.phase, round(each.phase_s, 6)) for each in times.outliers] == [
        (50, "data_wait", 0.5),
        (51, "callbacks", 0.3),
    ]
    assert times.outliers[0].seconds == pytest.approx(0.51)
    assert times.outliers[0].at_s == pytest.approx(50 * 0.011 + 0.51)
    assert times.outlier_count == 2
    assert times.outlier_s == pytest.approx(0.51 + 0.31 - 2 * 0.011, rel=0.01)


def test_before_the_first_window_nothing_is_an_outlier(timeline: Timeline, clock: Clock) -> None:
    steps = StepClock(timeline, warmup_steps=0)
    step(timeline, steps, clock)
    step(timeline, steps, clock, data_wait=9.0)
    assert steps.times().outliers == ()


def test_only_the_slowest_hundred_are_kept(timeline: Timeline, clock: Clock) -> None:
    steps = StepClock(timeline, warmup_steps=0)
    for _ in range(1000):
        step(timeline, steps, clock)
    steps.window_done()
    for number in range(200):
        step(timeline, steps, clock, data_wait=1.0 + number / 1000)
    times = steps.times()
    assert times.outlier_count == 200
    assert [each.step for each in times.outliers] == list(range(1100, 1200))


def test_no_steps_no_distribution(timeline: Timeline) -> None:
    times = StepClock(timeline, warmup_steps=0).times()
    assert (times.counts, times.median_s, times.outliers) == ((), None, ())


def test_a_step_that_accumulates_is_compared_with_its_own_kind(timeline: Timeline, clock: Clock) -> None:
    steps = StepClock(timeline, warmup_steps=0)

    def one(seconds: float, *, accumulating: bool) -> None:
        with timeline.span("[Strategy]S.training_step"):
            clock.advance(seconds)
        timeline.step_done()
        steps.step_done(accumulating)

    for number in range(40):
        one(0.01 if number % 4 < 3 else 0.05, accumulating=number % 4 < 3)
    steps.window_done()
    for number in range(40):
        one(0.01 if number % 4 < 3 else 0.05, accumulating=number % 4 < 3)
    assert steps.times().outlier_count == 0
    one(0.05, accumulating=True)
    (outlier,) = steps.times().outliers
    assert (outlier.step, outlier.seconds) == (80, pytest.approx(0.05))
    assert steps.times().outlier_s == pytest.approx(0.04, rel=0.05)


def test_steps_are_counted_whether_they_wait_for_their_bins_or_not() -> None:
    clock = Clock()
    timeline = Timeline(clock_ns=clock)
    timeline.start()
    steps = StepClock(timeline, 0)
    for number in range(1, 251):
        with timeline.span("run_training_batch"):
            clock.advance(0.001)
        timeline.step_done()
        steps.step_done()
        if number in (99, 100, 101, 250):
            assert sum(steps.times().counts) == number
