"""The throughput model, with numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_gpuopt.measurements.loader_model import LoaderModel, most_workers, net_saving

MODEL = LoaderModel(
    service_s=0.2,
    cpu_s=0.05,
    receive_s=(0.0, 0.001, 0.002),
    consumer_s=0.02,
    consumer_cpu_s=0.01,
    cpus=(2.0, 2.0, 2.0),
    spread=0.1,
)


@pytest.mark.parametrize(
    ("count", "expected_s"),
    [
        (1, 0.2),  # the worker's own pace
        (4, 0.05),
        (7, 0.03),  # two CPUs share 60 ms of work
        (32, 0.03),
    ],
)
def test_the_slowest_of_worker_cpu_and_step_sets_the_pace(count: int, expected_s: float) -> None:
    assert MODEL.step_s(count)[1] == pytest.approx(expected_s)


def test_the_step_itself_is_the_floor() -> None:
    assert replace(MODEL, cpu_s=0.0, consumer_cpu_s=0.0).step_s(32) == pytest.approx((0.0192, 0.021, 0.0228))


def test_the_interval_widens_with_the_spread_and_the_cpus_that_others_may_take() -> None:
    fast, _, slow = MODEL.step_s(1)
    assert (fast, slow) == pytest.approx((0.18, 0.22))
    fast, mid, slow = replace(MODEL, cpus=(1.0, 1.5, 2.0)).step_s(32)
    assert (fast, mid, slow) == pytest.approx((0.8 * 0.03, 0.04, 1.2 * 0.06))


def test_workers_are_added_as_long_as_they_gain_three_percent() -> None:
    assert MODEL.workers_needed() == 8  # 7 reach the pace, and a tenth is spared
    assert MODEL.workers_needed(most=3) == 3
    assert replace(MODEL, service_s=0.001).workers_needed() == 1
    assert replace(MODEL, cpu_s=0.2).workers_needed() <= 3


@pytest.mark.parametrize(("unevenness", "workers"), [(0.0, 8), (0.5, 9), (1.0, 11), (9.0, 11)])
def test_more_is_spared_where_batches_differ(unevenness: float, workers: int) -> None:
    assert replace(MODEL, unevenness=unevenness).workers_needed() == workers


def test_there_is_a_limit_to_what_is_advised() -> None:
    assert (most_workers(0.5), most_workers(2), most_workers(64), most_workers(math.inf)) == (4, 16, 32, 32)
    endless = replace(MODEL, service_s=100.0, cpu_s=0.0, cpus=(math.inf,) * 3)
    assert endless.workers_needed() == 32


def test_what_workers_save_less_what_starting_them_takes() -> None:
    def saved_s(workers: int, now: int = 2, **more: float) -> float:
        return net_saving(workers, now, step_s=0.1, steps=100, set_up_s=4.0, cpus=2.0, **more)

    assert saved_s(2) == -4.0
    assert saved_s(4) == 5.0 - 8.0  # half of the waits; on two CPUs four start one pair after the other
    assert saved_s(8, speedup=2.0) == 5.0 - 16.0
    assert saved_s(2, now=1) == 5.0 - 4.0  # side by side
