"""Batches of equal records, gathered from the page cache into the batch itself.

Small records are copied out of memory maps in one call. A large one is one `preadv`, which puts its large parts where
the batch has them, and all else aside.
"""

from __future__ import annotations

import errno
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from lightning_gpuopt.loading.datasets import Indices
from lightning_gpuopt.loading.engine.layout import Array, Column, Layout
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.format import Manifest
from lightning_gpuopt.storage.leaves import numpy_dtype, torch_dtype
from lightning_gpuopt.storage.mapped_files import Region
from lightning_gpuopt.storage.shard import LARGE, ShardReader, blocks_read, read_exactly
from lightning_gpuopt.storage.value import buffers, parse, sample_number

Columns = Sequence[torch.Tensor]

# the places of so many records are kept, 16 bytes each: looking them up takes a tenth of a small batch's time
_PLACES: Final = 1 << 20
_COPIED: Final = 4 << 20  # batches of up to so many bytes are copied out of maps, if the last one came from memory
_MAPPED: Final = 1024  # shards of which the files are mapped in one stretch, at most
_PART: Final = 256  # bytes from which on a part is read to its place; copying smaller ones is faster
_MOST_PARTS: Final = 256  # that are read to their places: one call takes 1,024 pieces


class StoredRecords(Protocol):
    """A dataset of records, as far as they are gathered."""

    path: Path
    manifest: Manifest
    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None
    verify_checksum: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def value(self, index: int) -> bytes:
        """The stored bytes of a sample."""

    def shard(self, at: int) -> ShardReader:
        """The reader of a shard."""


class GatherPlan:
    """How records, all of the structure and size of `record`, become the columns of a batch. Use `plan`."""

    def __init__(self, record: bytes) -> None:
        self.record = record
        self.record_bytes = len(record)
        self.head = parse(record)
        self.assemble, columns = _columns(codec.tree(record[self.head.structure : self.head.buffers]), 0)
        places = [start for start, _ in buffers(record, self.head)]
        self.columns = [(start, *column) for start, column in zip(places, columns, strict=True)]
        # What is compared of every record: its number, then what all have in common before their first buffer.
        self.content = self.head.content
        self.head_bytes = places[0] - self.content
        self.prefix = np.frombuffer(record, np.uint8)[self.content + 8 : places[0]]

        large = [at for at, (_, dtype, shape) in enumerate(self.columns) if _num_bytes(dtype, shape) >= _PART]
        self.large = set(large[:_MOST_PARTS])
        # A row of what is read aside.
        self.row_bytes = self.record_bytes - sum(_num_bytes(*self.columns[at][1:]) for at in self.large)

    def __reduce__(self) -> tuple[Any, ...]:
        return GatherPlan, (self.record,)

    def fits(self, other: GatherPlan) -> bool:
        """Whether records of both make up one batch."""
        structure = slice(self.head.structure, self.head.buffers)
        return self.record_bytes == other.record_bytes and self.record[structure] == other.record[structure]


def _num_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _columns(tree: Any, at: int) -> tuple[Callable[[Columns], Any], list[tuple[torch.dtype, tuple[int, ...]]]]:
    """What makes a batch of columns from number `at` on, and their dtypes and shapes; TypeError: other than numbers."""
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
        return torch_dtype(rest[0]), tuple(rest[1])
    if kind in ("array", "scalar"):
        dtype = numpy_dtype(rest[0])
        if not dtype.isnative:
            raise TypeError(f"numpy dtype {dtype}")
        return torch.from_numpy(np.empty(0, dtype)).dtype, tuple(rest[1]) if kind == "array" else ()
    raise TypeError(kind)


def gather(datasets: Sequence[StoredRecords], indices: Indices | None = None) -> Gather | None:
    """A `Gather` over datasets; None if their records are not equal arrays and numbers."""
    try:
        return Gather(datasets, indices)
    except TypeError:
        return None


def plan(dataset: StoredRecords) -> GatherPlan | None:
    """How to gather a dataset's batches; None if it has transforms, or records are not equal arrays and numbers."""
    manifest = dataset.manifest
    if dataset.transform is not None or dataset.target_transform is not None or dataset.verify_checksum:
        return None
    if manifest.record_bytes is None or manifest.structure is None:
        return None
    try:
        return GatherPlan(dataset.value(0))
    except (TypeError, IndexError, DamagedError):  # whoever reads a damaged sample is told
        return None


class Gather:
    """A dataset whose batches are gathered. For a DataLoader with `batch_sampler` and `collate_fn=as_it_is`.

    `plan` must have a fitting plan for each of `datasets`; `indices` count through all of them (None: all samples, in
    order).
    """

    gathers_batches = True

    def __init__(self, datasets: Sequence[StoredRecords], indices: Indices | None = None) -> None:
        plans = [plan(dataset) for dataset in datasets]
        first = plans[0]
        for dataset, found in zip(datasets, plans, strict=True):
            if first is None or found is None or not first.fits(found):
                raise TypeError(f"{dataset.path}: its records are not equal arrays and numbers")
        assert first is not None
        self.datasets = list(datasets)
        self.indices = indices
        self._starts = [0, *accumulate(len(dataset) for dataset in datasets)]
        self._plan = first
        self._files: _RecordFiles | None = None
        self._memories: dict[int, _BatchMemory] = {}
        self._from_disk = self._asked = False  # whether batches come from the disk; the reading ahead asked it for some

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None, "_memories": {}}

    def __len__(self) -> int:
        return self._starts[-1] if self.indices is None else len(self.indices)

    @property
    def record_bytes(self) -> int:
        return self._plan.record_bytes

    def __getitem__(self, index: int) -> Any:
        return self._sample(index if self.indices is None else int(self.indices[index]))

    def _sample(self, number: int) -> Any:
        at = bisect_right(self._starts, number) - 1
        return self.datasets[at][number - self._starts[at]]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """What ``default_collate`` would make of these samples; DamagedError or IndexError."""
        memory = _BatchMemory(self._plan, max(len(indices), 1))
        return self._plan.assemble(self._columns(self._stored(indices), memory, 0))

    @property
    def layout(self) -> Layout:
        """How a batch lies in memory that `read_into` is given."""
        return Layout([Column(dtype, shape) for _, dtype, shape in self._plan.columns], None, self._plan.assemble)

    def read_into(self, indices: Sequence[int], arrays: list[Array], row: int, block: int) -> None:
        """Read samples into a batch's columns (``[B, *shape]``, as `layout` has them) from `row` on; DamagedError.

        `block` is a number that stands for these arrays.
        """
        memory = self._memories.get(block)
        if memory is None:
            memory = self._memories[block] = _BatchMemory(self._plan, len(arrays[0]), arrays)
        for array, column in zip(arrays, self._columns(self._stored(indices), memory, row), strict=True):
            here = array[row : row + len(indices)]
            if here.size and not memory.has(column):
                here.reshape(len(indices), -1).view(np.uint8)[...] = as_bytes(column)

    def _columns(self, wanted: Indices, memory: _BatchMemory, row: int) -> list[torch.Tensor]:
        """The parts of these records, ``[B, *shape]`` each, checked as by a single read (DamagedError)."""
        before, files, plan = blocks_read(), self._opened, self._plan
        starts, numbers, good = files.places(wanted, plan.record_bytes)
        if good is None or good.all():
            if files.region is None or self._from_disk or len(wanted) * plan.record_bytes > _COPIED:
                shards = files.shards(wanted)
                heads, columns = self._read(shards, files.in_files(shards, starts), memory, row)
            else:
                files.check(wanted)
                heads, columns = self._copied(files.region, starts)
            self._from_disk = self._asked or blocks_read() != before
            # The checksums are not compared here, as they are not if samples are read one by one.
            right = np.ascontiguousarray(heads[:, :8]).view(">i8")[:, 0] == numbers
            alike = heads[:, 8:] == plan.prefix
            if right.all() and alike.all():
                return columns
            good = right & alike.all(1)
        bad = int(wanted[~good][0])
        self._sample(bad)  # says what is wrong with it
        at = bisect_right(self._starts, bad) - 1
        raise DamagedError(
            f"{self.datasets[at].path}: sample {bad - self._starts[at]}: not the record that was written; build it "
            "again"
        )

    def _copied(self, region: Region, starts: Indices) -> tuple[Array, list[torch.Tensor]]:
        """What records begin with, and their parts, copied out of maps."""
        plan, size = self._plan, len(starts)
        # First a little of each record: the page that it begins in is known by the time all of it is copied.
        heads = region.rows(starts + plan.content, plan.head_bytes)
        columns = []
        for start, dtype, shape in plan.columns:
            if 0 in shape:
                columns.append(torch.empty((size, *shape), dtype=dtype))
            else:
                part = torch.from_numpy(region.rows(starts + start, _num_bytes(dtype, shape)))
                columns.append(part.view(dtype).view(size, *shape))
        return heads, columns

    def _read(
        self, shards: Indices, offsets: Indices, memory: _BatchMemory, row: int
    ) -> tuple[Array, list[torch.Tensor]]:
        rows, plan = slice(row, row + len(shards)), self._plan
        self._opened.read(shards, offsets, memory.vectors[rows], plan.record_bytes)
        return memory.heads[rows].copy(), [memory.column(at, rows) for at in range(len(plan.columns))]

    def announce(self, indices: Sequence[int]) -> None:
        """Have the kernel read a coming batch ahead, if the last came from the disk; else training waits for pages."""
        if not self._from_disk:
            return
        before = blocks_read()
        self._opened.read_ahead(self._stored(indices))
        self._asked = blocks_read() != before

    @property
    def _opened(self) -> _RecordFiles:
        if self._files is None:
            self._files = _RecordFiles(self.datasets, self._plan.record_bytes < LARGE)
        return self._files

    def _stored(self, indices: Sequence[int]) -> Indices:
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(
                f"{self.datasets[0].path}: a sample of {min(indices)}..{max(indices)} is not in it; it has {len(self)}"
            )
        return wanted if self.indices is None else self.indices[wanted]


class _BatchMemory:
    """Where at most `size` records of a batch are read to; without `arrays` the batch's columns are made."""

    def __init__(self, plan: GatherPlan, size: int, arrays: list[Array] | None = None) -> None:
        self._plan = plan
        self._size = size
        self._arrays = arrays
        self._places: list[int] = []  # of the parts in a row of what is read aside
        self._large: dict[int, Array] = {}

    @cached_property
    def _aside(self) -> Array:
        return np.zeros((self._size, self._plan.row_bytes), np.uint8)

    @cached_property
    def vectors(self) -> list[tuple[memoryview, ...]]:
        """The pieces of each record, in order."""
        plan, size, rows = self._plan, self._size, self._aside.data
        pieces: list[list[memoryview]] = []
        at = place = 0
        for number, (start, dtype, shape) in enumerate(plan.columns):
            self._places.append(place + start - at)
            if number in plan.large:
                num_bytes = _num_bytes(dtype, shape)
                if self._arrays is None:
                    part = np.empty((size, num_bytes), np.uint8)
                else:
                    part = self._arrays[number].reshape(size, -1).view(np.uint8)
                self._large[number] = part
                pieces += [_pieces(rows, place, place + start - at), _pieces(part.data, 0, num_bytes)]
                at, place = start + num_bytes, place + start - at
        pieces.append(_pieces(rows, place, place + plan.record_bytes - at))
        return list(zip(*pieces, strict=True))

    @property
    def heads(self) -> Array:
        return self._aside[:, self._plan.content : self._plan.content + self._plan.head_bytes]

    def column(self, number: int, rows: slice) -> torch.Tensor:
        """A part of some records, ``[B, *shape]``."""
        _, dtype, shape = self._plan.columns[number]
        count = rows.stop - rows.start
        if number in self._large:
            return torch.from_numpy(self._large[number][rows]).view(dtype).view(count, *shape)
        column = torch.empty((count, *shape), dtype=dtype)
        if column.numel():
            flat = as_bytes(column)
            place = self._places[number]
            flat[...] = self._aside[rows, place : place + flat.shape[1]]
        return column

    def has(self, column: torch.Tensor) -> bool:
        return self._arrays is not None and any(
            np.may_share_memory(part, as_bytes(column)) for part in self._large.values()
        )


def as_bytes(column: torch.Tensor) -> Array:
    """The rows of a column as bytes, uint8 ``[B, row bytes]``."""
    flat: Array = column.view(len(column), -1).view(torch.uint8).numpy()
    return flat


def _pieces(table: memoryview, start: int, stop: int) -> list[memoryview]:
    """This part of each row of a table of bytes."""
    num_rows, width = table.shape  # type: ignore[misc]
    flat = table.cast("B")
    return [flat[at + start : at + stop] for at in range(0, num_rows * width, width)]


class _RecordFiles:
    """The shards of datasets, and where each record lies; `small` ones are copied out of maps, where these fit."""

    def __init__(self, datasets: Sequence[StoredRecords], small: bool) -> None:
        shards = [
            each.shard(at) for each in datasets for at, found in enumerate(each.manifest.shards) if found.num_samples
        ]
        self._shards = shards
        # numpy where there is arithmetic on a batch's worth of numbers: a tenth of what torch takes to get going.
        counts = np.array([shard.num_samples for shard in shards], dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts
        self._sizes = np.array([shard.shard.file_bytes for shard in shards], dtype=np.int64)
        self._numbers = np.array([shard.number for shard in shards], dtype=np.int64)
        self._num_samples = int(counts.sum())
        self._kept: tuple[Indices, Indices, np.ndarray[Any, Any] | None] | None = None
        self.region: Region | None = None  # the files in one stretch; None: they are to be read
        if small and len(shards) <= _MAPPED:
            try:
                self.region = Region(self._sizes.tolist(), self._opened())
            except OSError as err:  # not enough address space
                if err.errno != errno.ENOMEM:
                    raise

    def places(self, wanted: Indices, record_bytes: int) -> tuple[Indices, Indices, np.ndarray[Any, Any] | None]:
        """Where records begin (in the region, else in their files), their numbers, and which lie in their file.

        The last is None if all do. DamagedFileError if a file is cut off, gone, or another one.
        """
        if self._num_samples > _PLACES:
            return self._look_up(wanted, record_bytes)
        if self._kept is None:
            starts, numbers, good = self._look_up(np.arange(self._num_samples), record_bytes)
            self._kept = starts, numbers, None if good.all() else good
        starts, numbers, which = self._kept
        return starts[wanted], numbers[wanted], None if which is None else which[wanted]

    def _look_up(self, wanted: Indices, record_bytes: int) -> tuple[Indices, Indices, np.ndarray[Any, Any]]:
        shards = self.shards(wanted)
        within = wanted - self._firsts[shards]
        starts = np.empty(len(wanted), np.int64)
        for at in np.unique(shards).tolist():
            here = shards == at
            starts[here] = self._shards[at].table()[0][within[here]].astype(np.int64)
        good = (starts >= 0) & (starts <= self._sizes[shards] - record_bytes)
        if self.region is not None:
            starts += self.region.starts[shards]
        return starts, sample_number(self._numbers[shards], within), good

    def shards(self, wanted: Indices) -> Indices:
        return self._firsts.searchsorted(wanted, side="right") - 1

    def in_files(self, shards: Indices, starts: Indices) -> Indices:
        """Where records of these shards begin in their files."""
        return starts if self.region is None else starts - self.region.starts[shards]

    def check(self, wanted: Indices) -> None:
        """Raise DamagedFileError if a file of these records was cut off, or is gone or another one."""
        for at in set(self.shards(wanted).tolist()):
            self._shards[at].file().check()

    def _opened(self) -> Iterator[int]:
        for shard in self._shards:
            file = shard.file()  # is held, and so open, until it is mapped
            yield file.fd

    def read(self, shards: Indices, offsets: Indices, vectors: Sequence[Sequence[memoryview]], num_bytes: int) -> None:
        """Read records of `num_bytes` each, shard by shard, into the pieces of `vectors`; DamagedFileError, OSError."""
        order = shards.argsort(kind="stable")
        last = -1
        for row, at, offset in zip(order.tolist(), shards[order].tolist(), offsets[order].tolist(), strict=True):
            if at != last:
                last, file = at, self._shards[at].file()
            try:
                done = os.preadv(file.fd, vectors[row], offset)
            except OSError:  # reading it once more says of which file, and where
                done = 0
            if done != num_bytes:
                record = memoryview(read_exactly(file.fd, num_bytes, offset, self._shards[at].path))
                for piece in vectors[row]:
                    piece[:], record = record[: len(piece)], record[len(piece) :]

    def read_ahead(self, wanted: Indices) -> None:
        """Have the kernel begin to read records, without waiting for them."""
        shards = self.shards(wanted)
        for at, within in zip(shards.tolist(), (wanted - self._firsts[shards]).tolist(), strict=True):
            self._shards[at].will_need(within)
