"""What the tests share: the smallest model, a logger that keeps what it is given, and a quiet Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 4


class TinyModel(LightningModule):
    """One linear layer; ``training_step`` calls ``in_step(batch_idx)`` first, for a test to do something there."""

    def __init__(self, num_batches: int = 64, batch_size: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1)
        self.num_batches = num_batches
        self.batch_size = batch_size

    def in_step(self, batch_idx: int) -> None:
        """For subclasses and instance attributes of tests."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.in_step(batch_idx)
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def _loader(self) -> DataLoader[Any]:
        samples = torch.arange(self.num_batches * self.batch_size * FEATURES, dtype=torch.float32)
        return DataLoader(TensorDataset(samples.sin().view(-1, FEATURES)), batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader()


class RecordingLogger(Logger):
    """Keeps every ``log_metrics`` call as ``(step, metrics)`` in ``records``."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.records.append((step, dict(metrics)))

    def steps(self, prefix: str = "") -> list[int]:
        """The steps at which a metric whose name begins with ``prefix`` was logged, one for each call."""
        return [step for step, metrics in self.records if any(name.startswith(prefix) for name in metrics)]


def tiny_trainer(tmp_path: Path, **kwargs: Any) -> Trainer:
    """A Trainer that runs four steps on the CPU and writes nothing but what ``kwargs`` asks for."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "limit_val_batches": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    return Trainer(**{**defaults, **kwargs})


def final_weights(trainer: Trainer, seed: int = 0, **model_kwargs: Any) -> dict[str, torch.Tensor]:
    """Train a fresh TinyModel, and hand back its weights."""
    seed_everything(seed, verbose=False)
    model = TinyModel(**model_kwargs)
    trainer.fit(model)
    return {name: value.clone() for name, value in model.state_dict().items()}
