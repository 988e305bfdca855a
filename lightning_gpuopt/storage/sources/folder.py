"""A folder of images with a subfolder a class, as torchvision's ImageFolder reads it."""

from __future__ import annotations

import os
import warnings
from array import array
from typing import Any, Final

from lightning_gpuopt.images.checks import BadImage
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.sources.base import Source, Strings

EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_SIZES: Final = 512  # files looked at to know about how large they all are


class FolderSource(Source):
    """Samples are (image, label). The order and the labels are torchvision's, hidden files and folders left out."""

    kind = "image folder"

    def __init__(self, path: str) -> None:
        self.path = path
        self._folders: list[str] = []
        self._labels = array("I")  # by folder
        self._folder_of = array("I")
        self._names = Strings()
        names, loose = _class_names(path)
        if not names:
            raise ValueError(_no_classes(path, loose))
        self.classes = tuple(names)
        empty = [name for label, name in enumerate(names) if not self._scan(label, name)]
        if not len(self):
            raise ValueError(
                f"{path}: there is no image in it; expected files in class subfolders that end in "
                f"{', '.join(EXTENSIONS)}"
            )
        if empty:
            warnings.warn(
                f"{path}: no image in {len(empty)} of {len(names)} class subfolders ({_some(empty)}); "
                "they keep their labels",
                stacklevel=4,
            )
        if loose:
            warnings.warn(
                f"{path}: {len(loose)} images beside the class subfolders ({_some(loose)}) have no class and are left "
                "out",
                stacklevel=4,
            )
        step = max(1, len(self) // _SIZES)
        looked_at = range(0, len(self), step)
        sampled_bytes = sum(_size(os.path.join(path, self.name(index))) for index in looked_at)
        self.num_bytes = sampled_bytes * len(self) // len(looked_at)

    def _scan(self, label: int, name: str) -> int:
        before = len(self)
        folders = [os.path.join(self.path, name)]
        found: list[tuple[str, list[str]]] = []
        while folders:
            folder = folders.pop()
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
            if images:
                images.sort()
                found.append((folder, images))
        for folder, images in sorted(found):
            self._folders.append(os.path.relpath(folder, self.path))
            self._labels.append(label)
            self._folder_of.extend([len(self._folders) - 1] * len(images))
            for image in images:
                self._names.append(image)
        return len(self) - before

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """The file's path within the folder."""
        return os.path.join(self._folders[self._folder_of[index]], self._names[index])

    def read(self, index: int) -> tuple[EncodedImage, int]:
        """The image file and its label."""
        path = os.path.join(self.path, self.name(index))
        try:
            with open(path, "rb", buffering=0) as stream:
                data = stream.read()
        except FileNotFoundError:
            raise BadImage("there is no such file (a link that leads nowhere, or it was removed)") from None
        return EncodedImage(data), self._labels[self._folder_of[index]]

    def fingerprint(self) -> dict[str, Any]:
        """Names of all files; not their sizes, since a broken image may be mended before a build goes on."""
        folders = Strings()
        for folder in self._folders:
            folders.append(folder)
        return {
            "kind": self.kind,
            "num_samples": len(self),
            "names": self._names.digest() + folders.digest(),
        }


def has_class_folders(path: str) -> bool:
    """Whether there are subfolders that are not hidden."""
    return bool(_class_names(path)[0])


def _class_names(path: str) -> tuple[list[str], list[str]]:
    """Names of the class subfolders, and of the images that lie beside them."""
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


def _no_classes(path: str, loose: list[str]) -> str:
    if loose:
        return (
            f"{path}: {len(loose)} images, but no class subfolders; expected PATH/<class>/<image>: move them into a "
            "subfolder, or give a Dataset"
        )
    return (
        f"{path}: not a source that is known; expected class subfolders with images in them, *.tar files, *.parquet "
        "files, or an LMDB"
    )


def _refuse_loop(entry: os.DirEntry[str]) -> None:
    if entry.is_symlink():
        here, there = os.path.realpath(os.path.dirname(entry.path)), os.path.realpath(entry.path)
        if here == there or here.startswith(there + os.sep):
            raise ValueError(f"{entry.path}: a link to a folder above it; remove it")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
