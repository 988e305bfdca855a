"""When the looks are asked whose turn it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpuopt.detector.looks import Looks
from lightning_gpuopt.detector.operator_profiling import OperatorProfiling
from lightning_gpuopt.timeline.phases import Timeline


def looks_of_a_run(length: int | None, asked: list[int], steps: list[int], profile: Any = "auto") -> Looks:
    def left() -> int | None:
        asked.append(steps[0])
        return None if length is None else length - steps[0]

    looks = Looks()
    looks.operators = OperatorProfiling(
        Timeline(),
        profile,
        batches_left=left,
        several_ranks=False,
        is_taken=lambda: False,
        modules=lambda: None,
        found=lambda: True,
        clock=lambda: 0.0,
    )
    return looks


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (100, [1, 48, 72, 84, 90, 93, 94, 95, 96, 97, 98, 99, 100]),
        (None, [1, 9, 17, 25, 33, 41, 49, 57, 65, 73, 81, 89, 97]),
    ],
)
def test_the_end_is_asked_for_more_often_the_nearer_it_is(length: int | None, expected: list[int]) -> None:
    asked: list[int] = []
    steps = [0]
    looks = looks_of_a_run(length, asked, steps)
    for steps[0] in range(-4, 101):
        looks.step_done(steps[0], None, lambda: None)
    assert asked == expected


def test_nobody_is_called_between_the_steps_at_which_there_is_something_to_do() -> None:
    called: list[int] = []
    looks = Looks()
    operators: Any = SimpleNamespace(step_done=called.append, due_at=4, recording=False)
    looks.operators = operators
    for number in range(1, 6):
        looks.step_done(number, None, lambda: None)
    assert called == [1, 4, 5]


def test_a_trace_that_is_asked_for_has_every_step_from_then_on(tmp_path: Any) -> None:
    looks = looks_of_a_run(10_000, [], [0])
    looks.step_done(1, None, lambda: None)
    looks.record_trace(tmp_path / "trace.json")
    for number in range(2, 7):
        assert looks.profiler_is_taken
        looks.step_done(number, None, lambda: None)
    assert not looks.profiler_is_taken
    assert (tmp_path / "trace.json").exists()
