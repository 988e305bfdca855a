"""Image files to pixels: PIL images for everybody's transforms, and uint8 tensors on a fast path.

JPEG goes through libjpeg-turbo (the simplejpeg wheel); where that is not sure of a file, PIL decides, so that both
ways accept and refuse the same files. The EXIF orientation is always applied.
"""

from __future__ import annotations

import io
import math
import struct
from typing import Any, Final

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps

_JPEG = b"\xff\xd8\xff"
_ORIENTATION: Final = 0x0112
# What brings an image of EXIF orientation 2-8 upright: (swap axes first, flip vertically, flip horizontally).
_UPRIGHT: Final = {
    2: (False, False, True),
    3: (False, True, True),
    4: (False, True, False),
    5: (True, False, False),
    6: (True, False, True),
    7: (True, True, True),
    8: (True, True, False),
}


def decode_pil(data: bytes | memoryview) -> Image.Image:
    """Decode an image file to an upright RGB image.

    Raises:
        OSError: It cannot be decoded (PIL's errors; `SyntaxError` and `ValueError` for some formats).
    """
    image: Image.Image = Image.open(io.BytesIO(data))
    image.load()
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # PIL would cut every value at 255: a white image
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def decode_tensor(data: bytes | memoryview) -> torch.Tensor:
    """Decode an image file to an upright uint8 RGB tensor ``[3, H, W]``, in channels-last memory.

    Raises:
        OSError: As `decode_pil`.
    """
    return _channels_first(_decode(data, 0, 0))


def random_resized_crop(
    data: bytes | memoryview,
    size: int,
    generator: np.random.Generator,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> torch.Tensor:
    """Decode an image file, cut a random area out of it and resize that to a square.

    The areas are drawn as torchvision's ``RandomResizedCrop`` draws them (Szegedy et al. 2015, Going Deeper with
    Convolutions, section 6); the resize is bilinear with antialiasing.

    Args:
        data: The image file.
        size: Side of the result in pixels.
        generator: Where the randomness comes from.
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest width over height.

    Returns:
        uint8 tensor ``[3, size, size]``.

    Raises:
        OSError: As `decode_pil`.
    """
    height, width, orientation = _size(data)
    upright = (width, height) if orientation >= 5 else (height, width)
    top, left, high, wide = _random_area(*upright, generator, scale, ratio)
    # libjpeg-turbo halves and quarters as it decodes; other factors are slower than decoding in full.
    least = max(size / high, size / wide)
    pixels = _decode(data, math.ceil(height * least), math.ceil(width * least), orientation)
    down_y, down_x = pixels.shape[0] / upright[0], pixels.shape[1] / upright[1]
    rows = slice(int(top * down_y), max(int(top * down_y) + 1, round((top + high) * down_y)))
    columns = slice(int(left * down_x), max(int(left * down_x) + 1, round((left + wide) * down_x)))
    return _resize(pixels[rows, columns], size, size)


def resize_and_center_crop(data: bytes | memoryview, size: int, resize: int | None = None) -> torch.Tensor:
    """Decode an image file, bring its shorter side to `resize` pixels and cut a square out of the middle.

    Args:
        data: The image file.
        size: Side of the result in pixels.
        resize: Length of the shorter side before the crop; None: 8/7 of `size` (256 for 224).

    Returns:
        uint8 tensor ``[3, size, size]``.

    Raises:
        OSError: As `decode_pil`.
    """
    short = round(size * 8 / 7) if resize is None else resize
    pixels = _decode(data, 0, 0)  # in full: evaluation should not depend on how an image was shrunk
    height, width = pixels.shape[:2]
    # The longer side is floored, as torchvision does.
    high, wide = (short, short * width // height) if height <= width else (short * height // width, short)
    top, left = round((high - size) / 2), round((wide - size) / 2)
    # Only the pixels under the crop are resized; the filter's support reaches a little beyond them.
    return _resize(pixels, high, wide)[:, top : top + size, left : left + size]


def _resize(pixels: np.ndarray[Any, Any], high: int, wide: int) -> torch.Tensor:
    if pixels.shape[:2] == (high, wide):
        return _channels_first(pixels)
    # torch resizes uint8 with vector instructions and fixed-point weights, as Pillow-SIMD does; by far the quickest in
    # channels-last memory that says so in every stride.
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).view(1, *pixels.shape).permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(
        batch, size=(high, wide), mode="bilinear", antialias=True, align_corners=False
    )[0]


def _channels_first(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)


def _decode(
    data: bytes | memoryview, min_height: int, min_width: int, orientation: int | None = None
) -> np.ndarray[Any, Any]:
    """Upright RGB pixels ``[H, W, 3]``, of at least the given size as stored (0: full size)."""
    if data[:3] == _JPEG:
        try:
            if min_height or min_width:
                pixels = simplejpeg.decode_jpeg(data, min_height=min_height, min_width=min_width, min_factor=2)
            else:
                pixels = simplejpeg.decode_jpeg(data)
        except ValueError:
            pass  # a doubtful file, or CMYK: PIL knows
        else:
            return _upright(pixels, jpeg_orientation(data) if orientation is None else orientation)
    return np.asarray(decode_pil(data))


def _upright(pixels: np.ndarray[Any, Any], orientation: int) -> np.ndarray[Any, Any]:
    if orientation not in _UPRIGHT:
        return pixels
    swap, vertically, horizontally = _UPRIGHT[orientation]
    if swap:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if vertically else 1, :: -1 if horizontally else 1]


def _size(data: bytes | memoryview) -> tuple[int, int, int]:
    """Height and width as stored, and the EXIF orientation (1 where it is upright already)."""
    if data[:3] == _JPEG:
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            pass
        else:
            return height, width, jpeg_orientation(data)
    image = Image.open(io.BytesIO(data))
    orientation = image.getexif().get(_ORIENTATION, 1)
    return image.height, image.width, orientation if orientation in _UPRIGHT else 1


def _random_area(
    height: int, width: int, generator: np.random.Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random area."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * generator.uniform(*scale)
        aspect = math.exp(generator.uniform(low, high))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(generator.integers(height - h + 1)), int(generator.integers(width - w + 1)), h, w
    # No luck: the middle, as far as the aspect ratio allows.
    w, h = width, height
    if width / height < ratio[0]:
        h = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = min(width, max(1, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


def jpeg_orientation(data: bytes | memoryview) -> int:
    """The EXIF orientation (1-8) of a JPEG file; 1 where there is none.

    Reads the segments before the first scan only (JPEG: ITU-T T.81, annex B; EXIF 2.3, section 4.5).
    """
    at, size = 2, len(data)
    while at + 4 <= size and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            return _tiff_orientation(bytes(data[at + 10 : at + 2 + length]))
        if marker == 0xDA or 0xC0 <= marker <= 0xC3:  # scan, or frame header: EXIF comes before them
            return 1
        at += 2 + length
    return 1


def _tiff_orientation(tiff: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, _ = struct.unpack_from(order + "HHI", tiff, entry)
            if tag == _ORIENTATION and kind == 3:
                (value,) = struct.unpack_from(order + "H", tiff, entry + 8)
                return int(value) if value in _UPRIGHT else 1
    except struct.error:
        pass
    return 1
