"""What PIL has opened, as an upright photograph in RGB."""

from __future__ import annotations

import warnings
from typing import Any, Final

import numpy as np
from PIL import Image, ImageOps

from lightning_gpuopt.images import jpeg

_BITS, _SAMPLE_FORMAT = 258, 339  # TIFF's tags (TIFF 6.0, sections 4 and 19)
_SIGNED: Final = 2


def to_rgb(image: Image.Image) -> Image.Image:
    """An image as PIL has opened and loaded it, upright and in RGB, 8 bits a channel.

    Grey values of more than 8 bits are scaled by the largest one that the file can hold: 16 bits of a PNG, the maximum
    of a PGM, a TIFF's bits. If there is none (floating point, whole numbers of 32 bits in other formats), values are
    cut at 0 and 255, with a warning.
    """
    wide = image.mode[0] in "IF"
    bits = _grey_bits(image) if wide else None
    if is_turned(image):
        image = ImageOps.exif_transpose(image)
    if bits is not None:
        values = np.asarray(image)
        values = values.view(np.uint32) if bits == 32 else values
        return Image.fromarray((np.maximum(values, 0) >> (bits - 8)).astype(np.uint8)).convert("RGB")
    if wide:
        warnings.warn(
            f"grey values of PIL's mode {image.mode} have no maximum in a {image.format} file: they are clipped to 0 "
            "to 255; write them as 8 or 16 bits",
            stacklevel=2,
        )
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_bits(image: Image.Image) -> int | None:
    """Bits of the values from 0 on; None if the file has no largest value."""
    if image.format == "TIFF":
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        return None if image.mode == "F" else int(tags[_BITS][0]) - (tags.get(_SAMPLE_FORMAT) == (_SIGNED,))
    # A PGM's values PIL scales to 16 bits; a PNG of 16 bits is opened in mode I by some of its versions.
    is_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    return 16 if is_16_bits else None


def is_turned(image: Image.Image) -> bool:
    return orientation_of(image) != 1


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation (1-8) of what PIL has opened."""
    try:
        orientation: Any = image.getexif().get(jpeg.ORIENTATION, 1)
    except Exception:  # of metadata that is none; the pixels may be fine
        return 1
    return orientation if orientation in range(1, 9) else 1
