"""The throughput model, read off a run, with numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from evaluation.gains import HALVES, load, width
from lightning_gpuopt.diagnosis.predict import (
    SPREADS,
    ceiling,
    headroom,
    loader_costs,
    loader_model,
    speedup_of_persistent_workers,
    speedup_of_workers,
    speedup_without,
    without_data_s,
)
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.diagnosis.what_if import WhatIf, what_if
from lightning_gpuopt.measurements.loader_model import STEP_SPREAD
from lightning_gpuopt.measurements.loading import LoaderFacts, WorkerTimes
from tests.diagnosis.numbers import IN_PROCESS, data_finding, gpu, host, measurement, times, workers


def test_the_model_is_read_off_a_measurement() -> None:
    model = loader_model(
        measurement(
            times(data_wait=5.0),
            workers=workers(data_s=0.15, collate_s=0.03, cpu=0.5, batch_bytes=2_000_000),
            host=host(0.5, free=1.0, usable=4.0, process_cpus=0.5),
        )
    )
    assert model is not None
    assert model.service_s == pytest.approx(0.18)
    assert model.cpu_s == pytest.approx(0.1)  # 0.09 in the thread that makes it
    assert model.consumer_s == pytest.approx(0.05)
    assert model.consumer_cpu_s == pytest.approx(0.05)
    assert model.receive_s == pytest.approx((0.0003, 0.0018, 0.004))
    # 0.5 CPUs here, 0.9 in the workers and 1.0 free are sure; 4 are allowed
    assert model.cpus == pytest.approx((2.4, 2.4, 4.0))


def test_what_the_process_does_by_itself_counts_once() -> None:
    model = loader_model(
        measurement(
            times(data_wait=5.0),
            IN_PROCESS,
            workers=workers(data_s=0.05, cpu=1.0),
            host=host(None, free=1.0, usable=2.0, process_cpus=0.75),
        )
    )
    assert model is not None
    assert model.consumer_cpu_s == pytest.approx(0.025)


def test_without_measured_workers_there_is_no_model() -> None:
    assert loader_model(measurement(times(data_wait=5.0))) is None
    assert speedup_of_workers(measurement(times(data_wait=5.0)), 4) is None
    assert loader_model(measurement(times(steps=0), workers=workers(data_s=0.1))) is None


def test_uneven_batches_make_the_prediction_less_sure() -> None:
    def width(unevenness: float) -> float:
        timed = workers(data_s=0.19, unevenness=unevenness)
        low, _, high = speedup_of_workers(measurement(times(data_wait=5.0), workers=timed), 3) or (0, 0, 0)
        return high - low

    assert width(4.0) > 2 * width(0.0)


@pytest.mark.parametrize(
    ("timed", "now", "change"),
    [
        (workers(data_s=0.19), 2, WhatIf(num_workers=3)),
        (workers(data_s=0.19, cpu=1.0), 2, WhatIf(num_workers=8)),
        (replace(workers(data_s=0.02, unevenness=4.0), took={90: 95, 105: 5}), 2, WhatIf(prefetch_factor=8)),
        (replace(workers(data_s=0.02, unevenness=4.0), took={90: 95, 105: 5}), 2, WhatIf(num_workers=4)),
        (workers(data_s=0.05), 0, WhatIf(num_workers=4)),
        (workers(data_s=0.001), 2, WhatIf(num_workers=0)),
    ],
)
def test_a_forecast_of_the_same_change_is_the_same_number(timed: WorkerTimes, now: int, change: WhatIf) -> None:
    loader = IN_PROCESS if not now else LoaderFacts(now, False, 2, False)
    busy = host(0.5, free=1.0, usable=4.0, process_cpus=0.5)
    measured = measurement(times(data_wait=5.0), loader, workers=timed, host=busy)
    report = StallReport(
        "slow_storage",
        10.0,
        {},
        [],
        step_s=measured.waterfall.step_s,
        loader=loader,
        loader_costs=loader_costs(measured),
    )
    workers_then = now if change.num_workers is None else change.num_workers
    predicted = speedup_of_workers(measured, workers_then, change.prefetch_factor)
    assert predicted is not None
    assert predicted[1] == what_if(report, change).speedup[1] > 1


def test_a_prediction_never_promises_a_loss() -> None:
    even = measurement(times(data_wait=0.0), workers=workers(data_s=0.01))
    low, mid, high = speedup_of_workers(even, 2) or (0, 0, 0)
    assert (low, mid) == (1.0, 1.0)
    assert high == 1 + SPREADS["workers"]


def test_taking_work_away_gains_half_to_all_of_it() -> None:
    low, mid, high = speedup_without(measurement(times()), 2.0) or (0, 0, 0)
    assert (low, mid) == pytest.approx((10 / 9, 10 / 8))
    assert high == pytest.approx((1 + SPREADS["without"]) * 10 / 8)
    assert speedup_without(measurement(times(steps=0)), 2.0) is None


@pytest.mark.parametrize(
    ("seconds", "interval"),
    [
        ((10.0, 5.0, 0.0), (15 / 12.5, 1.5, 1.5 * 1.07)),
        ((10.0, 5.0, 1.0), (15 / 13, 15 / 11, 15 / 11 * 1.07)),
        ((10.0, 1.0, 0.0), (1.1 / 1.07, 1.1, 1.1 * 1.07)),  # as uncertain as other predictions
        ((10.0, 1.0, 2.0), (1.0, 1.0, 1.07)),  # the first batch is all of it
    ],
)
def test_workers_that_persist_save_an_epoch_its_set_up_but_for_the_first_batch(
    seconds: tuple[float, float, float], interval: tuple[float, float, float]
) -> None:
    assert SPREADS["without"] == 0.07
    assert speedup_of_persistent_workers(*seconds) == pytest.approx(interval)


def test_the_headroom_is_what_is_not_the_steps_own_work() -> None:
    waits = times(data_wait=2.0, transfer=0.5, logging=0.5, validation=4.0)
    assert headroom(measurement(waits)) == pytest.approx(0.5)
    hidden = gpu(compute_s=5.9, copy_s=0.1)
    assert headroom(measurement(waits, gpu=hidden)) == pytest.approx(0.1 / 6)
    assert headroom(measurement(times(steps=0))) is None


def test_on_a_gpu_the_ceiling_is_its_own_step_time() -> None:
    # 100 ms on the GPU, one worker that needs 130 ms, 20 ms to issue a step
    one = LoaderFacts(num_workers=1, persistent_workers=True, prefetch_factor=2, pin_memory=True)
    measured = measurement(
        times(data_wait=7.0),
        one,
        gpu=gpu(77, compute_s=7.7, idle={"data_wait": 2.31}),
        workers=workers(77, data_s=0.13),
    )
    assert ceiling(measured) == pytest.approx(1.3)
    low, mid, high = speedup_of_workers(measured, 2) or (0, 0, 0)
    assert mid == pytest.approx(1.3)
    assert (low, high) == pytest.approx((1.3 / 1.07, 1.3 * 1.07))
    finding = data_finding(measured)
    assert (finding.cause, finding.settings) == ("slow_storage", {"num_workers": 2})
    assert finding.share == pytest.approx(0.231 / 1.001, rel=1e-3)
    assert "at most 1.30x" in finding.advice
    assert "NumWorkersFinder" in finding.advice


def test_a_batch_is_taken_for_nothing_unless_the_host_waits_for_the_gpu_anyway() -> None:
    ahead = gpu(idle={"data_wait": 2.0})
    in_step = gpu(idle={"data_wait": 2.0}, exposed_by={"Bar.on_train_batch_end": 2.0})
    costs = [
        loader_model(measurement(times(data_wait=2.0), gpu=each, workers=workers(data_s=0.1))).receive_s  # type: ignore[union-attr]
        for each in (ahead, in_step)
    ]
    assert costs == [(0.0, 0.0, 0.0), pytest.approx((0.0003, 0.0008005, 0.002001))]


def test_a_host_that_is_freed_runs_ahead_and_hides_the_rest() -> None:
    # 30 ms on the GPU; the host loads for 41 ms, sits in a hook for 15 and issues for 4
    host_times = times(data_wait=4.1, callbacks={"Slow.on_train_batch_start": 1.5})
    measured = measurement(
        replace(host_times, wall_s=6.0),
        gpu=gpu(compute_s=3.0, idle={"data_wait": 1.5, "Slow.on_train_batch_start": 1.5}),
    )
    assert without_data_s(measured) == pytest.approx(0.03)
    assert ceiling(measured) == pytest.approx(2.0)
    # without the hook the host still needs 45 ms
    _, mid, _ = speedup_without(measured, 1.5, 1.5) or (0, 0, 0)
    assert mid == pytest.approx(60 / 45)


def test_a_host_that_waits_at_every_step_hides_nothing_more() -> None:
    host_times = replace(times(data_wait=4.1, broadcast_s=0.5, other=0.5), wall_s=6.0)
    measured = measurement(host_times, gpu=gpu(compute_s=3.0, idle={"data_wait": 1.5, "logging": 1.5}))
    assert without_data_s(measured) == pytest.approx(0.045)


class TestCosts:
    def test_of_workers(self) -> None:
        two = workers(data_s=0.08, cpu=0.5, collate_s=0.02)
        measured = measurement(
            times(data_wait=4.0), workers=replace(two, took={100: 98, 103: 2}), host=host(0.3, queued=0.1, usable=4.0)
        )
        costs = loader_costs(measured)
        assert costs is not None
        assert (costs.num_workers, costs.prefetch_factor, costs.batches) == (2, 2, 100)
        assert (costs.data_s, costs.data_cpu_s, costs.collate_s) == pytest.approx((0.08, 0.04, 0.02))
        assert (costs.worker_cpu_s, costs.queued_s) == pytest.approx((0.06, 0.02))  # of 20 worker-seconds
        assert costs.batch_s == pytest.approx(0.08)
        assert costs.consumer_s == pytest.approx(0.06)
        assert costs.usable_cpus == 4.0
        assert costs.edges_s == pytest.approx([2**25 / 1e9 * 2 ** (each / 4) for each in range(5)])
        assert costs.counts == (98, 0, 0, 2)

    def test_of_the_training_process(self) -> None:
        measured = measurement(times(data_wait=4.0), IN_PROCESS, workers=workers(data_s=0.04, cpu=1.0))
        costs = loader_costs(measured)
        assert costs is not None
        assert (costs.num_workers, costs.prefetch_factor) == (0, None)
        assert (costs.batch_s, costs.worker_cpu_s) == pytest.approx((0.04, 0.04))
        assert (costs.queued_s, costs.usable_cpus, costs.free_cpus, costs.consumer_cpu_s) == (None,) * 4
        assert (costs.edges_s, costs.counts) == ((), ())

    def test_of_what_was_not_timed(self) -> None:
        assert loader_costs(measurement(times(data_wait=4.0))) is None
        assert loader_costs(measurement(times(), LoaderFacts(), workers=workers(data_s=0.04))) is None


def test_the_intervals_are_as_wide_as_predictions_were_off_and_hold_for_runs_that_were_left_out() -> None:
    predictions = load()
    for kind, spread in SPREADS.items():
        assert spread == pytest.approx(max(math.ceil(100 * width(predictions, kind)) / 100, STEP_SPREAD)), kind
    held_out = [each.gain.kept for each in predictions if each.half == HALVES[1]]
    assert sum(held_out) >= 0.9 * len(held_out)
    assert len(held_out) >= 20
