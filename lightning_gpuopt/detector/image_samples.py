"""Finds the image files behind a training loader by duck typing, and measures once what they cost."""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from typing_extensions import override

from lightning_gpuopt.measurements.loading import ImageSamples
from lightning_gpuopt.timeline.probe import Probe

log = logging.getLogger(__name__)

_SUFFIXES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif"})
_MAX_DEPTH: Final = 16  # datasets inside datasets
_CHANNELS: Final = 3


@dataclass(frozen=True)
class ReadImages:
    read: Callable[[int], bytes | None]  # gives a file's bytes by number
    count: int
    own: bool = False  # of this package: it has ``image_file(index) -> bytes``
    in_lmdb: bool = False  # stored in an LMDB of this package: its ``info`` counts shards
    fast: bool = False  # read by the fast decoder: ``decode="tensor"``, or ``crops`` in a wrapper


def image_files(dataset: Any) -> ReadImages | None:
    """The image files behind a dataset, by duck typing; None if it is not known to read any.

    Known are ``image_file(index) -> bytes``; lists of ``samples`` or ``imgs`` (tuples that begin with a path, as
    torchvision's) or ``files`` (paths); and torch's ``Subset`` and ``ConcatDataset`` of those.
    """
    return _find(dataset, _MAX_DEPTH)


def _find(dataset: Any, depth: int) -> ReadImages | None:
    if dataset is None or not depth:
        return None
    if callable(getattr(dataset, "image_file", None)):
        decode = getattr(dataset, "decode", None)
        in_lmdb = getattr(getattr(dataset, "info", None), "num_shards", None) is not None
        return ReadImages(dataset.image_file, len(dataset), True, in_lmdb, decode == "tensor")
    paths = _paths(dataset)
    if paths is not None:
        return ReadImages(partial(_read, paths), len(paths))
    parts = getattr(dataset, "datasets", None)
    if isinstance(parts, (list, tuple)):
        found = _joined([_find(part, depth - 1) for part in parts])
    else:
        found = _find(getattr(dataset, "dataset", None), depth - 1)
    return _within(dataset, found) if found is not None else None


def _paths(dataset: Any) -> Sequence[Any] | None:
    """The dataset's list of image files: paths, or tuples that begin with one."""
    for name in ("samples", "imgs", "files"):
        listed = getattr(dataset, name, None)
        if not isinstance(listed, (list, tuple)) or not listed:
            continue
        path = _path_in(listed[0])
        if path is not None and os.path.splitext(path)[1].lower() in _SUFFIXES:
            return listed
    return None


def _read(listed: Sequence[Any], number: int) -> bytes | None:
    path = _path_in(listed[number])
    return Path(path).read_bytes() if path is not None else None


def _path_in(entry: Any) -> str | os.PathLike[str] | None:
    first = entry[0] if isinstance(entry, (list, tuple)) and entry else entry
    return first if isinstance(first, (str, os.PathLike)) else None


def _joined(parts: list[ReadImages | None]) -> ReadImages | None:
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    ends = list(accumulate(part.count for part in known))

    def read(number: int) -> bytes | None:
        at = bisect_right(ends, number)
        return known[at].read(number - (ends[at - 1] if at else 0))

    return ReadImages(
        read,
        ends[-1],
        all(part.own for part in known),
        all(part.in_lmdb for part in known),
        all(part.fast for part in known),
    )


def _within(wrapper: Any, found: ReadImages) -> ReadImages:
    """The files that a wrapper (a Subset, our loaders' own) leaves of a dataset."""
    if found.own and getattr(wrapper, "crops", None) is not None:  # by the fast decoder
        found = replace(found, fast=True)
    indices = getattr(wrapper, "indices", None)
    if indices is None or not hasattr(indices, "__getitem__"):
        return found
    read = found.read
    return replace(found, read=lambda number: read(int(indices[number])), count=len(indices))


def describe(dataset: Any, batch: tuple[int, int] | None) -> ImageSamples | None:
    """What is known of image files without reading one; ``batch`` is :func:`images_in`'s. None: none are known."""
    files = image_files(dataset)
    if files is None:
        return None
    batch_size, crop_size = batch if batch is not None else (None, None)
    return ImageSamples(files.own, files.in_lmdb, files.fast, crop_size, batch_size)


def measure(dataset: Any, batch: tuple[int, int] | None) -> ImageSamples | None:
    """The same, with what reading and decoding them costs; at most about half a second."""
    files, known = image_files(dataset), describe(dataset, batch)
    if files is None or known is None or not files.count:
        return known
    from lightning_gpuopt.images.cost import MAX_IMAGES, measure_images  # needs decoders, which others do without

    indices = range(0, files.count, max(files.count // MAX_IMAGES, 1))
    costs = measure_images(files.read, indices, known.crop_size)
    if costs is None:
        return known
    return replace(known, **{name: value for name, value in asdict(costs).items() if name != "images"})


def images_in(batch: Any) -> tuple[int, int] | None:
    """Number and side in pixels of the square RGB images in a batch; None if it holds none."""
    if isinstance(batch, Mapping):
        values: Sequence[Any] = list(batch.values())
    else:
        values = batch if isinstance(batch, (list, tuple)) else [batch]
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            number, *sizes = value.shape
            if sizes[0] == _CHANNELS and sizes[1] == sizes[2]:
                return number, sizes[1]
            if sizes[2] == _CHANNELS and sizes[0] == sizes[1]:
                return number, sizes[0]
    return None


class ImageLook(Probe):
    """What is known of the images behind a Trainer's only training loader."""

    def __init__(self, loaders: Callable[[], list[Any]]) -> None:
        self._loaders = loaders
        self._in_batch: tuple[int, int] | None = None
        self._batch_seen = False
        self.samples: ImageSamples | None = None

    @override
    def known(self) -> dict[str, Any]:
        return {"images": self.samples}

    def see_batch(self, batch: Any) -> None:
        """Look at the first batch: which images are in it, and whether they are read from files."""
        if not self._batch_seen:
            self._batch_seen = True
            self._look(describe, batch)

    def measure(self) -> None:
        """Measure what the images cost; at most about half a second."""
        self._look(measure)

    def _look(self, look: Callable[[Any, tuple[int, int] | None], ImageSamples | None], batch: Any = None) -> None:
        loaders = self._loaders()
        if len(loaders) != 1:  # of several, which one is late differs from window to window
            return
        try:
            if batch is not None:
                self._in_batch = images_in(batch)
            self.samples = look(getattr(loaders[0], "dataset", None), self._in_batch)
        except Exception:  # a user's dataset or batch may raise anything
            log.debug("the images of a dataset could not be looked at", exc_info=True)
