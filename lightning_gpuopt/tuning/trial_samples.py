"""Chooses the samples that a trial reads: the dataset's indices in our own order, without the user's sampler.

All trials of a search share one walk, so that none reads what an earlier one has left in the page cache.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_gpuopt.loading.order import mix, permute
from lightning_gpuopt.utils.arguments import refuse

_DRAWN_AT_ONCE = 256
_USUAL_BATCH = 32  # assumed batch size of a batch sampler from which it cannot be read


def walk(length: int, *, in_order: bool, seed: int | None = None) -> Iterator[int]:
    """Endless numbers below ``length``, each once before any repeats; without ``seed`` begun elsewhere each time."""
    if seed is None:  # not from Python's, NumPy's or torch's global random state
        seed = int.from_bytes(os.urandom(7), "little")
    first = seed % length if in_order else 0
    for cycle in count():
        for begin in range(first, length, _DRAWN_AT_ONCE):
            numbers = np.arange(begin, min(begin + _DRAWN_AT_ONCE, length))
            if not in_order:
                numbers = permute(numbers, length, mix(seed, cycle))
            yield from numbers.tolist()
        first = 0


def own_sampling(loader: DataLoader[Any], iterable: bool = False) -> dict[str, Any]:
    """Arguments of a DataLoader that reads this dataset in an endless order of ours; ValueError: it cannot be tried."""
    if not isinstance(loader, DataLoader):
        refuse("dataloader", "a torch.utils.data.DataLoader", loader, wrong_type=True)
    if isinstance(loader.dataset, IterableDataset):
        if iterable:
            return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        refuse(
            "dataloader",
            "a map-style dataset, or iterable=True, since what an IterableDataset yields depends on num_workers",
            loader.dataset,
        )
    try:
        length = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        refuse("dataloader", "a dataset with __len__, whose samples are numbered from 0", loader.dataset)
    if not length:
        refuse("dataloader", "a dataset with at least one sample", loader.dataset)
    batched: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    sampler = getattr(batched, "sampler", batched)
    in_order = type(sampler) is SequentialSampler
    samples = walk(length, in_order=in_order)
    chosen = getattr(sampler, "indices", None)  # such as SubsetRandomSampler's
    if isinstance(chosen, Sequence) and not isinstance(chosen, (str, bytes)) and chosen:
        samples = map(chosen.__getitem__, walk(len(chosen), in_order=in_order))
    if loader.batch_sampler is None and not hasattr(batched, "batch_size"):
        return {"sampler": samples, "batch_size": None}  # the dataset gives whole batches, or the loader single samples
    batches = BatchSampler(samples, _batch_size(batched, length), drop_last=False)
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
