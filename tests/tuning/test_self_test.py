from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpuopt.compat import dataloader
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.tuning import self_test
from lightning_gpuopt.tuning.resize import ResizableIterator
from lightning_gpuopt.tuning.self_test import why_not_tried

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    self_test._trial.cache_clear()
    yield
    self_test._trial.cache_clear()


@pytest.mark.parametrize("version", ["2.4.0", "2.4.1+cpu", "2.13.0", "2.14.1+cu130"])
def test_a_torch_that_a_lane_runs_needs_no_trial(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(self_test, "_trial", lambda: "tried")
    assert why_not_tried(version) is None


@pytest.mark.parametrize("version", ["2.9.0", "2.99.0", "3.0.0", "2.14a0"])
def test_another_is_tried_once_and_nothing_is_left(version: str) -> None:
    torch.manual_seed(3)
    before, children = RandomStates(), set(multiprocessing.active_children())
    assert why_not_tried(version) is None
    assert why_not_tried(version) is None
    assert self_test._trial.cache_info().misses == 1
    assert RandomStates() == before
    assert set(multiprocessing.active_children()) == children


def test_one_that_gives_another_order_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = ResizableIterator.resize

    def loses_one(self: Any, num_workers: int) -> int:
        next(self)
        return resize(self, num_workers)

    monkeypatch.setattr(ResizableIterator, "resize", loses_one)
    assert why_not_tried("2.99.0") == f"with torch {torch.__version__} a trial gave another order"


def test_one_that_is_not_as_expected_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader, "WORKER_LOOP", [])
    why = why_not_tried("2.99.0")
    assert why is not None
    assert why.startswith(f"with torch {torch.__version__} a trial failed: ResizeUnsupported: ")


def test_the_versions_are_those_of_the_lanes() -> None:
    """The constraints of the lanes say which torch they run."""
    pins = {
        tuple(int(number) for number in line.split("==")[1].split("+")[0].split(".")[:2])
        for path in ("constraints-floor.txt", "constraints.txt", "constraints-loaders.txt")
        for line in (ROOT / path).read_text(encoding="utf-8").splitlines()
        if line.startswith("torch==")
    }
    assert pins == set(self_test.TESTED_MINORS)
