"""WebDataset tars: consecutive members of the same base name make up a sample.

The rules are those of https://github.com/webdataset/webdataset (tariterators.py).
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from array import array
from bisect import bisect_right
from collections import OrderedDict
from typing import Any, Final

import numpy as np

from lightning_gpuopt.images.files import Strings
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.sources.base import PerProcess, Source, digest
from lightning_gpuopt.storage.sources.kinds import with_kinds

_MEMBER: Final = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)")
_BLOCK: Final = 512
_OPEN_FILES: Final = 16
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


class TarSource(Source):
    """Samples are dicts: "__key__" and one entry an extension. Only the members' headers are read in advance."""

    kind = "webdataset"

    def __init__(self, paths: list[str]) -> None:
        self.path = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._paths = paths
        self._keys = Strings()
        self._extensions: list[str] = []
        self._extension_numbers: dict[str, int] = {}
        self._tar_starts = array("Q")  # first sample of each tar
        self._starts = array("Q")  # first member of each sample
        self._member_extensions = array("H")
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._files: PerProcess[OrderedDict[int, int]] = PerProcess(OrderedDict)
        for path in paths:
            self._tar_starts.append(len(self._keys))
            try:
                self._index(path)
            except tarfile.TarError as error:
                raise _not_whole(path, str(error)) from None
        if not len(self):
            raise ValueError(
                f"{self.path}: there is no sample in it; expected members such as 000000.jpg and 000000.cls"
            )
        self.num_bytes = sum(self._sizes)

    def _index(self, path: str) -> None:
        with open(path, "rb") as stream:
            if not (head := stream.read(_BLOCK)):
                raise _not_whole(path, "it is empty")
            if head[:2] in _COMPRESSED:
                raise ValueError(
                    f"{path}: a tar compressed with {_COMPRESSED[head[:2]]}, whose samples cannot be read one by one; "
                    "decompress it first"
                )
            stream.seek(0)
            last: str | None = None
            seen: set[str] = set()
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                for member in tar:
                    tar.members = []  # type: ignore[attr-defined]  # they would fill the memory
                    named = _MEMBER.fullmatch(member.name)
                    if not member.isreg() or named is None or _is_meta(member.name):
                        continue
                    if member.sparse is not None:
                        raise ValueError(f"{path}: {member.name} is a sparse file; make the tar without --sparse")
                    key, extension = named[1], named[2].lower()
                    if key != last:
                        last, seen = key, set()
                        self._keys.append(key)
                        self._starts.append(len(self._offsets))
                    if extension in seen:
                        raise ValueError(f"{path}: the member {member.name} is there twice in one sample")
                    seen.add(extension)
                    self._add(extension, member.offset_data, member.size)
                end = tar.offset
            stream.seek(end)
            block = stream.read(_BLOCK)
        if len(block) < _BLOCK:
            raise _not_whole(path, "the end-of-archive marker is missing")
        if any(block):
            raise _not_whole(path, f"no member begins at byte {end}")

    def _add(self, extension: str, offset: int, size: int) -> None:
        number = self._extension_numbers.setdefault(extension, len(self._extensions))
        if number == len(self._extensions):
            if number > 0xFFFF:
                raise ValueError(f"{self.path}: more than 65,536 different extensions; is it a WebDataset?")
            self._extensions.append(extension)
        self._member_extensions.append(number)
        self._offsets.append(offset)
        self._sizes.append(size)

    def __len__(self) -> int:
        return len(self._keys)

    def name(self, index: int) -> str:
        """The tar and the key."""
        return f"{self._paths[self._tar_of(index)]}: {self._keys[index]}"

    def _tar_of(self, index: int) -> int:
        return bisect_right(self._tar_starts, index) - 1

    def read(self, index: int) -> Any:
        """The sample's members by their extensions, decoded as far as that loses nothing."""
        first = self._starts[index]
        last = self._starts[index + 1] if index + 1 < len(self._starts) else len(self._offsets)
        tar = self._tar_of(index)
        sample: dict[str, Any] = {"__key__": self._keys[index]}
        for member in range(first, last):
            extension = self._extensions[self._member_extensions[member]]
            data = self._read_member(tar, self._offsets[member], self._sizes[member])
            try:
                sample[extension] = _decode(extension, data)
            except (ValueError, EOFError) as error:
                raise ValueError(f"{self.name(index)}.{extension}: cannot be read as its name says: {error}") from None
        return with_kinds(sample, kinds=self.kinds)

    def parts(self) -> list[str]:
        """The extensions of all members."""
        return list(self._extensions)

    def _read_member(self, tar: int, offset: int, size: int) -> bytes:
        files = self._files.get()
        handle = files.get(tar)
        if handle is None:
            if len(files) == _OPEN_FILES:  # the least recently used one is closed
                os.close(files.popitem(last=False)[1])
            handle = files[tar] = os.open(self._paths[tar], os.O_RDONLY | os.O_CLOEXEC)
        files.move_to_end(tar)
        data = os.pread(handle, size, offset)
        while len(data) < size:  # one call gives at most 2 GiB
            more = os.pread(handle, size - len(data), offset + len(data))
            if not more:
                raise _not_whole(self._paths[tar], f"it ends at byte {offset + len(data)}, in the midst of a member")
            data += more
        return data

    def close(self) -> None:
        """Close the tars."""
        for handle in (self._files.forget() or {}).values():
            os.close(handle)

    def fingerprint(self) -> dict[str, Any]:
        """Names of tars and keys, and where everything lies."""
        return super().fingerprint() | {
            "num_tars": len(self._paths),
            "names": self._keys.digest() + digest(os.fsencode(os.path.basename(path)) for path in self._paths),
            "members": digest([self._offsets.tobytes(), self._sizes.tobytes()]),
        }


def _is_meta(name: str) -> bool:
    return "/" not in name and name.startswith("__") and name.endswith("__")


def _not_whole(path: str, why: str) -> DamagedError:
    return DamagedError(f"{path}: not a whole tar ({why}); copy it again from where it came, or leave it out")


def _decode(extension: str, data: bytes) -> Any:
    kind = extension.rsplit(".", 1)[-1]
    if kind in ("jpg", "jpeg", "png", "webp"):
        return EncodedImage(data)
    if kind == "cls":
        return int(data)
    if kind == "txt":
        return data.decode("utf-8")
    if kind == "json":
        return json.loads(data)
    if kind == "npy":
        return np.load(io.BytesIO(data), allow_pickle=False)
    return data
