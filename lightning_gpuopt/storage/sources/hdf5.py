"""HDF5 files: a sample is a row of the dataset, or a dict of the datasets' rows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_gpuopt.images.checks import BadImage, looks_like_image
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.sources.arrays import same_length
from lightning_gpuopt.storage.sources.base import PART_BYTES, PerProcess, RowSource, missing_extra, reading
from lightning_gpuopt.storage.sources.kinds import with_kinds

if TYPE_CHECKING:
    import h5py

_CHUNK_CACHE_BYTES: Final = 32 << 20
_PROBED: Final = 16
# HDF5's errors come as KeyError and TypeError, too: those of objects and types that cannot be read
_NOT_OF_DAMAGE: Final = (NotImplementedError, AttributeError)


class _Column:
    """One dataset of the file; its rows are read some at a time."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        import h5py

        self.name = dataset.name.lstrip("/")
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: np.dtype[Any] = dataset.dtype
        self.is_text = (info := h5py.check_string_dtype(self.dtype)) is not None and info.length is None
        self.is_vlen = h5py.check_vlen_dtype(self.dtype) is not None
        if self.dtype.hasobject and not (self.is_text or self.is_vlen):
            raise ValueError(f"{dataset.file.filename}: {self.name} has the type {self.dtype}, which cannot be stored")
        row_bytes = max(1, int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize)
        self.num_bytes = int(dataset.id.get_storage_size()) if dataset.dtype.hasobject else self.shape[0] * row_bytes
        # The heap of variable-length values is not in storage_size; rows of them are taken to be 64 KB.
        self._rows = max(1, min(1024, PART_BYTES // (65536 if self.dtype.hasobject else row_bytes)))
        self.is_image = self.is_vlen and any(
            looks_like_image(bytes(row)) for row in dataset[:_PROBED] if getattr(row, "dtype", None) == np.uint8
        )
        self._first = 0
        self._block: Any = None
        self._pid = 0

    def row(self, dataset: h5py.Dataset, index: int) -> Any:
        if self._block is None or self._pid != os.getpid() or not 0 <= index - self._first < len(self._block):
            source = dataset.asstr(errors="surrogateescape") if self.is_text else dataset
            self._first = index - index % self._rows
            self._block = source[self._first : self._first + self._rows]
            self._pid = os.getpid()
        value = self._block[index - self._first]
        if self.is_image:
            if not looks_like_image(data := value.tobytes()):
                raise BadImage(f"not an image file (it begins with {data[:12]!r})")
            return EncodedImage(data)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_block": None}


class HDF5Source(RowSource):
    """All datasets of a file, whatever groups they are in."""

    kind = "hdf5"

    def __init__(self, path: str) -> None:
        self.path = path
        self._columns: list[_Column] = []
        try:
            import h5py
        except ImportError as error:
            raise missing_extra("h5py", error) from error
        with reading(path, "not an HDF5 file that can be read", _NOT_OF_DAMAGE), h5py.File(path, "r") as file:
            found: list[h5py.Dataset] = []
            file.visititems(lambda _, node: found.append(node) if isinstance(node, h5py.Dataset) else None)
            if not found:
                raise ValueError(f"{path}: there is no dataset in it")
            self._length = same_length(path, {node.name.lstrip("/"): node.shape or () for node in found})
            self._columns = [_Column(node) for node in found]
        self._file: PerProcess[h5py.File] = PerProcess(self._open)
        self.num_bytes = sum(column.num_bytes for column in self._columns)

    def _open(self) -> Any:
        import h5py

        return h5py.File(self.path, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES)

    def read(self, index: int) -> Any:
        with reading(self.path, f"row {index} cannot be read", _NOT_OF_DAMAGE):
            file = self._file.get()
            rows = {column.name: column.row(file[column.name], index) for column in self._columns}
        rows = with_kinds(rows, several=sum(column.is_image for column in self._columns) > 1, kinds=self.kinds)
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def parts(self) -> list[str]:
        return [column.name for column in self._columns]

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {
            "file_bytes": os.path.getsize(self.path),
            "datasets": {column.name: [list(column.shape), str(column.dtype)] for column in self._columns},
        }
