"""Batches that a real GPU copies out of the memory that loader processes fill."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset

from lightning_gpuopt import CudaPrefetcher
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

_CYCLES = 20_000_000
"""Some 10 ms of a GPU's clock."""


class Rows(Dataset[Any]):
    """Samples of a MiB, each full of its index: batches take a device longer than the next ones take to be made."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        return np.full(1 << 17, index), index


class Compares(LightningModule):
    """Counts, on the device, the rows that are not as they were made; the host runs ahead of the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.pinned: list[bool] = []

    def on_fit_start(self) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, indices = batch
        self.wrong += (rows != indices[:, None]).sum()
        torch.cuda._sleep(_CYCLES)  # the next copies wait for it
        return self.layer.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Prepares(Compares):
    """Copies on a stream of its own, which nobody else sees."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.pinned.append(batch[0].is_pinned())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(_CYCLES)
            rows, indices = (each.to(self.device, non_blocking=True) for each in batch)
            self.wrong_aside += (rows != indices[:, None]).sum()
        return batch

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.stream = torch.cuda.Stream()
        self.wrong_aside = torch.zeros((), dtype=torch.int64, device=self.device)
        torch.cuda.synchronize()


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("kind", [Compares, Prepares])
def test_no_batch_is_written_while_it_is_copied(tmp_path: Path, kind: Any, prefetch: bool) -> None:
    module = kind()
    datamodule = LMDBDataModule(Rows(), batch_size=8, num_workers=4, pin_memory="in_place")
    Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=3,
        callbacks=[CudaPrefetcher()] if prefetch else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(module, datamodule)
    assert module.wrong.item() == 0
    if kind is Prepares:
        assert module.wrong_aside.item() == 0
        assert len(module.pinned) == 96
        assert all(module.pinned)
    # Nothing is left registered at an address that other mappings get.
    for _ in range(3):
        Trainer(accelerator="gpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False).fit(
            kind(), datamodule
        )
