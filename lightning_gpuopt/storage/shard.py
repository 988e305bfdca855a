"""Reading one shard: each sample is found by its offset in the record table.

LMDB's tree is not walked: a damaged page cannot lead the reader astray (LMDB itself may die by SIGSEGV on one). What is
large, decoded, or compared with its checksum is read by one `pread`; small values, one or a batch of them, are copied
out of a memory map, right after a look whether the file is as long as it was: one that was cut off is an error and not
a signal. Nothing is shared between processes or threads but open files, whose positions nobody uses.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError, DamagedFileError
from lightning_gpuopt.storage.format import TABLE_HEAD, TABLE_MAGIC, Shard, table_bytes
from lightning_gpuopt.storage.value import check, parse, sample_number

# shards of which a process has the files open at once, at most; fewer where few open files are allowed
MAX_OPEN: Final = 1024
LARGE: Final = 64 << 10  # values of so many bytes and more are read, and not copied out of a map
_DESCRIPTORS: Final = 4  # of a shard: its file, a large record table, and before Python 3.13 a map of each
# a shard's record table is kept in memory up to this size (87,000 samples); larger ones are mapped
TABLE_IN_MEMORY: Final = 1 << 20
COPY_AGAIN: Final = "copy it again from its source, or build the dataset again"
ANEW: Final = f"if the dataset was built again meanwhile, open it again, else {COPY_AGAIN}"
_CALLED: Final = {".tab": "the shard's record table", ".lab": "the file of the shard's labels"}
_OFFSET: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I")
_PAGE: Final = mmap.PAGESIZE
_AT_ONCE: Final = 256  # samples of which a number is copied out of a map after one look at the file

_Numbers = np.ndarray[Any, Any]
_T = TypeVar("_T")


class OpenFile:
    """A file of a shard, closed when nobody has it any more: not while a thread reads from it. It owns `fd`."""

    __slots__ = ("_map", "_path", "_size", "fd", "table", "used")

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.fd = fd
        self._path, self._size = path, size
        self._map: mmap.mmap | None = None
        self.table: OpenFile | None = None  # the record table of a shard's file, if it is not kept in memory
        self.used = True  # since somebody last looked

    def __del__(self, close: Any = os.close) -> None:
        close(self.fd)

    def check(self) -> None:
        """Raise DamagedFileError if the file was cut off."""
        try:
            size = os.lseek(self.fd, 0, os.SEEK_END)
        except OSError as err:
            raise _failed(err, self._path, 0) from None
        if size < self._size:
            raise _cut_off(self._path, size)

    def mapped(self) -> mmap.mmap:
        """The file in memory, to be copied from at once: behind an end that has moved lies a SIGBUS."""
        self.check()
        if self._map is None:
            self._map = _with_room(self._make_map, self._path)
        return self._map

    def _make_map(self) -> mmap.mmap:
        # Before Python 3.13 every map holds a file descriptor of its own.
        if sys.version_info >= (3, 13):
            return mmap.mmap(self.fd, self._size, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(self.fd, self._size, access=mmap.ACCESS_READ)


class ShardReader:
    """A finished shard, opened for reading. Safe between threads and after fork; `open_shard` shares one a process.

    Its files are closed while others are used, and opened again when a sample is read. DamagedFileError if one is
    missing or is not the one of the manifest.
    """

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self.shard = shard
        self.number = shard.number
        self.num_samples = shard.num_samples
        self._size = shard.file_bytes
        self._first = sample_number(shard.number, 0)
        self._has_images = shard.structure is None or codec.has_images(shard.structure)
        self._file: OpenFile | None = None
        self._table: tuple[memoryview, memoryview] | None = None  # offsets and lengths
        self._table_digest = b""
        self.file()

    def file(self) -> OpenFile:
        """Its file, open at least as long as this is held; DamagedFileError if it is missing or another one."""
        file = self._file
        if file is not None:
            file.used = True
            return file
        with _lock:
            if self._file is None:
                _close_down_to(_most_open() - 1)
                # First this file, then its table: a dataset that is replaced in between has another digest there.
                file = OpenFile(self.path, open_file(self.path), self._size)
                check_file(self.path, file.fd, self.shard)
                self._open_table(file)
                self._file = file
                _opened.append(weakref.ref(self))
            return self._file or self.file()

    def close(self) -> bool:
        """Close its files when nobody reads from them, if unused since the last call; whether they are closed."""
        file = self._file
        if file is not None and file.used:
            file.used = False
            return False
        self._file = None
        return True

    def _open_table(self, file: OpenFile) -> None:
        path, size, n = self.path.with_suffix(".tab"), table_bytes(self.num_samples), self.num_samples
        table = OpenFile(path, open_file(path), size)
        check_table(path, table.fd, self.shard)
        if size > TABLE_IN_MEMORY:
            file.table = table
        elif read_exactly(table.fd, 8, size - 8, path) != self._table_digest:
            data = memoryview(read_exactly(table.fd, size - TABLE_HEAD.size, TABLE_HEAD.size, path))
            # Scalars: a cast memoryview gives Python ints about twice as fast as a numpy array.
            self._table = data[: 8 * n].cast("Q"), data[8 * n : 12 * n].cast("I")
            self._table_digest = bytes(data[-8:])

    def table(self) -> tuple[_Numbers, _Numbers]:
        """Begins (uint64) and lengths in bytes (uint32) of all values, ``[num_samples]``; DamagedFileError."""
        table, n = self.file().table, self.num_samples
        if table is None:
            assert self._table is not None
            return np.asarray(self._table[0]), np.asarray(self._table[1])
        data = table.mapped()
        offsets = np.frombuffer(data, "<u8", n, TABLE_HEAD.size)
        return offsets, np.frombuffer(data, "<u4", n, TABLE_HEAD.size + 8 * n)

    def place(self, index: int) -> tuple[int, int]:
        """Where a sample's value begins and ends in the file; DamagedError if the table is damaged."""
        if self._table is not None:
            start = self._table[0][index]
            stop = start + self._table[1][index]
        else:
            table = self.file().table
            assert table is not None
            data = table.mapped()
            start = _OFFSET.unpack_from(data, TABLE_HEAD.size + 8 * index)[0]
            stop = start + _LENGTH.unpack_from(data, TABLE_HEAD.size + 8 * self.num_samples + 4 * index)[0]
        if stop > self._size:
            raise DamagedError(f"the record table says it ends at byte {stop} of {self._size}")
        return start, stop

    def value(self, index: int) -> bytes:
        """The stored value of a sample; DamagedError if the table or the file is not what was written."""
        start, stop = self.place(index)
        file = self._file or self.file()
        file.used = True
        try:
            data = os.pread(file.fd, stop - start, start)
        except OSError:
            data = b""
        return data if len(data) == stop - start else read_exactly(file.fd, stop - start, start, self.path)

    def read(self, index: int, image: codec.ImageDecoder | None, *, verify: bool = False) -> Any:
        """A sample, see `codec.read`; with `verify` compared with its checksum. Raises DamagedError."""
        table = self._table
        if table is None:
            start, stop = self.place(index)
        else:  # as place does, without the call
            start = table[0][index]
            stop = start + table[1][index]
            if stop > self._size:
                self.place(index)  # raises
        if verify or stop - start >= LARGE or (image is not None and self._has_images):
            value = self.value(index)
            if verify:
                check(value, self._first + index)
            return codec.read(value, 0, len(value), self._first + index, image)
        file = self._file or self.file()
        file.used = True
        return codec.read(file.mapped(), start, stop, self._first + index, image)

    def reader(self, image: codec.ImageDecoder | None, *, verify: bool = False) -> Callable[[int], Any]:
        """What reads the samples of a batch as `read` does; for small ones the file is checked once, here."""
        if self._table is None or verify or (image is not None and self._has_images):
            return partial(self.read, image=image, verify=verify)
        (offsets, lengths), size, first = self._table, self._size, self._first
        file = self.file()
        data = file.mapped()

        def read(index: int) -> Any:
            start = offsets[index]
            stop = start + lengths[index]
            if stop > size or stop - start >= LARGE:
                return self.read(index, image)
            return codec.read(data, start, stop, first + index, image)

        return read

    def part(self, index: int, key: int | str) -> Any:
        return codec.part(self.file().mapped(), self.place(index)[0], self._first + index, key)

    def numbers(self, key: int | str) -> _Numbers | None:
        """A part of all samples that is a number at the same place from the end of each; None if it is not so."""
        found = None if self.shard.structure is None else codec.number_from_end(self.shard.structure, key)
        if found is None:
            return None
        dtype, before_end = found
        file = self.file()
        offsets, lengths = self.table()
        starts = offsets.astype(np.int64)
        ends = starts + lengths
        # Where it is None, reading the samples one by one tells which is damaged.
        if int(starts.min()) < 0 or int(ends.max()) > self._size:
            return None
        try:
            content = parse(self.value(0)).content
        except DamagedError:
            return None
        if int(lengths.min()) < content + 8 + before_end:
            return None
        numbers = np.arange(self._first, self._first + self.num_samples, dtype=np.uint64)
        values = np.empty(self.num_samples, dtype)
        for at in range(0, self.num_samples, _AT_ONCE):
            some = slice(at, at + _AT_ONCE)
            data = np.frombuffer(file.mapped(), np.uint8)
            stamped = sliding_window_view(data, 8)[starts[some] + content].view(">u8")[:, 0]
            if not np.array_equal(stamped, numbers[some]):
                return None
            values[some] = sliding_window_view(data, dtype.itemsize)[ends[some] - before_end].view(dtype)[:, 0]
        return values

    def check(self, index: int) -> bytes:
        """Compare a sample with its checksum, and return that; DamagedError if they differ."""
        return check(self.value(index), self._first + index)

    def will_need(self, index: int) -> None:
        """Have the kernel begin to read a sample from the disk, without waiting for it; what fails, reading tells."""
        with contextlib.suppress(DamagedError, OSError):
            start, stop = self.place(index)
            first = start & -_PAGE
            self.file().mapped().madvise(mmap.MADV_WILLNEED, first, stop - first)


def read_exactly(fd: int, length: int, start: int, path: Path) -> bytes:
    """Bytes of a file, short reads continued; DamagedFileError if it ends before, or the server has it no more."""
    pieces, at, stop = [], start, start + length
    while at < stop:
        try:
            pieces.append(os.pread(fd, stop - at, at))
        except OSError as err:
            raise _failed(err, path, at) from None
        if not pieces[-1]:
            raise _cut_off(path, at)
        at += len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _failed(err: OSError, path: Path, at: int) -> OSError | DamagedFileError:
    if err.errno == errno.ESTALE:
        return DamagedFileError(f"{path}: gone while it was read, at byte {at}: {ANEW}")
    return OSError(err.errno, f"{err.strerror} (at byte {at})", str(path))


def _cut_off(path: Path, size: int) -> DamagedFileError:
    return DamagedFileError(f"{path}: truncated while it was read: it ends before byte {size + 1}; {ANEW}")


def check_file(path: Path, fd: int, shard: Shard) -> None:
    """Raise DamagedFileError if a shard's LMDB file has not the size of the manifest."""
    size = os.fstat(fd).st_size
    if size != shard.file_bytes:
        raise DamagedFileError(
            f"{path}: {size} bytes long, but {shard.file_bytes} in the manifest: it is truncated or not the file that "
            f"was written; {ANEW}"
        )


def check_table(path: Path, fd: int, shard: Shard) -> None:
    """Raise DamagedFileError if a record table's size or head is not that of the manifest."""
    size = os.fstat(fd).st_size
    if size != table_bytes(shard.num_samples):
        raise DamagedFileError(f"{path}: {size} bytes long; expected {table_bytes(shard.num_samples)}: {COPY_AGAIN}")
    magic, samples, file_bytes, digest = TABLE_HEAD.unpack(read_exactly(fd, TABLE_HEAD.size, 0, path))
    expected = (TABLE_MAGIC, shard.num_samples, shard.file_bytes, shard.digest)
    if (magic, samples, file_bytes, digest.hex()) != expected:
        raise DamagedFileError(f"{path}: not the record table listed in the manifest; {ANEW}")


def open_file(path: Path) -> int:
    """A file descriptor of a shard's file (DamagedFileError: none); where too many are open, others are closed."""
    try:
        return _with_room(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
    except FileNotFoundError:
        raise DamagedFileError(f"{path}: {_CALLED.get(path.suffix, 'this shard')} is missing; {COPY_AGAIN}") from None


def _with_room(opens: Callable[[], _T], path: Path) -> _T:
    """What takes a file descriptor; where there are too many, other files are closed."""
    while True:
        try:
            return opens()
        except OSError as err:
            if err.errno != errno.EMFILE:
                raise
            with _lock:
                if not _opened:
                    raise OSError(err.errno, "too many open files: raise `ulimit -n`", str(path)) from None
                _close_down_to(len(_opened) - 1)


_open: weakref.WeakValueDictionary[tuple[Path, int, int, int], ShardReader] = weakref.WeakValueDictionary()
_opened: deque[weakref.ref[ShardReader]] = deque()  # those whose files are open
_lock = threading.RLock()


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # another thread of the parent may have held it


def _most_open() -> int:
    """How many shards' files may be open: they take up to half the descriptors that the process may have."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(MAX_OPEN, allowed // _DESCRIPTORS // 2))


def _close_down_to(most: int) -> None:
    """Close files until so many are open, first those that have not been used lately."""
    while len(_opened) > most:
        shard = _opened.popleft()()
        if shard is not None and not shard.close():
            _opened.append(weakref.ref(shard))


def open_shard(directory: Path, shard: Shard) -> ShardReader:
    """The reader of a shard, one a process; DamagedFileError if a file is missing or not the one of the manifest."""
    path = directory / f"{shard.name}.mdb"
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        raise DamagedFileError(f"{path}: this shard is missing; {COPY_AGAIN}") from None
    identity = (path, stat.st_dev, stat.st_ino, stat.st_mtime_ns)  # by its path it is opened again
    with _lock:
        found = _open.get(identity)
        if found is None or found.shard != shard:
            found = _open[identity] = ShardReader(path, shard)
    return found


def blocks_read() -> int:
    """Blocks and pages that this thread has had to wait for, or has asked for, from a disk."""
    usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))  # macOS has no such thing
    return usage.ru_inblock + usage.ru_majflt
