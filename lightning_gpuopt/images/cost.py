"""What the images of a dataset cost: to read, to decode with PIL, and to decode on the fast path."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, TypeVar

import numpy as np
import torch
from PIL import Image

from lightning_gpuopt.images.checks import PILErrors, shrink_image
from lightning_gpuopt.images.crop import RandomCrops, draw_area

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_IMAGES: Final = 16
"""Images measured; their medians vary by a few percent."""

_CROP_SIZE: Final = 224
_QUALITY: Final = 90
"""Of the JPEGs that were made smaller, as ``build_lmdb`` makes them."""

_MAX_PIXELS: Final = 40_000_000
"""A larger image alone would take about as long as all of it may take; it is skipped."""


@dataclass(frozen=True, slots=True)
class ImageCosts:
    """What an image file costs, on one CPU: medians over the images measured.

    Attributes:
        images: how many were measured.
        read_s: seconds to read the file, from wherever it was then: the page cache, or storage.
        pil_decode_s: seconds of ``Image.open(...).convert("RGB")``.
        pil_crop_s: seconds in which PIL cuts an area out of that and resizes it to the crop.
        pil_float_s: seconds in which the crop becomes a float32 tensor on the 0-1 scale.
        fast_decode_s: seconds in which the fast decoder gives the crop of the same area: decode and resize.
        small_decode_s: the same from the image as it is once its shorter side has ``small_size`` pixels.
        file_bytes: bytes of the file; the mean.
        width: pixels, as stored.
        height: pixels, as stored.
        small_size: shorter side in pixels of the images made smaller.
    """

    images: int
    read_s: float
    pil_decode_s: float
    pil_crop_s: float
    pil_float_s: float
    fast_decode_s: float
    small_decode_s: float
    file_bytes: float
    width: int
    height: int
    small_size: int


def resize_for(crop_size: int) -> int:
    """The shorter side in pixels of images that are cropped to `crop_size`: 256 for 224."""
    return round(crop_size * 8 / 7)


def measure_images(
    read: Callable[[int], bytes | None],
    indices: Sequence[int],
    crop_size: int | None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = 0.5,
) -> ImageCosts | None:
    """Measure what images cost; an image that cannot be read or decoded is skipped.

    No global random state is touched.

    Args:
        read: gives an image file's bytes by index; None where a sample has none.
        indices: which images; the first 16 are measured.
        crop_size: side of the crops in pixels; None: 224, as most models have them.
        clock: seconds.
        budget_s: no further image is begun after so many seconds.

    Returns:
        Their costs; None where no image could be measured.
    """
    crop_size = crop_size or _CROP_SIZE
    _warm_up(crop_size)
    began = clock()
    measured: list[tuple[float, ...]] = []
    for number, index in enumerate(indices[:MAX_IMAGES]):
        if clock() - began >= budget_s:
            break
        try:
            found = _measure_one(read, index, crop_size, number, clock)
        except Exception:
            log.debug("image %s could not be measured", index, exc_info=True)
            continue
        if found is not None:
            measured.append(found)
    if not measured:
        return None
    read_s, decode_s, crop_s, float_s, fast_s, small_s, file_bytes, width, height = zip(*measured, strict=True)
    return ImageCosts(
        len(measured),
        median(read_s),
        median(decode_s),
        median(crop_s),
        median(float_s),
        median(fast_s),
        median(small_s),
        fmean(file_bytes),
        round(median(width)),
        round(median(height)),
        resize_for(crop_size),
    )


def _measure_one(
    read: Callable[[int], bytes | None], index: int, crop_size: int, key: int, clock: Callable[[], float]
) -> tuple[float, ...] | None:
    """Seconds of each way, then bytes, width and height; None where there is none, or one that is too large."""
    data, read_s = _timed(clock, lambda: read(index))
    if data is None:
        return None
    with PILErrors(data):
        with Image.open(io.BytesIO(data)) as header:
            width, height = header.size
        if height * width > _MAX_PIXELS:
            return None
        image, decode_s = _timed(clock, lambda: _decode_pil(data))
        crop, crop_s = _timed(clock, lambda: _crop_pil(image, crop_size, key))
        _, float_s = _timed(clock, lambda: _to_float(crop))
        _, fast_s = _timed(clock, lambda: _decode_fast(data, crop_size, key))
        small = shrink_image(data, resize_for(crop_size), _QUALITY)
        _, small_s = _timed(clock, lambda: _decode_fast(small, crop_size, key))
    return read_s, decode_s, crop_s, float_s, fast_s, small_s, len(data), width, height


def _timed(clock: Callable[[], float], function: Callable[[], T]) -> tuple[T, float]:
    began = clock()
    result = function()
    return result, clock() - began


def _decode_pil(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        converted: Image.Image = image.convert("RGB")
        return converted


def _crop_pil(image: Image.Image, crop_size: int, key: int) -> Image.Image:
    area = draw_area(image.height, image.width, np.random.Generator(np.random.Philox(key=key)))
    box = (area.left, area.top, area.left + area.width, area.top + area.height)
    return image.crop(box).resize((crop_size, crop_size), Image.Resampling.BILINEAR)


def _to_float(crop: Image.Image) -> None:
    """As torchvision's ``ToTensor``."""
    torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous().float().div(255)


def _decode_fast(data: bytes, crop_size: int, key: int) -> None:
    crops = RandomCrops(crop_size)
    crops.begin(key)
    crops(data)


def _warm_up(crop_size: int) -> None:
    """Have PIL find its plugins, and libraries load what they load at the first call, before anything is timed."""
    out = io.BytesIO()
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(out, "JPEG")
    _to_float(_crop_pil(_decode_pil(out.getvalue()), crop_size, 0))
    _decode_fast(out.getvalue(), crop_size, 0)
