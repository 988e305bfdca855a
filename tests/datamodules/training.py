"""A model that writes down which samples it was given, and a callback that saves in the middle of things."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.datamodules.sample_loader import SampleLoader
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.helpers import safely, tiny_trainer

Steps = list[tuple[int, list[int]]]

SAMPLES = 53
EPOCHS = 3

# (hook in which the checkpoint is saved, after so many of the epoch's 14 batches, Trainer arguments)
MOMENTS: list[tuple[str, int, dict[str, Any]]] = [
    ("on_train_batch_end", 1, {}),
    ("on_train_batch_end", 5, {}),
    ("on_train_batch_end", 14, {}),
    ("on_validation_end", 7, {"val_check_interval": 0.5}),
    ("on_validation_end", 14, {}),
    ("on_train_epoch_end", 14, {}),
    ("on_exception", 6, {}),
]


def build(path: Path, num_samples: int = SAMPLES) -> Path:
    """A dataset of (one feature, the sample's index)."""
    with LMDBWriter(path, samples_per_shard=20) as writer:
        for index in range(num_samples):
            writer.write((np.array([index / 64], np.float32), index))
    return path


class Notes(LightningModule):
    """Notes, for each step taken, the epoch and the samples."""

    def __init__(self, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.ask_for_steps = ask_for_steps
        self.steps: list[tuple[int, list[int]]] = []
        self.estimated_steps: int | None = None

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        features, indices = batch
        self.steps.append((self.current_epoch, indices.tolist()))
        return self.layer(features).pow(2).mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_steps:
            self.estimated_steps = int(self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.parameters(), lr=0.01)


def by_epoch(steps: Steps) -> dict[int, list[int]]:
    epochs: dict[int, list[int]] = defaultdict(list)
    for epoch, indices in steps:
        epochs[epoch] += indices
    return {epoch: sorted(indices) for epoch, indices in epochs.items()}


class Interrupted(RuntimeError):
    """What ends the first run."""


class SaveAndEnd(Callback):
    """Saves a checkpoint in one hook of one batch or epoch, and ends the run by an exception.

    Args:
        path: where to save.
        hook: ``on_train_batch_end``, ``on_validation_end``, ``on_train_epoch_end``, ``on_exception``, ...
        batch: after so many batches of that epoch.
        epoch: in which epoch.
    """

    def __init__(self, path: Path, hook: str, batch: int, epoch: int = 1) -> None:
        self.path, self.hook, self.batch, self.epoch = path, hook, batch, epoch
        self.batches = 0

    def _maybe(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.current_epoch == self.epoch and self.batches == self.batch:
            trainer.save_checkpoint(self.path)
            raise Interrupted

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._maybe("on_train_start", trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.hook == "on_exception" and trainer.current_epoch == self.epoch and self.batches == self.batch:
            raise Interrupted

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1
        self._maybe("on_train_batch_end", trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._maybe("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._maybe("on_train_epoch_end", trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.hook == "on_exception":
            trainer.save_checkpoint(self.path)


def run(
    data: Path,
    work: Path,
    *,
    batch_size: int,
    num_workers: int = 0,
    save: SaveAndEnd | None = None,
    resume: Path | None = None,
    ask_for_steps: bool = False,
    module_kwargs: dict[str, Any] | None = None,
    make: Callable[..., Any] | None = None,
    **trainer_kwargs: Any,
) -> Notes:
    """Train for `EPOCHS` epochs, or until `save` ends it; `make` makes other data than an `LMDBDataModule`'s."""
    torch.manual_seed(0)
    model = Notes(ask_for_steps)
    given = {"batch_size": batch_size, "num_workers": num_workers, "seed": 5, **(module_kwargs or {})}
    datamodule: Any = LMDBDataModule(data, val=data, **given) if make is None else make(**given)
    trainer = tiny_trainer(
        work,
        **{
            "max_steps": -1,
            "max_epochs": EPOCHS,
            "callbacks": [] if save is None else [save],
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
            **trainer_kwargs,
        },
    )
    with contextlib.suppress(Interrupted):
        val = None if make is None else DataLoader(Numbers(), batch_size)
        trainer.fit(model, datamodule, val, ckpt_path=resume, **safely(resume))
    return model


def steps_of_a_rank(
    run: Callable[..., Any],
    *,
    data: str,
    work: str,
    devices: int,
    save: dict[str, Any] | None = None,
    resume: str | None = None,
    **more: Any,
) -> Steps:
    """Train as one of several ranks: the steps of this one.

    Args:
        run: trains.
        data: the dataset.
        work: the folder for everything else.
        devices: how many ranks there are.
        save: arguments of :class:`SaveAndEnd`.
        resume: a checkpoint.
        more: arguments of ``run``.
    """
    model = run(
        Path(data),
        Path(work),
        save=None if save is None else SaveAndEnd(**{**save, "path": Path(save["path"])}),
        resume=None if resume is None else Path(resume),
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        **more,
    )
    steps: Steps = model.steps
    return steps


rank = partial(steps_of_a_rank, run)


class Numbers(Dataset[Any]):
    """Samples as of `build`."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index / 64]), index


def sample_loader(**given: Any) -> SampleLoader:
    return SampleLoader(Numbers(), **{"shuffle": True, **given})


def run_loader(data: Path, work: Path, **given: Any) -> Notes:
    """As `run`, with a `SampleLoader`."""
    return run(data, work, make=sample_loader, **given)


rank_of_loader = partial(steps_of_a_rank, run_loader)
