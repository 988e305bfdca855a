"""The throughput model, read off a run, with numbers."""

from __future__ import annotations

import pytest

from lightning_gpuopt.diagnosis.predict import (
    headroom,
    loader_model,
    speedup_of_workers,
    speedup_without,
)
from lightning_gpuopt.timeline.gpu_clock import GpuTimes
from tests.diagnosis.numbers import IN_PROCESS, host, measurement, times, workers


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
    assert model.cpu_s == pytest.approx(0.09)
    assert model.consumer_s == pytest.approx(0.05)
    assert model.consumer_cpu_s == pytest.approx(0.05)
    assert model.receive_s == pytest.approx((0.0003, 0.0018, 0.004))
    # 0.5 CPUs here, 0.9 in the workers and 1.0 free are sure; 4 are allowed
    assert model.cpus == pytest.approx((2.4, 3.2, 4.0))


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


def test_a_prediction_never_promises_a_loss() -> None:
    even = measurement(times(data_wait=0.0), workers=workers(data_s=0.01))
    low, mid, high = speedup_of_workers(even, 2) or (0, 0, 0)
    assert (low, mid) == (1.0, 1.0)
    assert high == pytest.approx(100 / (96 + 0.3))


def test_taking_work_away_gains_half_to_all_of_it() -> None:
    low, mid, high = speedup_without(measurement(times()), 2.0) or (0, 0, 0)
    assert (low, mid) == pytest.approx((10 / 9, 10 / 8))
    assert high == pytest.approx(1.08 * 10 / 8)
    assert speedup_without(measurement(times(steps=0)), 2.0) is None


def test_the_headroom_is_what_is_not_the_steps_own_work() -> None:
    waits = times(data_wait=2.0, transfer=0.5, logging=0.5, validation=4.0)
    assert headroom(measurement(waits)) == pytest.approx(0.5)
    hidden = GpuTimes(steps=100, copy_s=0.1, gaps=100, idle_s=0.0)
    assert headroom(measurement(waits, gpu=hidden)) == pytest.approx(0.1 / 6)
    assert headroom(measurement(times(steps=0))) is None
