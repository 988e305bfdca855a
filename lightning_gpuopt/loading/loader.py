"""DataLoaders over stored datasets: the elastic order, and batches made in one go where the records allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from lightning_gpuopt.images.decode import random_resized_crop, resize_and_center_crop
from lightning_gpuopt.loading.order import mix
from lightning_gpuopt.loading.sampler import BatchIndices, ElasticBatchSampler, ElasticSampler
from lightning_gpuopt.storage.gather import Gather, plan
from lightning_gpuopt.storage.reader import LMDBDataset

GATHER_BYTES = 8 << 20
"""Up to this size a batch is copied in the training process (about a millisecond): less than what it costs to take
one from a worker process."""


class ElasticLoader(DataLoader[Any]):
    """A DataLoader that shows its `ElasticSampler` as its sampler.

    With a `batch_sampler`, torch's own puts a meaningless sequential sampler there, which Lightning would replace.

    Attributes:
        draws_random_state: Whether the training process's random state may change when it takes a batch.
    """

    draws_random_state = True

    @property
    def sampler(self) -> Any:
        """The batch sampler's sampler."""
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Nothing: torch's __init__ assigns one."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position in the epoch is kept by the DataModule, where it is right at every moment.

        That it is here tells Lightning that this loader can resume in the middle of an epoch.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do; see `state_dict`."""


def make_loader(
    dataset: Dataset[Any],
    sampler: ElasticSampler,
    *,
    crop_size: int | None = None,
    train: bool = False,
    num_workers: int | None = None,
    workers_if_needed: int = 0,
    pin_memory: bool = False,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = None,
) -> ElasticLoader:
    """A loader for a dataset in an elastic order.

    Args:
        dataset: An `LMDBDataset`, a (nested) ``Subset`` of one, or any other map-style dataset.
        sampler: Which samples this rank gets; its order counts the dataset's samples.
        crop_size: Side in pixels of square crops, for image datasets read with ``decode="tensor"``.
        train: Random crops; else in the middle.
        num_workers: Worker processes; None: none where batches are gathered faster without, else `workers_if_needed`.
        workers_if_needed: See `num_workers`.
        pin_memory: Batches in page-locked memory.
        persistent_workers: Keep the workers between epochs; None: where there are workers.
        prefetch_factor: Batches each worker makes ahead.
    """
    stored, indices = unwrap(dataset)
    collate_fn: Callable[[Any], Any] = collate_images
    source: Any = dataset
    if stored is not None and crop_size is not None:
        source = Cropped(stored, indices, crop_size, seed=sampler.seed, train=train)
    elif stored is not None and (layout := plan(stored)) is not None:
        small = layout.record_bytes * sampler.batch_size <= GATHER_BYTES
        if num_workers is None and small:
            num_workers = 0
        source, collate_fn = (
            Gather(stored, indices, pin_memory and num_workers == 0 and torch.cuda.is_available()),
            as_it_is,
        )
    workers = workers_if_needed if num_workers is None else num_workers
    loader = ElasticLoader(
        source,
        batch_sampler=ElasticBatchSampler(sampler, sampler.batch_size, sampler.drop_last),
        collate_fn=collate_fn,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=bool(workers) if persistent_workers is None else persistent_workers and bool(workers),
        prefetch_factor=prefetch_factor if workers else None,
    )
    loader.draws_random_state = not isinstance(source, Gather)
    return loader


def unwrap(dataset: Any) -> tuple[LMDBDataset | None, np.ndarray[Any, Any] | None]:
    """The stored dataset under nested subsets, and the indices that they leave of it (None: all)."""
    indices: np.ndarray[Any, Any] | None = None
    while type(dataset) is Subset:
        here = _positions(dataset)
        indices = here if indices is None else here[indices]
        dataset = dataset.dataset
    return (dataset, indices) if type(dataset) is LMDBDataset else (None, None)


def _positions(subset: Subset[Any]) -> np.ndarray[Any, Any]:
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


class Cropped(Dataset[Any]):
    """Stored images as uint8 tensors ``[3, size, size]``: random-resized crops, or resized and cut from the middle.

    A random crop depends on the seed, the epoch and the sample only: the same on any number of workers and ranks, and
    after a resume.

    Args:
        dataset: Where the images come from.
        indices: Those of its samples that count, in this order; None: all.
        size: Side in pixels.
        seed: Seed of the crops.
        train: Random crops.
    """

    def __init__(
        self, dataset: LMDBDataset, indices: np.ndarray[Any, Any] | None, size: int, *, seed: int = 0, train: bool
    ) -> None:
        self.dataset = dataset
        self.indices = indices
        self.size = size
        self.seed = seed
        self.train = train

    def __len__(self) -> int:
        return len(self.dataset) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch."""
        epoch = indices.epoch if isinstance(indices, BatchIndices) else 0
        stored = indices if self.indices is None else self.indices[np.asarray(indices)].tolist()
        return [self._read(at, epoch) for at in self.dataset.ahead(stored)]

    def _read(self, at: int, epoch: int) -> Any:
        if not self.train:
            return self.dataset.transformed(self.dataset.read(at, lambda data: resize_and_center_crop(data, self.size)))
        # Two images in one sample get the same crop, as a stereo pair or a mask would want it.
        key = mix(self.seed, epoch, at)
        sample = self.dataset.read(
            at, lambda data: random_resized_crop(data, self.size, np.random.Generator(np.random.Philox(key=key)))
        )
        return self.dataset.transformed(sample)


def as_it_is(batch: Any) -> Any:
    """The `collate_fn` for datasets that give whole batches."""
    return batch


def collate_images(samples: list[Any]) -> Any:
    """Torch's ``default_collate``, except that images in channels-last memory stay so: a third of the time."""
    return collate(samples, collate_fn_map=_COLLATE)


def _stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    stack = default_collate_fn_map[torch.Tensor]
    if first.dim() == 3 and first.stride(0) == 1 < first.size(0) and all(t.stride(0) == 1 for t in batch):
        images: torch.Tensor = stack([t.permute(1, 2, 0) for t in batch], collate_fn_map=collate_fn_map)
        return images.permute(0, 3, 1, 2)
    stacked: torch.Tensor = stack(batch, collate_fn_map=collate_fn_map)
    return stacked


_COLLATE = {**default_collate_fn_map, torch.Tensor: _stack}
