"""DataLoaders over any map-style dataset in elastic order, with whole batches read at once if the dataset can."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_gpuopt.compat.dataloader import copy_of, pin_batch
from lightning_gpuopt.loading.collate import Collate, MemoryFormat, as_it_is
from lightning_gpuopt.loading.datasets import for_loader, gathered, is_read_by_sample
from lightning_gpuopt.loading.engine.engine import MAX_AHEAD_BYTES, CannotServe
from lightning_gpuopt.loading.engine.iterator import EngineIterator, why_not_served
from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler, PlacedBatches, ResumableLoader
from lightning_gpuopt.loading.samples import EpochSamples, SeededCollate, SkippedSamples
from lightning_gpuopt.timeline.worker_clock import TimedCollate, untimed

if TYPE_CHECKING:  # else callbacks would need the decoders
    from lightning_gpuopt.images.crop import CenterCrops, RandomCrops

log = logging.getLogger(__name__)

_ANNOUNCED: Final = 2  # batches that are being read from storage while one is gathered
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
    is_trial = False  # of a number of workers
    torch_is_faster = False  # loader processes were found to be slower than torch's workers
    cpus = 0  # that loader processes may share, as many and with threads as is best; 0: there are `num_workers` of them
    max_ahead_bytes: int | None = (
        None  # of batches made ahead; None: as many as ``prefetch_factor`` says, and room allows
    )
    epochs = -1  # that have begun, of which the last has this number

    @property
    def shares_cpus(self) -> bool:
        """Whether `num_workers` is how many CPUs there are, and nobody has asked for as many processes."""
        return self.num_workers == self.cpus

    @property
    def sampler(self) -> Any:
        """The sampler behind the batches."""
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

    def _reader(self) -> ElasticLoader:
        """The loader whose dataset and ``collate_fn`` make the batches."""
        return self

    def _get_iterator(self) -> Any:
        """Loader processes that fill batches sample by sample, if possible; else torch's iterator."""
        loader = self._reader()
        if not self.num_workers:
            return DataLoader._get_iterator(loader)
        state = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        why = why_not_served(loader)
        if why is None:
            try:
                return EngineIterator(loader)
            except CannotServe as reason:
                why = str(reason)
                if isinstance(self.sampler, ElasticSampler):
                    self.sampler.begin_again()
                elif isinstance(loader.batch_sampler, PlacedBatches):
                    loader.batch_sampler.begun = reason.begun
            if not isinstance(loader.batch_sampler, PlacedBatches):
                (torch.default_generator if self.generator is None else self.generator).set_state(state)
        if not self.is_trial:
            self._say_that_workers_load(why)
        return DataLoader._get_iterator(loader)

    def _say_that_workers_load(self, why: str) -> None:
        log.debug("DataLoader workers load: %s", why)

    def __iter__(self) -> Any:
        self.epochs += 1
        if self.num_workers == 0 and getattr((reader := self._reader()).dataset, "gathers_batches", False):
            return _GatheredBatches(reader)
        if isinstance(self._iterator, EngineIterator) and self._iterator.torch_is_faster:
            self.torch_is_faster, self._iterator = True, None
        return super().__iter__()


class _Fetcher:
    """What torch's iterators call their fetcher, for whoever measures it: it gives the batch of some indices."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def fetch(self, indices: list[int]) -> Any:
        return self.collate_fn(self.dataset.__getitems__(indices))


def _announced(batches: Iterator[Any], announce: Callable[[Any], None]) -> Iterator[Any]:
    """The same batches of indices, each of which is told to a function before two others are given out."""
    waiting: deque[Any] = deque()
    for batch in batches:
        announce(batch)
        waiting.append(batch)
        if len(waiting) > _ANNOUNCED:
            yield waiting.popleft()
    yield from waiting


class _GatheredBatches:
    """An epoch's batches, gathered in this process: torch's own iterator takes a fifth of a small batch's time."""

    def __init__(self, loader: ElasticLoader) -> None:
        batches = loader.batch_sampler
        assert batches is not None
        self._indices: Iterator[list[int]] = iter(batches)
        if type(batches) is ElasticBatchSampler:  # it makes no difference when its indices are drawn
            self._indices = _announced(self._indices, loader.dataset.announce)  # type: ignore[attr-defined]
        self._fetcher = _Fetcher(loader.dataset, loader.collate_fn)
        self._pins = loader.pin_memory and torch.cuda.is_available()
        self._num_yielded = 0

    def __iter__(self) -> _GatheredBatches:
        return self

    def __next__(self) -> Any:
        batch = self._fetcher.fetch(next(self._indices))
        self._num_yielded += 1
        return pin_batch(batch, None) if self._pins else batch


def timed_as(theirs: Callable[[Any], Any], collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A ``collate_fn`` that is timed in the workers if the loader's own is."""
    if not isinstance(theirs, TimedCollate):
        return collate_fn
    timed = copy.copy(theirs)  # which times nothing, until it is given all that the other has
    vars(timed).update(vars(theirs), collate_fn=collate_fn)
    return timed


def sample_tasks(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a copy of a DataLoader has in place of its own, so that an `EngineIterator` makes the very same batches."""
    samples = EpochSamples(loader.dataset)
    attributes = {name: getattr(ElasticLoader, name) for name in ("keeps_readers", "pins_in_place", "torch_is_faster")}
    return {
        **attributes,
        "dataset": samples,
        "collate_fn": timed_as(loader.collate_fn, Collate("contiguous", samples.name)),
        "in_order": True,
        "max_ahead_bytes": MAX_AHEAD_BYTES,
        "shares_cpus": False,
    }


def why_no_sample_tasks(loader: DataLoader[Any]) -> str | None:
    """Why the samples of a plain DataLoader cannot be tasks, as far as is known before one is read."""
    if untimed(loader.collate_fn) is not default_collate:
        return "its collate_fn is not torch's default_collate"
    if not is_read_by_sample(loader.dataset):
        return "its dataset returns whole batches (__getitems__)"
    return why_not_served(copy_of(loader, **sample_tasks(loader)))


class Reading(NamedTuple):
    """How a loader reads a dataset: what it reads in place of it, and the ``collate_fn`` for that."""

    source: Any
    collate_fn: Callable[[Any], Any]

    @classmethod
    def of(
        cls,
        dataset: Any,
        *,
        seed: int,
        crops: RandomCrops | CenterCrops | None = None,
        skipped: SkippedSamples | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        memory_format: MemoryFormat = "channels_last",
    ) -> Reading:
        """What a dataset may offer is in `loading/datasets.py`; without `skipped` unreadable samples are errors.

        `memory_format` is of images that this package decodes. TypeError: `crops`, but the dataset lets nobody else
        decode its images.
        """
        if crops is None and skipped is None and collate_fn is None and (source := gathered(dataset)) is not None:
            return cls(source, as_it_is)
        if crops is None and skipped is None and not is_read_by_sample(dataset):
            return cls(dataset, collate_fn or Collate("contiguous"))  # it has a way of its own to give batches
        samples = EpochSamples(dataset, crops, seed=seed, skipped=skipped)
        if collate_fn is not None:
            return cls(samples, SeededCollate(collate_fn, samples))
        ours = for_loader(dataset) is not None
        return cls(samples, Collate(memory_format if ours else "contiguous", samples.name))

    def without_processes(self, batch_sampler: ElasticBatchSampler) -> bool:
        """Whether batches are gathered faster in the training process."""
        return self.collate_fn is as_it_is and self.source.record_bytes * batch_sampler.batch_size <= GATHER_BYTES


def make_loader(
    dataset: Dataset[Any],
    sampler: ElasticSampler,
    *,
    num_workers: int | None = None,
    workers_if_needed: int = 0,
    pin_memory: bool = False,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = None,
    **reading: Any,
) -> ElasticLoader:
    """A loader for any map-style dataset in an elastic order; `reading` are arguments of `Reading.of`.

    `num_workers` are loader processes, or torch's workers where samples have no fixed layout in a batch; None: none
    if batches are gathered faster without, else as are best for `workers_if_needed` CPUs.
    """
    source, collate_fn = read = Reading.of(dataset, seed=sampler.seed, **reading)
    batch_sampler = ElasticBatchSampler(sampler, sampler.batch_size, sampler.drop_last)
    workers = workers_if_needed if num_workers is None else num_workers
    if num_workers is None and read.without_processes(batch_sampler):
        workers = 0
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
