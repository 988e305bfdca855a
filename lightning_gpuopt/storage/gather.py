"""Batches of equal records, gathered without worker processes: one copy from the page cache to the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lightning_gpuopt.loading.order import Indices
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.format import TABLE_HEAD_BYTES, Manifest, table_bytes
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.region import Region

Columns = Sequence[torch.Tensor]
_ID_BYTES = 8


class GatherPlan:
    """How the records of a dataset become the columns of a batch. Use `plan`, which says whether they can.

    Args:
        record: One stored value of the dataset; all others have the same structure and size.
    """

    def __init__(self, record: bytes) -> None:
        self._record = record
        _, structure, *buffers = codec.split(record)
        self.record_bytes = len(record)
        self.assemble, columns = _columns(codec.tree(structure), 0)
        at = len(record)
        places = []
        for buffer in reversed(buffers):  # a buffer ends where the next one's head begins
            at -= len(buffer)
            places.append(at)
            at -= codec.head_bytes(len(buffer))
        self.columns = [(start, *column) for start, column in zip(reversed(places), columns, strict=True)]
        # What every record begins with: array head, stamp, structure, head of the first buffer.
        self.stamp_end = codec.body_offset(record)
        self.prefix = np.frombuffer(record[: self.columns[0][0]], np.uint8)
        self.checksum = self.prefix[self.stamp_end - codec.STAMP_BYTES : self.stamp_end - _ID_BYTES]
        self.id = self.prefix[self.stamp_end - _ID_BYTES : self.stamp_end]

    def __reduce__(self) -> tuple[Any, ...]:
        return GatherPlan, (self._record,)


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


def plan(dataset: LMDBDataset) -> GatherPlan | None:
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
        dataset: Where the samples come from; `plan` must have one for it.
        indices: Those of its samples that count, in this order; None: all.
        pin_memory: Put batches into page-locked memory (torch's allocator keeps and reuses it).
    """

    def __init__(
        self, dataset: LMDBDataset, indices: np.ndarray[Any, Any] | None = None, pin_memory: bool = False
    ) -> None:
        found = plan(dataset)
        if found is None:
            raise TypeError(f"{dataset.path}: its records are not equal arrays and numbers")
        self.dataset = dataset
        self.indices = indices
        self.pin_memory = pin_memory
        self._plan = found
        self._source: _Source | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def __len__(self) -> int:
        return len(self.dataset) if self.indices is None else len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index if self.indices is None else int(self.indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A batch: what ``default_collate`` would make of these samples.

        Raises:
            DamagedError: A record is not what was written.
            IndexError: An index is out of range.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(
                f"{self.dataset.path}: a sample of {min(indices)}..{max(indices)} is not in it; it has {len(self)}"
            )
        if self.indices is not None:
            wanted = self.indices[wanted]
        if self._source is None:
            self._source = _Source(self.dataset)
        starts = self._source.locate(wanted, self._plan)
        columns = []
        for start, dtype, shape in self._plan.columns:
            column = torch.empty((len(wanted), *shape), dtype=dtype, pin_memory=self.pin_memory)
            if column.numel():
                flat = column.view(len(wanted), -1).view(torch.uint8)
                self._source.region.rows(starts + start, flat.size(1), flat)
            columns.append(column)
        return self._plan.assemble(columns)


class _Source:
    """A dataset's files in one region, and where each record lies in it."""

    def __init__(self, dataset: LMDBDataset) -> None:
        self.dataset = dataset
        manifest: Manifest = dataset.manifest
        shards = [shard for shard in manifest.shards if shard.num_samples]
        files = []
        for shard in shards:
            path = dataset.path / f"{shard.name}.mdb"
            files += [(path, shard.file_bytes), (path.with_suffix(".tab"), table_bytes(shard.num_samples))]
        self.region = Region(files)
        # numpy where there is arithmetic on a batch's worth of numbers: a tenth of what torch takes to get going.
        counts = np.array([shard.num_samples for shard in shards], dtype=np.int64)
        self._firsts = np.cumsum(counts) - counts
        self._data, self._tables = self.region.starts[0::2], self.region.starts[1::2] + TABLE_HEAD_BYTES
        self._sizes = np.array([shard.file_bytes for shard in shards], dtype=np.int64)
        self._numbers = np.array([shard.number for shard in shards], dtype=np.int64)
        digests = self._rows(self.region.starts[1::2] + TABLE_HEAD_BYTES - 8, 8)
        for shard, digest in zip(shards, digests, strict=True):
            if digest.tobytes().hex() != shard.digest:
                raise DamagedError(
                    f"{dataset.path}: {shard.name} is not the one that the manifest tells of; if the dataset was built "
                    "anew meanwhile, open it again, else copy it again"
                )

    def locate(self, wanted: Indices, plan: GatherPlan) -> torch.Tensor:
        """Where these records begin in the region, int64 ``[B]``; each is looked at as a single read would.

        Raises:
            DamagedError: One of them is not what was written.
        """
        shards = self._firsts.searchsorted(wanted, side="right") - 1
        within = wanted - self._firsts[shards]
        offsets = self._rows(self._tables[shards] + 8 * within, 8).view(np.int64)[:, 0]
        good = (offsets >= 0) & (offsets <= self._sizes[shards] - plan.record_bytes)
        if good.all():
            starts: Indices = self._data[shards] + offsets
            heads = self._rows(starts, len(plan.prefix))
            # The checksums are not compared here, as they are not where samples are read one by one.
            heads[:, plan.stamp_end - codec.STAMP_BYTES : plan.stamp_end - _ID_BYTES] = plan.checksum
            ids = heads[:, plan.stamp_end - _ID_BYTES : plan.stamp_end]
            good = np.ascontiguousarray(ids).view(">i8")[:, 0] == codec.sample_number(self._numbers[shards], within)
            ids[:] = plan.id
            good &= (heads == plan.prefix).all(1)
            if good.all():
                return torch.from_numpy(starts)
        bad = int(wanted[~good][0])
        self.dataset[bad]  # says what is wrong with it
        raise DamagedError(f"{self.dataset.path}: sample {bad}: not the record that was written; build it again")

    def _rows(self, starts: Indices, num_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.region.rows(torch.from_numpy(starts), num_bytes).numpy()
