"""Pictures and their masks, stored together, cropped together, trained on."""

import argparse
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image, ImageDraw
from torch.nn import functional

from lightning_gpuopt import LMDBDataModule, LMDBWriter

CLASSES = ("background", "disc", "box")
MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def draw(index: int) -> tuple[Image.Image, Image.Image]:
    """A picture with a disc and a box on noise, and its mask: 0, 1 or 2 in each pixel."""
    rng = np.random.default_rng(index)
    image = Image.fromarray(rng.integers(0, 120, (120, 160, 3), dtype=np.uint8))
    mask = Image.new("L", image.size, 0)
    for value, shape, colour in ((1, "ellipse", (230, 60, 40)), (2, "rectangle", (40, 90, 230))):
        left, top = rng.integers(0, 100), rng.integers(0, 70)
        box = [left, top, left + 50, top + 40]
        getattr(ImageDraw.Draw(image), shape)(box, fill=colour)
        getattr(ImageDraw.Draw(mask), shape)(box, fill=value)
    return image, mask


def write(path: Path, indices: range) -> None:
    """Store pictures with their masks, unless they are there already."""
    if path.exists():
        return
    with LMDBWriter(path) as writer:
        for index in indices:
            writer.write(draw(index))


class MaskNet(LightningModule):
    """A small fully convolutional network; its input is normalised float32 ``[B, 3, H, W]``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, kernel_size=5, padding=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, kernel_size=5, padding=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, len(CLASSES), kernel_size=1),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One step on ``(images [B, 3, H, W], masks [B, 1, H, W])``; masks are uint8, as written."""
        images, masks = batch
        return functional.cross_entropy(self.net(images), masks[:, 0].long())

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Share of the pixels whose class is right."""
        images, masks = batch
        right = (self.net(images).argmax(1) == masks[:, 0]).float().mean()
        self.log("pixel_accuracy", right, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    """Store, train, and say how many pixels are told right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="few and small, on the CPU")
    smoke = parser.parse_args().smoke
    count = 40 if smoke else 600
    train, val = (Path(f"{part}-smoke.lmdb" if smoke else f"{part}.lmdb") for part in ("train", "val"))
    write(train, range(count))
    write(val, range(10_000, 10_000 + count // 10))
    data = LMDBDataModule(
        train,
        val,
        batch_size=8,
        decode="tensor",
        crop_size=48 if smoke else 96,
        scale=(0.3, 1.0),
        normalize=MEAN_STD,
    )
    common = {"enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    common |= {"accelerator": "cpu"} if smoke else {}
    trainer = Trainer(max_epochs=1 if smoke else 5, **common)
    trainer.fit(MaskNet(), data)
    print(f"pixels told right: {float(trainer.callback_metrics['pixel_accuracy']):.1%}")


if __name__ == "__main__":
    main()
