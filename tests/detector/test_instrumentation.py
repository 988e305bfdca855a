"""Which actions of Lightning's profiler are not worth a reading of the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_gpuopt import StallDetector
from tests.helpers import TinyModel, tiny_trainer


class Slow(SingleDeviceStrategy):
    """Does something before each batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        sum(range(10))


class Loops(Callback):
    """Notes the parts of Lightning's own loops that the timeline has, and the hooks."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        times = trainer.profiler.timeline.times()
        self.names = {*times.loops, *times.callbacks}


def names_of(folder: Path, **trainer: Any) -> set[str]:
    seen = Loops()
    detector = StallDetector(on_stall="ignore", warmup_steps=1, print_report=False)
    tiny_trainer(folder, callbacks=[seen, detector], max_steps=3, **trainer).fit(TinyModel())
    return seen.names


def test_a_strategys_empty_hook_and_an_idle_hook_of_our_own_are_not_timed(tmp_path: Path) -> None:
    names = names_of(tmp_path)
    assert "StallDetector.on_train_batch_end" in names
    assert not names & {"SingleDeviceStrategy.on_train_batch_start", "StallDetector.on_before_backward"}


def test_a_hook_of_a_strategy_of_somebodys_own_is_timed(tmp_path: Path) -> None:
    assert "Slow.on_train_batch_start" in names_of(tmp_path, strategy=Slow(device="cpu"))
