"""Readings of counters: what is subtracted, and what stays."""

from __future__ import annotations

from lightning_gpuopt.measurements.counters import since
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.loading import LoaderFacts, LoaderReading, QueueTimes, WorkerTimes
from lightning_gpuopt.measurements.ranks import MetricSync
from tests.diagnosis.numbers import pipelines


def test_a_field_that_is_no_number_is_as_it_is_later() -> None:
    assert MetricSync(30, 2.0, ("loss",)) - MetricSync(10, 0.5) == MetricSync(20, 1.5, ("loss",))


def test_a_counter_inside_a_reading_is_subtracted_and_a_number_that_was_not_known_is_whole() -> None:
    loader, facts = LoaderDescription("torch"), LoaderFacts(num_workers=2)
    first = LoaderReading(loader, facts, WorkerTimes(10, took={3: 10}), None, 1.0)
    now = LoaderReading(loader, facts, WorkerTimes(25, took={3: 12, 4: 13}), 2.0, 1.5)
    assert now - first == LoaderReading(loader, facts, WorkerTimes(15, took={3: 2, 4: 13}), 2.0, 0.5)


def test_the_settings_of_a_pipeline_are_no_counters() -> None:
    done = pipelines(40, threads=3) - pipelines(10, threads=3)
    assert (done.times.batches, done.num_threads, done.batch_size) == (30, 3, 32)


def test_by_name_what_came_after_an_earlier_reading() -> None:
    now = {1: QueueTimes(fetches=5), 2: QueueTimes(fetches=7)}
    assert since({1: QueueTimes(fetches=2)}, now) == {1: QueueTimes(fetches=3), 2: QueueTimes(fetches=7)}
    assert since(None, now) == now
    assert since(QueueTimes(fetches=2), None) is None
    assert since(("loss",), ("loss", "accuracy")) == ("loss", "accuracy")
