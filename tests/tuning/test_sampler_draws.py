"""When samplers draw: torch's own, and those of users."""

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
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.tuning import sampler_draws
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


class NotCopied(Own):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is but one")


def test_what_cannot_be_seen_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be copied" in (why_not_earlier(DataLoader(DATA, sampler=NotCopied())) or "")
    monkeypatch.setattr(sampler_draws, "_MAX_S", 0.0)
    assert "too slow" in (why_not_earlier(DataLoader(DATA, sampler=Own())) or "")
