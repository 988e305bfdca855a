"""The order of an epoch's samples as a function of (seed, epoch, position): no list of indices, no state.

A permutation is computed where it is asked for, so that an epoch over a billion samples starts at once, anywhere in
its middle, takes no memory, and is the same on every machine and with every version of numpy and torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS: Final = 6
_TABLE_SIZE: Final = 1 << 16  # below, a Feistel network has too few states to reach every permutation alike
_CHUNKS_PER_WINDOW: Final = 64
_MASK: Final = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 64-bit number from several; every bit of each counts."""
    state = 0
    for number in numbers:
        state = _splitmix(state ^ (number & _MASK))
    return state


def _splitmix(x: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _splitmix_all(x: _Words) -> _Words:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = x ^ x >> np.uint64(31)
    return mixed


def permute(positions: Indices, size: int, key: int) -> Indices:
    """Where a keyed permutation of ``range(size)`` puts these positions, int64.

    A small range is shuffled outright. For a large one: a Feistel network over a rectangle that holds the range, walked
    on until it is back in the range (Black and Rogaway 2002, Ciphers with arbitrary finite domains).
    """
    if size <= _TABLE_SIZE:
        return _table(size, key)[positions]
    width = math.isqrt(size - 1) + 1
    sides = (np.uint64(width), np.uint64(-(-size // width)))
    keys = [np.uint64(mix(key, round_)) for round_ in range(_ROUNDS)]
    result = _feistel(positions.astype(np.uint64), sides, keys)
    while (outside := result >= np.uint64(size)).any():
        result[outside] = _feistel(result[outside], sides, keys)
    return result.astype(np.int64)


@lru_cache(maxsize=16)
def _table(size: int, key: int) -> Indices:
    return np.argsort(_splitmix_all(_splitmix_all(np.arange(size, dtype=np.uint64)) ^ np.uint64(key)), kind="stable")


def _feistel(x: _Words, sides: tuple[np.uint64, np.uint64], keys: list[np.uint64]) -> _Words:
    columns, rows = sides
    left, right = x // columns, x % columns  # in range(rows), range(columns)
    for round_, key in enumerate(keys):
        if round_ % 2 == 0:
            left = (left + _splitmix_all(right ^ key) % rows) % rows
        else:
            right = (right + _splitmix_all(left ^ key) % columns) % columns
    return left * columns + right


class Order:
    """The order in which an epoch gives a dataset's samples.

    The shuffle mixes among `window` samples (None: all), each made of runs of neighbours from random places, which are
    then read together; a run has at most `run` samples (None: 1/64 of a window). Shorter runs mix better where
    neighbours are alike, as the classes of a folder are. With relative `weights`, ``[num_samples]``, an epoch is
    `num_samples` draws with replacement, and `window` has no effect.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int = 0,
        shuffle: bool = True,
        window: int | None = None,
        weights: np.ndarray[Any, Any] | Sequence[float] | None = None,
        run: int | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self.window = None if window is None or window >= num_samples else window
        chunk = max(1, (self.window or 1) // _CHUNKS_PER_WINDOW)
        self.run = chunk if run is None else min(chunk, max(1, run))
        self._cumulated = None if weights is None else _cumulate(weights, num_samples)

    @property
    def weighted(self) -> bool:
        return self._cumulated is not None

    def at(self, epoch: int, positions: Indices) -> Indices:
        """The samples at these positions, each in ``range(num_samples)``, of an epoch; int64."""
        key = mix(self.seed, epoch)
        if self._cumulated is not None:
            draws = _splitmix_all(_splitmix_all(positions.astype(np.uint64)) ^ np.uint64(key))
            uniform = (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._cumulated[-1]
            # The draw lies below the total, except if rounding takes it there.
            last = int(np.searchsorted(self._cumulated, self._cumulated[-1]))
            drawn: Indices = np.minimum(np.searchsorted(self._cumulated, uniform, side="right"), last)
            return drawn
        if not self.shuffle:
            return positions
        if self.window is None:
            return permute(positions, self.num_samples, key)
        return self._at_windowed(positions, key, self.window)

    def _at_windowed(self, positions: Indices, key: int, window: int) -> Indices:
        n, chunk = self.num_samples, self.run
        place = np.empty_like(positions)
        groups = positions // window
        for group in np.unique(groups).tolist():
            here = groups == group
            start = group * window
            place[here] = start + permute(positions[here] - start, min(window, n - start), mix(key, 1, group))
        slots, within = np.divmod(place, chunk)
        full = slots < n // chunk  # a last, shorter run stays last ...
        slots[full] = permute(slots[full], n // chunk, mix(key, 2))
        # ... but is another one each epoch: all runs begin at a random sample.
        samples: Indices = (slots * chunk + within + mix(key, 3) % n) % n
        return samples


def _cumulate(weights: np.ndarray[Any, Any] | Sequence[float], num_samples: int) -> np.ndarray[Any, Any]:
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (num_samples,):
        raise ValueError(f"weights must be one number a sample, shape ({num_samples},); got shape {values.shape}")
    if not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ValueError("weights must be finite, none negative, and not all zero")
    return np.cumsum(values)


def why_other_order(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How what makes an order differs from what a position was saved with, after "was saved"; None: in nothing."""
    changed = [f"{name} was {saved.get(name)!r} and is {now[name]!r}" for name in now if saved.get(name) != now[name]]
    if not changed:
        return None
    return (
        f"with other data or another order ({'; '.join(changed)}): the epoch continues after the same number of "
        "samples, but some may come twice and others not at all"
    )
