"""A folder of image files as a map-style dataset, without conversion."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from torch.utils.data import Dataset

from lightning_gpuopt.images.decode import decode_pil, decode_tensor
from lightning_gpuopt.images.errors import CorruptSampleError, is_bad_image, reason_of
from lightning_gpuopt.images.files import ImageFiles, find_images
from lightning_gpuopt.loading.datasets import Decoder, duplicate
from lightning_gpuopt.loading.labels import Labels
from lightning_gpuopt.loading.transforms import Transform, name_sample, transformed
from lightning_gpuopt.utils.arguments import choice

_DECODERS: Final[dict[str, Decoder]] = {"pil": decode_pil, "tensor": decode_tensor, "raw": bytes}


class ImageFolder(Dataset[Any]):
    """The image files of a folder: ``(image, label)`` as torchvision has it, or images alone without class folders.

    `decode` is ``"pil"`` RGB images, ``"tensor"`` uint8 ``[3, H, W]``, both upright, or ``"raw"`` the files' bytes.
    Without `need_classes` a folder that has images in itself has no labels. FileNotFoundError, ValueError (no image).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        decode: Literal["pil", "tensor", "raw"] = "pil",
        need_classes: bool = True,
        files: ImageFiles | None = None,
    ) -> None:
        self.decode = choice("decode", decode, tuple(_DECODERS))
        self.path = Path(os.path.abspath(path))
        self.transform = transform
        self.target_transform = target_transform
        self.files = find_images(self.path, need_classes=need_classes, progress=True) if files is None else files
        self._decoder = _DECODERS[decode]

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        classes = "" if self.files.classes is None else f", {len(self.files.classes)} classes"
        return f"ImageFolder({str(self.path)!r}, {len(self)} images{classes}, decode={self.decode!r})"

    def __getitem__(self, index: int) -> Any:
        """A sample; OSError if its file cannot be read, CorruptSampleError if it cannot be decoded."""
        size = len(self.files)
        at = index + size if index < 0 else index
        if not 0 <= at < size:
            raise IndexError(f"{self.path}: there is no sample {index}; the folder has {size} images")
        image = self._read(at)
        sample = image if self.files.classes is None else (image, self.files.label(at))
        if self.transform is None and self.target_transform is None:
            return sample
        try:
            return transformed(sample, self.transform, self.target_transform, str(self.path))
        except Exception as error:
            name_sample(error, self.sample_name(at))
            raise

    @property
    def is_pure(self) -> bool:
        """Whether a sample is what the file has: no subclass, and no transform, makes something else of it."""
        return type(self) is ImageFolder and self.transform is None and self.target_transform is None

    def _read(self, index: int) -> Any:
        data = self.files.read(index)
        try:
            return self._decoder(data)
        except Exception as error:
            if not is_bad_image(error):
                raise
            raise CorruptSampleError(
                f"{self.sample_name(index)}: it is not an image that can be decoded ({type(error).__name__}: "
                f"{reason_of(error)}); replace or remove it"
            ) from error

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, index by label; None if there are none."""
        return None if self.files.classes is None else list(self.files.classes)

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: label for label, name in enumerate(self.files.classes or ())}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "targets"}

    @cached_property
    def targets(self) -> Labels:
        """The label of each sample, without reading images; AttributeError without class subfolders."""
        if self.files.classes is None:
            raise AttributeError(f"{self.path}: there are no class subfolders, and so no labels")
        return Labels(self.files.labels())

    def with_decoder(self, decoder: Decoder) -> ImageFolder:
        copied: ImageFolder = duplicate(self)
        copied._decoder = decoder
        return copied

    def for_loader(self) -> ImageFolder:
        return self

    def sample_name(self, index: int) -> str:
        return os.path.join(self.path, self.files.name(index))

    def image_file(self, index: int) -> bytes:
        return self.files.read(index)

    encoded_image = image_file  # for a decoder outside Python
