"""Image files to pixels: PIL images for everybody's transforms, and uint8 tensors on a fast path.

JPEG goes through libjpeg-turbo (the simplejpeg wheel); where that is not sure of a file, PIL decides, so that both
ways accept and refuse the same files. The EXIF orientation is always applied.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps

Pixels: TypeAlias = np.ndarray[Any, Any]

_JPEG = b"\xff\xd8\xff"
_ORIENTATION: Final = 0x0112
_FRAME_SIZE = struct.Struct(">HH")  # height and width, behind marker, length and precision
_LEFT_OVER: Final = re.compile("extraneous bytes before marker 0xd[0-79]")
_ROWS_MORE: Final = 16  # the row of blocks below a crop, which smooths the chroma of the last rows
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
    last_row = top + high if orientation == 1 else height
    pixels = _decode(data, math.ceil(height * least), math.ceil(width * least), orientation, last_row)
    down_x = pixels.shape[1] / upright[1]
    down_y = down_x if orientation == 1 else pixels.shape[0] / upright[0]  # there may be fewer rows than in the image
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


def _resize(pixels: Pixels, high: int, wide: int) -> torch.Tensor:
    if pixels.shape[:2] == (high, wide):
        return _channels_first(pixels)
    # torch resizes uint8 with vector instructions and fixed-point weights, as Pillow-SIMD does; by far the quickest in
    # channels-last memory that says so in every stride.
    batch = torch.from_numpy(np.require(pixels, requirements=["C", "W"])).view(1, *pixels.shape).permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(
        batch, size=(high, wide), mode="bilinear", antialias=True, align_corners=False
    )[0]


def _channels_first(pixels: Pixels) -> torch.Tensor:
    return torch.from_numpy(np.require(pixels, requirements=["C", "W"])).permute(2, 0, 1)


def _decode(
    data: bytes | memoryview,
    min_height: int,
    min_width: int,
    orientation: int | None = None,
    last_row: int | None = None,
) -> Pixels:
    """Upright RGB pixels ``[H, W, 3]``.

    Args:
        data: The image file.
        min_height: The least height of the whole image, as stored; 0: the full one.
        min_width: The least width.
        orientation: The EXIF orientation, where it is known.
        last_row: Rows of the stored image from this on are not needed; there may be fewer then.
    """
    if data[:3] == _JPEG:
        try:
            if last_row is not None and (frame := _baseline_frame(data)) is not None:
                pixels = _decode_upper(data, frame, last_row, min_height, min_width)
            elif min_height or min_width:
                pixels = simplejpeg.decode_jpeg(data, min_height=min_height, min_width=min_width, min_factor=2)
            else:
                pixels = simplejpeg.decode_jpeg(data)
        except ValueError:
            pass  # a doubtful file, or CMYK: PIL knows
        else:
            return _upright(pixels, jpeg_orientation(data) if orientation is None else orientation)
    return np.asarray(decode_pil(data))


def _decode_upper(data: bytes | memoryview, frame: int, rows: int, min_height: int, min_width: int) -> Pixels:
    """The upper rows of a baseline JPEG: the decoder is told that the image is no higher, and stops there.

    Decoding takes time in proportion to its rows, of which random crops leave out a fifth on average.
    """
    height, width = _FRAME_SIZE.unpack_from(data, frame + 5)
    rows = min(height, rows + _ROWS_MORE)
    upper = bytearray(data)
    _FRAME_SIZE.pack_into(upper, frame + 5, rows, width)
    least = {"min_height": math.ceil(min_height * rows / height), "min_width": min_width, "min_factor": 2}
    high, wide, _, _ = simplejpeg.decode_jpeg_header(upper, **least)
    pixels = np.empty((high, wide, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(upper, buffer=pixels, **least)
    except ValueError as err:
        # The rows that were not asked for are left over, before a restart marker or the end of the image (T.81, table
        # B.1); nothing else may be wrong.
        if rows == height or not _LEFT_OVER.search(str(err)):
            raise
    return pixels


def _upright(pixels: Pixels, orientation: int) -> Pixels:
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

    Reads the segments before the frame header only (JPEG: ITU-T T.81, annex B; EXIF 2.3, section 4.5).
    """
    for marker, at, length in _segments(data):
        if marker == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            return _tiff_orientation(bytes(data[at + 10 : at + 2 + length]))
    return 1


def _baseline_frame(data: bytes | memoryview) -> int | None:
    """Where the frame header of a JPEG file is, if it is coded row by row (baseline or extended sequential Huffman)."""
    for marker, at, _ in _segments(data):
        if marker in (0xC0, 0xC1):
            return at
    return None


def _segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Marker, place and length of a JPEG file's segments up to its frame header."""
    at, size = 2, len(data)
    while at + 4 <= size and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        yield marker, at, length
        if marker == 0xDA or 0xC0 <= marker <= 0xC3:
            return
        at += 2 + length


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
