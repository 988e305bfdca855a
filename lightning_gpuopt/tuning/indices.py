"""Which samples a trial reads: the dataset's own numbers, in an order of ours, so that the user's sampler is not used.

One walk goes through all trials of a search: no trial finds in the page cache what an earlier one has read, as long as
the dataset lasts.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from lightning_gpuopt._arguments import refuse

_GOLDEN = 0.6180339887498949

_USUAL_BATCH = 32
"""The size of a batch for a batch sampler that does not say it, in any way."""


class Walk:
    """Endless numbers from 0 to ``length - 1``, each once before any comes again.

    Args:
        length: how many there are, at least 1.
        in_order: one after the other; else far apart from one another, as a shuffle has them.
        start: where it begins; None: anywhere, and elsewhere the next time.

    Example::

        >>> walk = Walk(5, in_order=True, start=3)
        >>> [next(walk) for _ in range(6)]
        [3, 4, 0, 1, 2, 3]
    """

    def __init__(self, length: int, *, in_order: bool, start: int | None = None) -> None:
        self._length = length
        self._stride = 1 if in_order else _coprime_near(_GOLDEN * length, length)
        # not from Python's, NumPy's or torch's global random state
        self._next = (int.from_bytes(os.urandom(8), "little") if start is None else start) % length

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> int:
        index = self._next
        self._next = (index + self._stride) % self._length
        return index


class Batches:
    """Endless lists of so many numbers of a walk; stands in for a batch sampler."""

    def __init__(self, walk: Walk, size: int) -> None:
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
    walk = Walk(length, in_order=in_order)
    if loader.batch_sampler is None and not hasattr(batched, "batch_size"):
        return {"sampler": walk, "batch_size": None}  # the dataset gives whole batches, or the loader single samples
    batches = Batches(walk, _batch_size(batched, length))
    if loader.batch_sampler is None:  # the dataset is asked for lists of samples
        return {"sampler": batches, "batch_size": None}
    return {"batch_sampler": batches}


def _batch_size(batch_sampler: Any, length: int) -> int:
    """The size that the batch sampler says, or else its samples over its batches."""
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


def _coprime_near(value: float, length: int) -> int:
    stride = max(int(value), 1)
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride
