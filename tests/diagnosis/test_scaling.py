"""A run on one GPU, forecast on several: by numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.render.what_if import render_scaling
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.diagnosis.scaling import ASSUMED, Link, LinkForecast, scaling
from lightning_gpuopt.diagnosis.what_if import CannotSayError, WhatIf
from lightning_gpuopt.measurements.loader_costs import LoaderCosts
from tests.diagnosis.test_what_if import COSTS, report_of

MIB = 1 << 20
ONE_BUCKET = 25 * MIB
EXACT = Link("exact", (10.0, 10.0, 10.0), (0.001, 0.001, 0.001))
BUCKET_S = ONE_BUCKET / 10e9 + 0.001
"""On two GPUs each bucket is sent once, in each direction."""

FAST = replace(COSTS, consumer_s=0.1, data_s=0.001, collate_s=0.0, receive_s=(0.0, 0.0, 0.0))
"""The loader is no bottleneck."""


def one_gpu(costs: LoaderCosts | None = FAST, step_s: float = 0.1, **environment: str) -> StallReport:
    known = {"device": "cuda (NVIDIA H100)", "ranks": "1", "batch_size": "32", "gradient_bytes": str(4 * ONE_BUCKET)}
    return report_of(costs, step_s, environment=known | environment)


def over(report: StallReport, ranks: int = 2, link: Link = EXACT, **changed: Any) -> LinkForecast:
    (forecast,) = scaling(report, ranks, WhatIf(**changed), link=link).links
    return forecast


class TestReduction:
    def test_of_what_the_backward_pass_hides_the_last_bucket_stays(self) -> None:
        forecast = over(one_gpu())
        assert forecast.exposed_s == pytest.approx((BUCKET_S + 1e-4, BUCKET_S + 4e-4, BUCKET_S + 1e-3))
        assert forecast.step_s[1] == pytest.approx(0.1 + BUCKET_S + 4e-4)
        assert forecast.speedup[1] == pytest.approx(2 * 0.1 / forecast.step_s[1])
        assert forecast.linear_percent == pytest.approx(50 * forecast.speedup[1])
        assert forecast.limit == "step"

    def test_what_is_longer_than_the_backward_pass_is_waited_for(self) -> None:
        forecast = over(one_gpu(gradient_bytes=str(40 * ONE_BUCKET)))
        assert forecast.exposed_s[1] == pytest.approx(40 * BUCKET_S - 0.1 * 2 / 3 + 4e-4)
        assert forecast.limit == "reduction"

    @pytest.mark.parametrize(("ranks", "sent"), [(2, 1.0), (4, 1.5), (8, 1.75)])
    def test_a_ring_sends_more_the_more_gpus_there_are(self, ranks: int, sent: float) -> None:
        forecast = over(one_gpu(gradient_bytes=str(ONE_BUCKET)), ranks)
        assert forecast.exposed_s[1] == pytest.approx(sent * ONE_BUCKET / 10e9 + 0.001 + 4e-4)

    def test_accumulated_gradients_are_reduced_once_for_all_their_batches(self) -> None:
        forecast = over(one_gpu(accumulate_grad_batches="4"))
        assert forecast.exposed_s[1] == pytest.approx(BUCKET_S / 4 + 4e-4)

    @pytest.mark.parametrize("batches", ["1", "4"])
    @pytest.mark.parametrize("buckets", [1, 40])
    @pytest.mark.parametrize("ranks", [2, 8])
    def test_at_the_limit_all_gpus_are_as_fast_as_one(self, ranks: int, buckets: int, batches: str) -> None:
        settings = {"gradient_bytes": str(buckets * ONE_BUCKET), "accumulate_grad_batches": batches}
        limit_s = over(one_gpu(**settings), ranks).slower_below_s[1]
        at = over(one_gpu(replace(FAST, consumer_s=limit_s, data_s=0.0), limit_s, **settings), ranks)
        assert at.speedup[1] == pytest.approx(1.0)

    def test_a_small_run_is_slower_on_two_gpus(self) -> None:
        small = one_gpu(replace(FAST, consumer_s=0.001), 0.001)
        assert over(small).speedup[2] < 1
        assert over(small).slower_below_s[0] > 0.001

    def test_nothing_is_faster_than_linear(self) -> None:
        assert over(one_gpu(gradient_bytes="1"), link=replace(EXACT, latency_s=(0.0, 0.0, 0.0))).speedup[2] == 2.0


class TestData:
    SLOW = replace(FAST, num_workers=4, data_s=0.2, data_cpu_s=0.2, worker_cpu_s=0.2, usable_cpus=4.0, free_cpus=4.0)
    """A batch is 0.2 s of CPU time: on four CPUs 20 batches/s, twice what one GPU of 10 steps/s needs."""

    def test_loaders_share_the_cpus_of_the_machine(self) -> None:
        assert scaling(one_gpu(self.SLOW), 2).cpus_per_rank == 2.0
        forecast = over(one_gpu(self.SLOW), 8)
        assert forecast.step_s[1] == pytest.approx(0.4, rel=0.02)
        assert (forecast.speedup[1], forecast.limit) == (pytest.approx(2, rel=0.02), "cpus")

    def test_more_cpus_can_be_asked_for(self) -> None:
        forecast = over(one_gpu(self.SLOW), 8, cpus=64.0)
        assert forecast.speedup[1] == pytest.approx(8 * 0.1 / (0.1 + 1.75 * ONE_BUCKET / 10e9 + 0.001 + 4e-4), rel=0.01)

    def test_over_a_network_each_gpu_has_a_machine(self) -> None:
        assert over(one_gpu(self.SLOW), 8, replace(EXACT, own_cpus=True)).limit == "reduction"

    def test_a_loader_that_was_not_measured_is_taken_to_keep_up(self) -> None:
        found = scaling(replace(one_gpu(None), headroom=0.4), 2, link=EXACT)
        assert found.notes == [
            "What the loader costs is not in the report: it is assumed that the loaders keep up with more GPUs."
        ]
        assert (found.cpus_per_rank, found.own_step_s) == (None, pytest.approx(0.06))
        assert found.links[0].step_s[1] == pytest.approx(0.1 + BUCKET_S + 4e-4)

    def test_a_run_that_the_simulation_does_not_know_is_said(self) -> None:
        alone = replace(FAST, num_workers=0, prefetch_factor=None)
        assert scaling(one_gpu(alone, 0.2), 2, link=EXACT).notes == [
            "The simulation of the measured run is 50 % faster than the run: it does not model everything that happens "
            "there."
        ]
        assert scaling(one_gpu(alone, 0.1), 2, link=EXACT).notes == []

    def test_larger_batches_count_their_samples(self) -> None:
        small = one_gpu(replace(FAST, data_s=0.0), gradient_bytes="4")
        assert over(small, batch_size=64).speedup[1] == pytest.approx(2 * 2 * 0.1 / (0.15 + 0.001 + 4e-4), rel=1e-3)


class TestWhatIsMissing:
    @pytest.mark.parametrize(
        ("environment", "got"),
        [
            ({"ranks": "4"}, "one of 4 ranks on cuda (NVIDIA H100)"),
            ({"device": "cpu (x86_64)"}, "one of 1 rank on cpu (x86_64)"),
        ],
    )
    def test_a_run_on_anything_but_one_gpu(self, environment: dict[str, str], got: str) -> None:
        with pytest.raises(CannotSayError) as raised:
            scaling(one_gpu(**environment), 2)
        assert str(raised.value) == f"expected a report of a run on one GPU, got {got}"

    def test_a_run_without_a_step(self) -> None:
        with pytest.raises(CannotSayError, match="expected a report with a step after the warm-up, got one without"):
            scaling(replace(one_gpu(), step_s=None), 2)

    @pytest.mark.parametrize("text", ["", "many", "0", "9" * 30])
    def test_the_bytes_of_the_gradients(self, text: str) -> None:
        report = one_gpu(gradient_bytes=text)
        with pytest.raises(CannotSayError) as raised:
            scaling(report, 2)
        assert raised.value.remedy == "give --gradient-bytes: in float32, four per trained parameter"
        assert scaling(report, 2, gradient_bytes=5 * MIB).gradient_bytes == 5 * MIB


def test_without_a_link_each_kind_is_assumed_and_said() -> None:
    found = scaling(one_gpu(), 2)
    assert [each.link for each in found.links] == [*ASSUMED]
    assert sorted(found.links, key=lambda each: each.speedup[1], reverse=True) == found.links
    text = render_scaling(found)
    for line in (
        "2 GPUs, NVLink, 150 GB/s assumed (80 to 300):",
        "2 GPUs, PCIe, 12 GB/s assumed (6 to 24):",
        "2 GPUs, network, 2.5 GB/s assumed (1 to 10), a machine for each GPU:",
    ):
        assert line in text.splitlines()


def test_the_text() -> None:
    small = one_gpu(replace(FAST, consumer_s=0.002), 0.002)
    assert render_scaling(scaling(small, 2, link=EXACT), 100).splitlines() == [
        "One GPU, measured: a step of 2 ms, of it 2 ms its own work; 100 MiB of gradients in 4 buckets, 2",
        "CPUs for each of 2 ranks of a machine.",
        "2 GPUs, exact, 10 GB/s:",
        "  0.26x (0.25x to 0.26x) the samples per second, 13 % of linear: slower than one GPU",
        "  a step of 15.6 ms (15.2 ms to 16.2 ms), limited by the reduction of gradients",
        "  2 GPUs are slower than one below a step of about 8.93 ms (8.75 ms to 9.29 ms)",
    ]
