"""The samples of a source as they are stored: images checked, and made smaller where they should be."""

from __future__ import annotations

from typing import Any

from PIL import Image

from lightning_gpuopt.images.checks import BadImage, PILErrors, check_image, looks_like_image, shrink_image
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.codec import EncodedImage


def prepare(sample: Any, image_size: int | None, quality: int) -> Any:
    """A sample with its images checked, and made smaller where they should be.

    Raises:
        BadImage: One cannot be decoded.
    """
    kind = type(sample)
    if kind is EncodedImage:
        if image_size is not None:
            return EncodedImage(shrink_image(sample, image_size, quality))
        check_image(sample)
        return sample
    if kind is tuple:
        return tuple([prepare(value, image_size, quality) for value in sample])
    if kind is list:
        return [prepare(value, image_size, quality) for value in sample]
    if kind is dict:
        return {key: _prepare_entry(key, value, image_size, quality) for key, value in sample.items()}
    if isinstance(sample, Image.Image):
        with PILErrors(b""):
            data = codec.image_bytes(sample)
        return prepare(EncodedImage(data), image_size, quality)
    return sample


def _prepare_entry(key: Any, value: Any, image_size: int | None, quality: int) -> Any:
    try:
        return prepare(value, image_size, quality)
    except BadImage as error:
        raise BadImage(f"{key}: {error}") from None


def find_images(value: Any) -> Any:
    """The same value, with every bytes object in it that begins as an image file does as an `EncodedImage`."""
    kind = type(value)
    if kind is tuple:
        return tuple([find_images(v) for v in value])
    if kind is list:
        return [find_images(v) for v in value]
    if kind is dict:
        return {k: find_images(v) for k, v in value.items()}
    return EncodedImage(value) if kind is bytes and looks_like_image(value) else value
