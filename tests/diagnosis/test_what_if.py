"""Forecasts from a report, by numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import jsonschema
import pytest

from lightning_gpuopt.diagnosis.render.what_if import render_forecast
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA, StallReport
from lightning_gpuopt.diagnosis.what_if import CannotSayError, Forecast, WhatIf, what_if
from lightning_gpuopt.measurements.loader_costs import LoaderCosts
from lightning_gpuopt.measurements.loading import LoaderFacts
from tests.diagnosis.reports import before

COSTS = LoaderCosts(
    num_workers=2,
    prefetch_factor=2,
    batches=100,
    data_s=0.099,
    data_cpu_s=0.0,
    collate_s=0.001,
    worker_cpu_s=0.0,
    queued_s=0.0,
    consumer_s=0.01,
    consumer_cpu_s=0.0,
    receive_s=(0.0, 0.0, 0.0),
    usable_cpus=4.0,
    free_cpus=4.0,
    spread=0.08,
)
COMPUTING = replace(COSTS, data_cpu_s=0.099, worker_cpu_s=0.1)


def report_of(costs: LoaderCosts | None, step_s: float | None = 0.05, **fields: Any) -> StallReport:
    fields = {"environment": {"batch_size": "32"}, "loader": LoaderFacts(2, False, 2, False)} | fields
    return StallReport("slow_storage", 10.0, {}, [], step_s=step_s, loader_costs=costs, **fields)


def ask(costs: LoaderCosts, step_s: float = 0.05, /, **change: Any) -> Forecast:
    return what_if(report_of(costs, step_s), WhatIf(**change))


class TestWorkers:
    def test_four_workers_that_wait_are_twice_as_fast_as_two(self) -> None:
        forecast = ask(COSTS, num_workers=4)
        assert forecast.step_s == pytest.approx((0.023, 0.025, 0.027), rel=1e-2)
        assert forecast.speedup[1] == pytest.approx(2, rel=1e-2)
        assert (forecast.limit_before, forecast.limit) == ("workers", "workers")

    def test_enough_of_them_leave_the_step_s_own_work(self) -> None:
        forecast = ask(COSTS, num_workers=12)
        assert forecast.step_s == pytest.approx((0.0096, 0.01, 0.0104), rel=1e-2)
        assert forecast.limit == "step"

    def test_fewer_of_them_are_slower(self) -> None:
        assert ask(COSTS, num_workers=1).speedup[1] == pytest.approx(0.5, rel=1e-2)

    def test_none_of_them_load_in_the_training_process(self) -> None:
        forecast = ask(COSTS, num_workers=0)
        assert (forecast.step_s[1], forecast.limit) == (pytest.approx(0.11), "training_process")
        assert "prefetch_factor" not in forecast.after

    def test_a_run_without_workers_says_what_is_assumed(self) -> None:
        alone = replace(COSTS, num_workers=0, prefetch_factor=None, receive_s=(0.0003, 0.0008, 0.002))
        forecast = ask(alone, 0.11, num_workers=12)
        assert forecast.step_s[1] == pytest.approx(0.0108, rel=1e-2)
        assert forecast.notes == [
            "A run without workers does not measure the cost of transferring a batch: 0.8 ms is assumed."
        ]
        assert ask(alone, 0.11, cpus=8).notes == []


class TestCpus:
    def test_where_workers_compute_the_cpus_are_the_limit(self) -> None:
        forecast = ask(COMPUTING, num_workers=16)
        assert (forecast.step_s[1], forecast.limit) == (pytest.approx(0.025, rel=1e-2), "cpus")
        assert ask(COMPUTING, num_workers=16, cpus=8).step_s[1] == pytest.approx(0.0125, rel=1e-2)
        assert ask(COMPUTING, cpus=1).step_s[1] == pytest.approx(0.1, rel=1e-2)

    def test_what_workers_waited_for_a_cpu_is_no_part_of_a_batch(self) -> None:
        queued = replace(COMPUTING, data_s=0.199, queued_s=0.1, num_workers=4, usable_cpus=2.0, free_cpus=2.0)
        forecast = ask(queued, cpus=4)
        assert forecast.simulated_step_s == pytest.approx(0.05, rel=1e-2)
        assert forecast.step_s[1] == pytest.approx(0.025, rel=1e-2)

    @pytest.mark.parametrize(
        ("free", "cpus", "step_s"),
        [
            (3.0, None, 0.1 / 3),  # others keep what they have
            (1.0, None, 0.1 / 2),  # but not more than half
            (3.0, 2, 0.1 / 2),  # what is given up is theirs first
            (3.0, 8, 0.1 / 7),  # and they do not grow
        ],
    )
    def test_others_that_use_them_are_counted(self, free: float, cpus: float | None, step_s: float) -> None:
        forecast = ask(replace(COMPUTING, free_cpus=free), num_workers=16, cpus=cpus)
        assert forecast.step_s[1] == pytest.approx(step_s, rel=1e-2)

    def test_at_best_others_leave_all_and_at_worst_they_keep_theirs(self) -> None:
        low_s, _, high_s = ask(replace(COMPUTING, free_cpus=1.0), num_workers=16).step_s
        assert (low_s, high_s) == (pytest.approx(0.84 * 0.025), pytest.approx(1.16 * 0.1))

    def test_where_they_were_not_measured_it_is_said(self) -> None:
        unknown = replace(COMPUTING, usable_cpus=None, free_cpus=None, consumer_cpu_s=None)
        forecast = ask(unknown, num_workers=16)
        assert forecast.limit == "step"
        assert forecast.notes == [
            "The number of CPUs was not measured: enough are assumed.",
            "The training process's CPU use was not measured: none is assumed.",
        ]
        assert len(ask(unknown, num_workers=16, cpus=4).notes) == 1


class TestDecoding:
    def test_only_the_dataset_s_cpu_time_is_divided(self) -> None:
        half = replace(COMPUTING, data_cpu_s=0.05, worker_cpu_s=0.05)
        assert ask(half, decode_speedup=4).step_s[1] == pytest.approx(0.0625 / 2, rel=1e-2)

    def test_where_workers_wait_it_brings_nothing(self) -> None:
        assert ask(COSTS, decode_speedup=2).speedup[1] == pytest.approx(1, rel=1e-2)


class TestBatchSize:
    def test_the_step_lies_between_constant_and_proportional(self) -> None:
        forecast = ask(COSTS, num_workers=32, batch_size=64)
        assert forecast.step_s == pytest.approx((0.96 * 0.01, 0.015, 1.04 * 0.02), rel=1e-2)
        assert forecast.speedup[1] == pytest.approx(2 * 0.05 / 0.015, rel=1e-2)  # in samples
        assert (forecast.before["batch_size"], forecast.after["batch_size"]) == (32, 64)

    def test_smaller_batches_too(self) -> None:
        assert ask(COSTS, num_workers=32, batch_size=16).step_s == pytest.approx((0.0048, 0.0075, 0.0104), rel=1e-2)

    def test_the_loader_is_in_proportion(self) -> None:
        forecast = ask(COSTS, batch_size=64)
        assert (forecast.step_s[1], forecast.speedup[1]) == (pytest.approx(0.1, rel=1e-2), pytest.approx(1, rel=1e-2))

    @pytest.mark.parametrize("environment", [{}, {"batch_size": "None"}, {"batch_size": "4, 8"}])
    def test_an_unknown_size_is_refused(self, environment: dict[str, str]) -> None:
        with pytest.raises(CannotSayError, match=r"how many samples are in a batch"):
            what_if(report_of(COSTS, environment=environment), WhatIf(batch_size=64))


class TestWhatIsNotExplained:
    def test_it_is_taken_as_the_cost_of_handing_over(self) -> None:
        forecast = ask(replace(COSTS, num_workers=16), 0.04, num_workers=32)
        assert forecast.simulated_step_s == pytest.approx(0.04, rel=1e-2)
        assert forecast.step_s[1] == pytest.approx(0.04, rel=1e-2)
        assert forecast.step_s[0] == pytest.approx(0.0096, rel=1e-2)
        assert (forecast.limit_before, forecast.limit) == ("handing_over", "handing_over")

    def test_a_little_of_it_beside_workers_that_are_busy_is_not(self) -> None:
        assert ask(COSTS, 0.053, num_workers=16).step_s[1] == pytest.approx(0.01, rel=1e-2)

    def test_a_run_that_is_faster_than_its_parts_is_said(self) -> None:
        assert ask(COSTS, 0.04, num_workers=4).notes == [
            "The simulation of the measured run is 25 % slower than the run: it does not model everything that happens "
            "there."
        ]

    def test_a_few_batches_are_said(self) -> None:
        assert ask(replace(COSTS, batches=20), num_workers=4).notes == [
            "Only 20 batches were measured: slow ones among them may have been missed."
        ]

    def test_samples_that_would_come_twice_are_said(self) -> None:
        report = report_of(COSTS, loader=LoaderFacts(2, duplicates=True))
        assert what_if(report, WhatIf(num_workers=4)).notes == [
            "This IterableDataset does not divide its samples: each worker would yield all of them."
        ]


def test_slow_batches_are_bridged_by_a_longer_queue() -> None:
    uneven = replace(
        COSTS, num_workers=4, data_s=0.0158, collate_s=0.0, edges_s=(0.006, 0.0061, 0.2, 0.201), counts=(95, 0, 5)
    )
    before_s = ask(uneven, 0.0135, prefetch_factor=2)
    after_s = ask(uneven, 0.0135, prefetch_factor=16)
    assert after_s.step_s[1] < 0.9 * before_s.step_s[1]
    assert before_s.limit_before == "order"


@pytest.mark.parametrize(("costs", "step_s"), [(None, 0.05), (COSTS, None)])
def test_a_report_that_does_not_say_enough_is_refused(costs: LoaderCosts | None, step_s: float | None) -> None:
    with pytest.raises(CannotSayError, match=r"^expected a report that says what its loader costs, got one that does"):
        what_if(report_of(costs, step_s), WhatIf(num_workers=4))


def test_a_report_whose_figures_could_be_anything_has_a_best_case_that_takes_time() -> None:
    forecast = ask(replace(COSTS, spread=3.0), num_workers=0)
    assert 0 < forecast.step_s[0] <= forecast.step_s[1] <= forecast.step_s[2]


def test_what_the_report_keeps_is_read_back_the_same() -> None:
    costs = replace(COSTS, edges_s=(0.1, 0.2), counts=(100,), queued_s=None, free_cpus=None)
    report = replace(before(), loader_costs=costs)
    jsonschema.validate(json.loads(report.to_json()), REPORT_SCHEMA)
    assert StallReport.from_json(report.to_json()) == report
    assert StallReport.from_json(before().to_json()).loader_costs is None


def test_a_forecast_in_the_terminal() -> None:
    alone = replace(COSTS, num_workers=0, prefetch_factor=None, batches=20)
    text = render_forecast(ask(alone, 0.11, num_workers=4, decode_speedup=2.0))
    assert [line for line in text.splitlines() if "─" not in line] == [
        "",
        "                                          measured                  what if",
        " num_workers                                     0                        4",
        " prefetch_factor                                 –                        2",
        " cpus                                            4                        4",
        " decode_speedup                                  –                        2",
        " batch_size                                     32                       32",
        " step time                                  110 ms   25 ms (23 ms to 27 ms)",
        "   simulated                                110 ms",
        " limited by        loading in the training process              the workers",
        "",
        "Expected: 4.4x (4.1x to 4.8x) the samples per second",
        "Note: A run without workers does not measure the cost of transferring a batch:",
        "0.0 ms is assumed.",
        "Note: Only 20 batches were measured: slow ones among them may have been missed.",
    ]


def test_a_forecast_as_data() -> None:
    data = json.loads(json.dumps(asdict(ask(COSTS, num_workers=4))))
    assert data["limit"] == "workers"
    assert data["after"] == {"num_workers": 4, "prefetch_factor": 2, "cpus": 4.0, "batch_size": 32}
    assert data["before"]["num_workers"] == 2
    assert len(data["step_s"]) == len(data["speedup"]) == 3
