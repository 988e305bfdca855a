"""What a loader asks of datasets beyond ``__getitem__``, through nested ``Subset`` and ``ConcatDataset``.

The class of a dataset may offer any of these; none has to:

- ``with_decoder(decoder)``: a copy of it that makes ``decoder(data)`` of each image file, and ``decoder(data, mode)``
  of each image that was stored in a mode of its own, in the thread that reads the sample. Crops work with such
  datasets.
- ``gather(datasets, indices)``: what takes whole batches from it and others of its type (a dataset whose
  ``__getitems__`` gives a batch), or None. Batches of equal records are copied in one call so.
- ``for_loader()``: a copy of it that a loader reads, sample by sample.
- ``is_pure``: whether reading a sample runs code of the class alone, no transform's and no subclass's, and that draws
  no random numbers and is safe between threads: then threads read the samples.
- ``read_ahead(indices)``: begin to read these samples, without waiting for them.
- ``targets``: the label of each sample, without reading the samples.
- ``as_written``: where in a sample arrays, tensors and masks lie that come as they were written: these are never
  normalised. An array or tensor that is the sample's image (``images/normalize.py``) is none of them.
- ``encoded_image(index)``: the bytes of a sample's image file, for decoders outside Python; None if it has none.
- ``sample_name(index)``: what users call a sample, such as its file's path.
"""

from __future__ import annotations

import contextlib
import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

Decoder: TypeAlias = Callable[..., Any]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def with_decoder(dataset: Any, decoder: Decoder) -> Any:
    """A copy of a dataset, all of whose images go through `decoder`; None if that cannot be."""
    if not all(offers(leaf, "with_decoder") for leaf in leaves(dataset)):
        return None
    return _mapped(dataset, lambda leaf: leaf.with_decoder(decoder))


def for_loader(dataset: Any) -> Any:
    """A copy of a dataset that a loader reads sample by sample; None if it is not known to be read so."""
    if not all(offers(leaf, "for_loader") and not _has_batches_of_its_own(leaf) for leaf in leaves(dataset)):
        return None
    return _mapped(dataset, lambda leaf: leaf.for_loader())


def is_read_by_sample(dataset: Any) -> bool:
    """Whether a dataset has no way of its own to give a batch's samples, or one that may be left aside."""
    if for_loader(dataset) is not None:
        return True
    return _is_plain(dataset) and not any(hasattr(leaf, "__getitems__") for leaf in leaves(dataset))


def _has_batches_of_its_own(dataset: Any) -> bool:
    """Whether a subclass gives a batch's samples in a way that the class with ``for_loader`` knows nothing of."""
    for cls in type(dataset).__mro__:
        if "for_loader" in vars(cls):
            return False
        if "__getitems__" in vars(cls):
            return True
    return False


def offers(dataset: Any, name: str) -> bool:
    """Whether a dataset's own class has a method: a wrapper that passes attributes on has none of its own."""
    return callable(getattr(type(dataset), name, None))


def _mapped(dataset: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a nest with other datasets in it."""
    if isinstance(dataset, Subset):
        return _changed(dataset, dataset=_mapped(dataset.dataset, change))
    if isinstance(dataset, ConcatDataset):
        return _changed(dataset, datasets=[_mapped(part, change) for part in dataset.datasets])
    return change(dataset)


def _changed(original: Any, **attributes: Any) -> Any:
    changed = copy.copy(original)
    vars(changed).update(attributes)
    return changed


def duplicate(dataset: Any) -> Any:
    """A shallow copy, whatever the class does when it is pickled."""
    kind: Any = type(dataset)
    copied = kind.__new__(kind)
    vars(copied).update(vars(dataset))
    for slot in (name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ())):
        if hasattr(dataset, slot):
            setattr(copied, slot, getattr(dataset, slot))
    return copied


def gathered(dataset: Any) -> Any:
    """What takes whole batches from a dataset, or None; subclasses that change what a sample is are not gathered."""
    is_ours = all(offers(leaf, "gather") and not isinstance(leaf, torch.Tensor) for leaf in leaves(dataset))
    if not _is_plain(dataset) or not is_ours:
        return None
    datasets, indices = _flat(dataset)
    if not datasets or any(type(each) is not type(datasets[0]) for each in datasets):
        return None
    return datasets[0].gather(datasets, indices)


def _is_plain(dataset: Any) -> bool:
    """Whether the Subsets and ConcatDatasets of a nest find their samples as torch's own do."""
    if isinstance(dataset, Subset):
        return _finds_as(dataset, Subset) and _is_plain(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return _finds_as(dataset, ConcatDataset) and all(map(_is_plain, dataset.datasets))
    return True


def _finds_as(dataset: Any, kind: Any) -> bool:
    return all(getattr(type(dataset), name) is getattr(kind, name) for name in ("__getitem__", "__len__"))


def _flat(dataset: Any) -> tuple[list[Any], Indices | None]:
    """The datasets under a plain nest, and which of their samples, counted through, it has (None: all)."""
    if isinstance(dataset, Subset):
        here = positions(dataset)
        datasets, indices = _flat(dataset.dataset)
        return datasets, here if indices is None else indices[here]
    if not isinstance(dataset, ConcatDataset):
        return [dataset], None
    parts = [_flat(part) for part in dataset.datasets]
    chosen, start = [], 0
    for datasets, indices in parts:
        size = sum(len(each) for each in datasets)
        chosen.append(start + (np.arange(size) if indices is None else indices))
        start += size
    whole = all(indices is None for _, indices in parts)
    return [each for datasets, _ in parts for each in datasets], None if whole else np.concatenate(chosen)


def runs_our_code_only(dataset: Any) -> bool:
    """Whether reading a sample runs no code of the user's: it draws no random numbers, and threads may do it."""
    return _is_plain(dataset) and all(getattr(leaf, "is_pure", False) is True for leaf in leaves(dataset))


def positions(subset: Subset[Any]) -> Indices:
    """A Subset's indices, counted from the beginning; TypeError: no whole numbers, IndexError: no such sample."""
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
    """The dataset under a nest that has a sample, and the sample's index there; as far as that is torch's way."""
    while True:
        if isinstance(dataset, Subset) and _finds_as(dataset, Subset):
            dataset, index = dataset.dataset, dataset.indices[index]
        elif isinstance(dataset, ConcatDataset) and _finds_as(dataset, ConcatDataset):
            if index < 0:
                index += len(dataset)
            at = bisect_right(dataset.cumulative_sizes, index)
            dataset, index = dataset.datasets[at], index - (dataset.cumulative_sizes[at - 1] if at else 0)
        else:
            return dataset, index


def read_ahead(dataset: Any, indices: Sequence[int]) -> None:
    """Begin to read samples, where their datasets can; what is wrong with them is found when they are read."""
    wanted: dict[int, tuple[Any, list[int]]] = {}
    with contextlib.suppress(Exception):
        for index in indices:
            owner, at = locate(dataset, index)
            wanted.setdefault(id(owner), (owner, []))[1].append(at)
        for owner, here in wanted.values():
            if offers(owner, "read_ahead"):
                owner.read_ahead(here)


def sample_name(dataset: Any, index: int) -> str:
    owner, at = locate(dataset, index)
    return str(owner.sample_name(at)) if offers(owner, "sample_name") else f"{type(owner).__name__}[{at}]"


def leaves(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, Subset):
        yield from leaves(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from leaves(part)
    else:
        yield dataset


def as_written(dataset: Any) -> set[tuple[int | str, ...]]:
    """Where in a sample what is never normalised lies, by indices and keys from the outside in."""
    if not _is_plain(dataset):
        return set()
    return {path for leaf in leaves(dataset) if hasattr(type(leaf), "as_written") for path in leaf.as_written}


def mean_bytes(dataset: Any) -> int | None:
    """Bytes that a stored sample has in the mean; None if a dataset has none in one file, or does not know."""
    total = samples = 0
    for leaf in leaves(dataset):
        known = getattr(getattr(leaf, "info", None), "num_bytes", None)
        if not isinstance(known, int):
            return None
        total += known
        samples += len(leaf)
    return max(1, total // samples) if samples else None


def targets_of(dataset: Any) -> np.ndarray[Any, Any]:
    """The label of each sample, without reading the samples; TypeError if the dataset does not know."""
    if isinstance(dataset, Subset) and _finds_as(dataset, Subset):
        return targets_of(dataset.dataset)[positions(dataset)]
    if isinstance(dataset, ConcatDataset) and _finds_as(dataset, ConcatDataset):
        return np.concatenate([targets_of(part) for part in dataset.datasets])
    found = getattr(dataset, "targets", None)
    if found is None:
        raise TypeError(
            f"a {type(dataset).__name__} has no targets; pass weights as numbers, or a dataset with an attribute "
            "`targets` (the label of each sample)"
        )
    return np.asarray(found)


def balanced_weights(targets: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """For each sample the inverse of how many have its label (float64); ValueError if one is no single value."""
    if targets.ndim != 1 or targets.dtype.kind not in "biufU":
        raise ValueError(
            f"weights='balanced' needs one label per sample, a number or a text; got {targets.dtype} of shape "
            f"{targets.shape[1:]}"
        )
    _, inverse, counts = np.unique(targets, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse]
