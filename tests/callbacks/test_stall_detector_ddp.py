"""StallDetector on real DDP ranks, on the CPU over gloo: the slow rank is found, and rank 0 speaks for all."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from tests.callbacks import watched_rank
from tests.helpers import BROADCASTS
from tests.ranks import run_ranks

pytestmark = pytest.mark.timed


@pytest.fixture(scope="module")
def two() -> list[Any]:
    """What each of two ranks saw in its runs."""
    return run_ranks("tests.callbacks.watched_rank:two", 2)


def test_ranks_that_are_alike_have_no_straggler(two: list[Any]) -> None:
    assert two[0]["alike"]["verdict"] == "compute_bound"
    assert two[0]["alike"]["warned"] == []


def test_a_rank_with_a_slower_step_is_found(two: list[Any]) -> None:
    run = two[0]["compute"]
    assert (run["verdict"], run["rank"], run["kind"]) == ("straggler", 1, "compute")


def test_a_rank_with_slower_data_is_found(two: list[Any]) -> None:
    run = two[0]["data"]
    assert (run["verdict"], run["rank"], run["kind"]) == ("straggler", 1, "data")


def test_gradients_that_take_longer_than_the_step_are_communication(two: list[Any]) -> None:
    run = two[0]["collectives"]
    assert run["verdict"] == "communication"
    known = {
        "gradient_mib": 16.0,
        "gradient_dtype": "float32",
        "find_unused_parameters": "False",
        "gradient_as_bucket_view": "False",
        "static_graph": "False",
        "accumulate_grad_batches": 1,
    }
    assert known.items() <= run["evidence"].items()
    assert "link" not in run["evidence"]  # nobody knows it on a CPU


def test_metrics_reduced_in_each_step_are_logging(two: list[Any]) -> None:
    run = two[0]["metrics"]
    assert run["verdict"] == "logging"
    assert run["evidence"]["metric"] == ", ".join(f"loss/{number}" for number in range(8))
    assert run["syncs"] == [8.0]
    lines, first = inspect.getsourcelines(watched_rank.LogsEachStep)
    line = first + next(number for number, text in enumerate(lines) if "sync_dist=True" in text)
    assert re.match(rf"\d+ % LightningModule\.log \(watched_rank\.py:{line}\)", run["evidence"]["where"])


def test_a_slow_rank_that_others_wait_for_in_their_metrics_is_a_straggler(two: list[Any]) -> None:
    run = two[0]["metrics_slow_rank"]
    assert (run["verdict"], run["rank"], run["kind"]) == ("straggler", 1, "compute")


def test_metrics_reduced_once_an_epoch_are_none(two: list[Any]) -> None:
    run = two[0]["epoch_metrics"]
    assert run["steps"] == 35
    assert run["syncs"] in ([], [None])


@pytest.mark.skipif(not BROADCASTS, reason="this Lightning has no _broadcast_sigterm_tensor")
def test_lightnings_own_broadcast_before_each_step_is_measured(two: list[Any]) -> None:
    for rank in two:
        assert 0 < rank["data"]["broadcast_s"] < rank["data"]["wall_s"]


def test_only_rank_0_logs_and_warns(two: list[Any]) -> None:
    assert two[0]["compute"]["logged"] == [14, 24, 34]
    assert len(two[0]["compute"]["warned"]) == 1
    assert "straggler" in two[0]["compute"]["warned"][0]
    for run in two[1].values():
        assert run["warned"] == []


def test_only_rank_0_writes_the_report(two: list[Any]) -> None:
    assert two[0]["compute"]["files"] == ["report.html", "report.json"]
    assert all(run["files"] == [] for run in two[1].values())


def test_every_rank_trained_to_the_end_with_the_same_weights(two: list[Any]) -> None:
    for name in ("alike", "compute", "data"):
        assert two[0][name]["steps"] == two[1][name]["steps"] == 35
        assert two[0][name]["weights"] == two[1][name]["weights"]


def test_all_ranks_raise_at_the_same_step() -> None:
    first, second = run_ranks("tests.callbacks.watched_rank:raise_alike", 2)
    assert first == second
    assert {name: run["error"] for name, run in first.items()} == dict.fromkeys(first, "StallError")
    assert all(run["text"].startswith("Training waits: main_process_loading takes ") for run in first.values())
    assert 15 < first["window"]["batches"] < 2000
    assert first["end"]["batches"] == 30


def test_one_slow_rank_among_four_is_found() -> None:
    ranks = run_ranks("tests.callbacks.watched_rank:four", 4)
    run = ranks[0]["compute"]
    assert (run["verdict"], run["rank"], run["kind"]) == ("straggler", 2, "compute")
    assert len({tuple(rank["compute"]["weights"]) for rank in ranks}) == 1
