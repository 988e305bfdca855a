"""Collectives that nothing hides: on which rank, what they send, and what to do about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.diagnosis.predict import headroom
from lightning_gpuopt.measurements.gpu import StepLook
from lightning_gpuopt.measurements.ranks import GradientSync, RankWork, ReducerTimes
from tests.diagnosis.numbers import TWO_WORKERS, gpu, measurement, times

MIB = 1024 * 1024
DDP = GradientSync(
    bytes=8 * MIB,
    buckets=2,
    dtype="float32",
    find_unused_parameters=False,
    unused=False,
    bucket_view=False,
    static_graph=False,
)


def find(
    *waits_s: float | None, exposed_s: float = 4.0, gradients: GradientSync | None = DDP, compute_s: float = 0.0
) -> list[Any]:
    """Findings of a run of 100 steps in 10 s on the CPU; ``exposed_s`` is this rank's, by half of its steps."""
    ranks = tuple(RankWork(rank, 0.0, compute_s, communication_s=each) for rank, each in enumerate(waits_s))
    reducer = ReducerTimes(backwards=100, sampled=50, exposed_s=exposed_s / 2)
    return diagnose(measurement(times(), TWO_WORKERS, ranks=ranks, reducer=reducer, gradients=gradients), 0.1)


class TestOnTheCpu:
    def test_what_every_rank_waits_is_communication(self) -> None:
        (finding,) = find(0.04, 0.035)
        assert (finding.cause, finding.share) == ("communication", pytest.approx(0.35))
        assert finding.evidence == {
            "ms_per_step": 35.0,
            "step_ms": 100.0,
            "exposed_ms_per_step": 35.0,
            "gradient_mib": 8.0,
            "buckets": 2,
            "gradient_dtype": "float32",
            "find_unused_parameters": "False",
            "gradient_as_bucket_view": "False",
            "static_graph": "False",
            "accumulate_grad_batches": 1,
        }
        assert finding.predicted_speedup[1] == pytest.approx(100 / 65)

    def test_what_only_one_rank_waits_is_another_s_slowness(self) -> None:
        (finding,) = find(0.04, 0.005)
        assert (finding.cause, finding.evidence["rank"]) == ("straggler", 1)

    def test_without_the_other_ranks_figures_nothing_is_said(self) -> None:
        assert find() == []
        assert find(0.04) == []
        assert find(0.04, None) == []

    def test_a_short_wait_is_none(self) -> None:
        assert find(0.009, 0.009, exposed_s=0.9) == []

    def test_the_headroom_has_it(self) -> None:
        ranks = tuple(RankWork(rank, 0.0, 0.0, communication_s=0.03) for rank in range(2))
        reducer = ReducerTimes(100, 100, 3.0)
        assert headroom(measurement(times(), ranks=ranks, reducer=reducer)) == pytest.approx(0.3)


class TestOnCuda:
    @staticmethod
    def find(gradients: GradientSync | None) -> Any:
        look = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.03, calls=9)
        measured = measurement(times(), gpu=gpu(), look=look, gradients=gradients)
        return next(each for each in diagnose(measured, 0.1) if each.cause == "communication")

    def test_the_look_tells_how_long_and_the_reducer_what(self) -> None:
        evidence = self.find(replace(DDP, link="NVLink")).evidence
        assert (evidence["exposed_ms_per_step"], evidence["gradient_mib"], evidence["link"]) == (30.0, 8.0, "NVLink")

    def test_what_is_not_known_is_left_out(self) -> None:
        assert "gradient_mib" not in self.find(GradientSync(dtype="float32")).evidence
        assert "link" not in self.find(DDP).evidence

    @pytest.mark.parametrize(("others_s", "exposed_ms"), [((0.04, 0.02), 20.0), ((0.04,), None), ((0.04, None), None)])
    def test_without_a_look_ddps_own_figures_stand_in_once_all_ranks_have_them(
        self, others_s: tuple[float | None, ...], exposed_ms: float | None
    ) -> None:
        ranks = tuple(RankWork(rank, 0.0, 0.0, communication_s=each) for rank, each in enumerate(others_s))
        reducer = ReducerTimes(backwards=100, sampled=10, exposed_s=0.4)
        measured = measurement(times(), gpu=gpu(), ranks=ranks, reducer=reducer, gradients=DDP)
        found = [
            each.evidence["exposed_ms_per_step"] for each in diagnose(measured, 0.1) if each.cause == "communication"
        ]
        assert found == ([exposed_ms] if exposed_ms is not None else [])

    def test_without_any_figures_the_advice_is_general(self) -> None:
        assert "bf16 gradient compression" in self.find(None).advice


class TestAdvice:
    @pytest.mark.parametrize(
        ("change", "on_gpu", "advised"),
        [
            ({}, True, "bf16_compress_hook"),
            ({"hook": "bf16_compress_hook"}, True, None),
            ({"dtype": "bfloat16"}, True, None),
            ({"bytes": None}, True, None),  # no DDP
            ({}, False, None),  # Lightning registers no hook on the CPU
        ],
    )
    def test_a_compression_hook(self, change: dict[str, Any], on_gpu: bool, advised: str | None) -> None:
        advice = self.advice(replace(DDP, **change), on_gpu)
        assert (advised or "bf16_compress_hook") in advice or advised is None
        assert ("bf16_compress_hook" in advice) is (advised is not None)

    def test_unused_parameters_that_were_looked_for_in_vain(self) -> None:
        advice = self.advice(replace(DDP, find_unused_parameters=True, unused=False))
        assert "remove find_unused_parameters=True (no parameter was unused; static_graph=True" in advice
        assert "find_unused_parameters" not in self.advice(replace(DDP, find_unused_parameters=True, unused=True))
        assert "find_unused_parameters" not in self.advice(DDP)
        unknown = self.advice(replace(DDP, find_unused_parameters=True, unused=None))
        assert "(if every parameter is used;" in unknown

    def test_views_of_the_buckets(self) -> None:
        assert "gradient_as_bucket_view=True" in self.advice(DDP)
        assert "gradient_as_bucket_view" not in self.advice(replace(DDP, bucket_view=True))
        assert "gradient_as_bucket_view" not in self.advice(replace(DDP, bucket_view=None))

    def test_twice_the_accumulation_that_there_is(self) -> None:
        assert "accumulate_grad_batches=2;" in self.advice(DDP)
        assert "accumulate_grad_batches=8;" in self.advice(replace(DDP, accumulate_grad_batches=4))

    def test_the_link(self) -> None:
        assert self.advice(replace(DDP, link="PCIe")).endswith("links are fast (PCIe).")

    @staticmethod
    def advice(gradients: GradientSync, on_gpu: bool = False) -> str:
        if on_gpu:
            return str(TestOnCuda.find(gradients).advice)
        return str(find(0.04, 0.04, gradients=gradients)[0].advice)
