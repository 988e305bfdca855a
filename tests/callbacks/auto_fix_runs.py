"""AutoFix under findings and window times that a test has written: what it changes is real."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import AutoFix, Finding, StallDetector
from lightning_gpuopt.compat.dataloader import worker_pids
from lightning_gpuopt.compat.lightning import train_iterators
from lightning_gpuopt.detector.session import DetectorSession
from lightning_gpuopt.measurements.loading import WorkerTimes
from tests.autofix.plain_run import finding as finding
from tests.helpers import tiny_trainer

WINDOW = 2
SLOW, FAST = 0.010, 0.005


class ScriptedSession(DetectorSession):
    """A session in which the set-up of each epoch takes as long as was written."""

    epochs_s: Sequence[float]

    @property
    def set_ups(self) -> tuple[float, int]:
        _, epochs = super().set_ups
        given = self.epochs_s[:epochs]
        return sum(given) + self.epochs_s[-1] * (epochs - len(given)), epochs


class Script(StallDetector):
    """A StallDetector whose windows, of two steps each, tell what was written for them.

    Args:
        windows: for each window mean seconds per step, and the findings; the last one stays.
        on_gpu: whether they are a GPU's.
        epochs_s: seconds of the set-up of each epoch that has begun, the last one for all to come; None: as it was.
    """

    def __init__(
        self,
        windows: list[tuple[float, list[Finding]]],
        *,
        on_gpu: bool = False,
        epochs_s: Sequence[float] | None = (0.0,),
        **kwargs: Any,
    ) -> None:
        super().__init__(window_size=WINDOW, warmup_steps=0, on_stall="ignore", print_report=False, **kwargs)
        self.windows, self.on_gpu, self.epochs_s = windows, on_gpu, epochs_s
        self.number = 0
        self.taken = 0
        self.trainer: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.taken += 1
        if self.taken % WINDOW or self._session is None:
            return
        step_s, findings = self.windows[min(self.number, len(self.windows) - 1)]
        self.number += 1
        waterfall = SimpleNamespace(step_s=step_s, on_gpu=self.on_gpu)
        window: Any = SimpleNamespace(
            source=SimpleNamespace(key=""), times=None, workers=WorkerTimes(), host=None, waterfall=waterfall
        )
        self._session.notify(window, findings)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self._session is not None and self.epochs_s is not None:
            self._session.__class__ = ScriptedSession
            vars(self._session)["epochs_s"] = self.epochs_s

    def _close_window(self, trainer: Any, run: Any) -> None:
        run.close_window()


def script(findings: list[Finding], *after: float, before: int = 5, **kwargs: Any) -> Script:
    """Slow windows with findings, and then windows without any; their mean seconds per step."""
    return Script([(SLOW, findings)] * before + [(each, []) for each in after or (FAST,)], **kwargs)


class Numbers(Dataset[torch.Tensor]):
    """Sample ``i`` is ``[i, 0]``; ``extra`` is added to ``i``, as a dataset's own state."""

    def __init__(self, length: int = 40, draws: str = "", takes_s: float = 0.0) -> None:
        self.length, self.draws, self.takes_s, self.extra = length, draws, takes_s, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.takes_s)
        if self.draws == "torch":
            torch.rand(1)
        elif self.draws == "numpy":
            np.random.rand()
        elif self.draws == "random":
            random.random()
        return torch.tensor([float(index + self.extra), 0.0])


class Model(LightningModule):
    """Keeps what it saw, and draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += batch[:, 0].tolist()
        loss: torch.Tensor = torch.nn.functional.dropout(self.layer(batch / 40)).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Workers(Callback):
    """Notes the process ids of the workers in each step."""

    def __init__(self) -> None:
        self.pids: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.pids.append(worker_pids(train_iterators(trainer)))


class Run:
    """A training with AutoFix, and what it left behind.

    Args:
        tmp_path: for the report.
        detector: what is told to AutoFix.
        loader: the training loader, or several.
        fixes: of AutoFix.
        callbacks: more of them; those of AutoFix's parts come behind it.
        exact: of AutoFix.
        trainer: further arguments of the Trainer.
    """

    def __init__(
        self,
        tmp_path: Path,
        detector: Script,
        loader: Any,
        fixes: Any = "all",
        callbacks: tuple[Callback, ...] = (),
        exact: bool = False,
        **trainer: Any,
    ) -> None:
        self.autofix, self.workers = AutoFix(fixes=fixes, exact=exact), Workers()
        self.detector, self.loader = detector, loader
        own = [self.autofix, self.workers, detector, *callbacks]
        self.model, self.trainer = train(tmp_path, loader, own, **trainer)
        self.callbacks_after = list(self.trainer.callbacks) == own  # type: ignore[attr-defined]
        self.left = multiprocessing.active_children()

    @property
    def changes(self) -> list[tuple[Any, ...]]:
        return [(each.setting, each["from"], each.to, each.kept) for each in self.autofix.changes]

    @property
    def why(self) -> list[str]:
        return [each.why for each in self.autofix.changes]

    def same_as_without(self, make: Callable[..., Any], **trainer: Any) -> bool:
        """Whether samples, order and weights are those of the same training without AutoFix, from what is made."""
        model = plain(make, **trainer)
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        return model.seen == self.model.seen and all(torch.equal(*pair) for pair in pairs)


@cache
def plain(make: Callable[..., Any], **trainer: Any) -> Model:
    """Trained without AutoFix."""
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), make(), [], **trainer)[0]


def train(tmp_path: Path, loader: Any, callbacks: list[Callback], **kwargs: Any) -> tuple[Model, Trainer]:
    seed_everything(3, verbose=False)
    model = Model()
    trainer = tiny_trainer(tmp_path, callbacks=callbacks, **{"max_steps": -1, "max_epochs": 3, **kwargs})
    trainer.fit(model, loader)
    return model, trainer


def loader(dataset: Any = None, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Numbers(), **{"batch_size": 2, "shuffle": True, "num_workers": 1, **kwargs})
