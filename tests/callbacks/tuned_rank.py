"""One rank of a DDP run under NumWorkersFinder on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_gpuopt.callbacks.num_workers_finder import NumWorkersFinder
from lightning_gpuopt.tuning.running_search import LivePolicy, LoaderStats
from lightning_gpuopt.tuning.worker_limits import Cap
from tests.callbacks.auto_fix_runs import Model, Numbers, loader
from tests.helpers import tiny_trainer, wait_for

RANK = int(os.environ["RANK"])
WANTED = {0: 2, 1: 4}[RANK]
SLOW_S = 0.02


def made(takes_s: float = 0.0) -> DataLoader[Any]:
    return loader(Numbers(40_000, takes_s=takes_s), shuffle=False)


def decide(self: LivePolicy, seen: LoaderStats, cap: Cap) -> int:
    if self.num_workers == 1:
        self._change(WANTED, seen)
    else:
        self._settle(seen)
    self.skip, self.window = 0, 2
    return self.num_workers


class Fails(Callback):
    """This rank fails once each worker of all ranks has given a batch.

    One whose parent dies before it has looked who that is would never notice, and keep the ranks' connections open.
    """

    def __init__(self, finder: NumWorkersFinder, how: str) -> None:
        self.finder, self.how = finder, how
        self.left = 20  # batches come from the workers in turn

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.strategy.reduce_boolean_decision(self.finder.optimal_num_workers == WANTED):
            return
        self.left -= 1
        if self.left:
            return
        if self.how == "raises" and RANK == 1:
            raise OSError("the disk is gone")
        if self.how == f"killed {RANK}":
            os.kill(os.getpid(), signal.SIGKILL)


def fail(how: str) -> dict[str, Any] | None:
    """Rank 0 wants 2 workers, rank 1 wants 4, and a rank fails in mid-epoch, when both have theirs.

    Args:
        how: ``raises``, ``killed 0`` or ``killed 1``.

    Returns:
        How this rank ended, and how many workers it had been given.
    """
    LivePolicy.decide = decide  # type: ignore[method-assign]
    warnings.simplefilter("ignore")
    finder = NumWorkersFinder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny_trainer(
            Path(folder), max_steps=-1, devices=2, strategy="ddp", callbacks=[finder, Fails(finder, how)]
        )
        try:
            trainer.fit(Model(), made())
        except Exception as error:
            wait_for(lambda: not multiprocessing.active_children())
            return {"ended": type(error).__name__, "num_workers": finder.optimal_num_workers}
    return None


def probe() -> dict[str, Any]:
    """Both ranks search for real, until each has had ten steps; rank 1's data is slow, and needs the 3 workers."""
    warnings.simplefilter("ignore")
    finder = NumWorkersFinder("probe", step_time_s=0.0, max_num_workers=3)
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny_trainer(Path(folder), max_steps=10, devices=2, strategy="ddp", callbacks=[finder])
        trainer.fit(Model(), made(SLOW_S if RANK == 1 else 0.0))
    tried = [trial.num_workers for trial in finder.trials]
    return {"num_workers": finder.optimal_num_workers, "tried": tried}
