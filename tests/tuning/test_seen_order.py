"""What is seen of samplers as they are iterated: torch's own, and those of users."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.tuning.rules import AskedChange, why_not
from lightning_gpuopt.tuning.seen_order import SeenOrder

DATA = TensorDataset(torch.zeros(300, 1))
FIRST = "its sampler (Own) may read what training writes; one epoch must be observed first"


class Own(Sampler[int]):
    """Draws as it is told.

    Args:
        draw: draws one index; None: a permutation at the beginning of each epoch.
        every: draws so many indices at a time.
    """

    def __init__(self, draw: Any = None, every: int = 1) -> None:
        self.draw, self.every = draw, every

    def __iter__(self) -> Iterator[int]:
        torch.randperm(300)
        for number in range(300):
            if self.draw is not None and number % self.every == 0:
                self.draw()
            yield number

    def __len__(self) -> int:
        return 300


def seen(loader: DataLoader[Any], between: Any = None) -> SeenOrder:
    """What is seen in an epoch of a loader, with something done between its batches."""
    order = SeenOrder()
    for _ in order.watched(loader):
        order.turns += 1
        if between is not None:
            between()
    return order


@pytest.mark.parametrize(
    "kwargs",
    [
        {"shuffle": True},
        {"sampler": SequentialSampler(DATA)},
        {"sampler": RandomSampler(DATA, replacement=True)},
        {"sampler": SubsetRandomSampler(range(300))},
        {"sampler": WeightedRandomSampler([1.0] * 300, 300)},
        {"sampler": DistributedSampler(DATA, 2, 0)},
        {"sampler": list(range(300))},
        {"batch_sampler": [[0, 1], [2, 3]]},
        {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=False)},
    ],
)
def test_torch_s_own_may_be_asked_earlier_at_once(kwargs: dict[str, Any]) -> None:
    assert SeenOrder().why_not_ahead(DataLoader(DATA, **kwargs)) is None


@pytest.mark.parametrize("kwargs", [{"sampler": Own()}, {"batch_sampler": BatchSampler(Own(), 4, drop_last=True)}])
def test_one_of_the_user_s_after_an_epoch_that_has_shown_nothing(kwargs: dict[str, Any]) -> None:
    loader = DataLoader(DATA, **kwargs)
    assert SeenOrder().why_not_ahead(loader) == FIRST
    order = seen(loader)
    assert order.why_not_ahead(loader) is None
    assert not order.is_list


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.random])
@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_that_draws_as_it_goes_may_never(draw: Any, every: int, batch_size: int) -> None:
    loader = DataLoader(DATA, sampler=Own(draw, every), batch_size=batch_size)
    reason = seen(loader).why_not_ahead(loader)
    assert reason == "its sampler (Own) draws random numbers for each index: the order would change"


def test_what_is_drawn_is_what_would_have_been_drawn() -> None:
    loader = DataLoader(DATA, sampler=Own(random.random), batch_size=2)
    after = []
    for sampler in (loader.batch_sampler, SeenOrder().watched(loader)):
        torch.manual_seed(1)
        random.seed(1)
        after.append((list(sampler), RandomStates()))  # type: ignore[arg-type]
    assert after[0] == after[1]


def test_the_global_generator_by_another_name() -> None:
    loader = DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True, generator=torch.default_generator))
    assert "draws from the global generator" in (SeenOrder().why_bound(loader) or "")


class Lists(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(300).tolist())


class AsTorch(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(RandomSampler(DATA))


@pytest.mark.parametrize("kind", [Lists, AsTorch])
@pytest.mark.parametrize("drop_last", [False, True])
def test_one_that_gives_a_list_is_known_from_the_first_batch_on(kind: type[Own], drop_last: bool) -> None:
    sampler = kind()
    loader = DataLoader(DATA, sampler=sampler, batch_size=4, drop_last=drop_last)
    order = SeenOrder()
    next(iter(order.watched(loader)))
    assert order.is_list
    assert order.is_known(loader)
    assert loader.batch_sampler.sampler is sampler  # type: ignore[union-attr]


class Holds(Own):
    """Gives a list that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: Any = list(range(300))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def _in_place(sampler: Any) -> None:
    sampler.indices[:] = sampler.indices[1:] + sampler.indices[:1]


def _anew(sampler: Any) -> None:
    sampler.indices = list(reversed(sampler.indices))


@pytest.mark.parametrize(
    ("sampler", "writes", "tells"),
    [
        (Holds(), _in_place, True),
        (Holds(), _anew, False),  # of which the next epoch is made, and not this one
        (Holds(), lambda sampler: None, False),
        (SubsetRandomSampler(list(range(300))), _in_place, True),
        (SubsetRandomSampler(list(range(300))), _anew, True),
        (SubsetRandomSampler(list(range(300))), lambda sampler: None, False),
        (list(range(300)), lambda sampler: sampler.reverse(), True),
        (list(range(300)), lambda sampler: None, False),
    ],
)
def test_a_list_that_training_writes_to(sampler: Any, writes: Any, tells: bool) -> None:
    loader = DataLoader(DATA, sampler=sampler, batch_size=30)
    reason = seen(loader, lambda: writes(sampler)).why_not_ahead(loader)
    assert ("reads state that changes while training runs" in (reason or "")) is tells


class FillsAnew(Own):
    def __iter__(self) -> Iterator[Any]:
        batch = [0, 0]
        for number in range(0, 300, 2):
            batch[:] = [number, number + 1]
            yield batch


def test_one_list_for_all_batches() -> None:
    loader = DataLoader(DATA, batch_sampler=FillsAnew())
    assert "reuses one list for all batches" in (seen(loader).why_not_ahead(loader) or "")


class DrawsAtTheEnd(Own):
    def __iter__(self) -> Iterator[int]:
        yield from (number for number in range(300))
        torch.rand(())


def test_one_that_draws_as_it_ends() -> None:
    loader = DataLoader(DATA, sampler=DrawsAtTheEnd(), batch_size=30)
    assert "draws random numbers" in (seen(loader).why_not_ahead(loader) or "")


@pytest.mark.parametrize("wrap", [list, tuple])
def test_lists_in_a_copied_list_that_training_writes_to(wrap: Any) -> None:
    batches = [[number, number + 1] for number in range(0, 40, 2)]
    sampler: Any = Own()
    sampler.batches = batches
    type(sampler).__iter__, before = lambda self: iter(wrap(self.batches)), type(sampler).__iter__
    try:
        loader = DataLoader(DATA, batch_sampler=sampler)
        reason = seen(loader, lambda: batches[-1].reverse()).why_not_ahead(loader)
    finally:
        type(sampler).__iter__ = before
    assert "reads state that changes while training runs" in (reason or "")


class Follows(Own):
    """Reads what training writes into it."""

    told = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(300):
            yield (number + self.told) % 300


def test_one_that_training_writes_to_may_never() -> None:
    sampler = Follows()
    loader = DataLoader(DATA, sampler=sampler, batch_size=30)
    reason = seen(loader, lambda: setattr(sampler, "told", sampler.told + 1)).why_not_ahead(loader)
    assert reason == (
        "its sampler (Follows) reads state that changes while training runs: read earlier, it would give other batches"
    )


def test_a_batch_size_that_training_changes() -> None:
    batches = BatchSampler(SequentialSampler(DATA), 4, drop_last=False)
    loader = DataLoader(DATA, batch_sampler=batches)
    sizes = itertools.count(5)
    assert "reads state that changes" in (
        seen(loader, lambda: setattr(batches, "batch_size", next(sizes))).why_not_ahead(loader) or ""
    )


class Sized(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.size = 32

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self.size)


class Sizes(Sampler[int]):
    """Gives the dataset another size as it goes on, or only reads it."""

    def __init__(self, dataset: Sized, *, writes: bool) -> None:
        self.dataset, self.writes = dataset, writes

    def __iter__(self) -> Iterator[int]:
        for index in range(len(self.dataset)):
            if self.writes:
                self.dataset.size = 32 + index
            yield index


@pytest.mark.parametrize("writes", [False, True])
def test_one_that_changes_the_dataset_may_never(writes: bool) -> None:
    dataset = Sized()
    loader = DataLoader(dataset, sampler=Sizes(dataset, writes=writes), batch_size=2)
    reason = seen(loader).why_not_ahead(loader)
    told = "its sampler (Sizes) changes the dataset while it is iterated: read earlier, the dataset would differ"
    assert reason == (told if writes else None)


def test_one_that_holds_a_model_may_never() -> None:
    sampler: Any = Own()
    sampler.model = torch.nn.Linear(2, 2)
    loader = DataLoader(DATA, sampler=sampler)
    assert "reads what training changes" in (seen(loader).why_not_ahead(loader) or "")


def test_of_a_loader_that_cannot_be_watched_the_order_has_to_be_known() -> None:
    for sampler, served in ((Own(), False), (RandomSampler(DATA), True)):
        source = StatefulDataLoader(DATA, batch_size=2, sampler=sampler, num_workers=1)
        reason = why_not(AskedChange(source, "num_workers", 2, 1, before_first=True))
        assert (reason is None) is served
        assert served or "may read what training writes" in (reason or "")


class KeepsPlace(Own):
    """Goes on where it was: as those do that never end, or that a resumed run goes on with."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(300):
            self.place += 1
            yield self.place % 300


@pytest.mark.parametrize("leaves", [False, True])
def test_one_that_keeps_its_place_may_not_where_epochs_end_before_it(leaves: bool) -> None:
    loader, order = DataLoader(DATA, sampler=KeepsPlace(), batch_size=2), SeenOrder()
    for number, _ in enumerate(order.watched(loader)):
        order.turns += 1
        if leaves and number == 20:
            break
    order.watched(loader)
    assert ("keeps its position" in (order.why_not_ahead(loader) or "")) is leaves
