"""Writing one shard: an LMDB file, made by LMDB's own writer, and its record table."""

from __future__ import annotations

import errno
import json
import mmap
import os
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

import lmdb
import xxhash

from lightning_gpuopt.storage import codec, durable, lmdb_pages
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import TABLE_HEAD, TABLE_MAGIC, Shard, file_digest, key, shard_name
from lightning_gpuopt.storage.labels import LabelColumns
from lightning_gpuopt.storage.value import MAX_VALUE_BYTES, check, parse, sample_number

COMMIT_BYTES: Final = 16 << 20
COMMIT_SAMPLES: Final = 4096
MAP_SIZE_STEP: Final = 1 << 30
_READ_BACK_BYTES: Final = 32 << 20
_PAGE: Final = mmap.PAGESIZE


class ShardWriter:
    """Writes one shard into a directory, over any of the same number. Finished when `finish` has returned.

    With `durable` every commit reaches the disk before it returns; else only `finish` does. With `resume` it goes on
    after the last commit of an earlier writer. The memory map grows by `map_size_step` bytes.
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
            self._remove_earlier()
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
        self.committed: int = self._env.stat()["entries"]  # samples that a crash of this process cannot take back
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes = 0
        self.num_bytes = 0
        if self.committed:
            with self._env.begin(buffers=True) as txn:
                self.num_bytes = sum(len(value) for _, value in txn.cursor())

    def _remove_earlier(self) -> None:
        """Remove a finished shard of this number; its summary first, so that half a shard never counts as finished."""
        summary = self._path.with_suffix(".json")
        if summary.exists():
            summary.unlink()
            durable.sync_directory(self._directory)
        for suffix in (".lab", ".tab", ".mdb"):
            self._path.with_suffix(suffix).unlink(missing_ok=True)

    @property
    def num_samples(self) -> int:
        return self.committed + len(self._pending)

    def add(self, sample: codec.Encoded) -> None:
        """Append a sample; StorageError if it is larger than LMDB can store, OSError if the disk is full."""
        index = self.num_samples
        value = sample.value(self.number, index)
        if len(value) > MAX_VALUE_BYTES:
            raise StorageError(
                f"{self._path}: sample {index} takes {len(value)} bytes; LMDB stores at most {MAX_VALUE_BYTES}"
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
                            "writer wrote here, build it again"
                        )
            except lmdb.MapFullError:
                # The whole transaction is void; the batch is still here.
                self._env.set_mapsize(self._env.info()["map_size"] + max(self._step, 2 * self._pending_bytes))
                continue
            except lmdb.Error as err:
                raise _disk_error(err, self._path, self._pending_bytes) from err
            self.committed += len(self._pending)
            self._pending = []
            self._pending_bytes = 0

    def finish(self) -> Shard:
        """Commit, write the record table, read everything back (DamagedError if it differs), and make it durable."""
        self.commit()
        try:
            self._env.sync(True)
        except lmdb.Error as err:
            raise _disk_error(err, self._path) from err
        self.close()
        shard = self._write_table()
        durable.write(self._path.with_suffix(".json"), json.dumps(asdict(shard)).encode())
        return shard

    def close(self) -> None:
        """Close the file as it is; what was committed stays. Idempotent."""
        self._env.close()

    def _write_table(self) -> Shard:
        labels = LabelColumns()
        offsets, lengths, structures, digest = self._read_back(labels)
        file_bytes = self._path.stat().st_size
        table = TABLE_HEAD.pack(TABLE_MAGIC, len(offsets), file_bytes, digest), offsets, lengths
        of_table = xxhash.xxh3_64()
        for part in table:
            of_table.update(part)
        durable.write(self._path.with_suffix(".tab"), b"".join((*table, of_table.digest())))
        structure = codec.tree(structures.pop()) if len(structures) == 1 else None
        size = lengths[0] if lengths and all(length == lengths[0] for length in lengths) else None
        columns, data = labels.finish()
        if columns:
            durable.write(self._path.with_suffix(".lab"), data)
        with self._path.open("rb") as stream:
            whole = file_digest(stream)
        return Shard(
            number=self.number,
            num_samples=len(offsets),
            file_bytes=file_bytes,
            value_bytes=sum(lengths),
            structure=structure,
            record_bytes=size,
            digest=digest.hex(),
            file_digest=whole,
            labels=columns,
            labels_digest=xxhash.xxh3_64_hexdigest(data) if columns else None,
        )

    def _read_back(self, labels: LabelColumns) -> tuple[array[int], array[int], set[bytes], bytes]:
        """Offset and length of every value, the structures (two at most) and the shard's digest."""
        offsets, lengths = array("Q"), array("I")
        structures: set[bytes] = set()
        digest = xxhash.xxh3_64()
        with self._path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        for index, start, size in self._places(mapped):
            record = memoryview(mapped)[start : start + size]
            try:
                digest.update(check(record, sample_number(self.number, index)))
            except DamagedError as err:
                raise self._read_back_wrong(index, err) from None
            offsets.append(start)
            lengths.append(size)
            labels.add(record)
            if len(structures) < 2:
                head = parse(record)
                structures.add(bytes(record[head.structure : head.buffers]))
        return offsets, lengths, structures, digest.digest()

    def _places(self, mapped: mmap.mmap) -> Iterator[tuple[int, int, int]]:
        """Index, offset in the file and length of every value, in order."""
        count = seen = 0
        try:
            for stored_key, start, size in lmdb_pages.values(mapped):
                if stored_key != key(count):
                    raise self._read_back_wrong(count, DamagedError("its key is not the next one"))
                yield count, start, size
                count += 1
                seen += size
                if seen >= _READ_BACK_BYTES:  # the map lets go of what it has seen: it counts as memory of this process
                    mapped.madvise(mmap.MADV_DONTNEED)
                    seen = 0
        except ValueError as err:
            raise self._read_back_wrong(count, DamagedError(str(err))) from None
        if count != self.committed:
            raise self._read_back_wrong(count, DamagedError("it is not there"))

    def _read_back_wrong(self, index: int, err: DamagedError) -> DamagedError:
        return DamagedError(
            f"{self._path}: sample {index} read back wrong ({err}); check the disk, and build it again with "
            "overwrite=True"
        )


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
        f"{path}: LMDB failed ({type(err).__name__}: {err}); build it again with overwrite=True without resume=True"
    )
