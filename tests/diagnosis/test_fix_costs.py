"""What a change costs beside the steps, and what is not advised after it was tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.fixes import COSTS_MORE, TOO_SHORT, SetUps, without_refuted, workers_worth_starting
from lightning_gpuopt.diagnosis.record import Change, Finding

FOUND = Finding("slow_storage", 0.5, {}, "num_workers=4", {"num_workers": 4, "persistent_workers": True}, (1.0, 2, 3))


@pytest.mark.parametrize(
    ("set_ups", "expected"),
    [
        (SetUps(100, [9.0, 1.0, 3.0], [4.0, 6.0]), (0.02, 0.05)),  # the run's first epoch has more to set up
        (SetUps(100, [9.0], [4.0]), (0.09, 0.04)),
        (SetUps(100, [1.0, 1.0], [8.0, 0.0], persist=True, epochs_left=4), (0.01, 0.02)),
        (SetUps(100, [1.0, 1.0], [8.0], persist=True, epochs_left=4, persisted=True), (0.0, 0.02)),
        (SetUps(0, [1.0], [8.0]), (0.0, 0.0)),
        (SetUps(100, [1.0], []), (0.0, 0.0)),
    ],
)
def test_set_ups_are_spread_over_the_steps_of_an_epoch(set_ups: SetUps, expected: tuple[float, float]) -> None:
    assert set_ups.per_step_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wanted", "set_up_s", "epochs_left", "persist", "expected"),
    [
        (9, 4.0, 4, False, 3),  # as many as start side by side cost little, more of them more than they save
        (9, 4.0, 100, False, 9),
        (9, 40.0, 1, False, 2),
        (9, 0.01, 1, False, 9),
        (2, 40.0, 1, True, None),
    ],
)
def test_so_many_workers_are_started_as_pay_for_it(
    wanted: int, set_up_s: float, epochs_left: int, persist: bool, expected: int | None
) -> None:
    known = {"step_s": 0.03, "speedup": 9.0, "steps": 200, "cpus": 2.0}
    number = workers_worth_starting(wanted, 1, set_up_s=set_up_s, epochs_left=epochs_left, persist=persist, **known)
    assert number == expected


@pytest.mark.parametrize(
    "change",
    [
        Change("num_workers", 1, 4, measured=0.65, kept=False, why="no gain that could be told from noise"),
        Change("num_workers", 1, 2, measured=0.65, kept=False, why=COSTS_MORE),
        Change("num_workers", 1, 3, why=COSTS_MORE),
        Change("num_workers", 1, 3, kept=False, why="for more workers there is no room any longer"),
    ],
)
def test_what_was_refuted_is_not_advised(change: Change) -> None:
    (left,) = without_refuted([FOUND], [change])
    assert (left.cause, left.share, left.settings, left.predicted_speedup) == ("slow_storage", 0.5, {}, None)
    assert f"num_workers 1 → {change.to}" in left.advice
    assert "it is not advised" in left.advice
    assert ("0.65x" in left.advice) is (change.measured is not None)


@pytest.mark.parametrize(
    "change",
    [
        Change("num_workers", 1, 4, measured=1.9, kept=True),
        Change("num_workers", 1, 4, measured=1.1, kept=False, why=TOO_SHORT),
        Change("num_workers", 1, 6, measured=0.9, kept=False),  # fewer may do
        Change("num_workers", 8, 3, measured=0.9, kept=False),
        Change("num_workers", 1, 4, why="its sampler draws random numbers for each index"),
        Change("prefetch_factor", 2, 4, measured=0.9, kept=False),
    ],
)
def test_what_was_not_stays(change: Change) -> None:
    assert without_refuted([FOUND], [change]) == [FOUND]
    assert without_refuted([replace(FOUND, settings={})], [change]) == [replace(FOUND, settings={})]
