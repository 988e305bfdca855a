"""One rank of a DDP run under NumWorkersFinder on the CPU, started by ``tests.helpers.run_ranks``.

Rank 0 wants 2 workers, rank 1 wants 4. Prints the number that each ends with. In ``dies`` rank 1's thread that talks to
the others never does. In ``probe`` both search for real, and rank 1's data is slow: it needs the 3 workers it may have.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.callbacks.num_workers_finder import NumWorkersFinder
from lightning_gpuopt.tuning.agree import RankAgreement
from lightning_gpuopt.tuning.caps import Cap
from lightning_gpuopt.tuning.live import LivePolicy, Seen
from tests.helpers import FEATURES, TinyModel, tiny_trainer

RANK = int(os.environ["RANK"])
WANTED = {0: 2, 1: 4}[RANK]
AGREED = {"agree": 4, "dies": 2, "probe": 3}
SLOW_S = 0.02


class Data(Dataset[Any]):
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 40_000

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return [torch.ones(FEATURES)]


class Model(TinyModel):
    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Data(self.seconds), batch_size=2, num_workers=1)


def decide(self: LivePolicy, seen: Seen, cap: Cap) -> int:
    if self.num_workers == 1:
        self._change(WANTED, seen)
    else:
        self._settle(seen)
    self.skip, self.window = 0, 2
    return self.num_workers


class StopWhenAgreed(Callback):
    """Ends training when this rank has what it waits for; both ranks at the same step, or each on its own."""

    def __init__(self, finder: NumWorkersFinder, number: int) -> None:
        self.finder, self.number = finder, number
        self.deadline = time.monotonic() + 30

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        there = self.finder.optimal_num_workers == self.number or time.monotonic() > self.deadline
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(there or self.number == 0)


def main(what: str) -> None:
    LivePolicy.decide = decide  # type: ignore[method-assign]
    silent = what == "dies" and RANK == 1
    if silent:
        RankAgreement._run = lambda self: None  # type: ignore[method-assign]
    warnings.simplefilter("ignore")
    probes = what == "probe"
    finder = NumWorkersFinder("probe", step_time_s=0.0, max_num_workers=3) if probes else NumWorkersFinder()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [finder, StopWhenAgreed(finder, WANTED if silent else AGREED[what])]
        model = Model(SLOW_S if probes and RANK == 1 else 0.0)
        tiny_trainer(Path(folder), max_steps=-1, devices=2, strategy="ddp", callbacks=callbacks).fit(model)
    if not silent:
        tried = [trial.num_workers for trial in finder.trials]
        print(json.dumps({"num_workers": finder.optimal_num_workers, "tried": tried}))


if __name__ == "__main__":
    main(sys.argv[1])
