"""A folder of JPEG files becomes an LMDB dataset, is trained on, interrupted, and gone on with at the next sample."""

import argparse
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch.nn import functional

from lightning_gpuopt import LMDBDataModule, build_lmdb

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
DRAWN = ".drawn-by-the-example"


def make_images(folder: Path, count: int) -> None:
    """Pictures of two classes, coarse and fine patterns, in a folder for each; those that are there already stay."""
    for index in range(count):
        cells = (6, 24)[index % 2]
        file = folder / ("coarse", "fine")[index % 2] / f"{index:05d}.jpg"
        if file.exists():
            continue
        pattern = np.random.default_rng(index).integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pattern).resize((160, 120), Image.Resampling.NEAREST).save(file)


class PatternNet(LightningModule):
    """A small convnet; its input is normalised float32 ``[B, 3, H, W]``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, kernel_size=5, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, kernel_size=5, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(16, 2),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """One step on ``(images, labels)``."""
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Accuracy on the middle of each picture."""
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Build, train half an epoch, resume."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=Path, default=Path("images"), help="a folder with a subfolder for each class")
    parser.add_argument("--smoke", action="store_true", help="few and small, on the CPU")
    options = parser.parse_args()
    if not options.images.exists() or (options.images / DRAWN).exists():
        make_images(options.images, 200 if options.smoke else 2000)
        (options.images / DRAWN).touch()

    info = build_lmdb(options.images, "images.lmdb", num_proc=2, resume=True, overwrite=True)
    print(f"{info.num_samples} images of {len(info.classes)} classes, {info.num_bytes / 2**20:.1f} MiB")

    def data(batch_size: int) -> LMDBDataModule:
        return LMDBDataModule(
            "images.lmdb",
            val="images.lmdb",
            batch_size=batch_size,
            decode="tensor",  # JPEG to uint8 by libjpeg-turbo ...
            crop_size=64 if options.smoke else 112,  # ... random-resized in training, the middle in evaluation ...
            normalize=IMAGENET,  # ... and float32 on the device only
        )

    common = {"max_epochs": 1 if options.smoke else 5, "enable_model_summary": False, "logger": False}
    common |= {"accelerator": "cpu"} if options.smoke else {}

    # A checkpoint in the middle of the first epoch, as a run that is killed leaves it.
    middle = ModelCheckpoint(".", "middle", every_n_train_steps=5, save_top_k=-1, enable_version_counter=False)
    Trainer(**common, callbacks=[middle], limit_train_batches=9).fit(PatternNet(), data(batch_size=16))
    print("where it was:", torch.load("middle.ckpt", weights_only=True)["LMDBDataModule"])

    # Another batch size here, another number of GPUs in earnest: the epoch goes on with the samples that are left.
    second = Trainer(**common, enable_checkpointing=False)
    second.fit(PatternNet(), data(batch_size=32), ckpt_path="middle.ckpt")
    print(f"val_acc {second.callback_metrics['val_acc']:.2f} after {second.global_step} steps")


if __name__ == "__main__":
    main()
