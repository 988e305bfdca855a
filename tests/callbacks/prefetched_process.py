"""Training that saves a checkpoint at each step, and is killed: ``python -m ... KIND FOLDER STEP``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_gpuopt import CudaPrefetcher
from tests.callbacks.prefetch_setups import Counted, samples, stored
from tests.helpers import ends_new_workers

KINDS = ("stateful-0", "stateful-2", "stateful-unsized", "lmdb-0", "lmdb-2")
EPOCHS = 3


class Model(LightningModule):
    """Draws nothing: a resumed run would draw other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layer(batch[0]) - batch[1][:, None]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def data_of(kind: str, folder: Path) -> dict[str, Any]:
    """The arguments of ``fit``."""
    name, _, what = kind.partition("-")
    if name == "lmdb":
        return {"datamodule": stored(folder, num_workers=int(what))}
    if what == "unsized":
        return {"train_dataloaders": StatefulDataLoader(Counted(), batch_size=4, num_workers=2)}
    dataset = TensorDataset(samples(), torch.arange(26))
    loader: Any = StatefulDataLoader(dataset, batch_size=4, num_workers=int(what), shuffle=True)
    return {"train_dataloaders": loader}


def train(kind: str, folder: Path, *callbacks: Callback, resume: Path | None = None) -> list[torch.Tensor]:
    """Train, or go on with it; the weights at the end."""
    seed_everything(11, verbose=False)
    model = Model()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        callbacks=list(callbacks),
        default_root_dir=folder,
    )
    with ends_new_workers():
        trainer.fit(model, **data_of(kind, folder), ckpt_path=resume)
    return [each.detach().clone() for each in model.parameters()]


def keeps_all(folder: Path) -> ModelCheckpoint:
    """A checkpoint at each step: ``{step}.ckpt``."""
    return ModelCheckpoint(
        folder, filename="{step}", auto_insert_metric_name=False, every_n_train_steps=1, save_top_k=-1
    )


class Kill(Callback):
    """Ends the process, without a word, when the step after ``step`` is about to be trained on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    kind, folder, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    train(kind, folder, CudaPrefetcher(depth=2, enabled=True), keeps_all(folder / "checkpoints"), Kill(step))
