"""The index of a tar: where the members of its samples lie, in one piece, in memory or in a file."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import tarfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import xxhash

from lightning_gpuopt.storage import durable
from lightning_gpuopt.storage.errors import DamagedError

INDEX: Final = "tars-"
"""What the name of an index file begins with."""
_MEMBER: Final = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")
_BLOCK: Final = 512
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_HEAD: Final = struct.Struct("<5Q")
_MAX_EXTENSIONS: Final = 1 << 16

# A header of which nothing is to be said but name, size and prefix: numbers as every tar writes them, no device.
_PLAIN: Final = re.compile(
    rb"(?=.{100}(?:[0-7]{7}[ \0]|[0-7]{6} \0){3}([0-7]{11})[ \0][0-7]{11}[ \0][0-7]{6}\0 ([0x\0]).{172}"
    rb"(?:\0{16}|(?:[0-7]{7}\0|[0-7]{6} \0){2})([^\0]{0,155}))([^\0]{1,100})",
    re.DOTALL,
)
# Records of a pax header that say nothing but times.
_TIMES: Final = re.compile(rb"(?:\d+ [amc]time=[\d.]+\n)+\0*")
_HEADERS_AT_ONCE: Final = 2048
_DIGITS: Final = 8 ** np.arange(5, -1, -1, dtype=np.int64)


Item = tuple[str, str]
"""A tar, and the file of its index."""


def _run_here(task: Callable[[Item], None], items: Sequence[Item]) -> None:
    for item in items:
        task(item)


@dataclass(frozen=True)
class Indexing:
    """How tars are looked through.

    Attributes:
        directory: Where their indexes are kept, for other processes and a later run; None: in memory.
        run: Calls a function with each of several tars, here or in other processes.
        part: (i, n): begin with the i-th of n shares of the tars; others, at work at once, begin with theirs.
    """

    directory: Path | None = None
    run: Callable[[Callable[[Item], None], Sequence[Item]], None] = _run_here
    part: tuple[int, int] = (0, 1)

    def in_turn(self, items: list[Item]) -> list[Item]:
        """The tars in the order in which this part takes them: its share, then towards it those of others."""
        i, n = self.part
        first, last = len(items) * i // n, len(items) * (i + 1) // n
        return items[first:last] + (items[last:] + items[:first])[::-1]


class TarIndex:
    """The samples of a tar, and their members.

    Attributes:
        extensions: Of its members, lower case.
        num_bytes: Of its members, without headers.
        names: The keys of its samples, one after the other.
        ends: Where each key ends.
        starts: Each sample's first member, and the number of members.
        extension_numbers, offsets, sizes: Of each member.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        samples, members, name_bytes, extension_bytes, self.num_bytes = _HEAD.unpack_from(data)
        at = _HEAD.size

        def column(dtype: str, count: int) -> np.ndarray[Any, np.dtype[Any]]:
            nonlocal at
            values = np.frombuffer(data, dtype, count, at)
            at += values.nbytes
            return values

        self.offsets, self.sizes = column("<u8", members), column("<u8", members)
        self.ends, self.starts = column("<u4", samples), column("<u4", samples + 1)
        self.extension_numbers = column("<u2", members)
        self.names = column("u1", name_bytes)
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
    """Look through a tar, and give the bytes of its index.

    Raises:
        DamagedError: It is not whole.
        ValueError: It is compressed, or no WebDataset.
    """
    names, ends, starts, numbers = bytearray(), array("I"), array("I"), array("H")
    offsets, sizes = array("Q"), array("Q")
    extensions: dict[str, int] = {}
    last: str | None = None
    seen: set[str] = set()
    with open(path, "rb") as stream:
        if not (head := stream.read(_BLOCK)):
            raise not_whole(path, "it is empty")
        if head[:2] in _COMPRESSED:
            raise ValueError(
                f"{path}: a tar compressed with {_COMPRESSED[head[:2]]}, whose samples cannot be read one by one; "
                "decompress it first"
            )
        try:
            for name, offset, size, is_sparse in regular_members(stream, path):
                named = _MEMBER.fullmatch(name)
                if named is None or _is_meta(name):
                    continue
                if is_sparse:
                    raise ValueError(f"{path}: {name} is a sparse file; make the tar without --sparse")
                key, extension = named[1], named[2].lower()
                if key != last:
                    last, seen = key, set()
                    names += os.fsencode(key)
                    ends.append(len(names))
                    starts.append(len(offsets))
                if extension in seen:
                    raise ValueError(f"{path}: the member {name} is there twice in one sample")
                seen.add(extension)
                numbers.append(number_of(extension, extensions, path))
                offsets.append(offset)
                sizes.append(size)
        except tarfile.TarError as error:
            raise not_whole(path, str(error)) from None
    starts.append(len(offsets))
    texts = json.dumps(list(extensions)).encode()
    head = _HEAD.pack(len(ends), len(offsets), len(names), len(texts), sum(sizes))
    columns = [each.tobytes() for each in (offsets, sizes, ends, starts, numbers)]
    return b"".join([head, *columns, names, texts])


def number_of(extension: str, numbers: dict[str, int], path: str) -> int:
    """The number of an extension; the next one if it is new.

    Raises:
        ValueError: There are too many.
    """
    number = numbers.setdefault(extension, len(numbers))
    if number == _MAX_EXTENSIONS:
        raise ValueError(f"{path}: more than 65,536 different extensions; is it a WebDataset?")
    return number


def open_kept(path: Path) -> memoryview:
    """What `keep` has put into a file, which is mapped.

    Raises:
        DamagedError: It is not what was written.
    """
    with path.open("rb") as stream:
        view = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    if xxhash.xxh3_64_digest(view[:-8]) != view[-8:]:
        raise DamagedError(f"{path}: not the index that was written; remove it, then go on with resume=True")
    return view[:-8]


def keep(path: Path, data: bytes) -> None:
    """Put bytes and their checksum into a file, unless somebody else has."""
    durable.write_first(path, data + xxhash.xxh3_64_digest(data))


def write_index(item: Item) -> None:
    """Write the index of a tar into a file, unless somebody else has."""
    tar, path = item[0], Path(item[1])
    if not path.exists():
        keep(path, index_tar(tar))


def regular_members(stream: BinaryIO, path: str) -> Iterator[tuple[str, int, int, bool]]:
    """Name, offset, size, and whether it is sparse, of each regular file in a tar, as ``tarfile`` has them.

    ``tarfile`` takes some 20 microseconds for a header. Those of which nothing unusual is to be said are parsed here,
    many at a time; what comes next is then ``tarfile``'s.

    Raises:
        DamagedError: It is not whole.
        tarfile.TarError: It is none.
    """
    at, plain = 0, True
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        while True:
            while plain:
                found, at, full = _plain_members(stream, at)
                yield from found
                if not full:
                    break
            if at:
                stream.seek(0)  # from elsewhere tarfile looks whether a file reaches to where the next header should be
                tar.offset, tar.firstmember = at, None  # type: ignore[attr-defined]
            tar.members = []  # type: ignore[attr-defined]  # they would fill the memory
            member = tar.next() if at or tar.firstmember else None  # type: ignore[attr-defined]
            if member is None:
                break
            if member.isreg():
                yield member.name, member.offset_data, member.size, member.sparse is not None
            at = tar.offset
            plain = not tar.pax_headers  # else they hold for all members that come
        end = tar.offset
    stream.seek(end)
    block = stream.read(_BLOCK)
    if len(block) < _BLOCK:
        raise not_whole(path, "the end-of-archive marker is missing")
    if any(block):
        raise not_whole(path, f"no member begins at byte {end}")


def _plain_members(stream: BinaryIO, at: int) -> tuple[list[tuple[str, int, int, bool]], int, bool]:
    """Members with plain headers from a place on; where the next begins, and whether it may be plain as well."""
    found: list[tuple[str, int, int, bool]] = []
    begins: list[int] = []
    heads: list[bytes] = []
    owners: list[int] = []
    parse, seek, read = _PLAIN.match, stream.seek, stream.read
    full = True
    while len(found) < _HEADERS_AT_ONCE:
        seek(at)
        head = read(_BLOCK)
        match = parse(head)
        begin = at
        if match is not None and match[2] == b"x":
            times = read(_BLOCK) if 0 < int(match[1], 8) <= _BLOCK else b""
            if not _only_times(times):
                match = None
            else:
                heads.append(head)
                owners.append(len(found))
                at += 2 * _BLOCK
                head = read(_BLOCK)
                match = parse(head)
        if match is None or match[2] == b"x" or match[4].endswith(b"/") or len(head) < _BLOCK:
            at, full = begin, False
            break
        size = int(match[1], 8)
        name = match[3] + b"/" + match[4] if match[3] else match[4]
        begins.append(begin)
        heads.append(head)
        owners.append(len(found))
        found.append((os.fsdecode(name), at + _BLOCK, size, False))
        at += _BLOCK + -(-size // _BLOCK) * _BLOCK
    if heads and (wrong := _first_wrong(heads)) is not None and (owner := owners[wrong]) < len(found):
        return found[:owner], begins[owner], False
    return found, at, full


def _only_times(records: bytes) -> bool:
    """Whether the block of a pax header says times only."""
    if _TIMES.fullmatch(records) is None:
        return False
    lines = records.rstrip(b"\0").splitlines(keepends=True)
    return all(int(line.split(b" ", 1)[0]) == len(line) for line in lines)


def _first_wrong(heads: list[bytes]) -> int | None:
    """The first of some headers whose checksum is not its bytes' sum."""
    rows = np.frombuffer(b"".join(heads), np.uint8).reshape(-1, _BLOCK)
    sums = rows.sum(axis=1, dtype=np.int64) - rows[:, 148:156].sum(axis=1, dtype=np.int64) + 8 * ord(" ")
    wrong = np.flatnonzero(sums != (rows[:, 148:154].astype(np.int64) - ord("0")) @ _DIGITS)
    return int(wrong[0]) if len(wrong) else None


def _is_meta(name: str) -> bool:
    return "/" not in name and name.startswith("__") and name.endswith("__")


def not_whole(path: str, why: str) -> DamagedError:
    """The error for a damaged tar."""
    return DamagedError(f"{path}: not a whole tar ({why}); copy it again from where it came, or leave it out")
