"""What the device waited for: one account, in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.waterfall import Waterfall, covers, in_steps, waterfall_of, worth_a_look
from lightning_gpuopt.measurements.gpu import DeviceState, GpuTimes, StepLook, SyncSighting
from tests.diagnosis.numbers import STEPS, gpu, times

IDLE = gpu(compute_s=9.5, compute_bound_s=9.5, idle={"data_wait": 0.5})
NVML = DeviceState(utilization=60.0, seconds=10.0)


def of(measured: GpuTimes, device: DeviceState | None = None, **more: Any) -> Waterfall:
    return waterfall_of(times(), measured, device, **more)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("data_wait", True),
        ("transfer", True),
        ("other", True),
        ("Slow.on_train_batch_end", True),
        ("Net.on_after_batch_transfer", True),
        ("Slow.on_train_epoch_end", False),
        ("validation", False),
        ("checkpoint", False),
        ("epoch_setup", False),
        ("first_fetch", False),
    ],
)
def test_what_belongs_to_every_step(name: str, inside: bool) -> None:
    assert in_steps(name) is inside


def test_shares_lie_between_0_and_1() -> None:
    waterfall = Waterfall(True, 10.0, 100, 0.1)
    assert [waterfall.share(seconds) for seconds in (-1.0, 0.0, 2.5, 11.0)] == [0.0, 0.0, 0.25, 1.0]
    assert Waterfall(True, 0.0, 0, None).share(5.0) == 0.0


def test_waits_are_summed() -> None:
    waits = {"data_wait": 1.0, "checkpoint": 2.0, "Slow.on_train_batch_end": 4.0, "Slow.on_train_end": 8.0}
    waterfall = Waterfall(True, 100.0, 10, 10.0, waits=waits, launch_s=16.0, sync_s=32.0, unsure_s=64.0)
    assert waterfall.wait("data_wait", "checkpoint", "logging") == 3.0
    assert waterfall.idle_s == 127.0
    assert waterfall.step_waits_s == 53.0  # without what lies between steps, and what is not sure


class TestOffTheGpu:
    def test_phases_are_the_waits(self) -> None:
        measured = replace(
            times(
                data_wait=2.0, transfer=1.5, logging=0.5, checkpoint=0.25, epoch_setup=0.75, other=1.0, validation=1.0
            ),
            signal_broadcast_s=0.25,
            batch_hooks={"Net.on_after_batch_transfer": 0.5},
        )
        waterfall = waterfall_of(measured)
        assert (waterfall.on_gpu, waterfall.wall_s, waterfall.steps, waterfall.validation_s) == (
            False,
            10.0,
            STEPS,
            1.0,
        )
        assert waterfall.step_s == pytest.approx(0.08)
        assert waterfall.waits == {
            "data_wait": 2.0,
            "transfer": 1.0,
            "logging": 0.5,
            "checkpoint": 0.25,
            "epoch_setup": 0.75,
            "other": 0.75,
            "signal_broadcast": 0.25,
            "Net.on_after_batch_transfer": 0.5,
            "garbage_collection": 0,
            "recompilation": 0,
        }
        assert (waterfall.work_s, waterfall.launch_s, waterfall.sync_s) == (0.0, 0.0, 0.0)

    def test_what_stopped_a_step_is_no_part_of_what_it_stopped(self) -> None:
        hook = "Slow.on_train_batch_end"
        measured = replace(
            times(data_wait=2.0, callbacks={hook: 1.0}),
            collecting={"data_wait": 0.5, "forward": 1.0},
            compiling={hook: 0.25},
        )
        waits = waterfall_of(measured).waits
        assert (waits["data_wait"], waits[hook]) == (1.5, 0.75)
        assert (waits["garbage_collection"], waits["recompilation"]) == (1.5, 0.25)

    def test_the_diagnosis_itself_is_apart(self) -> None:
        waterfall = waterfall_of(times(callbacks={"StallDetector.on_train_batch_end": 2.0, "Slow.setup": 1.0}))
        assert waterfall.diagnosis_s == 2.0
        assert [name for name in waterfall.waits if "." in name] == ["Slow.setup"]


class TestOnTheGpu:
    @pytest.mark.parametrize(
        ("wait_s", "beside", "waits_s", "own_s"),
        [(3.0, True, 4.0, 0.0), (3.0, False, 3.0, 1.0), (0.5, True, 0.5, 1.0)],
    )
    def test_while_it_diagnoses_a_loader_beside_it_goes_on(
        self, wait_s: float, beside: bool, waits_s: float, own_s: float
    ) -> None:
        measured = gpu(compute_s=5.0, idle={"data_wait": wait_s, "StallDetector.on_train_batch_end": 1.0})
        waterfall = of(measured, loads_beside=beside)
        assert (waterfall.wait("data_wait"), waterfall.diagnosis_s) == (waits_s, own_s)
        assert waterfall.step_s == pytest.approx((5.0 + waits_s) / STEPS)

    def test_before_a_step_was_read_there_is_nothing(self) -> None:
        assert of(GpuTimes()) == Waterfall(True, 0.0, 0, None)

    def test_idle_time_and_the_copy_are_the_waits(self) -> None:
        measured = gpu(
            copy_s=0.5,
            queued={"Ema.on_train_batch_end": 0.25, "Swa.on_train_epoch_end": 0.5},
            compute_s=5.5,
            wait_s=0.25,
            validation_s=1.0,
            idle={"data_wait": 1.0, "transfer": 0.25, "epoch_setup": 0.25, "first_fetch": 0.5},
        )
        waterfall = of(measured)
        assert waterfall.waits == {"data_wait": 1.0, "transfer": 0.75, "epoch_setup": 0.75}
        assert (waterfall.wall_s, waterfall.work_s, waterfall.validation_s) == (10.0, 6.75, 1.0)
        assert waterfall.step_s == (10.0 - 1.0 - 0.75 - 0.5) / STEPS

    def test_the_diagnosis_itself_is_no_part_of_the_whole(self) -> None:
        waterfall = of(gpu(compute_s=8.0, idle={"StallDetector.on_train_batch_end": 2.0, "data_wait": 1.0}))
        assert (waterfall.wall_s, waterfall.diagnosis_s, waterfall.waits["data_wait"]) == (9.0, 2.0, 1.0)

    @pytest.mark.parametrize(
        ("exposed", "named"), [({"Bar.x": 0.5, "Log.y": 0.25}, "Bar.x"), ({"Bar.x": 0.49}, ""), ({}, "")]
    )
    def test_a_hook_that_exposed_half_of_it_is_named(self, exposed: dict[str, float], named: str) -> None:
        assert of(gpu(compute_s=9.0, idle={"data_wait": 1.0}, exposed_by=exposed)).exposed_by == named


class TestInsideTheSteps:
    def test_without_nvml_and_a_look_nothing_is_known(self) -> None:
        assert of(IDLE).launch_s == 0.0
        assert of(IDLE, DeviceState()).launch_s == 0.0

    def test_utilization_gives_what_lies_not_between_the_steps(self) -> None:
        waterfall = of(replace(IDLE, compute_s=9.0, compute_bound_s=9.0, copy_s=0.5), NVML)
        assert waterfall.launch_s == pytest.approx(4.0 - 0.5 - 0.5)  # no kernel runs in a copy either
        assert waterfall.sync_s == 0.0

    def test_validation_and_the_like_count_as_idle(self) -> None:
        measured = gpu(compute_s=7.0, compute_bound_s=7.0, validation_s=1.0, idle={"checkpoint": 1.0, "data_wait": 1.0})
        assert of(measured, NVML).unsure_s == pytest.approx(1.0)

    def test_a_gpu_is_not_idle_after_the_host_has_issued_all(self) -> None:
        assert of(replace(IDLE, compute_bound_s=2.0), NVML).launch_s == 2.0

    def test_less_than_nvmls_error_is_not_sure(self) -> None:
        waterfall = of(IDLE, replace(NVML, utilization=84.0))
        assert (waterfall.launch_s, waterfall.unsure_s) == (0.0, pytest.approx(1.1))

    @pytest.mark.parametrize(
        ("syncs", "waiting"),
        [
            (None, 0.0),
            (SyncSighting(3, 3, (("m.py:1", 3),)), 1.0),
            (SyncSighting(4, 2, (("m.py:1", 2),)), 1.0),  # in every second step
            (SyncSighting(4, 1, (("m.py:1", 1),)), 0.0),
            (SyncSighting(0, 0), 0.0),
        ],
    )
    def test_calls_of_the_user_make_it_waiting(self, syncs: SyncSighting | None, waiting: float) -> None:
        waterfall = of(IDLE, NVML, syncs=syncs)
        assert (waterfall.sync_s, waterfall.launch_s) == pytest.approx((3.5 * waiting, 3.5 * (1 - waiting)))

    def test_a_look_gives_both_apart(self) -> None:
        look = StepLook(3, busy_s=0.045, launch_idle_s=0.02, sync_idle_s=0.03, calls=40)
        waterfall = of(IDLE, look=look, syncs=SyncSighting(3, 3, (("m.py:1", 3),)))
        assert (waterfall.launch_s, waterfall.sync_s) == pytest.approx((2.0, 3.0))
        other = of(IDLE, look=look, syncs=SyncSighting(3, 0))  # torch's debug mode does not know every call that waits
        assert (other.launch_s, other.sync_s) == pytest.approx((2.0, 3.0))

    def test_copies_that_the_step_makes_are_apart_too(self) -> None:
        look = StepLook(3, busy_s=0.04, launch_idle_s=0.01, sync_idle_s=0.0, copy_idle_s=0.05, calls=40)
        waterfall = of(replace(IDLE, compute_bound_s=1.0), look=look)  # however far ahead the host is
        assert (waterfall.copies_s, waterfall.launch_s) == pytest.approx((5.0, 0.5))
        assert waterfall.step_waits_s == pytest.approx(5.0 + 0.5 + 0.5)

    @pytest.mark.parametrize("launch_idle_s", [0.0, 0.05, 0.2])
    def test_copies_are_what_they_are_however_much_the_look_slows_the_host(self, launch_idle_s: float) -> None:
        look = StepLook(3, busy_s=0.055, launch_idle_s=launch_idle_s, sync_idle_s=0.0, copy_idle_s=0.04, calls=40)
        assert of(IDLE, look=look).copies_s == pytest.approx(4.0)

    def test_hooks_that_wait_are_given_what_they_were_seen_to_cost(self) -> None:
        idle = {"Metric.on_train_batch_end": 0.8, "data_wait": 0.5}
        measured = gpu(
            compute_s=9.0,
            idle=idle,
            looked_at={"Metric.on_train_batch_end": 0.024},
            looked_idle={"Metric.on_train_batch_end": 0.006},
        )
        waterfall = of(measured)
        assert waterfall.waits["Metric.on_train_batch_end"] == pytest.approx(0.006 + (0.8 - 0.006) / 4)
        assert waterfall.wall_s == pytest.approx(of(gpu(compute_s=9.0, idle=idle)).wall_s)

    def test_a_look_counts_however_little_it_saw(self) -> None:
        look = StepLook(3, busy_s=0.094, launch_idle_s=0.001, sync_idle_s=0.0, calls=40)
        assert of(IDLE, NVML, look=look).launch_s == pytest.approx(0.1)

    def test_of_a_look_and_the_usual_step_the_lesser_counts(self) -> None:
        slowed = StepLook(3, busy_s=0.09, launch_idle_s=0.09, sync_idle_s=0.0, calls=40)
        assert of(IDLE, look=slowed).launch_s == pytest.approx(0.5)
        usual = StepLook(3, busy_s=0.05, launch_idle_s=0.01, sync_idle_s=0.0, calls=40)
        assert of(IDLE, look=usual).launch_s == pytest.approx(9.5 / 6)
        # a collection now and then may have lain in none of the steps that were looked at
        collects = replace(IDLE, paused={"garbage_collection": 1.0})
        assert of(collects, look=usual).waits["garbage_collection"] == pytest.approx(1.0)
        assert of(collects, look=usual).launch_s == pytest.approx(9.5 / 6)

    def test_what_stopped_the_host_comes_first(self) -> None:
        measured = replace(IDLE, paused={"garbage_collection": 1.5, "recompilation": 0.5})
        waterfall = of(measured, NVML)
        assert (waterfall.waits["garbage_collection"], waterfall.waits["recompilation"]) == pytest.approx((1.5, 0.5))
        assert waterfall.launch_s == pytest.approx(1.5)
        assert waterfall.work_s == pytest.approx(9.5 - 1.5 - 2.0)

    def test_no_more_of_that_than_the_gpu_was_idle(self) -> None:
        measured = replace(IDLE, compute_bound_s=1.0, paused={"garbage_collection": 1.5, "recompilation": 0.5})
        waterfall = of(measured, look=StepLook(3, 0.05, 0.05, 0.0, calls=40))
        assert (waterfall.waits["garbage_collection"], waterfall.waits["recompilation"]) == pytest.approx((0.75, 0.25))
        assert waterfall.launch_s == 0.0

    def test_without_another_sign_it_is_what_made_those_steps_longer(self) -> None:
        # ten steps took 0.2 s, the others 0.1
        measured = gpu(
            compute_s=11.0, compute_bound_s=11.0, paused={"recompilation": 5.0}, paused_steps=10, paused_compute_s=2.0
        )
        assert of(measured).waits["recompilation"] == pytest.approx(1.0)
        assert of(replace(measured, paused={"recompilation": 0.5})).waits["recompilation"] == pytest.approx(0.5)
        assert of(replace(measured, paused_steps=100)).waits["recompilation"] == 0.0


@pytest.mark.parametrize(
    ("seconds", "wall_s", "enough"), [(4.9, 100.0, False), (5.0, 100.0, True), (1.9, 4.0, False), (2.0, 4.0, True)]
)
def test_nvml_has_to_cover_five_seconds_or_half_of_a_short_run(seconds: float, wall_s: float, enough: bool) -> None:
    assert covers(DeviceState(utilization=50.0, seconds=seconds), wall_s) is enough


@pytest.mark.parametrize(
    ("device", "worth"),
    [
        (DeviceState(utilization=60.0, seconds=6.0), True),
        (DeviceState(utilization=60.0, seconds=4.0), False),
        (DeviceState(utilization=99.0, seconds=6.0), False),
        (DeviceState(utilization=100.0, sm_activity=15.0, seconds=6.0), True),  # small kernels
        (DeviceState(utilization=99.0, seconds=6.0, neighbours=("python (pid 7)",)), True),
        (DeviceState(), True),  # MIG
        (None, True),
    ],
)
def test_nvml_decides_whether_to_look_or_the_events_where_it_cannot(device: DeviceState | None, worth: bool) -> None:
    assert worth_a_look(IDLE, device, 0.1) is worth


AHEAD = gpu(compute_s=9.5, compute_bound_s=0.1, idle={"data_wait": 0.5})


@pytest.mark.parametrize(
    ("device", "worth"),
    [
        (DeviceState(utilization=60.0, seconds=6.0), True),  # copies inside the step
        (DeviceState(utilization=100.0, sm_activity=15.0, seconds=6.0), False),
        (DeviceState(), False),
        (None, False),
    ],
)
def test_behind_a_host_that_is_ahead_only_utilization_is_a_reason(device: DeviceState | None, worth: bool) -> None:
    assert worth_a_look(AHEAD, device, 0.1) is worth


def test_a_threshold_decides_whether_it_is_worth_while() -> None:
    assert worth_a_look(IDLE, NVML, 0.34)
    assert not worth_a_look(IDLE, NVML, 0.36)
    assert not worth_a_look(GpuTimes(), NVML, 0.0)
