from __future__ import annotations

from itertools import islice, pairwise
from statistics import mean, variance
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler

from lightning_gpuopt.tuning.trial_samples import own_sampling, walk
from tests.tuning.datasets import Numbers


@pytest.mark.parametrize("length", [1, 2, 3, 10, 17, 64, 1000])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_walk_visits_each_number_once_before_any_comes_again(length: int, in_order: bool) -> None:
    samples = walk(length, in_order=in_order, seed=1)
    first, second = list(islice(samples, length)), list(islice(samples, length))
    assert sorted(first) == sorted(second) == list(range(length))
    if in_order:
        assert first[0] == 1 % length
    elif length >= 64:
        assert first != second  # the next round has another order


@pytest.mark.parametrize("length", [10_000, 100_000])
def test_a_shuffled_walk_has_the_clusters_of_a_shuffle(length: int) -> None:
    samples = walk(length, in_order=False, seed=1)
    slow = [sum(index % 50 == 0 for index in islice(samples, 16)) for _ in range(600)]
    # 16 draws of one in fifty: mean 0.32, variance 0.31
    assert mean(slow) == pytest.approx(0.32, abs=0.05)
    assert variance(slow) == pytest.approx(0.31, abs=0.05)


def test_the_walk_begins_elsewhere_each_time() -> None:
    assert len({next(walk(1 << 60, in_order=True)) for _ in range(3)}) == 3


class OddBatches:
    """A batch sampler of somebody's own: batches of 5 and 4, and no word of their size."""

    def __init__(self, batches: int | None) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        raise AssertionError("the user's own is not to be used")

    def __len__(self) -> int:
        if self.batches is None:
            raise NotImplementedError
        return self.batches


@pytest.mark.parametrize(
    ("loader", "size", "in_order"),
    [
        (DataLoader(Numbers(100), 8), 8, True),
        (DataLoader(Numbers(100), 8, shuffle=True), 8, False),
        (DataLoader(Numbers(100), batch_sampler=BatchSampler(SequentialSampler(range(100)), 3, True)), 3, True),
        (DataLoader(Numbers(100), batch_sampler=BatchSampler(RandomSampler(range(100)), 3, True)), 3, False),
        (DataLoader(Numbers(100), batch_sampler=OddBatches(23)), 5, False),  # type: ignore[arg-type]
        (DataLoader(Numbers(100), batch_sampler=OddBatches(0)), 1, True),  # type: ignore[arg-type]
        (DataLoader(Numbers(100), batch_sampler=OddBatches(None)), 32, False),  # type: ignore[arg-type]
    ],
)
def test_batches_are_as_large_and_as_near_one_another_as_the_loaders(
    loader: DataLoader[Any], size: int, in_order: bool
) -> None:
    batch = next(iter(own_sampling(loader)["batch_sampler"]))
    assert len(batch) == size
    assert all((after - before) % 100 == 1 for before, after in pairwise(batch)) == in_order


def test_samples_are_those_that_the_sampler_chooses_from() -> None:
    batches = own_sampling(DataLoader(Numbers(100), 8, sampler=SubsetRandomSampler(range(40, 48))))["batch_sampler"]
    assert sorted(next(iter(batches))) == list(range(40, 48))


def test_single_samples_and_lists_are_asked_for_as_the_loader_does() -> None:
    single = own_sampling(DataLoader(Subset(Numbers(), [4, 5]), batch_size=None))
    assert (single["batch_size"], sorted(islice(single["sampler"], 2))) == (None, [0, 1])
    lists = own_sampling(
        DataLoader(Numbers(), batch_size=None, sampler=BatchSampler(range(1000), 6, False))  # type: ignore[arg-type]
    )
    assert (lists["batch_size"], len(next(iter(lists["sampler"])))) == (None, 6)
