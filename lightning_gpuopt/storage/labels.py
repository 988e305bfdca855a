"""Label columns: whole numbers that are a part of every sample of a shard, in a file beside its record table.

Labels are read from there, and no value is.
"""

from __future__ import annotations

import os
from array import array
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedFileError
from lightning_gpuopt.storage.format import LABEL_DTYPES, Shard
from lightning_gpuopt.storage.shard import ANEW, COPY_AGAIN, open_file
from lightning_gpuopt.storage.value import bytes_at, head_fields

# keys of dicts under which labels are looked for; in tuples and lists it is the second part
TARGETS: Final = ("label", "cls", "target", "labels", "targets")
_SAMPLE_BYTES: Final = 16  # columns take at most so many bytes a sample
_Column = tuple[int | str, bool]  # index or key of a part, and whether it is a bool


class _Number(NamedTuple):
    """Where in a value a whole number lies."""

    buffer: int  # its number
    signed: bool


class LabelColumns:
    """Collects the label columns of a shard, sample by sample: those whose part is a whole number in each of them."""

    def __init__(self) -> None:
        self._columns: dict[_Column, array[int]] = {}
        self._structure: bytes | None = None  # of the last sample, and where the columns lie in it
        self._places: list[tuple[_Column, _Number]] = []

    def add(self, record: memoryview) -> None:
        if self._structure is not None and not self._columns:
            return
        *_, start, at = head_fields(record, 0)
        structure = bytes(record[start:at])
        if structure != self._structure:
            self._keep(structure)
        passed = 0
        for column, (buffer, signed) in self._places:
            while passed <= buffer:
                length, start = bytes_at(record, at)
                at = start + length
                passed += 1
            try:
                self._columns[column].append(int.from_bytes(record[start:at], "little", signed=signed))
            except OverflowError:  # of 64 bits without a sign
                del self._columns[column]
                self._structure = b""

    def _keep(self, structure: bytes) -> None:
        """Keep the columns that samples of this structure have, too."""
        numbers = _whole_numbers(structure)
        if self._structure is None:
            self._columns = {column: array("q") for column in islice(numbers, _SAMPLE_BYTES)}
        self._columns = {column: values for column, values in self._columns.items() if column in numbers}
        self._places = sorted(((column, numbers[column]) for column in self._columns), key=itemgetter(1))
        self._structure = structure

    def finish(self) -> tuple[list[list[Any]], bytes]:
        """Key and dtype of the columns for which there is room, the target first; and the content of their file."""
        columns, data, room = [], b"", _SAMPLE_BYTES
        for (key, is_bool), values in self._columns.items():
            numbers = np.frombuffer(values, np.int64)
            dtype = LABEL_DTYPES[0] if is_bool else _smallest(int(numbers.min()), int(numbers.max()))
            room -= np.dtype(dtype).itemsize
            if room < 0:
                break
            columns.append([key, dtype])
            data += numbers.astype(dtype).tobytes()
        return columns, data


def _smallest(least: int, most: int) -> str:
    ranges = ((dtype, np.iinfo(dtype)) for dtype in LABEL_DTYPES[1:])
    return next(dtype for dtype, holds in ranges if holds.min <= least and most <= holds.max)


@lru_cache(maxsize=4096)
def _whole_numbers(structure: bytes) -> dict[_Column, _Number]:
    """The parts of a sample that are whole numbers; first the one that is its target."""
    kind, *rest = codec.tree(structure)
    if kind not in ("tuple", "list", "dict"):
        return {}
    found: dict[_Column, _Number] = {}
    before = 0
    for key, child in zip(rest[0] if kind == "dict" else range(len(rest[-1])), rest[-1], strict=True):
        leaf, *about = child
        code = about[0] if leaf == "scalar" and isinstance(about[0], str) else {"int": "<i8", "bool": "|b1"}.get(leaf)
        if code is not None and code[1] in "iub":
            found[key, code[1] == "b"] = _Number(before, code[1] == "i")
        before += _num_buffers(child)
    first = TARGETS if kind == "dict" else (1,)
    return dict(sorted(found.items(), key=lambda item: first.index(item[0][0]) if item[0][0] in first else len(first)))


def _num_buffers(node: Any) -> int:
    kind, *rest = node
    if kind in ("tuple", "list", "dict"):
        return sum(map(_num_buffers, rest[-1]))
    return 0 if kind == "none" else 1


def open_labels(directory: Path, shard: Shard) -> int:
    """A file descriptor of a shard's label columns; DamagedFileError if they are missing or of another size."""
    path = directory / f"{shard.name}.lab"
    fd = open_file(path)
    expected = shard.num_samples * sum(np.dtype(dtype).itemsize for _, dtype in shard.labels)
    size = os.fstat(fd).st_size
    if size != expected:
        os.close(fd)
        raise DamagedFileError(f"{path}: {size} bytes long; expected {expected}: {COPY_AGAIN}")
    return fd


def read_labels(directory: Path, shard: Shard) -> dict[int | str, np.ndarray[Any, Any]]:
    """A shard's label columns, ``[num_samples]`` each, by index or key of the part; raises DamagedFileError."""
    if not shard.labels:
        return {}
    with open(open_labels(directory, shard), "rb") as stream:
        data = stream.read()
    if xxhash.xxh3_64_hexdigest(data) != shard.labels_digest:
        raise DamagedFileError(f"{directory / shard.name}.lab: not the label columns listed in the manifest; {ANEW}")
    columns, at = {}, 0
    for key, dtype in shard.labels:
        columns[key] = np.frombuffer(data, dtype, shard.num_samples, at)
        at += columns[key].nbytes
    return columns
