"""Windows, warm-up and a bounded timeline of the whole run."""

from __future__ import annotations

import pytest

from lightning_gpuopt.measurements.phases import PHASES, PhaseTimes
from lightning_gpuopt.timeline.windows import Windows


def reading(steps: int, *, slow_until: int = 0) -> PhaseTimes:
    """A run of 1 s a step, with 9 s more for each of the first ``slow_until``."""
    wall = steps + 9.0 * min(steps, slow_until)
    return PhaseTimes(wall, steps, dict.fromkeys(PHASES, 0.0) | {"forward": wall}, {}, 1)


def walk(windows: Windows, steps: int, slow_until: int = 0) -> list[tuple[float, int, float]]:
    closed = []
    for done in range(1, steps + 1):
        if windows.due(done) and (window := windows.close(reading(done, slow_until=slow_until))) is not None:
            closed.append((window.start_s, window.times.steps, window.times.wall_s))
    return closed


def test_windows_begin_after_warm_up() -> None:
    windows = Windows(window_size=10, warmup_steps=3)
    assert walk(windows, 25, slow_until=3) == [(30.0, 10, 10.0), (40.0, 10, 10.0)]


def test_without_warm_up_the_first_window_begins_at_once() -> None:
    windows = Windows(window_size=10, warmup_steps=0)
    assert walk(windows, 20) == [(0.0, 10, 10.0), (10.0, 10, 10.0)]
    assert windows.steady(reading(20)) == reading(20)


def test_the_steady_part_leaves_warm_up_out() -> None:
    windows = Windows(window_size=10, warmup_steps=3)
    assert windows.steady(reading(2, slow_until=3)) is None
    walk(windows, 25, slow_until=3)
    steady = windows.steady(reading(25, slow_until=3))
    assert steady is not None
    assert (steady.steps, steady.wall_s) == (22, 22.0)


def test_the_stretches_hold_the_whole_run_with_its_rest() -> None:
    windows = Windows(window_size=10, warmup_steps=3)
    walk(windows, 25)
    assert [(each.start_s, each.times.steps) for each in windows.stretches(reading(25))] == [
        (0.0, 3),
        (3.0, 10),
        (13.0, 10),
        (23.0, 2),
    ]


def test_a_long_run_stays_within_its_bound_and_loses_nothing() -> None:
    windows = Windows(window_size=1, warmup_steps=0)
    walk(windows, 5000)
    stretches = windows.stretches(reading(5000))
    assert 257 <= len(stretches) <= 513
    assert sum(each.times.steps for each in stretches) == 5000
    ends = [each.start_s + each.times.wall_s for each in stretches]
    assert [each.start_s for each in stretches[1:]] == ends[:-1]
    assert {each.times.steps for each in stretches[:-1]} == {16}


@pytest.mark.parametrize(("restarts_at", "begins_at"), [(17, 22), (20, 22), (21, 32), (22, 32)])
def test_a_restart_in_step_with_other_ranks_ends_windows_where_they_do(restarts_at: int, begins_at: int) -> None:
    windows = Windows(window_size=10, warmup_steps=2)
    ends = []
    for steps in range(1, 46):
        if steps == restarts_at:
            windows.restart(reading(steps), in_step=True)
        if windows.due(steps):
            ends.append((steps, windows.close(reading(steps)) is not None))
    assert ends == [(2, False), (12, True), (22, False), (32, begins_at == 22), (42, True)]
    steady = windows.steady(reading(45))
    assert steady is not None
    assert steady.steps == 45 - begins_at
    assert 0 not in [each.times.steps for each in windows.stretches(reading(45))]
