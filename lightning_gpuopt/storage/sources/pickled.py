"""LMDB files of other makers: values that are files (JPEG, ...) or, as many training scripts write them, pickled."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import lmdb

from lightning_gpuopt.images.files import Strings
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import LMDB_MAGIC
from lightning_gpuopt.storage.sources.base import PerProcess, Source
from lightning_gpuopt.storage.sources.kinds import with_kinds
from lightning_gpuopt.storage.sources.prepare import find_images

# mdb.c of LMDB 0.9, MDB_meta: after a page header of 16 bytes magic, version, address and size of the map, then twice
# what is known of a table (48 bytes, the first begins with the page size), last page, last transaction.
_META: Final = struct.Struct("<16xII16xI44x48xQQ")

_PICKLE: Final = b"\x80"  # what every pickle since protocol 2 begins with


class ForeignSource(Source):
    """Values in the order of ``__keys__``, or of their keys: by number where they are numbers, else by their bytes.

    Without `allow_pickle` nothing is unpickled: values are taken as they are. LMDB walks its trees unchecked, and a
    damaged file can kill the process: the build reads it in child processes only.
    """

    isolated = True

    def __init__(self, path: str, allow_pickle: bool) -> None:
        self.path = path
        self.kind = "pickled lmdb" if allow_pickle else "lmdb"
        self._allow_pickle = allow_pickle
        _refuse_truncated(path)
        self._keys, self.classes, self.num_bytes = _in_child(path, allow_pickle)
        self._env: PerProcess[Any] = PerProcess(partial(open_readonly, path))
        if not len(self):
            raise ValueError(f"{path}: there is no sample in it")

    def __len__(self) -> int:
        return len(self._keys)

    def _key(self, index: int) -> bytes:
        return os.fsencode(self._keys[index])

    def name(self, index: int) -> str:
        return f"key {self._key(index)!r}"

    def read(self, index: int) -> Any:
        """The unpickled value; image files in it become images."""
        try:
            with self._env.get().begin() as transaction:
                data = transaction.get(self._key(index))
        except lmdb.Error as error:
            raise DamagedError(f"{self.path}: {self.name(index)} cannot be read ({error}); copy it again") from None
        if data is None:
            raise DamagedError(f"{self.path}: {self.name(index)} is listed, but not there; copy it again")
        if not data.startswith(_PICKLE):
            return with_kinds(find_images(bytes(data)), kinds=self.kinds)
        if not self._allow_pickle:
            raise _pickled(self.path, self.name(index))
        try:
            return with_kinds(find_images(pickle.loads(data)), kinds=self.kinds)
        except Exception as error:
            raise StorageError(
                f"{self.path}: {self.name(index)} cannot be unpickled ({type(error).__name__}: {error}); the modules "
                "it was pickled with must be importable, otherwise pass a Dataset that reads it"
            ) from None

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {"keys": self._keys.digest(), "file_bytes": os.path.getsize(_file(self.path))}


def open_readonly(path: str) -> Any:
    """An LMDB environment to read from, of whichever format py-lmdb knows."""
    try:
        return lmdb.open(path, subdir=os.path.isdir(path), readonly=True, lock=False, readahead=True, create=False)
    except lmdb.Error as error:
        raise StorageError(
            f"{path}: LMDB cannot open it ({error}); close it if it is open here, or copy it again"
        ) from None


_Index = tuple[Strings, "tuple[str, ...] | None", int]


def _in_child(path: str, allow_pickle: bool) -> _Index:
    if multiprocessing.current_process().daemon:  # a child already, of Dask for one, which may not start another
        return _index(path, allow_pickle)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=_send_index, args=(path, allow_pickle, sender), daemon=True)
    child.start()
    sender.close()
    try:
        result: _Index | Exception = receiver.recv()
    except EOFError:
        child.join()
        raise DamagedError(
            f"{path}: LMDB died in it (exit code {child.exitcode}): the file is damaged; copy it again"
        ) from None
    child.join()
    if isinstance(result, Exception):
        raise result
    return result


def _send_index(path: str, allow_pickle: bool, sender: Connection) -> None:
    try:
        sender.send(_index(path, allow_pickle))
    except Exception as error:
        known = isinstance(error, (StorageError, OSError, ValueError))
        sender.send(error if known else StorageError(f"{path}: {type(error).__name__}: {error}"))


def _index(path: str, allow_pickle: bool) -> _Index:
    keys: list[bytes] = []
    meta: dict[bytes, Any] = {}
    num_bytes = 0
    with open_readonly(path) as env, env.begin(buffers=True) as transaction, transaction.cursor() as cursor:
        for stored, value in cursor:
            key = bytes(stored)
            if key.startswith(b"__") and key.endswith(b"__"):
                meta[key] = _meta_value(bytes(value), allow_pickle)
            elif key not in (b"length", b"num-samples", b"num_samples"):
                if not (keys or allow_pickle) and bytes(value[:1]) == _PICKLE:  # before anything is built
                    raise _pickled(path, f"key {key!r}")
                keys.append(key)
                num_bytes += len(value)
    listed = meta.get(b"__keys__")
    if isinstance(listed, (list, tuple)) and all(isinstance(key, (bytes, str)) for key in listed):
        named = [key.encode() if isinstance(key, str) else key for key in listed]
        if set(named) != set(keys):
            raise DamagedError(f"{path}: __keys__ lists {len(named)} samples, but not the {len(keys)} that are there")
        keys = named
    elif all(key.isdigit() for key in keys):
        keys.sort(key=int)
    length = meta.get(b"__len__")
    if type(length) is int and length != len(keys):
        raise DamagedError(f"{path}: __len__ says {length}, but there are {len(keys)} samples; copy it again")
    kept = Strings()
    for key in keys:
        kept.append(key)
    return kept, _class_names(meta.get(b"__classes__")), num_bytes


def _class_names(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, (list, tuple)) and all(type(name) is str for name in value):
        return tuple(value)
    return None


def _meta_value(data: bytes, allow_pickle: bool) -> Any:
    """A number in plain text, what is pickled where that is allowed, or None: the keys have to do then."""
    if data.isdigit():
        return int(data)
    try:
        return pickle.loads(data) if allow_pickle else None
    except Exception:  # another library's
        return None


def _pickled(path: str, name: str) -> StorageError:
    return StorageError(
        f"{path}: {name} is pickled; unpickling runs code that its author chose, so it is done only with "
        "allow_pickle=True: pass that if you trust the source"
    )


def _file(path: str) -> str:
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


def _refuse_truncated(path: str) -> None:
    """Refuse a truncated LMDB of format 0.9, which tells its length: touching a missing page would kill the process."""
    with open(_file(path), "rb") as stream:
        head = stream.read(_META.size)
        magic, version, page_bytes, *first = _META.unpack(head.ljust(_META.size, b"\0"))
        if magic != LMDB_MAGIC or version & 0xFF != 1 or not 256 <= page_bytes <= 65536:
            return
        stream.seek(page_bytes)
        *_, last_page, transaction = _META.unpack(stream.read(_META.size).ljust(_META.size, b"\0"))
        if transaction < first[1]:
            last_page = first[0]
    size = os.path.getsize(_file(path))
    if size < (last_page + 1) * page_bytes:
        raise DamagedError(
            f"{path}: {size} bytes long, but by LMDB's header {(last_page + 1) * page_bytes}: it is truncated; copy it "
            "again"
        )
