"""Memory that forked workers really copy as they read a dataset's Python objects."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import Risk, StallDetector
from tests.helpers import FEATURES, TinyModel, tiny_trainer

OBJECTS = 1_200_000
SAMPLES = 24_000


class Photo:
    """What is known of a photograph."""

    def __init__(self, path: str) -> None:
        self.path = path


def path_of(number: int) -> str:
    return f"images/train/{number:09d}.jpg"


class Photos(Dataset[Any]):
    def __init__(self, held: Any, path: Callable[[Any], str]) -> None:
        self.held = held
        self.path = path

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        time.sleep(0.0002)  # so that memory is read several times in the run
        first = index * (OBJECTS // SAMPLES)
        lengths = [len(self.path(self.held[at])) for at in range(first, first + OBJECTS // SAMPLES)]
        return (torch.full((FEATURES,), float(sum(lengths))),)


def risks_of(dataset: Photos, folder: Path) -> list[Risk]:
    detector = StallDetector(report_dir=folder, print_report=False)
    loader = DataLoader(dataset, 64, num_workers=1, multiprocessing_context="fork")
    tiny_trainer(folder, max_steps=-1, max_epochs=1, callbacks=[detector]).fit(TinyModel(), loader)
    assert detector.report is not None
    return detector.report.risks


@pytest.mark.timed
@pytest.mark.parametrize(
    ("held", "path", "named"),
    [
        (lambda: [path_of(each) for each in range(OBJECTS)], str, "held, a list of 1,200,000 str"),
        (lambda: {each: path_of(each) for each in range(OBJECTS)}, str, "held, a dict of 1,200,000 str"),
        (
            lambda: [Photo(path_of(each)) for each in range(OBJECTS)],
            lambda photo: photo.path,
            "held, a list of 1,200,000 Photo",
        ),
    ],
    ids=["list", "dict", "objects"],
)
def test_what_reading_copies_is_named(
    held: Callable[[], Any], path: Callable[[Any], str], named: str, tmp_path: Path
) -> None:
    (risk,) = risks_of(Photos(held(), path), tmp_path)
    assert (risk.risk, risk.evidence["object"]) == ("worker_memory", named)
    assert str(risk.evidence["where"]).startswith("test_copy_on_write.py:")


@pytest.mark.timed
def test_an_array_is_not_copied(tmp_path: Path) -> None:
    held = np.array([path_of(each) for each in range(OBJECTS)])
    assert risks_of(Photos(held, str), tmp_path) == []
