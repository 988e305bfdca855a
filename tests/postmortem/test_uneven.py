"""Ranks with different numbers of batches."""

from __future__ import annotations

import pytest

from lightning_gpuopt.measurements.flight import SETS_UP, TRAINS, VALIDATES
from lightning_gpuopt.postmortem.uneven import uneven_of
from tests.postmortem.judged_runs import NOW, rank

LEFT = {"doing": SETS_UP, "batch": 8}
IN = {"doing": TRAINS, "batch": 8}
TOLD = [{"t": NOW, "event": "uneven_ranks", "batches": {"0": 20, "1": 8}}]

# what each rank is at: what is said; empty: nothing
RANKS = {
    "lengths-known": (
        [IN | {"batches": 20}, LEFT | {"batches": 8}],
        "rank 1 ended its epoch 12 batches early (8, not 20)",
    ),
    "one-batch": ([IN | {"batches": 9}, LEFT | {"batches": 8}], "rank 1 ended its epoch 1 batch early (8, not 9)"),
    "in-its-validation": (
        [IN | {"batches": 9}, LEFT | {"batches": 8, "doing": VALIDATES}],
        "rank 1 ended its epoch 1 batch early (8, not 9)",
    ),
    "lengths-were-told": ([IN | {"events": TOLD}, LEFT], "rank 1 ended its epoch 12 batches early (8, not 20)"),
    "told-as-a-list": (
        [IN | {"events": [TOLD[0] | {"batches": [9, 8]}]}, LEFT],
        "rank 1 ended its epoch 1 batch early (8, not 9)",
    ),
    "lengths-unknown": ([IN, LEFT], "rank 1 ended its epoch early (8, not 9 or more)"),
    "fit-has-ended": ([IN, LEFT | {"ended": "ok"}], "rank 1 ended its epoch early (8, not 9 or more)"),
    "two-early": (
        [IN | {"batches": 20}, LEFT | {"batches": 8}, LEFT | {"batches": 8}],
        "ranks 1-2 ended their epochs 12 batches early (8, not 20)",
    ),
    "the-fewest-first": (
        [IN | {"batches": 20}, LEFT | {"batches": 8}, LEFT | {"batches": 5}],
        "ranks 1-2 ended their epochs 15 batches early (5, not 20)",
    ),
    "equal-lengths": ([IN | {"batches": 9}, LEFT | {"batches": 9, "batch": 9}], ""),
    "in-the-middle": ([IN | {"batches": 20}, LEFT | {"batches": 20}], ""),
    "all-in": ([IN, IN], ""),
    "all-left": ([LEFT | {"batches": 8}, LEFT | {"batches": 8}], ""),
    "another-epoch": ([IN | {"epoch": 1}, LEFT], ""),
    "not-begun": ([IN | {"batch": 0}, {"doing": SETS_UP, "batch": 0}], ""),
    "raised": ([IN, LEFT | {"ended": "exception"}], ""),
    "alone": ([LEFT | {"batches": 8}], ""),
}


@pytest.mark.parametrize(("each", "said"), RANKS.values(), ids=RANKS)
def test_who_has_left_its_epoch(each, said):
    found = uneven_of([rank(number, of=len(each), **known) for number, known in enumerate(each)])
    assert (found.text if found is not None else "") == said
