"""One rank of DDP runs under StallDetector on the CPU: its report, warnings, files and what its logger was given."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import StallDetector
from lightning_gpuopt.autofix.adjustable_loader import AdjustableLoader
from lightning_gpuopt.compat.lightning import train_iterators
from lightning_gpuopt.detector.rank_exchange import RankExchange
from lightning_gpuopt.detector.session import DetectorSession
from lightning_gpuopt.measurements.ranks import RankWork
from tests.helpers import FEATURES, RecordingLogger, TinyModel, tiny_trainer

STEP_S = 0.02
RANK = int(os.environ.get("RANK", "0"))


class Data(Dataset[Any]):
    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        time.sleep(self.sleep_s)
        return [torch.ones(FEATURES)]


class Model(TinyModel):
    def __init__(self, step_s: float, sample_s: float) -> None:
        super().__init__()
        self.step_s, self.sample_s = step_s, sample_s

    def in_step(self, batch_idx: int) -> None:
        time.sleep(self.step_s)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Data(self.sample_s), batch_size=2)


class LargeModel(Model):
    """Gradients of 16 MiB, and no step to speak of."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)
        self.large = torch.nn.Parameter(torch.zeros(4, 2**20))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.large[0, 0] * 0


class LogsEachStep(Model):
    """Reduces metrics over the ranks in each step, as often as it takes to be seen; one a second time for the epoch."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for number in range(8):
            self.log(f"loss/{number}", loss, on_step=True, on_epoch=number == 0, sync_dist=True)
        self.log("alone", loss, on_step=True)
        return loss


class LogsEachEpoch(Model):
    """Reduces a metric over the ranks once an epoch."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Grow(Callback):
    """Gives rank 1 another worker in mid-epoch."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        AdjustableLoader(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if RANK == 1 and batch_idx == 7:
            train_iterators(trainer)[0].resize(2)


def grown() -> dict[str, Any]:
    """The steps at which this rank has sent its work to rank 0, and where it began anew."""
    sent: list[int] = []
    send = RankExchange.send

    def noted(self: RankExchange, step: int, work: RankWork | None) -> None:
        sent.append(step)
        send(self, step, work)

    RankExchange.send = noted  # type: ignore[method-assign]

    class WithWorker(Model):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Data(0.0), batch_size=2, num_workers=1)

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        detector = StallDetector(window_size=10, warmup_steps=5, report_dir=Path(folder))
        look = Look(detector)
        trainer = {"devices": 2, "strategy": "ddp", "max_steps": 34, "callbacks": [Grow(), detector, look]}
        tiny_trainer(Path(folder), **trainer).fit(WithWorker(0.0, 0.0))
    assert look.run is not None
    return {"sent": sent, "began_anew": look.run._changed_after}


class Look(Callback):
    """Reads the detector in mid-run."""

    def __init__(self, detector: StallDetector) -> None:
        self.detector = detector
        self.broadcast_s = 0.0
        self.run: DetectorSession | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.detector._session is not None
        self.run = self.detector._session
        self.broadcast_s = self.detector._session.timeline.times().signal_broadcast_s


def fit(
    world_size: int,
    step_s: float = STEP_S,
    sample_s: float = 0.0,
    model: Model | None = None,
    threshold: float = 0.1,
    epoch: int = 1000,
    steps: int = 35,
) -> dict[str, Any]:
    logger = RecordingLogger()
    model = model or Model(step_s, sample_s)
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        detector = StallDetector(threshold, window_size=10, warmup_steps=5, report_dir=Path(folder))
        trainer = {
            "devices": world_size,
            "strategy": "ddp",
            "logger": logger,
            "max_steps": steps,
            "limit_train_batches": epoch,
        }
        look = Look(detector)
        tiny_trainer(Path(folder), callbacks=[detector, look], **trainer).fit(model)
        files = sorted(path.name for path in Path(folder).glob("report.*"))
    finding = detector.report.findings[0] if detector.report.findings else None
    return {
        "verdict": detector.report.verdict,
        "rank": finding.evidence.get("rank") if finding else None,
        "kind": finding.evidence.get("kind") if finding else None,
        "evidence": finding.evidence if finding else {},
        "syncs": [each.evidence.get("syncs_per_step") for each in detector.report.findings if each.cause == "logging"],
        "steps": detector.report.steps,
        "logged": logger.steps("step/"),
        "warned": [str(each.message) for each in caught if "StallDetector" in str(each.message)],
        "files": files,
        "wall_s": detector.report.wall_s,
        "broadcast_s": look.broadcast_s,
        "weights": model.layer.weight.detach().flatten().tolist(),
    }


def raises(window_size: int, step_s: float = 0.0, **trainer: Any) -> dict[str, Any]:
    """A run in which rank 0 waits for its data, and rank 1 for rank 0: what ends it, and after which batch."""
    done = Done()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        detector = StallDetector(
            on_stall="raise", window_size=window_size, warmup_steps=5, report_dir=Path(folder), print_report=False
        )
        arguments = {"devices": 2, "strategy": "ddp", "max_steps": 2000, "callbacks": [done, detector]} | trainer
        try:
            tiny_trainer(Path(folder), **arguments).fit(Model(step_s, 0.01 if RANK == 0 else 0.0))
        except Exception as error:
            return {"error": type(error).__name__, "text": str(error), "batches": done.batches}
    return {"error": None}


class Done(Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1


def raise_alike() -> dict[str, Any]:
    """Runs that the detector ends: at a window, with accumulated gradients, and at their end."""
    return {
        "window": raises(10),
        "accumulated": raises(10, accumulate_grad_batches=16),
        "end": raises(1000, max_steps=30),
    }


def four() -> dict[str, Any]:
    """One slow rank of four."""
    return {"compute": fit(4, step_s=0.06 + (0.06 if RANK == 2 else 0.0))}


def two() -> dict[str, Any]:
    """Runs of two ranks, by name."""
    return {
        "alike": fit(2, step_s=0.03, threshold=0.3),  # ranks that share busy CPUs are not quite alike
        "compute": fit(2, step_s=STEP_S + (0.03 if RANK == 1 else 0.0)),
        "data": fit(2, sample_s=0.015 if RANK == 1 else 0.0),
        "collectives": fit(2, model=LargeModel()),
        "metrics": fit(2, model=LogsEachStep(0.001, 0.0), steps=200),  # a second or two: time for stack samples
        "metrics_slow_rank": fit(2, model=LogsEachStep(STEP_S + (0.06 if RANK == 1 else 0.0), 0.0)),
        "epoch_metrics": fit(2, model=LogsEachEpoch(0.001, 0.0), threshold=0.001, epoch=5),
    }
