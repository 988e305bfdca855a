"""Image files for tests, and the random crop of one."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from skimage import data as pictures

from lightning_gpuopt.images.crop import crop, cut, draw_area
from lightning_gpuopt.images.decode import decode_pil, jpeg_size


def photo(width: int = 200, height: int = 120) -> Image.Image:
    return Image.fromarray(pictures.astronaut()).resize((width, height))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return out.getvalue()


def with_orientation(image: Image.Image, orientation: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, exif=exif, **options)


def pixels(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.permute(1, 2, 0).numpy()


def random_resized_crop(data: bytes, size: int, generator: np.random.Generator, **options: Any) -> torch.Tensor:
    """A crop of an image file, of the area that the generator draws."""
    header = jpeg_size(data)
    if header is None:
        decoded = np.asarray(decode_pil(data))
        return cut(decoded, draw_area(*decoded.shape[:2], generator, **options), size, "bilinear")
    height, width, orientation = header
    upright = (width, height) if orientation >= 5 else (height, width)
    return crop(data, draw_area(*upright, generator, **options), orientation, size)
