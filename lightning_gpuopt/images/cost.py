"""What the images of a dataset cost: to read, to decode with PIL, and to decode on the fast path."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Final, TypeVar

import numpy as np
import torch
from PIL import Image

from lightning_gpuopt.images.checks import pil_errors, shrink_image
from lightning_gpuopt.images.crop import RandomCrops, draw_area

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_IMAGES: Final = 16  # images measured; their medians vary by a few percent
_PILS_SHARE: Final = 0.5  # of the budget: what PIL has decoded by then, the fast decoder decodes in less than the rest
_CROP_SIZE: Final = 224
_QUALITY: Final = 90  # of the JPEGs that were made smaller, as ``build_lmdb`` makes them
_MAX_PIXELS: Final = 40_000_000  # a larger image alone would take about as long as all of it may take; it is skipped


@dataclass(frozen=True, slots=True)
class ImageCosts:
    """What an image file costs, on one CPU: medians over the images measured."""

    images: int  # how many were measured
    read_s: float  # from wherever the file was then: the page cache, or storage
    pil_decode_s: float  # of ``Image.open(...).convert("RGB")``
    pil_crop_s: float  # PIL cuts an area out of that and resizes it to the crop
    pil_float_s: float  # the crop becomes a float32 tensor on the 0-1 scale
    fast_decode_s: float  # the fast decoder gives the crop of the same area: decode and resize
    small_decode_s: float  # the same once the shorter side has ``small_size`` pixels
    file_bytes: float  # the mean
    width: int  # pixels, as stored
    height: int  # pixels, as stored
    small_size: int  # pixels


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
    """Measure what images cost, in about `budget_s` and without global random state; None if none can be decoded.

    The first 16 are measured; one that cannot be read (`read` gives None) or decoded is skipped. `crop_size` None is
    224, as most models have it.
    """
    crop_size = crop_size or _CROP_SIZE
    _warm_up(crop_size)
    began_s = clock()

    def begun() -> Iterator[_Image]:
        for key, index in enumerate(indices[:MAX_IMAGES]):
            if clock() - began_s >= _PILS_SHARE * budget_s:
                break
            yield _Image(partial(read, index), key, crop_size, clock)

    # A decoder has its turn with all images, one after the other: as in training, its code is in the caches then.
    images: Iterable[_Image] = begun()
    for turn in (_Image.with_pil, _Image.fast, _Image.shrink, _Image.small):
        images = [image for image in images if _done(turn, image)]
    images = list(images)
    if not images:
        return None

    def typical(name: str) -> float:
        return median(image.took_s[name] for image in images)

    return ImageCosts(
        images=len(images),
        read_s=typical("read"),
        pil_decode_s=typical("decode"),
        pil_crop_s=typical("crop"),
        pil_float_s=typical("float"),
        fast_decode_s=typical("fast"),
        small_decode_s=typical("small"),
        file_bytes=fmean(len(image.data) for image in images),
        width=round(median(image.width for image in images)),
        height=round(median(image.height for image in images)),
        small_size=resize_for(crop_size),
    )


class _Image:
    """An image, with the seconds that each way of reading it took."""

    def __init__(self, read: Callable[[], bytes | None], key: int, crop_size: int, clock: Callable[[], float]) -> None:
        self._read, self._key, self._crop_size, self._clock = read, key, crop_size, clock
        self.took_s: dict[str, float] = {}

    def with_pil(self) -> None:
        """Read the file, and decode it as most datasets do; an image that is too large is refused."""
        data = self._timed("read", self._read)
        if data is None:
            raise LookupError("the sample has no image file")
        self.data: bytes = data
        with pil_errors(data):
            with Image.open(io.BytesIO(data)) as header:
                self.width, self.height = header.size
            if self.height * self.width > _MAX_PIXELS:
                raise ValueError("the image is too large to be measured")
            image = self._timed("decode", lambda: _decode_pil(data))
            crop = self._timed("crop", lambda: _crop_pil(image, self._crop_size, self._key))
            self._timed("float", lambda: _to_float(crop))

    def fast(self) -> None:
        self._timed("fast", lambda: _decode_fast(self.data, self._crop_size, self._key))

    def shrink(self) -> None:
        self._small = shrink_image(self.data, resize_for(self._crop_size), _QUALITY)

    def small(self) -> None:
        self._timed("small", lambda: _decode_fast(self._small, self._crop_size, self._key))

    def _timed(self, name: str, function: Callable[[], T]) -> T:
        began_s = self._clock()
        result = function()
        self.took_s[name] = self._clock() - began_s
        return result


def _done(turn: Callable[[_Image], None], image: _Image) -> bool:
    try:
        turn(image)
    except Exception:
        log.debug("an image could not be measured", exc_info=True)
        return False
    return True


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
