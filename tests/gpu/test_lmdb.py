from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image

from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.datamodules.training import Notes

pytestmark = pytest.mark.gpu


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with LMDBWriter(tmp_path / "data") as writer:
        for index in range(64):
            writer.write((np.full((3, 8, 8), index, np.uint8), index))
    return tmp_path / "data"


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    return Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        **options,
    )


class Images(Notes):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.batches.append((images, labels))
        return self.layer(images.float().mean((1, 2, 3))[:, None]).sum()


def test_gathered_batches_are_in_page_locked_memory(data: Path, tmp_path: Path) -> None:
    datamodule = LMDBDataModule(data, batch_size=16)
    datamodule.setup("fit")
    for batch in datamodule.train_dataloader():
        assert all(part.is_pinned() for part in batch)


def test_uint8_travels_and_is_normalised_on_the_device(tmp_path: Path) -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
    model = Images()
    photos = tmp_path / "photos"
    with LMDBWriter(photos) as writer:
        for index in range(64):
            writer.write((Image.new("RGB", (8, 8), (index,) * 3), index))
    datamodule = LMDBDataModule(photos, batch_size=16, shuffle=False, decode="tensor", normalize=(mean, std))
    trainer(tmp_path).fit(model, datamodule)
    images = torch.cat([images for images, _ in model.batches])
    labels = torch.cat([labels for _, labels in model.batches])
    assert images.device.type == labels.device.type == "cuda"
    assert labels.tolist() == list(range(64))
    raw = torch.arange(64.0).view(-1, 1, 1, 1).expand(64, 3, 8, 8) / 255
    expected = (raw - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(images.cpu(), expected)


def test_a_batch_is_not_overwritten_while_it_is_on_its_way(data: Path, tmp_path: Path) -> None:
    """Page-locked memory is reused; torch's allocator waits for copies that are under way."""
    datamodule = LMDBDataModule(data, batch_size=1, shuffle=False)
    datamodule.setup("fit")
    on_device = [labels.to("cuda", non_blocking=True) for _, labels in datamodule.train_dataloader()]
    assert torch.cat(on_device).tolist() == list(range(64))
