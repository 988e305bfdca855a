"""When samplers draw: torch's own, and those of users."""

from __future__ import annotations

import errno
import functools
import itertools
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
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
from lightning_gpuopt.tuning import sampler_draws
from lightning_gpuopt.tuning.rules import AskedChange, why_not
from lightning_gpuopt.tuning.sampler_draws import why_not_earlier

DATA = TensorDataset(torch.zeros(300, 1))


class Own(Sampler[int]):
    """Counts its epochs, and draws as it is told.

    Args:
        draw: draws one index; None: a permutation at the beginning of each epoch.
        every: draws so many indices at a time.
        endless: goes on for ever.
    """

    def __init__(self, draw: Any = None, every: int = 1, *, endless: bool = False) -> None:
        self.draw, self.every, self.endless = draw, every, endless
        self.epochs, self.generator_of_its_own = 0, torch.Generator().manual_seed(1)
        self.dataset = DATA

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        order = torch.randperm(300, generator=None if self.draw is None else self.generator_of_its_own).tolist()
        for number in itertools.count() if self.endless else range(300):
            if self.draw is not None and number % self.every == 0:
                self.draw()
            yield order[number % 300]

    def __len__(self) -> int:
        return 300


class Sized(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.size, self.by_epoch = 32, [0]

    def __len__(self) -> int:
        return 40


class Sizes(Sampler[int]):
    """Gives the dataset another size as it goes on, and counts epochs in it."""

    def __init__(self, dataset: Sized, *, within: bool) -> None:
        self.dataset, self.within = dataset, within

    def __iter__(self) -> Iterator[int]:
        if self.within:
            self.dataset.by_epoch[0] += 1
        for index in range(40):
            self.dataset.size = 32 + index
            yield index


@pytest.mark.parametrize("within", [False, True])
def test_a_sampler_that_changes_the_dataset_is_asked_when_it_would_have_been(within: bool) -> None:
    dataset = Sized()
    source = DataLoader(dataset, sampler=Sizes(dataset, within=within))
    assert why_not_earlier(source) == (
        "its sampler (Sizes) changes the dataset as it is iterated: earlier would be another dataset"
    )
    assert dataset.size == 32


class ShufflesInPlace(Sizes):
    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.dataset.by_epoch)
        return iter(self.dataset.by_epoch)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_what_a_sampler_changes_in_place_is_the_copy_s(kind: Any) -> None:
    dataset = Sized()
    dataset.by_epoch = kind(list(range(40)))
    source = DataLoader(dataset, sampler=ShufflesInPlace(dataset, within=True))
    assert str(why_not_earlier(source)).startswith("its sampler (ShufflesInPlace) changes the dataset")
    assert list(dataset.by_epoch) == list(range(40))


class Measures(Sized):
    length: int | None = None

    @functools.cached_property
    def lengths(self) -> list[int]:
        self.length = 40
        return list(range(40))


class ByLength(Sizes):
    def __iter__(self) -> Iterator[int]:
        return iter(self.dataset.lengths)  # type: ignore[attr-defined]


def test_what_a_dataset_computes_on_demand_is_no_change() -> None:
    dataset = Measures()
    assert why_not_earlier(DataLoader(dataset, sampler=ByLength(dataset, within=False))) is None


class Closes(Sized):
    is_open = True

    def __del__(self) -> None:
        type(self).is_open = False


class Reads(Sizes):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset)))


class Labelled(Sized):
    """Has labels that are missing, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = torch.tensor([1.0, float("nan")])
        self.weights = torch.nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("kind", [Sized, Labelled, Closes, type("Listed", (list,), {})])
def test_a_sampler_that_only_reads_its_dataset_is_served(kind: Any) -> None:
    dataset = kind()
    assert (
        why_not_earlier(DataLoader(dataset, batch_sampler=BatchSampler(Reads(dataset, within=False), 2, False))) is None
    )
    assert getattr(dataset, "is_open", True)


def draws_from(generator: np.random.Generator) -> Any:
    return lambda: generator.integers(300)


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
        {"sampler": Own()},
        {"batch_sampler": BatchSampler(Own(), 4, drop_last=True)},
        {"sampler": Own(endless=True)},
    ],
)
def test_one_that_draws_at_once_may_be_asked_earlier(kwargs: dict[str, Any]) -> None:
    before = RandomStates()
    assert why_not_earlier(DataLoader(DATA, **kwargs)) is None
    assert RandomStates() == before


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, np.random.random])
@pytest.mark.parametrize("every", [1, 100])
def test_one_that_draws_from_a_global_state_as_it_goes_may_not(draw: Any, every: int) -> None:
    sampler, before = Own(draw, every), RandomStates()
    reason = why_not_earlier(DataLoader(DATA, sampler=sampler))
    assert reason == "its sampler (Own) draws random numbers for each index: another order would come of it"
    assert RandomStates() == before


def test_its_own_state_is_as_before() -> None:
    generator = np.random.default_rng(0)
    sampler = Own(draws_from(generator))
    states = generator.bit_generator.state, sampler.generator_of_its_own.get_state()
    why_not_earlier(DataLoader(DATA, sampler=sampler))
    assert sampler.epochs == 0
    assert torch.equal(sampler.generator_of_its_own.get_state(), states[1])


def test_the_global_generator_by_another_name() -> None:
    sampler = RandomSampler(DATA, replacement=True, generator=torch.default_generator)
    assert "draws from the global generator" in (why_not_earlier(DataLoader(DATA, sampler=sampler)) or "")


class OnlyOne(Own):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is but one")


def test_one_that_cannot_be_copied_is_served() -> None:
    assert why_not_earlier(DataLoader(DATA, sampler=OnlyOne())) is None


def test_what_cannot_be_seen_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = why_not_earlier(DataLoader(DATA, sampler=Own(lambda: os._exit(3))))
    assert str(ends).startswith("its sampler (Own) ends the process in which it is iterated")
    monkeypatch.setattr(sampler_draws, "_MAX_S", 0.0)
    assert "too slow" in (why_not_earlier(DataLoader(DATA, sampler=Own())) or "")
    monkeypatch.setattr(sampler_draws, "_PATIENCE_S", 0.0)
    assert "gave no answer" in (why_not_earlier(DataLoader(DATA, sampler=Own(threading.Event().wait))) or "")
    assert not multiprocessing.active_children()


def test_nobody_looks_where_no_process_can_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert why_not_earlier(DataLoader(DATA, sampler=Own())) == "its sampler (Own) was not looked at"


def test_one_that_fails_there_is_left() -> None:
    why = why_not_earlier(DataLoader(DATA, sampler=Own(lambda: 1 / 0)))
    assert why == "its sampler (Own) cannot be looked at: ZeroDivisionError: division by zero"


class Holds(Own):
    """Holds something beside its state."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


@pytest.mark.parametrize(
    ("held", "shown"),
    [
        (lambda path: multiprocessing.Value("i", 0), "sampler['held'] (Synchronized)"),
        (lambda path: multiprocessing.RawArray("i", 3), "sampler['held'] (c_int_Array_3)"),
        (lambda path: multiprocessing.Queue(), "sampler['held'] (Queue)"),
        (lambda path: torch.zeros(3).share_memory_(), "sampler['held'] (Tensor)"),
        (lambda path: np.memmap(path, np.int64, "w+", shape=3), "sampler['held'] (memmap)"),
        (lambda path: path.open("w"), "sampler['held'] (TextIOWrapper"),
        (lambda path: [{"in": path.open("wb", buffering=0)}], "sampler['held'][0]['in'] (FileIO"),
    ],
)
def test_one_that_holds_what_processes_share_is_not_iterated_in_another(
    tmp_path: Path, held: Callable[[Path], Any], shown: str
) -> None:
    sampler = Holds(held(tmp_path / "file"))
    why = str(why_not_earlier(DataLoader(DATA, sampler=sampler)))
    assert why.startswith(f"its sampler (Holds) holds {shown}")
    assert why.endswith(", which a look at it would change")


def test_each_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, asked = Own(), []
    seen = sampler_draws._seen_in_a_fork
    monkeypatch.setattr(sampler_draws, "_seen_in_a_fork", lambda *given: asked.append(given) or seen(*given))
    for _ in range(3):
        assert why_not_earlier(DataLoader(DATA, sampler=sampler)) is None
    assert len(asked) == 1


def test_where_no_process_can_be_started_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(process: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.get_context("fork").Process, "start", fails)
    why = why_not_earlier(DataLoader(DATA, sampler=Own()))
    assert why == "its sampler (Own) cannot be looked at: [Errno 11] Resource temporarily unavailable"


def test_a_warning_that_is_an_error_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(process: Any) -> None:
        raise DeprecationWarning("use of fork() may lead to deadlocks in the child")

    monkeypatch.setattr(multiprocessing.get_context("fork").Process, "start", warns)
    why = why_not_earlier(DataLoader(DATA, sampler=Own()))
    assert why == "its sampler (Own) cannot be looked at: use of fork() may lead to deadlocks in the child"


class Generates(Sampler[int]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        yield from range(8)


class Lists(Generates):
    def __iter__(self) -> Iterator[int]:
        return iter([*range(8)])


@pytest.mark.parametrize(("sampler", "served"), [(Generates, False), (Lists, True)])
def test_of_a_loader_that_cannot_be_watched_the_order_has_to_be_known(sampler: type[Generates], served: bool) -> None:
    source = StatefulDataLoader(range(8), batch_size=2, sampler=sampler(), num_workers=1)  # type: ignore[arg-type,type-var]
    reason = why_not(AskedChange(source, "num_workers", 2, 1, before_first=True))
    assert (reason is None) is served
    assert served or "may read what training writes" in (reason or "")
