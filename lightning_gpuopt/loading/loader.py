"""DataLoaders over any map-style dataset: the elastic order, and batches made in one go where the dataset can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.loading.collate import Collate, MemoryFormat, as_it_is
from lightning_gpuopt.loading.datasets import for_loader, gathered
from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler, ResumableLoader
from lightning_gpuopt.loading.samples import EpochSamples, SkippedSamples

if TYPE_CHECKING:
    from lightning_gpuopt.images.crop import CenterCrops, RandomCrops

GATHER_BYTES: Final = 8 << 20
"""Up to this size a batch is copied in the training process (about a millisecond): less than what it costs to take
one from a worker process."""


class ElasticLoader(ResumableLoader, DataLoader[Any]):
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

    def __iter__(self) -> Any:
        if self.num_workers == 0 and getattr(self.dataset, "gathers_batches", False):
            return _GatheredBatches(self)
        return super().__iter__()


class _Fetcher:
    """What torch's iterators call their fetcher, for whoever measures it: it gives the batch of some indices."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def fetch(self, indices: list[int]) -> Any:
        """A batch."""
        return self.collate_fn(self.dataset.__getitems__(indices))


class _GatheredBatches:
    """An epoch's batches, gathered in this process: torch's own iterator takes a fifth of a small batch's time."""

    def __init__(self, loader: ElasticLoader) -> None:
        assert loader.batch_sampler is not None
        self._indices: Iterator[list[int]] = iter(loader.batch_sampler)
        self._fetcher = _Fetcher(loader.dataset, loader.collate_fn)

    def __iter__(self) -> _GatheredBatches:
        return self

    def __next__(self) -> Any:
        return self._fetcher.fetch(next(self._indices))


def make_loader(
    dataset: Dataset[Any],
    sampler: ElasticSampler,
    *,
    crops: RandomCrops | CenterCrops | None = None,
    skipped: SkippedSamples | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    memory_format: MemoryFormat = "channels_last",
    num_workers: int | None = None,
    workers_if_needed: int = 0,
    pin_memory: bool = False,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = None,
) -> ElasticLoader:
    """A loader for a dataset in an elastic order.

    Args:
        dataset: Any map-style dataset; what it may offer is in `lightning_gpuopt.loading.datasets`.
        sampler: Which samples this rank gets; its order counts the dataset's samples.
        crops: What decodes and crops the images of a dataset that lets others decode them.
        skipped: Notes the samples that cannot be read and are left out; None: they are errors.
        collate_fn: Makes a batch of samples; None: torch's way.
        memory_format: Of images that this package decodes; others are collated as they come.
        num_workers: Worker processes; None: none where batches are gathered faster without, else `workers_if_needed`.
        workers_if_needed: See `num_workers`.
        pin_memory: Batches in page-locked memory.
        persistent_workers: Keep the workers between epochs; None: where there are workers.
        prefetch_factor: Batches each worker makes ahead.

    Raises:
        TypeError: There are `crops`, and the dataset lets nobody else decode its images.
    """
    batch_sampler = ElasticBatchSampler(sampler, sampler.batch_size, sampler.drop_last)
    source: Any = None
    if crops is None and skipped is None and collate_fn is None:
        source = gathered(dataset, pin_memory and torch.cuda.is_available())
    if source is not None:
        if num_workers is None and source.record_bytes * sampler.batch_size <= GATHER_BYTES:
            num_workers = 0
        if num_workers != 0:
            source.pin_memory = False  # a worker's batch is page-locked by the loader's own thread
        elif hasattr(source, "announce"):
            batch_sampler.announce = source.announce
        collate_fn = as_it_is
    elif crops is not None or skipped is not None or for_loader(dataset) is not None:
        source = EpochSamples(dataset, crops, seed=sampler.seed, skipped=skipped)
        collate_fn = collate_fn or Collate(memory_format, source.name)
    else:
        source = dataset  # it may have a way of its own to give a batch's samples
        collate_fn = collate_fn or Collate("contiguous")
    gathers = collate_fn is as_it_is
    workers = workers_if_needed if num_workers is None else num_workers
    loader = ElasticLoader(
        source,
        batch_sampler=batch_sampler,
        collate_fn=collate_fn,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=bool(workers) if persistent_workers is None else persistent_workers and bool(workers),
        prefetch_factor=prefetch_factor if workers else None,
    )
    loader.draws_random_state = not gathers
    return loader
