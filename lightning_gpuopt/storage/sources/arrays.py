"""NumPy files: .npy and .npz; a sample is a row."""

from __future__ import annotations

import os
import zipfile
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.sources.base import PerProcess, RowSource, reading

_Array = np.ndarray[Any, np.dtype[Any]]


class _Header:
    def __init__(self, stream: IO[bytes], where: str) -> None:
        try:
            version = npy_format.read_magic(stream)
            if version == (1, 0):
                shape, fortran, dtype = npy_format.read_array_header_1_0(stream)
            elif version == (2, 0):
                shape, fortran, dtype = npy_format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"version {version} of the format; save it again with plain field names")
        except OSError:
            raise
        except Exception as error:  # of every type, where the bytes are others
            raise ValueError(f"{where}: not a .npy file that can be read ({error})") from None
        if dtype.hasobject:
            raise ValueError(
                f"{where}: an array of Python objects, which would need pickle; save it with a plain dtype, or pass a "
                "Dataset that makes samples from it"
            )
        if not shape:
            raise ValueError(f"{where}: a single value; expected an array with a row for each sample")
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self.fortran = fortran and len(shape) > 1
        self.row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self.data_offset = stream.tell()


class NumpySource(RowSource):
    """A sample is a row; for a .npz of several arrays a dict of their rows.

    Rows of a .npy file are read one by one. The arrays of a .npz file are loaded as wholes, in each process that
    builds: they must fit in memory.
    """

    kind = "numpy"

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_npz = path.lower().endswith(".npz")
        self._headers = self._npz_headers() if self._is_npz else {"": self._npy_header()}
        self._length = same_length(path, {name: header.shape for name, header in self._headers.items()})
        self.num_bytes = self._length * sum(header.row_bytes for header in self._headers.values())
        self._arrays: PerProcess[dict[str, _Array]] = PerProcess(self._load)
        self._file: PerProcess[IO[bytes]] = PerProcess(self._open)

    def _npy_header(self) -> _Header:
        with open(self.path, "rb") as stream:
            header = _Header(stream, self.path)
        present, needed = os.path.getsize(self.path), header.data_offset + header.shape[0] * header.row_bytes
        if present < needed:
            raise DamagedError(f"{self.path}: {present} bytes long, its header says {needed}: copy it again")
        return header

    def _npz_headers(self) -> dict[str, _Header]:
        headers = {}
        with reading(self.path, "not a whole .npz"), zipfile.ZipFile(self.path) as archive:
            for name in archive.namelist():
                if name.endswith(".npy"):
                    with archive.open(name) as member:
                        headers[name.removesuffix(".npy")] = _Header(member, f"{self.path}: {name}")
        if not headers:
            raise ValueError(f"{self.path}: there is no array in it")
        return headers

    def _load(self) -> dict[str, _Array]:
        if not self._is_npz:  # an array in column order: a row lies all over the file
            return {"": np.load(self.path, mmap_mode="r", allow_pickle=False)}
        arrays = {}
        with reading(self.path, "not a whole .npz"), np.load(self.path, allow_pickle=False) as archive:
            for name in self._headers:
                with reading(self.path, f"{name} cannot be read"):
                    arrays[name] = archive[name]
        return arrays

    def _open(self) -> IO[bytes]:
        return open(self.path, "rb", buffering=0)

    def read(self, index: int) -> Any:
        if not self._is_npz and not (header := self._headers[""]).fortran:
            return self._read_row(header, index)
        rows = {name: np.array(array[index], order="C")[()] for name, array in self._arrays.get().items()}
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def _read_row(self, header: _Header, index: int) -> Any:
        """A row by pread: a memory map would fill the memory."""
        size = header.row_bytes
        data = os.pread(self._file.get().fileno(), size, header.data_offset + index * size)
        if len(data) != size:
            raise DamagedError(f"{self.path}: it ends in the middle of row {index}; it is truncated, copy it again")
        return np.frombuffer(data, header.dtype, count=-1 if size else 0).reshape(header.shape[1:])[()]

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {
            "file_bytes": os.path.getsize(self.path),
            "arrays": {name: [list(header.shape), str(header.dtype)] for name, header in self._headers.items()},
        }


def same_length(path: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """The first length that all arrays of a file share; ValueError if they do not, or it is zero."""
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        found = ", ".join(f"{name} {'a single value' if n is None else n}" for name, n in lengths.items())
        raise ValueError(
            f"{path}: expected arrays with the same number of rows, got {found}; pass a Dataset that makes samples "
            "from them"
        )
    length = next(iter(lengths.values()))
    if not length:
        raise ValueError(f"{path}: there is no row in it")
    return length
