"""What every kind of loader is trained from: with the callbacks everything is as without them, and causes are found."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_gpuopt import AutoFix, CudaPrefetcher, StallDetector, StallReport
from tests.callbacks.auto_fix_runs import finding, script
from tests.helpers import TinyModel, tiny_trainer, wait_for
from tests.loaders.kinds import BATCH, SAMPLES, Collate, Kind, Prepare

SAVED, STOPPED, ENDED = 30, 34, 52
"""Steps: an epoch has 24."""

SLOW_S = 0.025


class Net(TinyModel):
    """Trains on any batch, and keeps what came."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        self.step_s = step_s
        self.batches: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        tensors = tensors_in(batch)
        self.batches.append([float(value) for each in tensors for value in each[:, 0]])
        return self.layer(sum(tensors).float() / SAMPLES).pow(2).mean()  # type: ignore[union-attr]


def tensors_in(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [each for part in (batch.values() if isinstance(batch, dict) else batch) for each in tensors_in(part)]


class Saves(Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


@dataclass
class Ran:
    """A run, and the one that went on from what it had saved in the middle of an epoch."""

    batches: list[list[float]]
    weights: dict[str, torch.Tensor]
    resumed_batches: list[list[float]]
    resumed_weights: dict[str, torch.Tensor]


def fit(folder: Path, loader: Any, *callbacks: Callback, resume: Path | None = None, **trainer: Any) -> Net:
    seed_everything(3, verbose=False)
    model = Net()
    made = tiny_trainer(folder, callbacks=list(callbacks), max_epochs=-1, **trainer)
    whole = {"weights_only": False} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}
    made.fit(model, loader, ckpt_path=str(resume) if resume else None, **(whole if resume else {}))
    return model


def ran(folder: Path, kind: Kind, callbacks: Callable[[], list[Callback]] = list) -> Ran:
    """Train, save, and go on from there with another Trainer and another loader."""
    path = folder / "saved.ckpt"
    first = fit(folder, kind.make(folder, Prepare()), *callbacks(), Saves(path), max_steps=STOPPED)
    then = fit(folder, kind.make(folder, Prepare()), *callbacks(), resume=path, max_steps=ENDED)
    return Ran(first.batches, dict(first.state_dict()), then.batches, dict(then.state_dict()))


def measuring() -> list[Callback]:
    detector = StallDetector(on_stall="ignore", window_size=5, warmup_steps=2, print_report=False)
    return [detector, AutoFix(threshold=0.01)]


def all_of_them() -> list[Callback]:
    return [*measuring(), CudaPrefetcher(enabled=True)]


def everything_is_as_without(folder: Path, kind: Kind) -> None:
    """Samples, order, weights, and a run that goes on from the middle of an epoch; nothing is left."""
    before = set(threading.enumerate())
    plain, watched = ran(folder, kind), ran(folder, kind, all_of_them)
    assert len(plain.batches) == STOPPED
    assert watched.batches == plain.batches
    assert same_weights(watched.weights, plain.weights)
    if kind.loses:  # with CudaPrefetcher, which saves the state of what the step has taken, no batch is lost
        assert watched.resumed_batches == [plain.batches[SAVED], *plain.resumed_batches[:-1]]
        watched = ran(folder, kind, measuring)
    assert watched.resumed_batches == plain.resumed_batches
    assert same_weights(watched.resumed_weights, plain.resumed_weights)
    gc.collect()  # a graph's threads end when nothing holds their nodes
    ours = [each.name for each in threading.enumerate() if each.name.startswith("gpuopt")]
    assert ours == []
    wait_for(lambda: set(threading.enumerate()) <= before)
    wait_for(lambda: not multiprocessing.active_children())


def changes_keep_everything(folder: Path, kind: Kind) -> set[str]:
    """AutoFix changes what it may of a loader that seems slow: samples, order and weights are as without.

    Returns:
        The settings that were changed, for as long as they were tried.
    """
    steps = 2 * SAMPLES // BATCH
    plain = fit(folder, kind.make(folder, Prepare()), max_steps=steps)
    wanted = finding("slow_storage", loader=kind.key, num_workers=3, prefetch_factor=4, persistent_workers=True)
    autofix = AutoFix()
    changed = fit(folder, kind.make(folder, Prepare()), autofix, script([wanted]), max_steps=steps)
    assert changed.batches == plain.batches
    assert same_weights(dict(changed.state_dict()), dict(plain.state_dict()))
    gc.collect()  # torchdata's loader and its iterator hold one another
    wait_for(lambda: not multiprocessing.active_children())
    return {each.setting for each in autofix.changes if each.kept is not None}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def report_of(folder: Path, loader: Any, step_s: float = 0.0) -> StallReport:
    """Train under a detector."""
    detector = StallDetector(on_stall="ignore", window_size=8, warmup_steps=3, print_report=False)
    trainer = tiny_trainer(folder, callbacks=[detector], max_steps=40, max_epochs=-1)
    trainer.fit(Net(step_s), loader)
    return detector.report


def the_slow_line_is_found(folder: Path, kind: Kind) -> None:
    found = report_of(folder, kind.make(folder, Prepare(SLOW_S))).findings[0]
    assert found.cause == kind.cause
    assert "Prepare.__call__ (kinds.py:" in str(found.evidence["where"]).partition(", ")[0]
    assert found.evidence.get("loader", "") == kind.key


def nothing_is_found_where_nothing_waits(folder: Path, kind: Kind) -> None:
    report = report_of(folder, kind.make(folder, Prepare()), step_s=0.03)
    assert [each.cause for each in report.findings] == []


__all__ = [
    "Collate",
    "changes_keep_everything",
    "everything_is_as_without",
    "nothing_is_found_where_nothing_waits",
    "report_of",
    "the_slow_line_is_found",
]
