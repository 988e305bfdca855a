"""Datasets of image files, as a decoder outside Python wants them: bytes and labels by index."""

from __future__ import annotations

import hashlib
import os
from array import array
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import Dataset

from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.images.files import Strings, read_file
from lightning_gpuopt.loading.datasets import for_loader, leaves, locate, offers, read_ahead, sample_name, targets_of

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Labels: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

NO_LABEL = -1  # the label of samples that have none


class EncodedImages:
    """The image files of a dataset, and their labels; without ``need_labels`` a missing label is -1.

    TypeError if a dataset does not give the bytes of its images; ValueError if labels are no whole numbers, or
    there are none, nothing is there, or it has a transform, which DALI would not run.
    """

    def __init__(self, dataset: Any, need_labels: bool = True) -> None:
        for leaf in leaves(dataset):
            _check(leaf)
        checked = for_loader(dataset)
        self._dataset = dataset if checked is None else checked
        self.labels = _labels(dataset, need_labels)

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, index: int) -> str:
        """What users call a sample: its file's path, or its index in an LMDB."""
        return sample_name(self._dataset, index)

    def key(self) -> str:
        """Stands for the images and their order: a hash of all their names."""
        names = hashlib.sha256()
        for index in range(len(self)):
            names.update(f"{self.name(index)}\n".encode("utf-8", "surrogateescape"))
        return names.hexdigest()

    def read(self, index: int) -> Bytes:
        """The bytes of a sample's image file: uint8 ``[N]``; of an LMDB without a copy. CorruptSampleError, OSError."""
        owner, at = locate(self._dataset, index)
        data = owner.encoded_image(at)
        if not data:
            what = "expected an image in the sample, but there is none" if data is None else "the file is empty"
            raise CorruptSampleError(f"{self.name(index)}: {what}")
        return np.frombuffer(data, np.uint8)

    def read_ahead(self, indices: list[int]) -> None:
        """Have the kernel begin to read samples, where their storage can."""
        read_ahead(self._dataset, indices)


def _check(dataset: Any) -> None:
    if not offers(dataset, "encoded_image"):
        raise TypeError(
            "expected an LMDBDataset, an image folder, a list of files, or Subsets and ConcatDatasets of those: DALI "
            f"decodes the image files itself; got a {type(dataset).__name__}"
        )
    changes = [name for name in ("transform", "target_transform") if getattr(dataset, name, None) is not None]
    if changes:
        raise ValueError(
            f"expected a dataset without {changes[0]}, which DALI does not run; got {dataset!r}: give a train_pipeline "
            "or eval_pipeline instead"
        )


def _labels(dataset: Any, needed: bool) -> Labels:
    try:
        targets = targets_of(dataset)
    except (AttributeError, TypeError) as error:
        if needed:
            raise ValueError(
                f"expected a label for each sample, but there is none in {dataset!r}; without labels, pass it as "
                "predict="
            ) from error
        return np.full(len(dataset), NO_LABEL, np.int64)
    if targets.ndim != 1 or (targets.dtype.kind not in "iub" and targets.size):
        raise ValueError(
            f"expected one whole number a sample as its label; got {targets.dtype} of shape {targets.shape[1:]} in "
            f"{dataset!r}"
        )
    return targets.astype(np.int64)


class FileList(Dataset[Any]):
    """Image files that a text file lists: ``PATH LABEL`` in each line, as DALI's and Caffe's lists have it.

    Paths are relative to the list's folder; the label is what stands behind the last blank or tab. Empty lines are left
    out. Without ``need_labels`` all lines are paths alone, if the first is. FileNotFoundError, ValueError (no label, or
    no line).
    """

    def __init__(self, path: str | os.PathLike[str], need_labels: bool = True) -> None:
        self.path = Path(os.path.abspath(path))
        self._root = str(self.path.parent)
        with self.path.open(encoding="utf-8", errors="surrogateescape") as stream:
            lines = [(number, line.strip()) for number, line in enumerate(stream, 1) if line.strip()]
        if not lines:
            raise ValueError(f"{path}: expected lines PATH LABEL, the list is empty")
        labelled = need_labels or _split(lines[0][1]) is not None
        self._names = Strings()
        labels = array("q")
        for number, line in lines:
            found = _split(line) if labelled else (line, NO_LABEL)
            if found is None:
                raise ValueError(f"{path}, line {number}: expected PATH LABEL, the label a whole number; got {line!r}")
            self._names.append(found[0])
            labels.append(found[1])
        if labelled:
            self.targets: Labels = np.frombuffer(labels, np.int64)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"FileList({str(self.path)!r}, {len(self)} images)"

    def __getitem__(self, index: int) -> Any:
        data = self.encoded_image(index)
        return (data, int(self.targets[index])) if hasattr(self, "targets") else data

    def for_loader(self) -> FileList:
        return self

    def sample_name(self, index: int) -> str:
        return os.path.join(self._root, self._names[index])

    def encoded_image(self, index: int) -> bytes:
        return read_file(self.sample_name(index))


def _split(line: str) -> tuple[str, int] | None:
    """Path and label of a line; None if it has no label."""
    parts = line.rsplit(None, 1)
    try:
        label = int(parts[1]) if len(parts) == 2 else None
    except ValueError:
        return None
    return (parts[0], label) if label is not None and -(2**63) <= label < 2**63 else None
