"""Advice that was followed, predicted and measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.compare import compare
from lightning_gpuopt.diagnosis.report import Finding, Proof, StallReport
from lightning_gpuopt.measurements.loading import LoaderFacts


def report(step_s: float | None, *, findings: list[Finding] | None = None, **loader: Any) -> StallReport:
    return StallReport("x", 1.0, {}, findings or [], step_s=step_s, loader=LoaderFacts(**loader))


SIX = Finding("slow_storage", 0.5, {}, "", {"num_workers": 6, "persistent_workers": True}, (1.8, 2.0, 2.2))
PIN = Finding("host_to_device", 0.2, {}, "", {"pin_memory": True}, (1.1, 1.2, 1.3))
NO_SETTING = Finding("callback", 0.3, {}, "", {}, (1.2, 1.4, 1.5))


def test_followed_advice_is_held_against_its_prediction() -> None:
    comparison = compare(report(0.1, findings=[SIX, PIN, NO_SETTING]), report(0.05, num_workers=6, pin_memory=False))
    assert comparison.speedup == 2.0
    assert comparison.proofs == [Proof("slow_storage", {"num_workers": 6}, (1.8, 2.0, 2.2), 2.0)]
    assert comparison.proofs[0].kept is True


ADVISED = {"num_workers": 4, "prefetch_factor": 4, "persistent_workers": True, "pin_memory": True}


@pytest.mark.parametrize("others", [{}, {"num_workers": 4}, {"num_workers": 4, "pin_memory": True}])
@pytest.mark.parametrize("kept", [{}, {"persistent_workers": None}, {"persistent_workers": False}])
def test_a_proof_names_only_what_is_in_force(others: dict[str, Any], kept: dict[str, Any]) -> None:
    advice = Finding("slow_storage", 0.5, {}, "", {**others, "persistent_workers": True}, (1.8, 2.0, 2.2))
    without = compare(report(0.1, findings=[advice]), report(0.05, **{**ADVISED, "persistent_workers": False, **kept}))
    assert [each.settings for each in without.proofs] == ([others] if others else [])
    follows = compare(report(0.1, findings=[advice]), report(0.05, **ADVISED))
    assert [each.settings for each in follows.proofs] == [advice.settings]


@pytest.mark.parametrize("missing", ["num_workers", "prefetch_factor", "pin_memory"])
def test_of_what_changes_the_steps_all_has_to_be_in_force(missing: str) -> None:
    advice = Finding("slow_storage", 0.5, {}, "", ADVISED, (1.8, 2.0, 2.2))
    after = {name: value for name, value in ADVISED.items() if name != missing}
    assert compare(report(0.1, findings=[advice]), report(0.05, **after)).proofs == []


@pytest.mark.parametrize(("workers", "followed"), [(5, False), (6, True), (8, True)])
def test_a_number_counts_when_it_is_reached(workers: int, followed: bool) -> None:
    proofs = compare(report(0.1, findings=[SIX]), report(0.05, num_workers=workers)).proofs
    assert bool(proofs) is followed


def test_the_advice_to_do_without_workers_is_followed_only_so() -> None:
    none = Finding("worker_transfer", 0.4, {}, "", {"num_workers": 0}, (1.2, 1.5, 1.6))
    assert compare(report(0.1, findings=[none]), report(0.05, num_workers=2)).proofs == []
    assert len(compare(report(0.1, findings=[none]), report(0.05, num_workers=0)).proofs) == 1


def test_a_gain_outside_the_interval_is_not_kept() -> None:
    (proof,) = compare(report(0.1, findings=[SIX]), report(0.09, num_workers=6)).proofs
    assert proof.kept is False
    assert Proof("x", {}, None, 2.0).kept is None


@pytest.mark.parametrize(
    ("before", "after", "proved"),
    [
        ({}, {}, True),
        ({"model": "Net (5 parameters)", "python": "3.11"}, {"model": "Net (5 parameters)", "python": "3.12"}, True),
        ({"model": "Net (5 parameters)"}, {}, True),
        ({"model": "Net (5 parameters)"}, {"model": "Net (6 parameters)"}, False),
        ({"device": "cpu (x86_64)"}, {"device": "cuda (NVIDIA H200)"}, False),
        ({"accumulate_grad_batches": "1"}, {"accumulate_grad_batches": "4"}, False),
        ({"batch_size": "32"}, {"batch_size": "64"}, False),
        ({"precision": "32-true"}, {"precision": "bf16-mixed"}, False),
    ],
)
def test_a_run_of_another_model_device_or_kind_of_step_proves_nothing(
    before: dict[str, str], after: dict[str, str], proved: bool
) -> None:
    first = replace(report(0.1, findings=[SIX]), environment=before)
    comparison = compare(first, replace(report(0.05, num_workers=6), environment=after))
    assert bool(comparison.proofs) is proved
    assert comparison.speedup == 2.0


def test_without_steady_steps_there_is_nothing_to_compare() -> None:
    comparison = compare(report(None, findings=[SIX]), report(0.05, num_workers=6))
    assert (comparison.speedup, comparison.proofs) == (None, [])
    assert compare(report(0.1, findings=[SIX]), report(0.05)).proofs == []
