"""Samplers of the user's, which may read what training writes: who asks them further ahead gets the same batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from lightning_gpuopt import AutoFix, NumWorkersFinder
from lightning_gpuopt.compat.dataloader import running_workers
from lightning_gpuopt.compat.lightning import train_iterators
from lightning_gpuopt.compat.lightning_loops import length_of
from tests.callbacks.auto_fix_runs import Model, Numbers, finding, script
from tests.helpers import AfterBatch, tiny_trainer
from tests.lanes import combinations

pytestmark = [pytest.mark.usefixtures("wants_more"), pytest.mark.filterwarnings("ignore")]

LENGTH = 40
EPOCHS = 2


class Program:
    def __init__(self) -> None:
        self.losses = [1.0] * LENGTH
        self.trainer: Any = None
        self.sampler: Any = None
        self.step = 0


class OneByOne(Sampler[int]):
    def __init__(self, program: Program) -> None:
        self.program = program

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for index in range(LENGTH):
            yield self.pick(index)

    def pick(self, index: int) -> int:
        raise NotImplementedError


class HardFirst(OneByOne):
    """The sample with the largest loss next."""

    def __init__(self, program: Program) -> None:
        self.losses = program.losses

    def pick(self, index: int) -> int:
        return max(range(LENGTH), key=self.losses.__getitem__)


class HardOfDataset(HardFirst):
    def __init__(self, program: Program) -> None:
        self.data_source = Numbers(LENGTH)
        self.data_source.losses = program.losses  # type: ignore[attr-defined]

    def pick(self, index: int) -> int:
        return max(range(LENGTH), key=self.data_source.losses.__getitem__)  # type: ignore[attr-defined]


class Curriculum(OneByOne):
    def __init__(self, program: Program) -> None:
        self.program = program

    def pick(self, index: int) -> int:
        return min(index, self.program.trainer.global_step)


class ByClosure(OneByOne):
    def __init__(self, program: Program) -> None:
        self.hardest = lambda: max(range(LENGTH), key=program.losses.__getitem__)

    def pick(self, index: int) -> int:
        return self.hardest()


class OwnBatches(Sampler[list[int]]):
    """Its batch size is read for each batch."""

    def __init__(self, program: Program) -> None:
        self.batch_size = 2

    def __iter__(self) -> Iterator[list[int]]:
        first = 0
        while first < LENGTH:
            yield list(range(first, min(first + self.batch_size, LENGTH)))
            first += self.batch_size


class Buckets(Sampler[list[int]]):
    """Changes by its own iteration alone, and by the epoch."""

    def __init__(self, program: Program) -> None:
        self.epoch, self.given = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH // 2

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for first in range(0, LENGTH, 2):
            self.given += 1
            yield order[first : first + 2]


class AtOnce(OneByOne):
    def __iter__(self) -> Iterator[int]:
        return iter([LENGTH - 1 - index for index in range(LENGTH)])


class Draws(OneByOne):
    def pick(self, index: int) -> int:
        return int(torch.randint(LENGTH, ()))


class Heavy(OneByOne):
    """Holds more than can be compared for each batch."""

    def __init__(self, program: Program) -> None:
        self.by_class = [[[index] for index in range(100)] for _ in range(400)]
        self.turn = 0

    def pick(self, index: int) -> int:
        self.turn += 1
        return self.by_class[0][index % 40][0]


READ = (HardFirst, HardOfDataset, Curriculum, ByClosure, OwnBatches, Draws, Heavy)
SAMPLERS: dict[str, Callable[[Program], Any]] = {each.__name__: each for each in (*READ, Buckets, AtOnce)}
"""Those in ``READ`` are never asked earlier, ``Buckets`` once an epoch has shown what it reads, ``AtOnce`` at once."""


class Trains(Callback):
    """Writes losses after each step, and raises the batch size; notes the workers of each epoch."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.workers: list[set[int]] = []

    @property
    def most(self) -> list[int]:
        return [max(each) for each in self.workers]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.workers.append(set())
        if hasattr(self.program.sampler, "set_epoch"):
            self.program.sampler.set_epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        program = self.program
        program.step += 1
        for index in batch[:, 0].long().tolist():
            program.losses[index] = 1.0 - program.step / 1000
        if isinstance(program.sampler, OwnBatches) and program.step % 15 == 0:
            program.sampler.batch_size = 2 + program.step % 4
        (iterator,) = train_iterators(trainer)
        self.workers[-1].add(running_workers(trainer.train_dataloader, iterator))


def run(tmp_path: Path, kind: str, *monitors: Callback, workers: int, **options: Any) -> tuple[list[float], Trains]:
    torch.manual_seed(1)
    program = Program()
    program.sampler = sampler = SAMPLERS[kind](program)
    given = {"batch_sampler": sampler} if isinstance(sampler, (OwnBatches, Buckets)) else {"sampler": sampler}
    sized = {} if "batch_sampler" in given else {"batch_size": 2}
    loader = DataLoader(Numbers(LENGTH), num_workers=workers, **given, **sized, **options)
    trains, model = Trains(program), Model()
    program.trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=EPOCHS, callbacks=[trains, *monitors])
    program.trainer.fit(model, loader)
    return model.seen, trains


@cache
def plain(kind: str, **given: Any) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), kind, **given)[0]


def monitors_of(name: str) -> list[Callback]:
    if name == "finder":
        return [NumWorkersFinder()]
    settings = {"num_workers": 3} if name == "autofix" else {"prefetch_factor": 6}
    return [AutoFix(), script([finding("slow_storage", **settings)])]


CORE = [
    *(f"finder-{kind}-1" for kind in SAMPLERS if kind not in ("HardOfDataset", "ByClosure")),
    *(f"finder-{kind}-0" for kind in ("HardFirst", "Buckets", "AtOnce")),
    *("finder-AtOnce-persistent", "autofix-HardFirst-1", "prefetch-Buckets-1"),
]


@combinations(
    " ".join(CORE),
    monitor=["finder", "autofix", "prefetch"],
    kind=list(SAMPLERS),
    given={"0": {"workers": 0}, "1": {"workers": 1}, "persistent": {"workers": 1, "persistent_workers": True}},
)
def test_batches_are_as_without(tmp_path: Path, kind: str, monitor: str, given: dict[str, Any]) -> None:
    workers = given["workers"]
    seen, trains = run(tmp_path, kind, *monitors_of(monitor), **given)
    assert seen == plain(kind, **given)
    if SAMPLERS[kind] in READ:
        assert trains.most == [workers] * EPOCHS
    elif monitor == "finder":
        assert trains.most[-1] > workers
    if kind == "Buckets":
        assert trains.most[0] == workers
    if kind == "AtOnce" and workers and monitor == "finder":
        assert trains.most[0] > workers


def test_a_choice_that_waits_for_an_epoch_is_the_choice(tmp_path: Path) -> None:
    finder = NumWorkersFinder()
    choices: list[int | None] = []
    asks = AfterBatch(lambda trainer, _: choices.append(finder.optimal_num_workers))
    run(tmp_path, "Buckets", finder, asks, workers=0)
    assert choices[5] == 1  # though none runs before an epoch was seen
    assert not finder.choices[0].settled or choices[-1] > 1


def test_once_a_batch_size_is_raised_in_mid_epoch_the_next_is_asked_as_the_user_has_set_it(tmp_path: Path) -> None:
    batches = BatchSampler(SequentialSampler(range(LENGTH)), 2, drop_last=False)
    loader = DataLoader(Numbers(LENGTH), batch_sampler=batches, num_workers=1)
    trains = Trains(Program())

    def raises(trainer: Any, batch_idx: int) -> None:
        if trainer.global_step == 50:
            batches.batch_size = 4

    callbacks = [trains, AfterBatch(raises), NumWorkersFinder()]
    trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=4, callbacks=callbacks)
    with pytest.warns(UserWarning, match="reads state that changes while training runs") as said:
        trainer.fit(Model(), loader)
    assert len([each for each in said if "reads state that changes" in str(each.message)]) == 1
    assert (trains.most[-1], trains.most[1] > 1) == (1, True)
    assert (loader.num_workers, length_of(loader)) == (1, 10)
