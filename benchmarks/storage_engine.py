"""What loader processes that fill batches sample by sample cost and bring, beside torch's workers on the same dataset.

Sections of ``benchmarks/storage.py``:

- ``take``: microseconds of the training thread's CPU for a batch that lies ready, after a pause in which the caches
  have gone cold, as between two steps.
- ``slow``: samples of 2 ms, of which one in 100 waits 50 times as long, 4 processes, batches of 32: samples per second,
  in torch's order, out of it (``in_order=False``), and ours, which keeps it.
- ``look_ahead``: samples of 3.5 ms, of which one in 100 takes 10, 50, 200 times as long, 4 processes, batches of 4, 8
  and 64: the same three ways, and ours as a share of torch's out of order.
- ``wait``: samples that wait for 20 ms without the interpreter's lock: one CPU, threads as are found to be best.
- ``ring``: memory of the processes over 20 epochs, and of the batches.
- ``pinning``: batches of 38 MB on their way to a GPU, copied to page-locked memory, and page-locked in place: samples
  per second, and milliseconds of CPU that a batch takes the training process. Only where there is a GPU.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter

OURS = "lightning-gpuopt"


def _loader(source: Any, **options: Any) -> Any:
    datamodule = LMDBDataModule(source, **options)
    datamodule.setup("fit")
    return datamodule.train_dataloader()


class Images(Dataset[Any]):
    """Samples like crops, which cost nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.image = torch.zeros(3, 224, 224, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.image, index


class Arrays(Images):
    """Equal records."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.image = torch.zeros(3, 32, 32, dtype=torch.uint8)


def take(work: Path, scale: float, count: int) -> dict[str, Any]:
    """Microseconds of the training thread."""
    with LMDBWriter(work / "records") as writer:
        for index in range(20_000):
            writer.write((np.zeros((3, 32, 32), np.uint8), index))
    figures: dict[str, Any] = {}
    for what, dataset, ours, batch in (
        ("32 x 3 x 224 x 224", Images(4_000), Images(4_000), 32),
        ("128 equal records", Arrays(20_000), work / "records", 128),
    ):
        loaders = {
            OURS: _loader(ours, batch_size=batch, num_workers=2),
            "torch's workers": DataLoader(dataset, batch_size=batch, num_workers=2, shuffle=True),
        }
        figures[what] = {name: [] for name in loaders}
        for number in range(count + 1):
            for name, loader in loaders.items():
                taken = _taking_us(loader)
                if number:
                    figures[what][name].append(taken)
    return {
        what: {name: {"median_us": statistics.median(each), "rounds": each} for name, each in found.items()}
        for what, found in figures.items()
    }


def _taking_us(loader: Any) -> float:
    iterator: Iterator[Any] = iter(loader)
    next(iterator)
    spent = []
    for _ in range(40):
        time.sleep(0.03)
        began = time.thread_time_ns()
        batch = next(iterator)
        spent.append((time.thread_time_ns() - began) / 1e3)
        del batch
    del iterator
    gc.collect()
    return statistics.median(spent)


class Uneven(Dataset[Any]):
    """One sample in 100 waits many times as long."""

    def __init__(self, size: int, sample_s: float = 0.002, times: float = 50) -> None:
        self.size, self.sample_s, self.times = size, sample_s, times
        draw = random.Random(0)
        self.slow = {index for index in range(size) if draw.random() < 0.01}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.sample_s * (self.times if index in self.slow else 1))
        return torch.zeros(1000), index


def slow(work: Path, scale: float, count: int) -> dict[str, Any]:
    """Samples per second with a slow one now and then."""
    return _uneven(Uneven(int(6_400 * scale)), 32, count)


def look_ahead(work: Path, scale: float, count: int) -> dict[str, Any]:
    """The same, with samples that are slower or less slow, and other batches."""
    found = {}
    for times in (10, 50, 200):
        for batch_size in (4, 8, 64):
            each = _uneven(Uneven(int(1_600 * scale), 0.0035, times), batch_size, count)
            rates = {name: rate["median"] for name, rate in each["warm"].items()}
            each["of_out_of_order"] = rates[OURS] / rates["torch's workers, in_order=False"]
            found[f"{times} times as long, batches of {batch_size}"] = each
    return found


def _uneven(dataset: Uneven, batch_size: int, count: int) -> dict[str, Any]:
    common: dict[str, Any] = {"batch_size": batch_size, "num_workers": 4}
    torchs = {**common, "shuffle": True, "persistent_workers": True}
    loaders = {
        OURS: _loader(dataset, **common),
        "torch's workers": DataLoader(dataset, **torchs),
        "torch's workers, in_order=False": DataLoader(dataset, **torchs, in_order=False),
    }
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(count + 1):
        for name, loader in loaders.items():
            began, samples = time.perf_counter(), 0
            for _, labels in loader:
                samples += len(labels)
            if number:
                rates[name].append(samples / (time.perf_counter() - began))
    return {
        "samples": len(dataset),
        "warm": {n: {"median": statistics.median(r), "rounds": r} for n, r in rates.items()},
    }


def _waits(data: Any, mode: str | None = None) -> torch.Tensor:
    time.sleep(0.02)
    return torch.zeros(100)


def wait(work: Path, scale: float, count: int) -> dict[str, Any]:
    """How many of 32 threads' worth of waiting samples come."""
    from PIL import Image

    with LMDBWriter(work / "images") as writer:
        for index in range(int(3_200 * scale)):
            writer.write((Image.new("RGB", (8, 8)), index))
    loader = _loader(LMDBDataset(work / "images").with_decoder(_waits), batch_size=64, num_workers=1)
    shares, threads = [], 0
    for number in range(count + 1):
        iterator = iter(loader)
        threads = iterator._engine.readers
        samples = len(next(iterator)[1])
        began, samples = time.perf_counter(), 0
        for _, labels in iterator:
            samples += len(labels)
        if number:
            shares.append(samples * 0.02 / (time.perf_counter() - began))
    return {"threads": threads, "times one thread": statistics.median(shares), "rounds": shares}


def ring(work: Path, scale: float, count: int) -> dict[str, Any]:
    """MiB of two loader processes and of the batches, after each of 20 epochs."""
    loader = _loader(Images(int(2_000 * scale)), batch_size=32, num_workers=2)
    processes, batches = [], []
    for _ in range(20):
        for batch in loader:
            del batch
        engine = loader._iterator._engine
        processes.append(max(_private_mib(process.pid) for process in engine.pool.running))
        batches.append(os.stat(engine._ring.file.fd).st_blocks * 512 / 2**20)
    return {
        "batch_mib": engine._ring.num_bytes / 2**20,
        "batches_ahead": engine.ahead,
        "ring_mib": batches,
        "process_private_mib": processes,
    }


def pinning(work: Path, scale: float, count: int) -> dict[str, Any]:
    """Samples per second, and the training process's CPU."""
    if not torch.cuda.is_available():
        return {"missing": "no CUDA GPU"}
    loaders = {}
    for way, in_place in (("copied", False), ("in place", True)):
        loaders[way] = _loader(Images(int(10_240 * scale)), batch_size=256, num_workers=4, pin_memory=True)
        loaders[way].pins_in_place = in_place
    rates: dict[str, list[float]] = {way: [] for way in loaders}
    spent_ms: dict[str, list[float]] = {way: [] for way in loaders}
    for number in range(count + 1):
        for way, loader in loaders.items():
            torch.cuda.synchronize()
            began, cpu_s, samples = time.perf_counter(), time.process_time(), 0
            for images, _ in loader:
                samples += len(images.to("cuda", non_blocking=True))
            torch.cuda.synchronize()
            if number:
                rates[way].append(samples / (time.perf_counter() - began))
                spent_ms[way].append((time.process_time() - cpu_s) * 1e3 / len(loader))
    return {
        "gpu": torch.cuda.get_device_name(),
        "warm": {way: {"median": statistics.median(r), "rounds": r} for way, r in rates.items()},
        "cpu_ms_per_batch": {way: statistics.median(ms) for way, ms in spent_ms.items()},
    }


def _private_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().uss) / 2**20


SECTIONS = {"take": take, "slow": slow, "look_ahead": look_ahead, "wait": wait, "ring": ring, "pinning": pinning}
