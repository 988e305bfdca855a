"""The samples of a batch, decoded and cropped by their place in the epoch, and those left out that cannot be read."""

from __future__ import annotations

import csv
import io
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_gpuopt.images.errors import CorruptSampleError, is_bad_image, reason_of
from lightning_gpuopt.loaders.sample_keys import each_of
from lightning_gpuopt.loading import datasets
from lightning_gpuopt.loading.order import mix
from lightning_gpuopt.loading.sampler import BatchIndices
from lightning_gpuopt.prefetch.randomness import RandomStates

if TYPE_CHECKING:  # else callbacks would need the decoders
    from lightning_gpuopt.images.crop import CenterCrops, RandomCrops


class EpochSamples(Dataset[Any]):
    """A dataset as a loader reads it.

    A random crop depends on the seed, the epoch and the position in it only: the same on any number of workers and
    ranks, after a resume, and another one each time that a sample is drawn. So do the random numbers that a transform,
    or a dataset of the user's, draws from the global states of torch, numpy and Python; generators of their own are
    theirs. Without `skipped` unreadable samples are errors. TypeError: `crops`, but others cannot decode the dataset's
    images.
    """

    def __init__(
        self,
        dataset: Any,
        crops: RandomCrops | CenterCrops | None = None,
        *,
        seed: int = 0,
        skipped: SkippedSamples | None = None,
    ) -> None:
        own = datasets.for_loader(dataset) if crops is None else datasets.with_decoder(dataset, crops)
        if own is None and crops is not None:
            raise TypeError(f"a {type(dataset).__name__} has no method with_decoder")
        self.dataset = dataset if own is None else own
        self.crops = crops
        self.seed = seed
        self.skipped = skipped
        self.seeds = not datasets.runs_our_code_only(self.dataset)
        """Whether random numbers may be drawn as a sample is read."""
        self.given: list[int] = []
        """The indices of the last batch's samples, in their order."""
        self.collation_key = 0
        """What the random numbers are seeded with that a ``collate_fn`` may draw for the last batch."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch without its unreadable samples; CorruptSampleError if none is left, or none may be skipped."""
        epoch, first = (indices.epoch, indices.first) if isinstance(indices, BatchIndices) else (0, 0)
        self.read_ahead(indices)
        samples = []
        self.given = []
        with given_back() if self.seeds else nullcontext():
            for position, index in enumerate(each_of(indices), first):
                sample = self.read(index, epoch, position)
                if not isinstance(sample, Skipped):
                    samples.append(sample)
                    self.given.append(index)
        if not samples and len(indices):
            raise none_of(len(indices), sample)
        self.collation_key = mix(self.seed, epoch, first, _COLLATION)
        return samples

    def read_ahead(self, indices: Sequence[int]) -> None:
        datasets.read_ahead(self.dataset, indices)

    def read(self, index: int, epoch: int, position: int) -> Any:
        """A sample at a position of an epoch, or `Skipped`; CorruptSampleError if unreadable ones are errors."""
        if self.crops is not None:
            self.crops.begin(mix(self.seed, epoch, position))
        if self.seeds:
            seed_all(mix(_key_of(self.seed, epoch, _SAMPLE), position))
        try:
            return self.dataset[index]
        except Exception as error:
            if self.skipped is None or not self._is_corrupt(error, index):
                raise
            self.skipped.add(datasets.sample_name(self.dataset, index), error)
            return Skipped(error)

    def _is_corrupt(self, error: Exception, index: int) -> bool:
        """Whether the sample cannot be read; datasets of this package say so, of others PIL's errors do."""
        if isinstance(error, CorruptSampleError):
            return True
        return not datasets.offers(datasets.locate(self.dataset, index)[0], "for_loader") and is_bad_image(error)

    def name(self, at: int) -> str:
        """What users call the sample at a position of the last batch that this process read."""
        return datasets.sample_name(self.dataset, self.given[at])


class Skipped:
    """A sample that cannot be read and is left out, with what reading it raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return Skipped, (CorruptSampleError(str(self.error)),)  # others may not travel


def none_of(count: int, last: Skipped) -> CorruptSampleError:
    """What a batch raises all of whose samples are left out."""
    error = CorruptSampleError(
        f"none of the {count} samples of a batch can be read, and a batch cannot be empty; the last: {last.error}"
    )
    error.__cause__ = last.error
    return error


_SAMPLE, _COLLATION = 1, 2

_key_of = lru_cache(mix)  # of an epoch: to compute it for each sample takes longer than to read a row of a table


def seed_all(key: int) -> None:
    """Seed the random numbers of torch, numpy and Python that have no generator of their own, with 64 bits."""
    torch.default_generator.manual_seed(key)  # torch.manual_seed, which sees to every device, takes 90 times as long
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


@contextmanager
def given_back() -> Iterator[None]:
    """Have these random numbers go on afterwards as if none had been drawn."""
    states = RandomStates()
    try:
        yield
    finally:
        states.restore()


def keep_heap() -> None:
    """Have glibc keep the memory of a batch for the next one.

    Else it gives the end of the heap back to the kernel whenever a batch is freed, and every page of the next batch
    is a fault: half the time of reading. It stops doing so after a large block was freed (mallopt(3), M_TRIM_THRESHOLD
    and the dynamic mmap threshold); such a block costs nothing, as it is never touched.
    """
    bytes(16 << 20)


class SeededCollate:
    """A user's ``collate_fn``, whose random numbers depend on the seed, the epoch and the batch's first position."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], samples: EpochSamples) -> None:
        self.collate_fn = collate_fn
        self._samples = samples

    def __call__(self, samples: list[Any]) -> Any:
        with given_back():
            seed_all(self._samples.collation_key)
            return self.collate_fn(samples)


class SkippedSamples:
    """A CSV list (name, reason) of unreadable samples; workers and ranks add to it, the training process reads it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._added: set[str] = set()
        self._reported = 0

    def add(self, name: str, error: Exception) -> None:
        """Note a sample, and warn of the first."""
        if name in self._added:
            return
        reason = reason_of(error).removeprefix(f"{name}: ")
        if not self._added:
            warnings.warn(f"{name} cannot be read and is skipped: {reason}", stacklevel=3)
        self._added.add(name)
        row = io.StringIO()
        csv.writer(row).writerow((name, reason))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            warnings.warn(f"{self.path}: skipped samples cannot be listed there: {error}", stacklevel=3)
            return
        try:
            os.write(file, row.getvalue().encode("utf-8", "backslashreplace"))  # appended whole, whoever else writes
        finally:
            os.close(file)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def new_skips(self) -> str | None:
        """A sentence on the samples, if there are more than the last time."""
        found = self.read()
        if len(found) <= self._reported:
            return None
        self._reported = len(found)
        return (
            f"{len(found)} samples cannot be read and were skipped (the first: {next(iter(found))}); {self.path} lists "
            "them"
        )

    def read(self) -> dict[str, str]:
        """The reasons by the samples' names, of all processes."""
        try:
            with self.path.open(encoding="utf-8", newline="") as stream:
                return {row[0]: row[1] for row in csv.reader(stream) if len(row) == 2}
        except FileNotFoundError:
            return {}
