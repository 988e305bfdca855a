"""ImageNet, or any folder with a subfolder of images for each class, decoded and augmented by NVIDIA DALI."""

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
DRAWN = ".drawn-by-the-example"


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


def jittered(crop_size: int):  # type: ignore[no-untyped-def]
    """The training pipeline with ``--own-pipeline``: a random crop whose brightness varies."""

    @pipeline_def
    def pipeline(encoded, labels):  # type: ignore[no-untyped-def]
        decoder = "mixed" if torch.cuda.is_available() else "cpu"
        images = fn.decoders.image_random_crop(encoded, device=decoder, random_area=[0.3, 1.0])
        images = fn.resize(images, size=[crop_size, crop_size], antialias=True)
        images = fn.brightness(images, brightness=fn.random.uniform(range=[0.7, 1.3]))
        images = fn.crop_mirror_normalize(images, mean=[128.0], std=[64.0], dtype=types.FLOAT, output_layout="CHW")
        return images, labels

    return pipeline


def named_network(name: str, num_classes: int) -> torch.nn.Module:
    """A network of torchvision's, which is not needed otherwise."""
    from torchvision import models

    network: torch.nn.Module = models.get_model(name, num_classes=num_classes)
    return network


class Classifier(LightningModule):
    """A convolutional classifier; its input is normalised float32 ``[B, 3, H, W]``.

    Args:
        num_classes: Number of classes.
        network: Name of a torchvision model, such as ``"resnet50"``; None: a small network.
    """

    def __init__(self, num_classes: int, network: str | None = None) -> None:
        super().__init__()
        small = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, kernel_size=5, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, kernel_size=5, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 16, num_classes),
        )
        self.net = small if network is None else named_network(network, num_classes)

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
    """Find or draw the images, train, and print where the time went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps on the CPU")
    parser.add_argument("--own-pipeline", action="store_true", help="train with the pipeline defined in this script")
    parser.add_argument("--data", type=Path, default=Path("shapes"), help="a folder that holds train/ and val/")
    parser.add_argument("--network", help="a model of torchvision, such as resnet50 (default: a small network)")
    parser.add_argument("--batch-size", type=int, default=64, help="images a step")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    drawn = not (args.data / "train").is_dir() or (args.data / DRAWN).exists()
    if drawn:
        draw(args.data / "train", 60 if args.smoke else 2000)
        draw(args.data / "val", 30 if args.smoke else 300)
        (args.data / DRAWN).touch()
    crop_size = 64 if drawn else 224
    datamodule = DALIDataModule(
        args.data / "train",
        args.data / "val",
        batch_size=16 if args.smoke else args.batch_size,
        crop_size=crop_size,
        resize_size=crop_size * 8 // 7,
        train_pipeline=jittered(crop_size) if args.own_pipeline else None,
    )
    num_classes = sum(path.is_dir() for path in (args.data / "train").iterdir())
    trainer = Trainer(
        accelerator="cpu" if args.smoke else "auto",
        devices=1,
        max_epochs=1 if args.smoke else args.epochs,
        precision="bf16-mixed" if torch.cuda.is_available() and not args.smoke else "32-true",
        callbacks=[StallDetector(on_stall="ignore")],  # prints its report when training has ended
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(num_classes, args.network), datamodule)


if __name__ == "__main__":
    main()
