"""One rank of a DDP run under NumWorkersFinder on the CPU, started by ``tests.helpers.run_ranks``.

Rank 0 wants 2 workers, rank 1 wants 4. Prints the number that each ends with. In ``dies`` rank 1's thread that talks to
the others never does. In ``probe`` both search for real, and rank 1's data is slow: it needs the 3 workers it may have.
In ``waits`` the change has to wait for the next epoch. In ``content`` both begin with 3 workers, and rank 1 would do
with 2. In ``raises``, ``killed 0`` and ``killed 1`` a rank fails in
mid-epoch, with workers that were added; each that can says how it ended, and how many workers it has left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
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
from tests.helpers import FEATURES, TinyModel, tiny_trainer, wait_for

RANK = int(os.environ["RANK"])
WANTED = {0: 2, 1: 4}[RANK]
AGREED = {"agree": 4, "dies": 2, "probe": 3, "waits": 4}
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
    def __init__(self, seconds: float = 0.0, timeout: float = 0.0, workers: int = 1) -> None:
        super().__init__()
        self.seconds, self.timeout, self.workers = seconds, timeout, workers

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Data(self.seconds), batch_size=2, num_workers=self.workers, timeout=self.timeout)


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
        self.looks: bool | None = None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        there = self.finder.optimal_num_workers == self.number or time.monotonic() > self.deadline
        fit = self.finder._fit
        if there and self.looks is None and fit is not None:
            self.looks = fit._tuned[0].running.meter.asleep < 1 << 40
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(there or self.number == 0)


class Fails(Callback):
    """This rank fails once all have the workers that were agreed on."""

    def __init__(self, finder: NumWorkersFinder, how: str) -> None:
        self.finder, self.how = finder, how

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.strategy.reduce_boolean_decision(self.finder.optimal_num_workers == 4):
            return
        if self.how == "raises" and RANK == 1:
            raise OSError("the disk is gone")
        if self.how == f"killed {RANK}":
            os.kill(os.getpid(), signal.SIGKILL)


class StopWhenAnswered(Callback):
    """Ends training when rank 1's wish has been answered."""

    def __init__(self, finder: NumWorkersFinder) -> None:
        self.finder = finder
        self.wished = RANK == 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        fit = self.finder._fit
        assert fit is not None
        waits = fit._tuned[0]._wished is not None
        self.wished |= waits
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(self.wished and not waits)


def content() -> None:
    def want_fewer(self: LivePolicy, seen: Seen, cap: Cap) -> int:
        if RANK == 1 and self.num_workers == 3:
            self._change(2, seen)
        else:
            self._settle(seen)
        self.skip, self.window = 0, 2
        return self.num_workers

    LivePolicy.decide = want_fewer  # type: ignore[method-assign]
    warnings.simplefilter("ignore")
    finder = NumWorkersFinder()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [finder, StopWhenAnswered(finder)]
        tiny_trainer(Path(folder), max_steps=-1, devices=2, strategy="ddp", callbacks=callbacks).fit(Model(workers=3))
    print(json.dumps({"num_workers": finder.optimal_num_workers}))


def fail(how: str) -> None:
    LivePolicy.decide = decide  # type: ignore[method-assign]
    warnings.simplefilter("ignore")
    finder = NumWorkersFinder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny_trainer(
            Path(folder), max_steps=-1, devices=2, strategy="ddp", callbacks=[finder, Fails(finder, how)]
        )
        try:
            trainer.fit(Model())
        except Exception as error:
            wait_for(lambda: not multiprocessing.active_children())
            print(json.dumps({"ended": type(error).__name__, "num_workers": finder.optimal_num_workers}), flush=True)
    os._exit(0)  # torch.distributed's own farewell would wait for the other rank


def main(what: str) -> None:
    LivePolicy.decide = decide  # type: ignore[method-assign]
    silent = what == "dies" and RANK == 1
    if silent:
        RankAgreement._run = lambda self: None  # type: ignore[method-assign]
    warnings.simplefilter("ignore")
    probes = what == "probe"
    finder = NumWorkersFinder("probe", step_time_s=0.0, max_num_workers=3) if probes else NumWorkersFinder()
    with tempfile.TemporaryDirectory() as folder:
        stop = StopWhenAgreed(finder, WANTED if silent else AGREED[what])
        callbacks = [finder, stop]
        model = Model(SLOW_S if probes and RANK == 1 else 0.0, timeout=60.0 if what == "waits" else 0.0)
        tiny_trainer(Path(folder), max_steps=-1, devices=2, strategy="ddp", callbacks=callbacks).fit(model)
    if not silent:
        tried = [trial.num_workers for trial in finder.trials]
        print(json.dumps({"num_workers": finder.optimal_num_workers, "tried": tried, "looks": stop.looks}))


if __name__ == "__main__":
    if sys.argv[1] in AGREED:
        main(sys.argv[1])
    elif sys.argv[1] == "content":
        content()
    else:
        fail(sys.argv[1])
