"""WebDataset tars: consecutive members of the same base name make up a sample.

The rules are those of https://github.com/webdataset/webdataset (tariterators.py); but files whose names begin
with a dot are left out everywhere.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightning_gpuopt.images.files import digest
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.sources import tar_index
from lightning_gpuopt.storage.sources.base import PerProcess, Source, short_names
from lightning_gpuopt.storage.sources.kinds import with_kinds

_OPEN_FILES: Final = 16


class TarSource(Source):
    """Samples are dicts: "__key__" and one entry an extension.

    The members' headers are read in advance, once: an index of each tar says where they lie. A process holds how many
    samples each tar has, and the indexes of the few that it reads.
    """

    kind = "webdataset"
    single_reads = True

    def __init__(self, paths: list[str], indexing: tar_index.Indexing | None = None) -> None:
        self.path = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._paths = paths
        self._short_names = short_names(paths)
        indexing = indexing or tar_index.Indexing()
        self._directory = indexing.directory
        self._held: list[bytes] = []  # the indexes, where they are in memory
        self._files: PerProcess[OrderedDict[int, tuple[int, tar_index.TarIndex]]] = PerProcess(OrderedDict)
        if self._directory is None:
            self._held = [tar_index.index_tar(path) for path in paths]
            self._about = self._summary()
        else:
            self._names = [_index_name(path) for path in paths]
            self._about = self._kept(self._directory, indexing)
        self._starts: list[int] = [0, *accumulate(self._about["samples"])]  # first sample of each tar, and their number
        self.num_bytes = self._about["num_bytes"]
        if not len(self):
            raise ValueError(
                f"{self.path}: there is no sample in it; expected members such as 000000.jpg and 000000.cls"
            )

    def _kept(self, directory: Path, indexing: tar_index.Indexing) -> dict[str, Any]:
        """What the indexes in the directory say, which are made where they are missing."""
        file = directory / f"{tar_index.INDEX}{digest(map(str.encode, self._names))}.json"
        there = set(os.listdir(directory)) if directory.is_dir() else set()
        items = [
            (path, str(directory / name))
            for path, name in zip(self._paths, self._names, strict=True)
            if name not in there
        ]
        if not items and file.name in there:
            about: dict[str, Any] = json.loads(bytes(tar_index.open_kept(file)))
            return about
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot write the indexes of tars here: {error.strerror}; pass a writable path"
            raise OSError(error.errno, what, str(directory)) from None
        try:
            indexing.write(items)
        except BaseException:
            with contextlib.suppress(OSError):  # other files are in it
                directory.rmdir()
            raise
        about = self._summary()
        tar_index.keep(file, json.dumps(about).encode())
        return about

    def _index(self, tar: int) -> tar_index.TarIndex:
        if self._directory is None:
            return tar_index.TarIndex(self._held[tar])
        return tar_index.TarIndex(tar_index.open_kept(self._directory / self._names[tar]))

    def _indexes(self) -> Iterator[tar_index.TarIndex]:
        return map(self._index, range(len(self._paths)))

    def _summary(self) -> dict[str, Any]:
        """How many samples there are in each tar, and what is the same for all."""
        extensions: dict[str, int] = {}
        samples, num_bytes, name_bytes = [], 0, [0]
        for index in self._indexes():
            samples.append(len(index))
            num_bytes += index.num_bytes
            name_bytes.append(name_bytes[-1] + len(index.names))
            for extension in index.extensions:
                tar_index.number_of(extension, extensions, self.path)
        ends = (
            (index.ends.astype(np.uint64) + np.uint64(before)).tobytes()
            for before, index in zip(name_bytes, self._indexes(), strict=False)
        )
        return {
            "samples": samples,
            "num_bytes": num_bytes,
            "extensions": list(extensions),
            "names": digest(chain((index.names.tobytes() for index in self._indexes()), ends)),
            "members": digest(
                chain(
                    (index.offsets.tobytes() for index in self._indexes()),
                    (index.sizes.tobytes() for index in self._indexes()),
                )
            ),
        }

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, sample: int) -> tuple[int, int, int, tar_index.TarIndex]:
        """The tar of a sample, its number there, and the open file and index of that tar."""
        tar = bisect_right(self._starts, sample) - 1
        files = self._files.get()
        if tar not in files:
            if len(files) == _OPEN_FILES:  # the least recently used one is closed
                os.close(files.popitem(last=False)[1][0])
            index = self._index(tar)
            files[tar] = os.open(self._paths[tar], os.O_RDONLY | os.O_CLOEXEC), index
        files.move_to_end(tar)
        return tar, sample - self._starts[tar], *files[tar]

    def name(self, index: int) -> str:
        tar, sample, _, members = self._find(index)
        return f"{self._paths[tar]}: {members.key(sample)}"

    def identity(self, index: int) -> bytes:
        tar, sample, _, members = self._find(index)
        about = (self._short_names[tar], members.key(sample), *members.members(sample))
        return repr(about).encode()

    def read(self, index: int) -> Any:
        """The sample's members by their extensions, decoded as far as that loses nothing."""
        tar, number, handle, members = self._find(index)
        sample: dict[str, Any] = {"__key__": members.key(number)}
        for extension, offset, size in members.members(number):
            data = _read_member(self._paths[tar], handle, offset, size)
            try:
                sample[extension] = _decode(extension, data)
            except (ValueError, EOFError) as error:
                raise ValueError(f"{self.name(index)}.{extension}: cannot be read as its name says: {error}") from None
        return with_kinds(sample, kinds=self.kinds)

    def parts(self) -> list[str]:
        return list(self._about["extensions"])

    def close(self) -> None:
        for handle, _ in (self._files.forget() or {}).values():
            os.close(handle)

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {
            "num_tars": len(self._paths),
            "names": self._about["names"] + digest(os.fsencode(os.path.basename(path)) for path in self._paths),
            "members": self._about["members"],
        }


def _index_name(path: str) -> str:
    """The name of a tar's index: another one where the tar has changed."""
    about = os.stat(path)
    what = [os.fsencode(os.path.abspath(path)), b"%d %d" % (about.st_size, about.st_mtime_ns)]
    return f"{tar_index.INDEX}{digest(what)}.index"


def _read_member(path: str, handle: int, offset: int, size: int) -> bytes:
    if offset & tar_index.SPARSE:
        return tar_index.read_sparse(path, offset ^ tar_index.SPARSE)
    data = os.pread(handle, size, offset)
    while len(data) < size:  # one call gives at most 2 GiB
        more = os.pread(handle, size - len(data), offset + len(data))
        if not more:
            raise tar_index.not_whole(path, f"it ends at byte {offset + len(data)}, in the middle of a member")
        data += more
    return data


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
