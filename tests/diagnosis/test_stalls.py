"""The diagnosis, with numbers."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt.diagnosis.measurement import DeviceState, RankWork, SyncSighting
from lightning_gpuopt.diagnosis.stalls import diagnose, verdict_of
from lightning_gpuopt.telemetry.host import HostActivity
from lightning_gpuopt.timeline.actions import PHASES
from lightning_gpuopt.timeline.gpu_clock import GpuTimes
from lightning_gpuopt.timeline.loader import LoaderFacts
from lightning_gpuopt.timeline.phases import PhaseTimes
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, host, measurement, times

WORKERS = TWO_WORKERS


def find(measured: PhaseTimes, threshold: float = 0.1, loader: LoaderFacts = WORKERS, **kwargs: Any) -> list[Any]:
    return diagnose(measurement(measured, loader, **kwargs), threshold)


def test_a_run_that_only_computes_has_no_finding() -> None:
    assert find(times()) == []
    assert verdict_of([]) == "compute_bound"


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
    def test_a_wait_that_the_gpu_works_through_is_no_stall(self) -> None:
        busy = GpuTimes(steps=100, compute_s=10.0, gaps=99, idle_s=0.0)
        assert find(times(data_wait=5), host=host(0.9), gpu=busy) == []

    def test_only_the_exposed_part_counts(self) -> None:
        half = GpuTimes(steps=100, compute_s=7.0, gaps=50, idle_s=1.25)
        (finding,) = find(times(data_wait=5), host=host(0.9), gpu=half)
        assert finding.share == pytest.approx(0.25)
        assert finding.evidence["gpu_idle_ms_per_step"] == 25.0

    def test_callbacks_and_loggers_hide_behind_the_gpu_too(self) -> None:
        measured = times(logging=2, callbacks={"Slow.on_train_batch_end": 2})
        assert find(measured, gpu=GpuTimes(steps=100, gaps=100, idle_s=0.0)) == []
        findings = find(measured, gpu=GpuTimes(steps=100, gaps=100, idle_s=3.0))
        assert {(finding.cause, finding.share) for finding in findings} == {("logging", 0.15), ("callback", 0.15)}

    def test_without_a_measured_gap_the_hosts_time_counts(self) -> None:
        (finding,) = find(times(data_wait=5), host=host(0.9), gpu=GpuTimes(steps=1))
        assert finding.share == 0.5


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

    def test_workers_that_start_again_every_epoch(self) -> None:
        loader = LoaderFacts(num_workers=2, persistent_workers=False, prefetch_factor=2, pin_memory=False)
        (finding,) = find(times(epoch_setup=4, epochs=8), loader=loader)
        assert (finding.cause, finding.share, finding.settings) == ("epoch_restart", 0.4, {"persistent_workers": True})
        assert finding.evidence == {"epoch_setup_s_per_epoch": 0.5, "epochs": 8}

    @pytest.mark.parametrize(("loader", "epochs"), [(WORKERS, 8), (IN_PROCESS, 8)])
    def test_no_restart_where_workers_persist_or_are_none(self, loader: LoaderFacts, epochs: int) -> None:
        assert find(times(epoch_setup=4, epochs=epochs), loader=loader) == []

    def test_no_restart_before_a_second_epoch(self) -> None:
        loader = LoaderFacts(num_workers=2, persistent_workers=False, prefetch_factor=2, pin_memory=False)
        assert find(times(epoch_setup=4, epochs=0), loader=loader) == []


class TestInsideTheStep:
    GPU = GpuTimes(steps=100, compute_s=9.0, gaps=100, idle_s=0.5)

    def test_idle_time_inside_the_step_is_launching(self) -> None:
        (finding,) = find(times(), gpu=self.GPU, device=DeviceState(utilization=60.0))
        assert finding.cause == "launch_bound"
        # 4 s idle, of which 0.5 s between the steps
        assert finding.share == pytest.approx(0.35)
        assert finding.evidence["gpu_utilization_percent"] == 60.0

    def test_it_is_waiting_where_calls_that_wait_were_seen(self) -> None:
        syncs = SyncSighting(steps=3, count=6, where="model.py:12")
        (finding,) = find(times(), gpu=self.GPU, device=DeviceState(utilization=60.0), syncs=syncs)
        assert (finding.cause, finding.evidence["where"]) == ("gpu_sync", "model.py:12")
        assert finding.evidence["syncs_per_step"] == 2.0
        assert "model.py:12" in finding.advice

    def test_a_rare_waiting_call_is_not_the_cause(self) -> None:
        syncs = SyncSighting(steps=3, count=1, where="model.py:12")
        (finding,) = find(times(), gpu=self.GPU, device=DeviceState(utilization=60.0), syncs=syncs)
        assert finding.cause == "launch_bound"

    def test_a_busy_gpu_has_no_finding(self) -> None:
        assert find(times(), gpu=self.GPU, device=DeviceState(utilization=97.0)) == []

    def test_validation_is_given_the_benefit_of_the_doubt(self) -> None:
        measured = times(validation=4.0)
        causes = [each.cause for each in find(measured, gpu=self.GPU, device=DeviceState(utilization=55.0))]
        assert causes == ["validation"]

    def test_without_nvml_nothing_is_said(self) -> None:
        assert find(times(), gpu=self.GPU, device=DeviceState()) == []

    def test_the_signal_broadcast_is_named(self) -> None:
        (finding,) = find(times(broadcast_s=2.0, other=2.0))
        assert (finding.cause, finding.share) == ("gpu_sync", 0.2)
        assert finding.evidence["where"] == "Lightning's _broadcast_sigterm_tensor"


class TestHostToDevice:
    def test_an_exposed_copy_asks_for_pinned_memory(self) -> None:
        (finding,) = find(times(), gpu=GpuTimes(steps=50, copy_s=1.0, compute_s=3.0, gaps=50))
        assert (finding.cause, finding.share, finding.settings) == ("host_to_device", 0.2, {"pin_memory": True})

    def test_pinned_already_it_asks_for_less_to_copy(self) -> None:
        pinned = LoaderFacts(num_workers=2, persistent_workers=True, prefetch_factor=2, pin_memory=True)
        (finding,) = find(times(), loader=pinned, gpu=GpuTimes(steps=50, copy_s=1.0, gaps=50))
        assert finding.settings == {}
        assert "uint8" in finding.advice

    def test_without_a_gpu_it_is_the_walk_through_the_batch(self) -> None:
        (finding,) = find(times(transfer=3.0))
        assert (finding.cause, finding.share) == ("host_to_device", 0.3)


class TestGpuThrottled:
    def test_clocks_reduced_for_heat(self) -> None:
        state = DeviceState(utilization=99.0, throttled_percent=80.0, sm_clock_mhz=1200.0, sm_clock_mhz_max=1980.0)
        (finding,) = find(times(), gpu=GpuTimes(steps=100, gaps=100), device=state)
        assert finding.cause == "gpu_throttled"
        assert finding.share == pytest.approx(1 - 1200 / 1980)

    @pytest.mark.parametrize(
        "state",
        [
            DeviceState(99.0, 100.0, 1900.0, 1980.0),  # a power cap that costs 4 %
            DeviceState(99.0, 0.0, 1200.0, 1980.0),
            DeviceState(99.0, 5.0, 1200.0, 1980.0),
            DeviceState(99.0),
        ],
    )
    def test_what_costs_little_is_no_finding(self, state: DeviceState) -> None:
        assert find(times(), gpu=GpuTimes(steps=100, gaps=100), device=state) == []


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


def test_what_can_be_changed_comes_with_a_prediction() -> None:
    (finding,) = find(times(callbacks={"Slow.on_train_batch_end": 5.0}))
    assert finding.predicted_speedup is not None
    low, mid, high = finding.predicted_speedup
    assert mid == pytest.approx(2.0)  # half the step goes
    assert low == pytest.approx(100 / 75)  # if only half of it goes
    assert high > mid
