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

    def __init__(self, stream: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.stream = stream
        self.wrong: list[torch.Tensor] = []
        self.registers: list[bool] = []

    def on_train_start(self) -> None:
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, indices = batch
        self.wrong.append((rows != indices[:, None]).sum())
        self.registers.append(self.trainer.train_dataloader._iterator._engine._ring.registers)
        torch.cuda._sleep(_CYCLES)  # the next copies wait for it
        return self.layer.weight.sum()

    def on_train_end(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("error:batches are copied, not page-locked in place")
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("has_stream", [False, True])
def test_no_batch_is_written_while_it_is_copied(tmp_path: Path, has_stream: bool, prefetch: bool) -> None:
    datamodule = LMDBDataModule(Rows(), batch_size=8, num_workers=4, pin_memory="in_place")
    for _ in range(3):  # what one run has left registered would keep the next from it
        module = Compares(torch.cuda.Stream() if has_stream else None)
        Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=2,
            callbacks=[CudaPrefetcher()] if prefetch else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        ).fit(module, datamodule)
        assert module.registers == [True] * 64
        assert sum(each.item() for each in module.wrong) == 0
