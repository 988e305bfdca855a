"""GpuUtilMonitor on two real DDP ranks, on the CPU, with two simulated GPUs of constant load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.simulators.nvml import Gpu, Simulator

BOTH = {
    "gpu/0/utilization": 90.0,
    "gpu/1/utilization": 50.0,
    "gpu/mean/utilization": 70.0,
    "gpu/min/utilization": 50.0,
    "gpu/imbalance": 40.0,
}


@pytest.fixture(scope="module")
def ranks(simulator_library, tmp_path_factory) -> list[Mapping[str, Any]]:
    """What each rank saw in its runs."""
    simulator = Simulator(simulator_library, tmp_path_factory.mktemp("ddp") / "scenario.txt")
    simulator.machine(Gpu(utilization=90), Gpu(utilization=50))
    env = {name: value for name, value in simulator.environment().items() if not name.startswith("CUDA_")}
    return run_ranks("tests.callbacks.monitored_rank:run", 2, env=env, library=str(simulator_library))


def test_rank_0_logs_the_gpus_of_all_ranks_and_their_imbalance(ranks):
    assert ranks[0]["own"]["records"] == [[1, BOTH], [3, BOTH]]
    assert ranks[0]["own"]["summary"] == BOTH


def test_other_ranks_log_nothing_and_know_their_own(ranks):
    assert [run["records"] for run in ranks[1].values()] == [[]] * 4
    assert ranks[1]["own"]["summary"] == {"gpu/1/utilization": 50.0}


def test_a_gpu_that_both_ranks_watch_counts_once(ranks):
    assert ranks[0]["all"]["records"] == [[1, BOTH], [3, BOTH]]


def test_ranks_that_each_see_only_their_own_gpu_are_told_apart(ranks):
    assert ranks[0]["isolated"]["records"] == [[1, BOTH], [3, BOTH]]


def test_a_gpu_lost_on_another_rank_is_told_there_and_missing_here(ranks):
    records = ranks[0]["lost"]["records"]
    assert [step for step, _ in records] == [1, 3, 5]
    assert records[0][1] == BOTH
    assert records[-1][1] == {"gpu/0/utilization": 90.0}
    (warning,) = ranks[1]["lost"]["warnings"]
    assert warning.startswith("[rank 1] GpuUtilMonitor: GPU 1")
    assert "is lost" in warning
    assert ranks[0]["lost"]["warnings"] == []


def test_on_every_rank_nvml_is_shut_down_and_was_left_alone_by_the_training_thread(ranks):
    assert [(run["references"], run["calls_here"]) for rank in ranks for run in rank.values()] == [(0, 0)] * 8
