"""Image files whose label is their number, and training runs over them that note what each step was given."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from PIL import Image

from lightning_gpuopt import DALIDataModule
from tests.datamodules.training import EPOCHS, SAMPLES, Interrupted, SaveAndEnd, steps_of_a_rank
from tests.helpers import safely, tiny_trainer

SIZE = 8
"""Side of the crops in pixels."""


def write_list(folder: Path, count: int = SAMPLES) -> Path:
    """A list of files, each with its number as its label and as its colour."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        Image.new("RGB", (24, 16), (number % 256, number // 256, 0)).save(folder / f"image {number}.bmp")
        lines.append(f"image {number}.bmp {number}\n")
    path = folder / "files.txt"
    path.write_text("".join(lines))
    return path


def small(**more: Any) -> dict[str, Any]:
    """Arguments for small images on the CPU."""
    return {"crop_size": SIZE, "resize_size": SIZE, "num_threads": 1, "device": "cpu", "seed": 5, **more}


class Notes(LightningModule):
    """Notes, for each step, the epoch and the labels; and what validation was given in each of its runs."""

    def __init__(self, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.ask_for_steps = ask_for_steps
        self.steps: list[tuple[int, list[int]]] = []
        self.sums: list[float] = []
        self.validations: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.steps.append((self.current_epoch, labels.tolist()))
        self.sums.append(float(images.double().sum()))
        return self.layer(images.mean((2, 3))).pow(2).mean()

    def on_validation_epoch_start(self) -> None:
        self.validations.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validations[-1] += batch[1].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(
    data: Path,
    work: Path,
    *,
    batch_size: int,
    save: SaveAndEnd | None = None,
    resume: Path | None = None,
    ask_for_steps: bool = False,
    module_kwargs: dict[str, Any] | None = None,
    **trainer_kwargs: Any,
) -> Notes:
    """Train for `EPOCHS` epochs, or until `save` ends it."""
    torch.manual_seed(0)
    model = Notes(ask_for_steps)
    datamodule = DALIDataModule(data, data, **small(batch_size=batch_size, **(module_kwargs or {})))
    options = {
        "max_steps": -1,
        "max_epochs": EPOCHS,
        "callbacks": [] if save is None else [save],
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
    }
    trainer = tiny_trainer(work, **{**options, **trainer_kwargs})
    with contextlib.suppress(Interrupted):
        trainer.fit(model, datamodule, ckpt_path=resume, **safely(resume))
    return model


rank = partial(steps_of_a_rank, run, limit_val_batches=0)
