"""JPEGs in class folders, decoded and augmented by NVIDIA DALI, trained on."""

import argparse
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from nvidia.dali import fn, types
from nvidia.dali.pipeline import pipeline_def
from PIL import Image, ImageDraw
from torch.nn import functional

from lightning_gpuopt import DALIDataModule, StallDetector

SHAPES = {"box": "rectangle", "disc": "ellipse", "line": "line"}


def draw(folder: Path, count: int) -> None:
    """JPEGs of shapes on noise, in a subfolder for each; those that are there already stay."""
    for number in range(count):
        name = list(SHAPES)[number % len(SHAPES)]
        path = folder / name / f"{number:05d}.jpg"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(number)
        image = Image.fromarray(rng.integers(0, 120, (150, 200, 3), dtype=np.uint8))
        left, top = rng.integers(20, 90), rng.integers(10, 60)
        getattr(ImageDraw.Draw(image), SHAPES[name])([left, top, left + 80, top + 70], fill=(230, 60, 40))
        image.save(path, quality=90)


@pipeline_def
def jitter(encoded, labels):  # type: ignore[no-untyped-def]
    """The training pipeline with ``--own-pipeline``: a random crop whose brightness varies."""
    decoder = "mixed" if torch.cuda.is_available() else "cpu"
    images = fn.decoders.image_random_crop(encoded, device=decoder, random_area=[0.3, 1.0])
    images = fn.resize(images, size=[64, 64], antialias=True)
    images = fn.brightness(images, brightness=fn.random.uniform(range=[0.7, 1.3]))
    images = fn.crop_mirror_normalize(images, mean=[128.0], std=[64.0], dtype=types.FLOAT, output_layout="CHW")
    return images, labels


class ShapeNet(LightningModule):
    """A small convolutional classifier; its input is normalised float32 ``[B, 3, 64, 64]``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, kernel_size=5, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, kernel_size=5, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 16, len(SHAPES)),
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One step on ``(images, labels)``."""
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """Share of the images whose class is right."""
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Draw, train, and print where the time went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps on the CPU")
    parser.add_argument("--own-pipeline", action="store_true", help="train with the pipeline defined in this script")
    parser.add_argument("--data", type=Path, default=Path("shapes"), help="where the images are written")
    args = parser.parse_args()
    draw(args.data / "train", 60 if args.smoke else 2000)
    draw(args.data / "val", 30 if args.smoke else 300)
    datamodule = DALIDataModule(
        args.data / "train",
        args.data / "val",
        batch_size=16 if args.smoke else 64,
        crop_size=64,
        resize_size=72,
        train_pipeline=jitter if args.own_pipeline else None,
    )
    detector = StallDetector(on_stall="ignore")
    trainer = Trainer(
        accelerator="cpu" if args.smoke else "auto",
        devices=1,
        max_epochs=1 if args.smoke else 5,
        callbacks=[detector],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(ShapeNet(), datamodule)
    print(detector.report)


if __name__ == "__main__":
    main()
