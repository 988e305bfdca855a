"""Reading one shard: its file is mapped, and each sample is found by its offset in the record table.

LMDB's tree is not walked: a damaged page cannot lead the reader astray (LMDB itself may die by SIGSEGV on one),
nothing is shared between processes or threads but read-only pages, and a batch of equal records is gathered in one
call.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.format import TABLE_HEAD, TABLE_MAGIC, Shard, table_bytes
from lightning_gpuopt.storage.value import check, parse, sample_number

COPY_AGAIN: Final = "copy it again from where it came, or build the dataset again"
_CALLED: Final = {".tab": "the shard's record table", ".lab": "the file of the shard's labels"}
_SMALL_TABLE: Final = 1 << 20
_PAGE: Final = mmap.PAGESIZE


def _map(fd: int) -> mmap.mmap:
    # Before Python 3.13 every map holds a file descriptor of its own.
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ, trackfd=False)
    return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)


class ShardMap:
    """A finished shard, mapped for reading. Read-only, and safe between threads and after fork.

    Use `open_shard`, which shares one map a process.
    """

    def __init__(self, path: Path, shard: Shard, fd: int) -> None:
        self.path = path
        self.shard = shard
        self.number = shard.number
        self.num_samples = shard.num_samples
        check_file(path, fd, shard)
        self.offsets, self.lengths = _read_table(path.with_suffix(".tab"), shard)
        self._file = _map(fd)
        self._size = shard.file_bytes
        # Scalars: a cast memoryview gives Python ints about twice as fast as a numpy array.
        self._offset_of = memoryview(self.offsets.data).cast("B").cast("Q")
        self._length_of = memoryview(self.lengths.data).cast("B").cast("I")
        self._first = sample_number(shard.number, 0)

    def value(self, index: int) -> memoryview:
        """The stored value of a sample, without a copy.

        Raises:
            DamagedError: The record table is not what was written.
        """
        start = self._offset_of[index]
        stop = start + self._length_of[index]
        if stop > self._size:
            raise DamagedError(f"the record table says it ends at byte {stop} of {self._size}")
        return memoryview(self._file)[start:stop]

    def read(self, index: int, image: codec.ImageDecoder | None) -> Any:
        """A sample; see `codec.read`.

        Raises:
            DamagedError: Something is not as it was written.
        """
        start = self._offset_of[index]
        stop = start + self._length_of[index]
        if stop > self._size:
            raise DamagedError(f"the record table says it ends at byte {stop} of {self._size}")
        return codec.read(self._file, start, stop, self._first + index, image)

    def part(self, index: int, key: int | str) -> Any:
        """One part of a sample; see `codec.part`.

        Raises:
            DamagedError: Something is not as it was written.
        """
        start = self._offset_of[index]
        if start + self._length_of[index] > self._size:
            raise DamagedError(f"the record table says it begins at byte {start} of {self._size}")
        return codec.part(self._file, start, self._first + index, key)

    def numbers(self, key: int | str) -> np.ndarray[Any, Any] | None:
        """A part of all samples that is a number in each, at the same place from its end; None where it is not so.

        Raises:
            DamagedError: Something is not as it was written.
        """
        found = None if self.shard.structure is None else codec.number_from_end(self.shard.structure, key)
        if found is None:
            return None
        dtype, before_end = found
        data = np.frombuffer(self._file, np.uint8)
        starts, ends = self.offsets.astype(np.int64), self.offsets.astype(np.int64) + self.lengths
        content = parse(self._file, int(starts[0])).content - int(starts[0])
        if int(ends.max()) > self._size or int(self.lengths.min()) < content + 8 + before_end:
            return None  # reading them one by one tells which
        stamped = sliding_window_view(data, 8)[starts + content].view(">u8")[:, 0]
        if not np.array_equal(stamped, np.arange(self._first, self._first + self.num_samples, dtype=np.uint64)):
            return None
        values: np.ndarray[Any, Any] = sliding_window_view(data, dtype.itemsize)[ends - before_end].view(dtype)[:, 0]
        return values

    def check(self, index: int) -> bytes:
        """Compare a sample with its checksum, and return that.

        Raises:
            DamagedError: They differ.
        """
        return check(self.value(index), self._first + index)

    def will_need(self, index: int) -> None:
        """Have the kernel begin to read a sample from the disk, without waiting for it."""
        start = self._offset_of[index]
        stop = min(start + self._length_of[index], self._size)
        first = start & -_PAGE
        if first < stop:
            self._file.madvise(mmap.MADV_WILLNEED, first, stop - first)


def check_file(path: Path, fd: int, shard: Shard) -> None:
    """See whether a shard's LMDB file has the size that the manifest tells of.

    Raises:
        DamagedError: It has not.
    """
    size = os.fstat(fd).st_size
    if size != shard.file_bytes:
        raise DamagedError(
            f"{path}: {size} bytes long; the manifest tells of {shard.file_bytes}: it is truncated or not the file "
            f"that was written; if the dataset was built anew meanwhile, open it again, else {COPY_AGAIN}"
        )


def check_table(path: Path, fd: int, shard: Shard) -> None:
    """See whether a shard's record table is the one that the manifest tells of, by its size and its head.

    Raises:
        DamagedError: It is not.
    """
    size = os.fstat(fd).st_size
    if size != table_bytes(shard.num_samples):
        raise DamagedError(f"{path}: {size} bytes long; expected {table_bytes(shard.num_samples)}: {COPY_AGAIN}")
    magic, samples, file_bytes, digest = TABLE_HEAD.unpack(os.pread(fd, TABLE_HEAD.size, 0))
    expected = (TABLE_MAGIC, shard.num_samples, shard.file_bytes, shard.digest)
    if (magic, samples, file_bytes, digest.hex()) != expected:
        raise DamagedError(
            f"{path}: not the record table that the manifest tells of; if the dataset was built anew meanwhile, open "
            f"it again, else {COPY_AGAIN}"
        )


def open_file(path: Path) -> int:
    """A file descriptor to read one of a shard's files.

    Raises:
        DamagedError: There is no such file.
        OSError: It may not be read, or there are too many open files.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        what = _CALLED.get(path.suffix, "this shard")
        raise DamagedError(f"{path}: {what} is missing; {COPY_AGAIN}") from None


def _read_table(path: Path, shard: Shard) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    n = shard.num_samples
    with open(open_file(path), "rb") as stream:
        check_table(path, stream.fileno(), shard)
        # A map is shared by all processes, but costs a file descriptor.
        table: Any = stream.read() if table_bytes(n) < _SMALL_TABLE else _map(stream.fileno())
    offsets = np.frombuffer(table, "<u8", n, TABLE_HEAD.size)
    lengths = np.frombuffer(table, "<u4", n, TABLE_HEAD.size + 8 * n)
    return offsets, lengths


_open: weakref.WeakValueDictionary[tuple[int, int, int], ShardMap] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it


def open_shard(directory: Path, shard: Shard) -> ShardMap:
    """Map a shard, or give the map that this process has of it already.

    Raises:
        DamagedError: A file is missing, or is not the one that the manifest tells of.
        OSError: It may not be read, or there are too many open files.
    """
    path = directory / f"{shard.name}.mdb"
    try:
        # First this file, then its table: a dataset that is replaced in between has another digest in its table.
        fd = open_file(path)
        try:
            stat = os.fstat(fd)
            identity = (stat.st_dev, stat.st_ino, stat.st_mtime_ns)
            with _lock:
                found = _open.get(identity)
                if found is None or found.shard != shard:
                    found = _open[identity] = ShardMap(path, shard, fd)
            return found
        finally:
            os.close(fd)
    except OSError as err:
        if err.errno == errno.EMFILE:
            what = "too many open files: raise `ulimit -n`, or build larger shards"
            raise OSError(err.errno, what, str(path)) from None
        raise


def locate(starts: Sequence[int], index: int) -> tuple[int, int]:
    """Shard position and index within it of a dataset's sample, given the shards' first indices."""
    at = bisect_right(starts, index) - 1
    return at, index - starts[at]
