"""The throughput model, with numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_gpuopt.measurements import loader_model
from lightning_gpuopt.measurements.loader_model import LoaderModel, cpus_between, most_workers, net_saving

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


WAITS = LoaderModel(service_s=0.1, cpu_s=0.0, consumer_s=0.02, consumer_cpu_s=0.0, cpus=(2.0,) * 3)
UNEVEN = replace(WAITS, service_s=0.0148, consumer_s=0.01, edges_s=(0.005, 0.00501, 0.2, 0.201), counts=(95, 0, 5))


def evenly(model: LoaderModel) -> LoaderModel:
    """With batches that are taken one by one and are all alike."""
    return replace(model, edges_s=(1.0, 1.0), counts=(1,))


@pytest.mark.parametrize("each", [WAITS, evenly(WAITS)])
@pytest.mark.parametrize(("workers", "step_s"), [(1, 0.1), (2, 0.05), (5, 0.02), (8, 0.02), (10**12, 0.02)])
def test_the_slower_of_workers_and_step_sets_the_pace(each: LoaderModel, workers: int, step_s: float) -> None:
    assert each.pace(workers) == pytest.approx(step_s, rel=5e-3)
    assert each.pace(workers, 10**12) == pytest.approx(step_s, rel=5e-3)


def test_a_worker_gets_its_next_batch_when_one_was_received() -> None:
    slowly = replace(WAITS, receive_s=(0.0, 0.03, 0.03))
    assert slowly.pace(1, 1) == pytest.approx(0.13, rel=5e-3)
    assert slowly.pace(1, 2) == pytest.approx(0.1)
    assert slowly.pace(8) == pytest.approx(0.05)


def test_without_workers_loading_and_step_take_turns() -> None:
    assert WAITS.pace(0) == pytest.approx(0.12)
    assert replace(WAITS, cpu_s=0.1, consumer_cpu_s=0.02, cpus=(0.5,) * 3).pace(0) == pytest.approx(0.24)


def test_a_worker_of_several_threads_slows_down_once_they_have_no_cpu() -> None:
    threads = replace(WAITS, cpu_s=0.4, cpus=(4.0,) * 3)
    assert threads.pace(1) == pytest.approx(0.1)
    assert replace(threads, cpus=(2.0,) * 3).pace(1) == pytest.approx(0.2)


def test_a_longer_queue_bridges_slow_batches() -> None:
    steps = [UNEVEN.pace(4, factor) for factor in (1, 2, 4, 8, 16)]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 5
    assert steps[0] < 0.01 + 0.05 * 0.2  # not even then the slow ones are waited for in full
    assert steps[-1] == pytest.approx(0.01, rel=1e-2)
    assert UNEVEN.pace(4, 2) == replace(UNEVEN).pace(4, 2)


def test_the_same_question_is_reckoned_once() -> None:
    first = UNEVEN.step_s(4)
    reckoned = loader_model._in_order.cache_info().misses
    assert replace(UNEVEN).step_s(4) == first
    assert loader_model._in_order.cache_info().misses == reckoned


def test_batches_come_in_order_from_each_worker_in_turn() -> None:
    # Every worker alike, one batch in flight each: the step waits for the slowest of two, not for their mean.
    two = replace(WAITS, consumer_s=0.0, edges_s=(0.0, 1e-9, 0.2, 0.2 + 1e-9), counts=(1, 0, 1))
    assert 0.05 < two.pace(2, 1) < 0.1


def test_rare_slow_batches_keep_their_part_of_the_whole() -> None:
    rare = replace(WAITS, consumer_s=0.0, edges_s=(0.01, 0.02, 0.5), counts=(97, 3))
    assert rare.pace(1) == pytest.approx(0.1, rel=5e-3)


def test_it_says_how_much_of_workers_and_cpus_is_in_use() -> None:
    assert WAITS.in_use(10, WAITS.pace(10)) == (pytest.approx(0.5), 0.0)
    assert replace(WAITS, cpu_s=0.1).in_use(4, 0.05) == (pytest.approx(0.5), pytest.approx(1.0))


def test_what_is_not_explained_is_the_cost_of_taking_a_batch_unless_workers_or_cpus_are_the_limit() -> None:
    assert WAITS.explaining(0.05, 16).receive_s == pytest.approx((0.0, 0.03, 0.03))
    assert WAITS.explaining(0.05, 16).step_s(32) == pytest.approx((0.0192, 0.05, 0.0508))
    assert WAITS.explaining(0.01, 16).receive_s == (0.0, 0.0, 0.0)
    assert WAITS.explaining(0.05, 5) is WAITS.explaining(0.2, 0) is WAITS
    computes = replace(WAITS, cpu_s=0.04)
    assert computes.explaining(0.05, 16) is computes


@pytest.mark.parametrize(
    ("free", "cpus"), [(3.0, (3.0, 3.0, 4.0)), (1.0, (1.0, 2.0, 4.0)), (0.0, (0.1, 2.0, 4.0)), (9.0, (4.0, 4.0, 4.0))]
)
def test_at_least_half_of_the_cpus_are_expected(free: float, cpus: tuple[float, float, float]) -> None:
    assert cpus_between(free, 4.0) == cpus
