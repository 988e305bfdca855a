"""The gather over ranks: real processes with a real gloo group, some of which die."""

from __future__ import annotations

import threading

import pytest

from lightning_gpuopt.utils import rank_channel
from lightning_gpuopt.utils.rank_channel import Gathered, RankGather
from tests.helpers import wait_for
from tests.ranks import run_ranks


def test_one_rank_gets_back_what_it_put_in_without_a_thread():
    windows = []
    gather = RankGather("test", 0, 1, windows.append)
    gather.post(49, {"a": 1.0})
    gather.post(99, {"a": 2.0})
    assert gather.collects
    assert windows == [Gathered(49, {0: {"a": 1.0}}), Gathered(99, {0: {"a": 2.0}})]
    gather.close()
    gather.close()
    assert len(windows) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuopt-gather")]


def test_windows_of_all_ranks_come_to_rank_0_in_order_and_runs_do_not_mix():
    first, second = run_ranks("tests.utils.channel_ranks:all_windows", 2)
    assert first == {
        "collects": True,
        "problem": None,
        "seen": [
            [[step, {str(rank): {"run": run, "rank": rank} for rank in range(2)}] for step in (49, 99, 149)]
            for run in range(2)
        ],
    }
    assert second == {"collects": False, "problem": None, "seen": [[], []]}


def test_a_rank_that_dies_is_left_out_and_takes_nobody_along():
    first, second, third = run_ranks("tests.utils.channel_ranks:one_dies", 3)
    assert first == {"seen": [[0, [0, 1, 2]], [1, [0, 1]], [2, [0, 1]]], "problem": None}
    assert second == {"seen": [], "problem": None}
    assert third is None


def test_when_rank_0_dies_the_others_notice_and_end():
    first, second = run_ranks("tests.utils.channel_ranks:the_first_dies", 2)
    assert first is None
    assert second == {"problem": True, "windows": []}


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_store_each_rank_keeps_its_own_figures(rank):
    windows = []
    gather = RankGather("test", rank, 2, windows.append)
    gather.post(49, "mine")
    assert gather.problem is not None
    assert "no key-value store" in gather.problem
    assert gather.collects
    assert windows == [Gathered(49, {rank: "mine"})]


def test_when_the_store_fails_rank_0_goes_on_with_its_own_figures(monkeypatch):
    class Broken:
        def check(self, keys):
            raise RuntimeError("connection reset")

    monkeypatch.setattr(rank_channel, "open_store", lambda name: Broken())
    windows = []
    gather = RankGather("test", 0, 2, windows.append)
    gather.post(0, "first")
    wait_for(lambda: gather.problem is not None)
    gather.post(1, "second")
    gather.close()
    gather.post(2, "third")
    assert gather.problem == "the ranks' key-value store failed: connection reset"
    assert windows == [Gathered(0, {0: "first"}), Gathered(1, {0: "second"}), Gathered(2, {0: "third"})]


def test_who_fails_to_take_a_window_gets_the_next(monkeypatch):
    class Answers:
        def check(self, keys):
            return True

        def get(self, key):
            return b"0"

        def delete_key(self, key):
            taken.append(key)

    taken, windows = [], []

    def arrived(gathered):
        windows.append(gathered.step)
        raise RuntimeError("no")

    monkeypatch.setattr(rank_channel, "open_store", lambda name: Answers())
    gather = RankGather("test", 0, 2, arrived)
    gather.post(1, "a")
    gather.post(2, "b")
    gather.close(timeout_s=60.0)
    assert (windows, taken, gather.problem) == ([1, 2], ["0/1", "1/1"], None)


def test_closing_without_waiting_gives_out_what_is_there(monkeypatch):
    class Silent:
        def check(self, keys):
            return False

    monkeypatch.setattr(rank_channel, "open_store", lambda name: Silent())
    windows = []
    gather = RankGather("test", 0, 2, windows.append)
    gather.post(0, "mine")
    gather.close(timeout_s=0.0)
    assert windows == [Gathered(0, {0: "mine"})]


def test_the_thread_ends_once_a_store_answers_that_held_up_the_closing(monkeypatch):
    class Frozen:
        def check(self, keys):
            answers.wait()
            return False

    answers, windows = threading.Event(), []
    monkeypatch.setattr(rank_channel, "open_store", lambda name: Frozen())
    gather = RankGather("test", 0, 2, windows.append)
    thread = gather._thread
    gather.post(0, "first")
    wait_for(gather._inbox.empty)
    gather.post(1, "second")
    gather.close(timeout_s=0.0)
    assert windows == [Gathered(1, {0: "second"})]
    answers.set()
    wait_for(lambda: not thread.is_alive())
    assert windows[1:] == [Gathered(0, {0: "first"})]


def test_all_ranks_stop_at_the_same_step_wherever_they_are():
    ranks = run_ranks("tests.utils.channel_ranks:all_stop", 3)
    assert [each["problem"] for each in ranks] == [None] * 3
    assert ranks[1] == ranks[2] == ranks[0]
    assert [why for _, why in ranks[0]["seen"]] == ["run 0", "run 1"]
    assert all(step >= 3 for step, _ in ranks[0]["seen"])


def test_ranks_whose_training_ends_are_told_what_rank_0_says():
    first, second = run_ranks("tests.utils.channel_ranks:all_end", 2)
    assert first == {"seen": [None, "at the end", "asked"], "problem": None}
    assert second["seen"] == [None, "at the end", "asked", None]


@pytest.mark.matrix
def test_a_rank_that_is_gone_keeps_nobody_from_stopping():
    first, second, gone = run_ranks("tests.utils.channel_ranks:one_never_answers", 3)
    assert gone is None
    assert first == second
    assert first["why"] == "asked"
