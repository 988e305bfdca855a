"""Advice that a trial in the same run has refuted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.record import Change, Finding
from lightning_gpuopt.diagnosis.refuted import COSTS_MORE, INTERRUPTED, TOO_SHORT, without_refuted

FOUND = Finding("slow_storage", 0.5, {}, "num_workers=4", {"num_workers": 4, "persistent_workers": True}, (1.0, 2, 3))


@pytest.mark.parametrize(
    "change",
    [
        Change("num_workers", 1, 4, measured=0.65, kept=False, why="no gain beyond noise"),
        Change("num_workers", 1, 2, measured=0.65, kept=False, why=COSTS_MORE),
        Change("num_workers", 1, 3, why=COSTS_MORE),
        Change("num_workers", 1, 3, kept=False, why="there is no longer room for more workers"),
    ],
)
def test_what_was_refuted_is_not_advised(change: Change) -> None:
    (left,) = without_refuted([FOUND], [change])
    assert (left.cause, left.share, left.settings, left.predicted_speedup) == ("slow_storage", 0.5, {}, None)
    assert f"num_workers 1 → {change.to}" in left.advice
    assert "it is not advised" in left.advice
    assert ("0.65x" in left.advice) is (change.measured is not None)


@pytest.mark.parametrize(
    "change",
    [
        Change("num_workers", 1, 4, measured=1.9, kept=True),
        Change("num_workers", 1, 4, measured=1.1, kept=False, why=TOO_SHORT),
        Change("num_workers", 1, 4, measured=1.1, kept=False, why=INTERRUPTED),
        Change("num_workers", 1, 6, measured=0.9, kept=False),  # fewer may do
        Change("num_workers", 8, 3, measured=0.9, kept=False),
        Change("num_workers", 1, 4, why="its sampler draws random numbers for each index"),
        Change("prefetch_factor", 2, 4, measured=0.9, kept=False),
    ],
)
def test_what_was_not_stays(change: Change) -> None:
    assert without_refuted([FOUND], [change]) == [FOUND]
    assert without_refuted([replace(FOUND, settings={})], [change]) == [replace(FOUND, settings={})]


def test_a_setting_that_is_no_number_is_refuted_where_it_is_what_was_tried() -> None:
    found = replace(FOUND, settings={"persistent_workers": True})
    (left,) = without_refuted([found], [Change("persistent_workers", False, True, measured=1.1, kept=False, why="no")])
    assert left.advice == (
        "persistent_workers False → True was tried in this run, and measured 1.10x: it is not advised (no)."
    )
    assert without_refuted([found], [Change("persistent_workers", True, False, kept=False)]) == [found]


def test_fewer_workers_are_refuted_where_they_were_tried() -> None:
    found = replace(FOUND, settings={"num_workers": 2})
    (left,) = without_refuted([found], [Change("num_workers", 8, 3, measured=0.9, kept=False)])
    assert left.settings == {}


def test_what_was_not_even_tried_since_it_would_not_pay_is_said_so() -> None:
    (left,) = without_refuted([FOUND], [Change("num_workers", 1, 3, why=COSTS_MORE)])
    assert left.advice == f"num_workers 1 → 3 would not be worth it: it is not advised ({COSTS_MORE})."


def test_each_finding_is_looked_at_for_itself() -> None:
    other = Finding("logging", 0.2, {}, "log less")
    refuted = Change("num_workers", 1, 2, measured=0.9, kept=False)
    left = without_refuted([other, FOUND], [refuted])
    assert (left[0], left[1].settings) == (other, {})
