"""The image files of a folder: found once, in torchvision's order, and kept where there are very many."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import stat
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import IO, Any, Final, TypeAlias

import numpy as np
import xxhash
from PIL import Image

from lightning_gpuopt.utils.console_progress import ConsoleProgress
from lightning_gpuopt.utils.user_cache import UserCache

# formats that PIL recognises, and cannot decode by itself
_NOT_READ: Final = frozenset(("BUFR", "GRIB", "HDF5", "MPEG", "WMF", "EPS"))
# from so many files on the list of them is kept: below, listing them again takes a moment only
CACHE_FROM: Final = 20_000
_CACHE_VERSION: Final = 2
# a folder changed so shortly before it was listed may change again without a new time of change
_RECENT_NS: Final = 2_000_000_000
_THREADS: Final = 8  # a network file system answers several at a time
_SIZES: Final = 512  # files looked at to know about how large they all are

log = logging.getLogger(__name__)


def image_extensions() -> frozenset[str]:
    """How the names of files end that PIL can open, in lower case: ``.jpg``, ``.gif``, ``.avif``, ..."""
    formats = Image.registered_extensions()  # imports all of its plugins first
    opened = {"MPO", *Image.OPEN} - _NOT_READ
    return frozenset(extension for extension, name in formats.items() if name in opened)


class Strings:
    """Many paths, or bytes, in little memory: a list of a million would be copied by every worker process."""

    def __init__(self, blob: bytes = b"", ends: array[int] | None = None) -> None:
        self._blob = bytearray(blob)
        self._ends: array[int] = array("Q") if ends is None else ends

    def append(self, text: str | bytes) -> None:
        self._blob += os.fsencode(text)
        self._ends.append(len(self._blob))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(bytes(self._blob[start : self._ends[index]]))

    def parts(self) -> tuple[bytes, bytes]:
        """The strings as bytes, and where each ends: uint64, in this machine's byte order."""
        return bytes(self._blob), self._ends.tobytes()

    def digest(self) -> str:
        return digest(self.parts())


def digest(parts: Iterable[bytes]) -> str:
    """XXH3-64 of bytes, one after the other, in hexadecimal."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


@dataclass(eq=False)
class ImageFiles:
    """The image files below a folder; hidden files and folders are left out."""

    path: str
    # names of the subfolders, index by label; None if images lie in the folder itself
    classes: tuple[str, ...] | None
    folders: list[str]  # that hold images, relative to `path`
    _labels: array[int]  # by folder
    _folder_of: array[int]
    _names: Strings
    others: dict[str, int]  # left out, by the ends of their names
    not_entered: list[str]  # pipes, devices, and folders that were entered before

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """A file's path within the folder."""
        return os.path.join(self.folders[self._folder_of[index]], self._names[index])

    def label(self, index: int) -> int:
        return self._labels[self._folder_of[index]]

    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        of_folder = np.frombuffer(self._labels, np.uint32)
        return of_folder[np.frombuffer(self._folder_of, np.uint32)].astype(np.int64)

    def empty_classes(self) -> list[str]:
        return [name for label, name in enumerate(self.classes or ()) if label not in set(self._labels)]

    def read(self, index: int) -> bytes:
        return read_file(os.path.join(self.path, self.name(index)))

    @property
    def num_bytes(self) -> int:
        return about_bytes(len(self), lambda index: os.path.join(self.path, self.name(index)))

    def digest(self) -> str:
        folders = Strings()
        for folder in self.folders:
            folders.append(folder)
        return self._names.digest() + folders.digest()


def about_bytes(count: int, path_of: Callable[[int], str]) -> int:
    """About how many bytes so many files have: from the sizes of some of them, the same ones each time."""
    looked_at = range(0, count, max(1, count // _SIZES))
    return sum(_size(path_of(index)) for index in looked_at) * count // len(looked_at)


def read_file(path: str) -> bytes:
    """A file's content, faster than ``open``: a sixth less time for an image in the page cache. An OSError names it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
    except BlockingIOError:  # a file, on which another process has a lease (fcntl(2)) that it is asked to give up
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # which read(2) refuses itself
            raise OSError(errno.EINVAL, "expected a regular file, got a pipe or device")
        size = status.st_size
        if not size:  # nothing in it, or a size that is not told: /proc, some file systems in user space
            with open(file, "rb", closefd=False) as stream:
                return stream.read()
        data = os.read(file, size)
        while len(data) < size and (more := os.read(file, size - len(data))):  # a network file system may give less
            data += more
        return data
    except OSError as error:  # read(2) knows no names
        error.filename = path
        raise
    finally:
        os.close(file)


def find_images(path: str | os.PathLike[str], *, need_classes: bool = True, progress: bool = False) -> ImageFiles:
    """Find the image files of a folder; from a list that is kept, if no folder has changed since.

    Without `need_classes`, if some lie in the folder itself, all images below it are taken, without classes.
    Progress shows on stderr after a second. FileNotFoundError, NotADirectoryError, ValueError (no image where it should
    be).
    """
    folder = os.path.abspath(os.fspath(path))
    if not os.path.exists(folder):
        raise FileNotFoundError(f"{os.fspath(path)}: there is no such folder; pass the path of a folder of images")
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{os.fspath(path)}: expected a folder of images, got a file")
    top, loose = class_names(folder)
    labelled = need_classes or not loose
    if labelled and not top:
        raise ValueError(_no_classes(os.fspath(path), loose))
    if labelled and loose:
        warnings.warn(
            f"{path}: {len(loose)} images next to the class subfolders ({_some(loose)}) have no class and are skipped",
            stacklevel=2,
        )
    key = [_CACHE_VERSION, os.path.realpath(folder), labelled, sorted(image_extensions())]
    cache = UserCache("image-files", key, ".npz")
    found = cache.load(lambda data: _parse(data, folder))
    if found is None:
        found = _list(folder, top if labelled else None, cache, progress)
    _warn_of_others(found)
    if not len(found):
        raise ValueError(
            f"{path}: there is no image in it; expected files of formats that PIL opens (.jpg, .png, ...)"
            + " in class subfolders" * labelled
        )
    if labelled and (empty := found.empty_classes()):
        warnings.warn(
            f"{folder}: no image in {len(empty)} of {len(top)} class subfolders ({_some(empty)}); they keep their "
            "labels",
            stacklevel=2,
        )
    return found


def class_names(path: str) -> tuple[list[str], list[str]]:
    """Names of a folder's subfolders, and of the images that lie beside them."""
    names: list[str] = []
    loose: list[str] = []
    extensions = image_extensions()
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                names.append(entry.name)
            elif _is_image(entry.name, extensions) and not _is_special(entry):
                loose.append(entry.name)
    return sorted(names), sorted(loose)


def _is_image(name: str, extensions: frozenset[str]) -> bool:
    return name[name.rfind(".") :].lower() in extensions


def _is_special(entry: os.DirEntry[str]) -> bool:
    """Whether it is neither a file nor a folder, nor a link that leads nowhere: that is an error when it is read."""
    return not entry.is_file() and os.path.exists(entry.path)


def _warn_of_others(found: ImageFiles) -> None:
    if found.others:
        numbers = sorted(found.others.items(), key=lambda each: (-each[1], each[0]))
        text = ", ".join(f"{number} {extension or 'without extension'}" for extension, number in numbers)
        warnings.warn(f"{found.path}: files whose names PIL does not recognise are skipped: {text}", stacklevel=3)
    if found.not_entered:
        warnings.warn(
            f"{found.path}: skipped, since they are not regular files, or are folders already included: "
            f"{_some(found.not_entered)} ({len(found.not_entered)})",
            stacklevel=3,
        )


_Identity: TypeAlias = tuple[int, int]  # of a folder, however it is reached: device and inode


@dataclass
class _Folder:
    path: str
    changed: int  # its time of change in ns
    identity: _Identity  # the same by whatever path
    images: list[str] = field(default_factory=list)  # names
    links: list[str] = field(default_factory=list)  # paths of links to other folders
    others: Counter[str] = field(default_factory=Counter)  # left out, by the ends of their names
    special: list[str] = field(default_factory=list)  # paths of pipes and devices that are called as images are


def _list(folder: str, classes: list[str] | None, cache: UserCache, progress: bool) -> ImageFiles:
    counter = ConsoleProgress(
        None, what=f"listing {folder}", unit="images", enabled=progress, lines=False, after_s=1.0, transient=True
    )
    tops = [folder] if classes is None else [os.path.join(folder, name) for name in classes]
    entered: dict[_Identity, str] = {} if classes is None else {_identity(folder): folder}
    listed: list[list[_Folder]] = [[] for _ in tops]

    def keep(label: int, folders: Iterable[_Folder]) -> list[tuple[str, int]]:
        """Keep what was not entered before; returns the links in there, with their label."""
        new = [each for each in folders if entered.setdefault(each.identity, each.path) == each.path]
        listed[label] += new
        return [(link, label) for each in new for link in each.links]

    with counter, ThreadPoolExecutor(_THREADS, thread_name_prefix="gpuopt-list") as pool:
        walked = list(pool.map(lambda top: list(_walk(top, counter.add)), tops))
        # Links after all else, and in order: through which path a folder is entered must not depend on the machine.
        order = sorted(range(len(tops)), key=lambda label: (os.path.islink(tops[label]), label))
        links = [link for label in order for link in keep(label, walked[label])]
        again = [tops[label] for label in order if walked[label][0] not in listed[label]]
        heapify(links)
        while links:
            link, label = heappop(links)
            if _identity(link) in entered:
                again.append(link)
            for more in keep(label, _walk(link, counter.add, entered)):
                heappush(links, more)
    watched = {folder: os.stat(folder).st_mtime_ns} | {each.path: each.changed for found in listed for each in found}
    files = _as_files(folder, classes, listed, again)
    if len(files) >= CACHE_FROM and max(watched.values()) < time.time_ns() - _RECENT_NS:
        cache.keep(lambda stream: _write(files, watched, stream))
    return files


def _as_files(folder: str, classes: list[str] | None, listed: list[list[_Folder]], again: list[str]) -> ImageFiles:
    folders: list[str] = []
    labels, folder_of, names = array("I"), array("I"), Strings()
    others: Counter[str] = Counter()
    for label, found in enumerate(listed):
        for each in sorted(found, key=lambda each: each.path):
            others += each.others
            again += each.special
            if not each.images:
                continue
            folders.append(os.path.relpath(each.path, folder))
            labels.append(label)
            folder_of.extend([len(folders) - 1] * len(each.images))
            for image in each.images:
                names.append(image)
    not_entered = sorted(os.path.relpath(path, folder) for path in again)
    named = None if classes is None else tuple(classes)
    return ImageFiles(folder, named, folders, labels, folder_of, names, dict(others), not_entered)


def _identity(path: str) -> _Identity:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _walk(top: str, count: Callable[[int], None], entered: Container[_Identity] = ()) -> Iterator[_Folder]:
    """A folder and those below it but for links, and for those that were entered before."""
    extensions = image_extensions()
    paths = [top]
    while paths:
        path = paths.pop()
        status = os.stat(path)  # first: what comes while it is listed makes it newer
        found = _Folder(path, status.st_mtime_ns, (status.st_dev, status.st_ino))
        if found.identity in entered:
            continue
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    (found.links if entry.is_symlink() else paths).append(entry.path)
                elif not _is_image(entry.name, extensions):
                    found.others[os.path.splitext(entry.name)[1].lower()] += 1
                elif _is_special(entry):
                    found.special.append(entry.path)
                else:
                    found.images.append(entry.name)
        found.images.sort()
        count(len(found.images))
        yield found


def _parse(data: bytes, folder: str) -> ImageFiles | None:
    with np.load(io.BytesIO(data), allow_pickle=False) as kept:
        about = json.loads(kept["about"].tobytes())
        if any(os.stat(each).st_mtime_ns != changed for each, changed in about["watched"].items()):
            return None
        arrays = {name: array(code) for name, code in (("labels", "I"), ("folder_of", "I"), ("ends", "Q"))}
        for name, values in arrays.items():
            values.frombytes(kept[name].tobytes())
        names = Strings(kept["names"].tobytes(), arrays["ends"])
    classes = None if about["classes"] is None else tuple(about["classes"])
    more = about["others"], about["not_entered"]
    return ImageFiles(folder, classes, about["folders"], arrays["labels"], arrays["folder_of"], names, *more)


def _write(files: ImageFiles, watched: dict[str, int], stream: IO[bytes]) -> None:
    about = {"classes": files.classes, "folders": files.folders, "watched": watched}
    about |= {"others": files.others, "not_entered": files.not_entered}
    names, ends = files._names.parts()
    arrays = {"about": json.dumps(about).encode(), "names": names, "ends": ends}
    arrays |= {"labels": files._labels.tobytes(), "folder_of": files._folder_of.tobytes()}
    parts: dict[str, Any] = {name: np.frombuffer(data, np.uint8) for name, data in arrays.items()}
    np.savez(stream, **parts)


def _no_classes(path: str, loose: list[str]) -> str:
    if loose:
        return (
            f"{path}: {len(loose)} images, but no class subfolders; expected PATH/<class>/<image>: move them into a "
            "subfolder, or pass a Dataset"
        )
    return f"{path}: expected class subfolders with images in them, found none"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # it is met when it is read
        return 0


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
