"""StallDetector on real DDP ranks, on the CPU over gloo: the slow rank is found, and rank 0 speaks for all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import run_ranks


@pytest.fixture(scope="module")
def two() -> list[Any]:
    """What each of two ranks saw in its runs."""
    return run_ranks("tests.callbacks.watched_rank", "two", 2)


def test_ranks_that_are_alike_have_no_straggler(two: list[Any]) -> None:
    assert two[0]["alike"]["verdict"] == "compute_bound"
    assert two[0]["alike"]["warned"] == []


def test_a_rank_with_a_slower_step_is_found(two: list[Any]) -> None:
    run = two[0]["compute"]
    assert (run["verdict"], run["rank"], run["kind"]) == ("straggler", 1, "compute")


def test_a_rank_with_slower_data_is_found(two: list[Any]) -> None:
    run = two[0]["data"]
    assert (run["verdict"], run["rank"], run["kind"]) == ("straggler", 1, "data")


def test_lightnings_own_broadcast_before_each_step_is_measured(two: list[Any]) -> None:
    for rank in two:
        assert 0 < rank["data"]["broadcast_s"] < 2.0


def test_only_rank_0_logs_and_warns(two: list[Any]) -> None:
    assert two[0]["compute"]["logged"] == [14, 24, 34]
    assert len(two[0]["compute"]["warned"]) == 1
    assert "straggler" in two[0]["compute"]["warned"][0]
    for run in two[1].values():
        assert run["warned"] == []


def test_only_rank_0_writes_the_report(two: list[Any]) -> None:
    assert two[0]["compute"]["files"] == ["report.html", "report.json"]
    assert [run["files"] for run in two[1].values()] == [[], [], []]


def test_every_rank_trained_to_the_end_with_the_same_weights(two: list[Any]) -> None:
    for name in ("alike", "compute", "data"):
        assert two[0][name]["steps"] == two[1][name]["steps"] == 35
        assert two[0][name]["weights"] == two[1][name]["weights"]


def test_ranks_of_which_one_begins_anew_still_end_their_windows_together() -> None:
    ranks = run_ranks("tests.callbacks.watched_rank", "grown", 2)
    assert ranks == [{"posts": 3, "began_anew": None}, {"posts": 3, "began_anew": 8}]


def test_one_slow_rank_among_four_is_found() -> None:
    ranks = run_ranks("tests.callbacks.watched_rank", "four", 4)
    run = ranks[0]["compute"]
    assert (run["verdict"], run["rank"], run["kind"]) == ("straggler", 2, "compute")
    assert len({tuple(rank["compute"]["weights"]) for rank in ranks}) == 1
