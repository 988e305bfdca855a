"""ResNet-50 fed in several ways, for ``benchmarks/gpu_dali.py``: what the data costs."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import dali_peers as peers
import torch
from dali_parts import DecodeWorkload, Watch
from dali_peers import CROP, MEAN, STD
from gpu_parts import quiet_trainer
from lightning.pytorch import Callback, LightningModule

from lightning_gpuopt import DALIDataModule

SYNTHETIC, FOLDER, LMDB, FAST_PATH, PIL = (
    "synthetic, on the GPU",
    "DALIDataModule, folder",
    "DALIDataModule, LMDB",
    "LMDBDataModule, decode='tensor'",
    "DataLoader, PIL",
)


def make_network() -> tuple[str, torch.nn.Module]:
    """ResNet-50 of timm or torchvision; else a small network of convolutions."""
    for package, module, make in (
        ("timm", "timm", lambda timm: timm.create_model("resnet50", num_classes=1000)),
        ("torchvision", "torchvision.models", lambda models: models.resnet50()),
    ):
        try:
            return f"ResNet-50 of {package} {version(package)}", make(import_module(module))
        except (ImportError, RuntimeError):
            continue
    blocks: list[torch.nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256), (256, 512)):
        blocks += [torch.nn.Conv2d(inputs, outputs, 3, 2, 1), torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(512, 1000)]
    return "four convolutions (neither timm nor torchvision is installed)", torch.nn.Sequential(*blocks, *head)


class Classifier(LightningModule):
    """Trains a network on images in either layout."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        if images.shape[-1] == 3:  # HWC: as a view, channels-last
            images = images.permute(0, 3, 1, 2)
        images = images.contiguous(memory_format=torch.channels_last)
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Measure(Callback):
    """Figures of the steps behind the first ones."""

    def __init__(self, workload: DecodeWorkload) -> None:
        self.workload, self.watch = workload, Watch(workload)
        self.images = 0
        self.found: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, size = trainer.global_step, self.workload.size
        if step > size.warmup:
            self.images += len(batch[1])
        if step == size.warmup:
            self.watch.begin()
        elif step == size.warmup + size.steps:
            self.found = self.watch.end(self.images)


class OnDevice:
    """The same batch again and again, on the device already."""

    def __init__(self, workload: DecodeWorkload) -> None:
        size = workload.size
        images = torch.randn(size.train_batch_size, 3, CROP, CROP, device=workload.device)
        labels = torch.randint(0, 10, (size.train_batch_size,), device=workload.device)
        self.batch = images.contiguous(memory_format=torch.channels_last), labels
        self.length = size.warmup + size.steps

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (self.batch for _ in range(self.length))


def sources(workload: DecodeWorkload) -> dict[str, Callable[[], dict[str, Any]]]:
    """What ``fit`` is given, for each way to feed it."""
    batch_size, workers = workload.size.train_batch_size, peers.usable_cores()
    common = {"batch_size": batch_size, "crop_size": CROP, "mean": MEAN, "std": STD, "layout": "HWC"}

    def dali(data: Any) -> dict[str, Any]:
        return {"datamodule": DALIDataModule(data, device=workload.dali_device, **common)}

    return {
        SYNTHETIC: lambda: {"train_dataloaders": OnDevice(workload)},
        FOLDER: lambda: dali(workload.folder),
        LMDB: lambda: dali(workload.lmdb),
        FAST_PATH: lambda: {
            "datamodule": peers.lmdb_datamodule(workload.lmdb, batch_size=batch_size, num_workers=workers)
        },
        PIL: lambda: {
            "train_dataloaders": peers.pil_loader(workload.folder, batch_size=batch_size, num_workers=workers)
        },
    }


def train(workload: DecodeWorkload, source: dict[str, Any]) -> dict[str, float]:
    """One training; its figures."""
    torch.manual_seed(0)
    measure = Measure(workload)
    on_gpu = workload.device == "cuda"
    options: dict[str, Any] = {
        "max_epochs": -1,
        "max_steps": workload.size.warmup + workload.size.steps,
        "precision": "bf16-mixed" if on_gpu else "32-true",
        "accelerator": "gpu" if on_gpu else "cpu",
        "benchmark": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, [measure], **options).fit(Classifier(make_network()[1]), **source)
    return measure.found


def training(workload: DecodeWorkload) -> dict[str, Any]:
    """All ways to feed the network, in turn; medians over the rounds, ratios to synthetic within a round."""
    ways = sources(workload)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(workload.size.rounds):
        random.Random(number).shuffle(names)
        for name in names:
            runs[name].append(train(workload, ways[name]()))
    rows = {}
    for name, found in runs.items():
        rows[name] = {key: statistics.median(run[key] for run in found if key in run) for key in found[0]}
        rows[name]["of_synthetic"] = statistics.median(
            run["images_s"] / other["images_s"] for run, other in zip(found, runs[SYNTHETIC], strict=True)
        )
    return {"network": make_network()[0], "rounds": workload.size.rounds, "rows": rows}
