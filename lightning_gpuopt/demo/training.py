"""The demo's training, written as its reader would write it: a Dataset of image files, a convnet, a Trainer."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_gpuopt.callbacks.cuda_prefetcher import CudaPrefetcher
from lightning_gpuopt.callbacks.gpu_util_monitor import GpuUtilMonitor
from lightning_gpuopt.callbacks.num_workers_finder import NumWorkersFinder
from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.compat.lightning import (
    Callback,
    CSVLogger,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning_gpuopt.datamodules.dali import DALIDataModule
from lightning_gpuopt.datamodules.elastic import ElasticDataModule
from lightning_gpuopt.datamodules.image_folder import ImageFolderDataModule
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.demo.data import IMAGE_SIZE, PHOTOGRAPHS
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.images.cost import resize_for
from lightning_gpuopt.images.normalize import IMAGENET_MEAN, IMAGENET_STD

_NEVER: Final = 10**9

CROP_SIZE = 128  # height and width of what the network sees, in pixels
MIN_SIDE: Final = 0.5  # side of the smallest random crop, as a share of the image's shorter side
# side of the square that is validated, as a share of the shorter side: ``Resize(146)`` and ``CenterCrop(128)``
CENTER: Final = 7 / 8
_SHORT, _LONG = sorted(IMAGE_SIZE)
CROP_SCALE: Final = (MIN_SIDE**2 * _SHORT / _LONG, _SHORT / _LONG)  # those random crops as shares of the image's area
NORMALIZE: Final = (IMAGENET_MEAN, IMAGENET_STD)
MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in NORMALIZE)

Storage = Literal["files", "folder", "lmdb", "dali"]

EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # what the demo is there to show
    ".*smaller than the logging interval.*",
    ".*Experiment logs directory .* exists.*",  # metrics.csv of an earlier demo is replaced
    ".*LeafSpec.*",  # torch's own deprecation, caused inside Lightning
)


@dataclass(frozen=True)
class DemoSettings:
    data_dir: Path  # with ``train`` and ``val``; for "lmdb" ``train.lmdb`` and ``val.lmdb``
    output_dir: Path  # of the report and the metrics
    epochs: int
    max_steps: int | None  # None: no such limit
    batch_size: int
    num_workers: int  # of each DataLoader
    accelerator: str  # as in ``Trainer``
    seed: int  # of the weights, the order and the augmentation
    progress_bar: bool  # Lightning's; else one line for each validation
    storage: Storage = "files"  # by a Dataset with PIL, or the DataModule of that name; "dali" from the LMDB if any
    persistent_workers: bool = False  # as the DataModules do anyway
    worker_search: bool = False  # by NumWorkersFinder, while training runs
    prefetch: bool = False  # by CudaPrefetcher
    width: int = 1  # the network's channels, in multiples of those on the CPU
    min_s: float = 0.0  # of training at least, by more epochs; validated at its end alone then


@dataclass(frozen=True)
class Outcome:
    report: StallReport
    gpu: dict[str, float]  # figures over the whole run, empty without a GPU
    accuracy_percent: float  # of the last validation
    steps: int
    samples: int  # images in these steps
    device: str  # such as ``"cpu"`` or ``"NVIDIA H200"``
    on_cuda: bool = False
    found_num_workers: int | None = None  # by NumWorkersFinder; None if it did not search

    @property
    def samples_per_s(self) -> float | None:
        """Images per second of the steady steps; None if there are none."""
        return self.samples / self.steps / self.report.step_s if self.steps and self.report.step_s else None


class Photographs(Dataset[tuple[Tensor, int]]):
    """Images in class subfolders; a random resized crop and a flip in training, the middle square else."""

    def __init__(self, folder: Path, train: bool) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})
        self.train = train

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.files[index]
        with Image.open(file) as image:
            pixels = np.array(self._view(image.convert("RGB")))
        values = torch.from_numpy(pixels).permute(2, 0, 1).float().div(255)
        if self.train and torch.rand(()) < 0.5:
            values = values.flip(2)
        return (values - MEAN) / STD, self.classes.index(file.parent.name)

    def _view(self, image: Image.Image) -> Image.Image:
        side, place = min(image.size) * CENTER, torch.tensor([0.5, 0.5])
        if self.train:
            side = min(image.size) * float(torch.empty(()).uniform_(MIN_SIDE, 1.0))
            place = torch.rand(2)
        left, top = (place * torch.tensor([image.width - side, image.height - side])).tolist()
        box = (left, top, left + side, top + side)
        return image.resize((CROP_SIZE, CROP_SIZE), Image.Resampling.BILINEAR, box=box)


class PhotographFiles(LightningDataModule):
    """The loaders of those images, as most projects have them."""

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__()
        self.settings = settings

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader("val")

    def _loader(self, part: str) -> DataLoader[tuple[Tensor, int]]:
        train, settings = part == "train", self.settings
        return DataLoader(
            Photographs(settings.data_dir / part, train),
            batch_size=settings.batch_size,
            shuffle=train,
            num_workers=settings.num_workers,
            persistent_workers=settings.persistent_workers and settings.num_workers > 0,
        )


class PhotographNet(LightningModule):
    """A small convnet that tells from which photograph a crop comes; ``width`` multiplies the channels."""

    def __init__(self, num_classes: int, learning_rate: float = 1e-3, width: int = 1) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            _block(3, 16 * width, kernel_size=5, stride=4),
            _block(16 * width, 32 * width),
            _block(32 * width, 64 * width),
            _block(64 * width, 128 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128 * width, num_classes),
        )
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self.network(images), labels)
        self.log("val_acc", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def train(settings: DemoSettings) -> Outcome:
    """Train once and say where the time went; KeyboardInterrupt when the Trainer has shut down in order."""
    with _quiet():
        seed_everything(settings.seed)
        data = _data(settings)
        monitor = GpuUtilMonitor()
        detector = StallDetector(
            report_dir=settings.output_dir,
            on_stall="ignore",
            print_report=False,
            profile="on",  # with a table of what the steps compute
            recorder=False,  # who interrupts a demo asks nobody why
        )
        finder = NumWorkersFinder() if settings.worker_search else None
        callbacks: list[Callback | None] = [
            monitor,
            detector,
            finder,
            CudaPrefetcher() if settings.prefetch else None,
            None if settings.progress_bar else ValidationLines(),
            LongEnough(settings.min_s) if settings.min_s else None,
        ]
        trainer = Trainer(
            accelerator=settings.accelerator,
            devices=1,
            max_epochs=settings.epochs,
            max_steps=settings.max_steps or -1,
            callbacks=[each for each in callbacks if each is not None],
            logger=CSVLogger(settings.output_dir, name="", version=""),
            enable_progress_bar=settings.progress_bar,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=_NEVER if settings.min_s else 1,
        )
        model = PhotographNet(len(PHOTOGRAPHS), width=settings.width)
        _fit(trainer, model, data)
        steps_of_an_epoch, images = int(trainer.num_training_batches), _images_in(trainer.train_dataloader)
        if settings.min_s or trainer.global_step % steps_of_an_epoch:  # max_steps ended an epoch before its validation
            trainer.validate(model, datamodule=data, verbose=False)
    epochs, rest = divmod(trainer.global_step, steps_of_an_epoch)
    device = trainer.strategy.root_device
    return Outcome(
        report=detector.report,
        gpu=monitor.summary(),
        accuracy_percent=100 * float(trainer.callback_metrics["val_acc"]),
        steps=trainer.global_step,
        samples=epochs * images + rest * settings.batch_size,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        on_cuda=device.type == "cuda",
        found_num_workers=finder.optimal_num_workers if finder is not None else None,
    )


def _data(settings: DemoSettings) -> LightningDataModule:
    if settings.storage == "files":
        return PhotographFiles(settings)
    if settings.storage == "dali":
        return DALIDataModule(
            _stored(settings.data_dir, "train"),
            _stored(settings.data_dir, "val"),
            batch_size=settings.batch_size,
            crop_size=CROP_SIZE,
            resize_size=resize_for(CROP_SIZE),
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            seed=settings.seed,
        )
    make: type[ElasticDataModule] = ImageFolderDataModule if settings.storage == "folder" else LMDBDataModule
    suffix = "" if settings.storage == "folder" else ".lmdb"
    return make(
        settings.data_dir / f"train{suffix}",
        settings.data_dir / f"val{suffix}",
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        decode="tensor",
        crop_size=CROP_SIZE,
        scale=CROP_SCALE,
        ratio=(1.0, 1.0),
        normalize=NORMALIZE,
        seed=settings.seed,
    )


def _stored(folder: Path, part: str) -> Path:
    lmdb = folder / f"{part}.lmdb"
    return lmdb if lmdb.exists() else folder / part


def _images_in(loader: Any) -> int:
    """Images of an epoch; a loader of DALI has no dataset that could be asked."""
    return len(loader.dataset) if hasattr(loader, "dataset") else int(loader.sampler.order.num_samples)


class LongEnough(Callback):
    """Adds epochs until training has taken so many seconds from its start."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._began_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began_s = self._clock()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add an epoch where this would be the last one too early."""
        is_last = trainer.current_epoch + 1 == trainer.max_epochs
        if is_last and self._clock() - self._began_s < self.seconds:
            trainer.fit_loop.max_epochs = trainer.current_epoch + 2


class ValidationLines(Callback):
    """One line for each validation, for where a progress bar cannot be drawn."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        figures = "  ".join(f"{name} {float(value):.3f}" for name, value in trainer.callback_metrics.items())
        print(f"  step {trainer.global_step}  {figures}", flush=True)


def _fit(trainer: Trainer, model: LightningModule, data: LightningDataModule) -> None:
    """Fit, and leave by KeyboardInterrupt on Ctrl-C, where Lightning ends the process with exit code 1."""
    try:
        trainer.fit(model, datamodule=data)
    except SystemExit:
        if not trainer.interrupted:
            raise
    if trainer.interrupted:
        raise KeyboardInterrupt


def _block(inputs: int, outputs: int, kernel_size: int = 3, stride: int = 2) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back Lightning's tips and the warnings that tell a newcomer nothing."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
