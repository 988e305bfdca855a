"""Samplers of the user's, which may read what training writes: who asks them further ahead gets the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.callbacks.test_what_is_left_alone import _wants_more  # noqa: F401
from tests.helpers import tiny_trainer
from tests.lanes import combinations

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 80
EPOCHS = 4


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


class OfTorch(OneByOne):
    def __iter__(self) -> Iterator[int]:
        return iter(SequentialSampler(range(LENGTH)))


READ: dict[str, Callable[[Program], Any]] = {
    each.__name__: each for each in (HardFirst, HardOfDataset, Curriculum, ByClosure, OwnBatches)
}
LATER = {"Buckets": Buckets}
KNOWN = {"AtOnce": AtOnce, "OfTorch": OfTorch}
SAMPLERS = {**READ, **LATER, **KNOWN}


class Trains(Callback):
    """Writes losses after each step, and raises the batch size; notes the workers of each epoch."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.workers: list[set[int]] = []
        self.ahead: list[int] = []

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


def run(tmp_path: Path, kind: str, workers: int, *monitors: Callback, **options: Any) -> tuple[list[float], Trains]:
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


def monitors_of(name: str) -> list[Callback]:
    if name == "finder":
        return [NumWorkersFinder()]
    settings = {"num_workers": 3} if name == "autofix" else {"prefetch_factor": 6}
    return [AutoFix(), script([finding("slow_storage", **settings)])]


CORE = [
    *(f"finder-{kind}-{persistent}" for kind in SAMPLERS for persistent in (False, True)),
    *(
        f"{monitor}-{kind}-False"
        for monitor in ("autofix", "prefetch")
        for kind in ("HardFirst", "OwnBatches", "Buckets")
    ),
]


@combinations(" ".join(CORE), monitor=["finder", "autofix", "prefetch"], kind=list(SAMPLERS), persistent=[False, True])
def test_batches_are_as_without_from_one_worker_on(tmp_path: Path, kind: str, monitor: str, persistent: bool) -> None:
    expected, _ = run(tmp_path, kind, 1, persistent_workers=persistent)
    seen, trains = run(tmp_path, kind, 1, *monitors_of(monitor), persistent_workers=persistent)
    assert seen == expected
    if monitor == "prefetch":
        return
    most = [max(each) for each in trains.workers]
    if kind in READ:
        assert most == [1] * EPOCHS
    if kind in LATER:
        assert most[0] == 1
    if kind not in READ and monitor == "finder":
        assert most[-1] > 1
    if kind in KNOWN and monitor == "finder":
        assert most[0] > 1


@combinations(" ".join(f"finder-{kind}" for kind in SAMPLERS), monitor=["finder", "autofix"], kind=list(SAMPLERS))
def test_and_from_none(tmp_path: Path, kind: str, monitor: str) -> None:
    expected, _ = run(tmp_path, kind, 0)
    seen, trains = run(tmp_path, kind, 0, *monitors_of(monitor))
    assert seen == expected
    most = [max(each) for each in trains.workers]
    if kind in READ:
        assert most == [0] * EPOCHS
    elif monitor == "finder":
        assert (most[0], most[-1] > 0) == (0 if kind in LATER else most[0], True)


class Heavy(OneByOne):
    """Holds more than can be compared for each batch."""

    def __init__(self, program: Program) -> None:
        self.by_class = [[[index] for index in range(100)] for _ in range(400)]
        self.turn = 0

    def pick(self, index: int) -> int:
        self.turn += 1
        return self.by_class[0][index % 40][0]


def test_a_sampler_that_holds_too_much_to_be_watched_is_left_alone(tmp_path: Path) -> None:
    SAMPLERS["Heavy"] = Heavy
    try:
        expected, _ = run(tmp_path, "Heavy", 1)
        seen, trains = run(tmp_path, "Heavy", 1, NumWorkersFinder())
    finally:
        del SAMPLERS["Heavy"]
    assert seen == expected
    assert [max(each) for each in trains.workers] == [1] * EPOCHS


def test_a_choice_that_waits_for_an_epoch_is_the_choice(tmp_path: Path) -> None:
    finder = NumWorkersFinder()
    choices: list[int | None] = []

    class Asks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                choices.append(finder.optimal_num_workers)

    run(tmp_path, "Buckets", 0, finder, Asks())
    assert choices[0] == 1  # though none runs before an epoch was seen
    assert not finder.choices[0].settled or choices[-1] > 1


class RaisesLate(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 100:
            trainer.train_dataloader.batch_sampler.batch_size = 4


def test_once_a_batch_size_is_raised_in_mid_epoch_the_next_is_asked_as_the_user_has_set_it(tmp_path: Path) -> None:
    batches = BatchSampler(SequentialSampler(range(LENGTH)), 2, drop_last=False)
    loader = DataLoader(Numbers(LENGTH), batch_sampler=batches, num_workers=1)
    program = Program()
    trains = Trains(program)
    callbacks = [trains, RaisesLate(), NumWorkersFinder()]
    trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=EPOCHS, callbacks=callbacks)
    with pytest.warns(UserWarning, match="reads what changes while training runs") as said:
        trainer.fit(Model(), loader)
    assert len([each for each in said if "reads what changes" in str(each.message)]) == 1
    assert [max(each) for each in trains.workers][-1:] == [1]
    assert max(trains.workers[1]) > 1
    assert (loader.num_workers, length_of(loader)) == (1, 20)
