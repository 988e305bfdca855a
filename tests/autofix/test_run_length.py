"""How long training goes on, by what the Trainer was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpuopt.autofix.run_length import RunLength, run_length_of


@pytest.mark.parametrize(
    ("asked", "length"),
    [
        ({"max_epochs": 5}, RunLength(20, 4)),
        ({"max_epochs": 5, "current_epoch": 3}, RunLength(20, 1)),
        ({"max_epochs": 5, "current_epoch": 4}, RunLength(20, 1)),  # never less than one
        ({"max_epochs": -1}, RunLength(20, 100)),
        ({"max_epochs": None}, RunLength(20, 100)),
        ({"max_epochs": 1000}, RunLength(20, 100)),
        ({"max_epochs": -1, "max_steps": 130, "global_step": 30}, RunLength(20, 5)),
        ({"max_epochs": 3, "max_steps": 130, "global_step": 30}, RunLength(20, 2)),
        ({"max_epochs": 9, "max_steps": 130, "global_step": 125}, RunLength(20, 1)),
        ({"max_epochs": 5, "batches": float("inf")}, RunLength(0, 4)),
        ({"max_epochs": -1, "max_steps": 130, "batches": float("inf")}, RunLength(0, 100)),
    ],
)
def test_what_is_left(asked: dict[str, Any], length: RunLength) -> None:
    values = {"current_epoch": 0, "max_steps": -1, "global_step": 0, "batches": 20, **asked}
    trainer: Any = SimpleNamespace(num_training_batches=values.pop("batches"), **values)
    assert run_length_of(trainer) == length
