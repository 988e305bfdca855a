"""Image classification as most projects begin it, diagnosed, stored as an LMDB, and trained again."""

import argparse
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from PIL import Image
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import LMDBDataModule, StallDetector, StallReport, build_lmdb

NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in NORMALIZE)
DRAWN = ".drawn-by-the-example"


def make_images(folder: Path, count: int) -> None:
    """Pictures of coarse and fine patterns, in a subfolder for each class; those that are there already stay."""
    for index in range(count):
        cells = (6, 24)[index % 2]
        file = folder / ("coarse", "fine")[index % 2] / f"{index:05d}.jpg"
        if file.exists():
            continue
        pattern = np.random.default_rng(index).integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pattern).resize((500, 375), Image.Resampling.NEAREST).save(file, quality=90)


class ImageFiles(Dataset[tuple[torch.Tensor, int]]):
    """Images in class subfolders, opened by PIL and normalised on the CPU."""

    def __init__(self, folder: Path, crop_size: int, train: bool) -> None:
        self.files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in (".jpg", ".jpeg"))
        self.classes = sorted({file.parent.name for file in self.files})
        self.crop_size, self.train = crop_size, train

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        side = min(image.size)
        place = torch.rand(2) if self.train else torch.tensor([0.5, 0.5])
        left, top = (place * torch.tensor([image.width - side, image.height - side])).tolist()
        size = (self.crop_size, self.crop_size)
        image = image.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - MEAN) / STD, self.classes.index(file.parent.name)


class ImageFilesData(LightningDataModule):
    """The loaders, as they are before anybody has looked at them.

    Args:
        train: Folder of the training images.
        val: Folder of the validation images.
        batch_size: Images a step.
        crop_size: Height and width of the crops in pixels.
        num_workers: Worker processes of each loader.
    """

    def __init__(self, train: str, val: str, batch_size: int = 32, crop_size: int = 128, num_workers: int = 0) -> None:
        super().__init__()
        self.folders = {True: Path(train), False: Path(val)}
        self.batch_size, self.crop_size, self.num_workers = batch_size, crop_size, num_workers

    def _loader(self, train: bool) -> DataLoader[tuple[torch.Tensor, int]]:
        images = ImageFiles(self.folders[train], self.crop_size, train)
        return DataLoader(images, self.batch_size, shuffle=train, num_workers=self.num_workers)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, int]]:
        return self._loader(True)

    def val_dataloader(self) -> DataLoader[tuple[torch.Tensor, int]]:
        return self._loader(False)


class PatternNet(LightningModule):
    """A small convolutional classifier; its input is normalised float32 ``[B, 3, H, W]``.

    Args:
        num_classes: Number of classes.
        learning_rate: Of Adam.
    """

    def __init__(self, num_classes: int = 2, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, kernel_size=5, stride=4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, kernel_size=3, stride=2),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(32, num_classes),
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def train(name: str, data: LightningDataModule, num_classes: int, epochs: int, smoke: bool) -> StallReport:
    """Train with the same network and seed; the report lands in ``runs/<name>``."""
    seed_everything(0, verbose=False)
    detector = StallDetector(report_dir=f"runs/{name}", on_stall="ignore")
    trainer = Trainer(
        accelerator="cpu" if smoke else "auto",
        devices=1,
        max_epochs=epochs,
        callbacks=[detector],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(PatternNet(num_classes), data)
    print(f"{name}: val_acc {float(trainer.callback_metrics['val_acc']):.2f}\n", flush=True)
    return detector.report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, default=Path("images"), help="a folder that holds train/ and val/")
    parser.add_argument("--smoke", action="store_true", help="few and small, on the CPU")
    options = parser.parse_args()
    count, epochs, crop_size, batch_size = (128, 1, 64, 8) if options.smoke else (2000, 3, 128, 32)
    if not options.images.exists() or (options.images / DRAWN).exists():
        make_images(options.images / "train", count)
        make_images(options.images / "val", count // 8)
        (options.images / DRAWN).touch()
    folders = [options.images / part for part in ("train", "val")]
    num_classes = sum(path.is_dir() for path in folders[0].iterdir())

    # 1. As it is: the report says where the time goes, and what to change.
    files = ImageFilesData(*map(str, folders), batch_size, crop_size)
    before = train("files", files, num_classes, epochs, options.smoke)

    # 2. What the report advises for images that are larger than the crops: an LMDB of smaller ones, read by its module.
    stored = [f"{folder.name}.lmdb" for folder in folders]
    for folder, path in zip(folders, stored, strict=True):
        # resume: one that is there already is used; overwrite: but not if it was built from something else
        size = crop_size * 8 // 7
        build_lmdb(folder, path, image_size=size, num_proc=2, resume=True, overwrite=True, progress=False)
    lmdb = LMDBDataModule(*stored, batch_size=batch_size, decode="tensor", crop_size=crop_size, normalize=NORMALIZE)
    after = train("lmdb", lmdb, num_classes, epochs, options.smoke)

    # 3. The proof.
    print(f"{before.steps} steps each: verdict {before.verdict}, then {after.verdict}")
    if before.step_s and after.step_s:
        print(f"{before.step_s * 1e3:.1f} ms a step, then {after.step_s * 1e3:.1f} ms")
    print("lightning-gpuopt report runs/files/report.json runs/lmdb/report.json    # both side by side")


if __name__ == "__main__":
    main()
