"""What a loader asks of datasets beyond ``__getitem__``, through nested ``Subset`` and ``ConcatDataset``.

A dataset may offer any of these methods; none has to:

- ``with_decoder(decoder)``: a copy of it that makes ``decoder(data)`` of each image file, and ``decoder(data, mode)``
  of each image that was stored in a mode of its own. Crops work with such datasets.
- ``gather(datasets, indices, pin_memory)``: what takes whole batches from it and others of its type (a dataset whose
  ``__getitems__`` gives a batch), or None. Batches of equal records are copied in one call so.
- ``read_ahead(indices)``: begin to read these samples, without waiting for them.
- ``targets``: the label of each sample, without reading the samples.
- ``exact_images``: where in a sample images lie whose values count (masks, depth), which are never normalised.
- ``sample_name(index)``: what users call a sample, such as its file's path.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import ConcatDataset, Subset

Decoder: TypeAlias = Callable[..., Any]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def with_decoder(dataset: Any, decoder: Decoder | None) -> Any:
    """A copy of a dataset, all of whose images go through `decoder`; None where that cannot be.

    Args:
        dataset: One with such a method, or Subsets and ConcatDatasets of such.
        decoder: See above; None: its own, in a copy for a loader.
    """
    offered = getattr(dataset, "with_decoder", None)
    if callable(offered):
        return offered(decoder)
    if isinstance(dataset, Subset):
        inner = with_decoder(dataset.dataset, decoder)
        return None if inner is None else _changed(dataset, dataset=inner)
    if isinstance(dataset, ConcatDataset):
        parts = [with_decoder(part, decoder) for part in dataset.datasets]
        return None if any(part is None for part in parts) else _changed(dataset, datasets=parts)
    return None


def _changed(original: Any, **attributes: Any) -> Any:
    changed = copy.copy(original)
    vars(changed).update(attributes)
    return changed


def gathered(dataset: Any, pin_memory: bool) -> Any:
    """What takes whole batches from a dataset, or None.

    Args:
        dataset: One with a method ``gather``, or Subsets and ConcatDatasets of such; subclasses that change what a
            sample is are not gathered.
        pin_memory: Batches in page-locked memory.
    """
    parts = _flat(dataset)
    if parts is None:
        return None
    datasets, indices = parts
    kind = type(datasets[0])
    if not datasets or not hasattr(kind, "gather") or any(type(each) is not kind for each in datasets):
        return None
    return datasets[0].gather(datasets, indices, pin_memory)


def _flat(dataset: Any) -> tuple[list[Any], Indices | None] | None:
    """The datasets under a nest, and which of their samples, counted through, it has (None: all); None: not known."""
    if isinstance(dataset, Subset):
        if type(dataset).__getitem__ is not Subset.__getitem__:
            return None
        inner = _flat(dataset.dataset)
        here = positions(dataset)
        if inner is None:
            return None
        datasets, indices = inner
        return datasets, here if indices is None else indices[here]
    if isinstance(dataset, ConcatDataset):
        if type(dataset).__getitem__ is not ConcatDataset.__getitem__:
            return None
        parts = [_flat(part) for part in dataset.datasets]
        datasets, chosen, start = [], [], 0
        for part in parts:
            if part is None:
                return None
            size = sum(len(each) for each in part[0])
            chosen.append(start + (np.arange(size) if part[1] is None else part[1]))
            datasets += part[0]
            start += size
        whole = all(part is not None and part[1] is None for part in parts)
        return datasets, None if whole else np.concatenate(chosen)
    return [dataset], None


def positions(subset: Subset[Any]) -> Indices:
    """A Subset's indices, counted from the beginning.

    Raises:
        TypeError: They are no whole numbers.
        IndexError: There is no such sample.
    """
    given = np.asarray(subset.indices)
    size = len(subset.dataset)  # type: ignore[arg-type]
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise TypeError(
            f"a Subset's indices must be whole numbers; got {given.dtype} (of a mask: np.flatnonzero(mask))"
        )
    here = given.astype(np.int64)
    here[here < 0] += size
    if here.size and not 0 <= here.min() <= here.max() < size:
        raise IndexError(
            f"a Subset's indices must lie in a dataset of {size} samples; got {given.min()}..{given.max()}"
        )
    return here


def locate(dataset: Any, index: int) -> tuple[Any, int]:
    """The dataset under a nest that has a sample, and the sample's index there."""
    while True:
        if isinstance(dataset, Subset):
            dataset, index = dataset.dataset, int(dataset.indices[index])
        elif isinstance(dataset, ConcatDataset):
            if index < 0:
                index += len(dataset)
            at = bisect_right(dataset.cumulative_sizes, index)
            dataset, index = dataset.datasets[at], index - (dataset.cumulative_sizes[at - 1] if at else 0)
        else:
            return dataset, index


def read_ahead(dataset: Any, indices: Sequence[int]) -> None:
    """Begin to read samples, where their datasets can."""
    wanted: dict[int, tuple[Any, list[int]]] = {}
    for index in indices:
        owner, at = locate(dataset, index)
        wanted.setdefault(id(owner), (owner, []))[1].append(at)
    for owner, here in wanted.values():
        begin = getattr(owner, "read_ahead", None)
        if callable(begin):
            begin(here)


def sample_name(dataset: Any, index: int) -> str:
    """What users call a sample."""
    owner, at = locate(dataset, index)
    name = getattr(owner, "sample_name", None)
    return str(name(at)) if callable(name) else f"{type(owner).__name__}[{at}]"


def leaves(dataset: Any) -> Iterator[Any]:
    """The datasets under a nest."""
    if isinstance(dataset, Subset):
        yield from leaves(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from leaves(part)
    else:
        yield dataset


def exact_images(dataset: Any) -> set[tuple[int | str, ...]]:
    """Where in a sample images lie whose values count, by indices and keys from the outside in."""
    return {path for leaf in leaves(dataset) for path in getattr(leaf, "exact_images", ())}


def mean_bytes(dataset: Any) -> int | None:
    """Bytes that a stored sample has in the mean; None where a dataset has none in one file, or does not know."""
    total = samples = 0
    for leaf in leaves(dataset):
        known = getattr(getattr(leaf, "info", None), "num_bytes", None)
        if not isinstance(known, int):
            return None
        total += known
        samples += len(leaf)
    return max(1, total // samples) if samples else None


def targets_of(dataset: Any) -> np.ndarray[Any, Any]:
    """The label of each sample, without reading the samples.

    Raises:
        TypeError: The dataset does not know.
    """
    if isinstance(dataset, Subset):
        return targets_of(dataset.dataset)[positions(dataset)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([targets_of(part) for part in dataset.datasets])
    found = getattr(dataset, "targets", None)
    if found is None:
        raise TypeError(
            f"a {type(dataset).__name__} has no targets; give weights as numbers, or a dataset with an attribute "
            "`targets` (the label of each sample)"
        )
    return np.asarray(found)


def balanced_weights(targets: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """For each sample the inverse of how many have its label: every class is drawn equally often.

    Args:
        targets: Labels, shape ``[num_samples]``.

    Returns:
        float64, shape ``[num_samples]``.

    Raises:
        ValueError: Labels are not single values.
    """
    if targets.ndim != 1:
        raise ValueError(f"weights='balanced' wants one label a sample, got labels of shape {targets.shape[1:]}")
    _, inverse, counts = np.unique(targets, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse]
