"""How long training goes on, by what the Trainer was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.compat.lightning import Trainer

_MANY_EPOCHS: Final = 100
"""Epochs to come where no end is set."""


@dataclass(frozen=True)
class RunLength:
    """What is left of a run.

    Attributes:
        steps: batches of an epoch; 0 where that is not known.
        epochs_left: epochs to come after the one that runs, at least 1.
    """

    steps: int
    epochs_left: int


def run_length_of(trainer: Trainer) -> RunLength:
    """What is left of a Trainer's ``fit``."""
    batches = trainer.num_training_batches
    steps = int(batches) if batches != float("inf") else 0
    left = float(_MANY_EPOCHS)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        left = min(left, trainer.max_epochs - trainer.current_epoch - 1)
    if trainer.max_steps >= 0 and steps:
        left = min(left, (trainer.max_steps - trainer.global_step) / steps)
    return RunLength(steps, max(int(left), 1))
