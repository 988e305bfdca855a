"""The run since the last change of a fit, and what rank 0 is told of it: readings of counters in, measurements out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpuopt.detector import accumulator
from lightning_gpuopt.detector.accumulator import SteadyStateAccumulator, work_of
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.gpu import AheadCopies, DeviceState, GpuTimes, StepLook, SyncSighting
from lightning_gpuopt.measurements.host import Collections, Compilations
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.loading import LoaderFacts, LoaderReading, QueueTimes, WorkerTimes
from lightning_gpuopt.measurements.ranks import GradientSync, MetricSync, RankWork, ReducerTimes
from lightning_gpuopt.telemetry.process import ProcessReading
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, gpu, host, measurement, pipelines, times, workers

ONE_WORKER = replace(TWO_WORKERS, num_workers=1)
DDP = GradientSync(bytes=8)


def reading(facts: LoaderFacts, timed: WorkerTimes | None, key: str = "", **more: Any) -> LoaderReading:
    return LoaderReading(LoaderDescription("torch", key=key), facts, timed, **more)


class Counters:
    """All that an accumulator reads, as a test has set it."""

    def __init__(self) -> None:
        self.facts = TWO_WORKERS
        self.worked: dict[int, Any] = {}
        self.validated: LoaderReading | None = None
        self.piped: dict[int, Any] = {}
        self.queued = QueueTimes()
        self.ahead: AheadCopies | None = None
        self.ran: GpuTimes = GpuTimes()
        self.snapshot: GpuTimes | None = None
        self.reduced: ReducerTimes | None = None
        self.logged: MetricSync | None = None
        self.events: list[Any] = []

    def begin(self, *, on_gpu: bool = False, ranks: bool = False, steps: int = 0) -> SteadyStateAccumulator:
        note = self.events.append
        loader: Any = SimpleNamespace(
            facts=self.facts,
            readings=lambda: dict(self.worked),
            validation=lambda: self.validated,
            pipelines=lambda: dict(self.piped),
            queues=SimpleNamespace(times=lambda: self.queued),
            host=lambda: host(0.5),
            process=lambda: ProcessReading(threads=3),
            reset_host=lambda: note("host"),
        )
        counters = self

        class Clock:
            def take_snapshot(self, steps: int) -> None:
                note(("snapshot", steps))

            @property
            def snapshot(self) -> GpuTimes | None:
                return counters.snapshot

            def times(self) -> GpuTimes:
                return counters.ran

        device: Any = SimpleNamespace(
            device=None,
            state=lambda: DeviceState(utilization=50.0),
            restart=lambda: note("device"),
            clock=Clock(),
        )
        kernels = SimpleNamespace(syncs=SyncSighting(3, 0), look=None, pending=True, missed=False)
        looks: Any = SimpleNamespace(kernels=kernels if on_gpu else None)
        pauses: Any = SimpleNamespace(
            restart=lambda: note("pauses"), collections=lambda: Collections(), compilations=lambda: Compilations()
        )
        watch: Any = SimpleNamespace(
            read=lambda: (self.reduced, DDP), metrics=lambda: (self.logged, ("loss",) if self.logged else ())
        )
        return SteadyStateAccumulator(
            loader,
            device if on_gpu else None,
            looks,
            steps,
            lambda: self.ahead,
            lambda: None,
            pauses,
            {},
            watch if ranks else None,
        )


class TestItsBeginning:
    def test_the_hosts_figures_begin_anew(self) -> None:
        counters = Counters()
        counters.begin()
        assert counters.events == ["pauses", "host"]

    def test_on_a_gpu_also_the_devices_from_the_step_on_that_the_host_has_done(self) -> None:
        counters = Counters()
        counters.begin(on_gpu=True, steps=7)
        assert counters.events == ["pauses", "host", "device", ("snapshot", 7)]


class TestCounters:
    def test_what_was_counted_before_is_no_part(self) -> None:
        counters = Counters()
        before = workers(10, data_s=0.1)
        counters.worked = {1: reading(TWO_WORKERS, before)}
        counters.queued = QueueTimes(fetches=10, wait_s=1.0)
        counters.ahead = AheadCopies(10, 1.0, 0.5)
        counters.piped = {1: pipelines(10)}
        steady = counters.begin()
        counters.worked = {1: reading(TWO_WORKERS, before + workers(30, data_s=0.2))}
        counters.queued = QueueTimes(fetches=40, wait_s=3.0)
        counters.ahead = AheadCopies(40, 3.0, 1.0)
        counters.piped = {1: pipelines(40)}
        measured = steady.measure(times())
        assert measured.workers is not None
        assert measured.workers.batches == 30
        assert measured.workers.busy_s == pytest.approx(6.0)
        assert measured.queues == QueueTimes(fetches=30, wait_s=2.0)
        assert measured.ahead == AheadCopies(30, 2.0, 0.5)
        assert measured.pipelines is not None
        assert measured.pipelines.times.batches == 30

    def test_a_window_is_what_came_since_the_last(self) -> None:
        counters = Counters()
        steady = counters.begin()
        seen = []
        for fetches in (10, 25, 25):
            counters.queued = QueueTimes(fetches=fetches)
            seen.append(steady.window(times()).queues)
        assert [each.fetches for each in seen if each is not None] == [10, 15, 0]
        counters.queued = QueueTimes(fetches=30)
        until, now = steady.until_window(times()), steady.measure(times())
        assert until.queues is not None
        assert now.queues is not None
        assert (until.queues.fetches, now.queues.fetches) == (25, 30)

    def test_copies_that_began_later_are_counted_from_their_beginning(self) -> None:
        counters = Counters()
        steady = counters.begin()
        assert steady.measure(times()).ahead is None
        counters.ahead = AheadCopies(4, 1.0, 0.0)
        assert steady.measure(times()).ahead == counters.ahead

    def test_without_workers_the_settings_are_the_loaders(self) -> None:
        measured = Counters().begin().measure(times())
        assert (measured.loader, measured.workers, measured.pipelines) == (TWO_WORKERS, None, None)

    def test_of_several_loaders_the_one_whose_workers_were_busiest(self) -> None:
        counters = Counters()
        counters.worked = {1: reading(TWO_WORKERS, workers(1000, data_s=1.0))}
        steady = counters.begin()
        counters.worked[1] = reading(TWO_WORKERS, workers(1000, data_s=1.0) + workers(30, data_s=0.1))
        counters.worked[2] = reading(
            ONE_WORKER, workers(20, data_s=0.1)
        )  # 2 s of one worker, against 1.5 s of each of two
        measured = steady.measure(times())
        assert measured.loader == ONE_WORKER
        assert measured.workers is not None
        assert measured.workers.batches == 20

    def test_of_several_loaders_the_one_that_the_loop_waits_for(self) -> None:
        counters = Counters()
        counters.worked = {1: reading(TWO_WORKERS, None, "fast", wait_s=3.0), 2: reading(IN_PROCESS, None, "slow")}
        steady = counters.begin()
        counters.worked[1] = reading(TWO_WORKERS, workers(30, data_s=0.1), "fast", wait_s=3.5)
        counters.worked[2] = reading(IN_PROCESS, workers(30, data_s=0.05), "slow", wait_s=1.5)
        measured = steady.measure(times())
        assert measured.source is not None
        assert (measured.source.key, measured.loader, measured.queues) == ("slow", IN_PROCESS, None)

    @pytest.mark.parametrize("inner_s", [4.0, 1.0])
    def test_a_loader_around_a_dataloader_is_slow_by_itself_or_by_that(self, inner_s: float) -> None:
        counters = Counters()
        steady = counters.begin()
        counters.worked = {1: reading(TWO_WORKERS, workers(30, data_s=0.1), inner_s=inner_s)}
        measured = steady.measure(times(data_wait=5.0))
        assert (measured.loader == TWO_WORKERS) is (measured.workers is not None) is (inner_s == 4.0)

    def test_the_host_and_its_pauses_come_along(self) -> None:
        measured = Counters().begin().measure(times(), (RankWork(0, 0.0, 0.1),))
        assert (measured.host, measured.collections, measured.compilations) == (
            host(0.5),
            Collections(),
            Compilations(),
        )
        assert measured.ranks == (RankWork(0, 0.0, 0.1),)
        assert (measured.gpu, measured.device, measured.gradients, measured.metrics) == (None, None, None, None)

    def test_of_several_ranks_what_they_do_together_too(self) -> None:
        counters = Counters()
        counters.reduced, counters.logged = ReducerTimes(10, 5, 1.0), MetricSync(10, 1.0)
        steady = counters.begin(ranks=True)
        counters.reduced, counters.logged = ReducerTimes(30, 15, 4.0), MetricSync(30, 2.0)
        measured = steady.measure(times())
        assert (measured.reducer, measured.gradients) == (ReducerTimes(20, 10, 3.0), DDP)
        assert (measured.metrics, measured.metric_names) == (MetricSync(20, 1.0), ("loss",))

    def test_what_begins_later_counts_from_its_beginning(self) -> None:
        counters = Counters()
        steady = counters.begin(ranks=True)
        assert (steady.measure(times()).reducer, steady.measure(times()).metrics) == (None, None)
        counters.reduced, counters.logged = ReducerTimes(3, 1, 0.5), MetricSync(3, 0.5)
        measured = steady.measure(times())
        assert (measured.reducer, measured.metrics) == (counters.reduced, counters.logged)


class TestTheGpu:
    def test_counts_once_it_has_done_what_came_before(self) -> None:
        counters = Counters()
        steady = counters.begin(on_gpu=True)
        counters.ran = gpu(5, compute_s=0.5)
        steady.step_done()
        assert steady.gpu() == GpuTimes()
        counters.snapshot, counters.ran = gpu(6, compute_s=0.5), gpu(10, compute_s=1.0)
        steady.step_done()
        assert (steady.gpu().steps, steady.gpu().compute_s) == (4, 0.5)
        window = steady.window(times())
        assert window.gpu is not None
        assert (window.gpu.steps, window.gpu.compute_s) == (4, 0.5)

    def test_its_beginning_stays_where_it_was(self) -> None:
        counters = Counters()
        counters.snapshot = gpu(6, compute_s=0.6)
        steady = counters.begin(on_gpu=True)
        counters.snapshot, counters.ran = gpu(9, compute_s=0.9), gpu(10, compute_s=1.1)
        steady.step_done()
        assert steady.gpu().steps == 4

    def test_what_nvml_and_the_looks_say_comes_along(self) -> None:
        counters = Counters()
        counters.snapshot = GpuTimes()
        measured = counters.begin(on_gpu=True).measure(times())
        assert measured.device == DeviceState(utilization=50.0)
        assert (measured.syncs, measured.look, measured.look_pending, measured.look_missed) == (
            SyncSighting(3, 0),
            None,
            True,
            False,
        )


class TestLaps:
    def test_windows_are_joined_until_they_are_long_enough(self) -> None:
        counters = Counters()
        steady = counters.begin(steps=50)
        short = replace(times(), wall_s=0.09)
        steady.window(short)
        assert steady.until_window(short).history == ()
        steady.window(times())
        (record,) = steady.until_window(times()).history
        assert (record.steps, record.end_step, record.held) == (100, 150, {"threads": 3})
        both = times() + times()
        steady.window(times())
        assert [each.end_step for each in steady.until_window(both).history] == [150, 250]
        assert len(steady.until_window(both).history) == 2  # no time has passed since


class TestWhatGrows:
    def test_is_looked_for_again_after_half_as_many_steps_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        found = ""

        class Growing:
            def __init__(self, owners: Any) -> None:
                pass

            def look(self, phase: str) -> str:
                asked.append(phase)
                return found

        monkeypatch.setattr(accumulator, "Growing", Growing)
        steady = Counters().begin(steps=100)
        slower = Finding("slowdown", 0.2, {"phase": "Model.training_step"}, "")
        assert not steady.look_for_growth(slower)
        assert not steady.look_for_growth(slower)
        assert asked == ["Model.training_step"]
        steady._steps = 149
        assert not steady.look_for_growth(slower)
        steady._steps, found = 150, "Model.losses grew"
        assert steady.look_for_growth(slower)
        assert len(asked) == 2
        assert steady.measure(times()).grows == "Model.losses grew"
        steady._steps = 9999
        assert not steady.look_for_growth(slower)  # found once
        assert len(asked) == 2


class TestWorkOfARank:
    def test_there_is_none_without_steps(self) -> None:
        assert work_of(1, None, forward=True) is None
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
