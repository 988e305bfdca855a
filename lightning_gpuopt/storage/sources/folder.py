"""A folder of images with a subfolder a class, as torchvision's ImageFolder reads it."""

from __future__ import annotations

import os
from typing import Any

from lightning_gpuopt.images.files import find_images
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.sources.base import Source, read_image


class FolderSource(Source):
    """Samples are (image, label). The order and the labels are torchvision's, hidden files and folders left out."""

    kind = "image folder"
    single_reads = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._files = find_images(path)
        self.classes = self._files.classes
        self.num_bytes = self._files.num_bytes

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files.name(index)

    def identity(self, index: int) -> bytes:
        return b"%s\0%d" % (os.fsencode(self.name(index)), self._files.label(index))

    def read(self, index: int) -> tuple[EncodedImage, int]:
        return read_image(os.path.join(self._files.path, self._files.name(index))), self._files.label(index)

    def fingerprint(self) -> dict[str, Any]:
        """Names of all files; not their sizes, since a broken image may be replaced before a build goes on."""
        return super().fingerprint() | {"names": self._files.digest()}
