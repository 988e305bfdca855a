"""Map-style Datasets, those of image files among them, and datasets that this package wrote."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch.utils.data import Subset

from lightning_gpuopt.images.checks import BadImage
from lightning_gpuopt.images.errors import is_bad_image, reason_of
from lightning_gpuopt.images.files import Strings, about_bytes, digest
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.sources.base import Source, folder_of, read_image


def from_dataset(dataset: Any) -> Source:
    """The source for a Dataset: its files or stored samples where it gives these unchanged; TypeError: no length."""
    if type(dataset) is Subset:
        source = from_dataset(dataset.dataset)
        if not isinstance(source, DatasetSource) and len(dataset):
            return SubsetSource(source, [int(index) for index in dataset.indices])
        return DatasetSource(dataset)
    path = _own_path(dataset)
    if path is not None:
        return OwnSource(path)
    return FilesSource(dataset) if _gives_files(dataset) else DatasetSource(dataset)


def _own_path(dataset: Any) -> str | None:
    """Where the stored samples of one of our datasets lie, if they come out of it as they are."""
    if type(dataset) is not LMDBDataset or dataset.transform is not None or dataset.target_transform is not None:
        return None
    return str(dataset.path)


def _classes(dataset: Any) -> tuple[str, ...] | None:
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, Sequence) and not isinstance(classes, str) and all(type(c) is str for c in classes):
        return tuple(classes)
    return None


class DatasetSource(Source):
    """Anything with ``__len__`` and ``__getitem__``; its samples as they come."""

    kind = "dataset"

    def __init__(self, dataset: Any) -> None:
        self.path = type(dataset).__qualname__
        self._dataset = dataset
        try:
            self._length = len(dataset)
        except TypeError:
            raise TypeError(
                f"source: expected a path or a map-style Dataset with __len__ and __getitem__, got a {self.path} "
                "without a length"
            ) from None
        if not self._length:
            raise ValueError(f"source: the {self.path} has no samples")
        self.classes = _classes(dataset)

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        return f"{self.path}[{index}]"

    def read(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            if is_bad_image(error):
                raise BadImage(reason_of(error)) from error
            raise RuntimeError(
                f"source: {self.name(index)} raised {type(error).__name__}: {error}; fix the Dataset, then continue "
                "with resume=True"
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        """Type and length; nobody can look inside."""
        return super().fingerprint() | {"type": self.path}


class FilesSource(Source):
    """The image files of a dataset like torchvision's ImageFolder, which gives (image, label) of each."""

    kind = "image files"
    single_reads = True

    def __init__(self, dataset: Any) -> None:
        self.path = type(dataset).__qualname__
        self.classes = _classes(dataset)
        self._files = Strings()
        folders = set()
        for path, _ in dataset.samples:
            self._files.append(name := os.fspath(path))
            folders.add("".join(name.rpartition(os.sep)[0].rpartition(os.sep)[:2]))  # those of the classes' folders
        root = getattr(dataset, "root", None)
        root = os.path.join(os.fspath(root), "") if isinstance(root, (str, os.PathLike)) else ""
        self._root = root if root and all(each.startswith(root) for each in folders) else folder_of(folders)
        self._labels = np.array([label for _, label in dataset.samples], np.int64)
        self.num_bytes = about_bytes(len(self), self._files.__getitem__)

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files[index]

    def identity(self, index: int) -> bytes:
        return b"%s\0%d" % (os.fsencode(self._files[index][len(self._root) :]), self._labels[index])

    def read(self, index: int) -> tuple[EncodedImage, int]:
        return read_image(self._files[index]), int(self._labels[index])

    def fingerprint(self) -> dict[str, Any]:
        """Names of the files, folders above their own left out, and the labels."""
        tails = (os.sep.join(self._files[i].split(os.sep)[-2:]) for i in range(len(self)))
        names = digest(os.fsencode(tail) + b"\0" for tail in tails)
        return super().fingerprint() | {"names": names, "labels": digest([self._labels.tobytes()])}


def _gives_files(dataset: Any) -> bool:
    """Whether a dataset's first, middle and last sample are the images in its files, like torchvision's ImageFolder."""
    samples = getattr(dataset, "samples", None)
    changed = any(getattr(dataset, name, None) is not None for name in ("transform", "target_transform", "transforms"))
    if changed or not isinstance(samples, list) or not samples or not hasattr(dataset, "__len__"):
        return False
    if len(dataset) != len(samples) or not all(_is_file_and_label(sample) for sample in samples):
        return False
    compared = [_same_image(dataset, index) for index in sorted({0, len(samples) // 2, len(samples) - 1})]
    return True in compared and False not in compared


def _is_file_and_label(sample: Any) -> bool:
    return (
        isinstance(sample, (tuple, list))
        and len(sample) == 2
        and isinstance(sample[0], (str, os.PathLike))
        and type(sample[1]) is int
    )


def _same_image(dataset: Any, index: int) -> bool | None:
    """Whether a sample is its file's image and label; None if it cannot be read."""
    path, label = dataset.samples[index]
    try:
        sample = dataset[index]
        with Image.open(path) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB")
            plain = opened.convert("RGB")
    except Exception as error:
        return None if isinstance(error, OSError) or is_bad_image(error) else False
    if type(sample) is not tuple or len(sample) != 2 or type(sample[1]) is not int or sample[1] != label:
        return False
    image = sample[0]
    if not isinstance(image, Image.Image) or image.mode != "RGB":
        return False
    return any(image.size == other.size and image.tobytes() == other.tobytes() for other in (plain, upright))


class SubsetSource(Source):
    """Some samples of another source, in a given order."""

    def __init__(self, source: Source, indices: list[int]) -> None:
        self._source = source
        # As in a Dataset's own list, negative indices count from the end.
        self._indices = np.arange(len(source), dtype=np.int64)[indices]
        self.kind, self.path, self.classes = source.kind, source.path, source.classes
        self.single_reads = source.single_reads
        if source.num_bytes is not None:
            self.num_bytes = source.num_bytes * len(self) // len(source)

    def __len__(self) -> int:
        return len(self._indices)

    def name(self, index: int) -> str:
        return self._source.name(int(self._indices[index]))

    def read(self, index: int) -> Any:
        return self._source.read(int(self._indices[index]))

    def fingerprint(self) -> dict[str, Any]:
        return self._source.fingerprint() | {"num_samples": len(self), "subset": digest([self._indices.tobytes()])}

    def close(self) -> None:
        self._source.close()


class OwnSource(Source):
    """A dataset that this package wrote; images stay as they are, and every checksum is compared."""

    kind = "lightning-gpuopt"

    def __init__(self, path: str) -> None:
        self.path = path
        self._dataset = LMDBDataset(path)
        self._manifest = self._dataset.manifest
        if not self._manifest.num_samples:
            raise ValueError(f"{path}: there is no sample in it")
        self.classes = self._manifest.classes
        self.num_bytes = self._manifest.num_bytes

    def __len__(self) -> int:
        return self._manifest.num_samples

    def name(self, index: int) -> str:
        return f"sample {index}"

    def read(self, index: int) -> Any:
        starts = self._dataset.starts
        at = bisect_right(starts, index) - 1
        try:
            return self._dataset.shard(at).read(index - starts[at], EncodedImage, verify=True)
        except DamagedError as error:
            name = self._manifest.shards[at].name
            raise DamagedError(
                f"{self.path}: sample {index} ({name}): {error}; copy it again, or build it from its own source"
            ) from None

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {"manifest": digest([self._manifest.to_json().encode()])}
