"""Batches of equal records, gathered without worker processes: one copy from the page cache to the batch.

Into page-locked memory it is two, the first of which is in a cache by then.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from lightning_gpuopt.loading.datasets import Indices
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.format import TABLE_HEAD_BYTES, Manifest, table_bytes
from lightning_gpuopt.storage.region import Region, blocks_read
from lightning_gpuopt.storage.value import buffers, parse, sample_number

Columns = Sequence[torch.Tensor]

_KEPT: Final = 1 << 20
"""The places of so many records are kept, 16 bytes each: looking them up takes a tenth of a small batch's time."""


class StoredRecords(Protocol):
    """A dataset of records, as far as they are gathered."""

    path: Path
    manifest: Manifest
    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None
    verify_checksum: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def value(self, index: int) -> bytes | memoryview:
        """The stored bytes of a sample."""


class GatherPlan:
    """How the records of a dataset become the columns of a batch. Use `plan`, which says whether they can.

    Args:
        record: One stored value of the dataset; all others have the same structure and size.
    """

    def __init__(self, record: bytes) -> None:
        self.record = record
        self.record_bytes = len(record)
        self.head = parse(record)
        self.assemble, columns = _columns(codec.tree(record[self.head.structure : self.head.buffers]), 0)
        places = [start for start, _ in buffers(record, self.head)]
        self.columns = [(start, *column) for start, column in zip(places, columns, strict=True)]
        # What every record begins with, from the stamp's end on: number, structure, head of the first buffer. As 64-bit
        # words, of which the second is the number; the mask leaves that out, the checksum, and what comes after.
        self.skipped = self.head.content - 8
        head_bytes = places[0] - self.skipped
        self.head_words = -(-head_bytes // 8)
        mask = np.zeros(8 * self.head_words, np.uint8)
        mask[16:head_bytes] = 0xFF
        self.mask = mask.view(np.uint64)
        self.prefix = (
            np.frombuffer(record[self.skipped :].ljust(mask.size, b"\0"), np.uint64, self.head_words) & self.mask
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return GatherPlan, (self.record,)

    def fits(self, other: GatherPlan) -> bool:
        """Whether records of both make up one batch."""
        same = self.record_bytes == other.record_bytes and self.head_words == other.head_words
        structure = slice(self.head.structure, self.head.buffers)
        return same and self.record[structure] == other.record[structure]


def _columns(tree: Any, at: int) -> tuple[Callable[[Columns], Any], list[tuple[torch.dtype, tuple[int, ...]]]]:
    """What puts a batch together from its columns, beginning with number `at`, and the columns' dtypes and shapes.

    The batch is what torch's ``default_collate`` makes of the samples.

    Raises:
        TypeError: A part of the sample is not a number or an array of numbers.
    """
    kind, *rest = tree
    if kind in ("tuple", "list", "dict"):
        columns: list[tuple[torch.dtype, tuple[int, ...]]] = []
        children = []
        for child in rest[-1]:
            build, more = _columns(child, at + len(columns))
            children.append(build)
            columns += more
        if kind == "dict":
            return lambda c: {k: build(c) for k, build in zip(rest[0], children, strict=True)}, columns
        return lambda c: [build(c) for build in children], columns
    return lambda c: c[at], [_column(kind, rest)]


def _column(kind: str, rest: list[Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    if kind == "int":
        return torch.int64, ()
    if kind == "float":
        return torch.float64, ()
    if kind == "bool":
        return torch.bool, ()
    if kind == "tensor":
        return codec.torch_dtype(rest[0]), tuple(rest[1])
    if kind in ("array", "scalar"):
        dtype = codec.numpy_dtype(rest[0])
        if not dtype.isnative:
            raise TypeError(f"numpy dtype {dtype}")
        return torch.from_numpy(np.empty(0, dtype)).dtype, tuple(rest[1]) if kind == "array" else ()
    raise TypeError(kind)


def gather(
    datasets: Sequence[StoredRecords], indices: Indices | None = None, pin_memory: bool = False
) -> Gather | None:
    """A `Gather` over datasets; None where their records are not equal arrays and numbers."""
    try:
        return Gather(datasets, indices, pin_memory)
    except TypeError:
        return None


def plan(dataset: StoredRecords) -> GatherPlan | None:
    """How to gather a dataset's batches; None where its records are not equal arrays and numbers.

    A dataset with transforms has none: they want one sample at a time.
    """
    manifest = dataset.manifest
    if dataset.transform is not None or dataset.target_transform is not None or dataset.verify_checksum:
        return None
    if manifest.record_bytes is None or manifest.structure is None:
        return None
    try:
        return GatherPlan(bytes(dataset.value(0)))
    except (TypeError, IndexError):
        return None


class Gather:
    """A dataset whose batches are gathered. For a DataLoader with `batch_sampler` and `collate_fn=as_it_is`.

    Args:
        datasets: Where the samples come from, counted through; `plan` must have one for each, and they must fit.
        indices: Those of their samples that count, in this order; None: all.
        pin_memory: Put batches into page-locked memory (torch's allocator keeps and reuses it).
    """

    gathers_batches = True

    def __init__(
        self, datasets: Sequence[StoredRecords], indices: Indices | None = None, pin_memory: bool = False
    ) -> None:
        plans = [plan(dataset) for dataset in datasets]
        first = plans[0]
        for dataset, found in zip(datasets, plans, strict=True):
            if first is None or found is None or not first.fits(found):
                raise TypeError(f"{dataset.path}: its records are not equal arrays and numbers")
        assert first is not None
        self.datasets = list(datasets)
        self.indices = indices
        self.pin_memory = pin_memory
        self._starts = [0, *accumulate(len(dataset) for dataset in datasets)]
        self._plan = first
        self._files: _RecordFiles | None = None
        self._from_disk = self._asked = False  # whether batches come from the disk; the reading ahead asked it for some

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}

    def __len__(self) -> int:
        return self._starts[-1] if self.indices is None else len(self.indices)

    @property
    def record_bytes(self) -> int:
        """Bytes of a stored sample."""
        return self._plan.record_bytes

    def __getitem__(self, index: int) -> Any:
        return self._sample(index if self.indices is None else int(self.indices[index]))

    def _sample(self, number: int) -> Any:
        at = bisect_right(self._starts, number) - 1
        return self.datasets[at][number - self._starts[at]]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A batch: what ``default_collate`` would make of these samples.

        Raises:
            DamagedError: A record is not what was written.
            IndexError: An index is out of range.
        """
        wanted = self._stored(indices)
        before = blocks_read()
        starts = self._locate(wanted)
        columns = [self._column(starts + start, dtype, shape) for start, dtype, shape in self._plan.columns]
        self._from_disk = self._asked or blocks_read() != before
        return self._plan.assemble(columns)

    def _column(self, starts: Indices, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of these records, ``[B, *shape]``; `starts` is where it begins in each."""
        if not self.pin_memory and len(starts) and 0 not in shape:
            rows = self._opened.region.rows(starts, dtype.itemsize * math.prod(shape))
            return torch.from_numpy(rows).view(dtype).view(len(starts), *shape)
        column = torch.empty((len(starts), *shape), dtype=dtype, pin_memory=self.pin_memory)
        if column.numel():
            flat = column.view(len(starts), -1).view(torch.uint8).numpy()
            flat[...] = self._opened.region.rows(starts, flat.shape[1])
        return column

    def announce(self, indices: Sequence[int]) -> None:
        """Have the kernel begin to read a batch that is gathered soon, where the last one came from the disk.

        Else this process, which trains, would wait for each page in turn.
        """
        if not self._from_disk:
            return
        before = blocks_read()
        self._opened.read_ahead(self._stored(indices), self._plan.record_bytes)
        self._asked = blocks_read() != before

    @property
    def _opened(self) -> _RecordFiles:
        if self._files is None:
            self._files = _RecordFiles(self.datasets)
        return self._files

    def _stored(self, indices: Sequence[int]) -> Indices:
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(
                f"{self.datasets[0].path}: a sample of {min(indices)}..{max(indices)} is not in it; it has {len(self)}"
            )
        return wanted if self.indices is None else self.indices[wanted]

    def _locate(self, wanted: Indices) -> Indices:
        """Where these records begin in the region, int64 ``[B]``; each is looked at as a single read would.

        Raises:
            DamagedError: One of them is not what was written.
        """
        files, plan = self._opened, self._plan
        starts, numbers, good = files.places(wanted, plan.record_bytes)
        if good is None or good.all():
            # The checksums are not compared here, as they are not where samples are read one by one.
            heads = files.region.rows(starts + plan.skipped, 8 * plan.head_words).view(np.uint64)
            alike = heads & plan.mask == plan.prefix
            right = heads[:, 1].view(">i8") == numbers
            if right.all() and alike.all():
                return starts
            good = right & alike.all(1)
        bad = int(wanted[~good][0])
        self._sample(bad)  # says what is wrong with it
        at = bisect_right(self._starts, bad) - 1
        raise DamagedError(
            f"{self.datasets[at].path}: sample {bad - self._starts[at]}: not the record that was written; build it "
            "again"
        )


class _RecordFiles:
    """The files of datasets in one region, and where each record lies in it."""

    def __init__(self, datasets: Sequence[StoredRecords]) -> None:
        shards = [(each, shard) for each in datasets for shard in each.manifest.shards if shard.num_samples]
        files = []
        for dataset, shard in shards:
            path = dataset.path / f"{shard.name}.mdb"
            files += [(path, shard.file_bytes), (path.with_suffix(".tab"), table_bytes(shard.num_samples))]
        self.region = Region(files)
        # numpy where there is arithmetic on a batch's worth of numbers: a tenth of what torch takes to get going.
        counts = np.array([shard.num_samples for _, shard in shards], dtype=np.int64)
        self._firsts, self._num_samples = np.cumsum(counts) - counts, int(counts.sum())
        self._kept: tuple[Indices, Indices, np.ndarray[Any, Any] | None] | None = None
        self._data, self._tables = self.region.starts[0::2], self.region.starts[1::2] + TABLE_HEAD_BYTES
        self._sizes = np.array([shard.file_bytes for _, shard in shards], dtype=np.int64)
        self._numbers = np.array([shard.number for _, shard in shards], dtype=np.int64)
        digests = self.region.rows(self.region.starts[1::2] + TABLE_HEAD_BYTES - 8, 8)
        for (dataset, shard), digest in zip(shards, digests, strict=True):
            if digest.tobytes().hex() != shard.digest:
                raise DamagedError(
                    f"{dataset.path}: {shard.name} is not the one that the manifest tells of; if the dataset was built "
                    "anew meanwhile, open it again, else copy it again"
                )

    def places(self, wanted: Indices, record_bytes: int) -> tuple[Indices, Indices, np.ndarray[Any, Any] | None]:
        """Where records begin in the region, their samples' numbers, and which lie in their file (None: all do)."""
        if self._num_samples > _KEPT:
            return self._look_up(wanted, record_bytes)
        if self._kept is None:
            starts, numbers, good = self._look_up(np.arange(self._num_samples), record_bytes)
            self._kept = starts, numbers, None if good.all() else good
        starts, numbers, which = self._kept
        return starts[wanted], numbers[wanted], None if which is None else which[wanted]

    def _look_up(self, wanted: Indices, record_bytes: int) -> tuple[Indices, Indices, np.ndarray[Any, Any]]:
        shards = self._firsts.searchsorted(wanted, side="right") - 1
        within = wanted - self._firsts[shards]
        offsets = self.region.rows(self._tables[shards] + 8 * within, 8).view(np.int64)[:, 0]
        good = (offsets >= 0) & (offsets <= self._sizes[shards] - record_bytes)
        return self._data[shards] + offsets, sample_number(self._numbers[shards], within), good

    def read_ahead(self, wanted: Indices, record_bytes: int) -> None:
        """Have the kernel begin to read records, without waiting for them."""
        starts, _, good = self.places(wanted, record_bytes)
        self.region.will_need(starts if good is None else starts[good], record_bytes)
