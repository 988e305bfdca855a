"""Ranks that wait for one another, from numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.measurements.gpu import StepLook
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import PhaseTimes
from lightning_gpuopt.measurements.ranks import RankWork
from tests.diagnosis.numbers import TWO_WORKERS, gpu, measurement, times


def find(measured: PhaseTimes, threshold: float = 0.1, loader: LoaderFacts = TWO_WORKERS, **kwargs: Any) -> list[Any]:
    return diagnose(measurement(measured, loader, **kwargs), threshold)


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

    @pytest.mark.parametrize(("mib", "told"), [((1, 4), True), ((4, 4), False), ((4, 1), False), ((None, 4), False)])
    def test_a_rank_with_larger_samples(self, mib: tuple[float | None, float], told: bool) -> None:
        work = (RankWork(0, 0.0, 0.05), RankWork(1, 0.0, 0.09))
        sizes = [each * 2**20 if each is not None else None for each in mib]
        ranks = tuple(replace(each, batch_bytes=size) for each, size in zip(work, sizes, strict=True))
        (finding,) = find(times(), ranks=ranks)
        assert finding.evidence.get("batch_mib") == (4.0 if told else None)
        assert ("Its batches have 4 MiB, the others' 1: sort or bucket samples" in finding.advice) is told

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
