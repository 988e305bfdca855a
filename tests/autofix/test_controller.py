"""AutoFixController as a state machine: windows of written lengths in, changes and their records out."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest

from lightning_gpuopt.autofix.policy import MAX_WINDOWS
from lightning_gpuopt.autofix.trial_history import RunLength
from lightning_gpuopt.diagnosis.predict import speedup_of_workers
from lightning_gpuopt.diagnosis.record import Change
from lightning_gpuopt.diagnosis.refuted import COSTS_MORE, INTERRUPTED, TOO_SHORT
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.tuning.tuned_loader import DRAWS
from tests.autofix.plain_run import FAST, GAIN, SLOW, PlainBroadcast, PlainRun, finding, window

MORE = finding(num_workers=2)
FIRST = finding("main_process_loading", num_workers=2)
AHEAD = finding("head_of_line", prefetch_factor=4)
LIVE_ON = finding("epoch_restart", None, persistent_workers=True)

BEFORE, SKIPPED, PROOF = 4, 1, 5
"""Windows that are seen before a change, left out after it, and needed to prove a clear gain."""

TWO_WORKERS = speedup_of_workers(window(SLOW, batch_s=SLOW), 2)
"""What is predicted of them, where a worker takes a step's time for a batch."""

NO_GAIN = "no gain beyond noise"
WITH_WORKERS = "applied and measured together with num_workers; not predicted separately"
LAST_EPOCH = "training ended before it could take effect"


def one_worker(**more: Any) -> PlainRun:
    return PlainRun({"num_workers": 1, "prefetch_factor": 2, "persistent_workers": False}, **more)


def no_worker(**more: Any) -> PlainRun:
    return PlainRun({"num_workers": 0, "persistent_workers": False}, waiting=["num_workers"], **more)


def tried(run: PlainRun, *findings: Any, on_gpu: bool = False) -> PlainRun:
    """The run after the window in which it has begun a change."""
    run.epoch()
    run.windows(BEFORE, SLOW, *findings, on_gpu=on_gpu)
    return run


def kept(*args: Any, measured: float | None = 2.0, why: str = "", predicted: Any = GAIN) -> Change:
    shown = None if measured is None else pytest.approx(measured)
    return Change(*args, predicted=predicted, measured=shown, kept=True, why=why)


def taken_back(*args: Any, measured: float | None, why: str = NO_GAIN, predicted: Any = GAIN) -> Change:
    shown = None if measured is None else pytest.approx(measured)
    return Change(*args, predicted=predicted, measured=shown, kept=False, why=why)


class TestBeforeAChange:
    def test_four_windows_are_seen_first(self) -> None:
        run = one_worker()
        run.epoch()
        run.windows(BEFORE - 1, SLOW, MORE)
        run.window(None, MORE)  # without a step it is none
        run.controller.training_ended()  # with nothing under way
        assert (run.changes, run.log, run.messages) == ([], [], [])
        run.window(SLOW, MORE)
        assert run.changes == [Change("num_workers", 1, 2, GAIN)]
        assert run.log == [("change", "num_workers", 2)]
        assert run.messages == ["AutoFix: num_workers 1 → 2, now, since slow_transform was found"]

    def test_the_first_that_may_be_changed_and_has_not_failed_is(self) -> None:
        wanted = [finding("a", num_workers=6), finding("b", prefetch_factor=4)]
        assert tried(one_worker(), *wanted).log == [("change", "num_workers", 6)]
        run = one_worker(fixes=["num_workers"])
        tried(run, *wanted)
        run.windows(SKIPPED + 3, 0.625, *wanted)
        run.windows(BEFORE, SLOW, *wanted)
        assert run.log == [("change", "num_workers", 6), ("back", "num_workers", 1)]

    def test_without_a_finding_nothing_is_changed(self) -> None:
        run = one_worker()
        run.windows(30, SLOW)
        run.windows(30, SLOW, finding("logging"))
        assert (run.changes, run.log) == ([], [])

    def test_nothing_new_is_tried_while_the_loader_still_changes(self) -> None:
        run = one_worker()
        run.loader.is_settled = False
        assert tried(run, MORE).changes == []
        run.loader.is_settled = True
        run.window(SLOW, MORE)
        assert run.log == [("change", "num_workers", 2)]

    def test_of_several_loaders_the_value_before_is_what_the_finding_is_about(self) -> None:
        run = PlainRun({}, facts=LoaderFacts(num_workers=3))
        run.settings.refuses["num_workers"] = "there are several training loaders"
        assert tried(run, finding(num_workers=5)).changes == [
            Change("num_workers", 3, 5, GAIN, why="there are several training loaders")
        ]

    def test_of_several_loaders_the_one_that_is_found_first_is_changed_on_all_ranks(self) -> None:
        run = PlainRun({"num_workers": 1})
        tried(run, finding(loader="slow", num_workers=2))
        assert run.log == [("aim", "slow"), ("change", "num_workers", 2)]
        assert run.broadcast.sent[0] == ["aim", "slow", None]
        other = PlainRun({"num_workers": 1}, rank=1)
        other.broadcast.came = list(run.broadcast.sent)
        other.controller.obey()
        assert other.log == run.log
        run.windows(SKIPPED + PROOF, FAST)
        run.windows(8, FAST, finding(loader="fast", prefetch_factor=4))
        assert run.log[2:] == []
        assert run.controller.notes == ["Of several training loaders, AutoFix changes only 'slow'."]

    def test_where_the_first_cannot_be_changed_the_next_is(self) -> None:
        run = PlainRun({"num_workers": 1})
        run.settings.refuses["num_workers"] = "no"
        tried(run, finding(loader="slow", num_workers=2), finding(loader="fast", prefetch_factor=4))
        assert run.log == [("aim", "slow"), ("aim", "fast"), ("change", "prefetch_factor", 4)]
        assert run.controller.notes == ["Of several training loaders, AutoFix changes only 'fast'."]


class TestAChangeAtOnce:
    def test_a_gain_is_kept_once_it_is_proved(self) -> None:
        run = tried(one_worker(), MORE)
        run.window(9.0)  # the first with it is left out
        run.windows(PROOF - 1, FAST)
        assert run.changes == [Change("num_workers", 1, 2, GAIN)]
        run.window(FAST)
        assert run.changes == [kept("num_workers", 1, 2)]
        assert run.log == [("change", "num_workers", 2)]
        assert run.messages[-1] == "AutoFix: num_workers 1 → 2: predicted 2.0x (1.5x to 2.5x), measured 2.0x, kept"

    def test_a_clear_gain_without_a_proof_is_tried_once_more_with_all_windows_before(self) -> None:
        noisy = [SLOW, FAST, FAST, SLOW, FAST, FAST, SLOW, FAST]
        run = tried(one_worker(), MORE)
        for step_s in [SLOW, *noisy]:
            run.window(step_s, MORE)
        assert run.changes == [taken_back("num_workers", 1, 2, measured=8 / 5.5)]
        run.windows(MAX_WINDOWS - 1, SLOW, MORE)
        assert len(run.changes) == 1
        run.window(SLOW, MORE)
        run.windows(SKIPPED + PROOF, FAST, MORE)
        assert run.changes[1:] == [kept("num_workers", 1, 2)]

    def test_a_second_trial_is_the_last(self) -> None:
        noisy = [SLOW, FAST, FAST, SLOW, FAST, FAST, SLOW, FAST]
        run = tried(one_worker(), MORE)
        for step_s in [SLOW, *noisy, *[SLOW] * MAX_WINDOWS, SLOW, *noisy, *[SLOW] * 30]:
            run.window(step_s, MORE)
        assert [each.kept for each in run.changes] == [False, False]

    def test_a_loss_is_taken_back_after_three_windows(self) -> None:
        run = tried(one_worker(), MORE)
        run.windows(SKIPPED + 2, 0.625)
        assert run.log == [("change", "num_workers", 2)]
        run.window(0.625)
        assert run.changes == [taken_back("num_workers", 1, 2, measured=0.8)]
        assert run.log == [("change", "num_workers", 2), ("back", "num_workers", 1)]

    def test_a_gain_that_is_too_small_is_taken_back_after_eight(self) -> None:
        run = tried(one_worker(), MORE)
        run.windows(SKIPPED + 7, 0.496)
        assert run.log == [("change", "num_workers", 2)]
        run.window(0.496)
        assert run.changes == [taken_back("num_workers", 1, 2, measured=0.5 / 0.496)]

    def test_one_change_at_a_time(self) -> None:
        run = tried(one_worker(), MORE, AHEAD)
        run.windows(SKIPPED + PROOF - 1, FAST, AHEAD)
        assert run.log == [("change", "num_workers", 2)]
        run.window(FAST, AHEAD)
        assert run.log == [("change", "num_workers", 2), ("change", "prefetch_factor", 4)]
        run.windows(20, FAST, AHEAD)
        assert run.changes == [
            kept("num_workers", 1, 2),
            taken_back("prefetch_factor", 2, 4, measured=1.0),
        ]
        assert run.settings.values["prefetch_factor"] == 2
        assert run.broadcast.sent == [
            ["change", "num_workers", 2],
            ["keep", "num_workers", None],
            ["change", "prefetch_factor", 4],
            ["back", "prefetch_factor", 2],
        ]

    def test_after_one_that_was_taken_back_the_next_waits_for_new_windows(self) -> None:
        run = tried(one_worker(), MORE, AHEAD)
        run.windows(SKIPPED + 3, 0.625, MORE, AHEAD)
        assert run.log[-1] == ("back", "num_workers", 1)
        run.windows(2, SLOW, AHEAD)
        assert run.log[-1] == ("back", "num_workers", 1)
        run.windows(2, SLOW, AHEAD)
        assert run.log[-1] == ("change", "prefetch_factor", 4)

    def test_where_there_is_room_for_fewer_the_prediction_is_theirs(self) -> None:
        run = one_worker(batch_s=SLOW)
        run.settings.room = 2
        tried(run, finding(num_workers=8))
        run.windows(SKIPPED + PROOF, FAST)
        assert run.changes == [kept("num_workers", 1, 2, predicted=TWO_WORKERS)]

    def test_where_it_is_not_known_what_a_batch_costs_a_kept_change_says_so(self) -> None:
        run = one_worker()
        run.settings.room = 3
        tried(run, finding(num_workers=8))
        assert run.messages == ["AutoFix: num_workers 1 → 3, now, since slow_transform was found"]
        run.loader.draws = True
        run.windows(SKIPPED + PROOF, FAST)
        why = f"{DRAWS}; not predicted: the cost of a batch was not measured"
        assert run.changes == [kept("num_workers", 1, 3, predicted=None, why=why)]

    def test_the_windows_that_proved_it_are_those_before_the_next_each_of_them_once(self) -> None:
        run = tried(one_worker(), MORE)
        run.windows(SKIPPED + PROOF - 1, FAST)
        run.window(0.2, AHEAD)
        assert run.log[-1] == ("change", "prefetch_factor", 4)
        run.windows(SKIPPED + PROOF, 0.12)
        assert run.changes[1] == kept("prefetch_factor", 2, 4, measured=(4 * FAST + 0.2) / 5 / 0.12)


class TestAChangeWithTheNextEpoch:
    def test_it_is_judged_once_it_has_come(self) -> None:
        run = tried(no_worker(), FIRST)
        assert run.messages == ["AutoFix: num_workers 0 → 2, with the next epoch, since main_process_loading was found"]
        run.windows(20, SLOW, FIRST)
        assert run.changes == [Change("num_workers", 0, 2, GAIN)]
        run.epoch()
        run.window(9.0)  # in which the new iterator was made
        run.window(9.0)  # left out
        run.windows(PROOF - 1, FAST)
        assert run.changes == [Change("num_workers", 0, 2, GAIN)]
        run.window(FAST)
        assert run.changes == [kept("num_workers", 0, 2)]
        assert run.log == [("change", "num_workers", 2)]

    def test_windows_while_it_waits_are_those_before_it(self) -> None:
        run = tried(no_worker(), FIRST)
        run.windows(8, 1.0)
        run.epoch()
        run.windows(1 + SKIPPED + PROOF, FAST)
        assert run.changes == [kept("num_workers", 0, 2, measured=4.0)]

    def test_what_is_refused_with_the_iterator_is_advised_and_not_tried_again(self) -> None:
        run = tried(no_worker(), FIRST)
        run.settings.refuses["num_workers"] = "reading the dataset draws"
        run.epoch()
        run.window(SLOW, FIRST)
        assert run.changes == [Change("num_workers", 0, 2, GAIN, why="reading the dataset draws")]
        assert run.loader.refused == {}
        run.windows(20, SLOW, FIRST)
        assert len(run.changes) == 1
        assert run.log == [("change", "num_workers", 2)]
        assert run.messages[-1] == (
            "AutoFix: num_workers 0 → 2: predicted 2.0x (1.5x to 2.5x), advised (reading the dataset draws)"
        )

    def test_after_a_refusal_windows_before_it_still_count(self) -> None:
        run = tried(no_worker(), FIRST)
        run.settings.refuses["num_workers"] = "reading the dataset draws"
        run.epoch()
        run.window(SLOW, AHEAD)
        assert run.log[-1] == ("change", "prefetch_factor", 4)


def test_what_is_refused_now_is_advised_and_the_next_is_tried_in_the_same_window() -> None:
    run = one_worker()
    run.settings.refuses["num_workers"] = "there is no room for more workers, limited by memory"
    tried(run, MORE, AHEAD)
    assert run.broadcast.sent == [["change", "prefetch_factor", 4]]
    assert run.changes == [
        Change("num_workers", 1, 2, GAIN, why="there is no room for more workers, limited by memory"),
        Change("prefetch_factor", 2, 4, GAIN),
    ]
    assert run.log == [("change", "prefetch_factor", 4)]
    run.windows(30, SLOW, MORE, AHEAD)
    assert len(run.changes) == 2


class TestWhatStartingWorkersCosts:
    @pytest.mark.parametrize(("step_s", "why"), [(FAST, COSTS_MORE), (0.625, NO_GAIN)])
    def test_a_set_up_that_takes_longer_than_the_steps_save_is_the_reason(self, step_s: float, why: str) -> None:
        run = one_worker(run_length=RunLength(10, 5))
        run.epoch(0.0)
        run.epoch(0.0)
        run.windows(BEFORE, SLOW, MORE)
        run.epoch(10.0)  # a second a step
        run.windows(SKIPPED + 3, step_s)
        assert run.changes == [taken_back("num_workers", 1, 2, measured=0.5 / (step_s + 1.0), why=why)]
        assert run.settings.values["num_workers"] == 1

    def test_a_change_that_was_kept_before_an_epoch_began_with_it_is_looked_at_again(self) -> None:
        run = one_worker(run_length=RunLength(10, 5))
        run.epoch(0.0)
        run.windows(BEFORE, SLOW, MORE)
        run.windows(SKIPPED + PROOF, FAST)
        assert run.changes == [kept("num_workers", 1, 2)]
        run.windows(5, FAST)
        run.epoch(5.0)  # half a second a step, where 0.25 were saved
        run.window(FAST, MORE)
        assert run.changes == [
            taken_back("num_workers", 1, 2, measured=2.0 * 0.25 / (0.25 + 0.5), why=COSTS_MORE),
        ]
        assert run.log == [("change", "num_workers", 2), ("back", "num_workers", 1)]
        run.windows(BEFORE - 1, SLOW, AHEAD)
        assert len(run.changes) == 1  # the window before was one with two workers
        run.windows(30, SLOW, MORE)
        assert len(run.changes) == 1

    @pytest.mark.parametrize(("epoch_s", "stay"), [(3.0, True), (5.0, False)])
    def test_all_that_were_kept_before_an_epoch_began_are_looked_at_together(self, epoch_s: float, stay: bool) -> None:
        run = one_worker(run_length=RunLength(10, 5))
        run.epoch(0.0)
        run.windows(BEFORE, SLOW, MORE)
        run.windows(SKIPPED + PROOF, FAST, finding(num_workers=4))
        run.windows(SKIPPED + PROOF, 0.125)
        assert run.changes == [kept("num_workers", 1, 2), kept("num_workers", 2, 4)]
        run.epoch(epoch_s)  # 0.375 seconds a step were saved
        run.window(0.125)
        assert [each.kept for each in run.changes] == [stay, stay]
        assert run.settings.values["num_workers"] == (4 if stay else 1)
        if stay:
            run.epoch(99.0)  # only the first is looked at
            run.windows(3, 0.125)
            assert [each.kept for each in run.changes] == [True, True]
        else:
            slower = 0.125 / (0.125 + 0.5)
            assert run.changes == [
                taken_back("num_workers", 1, 2, measured=2.0 * slower, why=COSTS_MORE),
                taken_back("num_workers", 2, 4, measured=2.0 * slower, why=COSTS_MORE),
            ]

    def test_it_is_looked_at_when_the_change_that_is_tried_meanwhile_has_ended(self) -> None:
        run = one_worker(run_length=RunLength(10, 5))
        run.epoch(0.0)
        run.windows(BEFORE, SLOW, MORE)
        run.windows(SKIPPED + PROOF, FAST, AHEAD)
        assert run.log[-1] == ("change", "prefetch_factor", 4)
        run.epoch(5.0)
        run.windows(SKIPPED + 2, 0.5)
        assert run.log[-1] == ("change", "prefetch_factor", 4)
        run.window(0.5)
        assert run.log[-1] == ("back", "prefetch_factor", 2)
        run.window(FAST)
        assert run.log[-1] == ("back", "num_workers", 1)
        assert [(each.setting, each.why) for each in run.changes] == [
            ("num_workers", COSTS_MORE),
            ("prefetch_factor", NO_GAIN),
        ]

    def test_starting_workers_that_live_on_is_spread_over_all_epochs_left(self) -> None:
        run = PlainRun({"num_workers": 1, "persistent_workers": True}, run_length=RunLength(10, 1))
        run.epoch()
        run.windows(BEFORE, SLOW, MORE)
        run.epoch(10.0)  # a second a step of this epoch, and the one before it is not over
        run.windows(SKIPPED + 3, FAST)
        assert run.changes == [taken_back("num_workers", 1, 2, measured=0.5 / (0.25 + 0.5), why=COSTS_MORE)]

    def test_seconds_spent_looking_at_the_dataset_are_no_set_up(self) -> None:
        run = no_worker(run_length=RunLength(10, 5))
        run.epoch(0.0)
        run.windows(BEFORE, SLOW, FIRST)
        run.loader.looked_s = 50.0
        run.epoch(50.0)
        run.windows(1 + SKIPPED + PROOF, FAST)
        assert run.changes == [kept("num_workers", 0, 2)]


class TestWorkersThatAreNotForked:
    def slow(self, *, epoch_s: float, left: int = 5, wanted: int = 2, **more: Any) -> PlainRun:
        run = one_worker(run_length=RunLength(10, left), **more)
        run.settings.waiting.add("num_workers")
        run.settings.waiting.add("persistent_workers")
        run.loader.starts_slowly = True
        run.epoch(epoch_s)
        run.epoch(epoch_s)
        run.windows(BEFORE, SLOW, finding(num_workers=wanted))
        return run

    def test_they_come_with_the_next_epoch_and_persist(self) -> None:
        run = self.slow(epoch_s=1.0)
        assert run.log == [("change", "num_workers", 2), ("change", "persistent_workers", True)]
        assert run.messages == [
            "AutoFix: num_workers 1 → 2, with the next epoch, since slow_transform was found, with persistent workers"
        ]
        run.epoch(1.0)
        run.windows(1 + SKIPPED + PROOF, FAST)
        # a step of 0.5 s with 0.1 s of set-up, against 0.25 s with a sixth of 0.1 s: six epochs are left
        assert run.changes == [
            kept("num_workers", 1, 2, measured=0.6 / (0.25 + 0.1 / 6)),
            Change("persistent_workers", False, True, kept=True, why=WITH_WORKERS),
        ]
        assert run.broadcast.sent == [
            ["change", "num_workers", 2],
            ["change", "persistent_workers", True],
            ["keep", "num_workers", None],
            ["keep", "persistent_workers", None],
        ]
        run.epoch(9.0)  # it is not looked at again
        run.windows(5, FAST)
        assert [each.kept for each in run.changes] == [True, True]
        run.controller.undo()
        assert run.loader.undone == [{}]

    def test_both_are_taken_back(self) -> None:
        run = self.slow(epoch_s=1.0)
        run.epoch(1.0)
        run.windows(1 + SKIPPED + 3, 0.9)
        assert [(each.setting, each.kept, each.why) for each in run.changes] == [
            ("num_workers", False, NO_GAIN),
            ("persistent_workers", False, NO_GAIN),
        ]
        assert run.log[2:] == [("back", "num_workers", 1), ("back", "persistent_workers", False)]
        assert run.broadcast.sent[2:] == [["back", "num_workers", 1], ["back", "persistent_workers", False]]
        run.windows(30, SLOW, LIVE_ON)
        assert len(run.changes) == 2
        run.controller.undo()
        assert run.loader.undone == [{}]

    def test_where_not_one_pays_none_is_tried(self) -> None:
        run = self.slow(epoch_s=100.0, cpus=1.0)
        assert run.changes == [Change("num_workers", 1, 2, GAIN, why=COSTS_MORE)]
        assert run.log == []
        assert run.messages == [f"AutoFix: num_workers 1 → 2: predicted 2.0x (1.5x to 2.5x), not tried ({COSTS_MORE})"]

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
    def test_so_many_are_started_as_pay_for_it(
        self, wanted: int, set_up_s: float, epochs_left: int, persist: bool, expected: int | None
    ) -> None:
        values = {"num_workers": 1, "persistent_workers": persist}
        run = PlainRun(values, run_length=RunLength(200, epochs_left), waiting=["num_workers"], cpus=2.0)
        run.loader.starts_slowly = True
        run.epoch(set_up_s)
        run.windows(BEFORE, 0.03, finding(predicted=(9.0, 9.0, 9.0), num_workers=wanted))
        tried = [change for change in run.log if change[1] == "num_workers"]
        assert tried == ([] if expected is None else [("change", "num_workers", expected)])

    def test_with_the_prediction_of_so_many(self) -> None:
        assert self.slow(epoch_s=10.0, wanted=9).changes[0] == Change("num_workers", 1, 2, predicted=None)
        run = self.slow(epoch_s=10.0, wanted=9, batch_s=SLOW)
        assert run.changes[0] == Change("num_workers", 1, 2, TWO_WORKERS)

    @pytest.mark.parametrize(
        "run",
        [one_worker(run_length=RunLength(0, 5)), no_worker(run_length=RunLength(10, 1))],
        ids=["an epoch of unknown length", "a loader's first workers"],
    )
    def test_they_are_not_reckoned_up(self, run: PlainRun) -> None:
        run.loader.starts_slowly = True
        run.epoch(1000.0)
        run.windows(BEFORE, SLOW, MORE)
        assert run.log == [("change", "num_workers", 2)]

    @pytest.mark.parametrize("may", [False, True])
    def test_they_do_not_persist_where_that_cannot_be_changed(self, may: bool) -> None:
        run = one_worker(run_length=RunLength(10, 5), **({} if may else {"fixes": ["num_workers"]}))
        run.settings.waiting.add("num_workers")
        run.loader.starts_slowly = True
        if may:
            run.settings.refuses["persistent_workers"] = "it has set_epoch()"
        run.epoch(1.0)
        run.windows(BEFORE, SLOW, MORE)
        assert run.changes == [Change("num_workers", 1, 2, GAIN)]
        assert run.log == [("change", "num_workers", 2)]


class TestWorkersThatLiveOn:
    PREDICTED = pytest.approx((6.0 / 5.5, 1.2, 1.2 * 1.07))
    """A second of set-up before five seconds of steps."""

    def run(self, *set_ups_s: float, **more: Any) -> PlainRun:
        """Epochs of four windows each, and of ten steps, which take 5 s."""
        run = one_worker(waiting=["persistent_workers"], **{"run_length": RunLength(10, 9), **more})
        for each in set_ups_s:
            run.epoch(each)
            run.windows(4, SLOW, LIVE_ON)
        return run

    def test_not_before_two_epochs_have_begun(self) -> None:
        assert self.run(5.0).changes == []
        assert self.run(5.0, 1.0).log == [("change", "persistent_workers", True)]

    def test_they_are_kept_where_the_set_up_becomes_clearly_shorter_else_taken_back(self) -> None:
        run = self.run(5.0, 1.0, 1.0)
        assert run.changes == [Change("persistent_workers", False, True, self.PREDICTED)]
        run.epoch(0.25)
        run.window(SLOW)
        assert run.changes == [kept("persistent_workers", False, True, measured=6.0 / 5.25, predicted=self.PREDICTED)]
        assert run.messages[-1] == (
            "AutoFix: persistent_workers False → True: predicted 1.20x (1.09x to 1.28x), measured 1.14x, kept"
        )
        run = self.run(5.0, 1.0, 1.0)
        run.epoch(0.75)
        run.window(SLOW)
        back = taken_back("persistent_workers", False, True, measured=6.0 / 5.75, predicted=self.PREDICTED)
        assert run.changes == [back]
        assert run.settings.values["persistent_workers"] is False

    def test_the_first_batch_of_an_epoch_is_made_with_them_as_well(self) -> None:
        [change] = self.run(5.0, 1.0, batch_s=0.5).changes
        assert change.predicted == pytest.approx((6.0 / 5.5 / 1.07, 6.0 / 5.5, 6.0 / 5.5 * 1.07))

    def test_the_steps_of_its_trial_are_not_those_before_the_next_change(self) -> None:
        run = self.run(5.0, 1.0)
        run.epoch(1.0)
        run.windows(4, 9.0)
        run.epoch(0.25)
        run.window(SLOW, MORE)
        run.windows(SKIPPED + PROOF, FAST)
        assert run.changes[1:] == [kept("num_workers", 1, 2)]

    def test_a_last_epoch_too_short_for_a_window_of_steps_still_counts(self) -> None:
        run = self.run(5.0, 1.0, 1.0)
        run.epoch(0.25)
        run.window(None)
        assert run.changes == [Change("persistent_workers", False, True, self.PREDICTED)]
        run.controller.training_ended()
        assert run.changes == [kept("persistent_workers", False, True, measured=6.0 / 5.25, predicted=self.PREDICTED)]


class TestACopyAhead:
    COPY = finding("host_to_device", pin_memory=True)

    def test_waking_it_is_the_beginning_of_another_run(self) -> None:
        run = PlainRun({"num_workers": 1, "pin_memory": True})
        run.epoch()
        assert run.windows(BEFORE, SLOW, self.COPY, on_gpu=True) == [False, False, False, True]
        assert run.changes == [Change("device_prefetch", False, True, GAIN)]
        assert run.windows(SKIPPED + PROOF, FAST, on_gpu=True) == [False] * 6
        assert run.changes == [kept("device_prefetch", False, True)]

    def test_page_locked_memory_is_kept_without_a_prediction_and_says_why(self) -> None:
        run = tried(PlainRun({"num_workers": 0, "pin_memory": False}), self.COPY, on_gpu=True)
        run.windows(SKIPPED + PROOF, FAST, on_gpu=True)
        why = "not predicted: only a trial shows how much faster copies from page-locked memory are"
        assert run.changes == [kept("pin_memory", False, True, predicted=None, why=why)]
        assert run.messages[-1] == f"AutoFix: pin_memory False → True: measured 2.0x, kept ({why})"


class TestAProblemWithTheWorkers:
    GONE = "there is no longer room for more workers, limited by memory"

    def test_ends_the_trial_of_more(self) -> None:
        run = tried(one_worker(), MORE)
        run.windows(3, FAST)
        run.loader.problems.append(self.GONE)
        run.window(FAST)
        assert run.changes == [taken_back("num_workers", 1, 2, measured=2.0, why=self.GONE)]
        assert run.log[-1] == ("back", "num_workers", 1)

    @pytest.mark.parametrize("waits", [False, True])
    def test_ends_the_trial_of_something_else_and_is_told_beside_it(self, waits: bool) -> None:
        run = PlainRun({"num_workers": 4, "prefetch_factor": 2}, waiting=["prefetch_factor"] * waits)
        tried(run, AHEAD)
        run.windows(2, FAST)
        run.loader.problems.append(self.GONE)
        run.loader.lost = run.settings, 3
        run.window(FAST)
        ended = Change("prefetch_factor", 2, 4, GAIN, why=INTERRUPTED)  # before it came: it refutes nothing
        assert run.changes == [
            ended if waits else taken_back("prefetch_factor", 2, 4, measured=2.0, why=INTERRUPTED),
            Change("num_workers", 4, 3, kept=True, why=self.GONE),
        ]
        assert run.log[-1] == ("back", "prefetch_factor", 2)

    def test_what_was_measured_before_it_counts_no_more(self) -> None:
        run = PlainRun({"num_workers": 4, "prefetch_factor": 2})
        run.windows(BEFORE, SLOW)
        run.loader.problems.append(self.GONE)
        run.loader.lost = run.settings, 3
        run.windows(BEFORE, SLOW, AHEAD)
        assert run.log == []
        run.window(SLOW, AHEAD)
        assert run.log == [("change", "prefetch_factor", 4)]

    def test_is_a_note_where_the_number_is_as_it_was(self) -> None:
        run = one_worker()
        run.windows(2, SLOW)
        run.loader.problems.append("a worker that was started in mid-epoch never gave a batch")
        run.window(SLOW)
        assert run.changes == []
        assert run.controller.notes == [
            "AutoFix starts workers only at the beginning of an epoch: a worker that was started in mid-epoch never "
            "gave a batch."
        ]


class TestTheEndOfTraining:
    def test_before_a_change_has_come(self) -> None:
        run = tried(no_worker(), FIRST)
        run.controller.training_ended()
        assert run.changes == [Change("num_workers", 0, 2, GAIN, why=LAST_EPOCH)]
        run.controller.undo()
        assert run.loader.undone == [{"num_workers": 0}]

    def test_when_it_was_refused_with_the_last_iterator(self) -> None:
        run = tried(no_worker(), FIRST)
        run.settings.refuses["num_workers"] = "reading the dataset draws"
        run.epoch()
        run.controller.training_ended()
        assert run.changes == [Change("num_workers", 0, 2, GAIN, why="reading the dataset draws")]

    @pytest.mark.parametrize(("windows", "measured"), [(SKIPPED + 2, 2.0), (0, None)])
    def test_before_a_gain_is_proved(self, windows: int, measured: float | None) -> None:
        run = tried(one_worker(), MORE)
        run.windows(windows, FAST)
        run.controller.training_ended()
        assert run.changes == [taken_back("num_workers", 1, 2, measured=measured, why=TOO_SHORT)]
        run.controller.undo()
        assert run.loader.undone == [{"num_workers": 1}]

    def test_with_workers_that_were_to_persist(self) -> None:
        run = TestWorkersThatAreNotForked().slow(epoch_s=1.0)
        run.controller.training_ended()
        assert run.changes == [
            Change("num_workers", 1, 2, GAIN, why=LAST_EPOCH),
            Change("persistent_workers", False, True, why=LAST_EPOCH),
        ]
        run = TestWorkersThatAreNotForked().slow(epoch_s=1.0)
        run.epoch(1.0)
        run.windows(2, FAST)
        run.controller.training_ended()
        assert [(each.kept, each.why) for each in run.changes] == [(False, TOO_SHORT)] * 2
        run.controller.undo()
        assert run.loader.undone == [{"num_workers": 1, "persistent_workers": False}]

    def test_what_was_kept_stays(self) -> None:
        run = tried(one_worker(), MORE)
        run.windows(SKIPPED + PROOF, FAST)
        run.controller.training_ended()
        run.controller.undo()
        assert run.changes == [kept("num_workers", 1, 2)]
        assert run.loader.undone == [{}]

    def test_undone_without_it_and_twice(self) -> None:
        run = tried(one_worker(), MORE)
        run.controller.undo()
        run.controller.undo()
        assert run.changes == [taken_back("num_workers", 1, 2, measured=None, why=TOO_SHORT)]
        assert run.loader.undone == [{"num_workers": 1}] * 2
        assert run.broadcast.closed == 2


class TestRanks:
    def test_rank_0_sends_what_is_taken_back_once_an_epoch_has_begun(self) -> None:
        run = one_worker(run_length=RunLength(10, 5))
        run.epoch()
        run.windows(BEFORE, SLOW, MORE)
        run.windows(SKIPPED + PROOF, FAST)
        run.epoch(5.0)
        run.window(FAST)
        assert run.broadcast.sent[-1] == ["back", "num_workers", 1]
        other = one_worker(rank=1)
        other.broadcast.came = list(run.broadcast.sent)
        other.controller.obey()
        other.controller.undo()
        assert other.loader.undone == [{}]  # it ends with what rank 0 has

    def test_the_others_decide_nothing_and_look_after_their_workers(self) -> None:
        run = one_worker(rank=1)
        run.loader.problems.append("gone")
        run.windows(30, SLOW, MORE)
        assert (run.changes, run.log, list(run.loader.problems)) == ([], [], [])
        assert run.broadcast.sent == []

    def test_they_obey(self) -> None:
        run = one_worker(rank=1)
        run.broadcast.came = [["change", "num_workers", 2], ["change", "prefetch_factor", 4]]
        run.controller.obey()
        run.broadcast.came = [["back", "prefetch_factor", 2]]
        run.controller.obey()
        assert run.log == [
            ("change", "num_workers", 2),
            ("change", "prefetch_factor", 4),
            ("back", "prefetch_factor", 2),
        ]
        run.controller.undo()
        assert run.loader.undone == [{"num_workers": 1}]
        run.broadcast.came = [["change", "num_workers", 2], ["keep", "num_workers", None]]
        run.controller.obey()
        run.controller.undo()
        assert run.loader.undone[1:] == [{}]

    def test_where_one_cannot_the_rest_of_the_news_counts_all_the_same(self) -> None:
        run = one_worker(rank=1)
        run.settings.refuses["num_workers"] = "no room here"
        run.broadcast.came = [["change", "num_workers", 2], ["change", "prefetch_factor", 4]]
        run.controller.obey()
        assert run.log == [("change", "prefetch_factor", 4)]

    def test_a_copy_ahead_begins_another_run_for_rank_0_alone(self) -> None:
        run = PlainRun({"num_workers": 1}, rank=1)
        run.broadcast.came = [["change", "device_prefetch", True]]
        run.controller.obey()
        assert run.settings.values["device_prefetch"] is True
        assert run.windows(3, SLOW) == [False] * 3

    def test_where_they_cannot_be_reached_nothing_is_changed(self) -> None:
        run = one_worker()
        broadcast: Any = PlainBroadcast(problem="this torch.distributed set-up has no key-value store")
        run.controller.start(broadcast)
        assert tried(run, MORE).changes == []


def test_the_loader_is_told_of_each_epoch() -> None:
    run = one_worker()
    run.controller.epoch_begins()
    assert run.log == [("epoch",)]


def test_a_fault_of_its_own_is_the_guards() -> None:
    class Caught:
        def __init__(self) -> None:
            self.seen: list[BaseException | None] = []

        def __enter__(self) -> None:
            pass

        def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
            self.seen.append(error)
            return True

    guard, fault = Caught(), ValueError("ours")

    def broken() -> str:
        raise fault

    run = one_worker(guard=guard)
    run.loader.step_done = broken  # type: ignore[method-assign]
    assert run.window(SLOW, MORE) is False
    run.controller.training_ended()
    assert guard.seen == [fault, None]
