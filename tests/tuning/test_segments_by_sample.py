"""Segments in which each sample is a task: same samples, same order, the same batches bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from lightning_gpuopt.compat.dataloader import workers_of
from lightning_gpuopt.loading.engine.iterator import EngineIterator
from lightning_gpuopt.loading.engine.shared_blocks import BlockRing
from lightning_gpuopt.tuning.segments import Segments
from tests.helpers import wait_for
from tests.loaders.programs import nothing_is_left
from tests.tuning.test_segments import segmented

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    torch.manual_seed(0)
    with nothing_is_left(collect=True):
        yield


class Records(Dataset[Any]):
    """Tensors, arrays, numbers and texts of a sample; some samples may be odd, or fail."""

    def __init__(self, length: int = 120, *, odd: tuple[int, ...] = (), fails_at: int = -1, dies_at: int = -1) -> None:
        self.length, self.odd, self.fails_at, self.dies_at = length, odd, fails_at, dies_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise ValueError(f"sample {index} is corrupt")
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        wide = np.arange(3, dtype=np.float32) * index
        name = f"sample {index}" + " which is long" * (1000 if index in self.odd else 0)
        return torch.full((2, 3), float(index)), {"wide": wide, "index": index, "name": name}, index / 7


class Drawn(Records):
    """Samples with draws from the three global random states."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()), np.random.rand(), random.random()


def loader(dataset: Dataset[Any] | None = None, workers: int = 2, **given: Any) -> DataLoader[Any]:
    return DataLoader(
        Records() if dataset is None else dataset,
        **{
            "batch_size": 8,
            "shuffle": True,
            "num_workers": workers,
            "generator": torch.Generator().manual_seed(3),
            **given,
        },
    )


def epoch(source: DataLoader[Any], plan: dict[int, bool], *, reads: bool = False) -> list[Any]:
    """One epoch; after some batches each sample becomes a task, or each batch."""
    if "_get_iterator" not in vars(source):
        own = source.num_workers
        vars(source)["_get_iterator"] = lambda: segmented(source, own)
    iterator: Any = iter(source)
    if -1 in plan:
        Segments.of(source).by_sample = plan[-1]
    seen = []
    for number, batch in enumerate(iterator):
        seen.append(batch)
        if number in plan:
            iterator.read_by_sample(plan[number])
            assert Segments.of(source).by_sample == plan[number]
    return seen


def same(here: Any, there: Any) -> bool:
    if type(here) is not type(there):
        return False
    if isinstance(here, torch.Tensor):
        return here.dtype == there.dtype and torch.equal(here, there)
    if isinstance(here, dict):
        return here.keys() == there.keys() and all(same(here[key], there[key]) for key in here)
    if isinstance(here, (list, tuple)):
        return len(here) == len(there) and all(map(same, here, there))
    return bool(here == there)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("plan", [{0: True}, {3: True, 9: False}, {5: True, 6: False, 7: True}, {13: True, 14: False}])
def test_batches_and_random_states_are_as_without(plan: dict[int, bool], persistent: bool) -> None:
    plain, changed = (loader(persistent_workers=persistent) for _ in range(2))
    for _ in range(3):
        assert same(epoch(changed, plan), list(plain))
        assert changed.generator.get_state().tolist() == plain.generator.get_state().tolist()  # type: ignore[union-attr]
    vars(changed).clear()  # its persistent workers end with it


def test_each_sample_is_a_task_from_the_change_on_and_in_later_epochs() -> None:
    source = loader()
    iterator: Any = segmented(source)
    next(iterator)
    iterator.read_by_sample(True)
    before, now = iterator.gpuopt_parts
    assert type(before) is not EngineIterator
    assert type(now) is EngineIterator
    assert len(workers_of(iterator)) == 4
    assert len(list(iterator)) == 14
    again: Any = segmented(source)
    assert [type(each) for each in again.gpuopt_parts] == [EngineIterator]
    assert again.resize(1) == 1
    assert len(list(again)) == 15


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_failure_of_its_own_goes_back_to_torchs_workers(
    monkeypatch: pytest.MonkeyPatch, persistent: bool, at_once: bool
) -> None:
    """Such as no memory for another batch; in the middle of an epoch, or as one begins."""

    def full(*args: Any) -> Any:
        raise OSError("no space is left")

    source = loader(persistent_workers=persistent)
    vars(source)["_get_iterator"] = lambda: segmented(source, 2)
    expected = loader(persistent_workers=persistent)
    first: Any = iter(source)
    seen = [next(first)]
    first.read_by_sample(True)
    if at_once:
        monkeypatch.setattr(BlockRing, "take", full)
    seen += list(first)
    assert same(seen, list(expected))
    monkeypatch.setattr(BlockRing, "take", full)
    assert same(list(source), list(expected))
    assert "no space is left" in str(Segments.of(source).why_by_batch)
    assert not Segments.of(source).by_sample
    vars(source).clear()
    vars(expected).clear()


def test_workers_that_persist_give_way_in_the_next_epoch() -> None:
    source = loader(persistent_workers=True)
    vars(source)["_get_iterator"] = lambda: segmented(source, 2)
    plain = loader(persistent_workers=True)
    for wanted in (False, True, True, False):
        Segments.of(source).by_sample = wanted
        assert same(list(source), list(plain))
        assert source._iterator.reads_by_sample == wanted  # type: ignore[union-attr]
    vars(source).clear()


def test_where_memory_allows_no_two_sets_of_workers_one_ends_first() -> None:
    iterator: Any = segmented(loader(shuffle=False))
    seen = [next(iterator)]
    before = {each.pid for each in workers_of(iterator)}
    iterator.read_by_sample(True, overlap=False)
    assert not before & {each.pid for each in multiprocessing.active_children()}
    assert iterator.reads_by_sample
    assert same(seen + list(iterator), list(loader(shuffle=False)))


def test_random_draws_belong_to_the_epoch_and_the_position_in_it() -> None:
    """Wherever the change lies, and however many processes there are."""
    ends = []
    for changed_at, workers in ((1, 1), (4, 3)):
        source = loader(Drawn(), workers)
        first, second = epoch(source, {changed_at: True}), epoch(source, {})
        ends.append((first[12:], second))
    assert same(ends[0], ends[1])
    drawn = torch.cat([torch.stack([batch[at] for batch in second]) for at in (1, 2, 3)]).flatten().tolist()
    assert len(set(drawn)) == 3 * 120
    assert not set(drawn) & {each for batch in first[12:] for each in batch[1].tolist()}


@pytest.mark.parametrize("persistent", [False, True])
def test_what_a_sample_raises_comes_in_its_turn_and_the_epoch_goes_on(persistent: bool) -> None:
    source = loader(Records(fails_at=77), shuffle=False, persistent_workers=persistent)
    iterator: Any = segmented(source)
    seen: list[Any] = [next(iterator)]
    iterator.read_by_sample(True)
    while len(seen) < 15:
        try:
            seen.append(next(iterator))
        except ValueError as error:
            seen.append(str(error).splitlines()[-1])
    assert [each if isinstance(each, str) else each[1]["index"][0].item() for each in seen] == [
        "ValueError: sample 77 is corrupt" if first == 72 else first for first in range(0, 120, 8)
    ]


def test_a_process_that_dies_is_given_back_to_torchs_workers_and_no_sample_is_lost() -> None:
    source = loader(shuffle=False)
    iterator: Any = segmented(source)
    seen = [next(iterator)]
    iterator.read_by_sample(True)
    seen += [next(iterator) for _ in range(8)]
    engine = iterator.gpuopt_parts[-1]
    assert type(engine) is EngineIterator
    worker = workers_of(engine)[0]
    worker.kill()
    wait_for(lambda: not worker.is_alive(), 10)
    seen += list(iterator)
    assert same(seen, list(loader(shuffle=False)))
    why = Segments.of(source).why_by_batch
    if why is not None:  # it was noticed before all was read
        assert why.startswith("a worker died: DataLoader worker (pid")
        assert not iterator.reads_by_sample
        assert iterator.num_workers == 2


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dataset": Records(odd=tuple(range(0, 120, 2)))}, None),
        ({"batch_sampler": BatchSampler(RandomSampler(range(120)), 8, True)}, None),
        (
            {
                "sampler": [f"{number}" for number in range(120)],
                "dataset": {f"{number}": number for number in range(120)},
            },
            "other keys",
        ),
    ],
    ids=["odd", "batch_sampler", "keys"],
)
def test_what_cannot_be_a_task_goes_on_as_before(given: dict[str, Any], why: str | None) -> None:
    if "batch_sampler" in given:
        given = {**given, "batch_size": 1, "shuffle": None}
    elif "sampler" in given:
        given = {**given, "shuffle": None}
    torch.manual_seed(3)
    expected = list(loader(**given))
    torch.manual_seed(3)
    source = loader(**given)
    iterator: Any = segmented(source)
    seen = [next(iterator)]
    iterator.read_by_sample(True)
    found = Segments.of(source).why_by_batch
    assert (found is None) == (why is None)
    assert found is None or why in found
    assert Segments.of(source).by_sample == iterator.reads_by_sample == (why is None)
    assert iterator.samples_differ is False
    seen += [next(iterator) for _ in expected[2:]]
    assert iterator.samples_differ == ("dataset" in given and why is None)
    seen += list(iterator)
    assert same(seen, expected)
