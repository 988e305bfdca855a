"""The pieces that faults are made of: data, collate functions, callbacks and loggers that take their time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import SampleLoader


def spin(seconds: float) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Data(Dataset[Any]):
    """Samples that sleep (as for a disk) or compute (as a transform does), some of them longer than others."""

    def __init__(
        self, sleep_s: float = 0.0, spin_s: float = 0.0, slow_every: int = 0, slow_s: float = 0.0, length: int = 100_000
    ) -> None:
        self.sleep_s, self.spin_s, self.slow_every, self.slow_s = sleep_s, spin_s, slow_every, slow_s
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s + (self.slow_s if self.slow_every and index % self.slow_every == 0 else 0.0))
        spin(self.spin_s)
        return torch.ones(8)


class RankData(Data):
    """Data that is slow on one rank only."""

    def __init__(self, rank: int, here_s: float, elsewhere_s: float = 0.0) -> None:
        super().__init__()
        self.rank, self.here_s, self.elsewhere_s = rank, here_s, elsewhere_s

    def __getitem__(self, index: int) -> torch.Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        time.sleep(self.here_s if rank == self.rank else self.elsewhere_s)
        return torch.ones(8)


def collate_slowly(samples: list[torch.Tensor]) -> torch.Tensor:
    """As padding in Python does."""
    spin(0.03)
    return torch.stack(samples)


class Bag:
    """Holds objects that Lightning does not look into when it moves a batch."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects


class Objects:
    """A batch of many small Python objects, which must be pickled one by one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        return {"x": torch.stack(samples), "bag": Bag([{"id": number} for number in range(self.count)])}


class LargeBatch:
    """A batch of so many MiB."""

    def __init__(self, mib: int) -> None:
        self.mib = mib

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        return {"x": torch.stack(samples), "large": torch.ones(self.mib, 2**18)}


class Model(LightningModule):
    """A step of a known length, which asks nothing of the CPU.

    ``spent_s`` is what the injected waits of the training process really took, by phase: the truth that the detector's
    phases are held against.
    """

    def __init__(
        self,
        loader: dict[str, Any],
        step_s: float = 0.005,
        validation_s: float = 0.0,
        slow_rank: tuple[int, float] | None = None,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.loader, self.step_s, self.validation_s, self.slow_rank = loader, step_s, validation_s, slow_rank
        self.spent_s: dict[str, float] = {}

    def pause(self, phase: str, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.spent_s[phase] = self.spent_s.get(phase, 0.0) + time.perf_counter() - begin

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        begin = time.perf_counter()
        extra = self.slow_rank[1] if self.slow_rank is not None and self.slow_rank[0] == self.global_rank else 0.0
        time.sleep(self.step_s + extra)
        self.work(batch, batch_idx)
        loss = self.layer(batch["x"] if isinstance(batch, dict) else batch).mean()
        self.spent_s["forward"] = self.spent_s.get("forward", 0.0) + time.perf_counter() - begin
        return loss

    def work(self, batch: Any, batch_idx: int) -> None:
        """What else a kind of model does in its step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.pause("validation", self.validation_s)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        given = {"batch_size": 4} | self.loader
        return SampleLoader(**given) if given.pop("by_sample", False) else DataLoader(**given)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Data(length=400), batch_size=4)


class LargeModel(Model):
    """Gradients of so many MiB, which cost little to compute.

    Args:
        loader: for ``Model``.
        mib: of the gradients, in float32.
        **kwargs: for ``Model``.
    """

    def __init__(self, loader: dict[str, Any], mib: int, **kwargs: Any) -> None:
        super().__init__(loader, **kwargs)
        self.large = torch.nn.Parameter(torch.zeros(mib, 2**18))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.large[0, 0] * 0


class LogsOverRanks(Model):
    """Reduces a metric over the ranks, so many times in each step or once an epoch."""

    def __init__(self, loader: dict[str, Any], times: int = 1, *, each_step: bool = True, **kwargs: Any) -> None:
        super().__init__(loader, **kwargs)
        self.times, self.each_step = times, each_step

    def work(self, batch: Any, batch_idx: int) -> None:
        for number in range(self.times):
            self.log(f"m{number}", 1.0, on_step=self.each_step, on_epoch=not self.each_step, sync_dist=True)


class SlowCallback(Callback):
    """Takes its time after each so many steps."""

    def __init__(self, seconds: float, every: int = 1) -> None:
        self.seconds, self.every = seconds, every

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every == 0:
            pl_module.pause("callbacks", self.seconds)


class MetricsEveryStep(Callback):
    """Sends a figure to the loggers at every step, as users do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"loss": 1.0}, step=batch_idx)


class SlowLogger(DummyLogger):
    """A logger whose server is far away."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.pl_module: Model | None = None

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.seconds)

    @property
    def save_dir(self) -> str | None:
        return None


class SlowCheckpoints(Callback):
    """Makes each checkpoint take a while, as a large model on a slow disk does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        save = trainer.strategy.checkpoint_io.save_checkpoint

        def save_slowly(*args: Any, **kwargs: Any) -> None:
            pl_module.pause("checkpoint", self.seconds)
            save(*args, **kwargs)

        trainer.strategy.checkpoint_io.save_checkpoint = save_slowly


def quiet(tmp: Path, **kwargs: Any) -> dict[str, Any]:
    """A Trainer's arguments, with nothing that is not asked for."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "default_root_dir": tmp,
    }
    return defaults | kwargs
