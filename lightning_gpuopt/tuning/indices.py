"""Chooses the samples that a trial reads: the dataset's indices in our own order, without the user's sampler.

All trials of a search share one walk: no trial reads what an earlier one has left in the page cache, until every
sample was read once.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, SequentialSampler

from lightning_gpuopt.loading.order import mix, permute
from lightning_gpuopt.utils.arguments import refuse

_DRAWN_AT_ONCE = 256

_USUAL_BATCH = 32
"""Assumed batch size of a batch sampler from which it cannot be read."""


class Walk:
    """Endless numbers from 0 to ``length - 1``, each once before any comes again.

    Args:
        length: how many there are, at least 1.
        in_order: one after the other; else at random, as a shuffle has them: samples that cost more come in clusters.
        seed: where it begins, and in which order; None: another one each time.
    """

    def __init__(self, length: int, *, in_order: bool, seed: int | None = None) -> None:
        self._length = length
        self._in_order = in_order
        # not from Python's, NumPy's or torch's global random state
        self._seed = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        self._position = self._seed % length if in_order else 0
        self._cycle = 0
        self._drawn: list[int] = []

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> int:
        if not self._drawn:
            self._draw()
        return self._drawn.pop()

    def _draw(self) -> None:
        first, last = self._position, min(self._position + _DRAWN_AT_ONCE, self._length)
        numbers = np.arange(first, last)
        if not self._in_order:
            numbers = permute(numbers, self._length, mix(self._seed, self._cycle))
        self._drawn = numbers[::-1].tolist()
        self._position = last % self._length
        self._cycle += last == self._length


class _Chosen:
    """A walk through some of the numbers."""

    def __init__(self, numbers: Sequence[int], walk: Walk) -> None:
        self._numbers = numbers
        self._walk = walk

    def __iter__(self) -> _Chosen:
        return self

    def __next__(self) -> int:
        return self._numbers[next(self._walk)]


class Batches:
    """Endless lists of so many numbers of a walk; stands in for a batch sampler."""

    def __init__(self, walk: Iterator[int], size: int) -> None:
        self.walk = walk
        self.batch_size = size

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [next(self.walk) for _ in range(self.batch_size)]


def own_sampling(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a DataLoader that reads this map-style loader's dataset in an endless order of our own.

    Raises:
        ValueError: the dataset has no length, or none to speak of.
    """
    try:
        length = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        refuse("dataloader", "a dataset with __len__, whose samples are numbered from 0", loader.dataset)
    if not length:
        refuse("dataloader", "a dataset with at least one sample", loader.dataset)
    batched: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    in_order = type(getattr(batched, "sampler", batched)) is SequentialSampler
    walk: Iterator[int] = Walk(length, in_order=in_order)
    chosen = getattr(getattr(batched, "sampler", batched), "indices", None)  # such as SubsetRandomSampler's
    if isinstance(chosen, Sequence) and not isinstance(chosen, (str, bytes)) and chosen:
        walk = _Chosen(chosen, Walk(len(chosen), in_order=in_order))
    if loader.batch_sampler is None and not hasattr(batched, "batch_size"):
        return {"sampler": walk, "batch_size": None}  # the dataset gives whole batches, or the loader single samples
    batches = Batches(walk, _batch_size(batched, length))
    if loader.batch_sampler is None:  # the dataset is asked for lists of samples
        return {"sampler": batches, "batch_size": None}
    return {"batch_sampler": batches}


def _batch_size(batch_sampler: Any, length: int) -> int:
    """The batch sampler's ``batch_size``, or else its samples divided by its batches."""
    size = getattr(batch_sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size
    try:
        batches = len(batch_sampler)
    except (TypeError, NotImplementedError):
        return min(_USUAL_BATCH, length)
    with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
        length = len(batch_sampler.sampler)
    return max(math.ceil(length / batches), 1) if batches else 1
