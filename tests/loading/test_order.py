from collections import Counter

import numpy as np
import pytest

from lightning_gpuopt.loading.order import Order, permute

LARGE = (1 << 16) + 1  # beyond what is shuffled by a table


def epoch_of(order: Order, epoch: int = 0) -> list[int]:
    return order.at(epoch, np.arange(order.num_samples)).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 97, 4096, LARGE, LARGE + 4321])
def test_a_permutation_hits_every_number_once(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key=7)), np.arange(size))


@pytest.mark.parametrize("size", [5000, LARGE])
def test_any_part_of_an_epoch_can_be_had_without_the_rest(size: int) -> None:
    order = Order(size, seed=3)
    whole = order.at(2, np.arange(size))
    assert np.array_equal(order.at(2, np.arange(1234, 2345)), whole[1234:2345])
    assert np.array_equal(order.at(2, np.array([4999, 0, 17])), whole[[4999, 0, 17]])


def test_every_permutation_of_few_samples_is_about_as_frequent() -> None:
    seen = Counter(tuple(permute(np.arange(4), 4, key).tolist()) for key in range(24_000))
    assert len(seen) == 24
    assert all(850 < count < 1150 for count in seen.values())  # 1000 ± 5 standard deviations


def test_neighbours_in_a_large_permutation_are_independent() -> None:
    counts = np.zeros((20, 20))
    for key in range(10):
        p = permute(np.arange(LARGE), LARGE, key)
        counts += np.histogram2d(p[:-1], p[1:], 20, ((0, LARGE), (0, LARGE)))[0]
    expected = counts.mean()
    assert ((counts - expected) ** 2 / expected).sum() < 399 + 5 * (
        2 * 399
    ) ** 0.5  # chi-square, 399 degrees of freedom


def test_the_order_never_changes_between_versions() -> None:
    """A checkpoint's position means the same samples for ever."""
    assert epoch_of(Order(10, seed=1), 2) == [0, 9, 3, 6, 8, 4, 7, 5, 1, 2]
    assert Order(10**9, seed=1).at(2, np.arange(4)).tolist() == [452586651, 38128288, 521258134, 419933066]
    assert Order(1000, seed=1, window=128).at(0, np.arange(4)).tolist() == [922, 837, 980, 860]
    assert Order(4, seed=1, weights=[1, 2, 3, 4]).at(0, np.arange(8) % 4).tolist() == [2, 2, 3, 2, 2, 2, 3, 2]


def test_seed_and_epoch_choose_the_order() -> None:
    orders = {(seed, epoch): tuple(epoch_of(Order(100, seed), epoch)) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9


def test_without_shuffle_samples_come_as_they_lie() -> None:
    assert epoch_of(Order(7, shuffle=False), 3) == list(range(7))


@pytest.mark.parametrize(("size", "window"), [(1000, 64), (1000, 100), (997, 128), (5000, 640), (130, 128), (64, 63)])
def test_a_windowed_epoch_holds_every_sample_once(size: int, window: int) -> None:
    for epoch in range(3):
        assert sorted(epoch_of(Order(size, 3, window=window), epoch)) == list(range(size))


def test_a_window_reads_runs_of_neighbours() -> None:
    size, window = 64_000, 6400
    first = np.sort(Order(size, window=window).at(0, np.arange(window)))
    runs = np.split(first, np.flatnonzero(np.diff(first) != 1) + 1)
    assert len(runs) <= 65  # 64 runs of 100, one of which the end of the dataset may cut in two
    assert sum(map(len, runs)) == window


def test_a_window_mixes_within_itself() -> None:
    taken = Order(64_000, window=6400).at(0, np.arange(6400))
    assert np.count_nonzero(np.diff(taken) == 1) < 20  # about one is expected by chance


def test_windows_differ_between_epochs() -> None:
    order = Order(64_000, window=6400)
    first, second = (set(order.at(epoch, np.arange(6400)).tolist()) for epoch in (0, 1))
    assert len(first & second) < 2000  # a tenth, 640, is expected by chance


def test_weights_are_the_frequencies_of_draws() -> None:
    weights = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    order = Order(6, weights=weights)
    draws = np.concatenate([order.at(epoch, np.arange(6)) for epoch in range(4000)])
    counts = np.bincount(draws, minlength=6)
    assert counts[[0, 3, 5]].tolist() == [0, 0, 0]
    assert counts[[1, 2, 4]] / 24_000 == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.015)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, float("nan")], [[1.0, 1.0]]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        Order(2, weights=weights)
