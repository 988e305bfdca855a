"""The index of a tar: where the members of its samples lie, in one piece, in memory or in a file."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import struct
import tarfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import xxhash

from lightning_gpuopt.storage import durable
from lightning_gpuopt.storage.errors import DamagedError

INDEX: Final = "tars-"  # what the name of an index file begins with
_MEMBER: Final = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")
_META: Final = re.compile(r"__[^/]*__($|/)")
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_HEAD: Final = struct.Struct("<5Q")
_MAX_EXTENSIONS: Final = 1 << 16
_LOOKED_AT: Final = 1 << 16  # so many bytes behind the end of a tar; tar pads to 10 KiB
_log = logging.getLogger(__name__)

SPARSE: Final = 1 << 63  # added to a member's offset: it is that of the headers of a sparse file
Item = tuple[str, str]  # a tar, and the file of its index


def write_index(item: Item) -> None:
    """Write the index of a tar into a file, unless somebody else has."""
    tar, path = item[0], Path(item[1])
    if not path.exists():
        keep(path, index_tar(tar))


def write_indexes(items: list[Item]) -> None:
    for item in items:
        write_index(item)


@dataclass(frozen=True)
class Indexing:
    directory: Path | None = None  # of the indexes, for other processes and a later run; None: in memory
    write: Callable[[list[Item]], None] = write_indexes  # makes those that are missing, here or in other processes


class TarIndex:
    def __init__(self, data: bytes | memoryview) -> None:
        samples, members, name_bytes, extension_bytes, self.num_bytes = _HEAD.unpack_from(data)  # bytes without headers
        at = _HEAD.size

        def column(dtype: str, count: int) -> np.ndarray[Any, np.dtype[Any]]:
            nonlocal at
            values = np.frombuffer(data, dtype, count, at)
            at += values.nbytes
            return values

        self.offsets, self.sizes = column("<u8", members), column("<u8", members)  # see `SPARSE`
        # where each key ends in `names`; each sample's first member, then the number of members
        self.ends, self.starts = column("<u4", samples), column("<u4", samples + 1)
        self.extension_numbers = column("<u2", members)
        self.names = column("u1", name_bytes)  # the keys, one after the other
        self.extensions: list[str] = json.loads(column("u1", extension_bytes).tobytes())

    def __len__(self) -> int:
        return len(self.ends)

    def key(self, sample: int) -> str:
        """What its members' names begin with."""
        start = int(self.ends[sample - 1]) if sample else 0
        return os.fsdecode(self.names[start : int(self.ends[sample])].tobytes())

    def members(self, sample: int) -> Iterator[tuple[str, int, int]]:
        """Extension, offset and size of each."""
        for member in range(int(self.starts[sample]), int(self.starts[sample + 1])):
            extension = self.extensions[self.extension_numbers[member]]
            yield extension, int(self.offsets[member]), int(self.sizes[member])


def index_tar(path: str) -> bytes:
    """The bytes of a tar's index; DamagedError if it is not whole, ValueError if compressed or no WebDataset."""
    names, ends, starts, numbers = bytearray(), array("I"), array("I"), array("H")
    offsets, sizes = array("Q"), array("Q")
    extensions: dict[str, int] = {}
    last: str | None = None
    seen: set[str] = set()
    with open(path, "rb") as stream:
        try:
            for member in regular_members(stream, path):
                named = _MEMBER.fullmatch(member.name)
                if named is None or _META.match(member.name):
                    continue
                key, extension = named[1], named[2].lower()
                if key != last:
                    last, seen = key, set()
                    names += os.fsencode(key)
                    ends.append(len(names))
                    starts.append(len(offsets))
                if extension in seen:
                    raise ValueError(f"{path}: the member {member.name} is there twice in one sample")
                seen.add(extension)
                numbers.append(number_of(extension, extensions, path))
                offsets.append(member.offset_data if member.sparse is None else member.offset | SPARSE)
                sizes.append(member.size)
        except DamagedError:
            if (how := _is_compressed(stream)) is None:
                raise
            raise ValueError(
                f"{path}: a tar compressed with {how}, whose samples cannot be read one by one; decompress it first"
            ) from None
    starts.append(len(offsets))
    texts = json.dumps(list(extensions)).encode()
    head = _HEAD.pack(len(ends), len(offsets), len(names), len(texts), sum(sizes))
    columns = [each.tobytes() for each in (offsets, sizes, ends, starts, numbers)]
    return b"".join([head, *columns, names, texts])


def number_of(extension: str, numbers: dict[str, int], path: str) -> int:
    """The number of an extension; the next one if it is new. ValueError if there are too many."""
    number = numbers.setdefault(extension, len(numbers))
    if number == _MAX_EXTENSIONS:
        raise ValueError(f"{path}: more than 65,536 different extensions; is it a WebDataset?")
    return number


def open_kept(path: Path) -> memoryview:
    """What `keep` has put into a file, which is mapped; DamagedError if it is not what was written."""
    with path.open("rb") as stream:
        view = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    if xxhash.xxh3_64_digest(view[:-8]) != view[-8:]:
        raise DamagedError(f"{path}: not the index that was written; remove it, then continue with resume=True")
    return view[:-8]


def keep(path: Path, data: bytes) -> None:
    """Put bytes and their checksum into a file, unless somebody else has."""
    durable.write_first(path, data + xxhash.xxh3_64_digest(data))


def regular_members(stream: BinaryIO, path: str) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar, in order; DamagedError if it is not whole."""
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            at = -1
            # Of a tar without members Python 3.10 would look for the next one before its beginning.
            member = tar.next() if tar.firstmember is not None else None  # type: ignore[attr-defined]
            while member is not None:
                if member.size < 0:
                    raise ValueError(f"{member.name} has {member.size} bytes")
                if tar.offset <= at:
                    raise ValueError(f"{member.name} ends where it begins, or before")
                at = tar.offset
                tar.members = []  # type: ignore[attr-defined]  # they would fill the memory
                if member.isreg():
                    yield member
                member = tar.next()
            end = tar.offset
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of every type, where a number in a header is out of all bounds
        raise not_whole(path, str(error)) from None
    stream.seek(end)
    block = stream.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise not_whole(path, "the end-of-archive marker is missing")
    if any(block):
        raise not_whole(path, f"no member begins at byte {end}")
    if any(stream.read(_LOOKED_AT)):
        _log.warning(
            "%s: data after its end-of-archive marker, at byte %d, is ignored; pass concatenated tars (cat a.tar "
            "b.tar) separately",
            path,
            end,
        )


def read_sparse(path: str, offset: int) -> bytes:
    """A sparse file of a tar, with its holes, by its header's offset; DamagedError if it is not there."""
    with open(path, "rb") as stream:
        stream.seek(offset)
        try:
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                content = tar.extractfile(next(iter(tar)))
                assert content is not None
                return content.read()
        except (tarfile.TarError, ValueError, StopIteration) as error:
            raise not_whole(path, str(error)) from None


def _is_compressed(stream: BinaryIO) -> str | None:
    """With what a file is compressed, by what it begins with."""
    stream.seek(0)
    head = stream.read(max(map(len, _COMPRESSED)))
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)


def not_whole(path: str, why: str) -> DamagedError:
    return DamagedError(
        f"{path}: not a whole tar ({why}); copy it again from its source, or leave it out of the samples"
    )
