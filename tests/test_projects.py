"""What the evaluation of public projects compares; the projects themselves are not installed here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "evaluation/projects"))

from recording import digest

from evaluation.projects.__main__ import changed, slower


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([2.0, 1.0])},
        {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"x": torch.tensor([[1.0, 2.0]])},
        {"y": torch.tensor([1.0, 2.0])},
        [torch.tensor([1.0, 2.0])],
    ],
)
def test_a_checksum_is_of_values_types_shapes_and_names(other: Any) -> None:
    batch = {"x": torch.tensor([1.0, 2.0])}
    assert digest(batch) == digest({"x": torch.tensor([1.0, 2.0])})
    assert digest(batch) != digest(other)


def row(**others: Any) -> dict[str, Any]:
    same = {"plain_runs_differ_in": [], "watched_runs_differ_in": [], "complaints_only_under_watch": []}
    return {**same, "steps": 3, "steps_of_reports": [3, 3], **others}


def test_a_project_is_changed_by_what_no_run_without_watch_shows() -> None:
    assert not changed(row())
    assert not changed(row(watched_runs_differ_in=["losses"], plain_runs_differ_in=["losses"]))
    assert changed(row(watched_runs_differ_in=["losses"]))
    assert changed(row(complaints_only_under_watch=["UserWarning"]))
    assert changed(row(steps_of_reports=[3, 2]))


@pytest.mark.parametrize(("wall", "cpu", "said"), [(1, 2, "no"), (3, 4, "yes"), (1, 4, "undecided")])
def test_slower_is_said_where_all_rounds_agree(wall: float, cpu: float, said: str) -> None:
    assert slower({"more_of_each_round_percent": {"fit": [wall] * 3, "fit_cpu": [cpu] * 3}}) == said
    assert slower({"more_of_each_round_percent": {"fit": [wall], "fit_cpu": [cpu]}}) == "undecided"
