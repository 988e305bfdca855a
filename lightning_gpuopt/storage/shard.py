"""One shard: writing an LMDB file and its record table, and reading samples by their offsets.

The writer is LMDB's own. The reader maps the file and finds each value in the record table, without walking LMDB's
tree: a damaged page cannot lead it astray (LMDB itself may die by SIGSEGV on one), nothing is shared between
processes or threads but read-only pages, and a batch of equal records is gathered in one call.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Final

import lmdb
import numpy as np
import xxhash

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import TABLE_HEAD, TABLE_MAGIC, Shard, key, shard_name, table_bytes

COMMIT_BYTES: Final = 16 << 20
COMMIT_SAMPLES: Final = 4096
MAP_SIZE_STEP: Final = 1 << 30
_COPY_AGAIN: Final = "copy it again from where it came, or build the dataset again"
_SMALL_TABLE: Final = 1 << 20
_READ_BACK_BYTES: Final = 32 << 20
_PAGE: Final = mmap.PAGESIZE


class ShardWriter:
    """Writes one shard into a directory. Not finished until `finish` has returned.

    Args:
        directory: Where; it must exist.
        number: The shard's number.
        durable: Every commit reaches the disk before it returns (a crash of the machine loses nothing committed);
            else only `finish` does.
        resume: Go on in a file that an earlier writer left, after its last commit.
        map_size_step: Bytes by which the memory map grows.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        *,
        durable: bool = False,
        resume: bool = False,
        map_size_step: int = MAP_SIZE_STEP,
    ) -> None:
        self.number = number
        self._directory = directory
        self._path = directory / f"{shard_name(number)}.mdb"
        self._step = map_size_step
        if not resume:
            self._path.unlink(missing_ok=True)
        present = self._path.stat().st_size if self._path.exists() else 0
        if 0 < present < 2 * _PAGE:  # killed before LMDB had written its two meta pages
            self._path.unlink()
            present = 0
        try:
            self._env = lmdb.open(
                str(self._path),
                subdir=False,
                map_size=(present // map_size_step + 1) * map_size_step,
                lock=False,  # the build holds a lock of its own
                sync=durable,
                readahead=False,
                meminit=True,  # no stale memory in a file that people pass on
                lib_version=0,
            )
        except lmdb.Error as err:
            raise _disk_error(err, self._path) from err
        self._committed: int = self._env.stat()["entries"]
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes = 0
        self.num_bytes = 0
        if self._committed:
            with self._env.begin(buffers=True) as txn:
                self.num_bytes = sum(len(value) for _, value in txn.cursor())

    @property
    def committed(self) -> int:
        """Samples that a crash of this process cannot take back."""
        return self._committed

    @property
    def num_samples(self) -> int:
        """Samples given so far."""
        return self._committed + len(self._pending)

    def add(self, sample: codec.Encoded) -> None:
        """Append a sample.

        Raises:
            StorageError: It is larger than LMDB can store.
            OSError: The disk is full.
        """
        index = self.num_samples
        value = sample.value(self.number, index)
        if len(value) > codec.MAX_VALUE_BYTES:
            raise StorageError(
                f"{self._path}: sample {index} takes {len(value)} bytes; LMDB stores at most {codec.MAX_VALUE_BYTES}"
            )
        self._pending.append((key(index), value))
        self._pending_bytes += len(value)
        self.num_bytes += len(value)
        if self._pending_bytes >= COMMIT_BYTES or len(self._pending) >= COMMIT_SAMPLES:
            self.commit()

    def commit(self) -> None:
        """Write what is pending in one transaction; the map grows as it must."""
        while self._pending:
            try:
                with self._env.begin(write=True) as txn, txn.cursor() as cursor:
                    _, added = cursor.putmulti(self._pending, append=True)
                    if added != len(self._pending):
                        raise StorageError(
                            f"{self._path}: LMDB took {added} of {len(self._pending)} samples in key order; another "
                            "writer was at work here, build it again"
                        )
            except lmdb.MapFullError:
                # The whole transaction is void; the batch is still here.
                self._env.set_mapsize(self._env.info()["map_size"] + max(self._step, 2 * self._pending_bytes))
                continue
            except lmdb.Error as err:
                raise _disk_error(err, self._path, self._pending_bytes) from err
            self._committed += len(self._pending)
            self._pending = []
            self._pending_bytes = 0

    def finish(self) -> Shard:
        """Commit, write the record table, read everything back, and make it durable.

        Raises:
            DamagedError: What the disk gives back is not what was written.
            OSError: The disk is full.
        """
        self.commit()
        try:
            self._env.sync(True)
        except lmdb.Error as err:
            raise _disk_error(err, self._path) from err
        shard = self._write_table()
        self.close()
        summary = self._directory / f"{shard_name(self.number)}.json"
        write_durably(summary, json.dumps(asdict(shard)).encode())
        return shard

    def close(self) -> None:
        """Close the file as it is; what was committed stays. Idempotent."""
        self._env.close()

    def _write_table(self) -> Shard:
        offsets, lengths, structures, digest = self._read_back()
        file_bytes = self._path.stat().st_size
        table = TABLE_HEAD.pack(TABLE_MAGIC, len(offsets), file_bytes, digest)
        table += np.array(offsets, "<u8").tobytes() + np.array(lengths, "<u4").tobytes()
        write_durably(self._path.with_suffix(".tab"), table + xxhash.xxh3_64_digest(table))
        structure = codec.tree(structures.pop()) if len(structures) == 1 else None
        size = lengths[0] if lengths and all(length == lengths[0] for length in lengths) else None
        with self._path.open("rb") as stream:
            file_digest = digest_of(stream)
        return Shard(self.number, len(offsets), file_bytes, sum(lengths), structure, size, digest.hex(), file_digest)

    def _read_back(self) -> tuple[list[int], list[int], set[bytes], bytes]:
        """Offset and length of every value, the structures (two at most) and the shard's digest."""
        offsets: list[int] = []
        lengths: list[int] = []
        structures: set[bytes] = set()
        digest = xxhash.xxh3_64()
        with self._path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        for index, start, size in self._places(mapped):
            record = memoryview(mapped)[start : start + size]
            try:
                digest.update(codec.check(record, codec.sample_id(self.number, index)))
            except DamagedError as err:
                raise self._read_back_wrong(index, err) from None
            offsets.append(start)
            lengths.append(size)
            if len(structures) < 2:
                structures.add(structure_bytes(record))
        return offsets, lengths, structures, digest.digest()

    def _places(self, mapped: mmap.mmap) -> Iterator[tuple[int, int, int]]:
        """Index, offset in the file and length of every value, in order."""
        index = 0
        while index < self._committed:
            seen = 0
            with self._env.begin(buffers=True) as txn, txn.cursor() as cursor:
                cursor.set_range(key(index))
                base = _map_base(_address(cursor.value()))
                for stored_key, value in cursor:
                    if stored_key != key(index):
                        raise self._read_back_wrong(index, DamagedError("its key is not the next one"))
                    yield index, _address(value) - base, len(value)
                    index += 1
                    seen += len(value)
                    if seen >= _READ_BACK_BYTES:
                        break
                else:
                    if index != self._committed:
                        raise self._read_back_wrong(index, DamagedError("it is not there"))
            # Both maps let go of what they have seen: it counts as memory of this process.
            mapped.madvise(mmap.MADV_DONTNEED)
            self._env.set_mapsize(self._env.info()["map_size"])

    def _read_back_wrong(self, index: int, err: DamagedError) -> DamagedError:
        return DamagedError(
            f"{self._path}: sample {index} read back wrong ({err}); check the disk, and build it again with "
            "overwrite=True"
        )


def _address(value: memoryview) -> int:
    address: int = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
    return address


def _map_base(address: int) -> int:
    """Where in memory the file begins into whose map an address points.

    LMDB does not tell where its map is. Looking for the value in the file would not do: pages that LMDB has copied and
    given up still hold it.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, offset = line.split(maxsplit=3)[:3]
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= address < high:
                return low - int(offset, 16)
    raise AssertionError("an address that LMDB gave is in no map")


def digest_of(stream: BinaryIO) -> str:
    """XXH3-64 of a file, in hexadecimal."""
    digest = xxhash.xxh3_64()
    while piece := stream.read(4 << 20):
        digest.update(piece)
    return digest.hexdigest()


def structure_bytes(value: bytes | memoryview) -> bytes:
    """The structure of a stored value."""
    length, at = codec.bytes_at(value, codec.body_offset(value))
    return bytes(value[at : at + length])


def write_durably(path: Path, data: bytes) -> None:
    """Write a file beside, fsync it and rename it into place."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_CAUSES: Final = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)}


def _disk_error(err: lmdb.Error, path: Path, needed: int = 0) -> Exception:
    """LMDB's error as one that says where it was and what to do."""
    for text, number in _CAUSES.items():
        if text not in str(err):
            continue
        if number == errno.EIO:  # LMDB's word for a write that was cut short, as it is where the disk is full
            space = os.statvfs(path.parent)
            if space.f_bavail * space.f_frsize < needed + (1 << 20):
                number, text = errno.ENOSPC, os.strerror(errno.ENOSPC)
            else:
                text += ", or a quota or limit on the size of files"
        what = f"{text}; what was committed is safe: make room and run the build again with resume=True"
        return OSError(number, what, str(path))
    return StorageError(
        f"{path}: LMDB gave up ({type(err).__name__}: {err}); build it again with overwrite=True without resume=True"
    )


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
        size = os.fstat(fd).st_size
        if size != shard.file_bytes:
            raise DamagedError(
                f"{path}: {size} bytes long; the manifest tells of {shard.file_bytes}: it is truncated or not the file "
                f"that was written; if the dataset was built anew meanwhile, open it again, else {_COPY_AGAIN}"
            )
        self.offsets, self.lengths = _read_table(path.with_suffix(".tab"), shard)
        self._file = _map(fd)
        self._size = size
        # Scalars: a cast memoryview gives Python ints about twice as fast as a numpy array.
        self._offset_of = memoryview(self.offsets.data).cast("B").cast("Q")
        self._length_of = memoryview(self.lengths.data).cast("B").cast("I")
        self._first = codec.sample_number(shard.number, 0)

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

    def check(self, index: int) -> bytes:
        """Compare a sample with its checksum, and return that.

        Raises:
            DamagedError: They differ.
        """
        return codec.check(self.value(index), codec.sample_id(self.number, index))

    def will_need(self, index: int) -> None:
        """Have the kernel begin to read a sample from the disk, without waiting for it."""
        start = self._offset_of[index]
        stop = min(start + self._length_of[index], self._size)
        first = start & -_PAGE
        if first < stop:
            self._file.madvise(mmap.MADV_WILLNEED, first, stop - first)


def _read_table(path: Path, shard: Shard) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    n = shard.num_samples
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != table_bytes(n):
                raise DamagedError(f"{path}: {size} bytes long; expected {table_bytes(n)}: {_COPY_AGAIN}")
            # A map is shared by all processes, but costs a file descriptor.
            table: Any = stream.read() if size < _SMALL_TABLE else _map(stream.fileno())
    except FileNotFoundError:
        raise DamagedError(f"{path}: the shard's record table is missing; {_COPY_AGAIN}") from None
    magic, samples, file_bytes, digest = TABLE_HEAD.unpack_from(table)
    if (magic, samples, file_bytes, digest.hex()) != (TABLE_MAGIC, n, shard.file_bytes, shard.digest):
        raise DamagedError(
            f"{path}: not the record table that the manifest tells of; if the dataset was built anew meanwhile, open "
            f"it again, else {_COPY_AGAIN}"
        )
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
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DamagedError(f"{path}: this shard is missing; {_COPY_AGAIN}") from None
    try:
        stat = os.fstat(fd)
        identity = (stat.st_dev, stat.st_ino, stat.st_mtime_ns)
        with _lock:
            found = _open.get(identity)
            if found is None or found.shard != shard:
                found = _open[identity] = ShardMap(path, shard, fd)
        return found
    except OSError as err:
        if err.errno == errno.EMFILE:
            raise OSError(
                err.errno, "too many open files: raise `ulimit -n`, or build larger shards", str(path)
            ) from None
        raise
    finally:
        os.close(fd)


def locate(starts: Sequence[int], index: int) -> tuple[int, int]:
    """Shard position and index within it of a dataset's sample, given the shards' first indices."""
    at = bisect_right(starts, index) - 1
    return at, index - starts[at]
