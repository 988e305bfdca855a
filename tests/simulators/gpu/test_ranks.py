"""Simulated GPUs of several processes."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.simulators.gpu import rank_environment


@pytest.mark.timed
def test_two_ranks_wait_for_each_other_on_their_devices(tmp_path):
    first, second = run_ranks("tests.simulators.gpu.simulated_rank:fit", 2, env=rank_environment(tmp_path, 2))
    assert (first["device"], second["device"], first["weights_on"]) == ("cuda:0", "cuda:1", "cpu")
    assert first["sum"] == second["sum"] == 3.0
    assert len(first["reduces"]) == len(second["reduces"])
    assert [end for _, end in first["reduces"]] == [end for _, end in second["reduces"]]
    buckets = [
        (each[1] - each[0], other[1] - other[0])
        for each, other in zip(first["reduces"], second["reduces"], strict=True)
    ]
    assert sum(each for each, _ in buckets) > sum(other for _, other in buckets)  # rank 1 is late
    if first["broadcasts"]:
        for rank in (first, second):
            assert len(rank["signals"]) == len(rank["broadcasts"]) == 6
            for (begin_s, end_s), (_, done_s) in zip(rank["broadcasts"], rank["signals"], strict=True):
                assert begin_s < done_s < end_s  # a blocking read follows


def test_a_rank_hears_of_another_whose_host_asks_nothing(tmp_path):
    first, second = run_ranks(
        "tests.simulators.gpu.simulated_rank:ahead",
        2,
        env=rank_environment(tmp_path, 2),
        done_file=str(tmp_path / "done"),
    )
    assert [end for _, end in first["reduces"]] == [end for _, end in second["reduces"]]
