"""What holds a step up beside its data: hooks, the copy to the device, the inside of the step, clocks; from numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose, remarks
from lightning_gpuopt.diagnosis.predict import SPREADS
from lightning_gpuopt.measurements.gpu import AheadCopies, DeviceState, StepLook, SyncSighting
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import PhaseTimes
from tests.diagnosis.numbers import TWO_WORKERS, gpu, measurement, times


def find(measured: PhaseTimes, threshold: float = 0.1, loader: LoaderFacts = TWO_WORKERS, **kwargs: Any) -> list[Any]:
    return diagnose(measurement(measured, loader, **kwargs), threshold)


class TestCallbacks:
    def test_a_callback_is_named_with_its_slowest_hook(self) -> None:
        hooks = {"Slow.on_train_batch_start": 1.0, "Slow.on_train_batch_end": 2.0, "Quick.on_train_batch_end": 0.5}
        (finding,) = find(times(callbacks=hooks))
        assert (finding.cause, finding.share) == ("callback", 0.3)
        assert finding.evidence == {
            "ms_per_step": 30.0,
            "step_ms": 100.0,
            "callback": "Slow",
            "hook": "on_train_batch_end",
        }

    def test_the_measuring_itself_is_called_so(self) -> None:
        (finding,) = find(times(callbacks={"WatchedRun.on_train_batch_end": 3.0}))
        assert finding.evidence["callback"] == "WatchedRun"
        assert finding.advice.startswith("This is the cost of measuring")


class TestInsideTheStep:
    IDLE = gpu(compute_s=9.5, compute_bound_s=9.5, idle={"data_wait": 0.5})
    NVML = DeviceState(utilization=60.0, seconds=10.0)

    def test_idle_time_inside_the_step_is_launching(self) -> None:
        (finding,) = find(times(), gpu=self.IDLE, device=self.NVML)
        assert finding.cause == "launch_bound"
        # 4 s idle, of which 0.5 s between the steps
        assert finding.share == pytest.approx(0.35)
        assert finding.evidence["gpu_utilization_percent"] == 60.0

    def test_it_is_waiting_where_calls_of_the_user_that_wait_were_seen(self) -> None:
        syncs = SyncSighting(steps=3, count=6, places=(("training_step (model.py:12)", 6),))
        (finding,) = find(times(), gpu=self.IDLE, device=self.NVML, syncs=syncs)
        assert (finding.cause, finding.evidence["where"]) == ("gpu_sync", "100 % training_step (model.py:12)")
        assert finding.evidence["syncs_per_step"] == 2.0
        assert "model.py:12" in finding.advice

    @pytest.mark.parametrize("syncs", [SyncSighting(3, 1, (("model.py:12", 1),)), SyncSighting(3, 0)])
    def test_a_rare_call_and_those_of_libraries_are_not_the_cause(self, syncs: SyncSighting) -> None:
        (finding,) = find(times(), gpu=self.IDLE, device=self.NVML, syncs=syncs)
        assert finding.cause == "launch_bound"

    def test_a_busy_gpu_has_no_finding(self) -> None:
        assert find(times(), gpu=self.IDLE, device=DeviceState(utilization=97.0, seconds=10.0)) == []

    def test_a_host_that_is_done_long_before_the_gpu_cannot_be_too_slow(self) -> None:
        assert find(times(), gpu=gpu(compute_s=9.5, compute_bound_s=0.2), device=self.NVML) == []

    def test_nothing_is_told_while_a_look_is_to_come(self) -> None:
        assert find(times(), gpu=self.IDLE, device=self.NVML, look_pending=True) == []

    @pytest.mark.parametrize(("seconds", "found"), [(4.9, False), (5.0, True)])
    def test_utilization_counts_from_five_seconds_on(self, seconds: float, found: bool) -> None:
        measured = gpu(1000, compute_s=95.0, compute_bound_s=95.0)
        device = DeviceState(utilization=60.0, seconds=seconds)
        assert bool(find(times(), gpu=measured, device=device)) is found

    def test_of_a_short_run_half_is_enough(self) -> None:
        measured = gpu(compute_s=4.0, compute_bound_s=4.0)
        assert find(times(), gpu=measured, device=DeviceState(utilization=50.0, seconds=1.9)) == []
        assert len(find(times(), gpu=measured, device=DeviceState(utilization=50.0, seconds=2.0))) == 1

    @pytest.mark.parametrize(("utilization", "found"), [(84.0, False), (82.0, True)])
    def test_nvml_alone_has_to_be_sure(self, utilization: float, found: bool) -> None:
        # 16 or 18 % idle, of which 5 lie between the steps
        device = DeviceState(utilization=utilization, seconds=10.0)
        findings = find(times(), gpu=self.IDLE, device=device)
        assert bool(findings) is found
        waterfall = measurement(times(), gpu=self.IDLE, device=device).waterfall
        assert (waterfall.launch_s > 0) is found
        assert waterfall.idle_s == pytest.approx(10 - utilization / 10)

    def test_without_nvml_nothing_is_said(self) -> None:
        assert find(times(), gpu=self.IDLE, device=DeviceState()) == []

    def test_a_look_counts_more_than_utilization(self) -> None:
        busy = StepLook(steps=3, busy_s=0.094, launch_idle_s=0.001, sync_idle_s=0.0, calls=40)
        assert find(times(), gpu=self.IDLE, device=self.NVML, look=busy) == []

    def test_a_look_parts_waiting_from_launching(self) -> None:
        look = StepLook(steps=3, busy_s=0.045, launch_idle_s=0.02, sync_idle_s=0.03, calls=40)
        syncs = SyncSighting(3, 3, (("training_step (model.py:12)", 3),))
        findings = find(times(), gpu=self.IDLE, look=look, syncs=syncs)
        assert [(each.cause, round(each.share, 3)) for each in findings] == [("gpu_sync", 0.3), ("launch_bound", 0.2)]

    def test_what_recording_cost_the_host_is_taken_off(self) -> None:
        # under the profiler a step took 120 ms, of which 70 idle; it takes 95 otherwise
        look = StepLook(steps=3, busy_s=0.05, launch_idle_s=0.07, sync_idle_s=0.0, calls=40)
        (finding,) = find(times(), gpu=self.IDLE, look=look)
        assert finding.share == pytest.approx(0.45)
        assert finding.evidence["busy_ms_per_step"] == 50.0

    def test_the_signal_broadcast_is_named_where_there_is_no_gpu(self) -> None:
        (finding,) = find(times(broadcast_s=2.0, other=2.0))
        assert (finding.cause, finding.share) == ("gpu_sync", 0.2)
        assert finding.evidence["where"] == "Lightning's _broadcast_sigterm_tensor"


class TestHostToDevice:
    def test_an_exposed_copy_asks_for_pinned_memory(self) -> None:
        (finding,) = find(times(), gpu=gpu(50, compute_s=8.0, copy_s=2.0))
        assert (finding.cause, finding.share, finding.settings) == ("host_to_device", 0.2, {"pin_memory": True})

    def test_pinned_already_it_asks_for_less_to_copy(self) -> None:
        pinned = LoaderFacts(num_workers=2, persistent_workers=True, prefetch_factor=2, pin_memory=True)
        (finding,) = find(times(), loader=pinned, gpu=gpu(50, compute_s=8.0, copy_s=2.0))
        assert finding.settings == {}
        assert "CudaPrefetcher() among the Trainer's callbacks" in finding.advice
        assert "uint8" in finding.advice
        assert finding.predicted_speedup == pytest.approx((10 / 9, 10 / 8, (1 + SPREADS["without"]) * 10 / 8))

    def test_a_copy_that_takes_longer_than_the_rest_of_the_step_can_be_hidden_in_part(self) -> None:
        pinned = LoaderFacts(num_workers=2, persistent_workers=True, prefetch_factor=2, pin_memory=True)
        (finding,) = find(times(), loader=pinned, gpu=gpu(50, compute_s=3.0, copy_s=7.0))
        assert finding.predicted_speedup is not None
        assert finding.predicted_speedup[1] == pytest.approx(10 / 7)

    def test_copied_ahead_already_the_copy_is_too_long(self) -> None:
        ahead = AheadCopies(copies=50, copy_s=5.0, exposed_s=2.0)
        (finding,) = find(times(), gpu=gpu(50, compute_s=8.0, copy_s=2.0), ahead=ahead)
        assert "too late" in finding.advice
        assert (finding.evidence["copy_ms"], finding.evidence["exposed_copy_ms"]) == (100.0, 40.0)
        assert finding.settings == {}
        longer = AheadCopies(copies=50, copy_s=9.0, exposed_s=2.0)
        (finding,) = find(times(), gpu=gpu(50, compute_s=8.0, copy_s=2.0), ahead=longer)
        assert "takes longer than the rest of the step" in finding.advice

    def test_without_workers_it_says_what_looking_ahead_needs(self) -> None:
        alone = LoaderFacts(num_workers=0, persistent_workers=False, pin_memory=True)
        (finding,) = find(times(), loader=alone, gpu=gpu(50, compute_s=8.0, copy_s=2.0))
        assert "(num_workers=1 or more)" in finding.advice

    def test_without_a_gpu_it_is_the_walk_through_the_batch(self) -> None:
        (finding,) = find(times(transfer=3.0))
        assert (finding.cause, finding.share) == ("host_to_device", 0.3)


class TestGpuThrottled:
    def test_clocks_reduced_for_heat(self) -> None:
        state = DeviceState(99.0, None, 10.0, 80.0, 0.0, 1200.0, 1980.0)
        (finding,) = find(times(), gpu=gpu(), device=state)
        assert finding.cause == "gpu_throttled"
        assert finding.share == pytest.approx(1 - 1200 / 1980)

    @pytest.mark.parametrize(
        "state",
        [
            DeviceState(99.0, None, 10.0, 100.0, 0.0, 1900.0, 1980.0),  # it costs 4 %
            DeviceState(99.0, None, 10.0, 0.0, 0.0, 1200.0, 1980.0),
            DeviceState(99.0, None, 10.0, 5.0, 0.0, 1200.0, 1980.0),
            DeviceState(99.0),
        ],
    )
    def test_what_costs_little_is_no_finding(self, state: DeviceState) -> None:
        assert find(times(), gpu=gpu(), device=state) == []

    def test_a_power_cap_is_a_note(self) -> None:
        capped = DeviceState(99.0, None, 10.0, 0.0, 95.0, 1400.0, 1980.0)
        assert find(times(), gpu=gpu(), device=capped) == []
        (note,) = remarks(measurement(times(), gpu=gpu(), device=capped), 0.1)
        assert note.startswith("For 95 % of the time the GPU lowered its clocks to stay within its power limit")
        assert "1400 of 1980 MHz" in note
