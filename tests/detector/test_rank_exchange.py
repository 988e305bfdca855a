"""What ranks send to rank 0, and when."""

from __future__ import annotations

import pytest

from lightning_gpuopt.detector.rank_exchange import work_of
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.measurements.gpu import GpuTimes, StepLook
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.ranks import MetricSync, RankWork, ReducerTimes
from tests.diagnosis.numbers import gpu, measurement, pipelines, times, workers
from tests.ranks import run_ranks


def test_ranks_of_which_one_begins_anew_still_end_their_windows_together() -> None:
    first, second = run_ranks("tests.callbacks.watched_rank:grown", 2)
    assert (first["began_anew"], second["began_anew"]) == (None, 8)
    assert first["sent"] == second["sent"]
    assert len(first["sent"]) == 3


class TestWorkOfARank:
    def test_there_is_none_without_steps(self) -> None:
        assert work_of(1, Measurement(), forward=True) is None
        assert work_of(1, measurement(times(steps=0)), forward=True) is None
        assert work_of(1, measurement(times(), gpu=GpuTimes()), forward=True) is None

    def test_off_the_gpu_it_is_the_processs_phases(self) -> None:
        measured = times(
            data_wait=2.0,
            transfer=0.5,
            logging=1.0,
            backward=3.0,
            callbacks={"Slow.on_train_batch_end": 0.5, "Slow.on_validation_end": 1.0},
        )
        run = measurement(
            measured,
            workers=workers(data_s=0.04),
            metrics=MetricSync(100, 0.5),
            reducer=ReducerTimes(100, 100, 1.0),
        )
        # 2 s of forward, 0.5 of the copy, 1 of logging and 0.5 of a hook, without 0.5 s in which ranks wait in metrics
        assert work_of(1, run, forward=True) == RankWork(
            1,
            0.02,
            pytest.approx(0.035),  # type: ignore[arg-type]
            pytest.approx(0.02),  # type: ignore[arg-type]
            communication_s=run.collectives_s,
            metric_sync_s=0.005,
            batch_bytes=1000.0,
        )

    def test_of_a_loader_without_batches_nothing_is_known(self) -> None:
        for measured in (measurement(times()), measurement(times(), workers=workers(0, data_s=1.0))):
            work = work_of(0, measured, forward=False)
            assert work is not None
            assert work.loader_s is None

    def test_of_a_pipeline_its_threads_work(self) -> None:
        run = measurement(times(data_wait=5.0), LoaderFacts(), pipelines=pipelines(read_s=0.02, decode_cpu_s=0.04))
        work = work_of(0, run, forward=False)
        assert work is not None
        assert work.loader_s == pytest.approx(0.03)  # on two threads

    def test_on_the_gpu_it_is_the_gpus_own_time(self) -> None:
        busy = gpu(compute_s=7.0, copy_s=0.5, forward_s=3.0, idle={"data_wait": 1.0, "logging": 0.5, "checkpoint": 1.0})
        run = measurement(times(), gpu=busy)
        assert work_of(1, run, forward=True) == RankWork(1, 0.01, 0.01, None, 0.03, None)
        assert work_of(1, run, forward=False) == RankWork(1, 0.01, 0.01, None, None, None)

    def test_a_forward_in_which_ranks_wait_is_no_work_of_its_own(self) -> None:
        look = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.02, forward_collectives=True)
        work = work_of(1, measurement(times(), gpu=gpu(forward_s=3.0), look=look), forward=True)
        assert work is not None
        assert (work.forward_s, work.communication_s) == (None, 0.02)
