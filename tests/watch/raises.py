"""Trainings that fail in the program's own code, each with its whole traceback printed, and again by a callback.

``python -m tests.watch.raises KIND...``; ``ranks``: of two ranks one fails.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate


class Data(Dataset[Any]):
    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError(f"sample {index}")
        return torch.zeros(2)


class Order(Sampler[int]):
    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Any:
        yield from range(20)
        raise ValueError("order")


def collate(samples: list[Any]) -> Any:
    raise ValueError("collate")


def collate_late(samples: list[Any]) -> Any:
    if torch.utils.data.get_worker_info() is not None and samples[0].sum() > 0:
        raise ValueError("collate")
    return default_collate(samples)


class Late(Data):
    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index >= 24))


def begin(worker: int) -> None:
    raise ValueError("begin")


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        raise ValueError("backward")


class Module(lightning.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.kind = kind

    def fails(self, kind: str) -> None:
        if self.kind == kind and (self.trainer.world_size == 1 or self.global_rank == 1):
            raise ValueError(kind)

    def on_train_start(self) -> None:
        self.fails("start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.fails("step")
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        if self.kind == "chained":
            try:
                self.layer(torch.zeros(3))
            except RuntimeError:
                raise ValueError("chained") from None
        return Backward.apply(loss) if self.kind == "backward" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking:
            self.fails("validation")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.fails("test")

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.fails("transfer")
        return batch

    def configure_optimizers(self) -> Any:
        self.fails("optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self.fails("save")
        return super().state_dict(*args, **options)


class Prints(lightning.Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        print("".join(traceback.format_exception(exception)))


class Logger(lightning.pytorch.loggers.logger.DummyLogger):
    def log_metrics(self, *args: Any, **options: Any) -> None:
        raise ValueError("logger")


LOADERS: dict[str, dict[str, Any]] = {
    "sample": {"dataset": Data(20)},
    "sample-worker": {"dataset": Data(20), "num_workers": 1},
    "first-sample-worker": {"dataset": Data(0), "num_workers": 1},
    "collate": {"collate_fn": collate},
    "collate-worker": {"collate_fn": collate, "num_workers": 1},
    "late-collate-worker": {"dataset": Late(), "collate_fn": collate_late, "num_workers": 1},
    "sampler": {"sampler": Order()},
    "begin": {"worker_init_fn": begin, "num_workers": 1},
}
HOOKS = ("start", "step", "chained", "backward", "validation", "test", "transfer", "optimizers", "save", "logger")
KINDS = (*HOOKS, *LOADERS)


def fail(kind: str, **options: Any) -> None:
    loader = DataLoader(**{"dataset": Data(), "batch_size": 4, **LOADERS.get(kind, {})})
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 1, "logger": Logger() if kind == "logger" else False, **options},
        callbacks=[Prints()],
        log_every_n_steps=1,
        enable_checkpointing=kind == "save",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(kind)
    try:
        if kind == "test":
            trainer.test(module, loader)
        else:
            trainer.fit(module, loader, DataLoader(Data()))
    except Exception:
        print(kind, traceback.format_exc())
    else:
        print(kind, "did not fail")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        if each == "ranks":
            fail("step", strategy="ddp_fork", devices=2)
        else:
            fail(each)
