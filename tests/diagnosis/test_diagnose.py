"""The diagnosis, with numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose, remarks, verdict_of
from lightning_gpuopt.measurements.gpu import DeviceState, GpuTimes
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import PHASES, PhaseTimes
from lightning_gpuopt.measurements.ranks import RankWork
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, gpu, host, measurement, times


def find(measured: PhaseTimes, threshold: float = 0.1, loader: LoaderFacts = TWO_WORKERS, **kwargs: Any) -> list[Any]:
    return diagnose(measurement(measured, loader, **kwargs), threshold)


def test_a_run_that_only_computes_has_no_finding() -> None:
    assert find(times()) == []
    assert verdict_of([]) == "compute_bound"
    assert verdict_of([], look_missed=True) == "unknown"


def test_nothing_is_reported_below_the_threshold() -> None:
    barely = times(data_wait=0.99, logging=0.99, checkpoint=0.99, validation=0.99, callbacks={"A.x": 0.99})
    assert find(barely) == []
    assert [finding.cause for finding in find(times(logging=1.0))] == ["logging"]


def test_no_steps_no_finding() -> None:
    assert find(times(steps=0, data_wait=9)) == []
    assert find(PhaseTimes(0.0, 0, dict.fromkeys(PHASES, 0.0), {}, 0)) == []


def test_several_causes_come_largest_first() -> None:
    findings = find(
        times(data_wait=2, logging=3, validation=1.5, checkpoint=1.2, callbacks={"Slow.on_train_batch_end": 1.1}),
        host=host(0.9),
    )
    assert [(finding.cause, round(finding.share, 9)) for finding in findings] == [
        ("logging", 0.3),
        ("slow_transform", 0.2),
        ("validation", 0.15),
        ("checkpoint", 0.12),
        ("callback", 0.11),
    ]
    assert verdict_of(findings) == "logging"


class TestGpu:
    """Only the time in which the GPU was idle counts, whatever the host did meanwhile."""

    def test_a_wait_that_the_gpu_works_through_is_no_stall(self) -> None:
        assert find(times(data_wait=5, logging=2), host=host(0.9), gpu=gpu(compute_s=10.0)) == []

    def test_the_idle_time_is_attributed_to_what_the_host_did_in_it(self) -> None:
        measured = gpu(compute_s=5.5, idle={"data_wait": 2.5, "logging": 1.1, "Slow.on_train_batch_end": 0.9})
        findings = find(times(data_wait=8), 0.05, host=host(0.9), gpu=measured)
        assert [(each.cause, each.share) for each in findings] == [
            ("slow_transform", 0.25),
            ("logging", pytest.approx(0.11)),
            ("callback", pytest.approx(0.09)),
        ]
        assert findings[0].evidence["gpu_idle_ms_per_step"] == 25.0

    def test_a_healthy_step_under_ddp_is_compute_bound(self) -> None:
        # 20 ms to issue, 80 ms on the GPU: the host spends 60 ms of each step in Lightning's broadcast
        measured = times(broadcast_s=6.0, other=6.0)
        healthy = gpu(compute_s=8.0, compute_bound_s=2.0, wait_s=0.01, idle={"data_wait": 0.02})
        device = DeviceState(utilization=97.0, seconds=10.0)
        assert find(measured, gpu=healthy, device=device, ranks=(RankWork(0, 0.0, 0.0), RankWork(1, 0.0, 0.0))) == []

    def test_the_same_with_a_loader_that_stalls_the_gpu(self) -> None:
        stalled = gpu(77, compute_s=6.2, wait_s=0.01, idle={"data_wait": 2.3}, exposed_by={"signal_broadcast": 2.3})
        (finding,) = find(times(broadcast_s=4.0, other=4.0, data_wait=2.3), loader=IN_PROCESS, gpu=stalled)
        assert (finding.cause, round(finding.share, 2)) == ("main_process_loading", 0.27)
        assert finding.evidence["exposed_by"] == "Lightning's _broadcast_sigterm_tensor"

    def test_a_slow_loader_behind_a_progress_bar_that_waits(self) -> None:
        bar = gpu(compute_s=7.0, idle={"data_wait": 3.0}, exposed_by={"TQDM.on_train_batch_end": 2.9})
        measured = times(data_wait=3, callbacks={"TQDM.on_train_batch_end": 6.0})
        (finding,) = find(measured, host=host(0.05), gpu=bar)
        assert (finding.cause, finding.evidence["exposed_by"]) == ("slow_storage", "TQDM.on_train_batch_end")

    def test_augmentation_on_the_gpu_is_work(self) -> None:
        assert (
            find(times(transfer=1.5), gpu=gpu(compute_s=8.4, queued={"Net.on_after_batch_transfer": 1.5}, copy_s=0.1))
            == []
        )

    def test_a_hook_before_the_step_is_a_callback(self) -> None:
        (finding,) = find(times(), gpu=gpu(compute_s=5.0, idle={"Slow.on_train_batch_start": 5.0}))
        assert (finding.cause, finding.share) == ("callback", 0.5)
        assert (finding.evidence["callback"], finding.evidence["hook"]) == ("Slow", "on_train_batch_start")

    def test_a_hook_of_the_batch_is_a_callback_too(self) -> None:
        (finding,) = find(times(transfer=3), gpu=gpu(compute_s=7.0, idle={"Net.on_after_batch_transfer": 3.0}))
        assert (finding.cause, finding.evidence["hook"]) == ("callback", "on_after_batch_transfer")

    @pytest.mark.parametrize("on_gpu", [False, True])
    def test_what_the_diagnosis_itself_costs_is_no_finding_but_a_note(self, on_gpu: bool) -> None:
        own = {"StallDetector.on_train_batch_end": 2.0}
        measured = measurement(
            times(callbacks=own), TWO_WORKERS, gpu=gpu(compute_s=8.0, idle=dict(own)) if on_gpu else None
        )
        assert diagnose(measured, 0.1) == []
        share = 25 if on_gpu else 20  # on a GPU it is left out of the whole, too
        assert [note for note in remarks(measured, 0.1) if "own diagnosis" in note] == [
            f"{share}% of the time is StallDetector's own diagnosis, which matters in a run this short, or with a "
            "window_size this small."
        ]
        assert not any("own diagnosis" in note for note in remarks(measured, 0.3))

    def test_checkpoints_and_restarts_count_by_the_gpus_idle_time(self) -> None:
        loader = LoaderFacts(num_workers=2, persistent_workers=False, prefetch_factor=2, pin_memory=False)
        idle = {"checkpoint": 2.0, "epoch_setup": 0.5, "first_fetch": 1.0}
        findings = find(times(checkpoint=4, epoch_setup=3, epochs=5), loader=loader, gpu=gpu(compute_s=6.5, idle=idle))
        assert [(each.cause, each.share) for each in findings] == [
            ("checkpoint", 0.2),
            ("epoch_restart", pytest.approx(0.15)),
        ]

    def test_validation_counts_by_its_wall_time_on_the_gpu(self) -> None:
        # the host waits in it for the training steps that were queued before
        assert find(times(validation=3), gpu=gpu(compute_s=9.5, validation_s=0.5)) == []
        (finding,) = find(times(validation=0.1), gpu=gpu(compute_s=7.0, validation_s=3.0))
        assert (finding.cause, finding.share) == ("validation", 0.3)

    def test_before_a_step_was_read_nothing_is_said(self) -> None:
        assert find(times(data_wait=5), host=host(0.9), gpu=GpuTimes()) == []


def test_what_can_be_changed_comes_with_a_prediction() -> None:
    (finding,) = find(times(callbacks={"Slow.on_train_batch_end": 5.0}))
    assert finding.predicted_speedup is not None
    low, mid, high = finding.predicted_speedup
    assert mid == pytest.approx(2.0)  # half the step goes
    assert low == pytest.approx(100 / 75)  # if only half of it goes
    assert high > mid
