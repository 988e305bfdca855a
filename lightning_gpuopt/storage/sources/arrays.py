"""NumPy files: .npy and .npz, read row by row without ever being in memory as a whole."""

from __future__ import annotations

import os
import struct
import zipfile
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.sources.base import PART_BYTES, PerProcess, Source

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member: lengths of its name and of its extra field


class _Header:
    """What the head of a .npy file tells."""

    def __init__(self, stream: IO[bytes], where: str) -> None:
        try:
            version = npy_format.read_magic(stream)
            if version == (1, 0):
                shape, fortran, dtype = npy_format.read_array_header_1_0(stream)
            elif version == (2, 0):
                shape, fortran, dtype = npy_format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"version {version} of the format; save it again with plain field names")
        except ValueError as error:
            raise ValueError(f"{where}: not a .npy file that can be read ({error})") from None
        if dtype.hasobject:
            raise ValueError(
                f"{where}: an array of Python objects, which would need pickle; save it with a plain dtype, or give a "
                "Dataset that makes samples of it"
            )
        if not shape:
            raise ValueError(f"{where}: a single value; expected an array with a row for each sample")
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self.fortran = fortran and len(shape) > 1
        self.row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self.data_offset = stream.tell()

    def row(self, data: bytes) -> Any:
        """A row from its bytes."""
        return np.frombuffer(data, self.dtype, count=-1 if self.row_bytes else 0).reshape(self.shape[1:])[()]


class _FileRows:
    """Rows of a .npy file, or of an uncompressed member of a .npz, by pread: a memory map would fill the memory."""

    def __init__(self, path: str, start: int, header: _Header) -> None:
        self._path = path
        self.header = header
        self._offset = start + header.data_offset
        self._file = PerProcess(self._open)

    def _open(self) -> IO[bytes]:
        return open(self._path, "rb", buffering=0)

    def __getitem__(self, index: int) -> Any:
        size = self.header.row_bytes
        data = os.pread(self._file.get().fileno(), size, self._offset + index * size)
        if len(data) != size:
            raise DamagedError(f"{self._path}: it ends in the midst of row {index}; it is truncated, copy it again")
        return self.header.row(data)


class _StreamRows:
    """Rows of a compressed member of a .npz, in ascending order; going back begins anew."""

    def __init__(self, path: str, member: str, header: _Header) -> None:
        self._path = path
        self._member = member
        self.header = header
        self._stream = PerProcess(self._open)
        self._at = 0

    def _open(self) -> IO[bytes]:
        archive = zipfile.ZipFile(self._path)
        stream = archive.open(self._member)
        stream.read(self.header.data_offset)
        self._at = 0
        return stream

    def __getitem__(self, index: int) -> Any:
        size = self.header.row_bytes
        try:
            stream = self._stream.get()
            if self._at > index:
                self._stream.forget()
                stream = self._stream.get()
            ahead = (index - self._at) * size
            while ahead:
                ahead -= len(skipped := stream.read(min(ahead, PART_BYTES)))
                if not skipped:
                    break
            data = stream.read(size)
        except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:
            raise DamagedError(f"{self._path}: {self._member} cannot be read ({error}); copy it again") from None
        if len(data) != size:
            raise DamagedError(f"{self._path}: {self._member} ends in the midst of row {index}; copy it again")
        self._at = index + 1
        return self.header.row(data)


class _WholeRows:
    """Rows of an array in column order, which lie all over the file: it is memory-mapped, or loaded."""

    def __init__(self, path: str, member: str | None, header: _Header) -> None:
        self._path = path
        self._member = member
        self.header = header
        self._array = PerProcess(self._open)

    def _open(self) -> Any:
        if self._member is None:
            return np.load(self._path, mmap_mode="r", allow_pickle=False)
        return np.load(self._path, allow_pickle=False)[self._member.removesuffix(".npy")]

    def __getitem__(self, index: int) -> Any:
        return np.ascontiguousarray(self._array.get()[index])


_Rows = _FileRows | _StreamRows | _WholeRows


class NumpySource(Source):
    """A sample is a row; for a .npz of several arrays a dict of their rows."""

    kind = "numpy"

    def __init__(self, path: str) -> None:
        self.path = path
        self._arrays: dict[str, _Rows] = {}
        if path.lower().endswith(".npz"):
            self._open_npz()
        else:
            with open(path, "rb") as stream:
                header = _Header(stream, path)
            self._arrays[""] = _WholeRows(path, None, header) if header.fortran else _FileRows(path, 0, header)
            needed = header.data_offset + header.shape[0] * header.row_bytes
            if os.path.getsize(path) < needed:
                raise DamagedError(
                    f"{path}: {os.path.getsize(path)} bytes long; its header tells of {needed}: copy it again"
                )
        self._length = same_length(path, {name: rows.header.shape for name, rows in self._arrays.items()})
        self.num_bytes = self._length * sum(rows.header.row_bytes for rows in self._arrays.values())

    def _open_npz(self) -> None:
        try:
            with zipfile.ZipFile(self.path) as archive, open(self.path, "rb") as stream:
                for info in archive.infolist():
                    if not info.filename.endswith(".npy"):
                        continue
                    where = f"{self.path}: {info.filename}"
                    with archive.open(info) as member:
                        header = _Header(member, where)
                    name = info.filename.removesuffix(".npy")
                    if header.fortran:
                        self._arrays[name] = _WholeRows(self.path, info.filename, header)
                    elif info.compress_type == zipfile.ZIP_STORED:
                        stream.seek(info.header_offset)
                        name_length, extra_length = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                        start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
                        self._arrays[name] = _FileRows(self.path, start, header)
                    else:
                        self._arrays[name] = _StreamRows(self.path, info.filename, header)
        except zipfile.BadZipFile as error:
            raise DamagedError(f"{self.path}: not a whole .npz ({error}); copy it again") from None
        if not self._arrays:
            raise ValueError(f"{self.path}: there is no array in it")

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        """The row."""
        return f"row {index}"

    def read(self, index: int) -> Any:
        """The row, or one of each array."""
        if len(self._arrays) == 1:
            return next(iter(self._arrays.values()))[index]
        return {name: rows[index] for name, rows in self._arrays.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Shapes, dtypes and the file's size."""
        return {
            "kind": self.kind,
            "num_samples": len(self),
            "file_bytes": os.path.getsize(self.path),
            "arrays": {name: [list(r.header.shape), str(r.header.dtype)] for name, r in self._arrays.items()},
        }


def same_length(path: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """The first length that all arrays of a file share.

    Raises:
        ValueError: They do not, or it is zero.
    """
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        found = ", ".join(f"{name} {'a single value' if n is None else n}" for name, n in lengths.items())
        raise ValueError(
            f"{path}: expected arrays with the same number of rows, got {found}; give a Dataset that makes samples of "
            "them"
        )
    length = next(iter(lengths.values()))
    if not length:
        raise ValueError(f"{path}: there is no row in it")
    return length
