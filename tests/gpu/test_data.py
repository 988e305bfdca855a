"""Images on their way to a real GPU: uint8 across the bus, normalised there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image

from lightning_gpuopt import CudaPrefetcher, ImageFolderDataModule
from tests.datamodules.test_samples import Keeps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-true", torch.bfloat16), ("16-true", torch.float16)]
)
@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
def test_images_are_normalised_on_the_gpu(
    tmp_path: Path, prefetch: bool, precision: Any, dtype: torch.dtype, memory_format: Any
) -> None:
    for index in range(8):
        folder = tmp_path / "train" / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (index * 30, 255 - index * 30, 100)).save(folder / f"{index}.png")
    crossed: list[torch.Tensor] = []

    class Module(Keeps):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            crossed.append(batch[0])
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    datamodule = ImageFolderDataModule(
        tmp_path / "train",
        batch_size=4,
        num_workers=1,
        shuffle=False,
        decode="tensor",
        crop_size=16,
        normalize=(MEAN, STD),
        memory_format=memory_format,
    )
    model = Module()
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        precision=precision,
        callbacks=[CudaPrefetcher()] if prefetch else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, datamodule)
    assert [batch.dtype for batch in crossed] == [torch.uint8] * 2
    assert all(batch.is_pinned() for batch in crossed)
    for pixels, (images, _) in zip(crossed, model.batches, strict=True):
        assert (images.device.type, images.dtype) == ("cuda", dtype)
        assert images.is_contiguous(
            memory_format=getattr(torch, memory_format.replace("contiguous", "contiguous_format"))
        )
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
        torch.testing.assert_close(images.cpu().float(), (pixels / 255 - mean) / std, rtol=2e-2, atol=2e-2)
