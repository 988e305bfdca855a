"""Image files to pixels: PIL images for everybody's transforms, and uint8 tensors on a fast path.

Photographs become RGB, upright. JPEG goes through libjpeg-turbo (the simplejpeg wheel); where that is not sure of a
file, PIL decides, so that both ways accept and refuse the same files. Images of a given mode (masks, depth maps,
whatever their values mean) come back exactly as they were written.
"""

from __future__ import annotations

import io
import re
from typing import Any, Final, TypeAlias

import numpy as np
import simplejpeg
import torch
from PIL import Image

from lightning_gpuopt.images import jpeg, rgb
from lightning_gpuopt.images.checks import within_limit

Pixels: TypeAlias = np.ndarray[Any, Any]

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


def decode_pil(data: bytes | memoryview, mode: str | None = None) -> Image.Image:
    """Decode an image file to an upright RGB image, or one of PIL's `mode` exactly as it was written.

    OSError if it cannot be decoded (PIL's errors; `SyntaxError` and `ValueError` for some formats).
    """
    image: Image.Image = Image.open(io.BytesIO(data))
    image.load()
    if mode is not None:
        return image if image.mode == mode else _in_mode(image, mode)
    return rgb.to_rgb(image)


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    """An image whose file format has no such mode, or is opened in another; no value changes."""
    if mode.startswith("I;16"):  # a PNG of 16 bits is opened with 32 by some versions of PIL
        return Image.fromarray(np.asarray(image).astype(">u2" if mode == "I;16B" else "<u2"))
    if len(image.getbands()) == len(Image.new(mode, (1, 1)).getbands()):
        return Image.frombytes(mode, image.size, image.tobytes())
    return image.convert(mode)


def decode_tensor(data: bytes | memoryview, mode: str | None = None) -> torch.Tensor:
    """Decode an image file to an upright uint8 RGB tensor ``[3, H, W]`` in channels-last memory; OSError.

    With a `mode` it comes back as it was written: ``[C, H, W]`` in its own dtype (``"1"`` bool, ``"I;16"`` uint16,
    ``"I"`` int32, ``"F"`` float32, else uint8), contiguous.
    """
    if mode is not None:
        return exact_tensor(exact_pixels(data, mode))
    return channels_first(decode(data, 0, 0))


def exact_pixels(data: bytes | memoryview, mode: str) -> Pixels:
    """The values of an image that was written in `mode`: ``[H, W, C]`` in their own dtype."""
    pixels = np.asarray(decode_pil(data, mode))
    if pixels.dtype.byteorder == ">":
        pixels = pixels.astype(pixels.dtype.newbyteorder("="))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def exact_tensor(pixels: Pixels) -> torch.Tensor:
    """Pixels ``[H, W, C]`` as a contiguous tensor ``[C, H, W]`` of its own."""
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy(order="C"))


def channels_first(pixels: Pixels) -> torch.Tensor:
    """Pixels ``[H, W, C]`` as a tensor ``[C, H, W]`` in channels-last memory."""
    return as_tensor(pixels).permute(2, 0, 1)


def as_tensor(pixels: Pixels) -> torch.Tensor:
    """Pixels as a contiguous tensor ``[H, W, C]``, without a copy where they lie so."""
    if min(pixels.strides) < 0:  # numpy calls it contiguous where a side is 1, torch does not take it
        return torch.from_numpy(pixels.copy())
    return torch.from_numpy(np.require(pixels, requirements=["C", "W"]))


def decode(
    data: bytes | memoryview,
    min_height: int,
    min_width: int,
    orientation: int | None = None,
    last_row: int | None = None,
) -> Pixels:
    """Upright RGB pixels ``[H, W, 3]``; of the stored image at least so high and wide (0: in full).

    Rows of the stored image from `last_row` on are not needed; there may be fewer then.
    """
    size = jpeg.plain_size(data) if data[:3] == jpeg.MAGIC else None
    if size is not None and within_limit(*size):
        try:
            if last_row is not None and (frame := jpeg.baseline_frame(data)) is not None:
                pixels = jpeg.decode_upper(data, frame, last_row, min_height, min_width)
            elif min_height or min_width:
                pixels = simplejpeg.decode_jpeg(data, min_height=min_height, min_width=min_width, min_factor=2)
            else:
                pixels = simplejpeg.decode_jpeg(data)
        except jpeg.UNSURE:
            pass  # PIL knows
        else:
            return _upright(pixels, _orientation(data) if orientation is None else orientation)
    return np.asarray(decode_pil(data))


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    if orientation not in _UPRIGHT:
        return pixels
    swap, vertically, horizontally = _UPRIGHT[orientation]
    if swap:
        pixels = pixels.swapaxes(0, 1)
    return pixels[:: -1 if vertically else 1, :: -1 if horizontally else 1]


def is_swapped(orientation: int) -> bool:
    """Whether an image of this EXIF orientation is shown with height and width swapped."""
    return orientation in _UPRIGHT and _UPRIGHT[orientation][0]


def jpeg_size(data: bytes | memoryview) -> tuple[int, int, int] | None:
    """Height and width as stored, and EXIF orientation (1: upright); None if it is no JPEG, or a doubtful one."""
    size = jpeg.sure_size(data) if data[:3] == jpeg.MAGIC else None
    return (*size, _orientation(data)) if size is not None and within_limit(*size) else None


def _orientation(data: bytes | memoryview) -> int:
    orientation = jpeg.orientation_of(data)
    return rgb.orientation_of(_opened(data)) if orientation is None else orientation


_MAY_BE_TURNED: Final = re.compile(b"eXIf|EXIF|Raw profile type|Orientation")


def with_pixels_as_stored(image: Image.Image, data: bytes) -> bytes | None:
    """The file of an opened, not yet decoded image, with an EXIF orientation of 1; None: no file gives these pixels."""
    if getattr(image, "decoderconfig", ()):  # a draft, which is smaller
        return None
    if image.mode != "RGB":  # read in its mode, and never turned
        return data
    by_file = image.format == "PNG"  # which is decoded to tell of its metadata
    turned = is_turned(data) if by_file else rgb.is_turned(image)
    if turned and data[:3] == jpeg.MAGIC:
        data = jpeg.with_orientation_1(data)
        turned = rgb.is_turned(_opened(data))  # by its XMP
    return None if turned else data


def is_turned(data: bytes) -> bool:
    """Whether readers would turn an image file by its metadata; a TIFF PIL itself turns as it decodes it."""
    return (data[:3] == jpeg.MAGIC or _MAY_BE_TURNED.search(data) is not None) and rgb.is_turned(_opened(data))


def _opened(data: bytes | memoryview) -> Image.Image:
    return Image.open(io.BytesIO(data))
