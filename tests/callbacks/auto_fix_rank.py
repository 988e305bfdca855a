"""One rank of a DDP run under AutoFix."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from tests.callbacks.auto_fix_runs import FAST, SLOW, Numbers, Run, Script, finding, loader


class Together(Callback):
    """Ends training when every rank has had two workers for a while."""

    def __init__(self) -> None:
        self.left = 30

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        workers = next(each for each in trainer.callbacks if type(each).__name__ == "Workers")
        if trainer.strategy.reduce_boolean_decision(bool(workers.pids) and len(workers.pids[-1]) == 2):
            self.left -= 1
        trainer.should_stop = trainer.should_stop or self.left <= 0


def grow() -> dict[str, Any]:
    """A loader that gets a second worker: what was changed, and how many workers there have been."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        detector = Script([(SLOW, [finding(num_workers=2)])] * 5 + [(FAST, [])])
        run = Run(
            Path(folder),
            detector,
            loader(Numbers(4000)),
            callbacks=(Together(),),
            devices=2,
            strategy="ddp",
            max_epochs=9,
        )
        counts = [len(pids) for pids in run.workers.pids]
        return {"changes": run.changes, "workers": sorted(set(counts))}
