"""DataLoaders over any map-style dataset in elastic order, with whole batches read at once if the dataset can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.compat.dataloader import pin_batch
from lightning_gpuopt.compat.lightning import rank_zero_info
from lightning_gpuopt.loading.collate import Collate, MemoryFormat, as_it_is
from lightning_gpuopt.loading.datasets import for_loader, gathered, is_read_by_sample
from lightning_gpuopt.loading.engine.engine import CannotServe
from lightning_gpuopt.loading.engine.iterator import EngineIterator, can_serve
from lightning_gpuopt.loading.engine.shared_blocks import can_share
from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler, ResumableLoader
from lightning_gpuopt.loading.samples import EpochSamples, SeededCollate, SkippedSamples

if TYPE_CHECKING:  # else callbacks would need the decoders
    from lightning_gpuopt.images.crop import CenterCrops, RandomCrops

log = logging.getLogger(__name__)

GATHER_BYTES: Final = 1 << 20
"""Up to this size a batch is gathered in the training process (0.2 ms): in less time than another could say it is
done."""


class ElasticLoader(ResumableLoader, DataLoader[Any]):
    """A DataLoader that shows its `ElasticSampler`, and no sequential one, which Lightning would replace."""

    draws_random_state = True  # the training process's random state may change when it takes a batch
    iterates_as_torch = True
    # each sample has the same worker in every run: workers hold generators of their own, so torch's load
    keeps_readers = False
    # with `pin_memory` the loader processes' memory is page-locked itself: nobody else may copy batches
    pins_in_place = False
    torch_is_faster = False  # loader processes were found to be slower than torch's workers
    cpus = 0  # that loader processes may share, as many and with threads as is best; 0: there are `num_workers` of them

    @property
    def shares_cpus(self) -> bool:
        """Whether `num_workers` is how many CPUs there are, and nobody has asked for as many processes."""
        return self.num_workers == self.cpus

    @property
    def sampler(self) -> Any:
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Nothing: torch's __init__ assigns one."""

    @property
    def _iterator(self) -> Any:
        """The iterator that persists between epochs."""
        return vars(self).get("_iterator")

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        """Keep it, or end what was kept: Lightning has torch's workers end, and knows no others.

        A traceback may hold the iterator for long.
        """
        before, vars(self)["_iterator"] = self._iterator, value
        if value is None and isinstance(before, EngineIterator):
            try:
                before._shutdown_workers()
            except Exception:  # Lightning is on its way to raise the user's own, perhaps
                log.warning("ending loader processes failed", exc_info=True)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has processes of its own."""
        return {**vars(self), "_iterator": None}

    def _get_iterator(self) -> Any:
        """Loader processes that fill batches sample by sample, if possible; else torch's iterator."""
        if not self.num_workers or not can_serve(self):
            return super()._get_iterator()
        if not can_share():
            _say_that_nothing_is_shared()
            return super()._get_iterator()
        state = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        try:
            return EngineIterator(self)
        except CannotServe as reason:
            log.debug("DataLoader workers load: %s", reason)
            if isinstance(self.sampler, ElasticSampler):
                self.sampler.begin_again()
        (torch.default_generator if self.generator is None else self.generator).set_state(state)
        return super()._get_iterator()

    def __iter__(self) -> Any:
        if self.num_workers == 0 and getattr(self.dataset, "gathers_batches", False):
            return _GatheredBatches(self)
        if isinstance(self._iterator, EngineIterator) and self._iterator.torch_is_faster:
            self.torch_is_faster, self._iterator = True, None
        return super().__iter__()


@cache
def _say_that_nothing_is_shared() -> None:
    rank_zero_info(
        "DataLoader workers load: this system has no memory files (memfd_create, Linux 3.17 or later) for loader "
        "processes to fill batches in"
    )


class _Fetcher:
    """What torch's iterators call their fetcher, for whoever measures it: it gives the batch of some indices."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def fetch(self, indices: list[int]) -> Any:
        return self.collate_fn(self.dataset.__getitems__(indices))


class _GatheredBatches:
    """An epoch's batches, gathered in this process: torch's own iterator takes a fifth of a small batch's time."""

    def __init__(self, loader: ElasticLoader) -> None:
        assert loader.batch_sampler is not None
        self._indices: Iterator[list[int]] = iter(loader.batch_sampler)
        self._fetcher = _Fetcher(loader.dataset, loader.collate_fn)
        self._pins = loader.pin_memory and torch.cuda.is_available()

    def __iter__(self) -> _GatheredBatches:
        return self

    def __next__(self) -> Any:
        batch = self._fetcher.fetch(next(self._indices))
        return pin_batch(batch, None) if self._pins else batch


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
    """A loader for any map-style dataset in an elastic order; what a dataset may offer is in `loading/datasets.py`.

    `num_workers` are loader processes, or torch's workers where samples have no fixed layout in a batch; None: none
    if batches are gathered faster without, else as are best for `workers_if_needed` CPUs. Without `skipped`
    unreadable samples are errors. `memory_format` is of images that this package decodes. TypeError: `crops`, but the
    dataset lets nobody else decode its images.
    """
    batch_sampler = ElasticBatchSampler(sampler, sampler.batch_size, sampler.drop_last)
    source: Any = None
    if crops is None and skipped is None and collate_fn is None:
        source = gathered(dataset)
    if source is not None:
        if num_workers is None and source.record_bytes * sampler.batch_size <= GATHER_BYTES:
            num_workers = 0
        if num_workers == 0:
            batch_sampler.announce = source.announce
        collate_fn = as_it_is
    elif crops is not None or skipped is not None or is_read_by_sample(dataset):
        source = EpochSamples(dataset, crops, seed=sampler.seed, skipped=skipped)
        if collate_fn is None:
            ours = for_loader(dataset) is not None
            collate_fn = Collate(memory_format if ours else "contiguous", source.name)
        else:
            collate_fn = SeededCollate(collate_fn, source)
    else:
        source = dataset  # it may have a way of its own to give a batch's samples
        collate_fn = collate_fn or Collate("contiguous")
    workers = workers_if_needed if num_workers is None else num_workers
    loader = ElasticLoader(
        source,
        batch_sampler=batch_sampler,
        collate_fn=collate_fn,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=bool(workers) and persistent_workers is not False,
        prefetch_factor=prefetch_factor if workers else None,
    )
    loader.cpus = workers if num_workers is None else 0
    loader.draws_random_state = collate_fn is not as_it_is
    return loader
