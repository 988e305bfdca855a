"""Why the loader is late, by what was timed inside its workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.loading import LoaderFacts, QueueTimes, WorkerTimes
from lightning_gpuopt.measurements.phases import PhaseTimes
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, data_finding, host, measurement, times, workers

# 100 batches in 10 s on 2 workers: 0.2 s a batch are there for a worker that is always busy
BUSY_S = 0.19


def find(timed: WorkerTimes | None, loader: LoaderFacts = TWO_WORKERS, wait_s: float = 5.0, **more: Any) -> Finding:
    return data_finding(measurement(times(data_wait=wait_s), loader, workers=timed, **more))


LATE = QueueTimes(fetches=100, ready=500, empty=4, waits=20, wait_s=4.8, late_wait_s=4.5)
EVEN = QueueTimes(fetches=100, ready=20, empty=90, waits=99, wait_s=5.0, late_wait_s=0.1)
TRANSFER = QueueTimes(fetches=100, ready=300, empty=4, waits=98, wait_s=5.0, late_wait_s=4.5)
UNPINNED = QueueTimes(fetches=100, ready=0, empty=99, waits=99, wait_s=5.0, unpinned_wait_s=4.0)


@pytest.mark.parametrize(
    ("timed", "queues", "activity", "cause"),
    [
        (workers(data_s=BUSY_S, cpu=0.05), EVEN, host(0.05), "slow_storage"),
        (workers(data_s=BUSY_S, cpu=0.9), EVEN, host(0.9), "slow_transform"),
        (workers(data_s=BUSY_S, cpu=0.9), EVEN, host(0.9, free=0.1), "cpu_saturated"),
        # starved of CPU it looks blocked; only its place in the run queue tells
        (workers(data_s=BUSY_S, cpu=0.2), EVEN, host(0.2, queued=0.7, free=0.0), "cpu_saturated"),
        (workers(data_s=BUSY_S, cpu=0.9), EVEN, host(0.5, free=0.0, throttled=0.5), "cpu_throttled"),
        (workers(data_s=BUSY_S, cpu=0.9), EVEN, host(0.9, throttled=0.05), "slow_transform"),
        # a quota does not slow down a disk
        (workers(data_s=BUSY_S, cpu=0.05), EVEN, host(0.05, throttled=0.5), "slow_storage"),
        (workers(data_s=0.05, collate_s=0.14, cpu=0.9), EVEN, host(0.9), "worker_transfer"),
        (workers(data_s=0.04, cpu=0.5, unevenness=4.0), LATE, host(0.1), "head_of_line"),
        (workers(data_s=0.04, cpu=0.5, unevenness=0.1), LATE, host(0.1), "worker_transfer"),
        (workers(data_s=0.04, cpu=0.5, unevenness=4.0), TRANSFER, host(0.1), "worker_transfer"),
        (workers(data_s=0.04, cpu=0.5), UNPINNED, host(0.1), "pin_memory"),
        (workers(data_s=0.04, cpu=0.5), None, None, "worker_transfer"),
        # reading takes longer than what is left of the time to hand batches over
        (workers(data_s=0.11), None, None, "slow_storage"),
        (workers(data_s=0.11, cpu=0.9), None, host(0.5), "slow_transform"),
        # idle workers and a queue that is always empty: handing over is slow, and no batch lies ready behind a late one
        (workers(data_s=0.04, cpu=0.5, unevenness=4.0), EVEN, host(0.1), "worker_transfer"),
        # other programs have the CPUs, and handing over waits for one
        (workers(data_s=0.11), TRANSFER, host(0.01, queued=0.2, free=0.0, process_cpus=0.3), "cpu_saturated"),
        (workers(data_s=0.001), TRANSFER, host(0.01, queued=0.2, free=0.0, process_cpus=0.3), "cpu_saturated"),
        (workers(data_s=0.11), TRANSFER, host(0.01, queued=0.2, free=0.0, throttled=0.3), "cpu_throttled"),
        # what waits for a CPU for a second explains no five
        (workers(data_s=0.001), TRANSFER, host(0.01, queued=0.05, free=0.0, process_cpus=0.3), "worker_transfer"),
        (
            workers(data_s=0.04, unevenness=4.0),
            LATE,
            host(0.01, queued=0.03, free=0.0, process_cpus=0.3),
            "head_of_line",
        ),
        # uneven batches of workers that are too few: even ones would be waited for nearly as long
        (workers(data_s=BUSY_S, cpu=0.05, unevenness=4.0), LATE, host(0.05), "slow_storage"),
        # handing over computes, as pickling does; and the CPUs are our own
        (workers(data_s=0.04), TRANSFER, host(0.3, queued=0.1, free=0.0, process_cpus=0.3), "worker_transfer"),
        (workers(data_s=0.04), TRANSFER, host(0.01, queued=0.1, free=0.0, process_cpus=7.0), "worker_transfer"),
        # threads or child processes of the worker compute for it
        (workers(data_s=BUSY_S, cpu=0.05), EVEN, host(0.9), "slow_transform"),
        (workers(data_s=BUSY_S, cpu=0.05), EVEN, host(0.9, free=0.1), "cpu_saturated"),
        (workers(data_s=BUSY_S, cpu=0.9), None, None, "slow_transform"),
    ],
)
def test_the_bottleneck_is_named(timed: WorkerTimes, queues: Any, activity: Any, cause: str) -> None:
    assert find(timed, queues=queues, host=activity).cause == cause


@pytest.mark.parametrize(("may_be", "is_there"), [(True, False), (True, True), (False, False)])
def test_a_late_batch_is_told_who_would_read_sample_by_sample(may_be: bool, is_there: bool) -> None:
    source = LoaderDescription("torch", may_be_sample_parallel=may_be, sample_parallel=is_there)
    late = workers(data_s=0.04, cpu=0.5, unevenness=4.0)
    finding = find(late, queues=LATE, host=host(0.1), source=source)
    assert finding.cause == "head_of_line"
    text = "SampleLoader(...) in place of DataLoader(...) loads sample by sample: a slow one then delays only its own"
    assert (text in finding.advice) == (may_be and not is_there)


@pytest.mark.parametrize(("worker_cpu", "others"), [(0.1, "7.3"), (0.5, "6.5"), (1.0, "5.5")])
def test_where_other_programs_have_the_cpus_it_says_so(worker_cpu: float, others: str) -> None:
    busy = workers(data_s=BUSY_S, cpu=worker_cpu)
    taken = host(worker_cpu, queued=1 - worker_cpu, free=0.0, process_cpus=0.5)
    assert find(busy, host=taken).advice.startswith(
        f"Other programs use about {others} of the 8 CPUs, and the workers wait for them: "
    )
    own = host(worker_cpu, queued=1 - worker_cpu, free=0.0, process_cpus=4.5)
    assert "use all available CPU time" in find(busy, host=own).advice


def test_one_worker_whose_batches_lie_ready_is_not_what_training_waits_for() -> None:
    one = replace(TWO_WORKERS, num_workers=1)
    ready = find(workers(data_s=0.07), one, wait_s=1.0, queues=TRANSFER)
    assert (ready.cause, ready.settings) == ("worker_transfer", {})
    assert ready.advice.startswith("Batches are finished, but taking one from its worker takes 10 ms a step: ")
    assert find(workers(data_s=0.07), one, wait_s=1.0, queues=EVEN).cause == "slow_storage"
    assert find(workers(data_s=0.14), TWO_WORKERS, wait_s=1.0, queues=TRANSFER).cause == "slow_storage"


def test_every_cause_has_its_advice_and_only_remedies_have_settings() -> None:
    saturated = find(workers(data_s=BUSY_S, cpu=0.9), host=host(0.9, free=0.0))
    assert (saturated.settings, saturated.predicted_speedup) == ({}, None)
    throttled = find(workers(data_s=BUSY_S, cpu=0.9), host=host(0.5, free=0.0, throttled=0.5))
    assert throttled.settings == {}
    assert "quota" in throttled.advice
    late = find(workers(data_s=0.04, unevenness=4.0), queues=LATE, host=host(0.1))
    assert late.settings == {"prefetch_factor": 7}
    assert "prefetch_factor=7" in late.advice


def test_the_advised_number_of_workers_and_its_gain_come_from_one_model() -> None:
    # a batch waits 190 ms for storage; the step itself takes 50 ms: four workers feed it
    finding = find(workers(data_s=BUSY_S, cpu=0.01), host=host(0.01, process_cpus=0.1))
    assert finding.settings == {"num_workers": 4}
    assert finding.predicted_speedup is not None
    low, mid, high = finding.predicted_speedup
    assert mid == pytest.approx(100 / 50.8, rel=1e-3)  # 0.8 ms to receive a batch
    assert (low, high) == pytest.approx((mid / 1.07, mid * 1.07))


def test_no_workers_are_advised_where_they_would_not_be_faster() -> None:
    # 0.4 ms a batch in the process, against 0.8 ms to take one from a worker
    finding = find(workers(data_s=0.0004), IN_PROCESS, wait_s=0.04, host=host(None))
    assert (finding.cause, finding.settings, finding.predicted_speedup) == ("main_process_loading", {}, None)
    assert "would not be faster" in finding.advice


def test_no_workers_are_advised_where_no_cpu_is_left_for_them() -> None:
    busy = host(None, free=0.0, usable=2.0, process_cpus=2.0)
    finding = find(workers(data_s=0.05, cpu=1.0), IN_PROCESS, host=busy)
    assert (finding.cause, finding.settings) == ("main_process_loading", {})
    assert "no CPU is left" in finding.advice


def test_batches_that_cost_more_to_hand_over_than_to_make_are_for_the_training_process() -> None:
    finding = find(workers(data_s=0.0005), wait_s=2.0, host=host(0.01))
    assert (finding.cause, finding.settings) == ("worker_transfer", {"num_workers": 0})
    assert finding.predicted_speedup is not None
    assert finding.predicted_speedup[1] == pytest.approx(100 / 80.5, rel=1e-3)


def test_workers_are_not_advised_beyond_the_free_cpus() -> None:
    finding = find(workers(data_s=BUSY_S, cpu=1.0), host=host(1.0, free=1.0, usable=4.0, process_cpus=0.5))
    assert finding.settings == {"num_workers": 3}


def test_loading_in_the_process_is_measured_there() -> None:
    finding = find(workers(data_s=0.05, cpu=0.1), IN_PROCESS, host=host(None, usable=4.0, process_cpus=0.2))
    assert finding.cause == "main_process_loading"
    assert finding.settings == {"num_workers": 2, "persistent_workers": True}
    assert finding.evidence["dataset_ms_per_batch"] == 50.0
    assert finding.evidence["dataset_cpu_ms_per_batch"] == pytest.approx(5.0)
    assert "workers_busy_percent" not in finding.evidence


def test_the_evidence_shows_what_the_verdict_rests_on() -> None:
    evidence = find(
        workers(data_s=0.18, collate_s=0.01, cpu=0.5, batch_bytes=2**20),
        queues=EVEN,
        host=host(0.5, queued=0.1, throttled=0.0, io_pressure=0.25),
    ).evidence
    assert evidence == {
        "ms_per_step": 50.0,
        "step_ms": 100.0,
        "num_workers": 2,
        "dataset_ms_per_batch": 180.0,
        "dataset_cpu_ms_per_batch": 90.0,
        "collate_ms_per_batch": 10.0,
        "batch_mib": 1.0,
        "workers_busy_percent": 95.0,
        "queue_depth": 0.2,
        "queue_empty_percent": 90.0,
        "late_batch_wait_percent": 2.0,
        "usable_cpus": 8.0,
        "free_cpus": 1.5,
        "worker_cpu_percent": 50.0,
        "worker_queued_percent": 10.0,
        "cpu_throttled_percent": 0.0,
        "io_pressure_percent": 25.0,
    }


def test_a_slow_pin_thread_is_asked_for_before_the_transfer() -> None:
    # costless items: collating takes longer than reading them, yet the workers are idle
    assert find(workers(data_s=0.001, collate_s=0.002), queues=UNPINNED, host=host(0.1)).cause == "pin_memory"


@pytest.mark.parametrize(("usable", "free", "cause"), [(2.0, 0.6, "slow_transform"), (128.0, 0.6, "cpu_saturated")])
def test_a_free_cpu_is_relative_to_the_machines_size(usable: float, free: float, cause: str) -> None:
    timed = workers(data_s=BUSY_S, cpu=0.9)
    assert find(timed, queues=EVEN, host=host(0.9, usable=usable, free=free)).cause == cause


def test_an_iterable_dataset_that_does_not_divide_itself_gets_no_more_workers() -> None:
    twice = replace(TWO_WORKERS, duplicates=True)
    finding = find(workers(data_s=BUSY_S, cpu=0.05), twice, queues=EVEN, host=host(0.05))
    assert (finding.cause, finding.settings, finding.predicted_speedup) == ("slow_storage", {}, None)
    assert "once from every worker" in finding.advice
    in_process = find(workers(data_s=0.05), replace(IN_PROCESS, duplicates=True), host=host(None))
    assert (in_process.cause, in_process.settings) == ("main_process_loading", {})
    assert "get_worker_info" in in_process.advice
    divided = find(
        workers(data_s=BUSY_S, cpu=0.05), replace(TWO_WORKERS, duplicates=False), queues=EVEN, host=host(0.05)
    )
    assert divided.settings == {"num_workers": 4}


@pytest.mark.parametrize("short", [{"memory_pressure": 0.2}, {"swapped_in_mib_s": 50.0}])
def test_a_machine_short_of_memory_gets_no_more_workers(short: dict[str, float]) -> None:
    finding = find(workers(data_s=BUSY_S, cpu=0.05), queues=EVEN, host=host(0.05, **short))
    assert (finding.cause, finding.settings) == ("slow_storage", {})
    assert "short of memory" in finding.advice
    assert {"memory_pressure_percent", "swap_mib_per_s"} & finding.evidence.keys()


def test_the_advice_names_what_does_it() -> None:
    storage = find(workers(data_s=BUSY_S, cpu=0.05), queues=EVEN, host=host(0.05)).advice
    assert "NumWorkersFinder() finds and sets the number" in storage
    assert "LMDBDataModule" in storage
    assert "LMDBDataModule" in find(workers(data_s=BUSY_S, cpu=0.9), host=host(0.9, free=0.0)).advice


def diagnosed(measured: PhaseTimes, loader: LoaderFacts = TWO_WORKERS, **more: Any) -> list[Finding]:
    return diagnose(measurement(measured, loader, **more), 0.1)


class TestWithoutTimesOfTheWorkers:
    @pytest.mark.parametrize(
        ("loader", "activity", "cause"),
        [
            (IN_PROCESS, host(None), "main_process_loading"),
            (LoaderFacts(), host(None), "main_process_loading"),
            (TWO_WORKERS, host(0.9), "slow_transform"),
            (TWO_WORKERS, host(0.5), "slow_transform"),
            (TWO_WORKERS, host(0.3, queued=0.25), "slow_transform"),
            (TWO_WORKERS, host(0.9, free=0.2), "cpu_saturated"),
            (TWO_WORKERS, host(0.4, queued=0.5, free=0.0), "cpu_saturated"),
            (TWO_WORKERS, host(0.05, free=7.0), "slow_storage"),
            (TWO_WORKERS, host(0.05, free=0.1), "slow_storage"),
            (TWO_WORKERS, host(0.9, free=None), "slow_transform"),
            (TWO_WORKERS, None, "slow_transform"),
        ],
    )
    def test_the_cause_follows_from_what_the_workers_do(
        self, loader: LoaderFacts, activity: HostActivity | None, cause: str
    ) -> None:
        assert [finding.cause for finding in diagnosed(times(data_wait=5), loader=loader, host=activity)] == [cause]

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
        (finding,) = diagnosed(times(data_wait=wait_s), loader=IN_PROCESS, host=host(None, usable=usable))
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
        (finding,) = diagnosed(times(data_wait=5), host=activity)
        assert finding.settings == {"num_workers": workers}

    def test_saturated_cpus_get_no_more_workers(self) -> None:
        (finding,) = diagnosed(times(data_wait=5), host=host(0.95, free=0.0))
        assert finding.settings == {}
        assert "would not help" in finding.advice

    def test_a_loader_that_is_no_dataloader_gets_no_dataloader_settings(self) -> None:
        (finding,) = diagnosed(times(data_wait=5), loader=LoaderFacts(), host=host(None))
        assert finding.settings == {}
        assert "num_workers" not in finding.evidence

    def test_the_evidence_names_its_units(self) -> None:
        (finding,) = diagnosed(times(data_wait=5), host=host(0.9, queued=0.05))
        assert finding.evidence == {
            "ms_per_step": 50.0,
            "step_ms": 100.0,
            "num_workers": 2,
            "usable_cpus": 8.0,
            "free_cpus": 1.5,
            "worker_cpu_percent": 90.0,
            "worker_queued_percent": 5.0,
        }


class TestThreadsOfWorkers:
    """Pools of threads in the workers take the CPUs from each other."""

    def found(self, threads: float, *, runnable: float | None = None, free: float = 0.1, usable: float = 8.0) -> Any:
        more = {"worker_threads": threads, "worker_runnable": threads if runnable is None else runnable}
        return find(workers(data_s=BUSY_S, cpu=0.9), host=host(1.0, free=free, usable=usable, **more))

    def test_more_of_them_than_cpus_are_named_with_the_remedy(self) -> None:
        finding = self.found(8.0)
        assert (finding.cause, finding.evidence["threads_per_worker"]) == ("cpu_saturated", 8.0)
        assert finding.advice.startswith(
            "Each worker runs 8 threads, so 2 workers run 16 threads on 8 CPUs: give each worker one thread. In "
            "worker_init_fn call cv2.setNumThreads(0) (OpenCV) and torch.set_num_threads(1); for OpenMP and BLAS set "
            "OMP_NUM_THREADS=1 in the environment. The workers use all available CPU time"
        )

    def test_as_many_as_cpus_are_evidence_alone(self) -> None:
        finding = self.found(4.0)
        assert finding.evidence["threads_per_worker"] == 4.0
        assert "threads of its own" not in finding.advice

    def test_workers_that_are_advised_count(self) -> None:
        finding = self.found(4.0, free=6.0)
        assert (finding.cause, finding.settings["num_workers"] > 2) == ("slow_transform", True)
        assert "Each worker runs 4 threads" in finding.advice

    def test_the_cpus_of_a_pool_are_not_those_of_other_programs(self) -> None:
        activity = host(1.0, free=0.0, process_cpus=0.5, worker_threads=4.0, worker_runnable=4.0, worker_cpus=3.5)
        assert "Other programs" not in find(workers(data_s=BUSY_S, cpu=0.9), host=activity).advice

    @pytest.mark.parametrize(
        ("threads", "runnable"),
        [(1.0, 1.2), (2.0, 1.3), (1.0, 1.9)],  # its own; one that sends batches; many that do little
    )
    def test_others_are_no_pool(self, threads: float, runnable: float) -> None:
        finding = self.found(threads, runnable=runnable, usable=2.0)
        assert "threads_per_worker" not in finding.evidence
        assert "threads of its own" not in finding.advice
