"""Samples that depend on what training changes, with workers that come while it runs: each batch is as without.

By which paths samples depend on something, and what is trained, is shown in ``tests/objects``: here a few of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_gpuopt import AutoFix, NumWorkersFinder
from lightning_gpuopt.compat.dataloader import running_workers
from lightning_gpuopt.compat.lightning import train_iterators
from tests.callbacks.auto_fix_runs import Model, finding, script
from tests.helpers import AfterBatch, tiny_trainer
from tests.lanes import combinations, few

pytestmark = [pytest.mark.usefixtures("wants_more"), pytest.mark.filterwarnings("ignore")]

LENGTH = 40
BEGUN = {"added": 0.0}
"""In a worker: what was added as it began."""


class Program:
    """What training changes: the Trainer, its module, and the rest of what a script has."""

    def __init__(self) -> None:
        self.model = Model()
        self.trainer: Any = None
        self.changes: Callable[[int], object] = lambda step: None


class Samples(Dataset[torch.Tensor]):
    """Sample ``i`` is ``[i + what is added, 0]``."""

    def __init__(self, added: Callable[[], Any]) -> None:
        self.added = added

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index) + float(self.added()), 0.0])


class Has:
    """An object with a state, and methods that read it."""

    of_class: ClassVar[float] = 0.0

    def __init__(self) -> None:
        self.added = 0.0

    def collate(self, samples: Any) -> Any:
        return default_collate(samples) + self.added

    def begin(self, worker: int) -> None:
        BEGUN["added"] = self.added

    @classmethod
    def read(cls) -> float:
        return cls.of_class


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.added = 0.0

    def collate(self, samples: Any) -> Any:
        return default_collate(samples) + self.added


def sets(held: Any) -> Callable[[int], None]:
    return lambda step: setattr(held, "added", step)


def of_closure(program: Program) -> dict[str, Any]:
    added = 0.0

    def change(step: int) -> None:
        nonlocal added
        added = step

    program.changes = change
    return {"added": lambda: added}


def of_environment(program: Program) -> dict[str, Any]:
    program.changes = lambda step: os.environ.__setitem__("ADDED_TO_SAMPLES", str(step))
    return {"added": lambda: os.environ.get("ADDED_TO_SAMPLES", 0)}


def of_class(program: Program) -> dict[str, Any]:
    program.changes = lambda step: setattr(Has, "of_class", step)
    return {"added": Has.read}


def of_collate(program: Program) -> dict[str, Any]:
    has = Has()
    program.changes = sets(has)
    return {"collate_fn": has.collate}


def of_start(program: Program) -> dict[str, Any]:
    has = Has()
    program.changes = sets(has)
    return {"added": lambda: BEGUN["added"], "worker_init_fn": has.begin}


def of_long_list(program: Program) -> dict[str, Any]:
    held = [0.0] * 4_000
    program.changes = lambda step: held.__setitem__(777, step)
    return {"added": lambda: held[777]}


def of_datamodule(program: Program) -> dict[str, Any]:
    data = Data()
    program.changes = sets(data)
    return {"added": lambda: data.added}


def of_datamodule_method(program: Program) -> dict[str, Any]:
    data = Data()
    program.changes = sets(data)
    return {"collate_fn": data.collate}


def of_weights(program: Program) -> dict[str, Any]:
    return {"added": lambda: program.model.layer.weight[0, 0].detach().tanh()}


def of_global_step(program: Program) -> dict[str, Any]:
    return {"added": lambda: program.trainer.global_step}


KINDS = {name[3:]: each for name, each in list(globals().items()) if name.startswith("of_")}
TRAINED = {"datamodule", "weights", "global_step"}


def run(kind: str, workers: int, *monitors: Callback, **options: Any) -> tuple[list[float], set[int]]:
    """The samples of a training, in which something changes after each third step; and the numbers of workers."""
    torch.manual_seed(1)
    Has.of_class = 0.0
    program, numbers = Program(), set[int]()
    given = KINDS[kind](program)
    samples = Samples(given.pop("added", lambda: 0.0))
    loader = DataLoader(samples, batch_size=2, num_workers=workers, shuffle=True, **given, **options)

    def change(trainer: Any, batch_idx: int) -> None:
        numbers.add(running_workers(loader, train_iterators(trainer)[0]))
        if trainer.global_step % 3 == 1:
            program.changes(trainer.global_step)

    with tempfile.TemporaryDirectory() as folder:
        callbacks = [AfterBatch(change), *monitors]
        program.trainer = tiny_trainer(Path(folder), max_steps=-1, max_epochs=2, callbacks=callbacks)
        try:
            program.trainer.fit(program.model, loader)
        finally:
            os.environ.pop("ADDED_TO_SAMPLES", None)
    return program.model.seen, numbers


plain = cache(run)


def monitors_of(name: str) -> list[Callback]:
    if name == "finder":
        return [NumWorkersFinder()]
    return [AutoFix(), script([finding("slow_storage", num_workers=3)])]


CORE = [
    *(f"finder-1-{kind}" for kind in ("closure", "environment", "start", "weights", "global_step")),
    *("finder-0-datamodule_method", "autofix-0-closure"),
]


@combinations(" ".join(CORE), monitor=["finder", "autofix"], workers=[0, 1], kind=list(KINDS))
def test_batches_are_as_without(kind: str, workers: int, monitor: str) -> None:
    seen, numbers = run(kind, workers, *monitors_of(monitor))
    assert seen == plain(kind, workers)[0]
    if not workers and kind in TRAINED:
        assert numbers == {0}
    if workers:
        assert max(numbers) > 1, "from one worker on, the next epoch has more"


@pytest.mark.parametrize("kind", few("weights", {kind: kind for kind in ("closure", "weights", "environment")}))
def test_workers_that_persist_keep_their_number(kind: str) -> None:
    expected, _ = run(kind, 1, persistent_workers=True)
    assert run(kind, 1, NumWorkersFinder(), persistent_workers=True) == (expected, {1})
