"""What StallDetector's tests train: a model whose steps, samples, hooks and logger take a given time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import StallDetector, StallReport
from tests.helpers import FEATURES, TinyModel, tiny_trainer

STEPS = 30
FAST = {"window_size": 10, "warmup_steps": 3}
OF_WORKERS = {"slow_storage", "slow_transform", "cpu_saturated", "cpu_throttled"}
"""Causes of which one holds where a worker is late; which one is also the machine's affair."""


class SleepyData(Dataset[Any]):
    """Samples that take their time, or the CPU's."""

    def __init__(self, length: int = 64, sleep_s: float = 0.0, spin_s: float = 0.0) -> None:
        self.length, self.sleep_s, self.spin_s = length, sleep_s, spin_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        time.sleep(self.sleep_s)
        end = time.thread_time() + self.spin_s
        while time.thread_time() < end:
            pass
        return [torch.full((FEATURES,), float(index)).sin()]


class Sleeper(Callback):
    """Sleeps in one hook."""

    def __init__(self, hook: str, seconds: float) -> None:
        setattr(self, hook, lambda *args, **kwargs: time.sleep(seconds))


class Broken(Exception):
    pass


class Raiser(Callback):
    """Fails in one hook."""

    def __init__(self, hook: str, error: type[BaseException] = Broken, at: int = 5) -> None:
        def fail(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            if trainer.global_step >= at or hook == "on_train_start":
                raise error

        setattr(self, hook, fail)


class Model(TinyModel):
    """TinyModel with a step of a given length and any loader."""

    def __init__(self, step_s: float = 0.0, validation_s: float = 0.0, **loader: Any) -> None:
        super().__init__()
        self.step_s, self.validation_s = step_s, validation_s
        self.loader = {"dataset": SleepyData(), "batch_size": 2} | loader

    def in_step(self, batch_idx: int) -> None:
        time.sleep(self.step_s)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        time.sleep(self.validation_s)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(**self.loader)


def run(
    tmp_path: Path, model: Model, *callbacks: Callback, detector: StallDetector | None = None, **kwargs: Any
) -> StallReport:
    """Train under a detector, and hand back its report."""
    detector = detector or StallDetector(on_stall="ignore", **FAST)
    kwargs = {"max_steps": STEPS, "max_epochs": -1} | kwargs
    tiny_trainer(tmp_path, callbacks=[detector, *callbacks], **kwargs).fit(model)
    return detector.report
