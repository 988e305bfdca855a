"""Where the GPU sections of DALIDataModule run, over what images, and what is measured of GPU and CPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from dali_peers import cpu_s
from storage import make_jpegs
from torch.utils.data import ConcatDataset

from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writing.build import build_lmdb
from lightning_gpuopt.telemetry.keys import select_metrics
from lightning_gpuopt.telemetry.monitor import GpuMonitor

LOADS = (0.0, 0.25, 0.5, 0.65, 0.75, 0.9, 1.0)
THREADS = (2, 4, 8)
USUAL_THREADS = 4
WATCHED = ("utilization", "sm_activity", "nvjpg_utilization", "power_w")


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        images: different files.
        links: how often each is in the folder: epochs are as long as those of a large dataset.
        batch_size: of the sweep.
        warmup: batches or steps that come before the clock starts.
        batches: that are timed in each cell of the sweep.
        train_batch_size: of the training.
        steps: that are timed in each training.
        rounds: of all trainings in turn.
        loads: shares of the hardware decoder.
        threads: CPU threads of DALI.
    """

    images: int = 2000
    links: int = 10
    batch_size: int = 128
    warmup: int = 20
    batches: int = 200
    train_batch_size: int = 256
    steps: int = 200
    rounds: int = 3
    loads: tuple[float, ...] = LOADS
    threads: tuple[int, ...] = THREADS


FULL = Size()
QUICK = replace(FULL, batches=60, steps=60, rounds=1, loads=(0.0, 0.65, 1.0), threads=(USUAL_THREADS,))
TRIAL = Size(
    images=16,
    links=2,
    batch_size=4,
    warmup=2,
    batches=4,
    train_batch_size=4,
    steps=3,
    rounds=1,
    loads=(0.65,),
    threads=(2,),
)


@dataclass(frozen=True)
class DecodeWorkload:
    """Where it runs, and over what.

    Attributes:
        device: ``"cuda"``, or ``"cpu"`` for a trial.
        size: how much is measured.
        folder: of JPEG files in class folders.
        stored: an LMDB dataset of each different file.
    """

    device: str
    size: Size
    folder: Path
    stored: Path

    @property
    def lmdb(self) -> Any:
        """The stored dataset, as long as the folder."""
        return ConcatDataset([LMDBDataset(self.stored, decode="raw")] * self.size.links)

    @property
    def dali_device(self) -> Any:
        return "gpu" if self.device == "cuda" else "cpu"

    def wait(self) -> None:
        """Until what was queued on the GPU has run."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_data(work: Path, device: str, size: Size) -> DecodeWorkload:
    """Photographs, each linked several times; and the LMDB of them."""
    once, folder = work / "once", work / "images"
    for file in make_jpegs(once, size.images):
        target = folder / file.parent.name
        target.mkdir(parents=True, exist_ok=True)
        for link in range(size.links):
            os.link(file, target / f"{link}-{file.name}")
    build_lmdb(once, work / "stored", progress=False)
    return DecodeWorkload(device, size, folder, work / "stored")


class Watch:
    """Figures of the GPU, and of the CPU, from `begin` to `end`. Without a GPU only of the CPU.

    Make it before the loader is warmed up: opening NVML takes a while, in which queues would fill.
    """

    def __init__(self, workload: DecodeWorkload) -> None:
        self.workload = workload
        self._monitor: GpuMonitor | None = None
        self._begin = self._begin_cpu = 0.0
        if workload.device == "cuda":
            current = torch.cuda.current_device()
            self._monitor = GpuMonitor(select_metrics(WATCHED), "auto", interval_s=0.1, current=current)
            self._monitor.wait_until_open(1.5)

    def begin(self) -> None:
        self.workload.wait()
        if self._monitor is not None:
            self._monitor.restart()
        self._begin, self._begin_cpu = time.perf_counter(), cpu_s()

    def end(self, images: int) -> dict[str, float]:
        """The figures, with images per second."""
        self.workload.wait()
        wall, cpu = time.perf_counter() - self._begin, cpu_s() - self._begin_cpu
        found = {"images_s": images / wall, "cores": cpu / wall, "images_s_per_core": images / max(cpu, 1e-9)}
        if self._monitor is not None:
            found |= {key.rpartition("/")[2]: value for key, value in self._monitor.summary().items()}
            self._monitor.close(step=0, timeout_s=1.0, gather_timeout_s=1.0)
        return found
