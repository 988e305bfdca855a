"""What windows and the set-ups of epochs say of a change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpuopt.autofix.policy import Fix, Wanted
from lightning_gpuopt.autofix.trial_history import ChangeTrial, RunLength, TrialHistory, run_length_of

STEPS = 10
PERSIST = {"num_workers": 0, "persistent_workers": 1}


def trial(setting: Fix, *after: float, set_ups_before: int = 1, **more: Any) -> ChangeTrial:
    values = {"entries": {setting: 0}, "length": RunLength(STEPS, 3), "persisted": False, "waits": False, **more}
    values.setdefault("wanted", Wanted(setting, 2, "cause", None))
    return ChangeTrial(set_ups_before=set_ups_before, after=list(after), **values)


def history(*before: float, set_ups: tuple[float, ...] = ()) -> TrialHistory:
    made = TrialHistory()
    made.before.extend(before)
    made.set_ups += set_ups
    return made


class TestSetUps:
    @pytest.mark.parametrize(
        ("so_far", "set_ups"),
        [
            ([(3.0, 1), (3.0, 1), (4.0, 2), (4.5, 3)], [3.0, 1.0, 0.5]),
            ([(3.0, 1), (7.0, 3)], [3.0, 2.0, 2.0]),  # those of one window share its seconds
            ([(3.0, 1), (2.5, 2)], [3.0, 0.0]),  # a look that is taken off leaves no less than nothing
            ([(3.0, 1), (5.0, 1), (6.0, 2)], [3.0, 1.0]),  # seconds without an epoch are no part of the next
        ],
    )
    def test_each_epoch_that_has_begun_since_has_its_own(
        self, so_far: list[tuple[float, int]], set_ups: list[float]
    ) -> None:
        noted = TrialHistory()
        for seconds, epochs in so_far:
            noted.note_set_ups(seconds, epochs)
        assert noted.set_ups == set_ups

    def test_those_with_a_change_that_was_taken_back_say_nothing_of_a_second_trial(self) -> None:
        noted = history(1.0)
        for seconds, epochs in [(3.0, 1), (4.0, 2), (9.0, 3), (15.0, 4)]:
            noted.note_set_ups(seconds, epochs)
        noted.forget(trial("prefetch_factor", set_ups_before=2))
        assert noted.set_ups == [3.0, 1.0, 5.0, 6.0]
        noted.forget(trial("num_workers", set_ups_before=2))
        noted.note_set_ups(16.5, 5)
        assert (list(noted.before), noted.set_ups) == ([], [3.0, 1.0, 1.5])


class TestWindows:
    def test_the_last_eight_before_are_kept(self) -> None:
        assert list(history(*range(12)).before) == [4, 5, 6, 7, 8, 9, 10, 11]

    def test_steps_alone_decide_on_a_setting_of_the_steps(self) -> None:
        seen = history(*[1.0] * 4, set_ups=(0.0, 99.0))
        faster = trial("prefetch_factor", *[0.5] * 5)
        assert (seen.verdict(faster), seen.measured(faster)) == (True, 2.0)
        slower = trial("prefetch_factor", *[1.25] * 3)
        assert (seen.verdict(slower), seen.measured(slower)) == (False, 0.8)

    def test_nothing_is_measured_before_a_window_on_either_side(self) -> None:
        assert history(1.0).measured(trial("prefetch_factor")) is None
        assert history().measured(trial("prefetch_factor", 1.0)) is None
        assert history(1.0).verdict(trial("prefetch_factor")) is None


class TestWorkers:
    def test_their_epochs_set_up_is_spread_over_the_steps(self) -> None:
        seen = history(*[1.0] * 4, set_ups=(10.0, 5.0))
        change = trial("num_workers", *[0.5] * 5)
        assert seen.set_up_costs(change) == (1.0, 0.5)
        assert (seen.verdict(change), seen.measured(change)) == (True, 2.0)

    def test_a_set_up_that_costs_what_the_steps_save_is_no_gain(self) -> None:
        seen = history(*[1.0] * 4, set_ups=(0.0, 10.0))
        change = trial("num_workers", *[0.5] * 5)
        assert (seen.verdict(change), seen.measured(change)) == (False, pytest.approx(1 / 1.5))

    @pytest.mark.parametrize(
        ("before", "after", "more", "expected"),
        [
            ([9.0, 1.0, 3.0], [4.0, 6.0], {}, (0.02, 0.05)),  # the run's first epoch has more to set up
            ([9.0], [4.0], {}, (0.09, 0.04)),
            ([1.0, 1.0], [8.0, 0.0], {"entries": PERSIST}, (0.01, 0.02)),
            ([1.0, 1.0], [8.0], {"persisted": True}, (0.0, 0.02)),
            ([1.0], [8.0], {"length": RunLength(0, 3)}, (0.0, 0.0)),
            ([1.0], [], {}, (0.0, 0.0)),
            ([1.0], [8.0], {"wanted": Wanted("prefetch_factor", 2, "cause", None)}, (0.0, 0.0)),
        ],
    )
    def test_set_ups_are_spread_over_the_steps_of_an_epoch(
        self, before: list[float], after: list[float], more: dict[str, Any], expected: tuple[float, float]
    ) -> None:
        change = trial("num_workers", set_ups_before=len(before), **{"length": RunLength(100, 3), **more})
        assert history(set_ups=(*before, *after)).set_up_costs(change) == pytest.approx(expected)


class TestWorkersThatLiveOn:
    def test_the_set_ups_alone_decide(self) -> None:
        # the run's own first epoch is left out, and that in which the workers were started
        seen = history(*[1.0] * 4, set_ups=(9.0, 2.0, 2.0, 7.0, 0.5, 0.5))
        change = trial("persistent_workers", *[5.0] * 8, set_ups_before=3)
        assert seen.verdict(change) is True
        # ten steps of one second, with two seconds of set-up before and half a second after
        assert seen.measured(change) == 12.0 / 10.5

    def test_without_the_length_of_an_epoch_nothing_is_predicted_or_measured(self) -> None:
        seen = history(*[1.0] * 4, set_ups=(9.0, 2.0, 2.0, 7.0, 0.5))
        change = trial("persistent_workers", set_ups_before=3, length=RunLength(0, 3))
        assert (seen.verdict(change), seen.measured(change)) == (True, None)
        assert seen.speedup_of_persistent_workers(RunLength(0, 3), 0.5) is None

    def test_what_they_will_bring_is_the_set_ups_after_the_first_without_a_batch(self) -> None:
        seen = history(1.0, 1.0, 1.0, 7.0, set_ups=(9.0, 2.0, 3.0))  # in one window the dataset was looked at
        assert seen.speedup_of_persistent_workers(RunLength(10, 3), 0.5) == pytest.approx(
            (12.5 / 11.5, 12.5 / 10.5, 1.07 * 12.5 / 10.5)
        )

    def test_not_before_an_epoch_has_begun_without_starting_any(self) -> None:
        seen = history(set_ups=(9.0, 2.0, 7.0))
        change = trial("persistent_workers", set_ups_before=2)
        assert (seen.verdict(change), seen.measured(change)) == (None, None)


@pytest.mark.parametrize(
    ("asked", "length"),
    [
        ({"max_epochs": 5}, RunLength(20, 4)),
        ({"max_epochs": 5, "current_epoch": 3}, RunLength(20, 1)),
        ({"max_epochs": 5, "current_epoch": 4}, RunLength(20, 1)),  # never less than one
        ({"max_epochs": -1}, RunLength(20, 100)),
        ({"max_epochs": None}, RunLength(20, 100)),
        ({"max_epochs": 1000}, RunLength(20, 100)),
        ({"max_epochs": -1, "max_steps": 130, "global_step": 30}, RunLength(20, 5)),
        ({"max_epochs": 3, "max_steps": 130, "global_step": 30}, RunLength(20, 2)),
        ({"max_epochs": 9, "max_steps": 130, "global_step": 125}, RunLength(20, 1)),
        ({"max_epochs": 5, "batches": float("inf")}, RunLength(0, 4)),
        ({"max_epochs": -1, "max_steps": 130, "batches": float("inf")}, RunLength(0, 100)),
    ],
)
def test_what_is_left(asked: dict[str, Any], length: RunLength) -> None:
    values = {"current_epoch": 0, "max_steps": -1, "global_step": 0, "batches": 20, **asked}
    trainer: Any = SimpleNamespace(num_training_batches=values.pop("batches"), **values)
    assert run_length_of(trainer) == length
