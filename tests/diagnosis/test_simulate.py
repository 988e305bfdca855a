"""The discrete-event run of a loader, by numbers that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.simulate import Pipeline, shape_of, simulate

WAITS = Pipeline(
    workers=1,
    prefetch_factor=2,
    service_s=0.1,
    cpu_s=0.0,
    receive_s=0.0,
    receive_cpu_s=0.0,
    consumer_s=0.02,
    consumer_cpu_s=0.0,
    cpus=2.0,
)
COMPUTES = replace(WAITS, cpu_s=0.1)


def step_of(pipeline: Pipeline) -> object:
    return pytest.approx(simulate(pipeline).step_s, rel=5e-3)


@pytest.mark.parametrize(("workers", "step_s"), [(1, 0.1), (2, 0.05), (4, 0.025), (5, 0.02), (8, 0.02), (32, 0.02)])
def test_the_slower_of_workers_and_step_sets_the_pace(workers: int, step_s: float) -> None:
    assert step_s == step_of(replace(WAITS, workers=workers))


@pytest.mark.parametrize(("workers", "prefetch_factor"), [(10**12, 2), (8, 10**12), (10**12, 10**12)])
def test_more_than_all_batches_are_never_under_way(workers: int, prefetch_factor: int) -> None:
    assert step_of(replace(WAITS, workers=workers, prefetch_factor=prefetch_factor)) == 0.02


def test_receiving_a_batch_is_added_to_the_step() -> None:
    assert step_of(replace(WAITS, workers=8, receive_s=0.004)) == 0.024


def test_a_worker_gets_its_next_batch_when_one_was_received() -> None:
    one = replace(WAITS, prefetch_factor=1, receive_s=0.03)
    assert step_of(one) == 0.13
    assert step_of(replace(one, prefetch_factor=2)) == 0.1


def test_without_workers_loading_and_step_take_turns() -> None:
    assert step_of(replace(WAITS, workers=0)) == 0.12
    assert step_of(replace(COMPUTES, workers=0, cpus=0.5)) == 0.22


@pytest.mark.parametrize(("workers", "step_s"), [(1, 0.1), (2, 0.05), (4, 0.05), (16, 0.05)])
def test_more_workers_than_cpus_bring_nothing_where_they_compute(workers: int, step_s: float) -> None:
    assert step_s == step_of(replace(COMPUTES, workers=workers))


def test_workers_that_compute_half_of_their_time_need_half_a_cpu() -> None:
    half = replace(WAITS, cpu_s=0.05, cpus=1.0)
    assert step_of(replace(half, workers=2)) == 0.05
    assert step_of(replace(half, workers=8)) == 0.05
    assert step_of(replace(half, workers=8, cpus=2.0)) == 0.025


def test_the_step_needs_cpus_too() -> None:
    busy = replace(COMPUTES, workers=8, consumer_cpu_s=0.02)
    assert step_of(busy) == 0.06  # 0.1 and 0.02 CPU seconds on two CPUs
    assert step_of(replace(busy, receive_s=0.004, receive_cpu_s=0.004)) == 0.062


def test_a_worker_of_several_threads_slows_down_once_they_have_no_cpu() -> None:
    threads = replace(WAITS, cpu_s=0.4, cpus=4.0)
    assert step_of(threads) == 0.1
    assert step_of(replace(threads, cpus=2.0)) == 0.2


def test_a_longer_queue_bridges_slow_batches() -> None:
    shape = shape_of((0.005, 0.00501, 0.2, 0.201), (95, 0, 5))
    uneven = replace(WAITS, workers=4, service_s=0.0148, consumer_s=0.01, shape=shape)
    steps = [simulate(replace(uneven, prefetch_factor=factor)).step_s for factor in (1, 2, 4, 8, 16)]
    assert steps == sorted(steps, reverse=True)
    assert len(set(steps)) == 5
    assert steps[0] < 0.01 + 0.05 * 0.2  # not even then the slow ones are waited for in full
    assert steps[-1] == pytest.approx(0.01)


def test_batches_come_in_order_from_each_worker_in_turn() -> None:
    # Every worker alike, one batch in flight each: the step waits for the slowest of two, not for their mean.
    shape = shape_of((0.0, 1e-9, 0.2, 0.2 + 1e-9), (1, 0, 1))
    two = replace(WAITS, workers=2, prefetch_factor=1, service_s=0.1, consumer_s=0.0, shape=shape)
    assert 0.05 < simulate(two).step_s < 0.1


def test_it_says_how_busy_workers_and_cpus_were() -> None:
    waits = simulate(replace(WAITS, workers=10))
    assert (waits.workers_busy, waits.cpus_busy) == (pytest.approx(0.5, abs=0.01), 0.0)
    computes = simulate(replace(COMPUTES, workers=4))
    assert (computes.workers_busy, computes.cpus_busy) == (pytest.approx(1, abs=0.01), pytest.approx(1, abs=0.01))


def test_the_same_question_has_the_same_answer() -> None:
    uneven = replace(WAITS, workers=4, shape=shape_of((0.01, 0.02, 0.2), (90, 10)))
    assert simulate(uneven) == simulate(uneven)


def test_the_shape_of_a_histogram_has_its_quantiles_and_mean_one() -> None:
    shape = shape_of((1.0, 3.0, 5.0), (1, 1), parts=4)
    assert shape == pytest.approx((1.5 / 3, 2.5 / 3, 3.5 / 3, 4.5 / 3))
    assert sum(shape_of((0.01, 0.02, 0.5), (97, 3))) == pytest.approx(1000)
    assert shape_of((), ()) == ()
