"""Square crops while an image is decoded: random-resized for training, from the middle for evaluation.

Photographs are resized with antialiasing. Images whose values count (masks, depth maps) get the same area, by nearest
neighbour.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from lightning_gpuopt.images import decode

Interpolation = Literal["bilinear", "bicubic", "nearest"]

SCALE: Final = (0.08, 1.0)
RATIO: Final = (3 / 4, 4 / 3)
_ATTEMPTS: Final = 10


class Area(NamedTuple):
    """A rectangle of an image of `of_height` by `of_width` pixels, and whether it is mirrored left to right."""

    top: int
    left: int
    height: int
    width: int
    of_height: int
    of_width: int
    mirrored: bool

    def within(self, height: int, width: int) -> Area:
        """The same part of an image of another size, such as a mask of half the resolution."""
        if (height, width) == (self.of_height, self.of_width):
            return self
        down, across = height / self.of_height, width / self.of_width
        top, left = min(round(self.top * down), height - 1), min(round(self.left * across), width - 1)
        high = min(max(1, round(self.height * down)), height - top)
        wide = min(max(1, round(self.width * across)), width - left)
        return Area(top, left, high, wide, height, width, self.mirrored)


_of_thread = threading.local()


def keyed_generator(key: int) -> np.random.Generator:
    """``Generator(Philox(key=key))``, of 64 bits: this thread's only one, whose state is set, a tenth of the time."""
    generator: np.random.Generator | None = getattr(_of_thread, "generator", None)
    if generator is None:
        generator = _of_thread.generator = np.random.Generator(np.random.Philox(key=0))
        _of_thread.fresh = generator.bit_generator.state
    _of_thread.fresh["state"]["key"][0] = key
    generator.bit_generator.state = _of_thread.fresh
    return generator


def draw_area(
    height: int,
    width: int,
    generator: np.random.Generator,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    flip: bool = False,
) -> Area:
    """A random area of an upright image in pixels, as torchvision's ``RandomResizedCrop`` draws them.

    The method is that of Szegedy et al. 2015 (Going Deeper with Convolutions, section 6). `scale` is the share of the
    image's area, `ratio` width over height; `flip` mirrors one in two.
    """
    # One call for all numbers: calls would take longer than everything else here.
    down, across, side, *attempts = generator.random(3 + 2 * _ATTEMPTS).tolist()
    mirrored = flip and side < 0.5
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for attempt in range(0, 2 * _ATTEMPTS, 2):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * attempts[attempt])
        aspect = math.exp(low + (high - low) * attempts[attempt + 1])
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return Area(int(down * (height - h + 1)), int(across * (width - w + 1)), h, w, height, width, mirrored)
    # No luck: the middle, as far as the aspect ratio allows.
    w, h = width, height
    if width / height < ratio[0]:
        h = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = min(width, max(1, round(height * ratio[1])))
    return Area((height - h) // 2, (width - w) // 2, h, w, height, width, mirrored)


class RandomCrops:
    """An image decoder that gives uint8 tensors ``[3, size, size]`` of random areas; one area for a whole sample.

    Call `begin` before each sample. Safe between threads. Photographs are resized with antialiasing but for
    ``"nearest"``.
    """

    def __init__(
        self,
        size: int,
        scale: tuple[float, float] = SCALE,
        ratio: tuple[float, float] = RATIO,
        interpolation: Interpolation = "bilinear",
        flip: bool = False,
    ) -> None:
        self.size = size
        self.scale = scale
        self.ratio = ratio
        self.interpolation = interpolation
        self.flip = flip
        self._sample = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return RandomCrops, (self.size, self.scale, self.ratio, self.interpolation, self.flip)

    def begin(self, key: int) -> None:
        """Start a sample, whose area these 64 bits decide."""
        self._sample.key, self._sample.area = key, None

    def __call__(self, data: bytes | memoryview, mode: str | None = None) -> torch.Tensor:
        """Decode an image file; as `decode_tensor`."""
        if mode is not None:
            pixels = decode.exact_pixels(data, mode)
            return _nearest(pixels, self._area(*pixels.shape[:2]), self.size)
        header = decode.jpeg_size(data)
        if header is None:  # its header may not tell the size that it is shown in, and it is decoded in full anyway
            pixels = np.asarray(decode.decode_pil(data))
            return cut(pixels, self._area(*pixels.shape[:2]), self.size, self.interpolation)
        height, width, orientation = header
        if decode.is_swapped(orientation):
            height, width = width, height
        return crop(data, self._area(height, width), orientation, self.size, self.interpolation)

    def _area(self, height: int, width: int) -> Area:
        """The sample's area; its first image decides."""
        if not hasattr(self._sample, "key"):
            raise RuntimeError(
                "an image is decoded in another thread than the one that reads its sample: decode it in the latter"
            )
        area: Area | None = self._sample.area
        if area is None:
            generator = keyed_generator(self._sample.key)
            area = self._sample.area = draw_area(height, width, generator, self.scale, self.ratio, self.flip)
        return area.within(height, width)


class CenterCrops:
    """Gives the middle of an image as uint8 ``[3, size, size]``; `resize` is the shorter side (None: 8/7 of `size`)."""

    def __init__(self, size: int, resize: int | None = None, interpolation: Interpolation = "bilinear") -> None:
        self.size = size
        self.resize = round(size * 8 / 7) if resize is None else resize
        self.interpolation = interpolation

    def begin(self, key: int) -> None:
        """Nothing: all samples are cropped alike."""

    def __call__(self, data: bytes | memoryview, mode: str | None = None) -> torch.Tensor:
        # In full: evaluation should not depend on how an image was made smaller as it was decoded.
        pixels = decode.decode(data, 0, 0) if mode is None else decode.exact_pixels(data, mode)
        height, width = pixels.shape[:2]
        size = self.size
        high, wide, top, left = resized_center(height, width, self.resize, size)
        if mode is not None:
            rows = _centers(top, size, height / high, height)
            return decode.exact_tensor(pixels[np.ix_(rows, _centers(left, size, width / wide, width))])
        return _resize(pixels, high, wide, self.interpolation)[:, top : top + size, left : left + size]


def resized_center(height: int, width: int, short: int, size: int) -> tuple[int, int, int, int]:
    """Height and width of an image resized to `short`, and top and left of the square in its middle, in pixels.

    As torchvision's ``Resize``, which floors the longer side, and ``CenterCrop``.
    """
    high, wide = (short, short * width // height) if height <= width else (short * height // width, short)
    return high, wide, round((high - size) / 2), round((wide - size) / 2)


def crop(
    data: bytes | memoryview, area: Area, orientation: int, size: int, interpolation: Interpolation = "bilinear"
) -> torch.Tensor:
    """Decode an area of an upright JPEG file and resize it: uint8 ``[3, size, size]``. OSError as of `decode_pil`."""
    upright = area.of_height, area.of_width
    height, width = upright[::-1] if decode.is_swapped(orientation) else upright  # as stored
    # libjpeg-turbo halves and quarters as it decodes; other factors are slower than decoding in full.
    least = max(size / area.height, size / area.width)
    last_row = area.top + area.height if orientation == 1 else height
    pixels = decode.decode(data, math.ceil(height * least), math.ceil(width * least), orientation, last_row)
    down_x = pixels.shape[1] / upright[1]
    down_y = down_x if orientation == 1 else pixels.shape[0] / upright[0]  # there may be fewer rows than in the image
    return cut(pixels, area, size, interpolation, down_y, down_x)


def cut(
    pixels: decode.Pixels, area: Area, size: int, interpolation: Interpolation, down_y: float = 1.0, down_x: float = 1.0
) -> torch.Tensor:
    """An area of `pixels` (uint8 ``[H, W, 3]``; rows below the area may be missing), resized to ``[3, size, size]``.

    `down_y` and `down_x` are the height and width of `pixels`' image over those of the image that the area is of.
    """
    top, left = int(area.top * down_y), int(area.left * down_x)
    rows = slice(top, max(top + 1, round((area.top + area.height) * down_y)))
    columns = slice(left, max(left + 1, round((area.left + area.width) * down_x)))
    cropped = _resize(pixels[rows, columns], size, size, interpolation)
    return _mirrored(cropped) if area.mirrored else cropped


def _mirrored(images: torch.Tensor) -> torch.Tensor:
    """An image ``[C, H, W]`` left to right, in the same memory format; by numpy, whose copies take one thread only."""
    pixels = images.permute(1, 2, 0).numpy()
    mirrored = np.empty_like(pixels)
    for channel in range(pixels.shape[2]):
        mirrored[:, :, channel] = pixels[:, ::-1, channel]
    return torch.from_numpy(mirrored).permute(2, 0, 1)


def _resize(pixels: decode.Pixels, high: int, wide: int, interpolation: Interpolation) -> torch.Tensor:
    height, width = pixels.shape[:2]
    if (height, width) == (high, wide):
        return decode.channels_first(pixels)
    if interpolation == "nearest":
        rows, columns = _centers(0, high, height / high, height), _centers(0, wide, width / wide, width)
        return decode.channels_first(pixels[np.ix_(rows, columns)])
    # torch resizes uint8 with vector instructions and fixed-point weights, as Pillow-SIMD does; by far the quickest in
    # channels-last memory that says so in every stride.
    batch = decode.as_tensor(pixels).view(1, *pixels.shape).permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(
        batch, size=(high, wide), mode=interpolation, antialias=True, align_corners=False
    )[0]


def _nearest(pixels: decode.Pixels, area: Area, size: int) -> torch.Tensor:
    """An area of an image whose values count, each pixel one of its own: ``[C, size, size]``."""
    rows = area.top + _centers(0, size, area.height / size, area.height)
    columns = area.left + _centers(0, size, area.width / size, area.width)
    return decode.exact_tensor(pixels[np.ix_(rows, columns[::-1] if area.mirrored else columns)])


def _centers(first: int, count: int, step: float, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Nearest pixels to the centres of `count` new ones, each `step` old ones wide; at most `length` - 1."""
    centers = (np.arange(first, first + count) + 0.5) * step
    return np.clip(centers.astype(np.int64), 0, length - 1)
