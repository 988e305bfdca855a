"""Samples that depend on what training changes, with workers that come while it runs: each batch is as without."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_gpuopt import AutoFix, NumWorkersFinder
from lightning_gpuopt.compat.dataloader import running_workers
from lightning_gpuopt.compat.lightning import train_iterators
from tests.callbacks.auto_fix_runs import Model, finding, script
from tests.callbacks.test_what_is_left_alone import _wants_more  # noqa: F401
from tests.helpers import tiny_trainer
from tests.lanes import combinations

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 80
SETTINGS = types.ModuleType("settings_of_a_program")
SETTINGS.added = 0  # type: ignore[attr-defined]
ADDED = 0
HELD: dict[str, float] = {"added": 0}


class Program:
    """What training changes: the Trainer, its module, and the rest of what a script has."""

    def __init__(self) -> None:
        self.model = Model()
        self.trainer: Any = None
        self.changes: Callable[[int], None] = lambda step: None


class Samples(Dataset[torch.Tensor]):
    """Sample ``i`` is ``[i + what is added, 0]``."""

    def __init__(self, added: Callable[[], float]) -> None:
        self.added = added

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index) + float(self.added()), 0.0])


class Has:
    """An object with a state, and a method that reads it."""

    def __init__(self) -> None:
        self.added = 0.0

    def read(self) -> float:
        return self.added

    def collate(self, samples: Any) -> Any:
        return default_collate(samples) + self.added

    def begin(self, worker: int) -> None:
        HELD["begun"] = self.added

    def set(self, step: int) -> None:
        self.added = step


class OfAClass:
    added: ClassVar[float] = 0.0

    @classmethod
    def read(cls) -> float:
        return cls.added


class Derived(OfAClass):
    pass


class ReadsAProperty:
    @property
    def value(self) -> float:
        return HELD["added"]

    def read(self) -> float:
        return self.value


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.added = 0.0

    def collate(self, samples: Any) -> Any:
        return default_collate(samples) + self.more()

    def more(self) -> float:
        return self.added

    def collate_by_name(self, samples: Any) -> Any:
        return default_collate(samples) + getattr(self, "add" + "ed")


def of_module(program: Program) -> dict[str, Any]:
    program.changes = lambda step: setattr(SETTINGS, "added", step)
    return {"added": lambda: SETTINGS.added}


def of_global(program: Program) -> dict[str, Any]:
    program.changes = lambda step: globals().update(ADDED=step)
    return {"added": lambda: ADDED}


def of_global_dict(program: Program) -> dict[str, Any]:
    program.changes = lambda step: HELD.update(added=step)
    return {"added": lambda: HELD["added"]}


def inner() -> float:
    return HELD["added"]


def of_called_function(program: Program) -> dict[str, Any]:
    program.changes = lambda step: HELD.update(added=step)
    return {"added": lambda: inner()}


def of_environment(program: Program) -> dict[str, Any]:
    program.changes = lambda step: os.environ.__setitem__("ADDED_TO_SAMPLES", str(step))
    return {"added": lambda: float(os.environ.get("ADDED_TO_SAMPLES", 0))}


def of_class(program: Program) -> dict[str, Any]:
    program.changes = lambda step: setattr(OfAClass, "added", step)
    return {"added": OfAClass.read}


def of_base_class(program: Program) -> dict[str, Any]:
    program.changes = lambda step: setattr(OfAClass, "added", step)
    return {"added": Derived().read}


def of_property(program: Program) -> dict[str, Any]:
    program.changes = lambda step: HELD.update(added=step)
    return {"added": ReadsAProperty().read}


def of_bound_method(program: Program) -> dict[str, Any]:
    has = Has()
    program.changes = has.set
    return {"added": has.read}


def of_collate(program: Program) -> dict[str, Any]:
    has = Has()
    program.changes = has.set
    return {"collate_fn": has.collate}


def of_start(program: Program) -> dict[str, Any]:
    has = Has()
    program.changes = has.set
    return {"added": lambda: HELD.get("begun", 0.0), "worker_init_fn": has.begin}


def of_closure(program: Program) -> dict[str, Any]:
    added = 0.0

    def change(step: int) -> None:
        nonlocal added
        added = step

    program.changes = change
    return {"added": lambda: added}


def of_default(program: Program) -> dict[str, Any]:
    held = [0.0]
    program.changes = lambda step: held.__setitem__(0, step)
    return {"added": lambda held=held: held[0]}


def of_keyword_default(program: Program) -> dict[str, Any]:
    def read(*, added: float = 0.0) -> float:
        return added

    program.changes = lambda step: setattr(read, "__kwdefaults__", {"added": float(step)})
    return {"added": read}


def of_partial(program: Program) -> dict[str, Any]:
    held = {"added": 0.0}
    program.changes = lambda step: held.update(added=step)
    return {"added": functools.partial(lambda held: held["added"], held)}


def of_wrapped(program: Program) -> dict[str, Any]:
    has = Has()

    def read() -> float:
        return has.added

    @functools.wraps(read)
    def around(*args: Any) -> Any:
        return around.__wrapped__(*args)  # type: ignore[attr-defined]

    program.changes = has.set
    return {"added": around}


def of_array(program: Program) -> dict[str, Any]:
    held = np.zeros(3)
    program.changes = lambda step: held.__setitem__(1, step)
    return {"added": lambda: held[1]}


def of_large_tensor(program: Program) -> dict[str, Any]:
    held = torch.zeros(100_000)
    program.changes = lambda step: held[77_777].fill_(step)  # type: ignore[assignment]
    return {"added": lambda: held[77_777]}


def of_long_list(program: Program) -> dict[str, Any]:
    held = [0.0] * 4_000
    program.changes = lambda step: held.__setitem__(777, step)
    return {"added": lambda: held[777]}


def of_large_dict(program: Program) -> dict[str, Any]:
    held = dict.fromkeys(range(4_000), 0.0)
    program.changes = lambda step: held.__setitem__(777, step)
    return {"added": lambda: held[777]}


def of_buffer(program: Program) -> dict[str, Any]:
    module = torch.nn.BatchNorm1d(1, affine=False)
    program.changes = lambda step: module.running_mean.fill_(step)  # type: ignore[assignment,union-attr]
    return {"added": lambda: module.running_mean[0]}  # type: ignore[index]


def of_datamodule(program: Program) -> dict[str, Any]:
    data = Data()
    program.changes = lambda step: setattr(data, "added", step)
    return {"added": lambda: data.added}


def of_datamodule_method(program: Program) -> dict[str, Any]:
    data = Data()
    program.changes = lambda step: setattr(data, "added", step)
    return {"collate_fn": data.collate}


def of_datamodule_by_name(program: Program) -> dict[str, Any]:
    data = Data()
    program.changes = lambda step: setattr(data, "added", step)
    return {"collate_fn": data.collate_by_name}


def of_weights(program: Program) -> dict[str, Any]:
    return {"added": lambda: program.model.layer.weight[0, 0].detach().tanh()}


def of_layer(program: Program) -> dict[str, Any]:
    layer = program.model.layer
    return {"added": lambda: layer.weight[0, 0].detach().tanh()}


def of_global_step(program: Program) -> dict[str, Any]:
    return {"added": lambda: program.trainer.global_step}


def of_metric(program: Program) -> dict[str, Any]:
    metric = torchmetrics.SumMetric(sync_on_compute=False)  # a worker is no rank
    program.changes = metric.update
    return {"added": lambda: metric.compute() % 40}


def of_optimizer(program: Program) -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    program.changes = lambda step: optimizer.param_groups[0].update(lr=step)
    return {"added": lambda: optimizer.param_groups[0]["lr"]}


class Counts(Callback):
    added = 0.0


def of_callback(program: Program) -> dict[str, Any]:
    callback = Counts()
    callback.steps = 0  # type: ignore[attr-defined]
    program.changes = lambda step: setattr(callback, "steps", step)
    return {"added": lambda: callback.steps}  # type: ignore[attr-defined]


KINDS = {name[3:]: each for name, each in list(globals().items()) if name.startswith("of_")}
TRAINED = {"datamodule", "datamodule_by_name", "weights", "layer", "global_step", "metric", "optimizer", "callback"}


class Changes(Callback):
    """Changes something after each few steps; notes the workers."""

    def __init__(self, program: Program) -> None:
        self.program, self.workers = program, set[int]()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        (iterator,) = train_iterators(trainer)
        self.workers.add(running_workers(trainer.train_dataloader, iterator))
        if trainer.global_step % 3 == 1:
            self.program.changes(trainer.global_step)


@pytest.fixture(autouse=True)
def _as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ADDED_TO_SAMPLES", raising=False)
    SETTINGS.added = OfAClass.added = 0.0  # type: ignore[attr-defined]
    globals().update(ADDED=0)
    HELD.clear()
    HELD["added"] = 0.0


def run(tmp_path: Path, kind: str, workers: int, *monitors: Callback, **options: Any) -> tuple[list[float], Changes]:
    torch.manual_seed(1)
    program = Program()
    given = KINDS[kind](program)
    samples = Samples(given.pop("added", lambda: 0.0))
    loader = DataLoader(samples, batch_size=2, num_workers=workers, shuffle=True, **given, **options)
    changes = Changes(program)
    program.trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=3, callbacks=[changes, *monitors])
    program.trainer.fit(program.model, loader)
    return program.model.seen, changes


def monitors_of(name: str) -> list[Callback]:
    if name == "finder":
        return [NumWorkersFinder()]
    return [AutoFix(), script([finding("slow_storage", num_workers=3)])]


CORE = " ".join(
    f"{monitor}-{workers}-{kind}"
    for monitor, kinds in (("finder", KINDS), ("autofix", ("closure", "global", "weights", "environment")))
    for workers in (0, 1)
    for kind in kinds
)


@combinations(CORE, monitor=["finder", "autofix"], workers=[0, 1], kind=list(KINDS))
def test_batches_are_as_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int, monitor: str
) -> None:
    expected, _ = run(tmp_path, kind, workers)
    _as_at_first.__wrapped__(monkeypatch)
    seen, changes = run(tmp_path, kind, workers, *monitors_of(monitor))
    assert seen == expected
    if not workers and kind in TRAINED:
        assert changes.workers == {0}
    if workers:
        assert max(changes.workers) > 1, "from one worker on, the next epoch has more"


@pytest.mark.parametrize("kind", ["closure", "weights", "environment"])
def test_workers_that_persist_keep_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    expected, _ = run(tmp_path, kind, 1, persistent_workers=True)
    _as_at_first.__wrapped__(monkeypatch)
    seen, changes = run(tmp_path, kind, 1, NumWorkersFinder(), persistent_workers=True)
    assert (seen, changes.workers) == (expected, {1})
