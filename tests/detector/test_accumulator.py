"""The run since the last change of a fit: readings of counters in, measurements out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.detector import accumulator
from lightning_gpuopt.detector.accumulator import SteadyStateAccumulator
from lightning_gpuopt.detector.window_history import WindowHistory
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.gpu import AheadCopies
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.loading import LoaderFacts, LoaderReading, QueueTimes, WorkerTimes
from lightning_gpuopt.measurements.ranks import GradientSync, MetricSync, ReducerTimes
from lightning_gpuopt.timeline.probe import Probe
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, host, pipelines, times, workers

ONE_WORKER = replace(TWO_WORKERS, num_workers=1)
DDP = GradientSync(bytes=8)
NONE = WorkerTimes()


def reading(facts: LoaderFacts, timed: WorkerTimes, key: str = "", **more: Any) -> LoaderReading:
    return LoaderReading(LoaderDescription("torch", key=key), facts, timed, **more)


class Counters(Probe):
    """All that an accumulator reads, as a test has set it."""

    def __init__(self) -> None:
        self.facts = TWO_WORKERS
        self.worked: dict[int, Any] = {}
        self.validated: LoaderReading | None = None
        self.piped: dict[int, Any] = {}
        self.others: dict[str, Any] = {}
        self.queued = QueueTimes()
        self.begun = 0

    def restart(self) -> None:
        self.begun += 1

    def read(self) -> dict[str, Any]:
        return {
            "loaders": dict(self.worked),
            "pipelines": dict(self.piped),
            "validation": self.validated,
            "queues": self.queued,
            **self.others,
        }

    def known(self) -> dict[str, Any]:
        return {"loader": self.facts, "host": host(0.5)}

    def begin(self, *others: Probe, steps: int = 0, **known: Any) -> SteadyStateAccumulator:
        history = WindowHistory(None, lambda: {"threads": 3})
        return SteadyStateAccumulator([self, *others], history, steps, {}, known)


def test_all_that_is_read_begins_anew_with_it() -> None:
    counters, other = Counters(), Counters()
    counters.begin(other)
    assert (counters.begun, other.begun) == (1, 1)


class TestCounters:
    def test_what_was_counted_before_is_no_part(self) -> None:
        counters = Counters()
        before = workers(10, data_s=0.1)
        counters.worked = {1: reading(TWO_WORKERS, before)}
        counters.queued = QueueTimes(fetches=10, wait_s=1.0)
        counters.others["ahead"] = AheadCopies(10, 1.0, 0.5)
        counters.piped = {1: pipelines(10)}
        steady = counters.begin()
        counters.worked = {1: reading(TWO_WORKERS, before + workers(30, data_s=0.2))}
        counters.queued = QueueTimes(fetches=40, wait_s=3.0)
        counters.others["ahead"] = AheadCopies(40, 3.0, 1.0)
        counters.piped = {1: pipelines(40)}
        measured = steady.measure(times())
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
        assert [each.fetches for each in seen] == [10, 15, 0]
        counters.queued = QueueTimes(fetches=30)
        until, now = steady.until_window(times()), steady.measure(times())
        assert (until.queues.fetches, now.queues.fetches) == (25, 30)

    def test_copies_that_began_later_are_counted_from_their_beginning(self) -> None:
        counters = Counters()
        steady = counters.begin()
        assert steady.measure(times()).ahead == AheadCopies()
        counters.others["ahead"] = AheadCopies(4, 1.0, 0.0)
        assert steady.measure(times()).ahead == AheadCopies(4, 1.0, 0.0)

    def test_without_workers_the_settings_are_the_loaders(self) -> None:
        measured = Counters().begin().measure(times())
        assert (measured.loader, measured.workers, measured.pipelines) == (TWO_WORKERS, WorkerTimes(), None)

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
        assert measured.workers.batches == 20

    def test_of_several_loaders_the_one_that_the_loop_waits_for(self) -> None:
        counters = Counters()
        counters.worked = {1: reading(TWO_WORKERS, NONE, "fast", wait_s=3.0), 2: reading(IN_PROCESS, NONE, "slow")}
        steady = counters.begin()
        counters.worked[1] = reading(TWO_WORKERS, workers(30, data_s=0.1), "fast", wait_s=3.5)
        counters.worked[2] = reading(IN_PROCESS, workers(30, data_s=0.05), "slow", wait_s=1.5)
        measured = steady.measure(times())
        assert (measured.source.key, measured.loader, measured.queues) == ("slow", IN_PROCESS, QueueTimes())

    @pytest.mark.parametrize("inner_s", [4.0, 1.0])
    def test_a_loader_around_a_dataloader_is_slow_by_itself_or_by_that(self, inner_s: float) -> None:
        counters = Counters()
        steady = counters.begin()
        counters.worked = {1: reading(TWO_WORKERS, workers(30, data_s=0.1), inner_s=inner_s)}
        measured = steady.measure(times(data_wait=5.0))
        assert (measured.loader == TWO_WORKERS) is (measured.workers.batches > 0) is (inner_s == 4.0)

    def test_the_workers_of_the_validation_are_counted_too(self) -> None:
        counters = Counters()
        counters.validated = reading(TWO_WORKERS, workers(10, data_s=0.1), "validation")
        steady = counters.begin()
        counters.validated = reading(TWO_WORKERS, workers(25, data_s=0.1), "validation")
        measured = steady.measure(times())
        assert measured.validation is not None
        assert (measured.validation.loader.key, measured.validation.workers.batches) == ("validation", 15)

    def test_what_is_no_counter_comes_along(self) -> None:
        counters = Counters()
        counters.others = {"gradients": DDP}
        steady = counters.begin(hyperparameters=("dataset (Photos)",))
        for measured in (steady.measure(times()), steady.window(times())):
            assert (measured.host, measured.gradients) == (host(0.5), DDP)
            assert measured.hyperparameters == ("dataset (Photos)",)
            assert (measured.gpu, measured.device, measured.metrics) == (None, None, MetricSync())

    def test_of_several_ranks_what_they_do_together_too(self) -> None:
        counters = Counters()
        counters.others = {"reducer": ReducerTimes(10, 5, 1.0), "metrics": MetricSync(10, 1.0)}
        steady = counters.begin()
        counters.others = {"reducer": ReducerTimes(30, 15, 4.0), "metrics": MetricSync(30, 2.0, ("loss",))}
        measured = steady.measure(times())
        assert (measured.reducer, measured.metrics) == (ReducerTimes(20, 10, 3.0), MetricSync(20, 1.0, ("loss",)))

    def test_what_begins_later_counts_from_its_beginning(self) -> None:
        counters = Counters()
        counters.others = {"reducer": ReducerTimes(), "metrics": MetricSync()}
        steady = counters.begin()
        assert (steady.measure(times()).reducer, steady.measure(times()).metrics) == (ReducerTimes(), MetricSync())
        counters.others = {"reducer": ReducerTimes(3, 1, 0.5), "metrics": MetricSync(3, 0.5)}
        measured = steady.measure(times())
        assert (measured.reducer, measured.metrics) == (ReducerTimes(3, 1, 0.5), MetricSync(3, 0.5))


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
