"""The image files of a folder: found once, in torchvision's order, and kept where there are very many."""

from __future__ import annotations

import io
import json
import logging
import os
import time
import warnings
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
import xxhash

from lightning_gpuopt.utils.console_progress import ConsoleProgress
from lightning_gpuopt.utils.user_cache import UserCache

EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
CACHE_FROM: Final = 20_000
"""From so many files on the list of them is kept: below, listing them again takes a moment only."""
_CACHE_VERSION: Final = 1
_RECENT_NS: Final = 2_000_000_000
"""A folder changed so shortly before it was listed may change again without a new time of change."""
_THREADS: Final = 8  # a network file system answers several at a time
_SIZES: Final = 512  # files looked at to know about how large they all are

log = logging.getLogger(__name__)


class Strings:
    """Many strings in little memory: a list of a million paths would be copied by every worker process."""

    def __init__(self, blob: bytes = b"", ends: array[int] | None = None) -> None:
        self._blob = bytearray(blob)
        self._ends: array[int] = array("Q") if ends is None else ends

    def append(self, text: str) -> None:
        """Add a string."""
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
        """A hash of all strings."""
        state = xxhash.xxh3_64()
        for part in self.parts():
            state.update(part)
        return state.hexdigest()


@dataclass(eq=False)
class ImageFiles:
    """The image files below a folder; hidden files and folders are left out.

    Attributes:
        path: The folder.
        classes: Names of the class subfolders, index by label; None where images lie in the folder itself.
        folders: The folders that hold images, relative to `path`.
        num_bytes: About how many bytes all files have.
    """

    path: str
    classes: tuple[str, ...] | None
    folders: list[str]
    _labels: array[int]  # by folder
    _folder_of: array[int]
    _names: Strings

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """A file's path within the folder."""
        return os.path.join(self.folders[self._folder_of[index]], self._names[index])

    def label(self, index: int) -> int:
        """A file's class."""
        return self._labels[self._folder_of[index]]

    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The classes of all files, int64."""
        of_folder = np.frombuffer(self._labels, np.uint32)
        return of_folder[np.frombuffer(self._folder_of, np.uint32)].astype(np.int64)

    def empty_classes(self) -> list[str]:
        """Names of the classes that have no image."""
        return [name for label, name in enumerate(self.classes or ()) if label not in set(self._labels)]

    def read(self, index: int) -> bytes:
        """A file's content."""
        return read_file(os.path.join(self.path, self.name(index)))

    @property
    def num_bytes(self) -> int:
        """About how many bytes all files have: from the sizes of some of them, the same ones each time."""
        looked_at = range(0, len(self), max(1, len(self) // _SIZES))
        sampled = sum(_size(os.path.join(self.path, self.name(index))) for index in looked_at)
        return sampled * len(self) // len(looked_at)

    def digest(self) -> str:
        """A hash of the names of all files."""
        folders = Strings()
        for folder in self.folders:
            folders.append(folder)
        return self._names.digest() + folders.digest()


def read_file(path: str) -> bytes:
    """A file's content, with fewer system calls than ``open``: a sixth less time for an image in the page cache.

    Raises:
        OSError: It cannot be read; the text names it.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if not size:  # nothing in it, or a size that is not told: a pipe, /proc, some file systems in user space
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
    """Find the image files of a folder; from a list that is kept, where no folder has changed since.

    Args:
        path: A folder with a subfolder of images for each class.
        need_classes: Images must lie in class subfolders; else where some lie in the folder itself, all images below
            it are taken, without classes.
        progress: Show on stderr how many have been found, where it takes more than a second.

    Raises:
        FileNotFoundError: There is no such folder.
        NotADirectoryError: It is a file.
        ValueError: No image is where it should be.
    """
    folder = os.path.abspath(os.fspath(path))
    if not os.path.exists(folder):
        raise FileNotFoundError(f"{os.fspath(path)}: there is no such folder; give the path of a folder of images")
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{os.fspath(path)}: expected a folder of images, got a file")
    top, loose = class_names(folder)
    labelled = need_classes or not loose
    if labelled and not top:
        raise ValueError(_no_classes(os.fspath(path), loose))
    if labelled and loose:
        warnings.warn(
            f"{path}: {len(loose)} images beside the class subfolders ({_some(loose)}) have no class and are left out",
            stacklevel=2,
        )
    cache = UserCache("image-files", [_CACHE_VERSION, os.path.realpath(folder), labelled], ".npz")
    found = cache.load(lambda data: _parse(data, folder))
    if found is None:
        found = _list(folder, top if labelled else None, cache, progress)
    if not len(found):
        raise ValueError(
            f"{path}: there is no image in it; expected files that end in {', '.join(EXTENSIONS)}"
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
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                names.append(entry.name)
            elif entry.name.lower().endswith(EXTENSIONS):
                loose.append(entry.name)
    return sorted(names), sorted(loose)


# --- listing -----------------------------------------------------------------------------------------------------

_Listed = list[tuple[str, int, list[str]]]
"""Folders, their time of change in ns, and the images in each, in torchvision's order."""


def _list(folder: str, classes: list[str] | None, cache: UserCache, progress: bool) -> ImageFiles:
    counter = ConsoleProgress(
        None, what=f"listing {folder}", unit="images", enabled=progress, lines=False, after_s=1.0, transient=True
    )
    with counter, ThreadPoolExecutor(_THREADS, thread_name_prefix="gpuopt-list") as pool:
        tops = [folder] if classes is None else [os.path.join(folder, name) for name in classes]
        listed = list(pool.map(lambda top: _walk(top, counter.add), tops))
    folders: list[str] = []
    labels, folder_of, names = array("I"), array("I"), Strings()
    watched = {folder: os.stat(folder).st_mtime_ns}
    for label, found in enumerate(listed):
        watched |= {each: changed for each, changed, _ in found}
        holding = [(each, images) for each, _, images in found if images]
        for each, images in holding:
            folders.append(os.path.relpath(each, folder))
            labels.append(label)
            folder_of.extend([len(folders) - 1] * len(images))
            for image in images:
                names.append(image)
    files = ImageFiles(folder, None if classes is None else tuple(classes), folders, labels, folder_of, names)
    if len(files) >= CACHE_FROM and max(watched.values()) < time.time_ns() - _RECENT_NS:
        cache.keep(lambda stream: _write(files, watched, stream))
    return files


def _walk(top: str, count: Callable[[int], None]) -> _Listed:
    found: _Listed = []
    folders = [top]
    while folders:
        folder = folders.pop()
        changed = os.stat(folder).st_mtime_ns  # first: what comes while it is listed makes it newer
        images: list[str] = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    _refuse_loop(entry)
                    folders.append(entry.path)
                elif entry.name.lower().endswith(EXTENSIONS):
                    images.append(entry.name)
        count(len(images))
        found.append((folder, changed, sorted(images)))
    return sorted(found)


def _refuse_loop(entry: os.DirEntry[str]) -> None:
    if entry.is_symlink():
        here, there = os.path.realpath(os.path.dirname(entry.path)), os.path.realpath(entry.path)
        if here == there or here.startswith(there + os.sep):
            raise ValueError(f"{entry.path}: a link to a folder above it; remove it")


# --- the list that is kept ---------------------------------------------------------------------------------------


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
    return ImageFiles(folder, classes, about["folders"], arrays["labels"], arrays["folder_of"], names)


def _write(files: ImageFiles, watched: dict[str, int], stream: IO[bytes]) -> None:
    about = {"classes": files.classes, "folders": files.folders, "watched": watched}
    names, ends = files._names.parts()
    arrays = {"about": json.dumps(about).encode(), "names": names, "ends": ends}
    arrays |= {"labels": files._labels.tobytes(), "folder_of": files._folder_of.tobytes()}
    parts: dict[str, Any] = {name: np.frombuffer(data, np.uint8) for name, data in arrays.items()}
    np.savez(stream, **parts)


def _no_classes(path: str, loose: list[str]) -> str:
    if loose:
        return (
            f"{path}: {len(loose)} images, but no class subfolders; expected PATH/<class>/<image>: move them into a "
            "subfolder, or give a Dataset"
        )
    return f"{path}: expected class subfolders with images in them, found none"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
