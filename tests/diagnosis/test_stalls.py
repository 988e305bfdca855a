"""The diagnosis, with numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt._measured import PHASES, HostActivity, LoaderFacts, PhaseTimes, RankWork
from lightning_gpuopt._measured_gpu import AheadCopies, DeviceState, GpuTimes, StepLook, SyncSighting
from lightning_gpuopt.diagnosis.stalls import diagnose, remarks, verdict_of
from lightning_gpuopt.diagnosis.waterfall import worth_a_look
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, gpu, host, measurement, times

WORKERS = TWO_WORKERS


def find(measured: PhaseTimes, threshold: float = 0.1, loader: LoaderFacts = WORKERS, **kwargs: Any) -> list[Any]:
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


class TestData:
    @pytest.mark.parametrize(
        ("loader", "activity", "cause"),
        [
            (IN_PROCESS, host(None), "main_process_loading"),
            (LoaderFacts(), host(None), "main_process_loading"),
            (WORKERS, host(0.9), "slow_transform"),
            (WORKERS, host(0.5), "slow_transform"),
            (WORKERS, host(0.3, queued=0.25), "slow_transform"),
            (WORKERS, host(0.9, free=0.2), "cpu_saturated"),
            (WORKERS, host(0.4, queued=0.5, free=0.0), "cpu_saturated"),
            (WORKERS, host(0.05, free=7.0), "slow_storage"),
            (WORKERS, host(0.05, free=0.1), "slow_storage"),
            (WORKERS, host(0.9, free=None), "slow_transform"),
            (WORKERS, None, "slow_transform"),
        ],
    )
    def test_the_cause_follows_from_what_the_workers_do(
        self, loader: LoaderFacts, activity: HostActivity | None, cause: str
    ) -> None:
        assert [finding.cause for finding in find(times(data_wait=5), loader=loader, host=activity)] == [cause]

    @pytest.mark.parametrize(
        ("wait_s", "usable", "workers"),
        [
            (5.0, 8.0, 2),  # as long as the step's own 50 ms, and a tenth more
            (8.0, 16.0, 5),  # four times 20 ms: 4.4
            (9.0, 4.0, 4),  # nine times 10 ms, on 4 CPUs
            (9.9, 200.0, 32),
            (2.0, 0.5, 1),
        ],
    )
    def test_the_first_workers_are_counted_from_the_times(self, wait_s: float, usable: float, workers: int) -> None:
        (finding,) = find(times(data_wait=wait_s), loader=IN_PROCESS, host=host(None, usable=usable))
        assert finding.settings == {"num_workers": workers, "persistent_workers": True}
        assert f"num_workers={workers}" in finding.advice

    @pytest.mark.parametrize(
        ("activity", "workers"),
        [
            (host(1.0, free=6.0), 5),  # 100 ms a batch on two workers against 50 ms: 4.4
            (host(1.0, free=1.0), 3),  # one CPU is free: one more worker
            (host(0.05, free=0.0, usable=1.0), 5),  # blocked workers need no CPU
        ],
    )
    def test_more_workers_are_advised_as_far_as_they_help(self, activity: HostActivity, workers: int) -> None:
        (finding,) = find(times(data_wait=5), host=activity)
        assert finding.settings == {"num_workers": workers}

    def test_saturated_cpus_get_no_more_workers(self) -> None:
        (finding,) = find(times(data_wait=5), host=host(0.95, free=0.0))
        assert finding.settings == {}
        assert "would not help" in finding.advice

    def test_a_loader_that_is_no_dataloader_gets_no_dataloader_settings(self) -> None:
        (finding,) = find(times(data_wait=5), loader=LoaderFacts(), host=host(None))
        assert finding.settings == {}
        assert "num_workers" not in finding.evidence

    def test_the_evidence_names_its_units(self) -> None:
        (finding,) = find(times(data_wait=5), host=host(0.9, queued=0.05))
        assert finding.evidence == {
            "ms_per_step": 50.0,
            "step_ms": 100.0,
            "num_workers": 2,
            "usable_cpus": 8.0,
            "free_cpus": 1.5,
            "worker_cpu_percent": 90.0,
            "worker_queued_percent": 5.0,
        }


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
        assert find(measured, gpu=healthy, device=device, ranks=ranks((0, 0, None), (0, 0, None))) == []

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
        assert find(times(transfer=1.5), gpu=gpu(compute_s=8.4, queued_s=1.5, copy_s=0.1)) == []

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
            times(callbacks=own), WORKERS, gpu=gpu(compute_s=8.0, idle=dict(own)) if on_gpu else None
        )
        assert diagnose(measured, 0.1) == []
        share = 25 if on_gpu else 20  # on a GPU it is left out of the whole, too
        assert [note for note in remarks(measured, 0.1) if "own diagnosis" in note] == [
            f"{share}% of the time is StallDetector's own diagnosis, which counts in a run as short as this, or with a "
            "window_size as small as this."
        ]
        assert not any("own diagnosis" in note for note in remarks(measured, 0.3))

    def test_checkpoints_and_restarts_count_by_the_gpus_idle_time(self) -> None:
        loader = LoaderFacts(num_workers=2, persistent_workers=False, prefetch_factor=2, pin_memory=False)
        idle = {"checkpoint": 2.0, "epoch_setup": 0.5, "first_fetch": 1.0}
        findings = find(times(checkpoint=4, epoch_setup=3, epochs=5), loader=loader, gpu=gpu(compute_s=6.5, idle=idle))
        assert [(each.cause, each.share) for each in findings] == [("checkpoint", 0.2), ("epoch_restart", 0.15)]

    def test_validation_counts_by_its_wall_time_on_the_gpu(self) -> None:
        # the host waits in it for the training steps that were queued before
        assert find(times(validation=3), gpu=gpu(compute_s=9.5, validation_s=0.5)) == []
        (finding,) = find(times(validation=0.1), gpu=gpu(compute_s=7.0, validation_s=3.0))
        assert (finding.cause, finding.share) == ("validation", 0.3)

    def test_before_a_step_was_read_nothing_is_said(self) -> None:
        assert find(times(data_wait=5), host=host(0.9), gpu=GpuTimes()) == []


class TestOtherCauses:
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
        assert finding.advice.startswith("This is the measuring itself")

    def test_workers_that_start_again_every_epoch(self) -> None:
        loader = LoaderFacts(num_workers=2, persistent_workers=False, prefetch_factor=2, pin_memory=False)
        (finding,) = find(times(epoch_setup=4, epochs=8), loader=loader)
        assert (finding.cause, finding.share, finding.settings) == ("epoch_restart", 0.4, {"persistent_workers": True})
        assert finding.evidence == {
            "epoch_setup_s_per_epoch": 0.5,
            "epochs": 8,
            "largest_part": "starting workers",
            "starting_workers_s_per_epoch": 0.5,
            "first_batch_s_per_epoch": 0.0,
        }

    @pytest.mark.parametrize(("loader", "epochs"), [(WORKERS, 8), (IN_PROCESS, 8)])
    def test_no_restart_where_workers_persist_or_are_none(self, loader: LoaderFacts, epochs: int) -> None:
        assert find(times(epoch_setup=4, epochs=epochs), loader=loader) == []

    def test_no_restart_before_a_second_epoch(self) -> None:
        loader = LoaderFacts(num_workers=2, persistent_workers=False, prefetch_factor=2, pin_memory=False)
        assert find(times(epoch_setup=4, epochs=0), loader=loader) == []


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

    @pytest.mark.parametrize("syncs", [SyncSighting(3, 1, (("model.py:12", 1),)), SyncSighting(3, 0, elsewhere=9)])
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

    @pytest.mark.parametrize(
        ("device", "worth"),
        [
            (DeviceState(utilization=60.0, seconds=6.0), True),
            (DeviceState(utilization=60.0, seconds=4.0), False),
            (DeviceState(utilization=99.0, seconds=6.0), False),
            (DeviceState(utilization=100.0, sm_activity=15.0, seconds=6.0), True),  # small kernels
            (DeviceState(), False),
            (None, False),
        ],
    )
    def test_nvml_decides_whether_to_look(self, device: DeviceState | None, worth: bool) -> None:
        assert worth_a_look(self.IDLE, device, 0.1) is worth
        ahead = gpu(compute_s=9.5, compute_bound_s=0.1, idle={"data_wait": 0.5})
        assert worth_a_look(ahead, device, 0.1) is False


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
        assert finding.predicted_speedup == pytest.approx((10 / 9, 10 / 8, 1.08 * 10 / 8))

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
        assert note.startswith("For 95 % of the time the GPU kept its clocks down to stay within its power limit")
        assert "1400 of 1980 MHz" in note


def ranks(*work: tuple[float, float, float | None]) -> tuple[RankWork, ...]:
    return tuple(RankWork(rank, wait, compute, loader) for rank, (wait, compute, loader) in enumerate(work))


class TestStraggler:
    def test_a_rank_with_a_slower_step(self) -> None:
        (finding,) = find(times(), ranks=ranks((0, 0.05, None), (0, 0.05, None), (0, 0.09, None), (0, 0.05, None)))
        assert (finding.cause, finding.share) == ("straggler", pytest.approx(0.4))
        assert finding.evidence == {
            "rank": 2,
            "kind": "compute",
            "ms_per_step": 90.0,
            "ms_per_step_elsewhere": 50.0,
        }

    def test_a_rank_with_slower_data(self) -> None:
        (finding,) = find(times(), ranks=ranks((0.0, 0.05, 0.01), (0.03, 0.05, 0.04)))
        assert (finding.cause, finding.evidence["rank"], finding.evidence["kind"]) == ("straggler", 1, "data")

    def test_a_rank_that_waits_in_everybodys_place_is_none(self) -> None:
        assert find(times(), ranks=ranks((0.0, 0.05, 0.04), (0.03, 0.05, 0.04))) == []

    def test_the_wait_for_a_straggler_is_not_told_twice(self) -> None:
        findings = find(times(broadcast_s=3.0, other=3.0), ranks=ranks((0, 0.05, None), (0, 0.09, None)))
        assert [each.cause for each in findings] == ["straggler"]

    def test_ranks_that_are_alike(self) -> None:
        assert find(times(), ranks=ranks((0.001, 0.05, None), (0.002, 0.052, None))) == []
        assert find(times(), ranks=ranks((0.0, 0.09, None))) == []

    def test_on_gpus_the_forwards_own_time_counts(self) -> None:
        slow = (RankWork(0, 0.0, 0.002, None, 0.02), RankWork(1, 0.0, 0.002, None, 0.05))
        (finding,) = find(times(), gpu=gpu(compute_s=10.0), ranks=slow)
        assert (finding.cause, finding.evidence["rank"], finding.share) == ("straggler", 1, pytest.approx(0.3))

    def test_where_ranks_wait_in_the_forward_the_one_that_waits_least_in_collectives_is_slow(self) -> None:
        waits = (RankWork(0, 0.0, 0.002, communication_s=0.035), RankWork(1, 0.0, 0.002, communication_s=0.005))
        look = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.035, calls=9)
        (finding,) = find(times(), gpu=gpu(compute_s=10.0), look=look, ranks=waits)
        assert (finding.cause, finding.evidence["rank"], finding.share) == ("straggler", 1, pytest.approx(0.3))

    def test_a_rank_with_slow_data_is_found_by_its_data_though_it_waits_least(self) -> None:
        waits = (RankWork(0, 0.0, 0.002, communication_s=0.035), RankWork(1, 0.03, 0.002, communication_s=0.005))
        look = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.035, calls=9)
        (finding,) = find(times(), gpu=gpu(compute_s=10.0), look=look, ranks=waits)
        assert (finding.evidence["rank"], finding.evidence["kind"]) == (1, "data")

    def test_what_a_rank_waits_in_its_forward_for_anothers_data_is_not_its_own(self) -> None:
        waits = (RankWork(0, 0.0, 0.002, None, 0.05), RankWork(1, 0.03, 0.002, None, 0.02))
        (finding,) = find(times(), gpu=gpu(compute_s=10.0), ranks=waits)
        assert (finding.cause, finding.evidence["rank"], finding.evidence["kind"]) == ("straggler", 1, "data")

    def test_a_forward_that_one_rank_does_not_know_is_compared_with_none(self) -> None:
        waits = (RankWork(0, 0.0, 0.002, None, None, 0.001), RankWork(1, 0.0, 0.002, None, 0.05))
        assert find(times(), gpu=gpu(compute_s=10.0), ranks=waits) == []

    def test_where_rank_0_alone_looked_the_wait_for_a_slower_rank_is_no_communication(self) -> None:
        waits = (RankWork(0, 0.0, 0.002, None, 0.02, 0.035), RankWork(1, 0.03, 0.002, None, 0.02))
        look = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.035, calls=9)
        (finding,) = find(times(), gpu=gpu(compute_s=10.0), look=look, ranks=waits)
        assert (finding.cause, finding.evidence["rank"], finding.evidence["kind"]) == ("straggler", 1, "data")
        slow_itself = (RankWork(0, 0.03, 0.002, None, 0.02, 0.035), RankWork(1, 0.0, 0.002, None, 0.02))
        found = find(times(), gpu=gpu(compute_s=10.0), look=look, ranks=slow_itself)
        assert [each.cause for each in found] == ["communication", "straggler"]
        assert found[0].share == pytest.approx(0.35)
        assert found[0].advice.endswith("this is the wait for that rank.")

    def test_collectives_that_all_ranks_see_exposed_are_communication(self) -> None:
        waits = (RankWork(0, 0.0, 0.002, communication_s=0.035), RankWork(1, 0.0, 0.002, communication_s=0.034))
        look = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.035, calls=9)
        (finding,) = find(times(), gpu=gpu(compute_s=10.0), look=look, ranks=waits)
        assert (finding.cause, finding.share) == ("communication", pytest.approx(0.34))


def test_what_can_be_changed_comes_with_a_prediction() -> None:
    (finding,) = find(times(callbacks={"Slow.on_train_batch_end": 5.0}))
    assert finding.predicted_speedup is not None
    low, mid, high = finding.predicted_speedup
    assert mid == pytest.approx(2.0)  # half the step goes
    assert low == pytest.approx(100 / 75)  # if only half of it goes
    assert high > mid
