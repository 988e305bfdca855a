"""The datasets of ``benchmarks/workers.py``, by name: those that the search was made with, and those it was not."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from lightning_gpuopt.loading.image_folder import ImageFolder
from lightning_gpuopt.telemetry.resources import available_memory

SAMPLES: Final = 100_000
MEMORY_SHARE: Final = 0.04
"""Of the available memory, what a worker of the dataset ``memory`` holds; at most MEMORY_MOST of them are tried."""
MEMORY_MOST: Final = 11
COLD_BYTES: Final = 64 << 10
COLD_FILES: Final = 40_000
IMAGES: Final = 600
IMAGE_SIZE: Final = (320, 240)
DROP: Final = Path("/proc/sys/vm/drop_caches")

FITTED: Final = ("io", "cpu", "mixed", "tensors", "cheap", "memory", "uneven", "cold")
"""The rules of the search were made with measurements of these in view."""

HELD_OUT: Final = ("jpeg", "lmdb", "text", "queue", "late")
"""These it has never seen: real decoders, and costs of other shapes."""


def spin(seconds: float) -> None:
    """Compute for so many seconds of CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Synthetic(Dataset[torch.Tensor]):
    """Samples that cost what a function of their number costs."""

    def __init__(self, cost: Callable[[int], None], numbers: int = 1000, hold_bytes: int = 0) -> None:
        self.cost = cost
        self.numbers = numbers
        self.hold_bytes = hold_bytes
        self.held: bytearray | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.hold_bytes and self.held is None:  # each worker its own
            self.held = bytearray(self.hold_bytes)
            self.held[::4096] = b"1" * len(range(0, self.hold_bytes, 4096))  # every page is there
        self.cost(index)
        return torch.full((self.numbers,), float(index))


class Files(Dataset[torch.Tensor]):
    """Files read whole."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Path(self.paths[index]).read_bytes()), dtype=torch.uint8)


class Again(Dataset[Any]):
    """A small dataset, over and over."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.transform = transform

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.dataset[index % len(self.dataset)][0])


class Text(Dataset[torch.Tensor]):
    """Documents whose length, and so their cost, varies thirtyfold."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        words = 20 + index * 7919 % 600
        counts: dict[str, int] = {}
        for word in (f"{index * number % 997}" for number in range(words)):
            counts[word] = counts.get(word, 0) + 1
        return torch.tensor([*counts.values(), *[0] * 20][:20])


class Queue(Dataset[torch.Tensor]):
    """A store that answers no more than three at once."""

    def __init__(self) -> None:
        self.answers = multiprocessing.get_context("fork").BoundedSemaphore(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.answers:
            time.sleep(0.002)
        return torch.full((1000,), float(index))


def mixed(_: int) -> None:
    time.sleep(0.002)
    spin(0.0005)


def uneven(index: int) -> None:
    time.sleep(0.05 if index % 50 == 0 else 0.001)


def late(index: int) -> None:
    """A store with a long tail: one answer in 200 takes 0.2 s, and what comes takes computing."""
    time.sleep(0.2 if index % 200 == 0 else 0.0015)
    spin(0.0003)


def nothing(_: int) -> None:
    pass


def datasets(folder: Path) -> dict[str, Callable[[], Dataset[Any]]]:
    """Makes each dataset, by name; those that need root to drop the page cache only where that can be done."""
    made: dict[str, Callable[[], Dataset[Any]]] = {
        "io": lambda: Synthetic(lambda _: time.sleep(0.002)),
        "cpu": lambda: Synthetic(lambda _: spin(0.002)),
        "mixed": lambda: Synthetic(mixed),
        "tensors": lambda: Synthetic(nothing, numbers=300_000),
        "cheap": lambda: Synthetic(nothing, numbers=16),
        "memory": lambda: Synthetic(lambda _: time.sleep(0.001), hold_bytes=int(MEMORY_SHARE * available_memory())),
        "uneven": lambda: Synthetic(uneven),
        "jpeg": lambda: Again(ImageFolder(_images(folder)), as_tensor),
        "lmdb": lambda: Again(_lmdb(folder), lambda image: image[:, 8:232, 48:272].clone()),
        "text": Text,
        "queue": Queue,
        "late": lambda: Synthetic(late),
    }
    if os.geteuid() == 0 and os.access(DROP, os.W_OK):
        made["cold"] = lambda: Files(_files(folder))
    return made


def as_tensor(image: Image.Image) -> torch.Tensor:
    """A centre crop of 224 pixels, as torchvision's transforms would make it of a decoded image."""
    cropped = image.resize((298, 224)).crop((37, 0, 261, 224))
    return torch.from_numpy(np.array(cropped)).permute(2, 0, 1).float().div_(255)


def _images(folder: Path) -> Path:
    """A folder of JPEG files in two classes."""
    root, generator = folder / "jpeg", np.random.default_rng(0)
    if not root.exists():
        for number in range(IMAGES):
            kind = root / f"class{number % 2}"
            kind.mkdir(parents=True, exist_ok=True)
            coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize(IMAGE_SIZE).save(kind / f"{number}.jpg", quality=90)
    return root


def _lmdb(folder: Path) -> Any:
    from lightning_gpuopt import LMDBDataset, build_lmdb

    path = folder / "images.lmdb"
    if not path.exists():
        build_lmdb(_images(folder), path, progress=False)
    return LMDBDataset(path, decode="tensor")


def _files(folder: Path) -> list[str]:
    paths = []
    for number in range(COLD_FILES):
        path = folder / f"{number}.bin"
        path.write_bytes(os.urandom(COLD_BYTES))
        paths.append(str(path))
    os.sync()
    return paths


def drop_caches() -> None:
    """Nothing of the files is in memory any more."""
    os.sync()
    DROP.write_text("3")
