"""The samples of a source as they are stored: images checked, and made smaller where they should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL import Image

from lightning_gpuopt.images import checks
from lightning_gpuopt.images.decode import decode_pil
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.codec import EncodedImage


@dataclass(frozen=True)
class ImageOptions:
    """What is done to images before they are stored."""

    size: int | None = None  # pixels of the shorter side that larger images are brought down to; None: as they are
    quality: int = 90  # JPEG, 1-95, of photographs that are made smaller
    decode: bool = False  # decode every image in full to see whether it is whole


def prepare(sample: Any, options: ImageOptions) -> Any:
    """A sample with its images checked, and made smaller where they should be; BadImage if one cannot be decoded."""
    kind = type(sample)
    if kind is EncodedImage:
        return _prepare_image(sample, options)
    if kind is tuple:
        return tuple([prepare(value, options) for value in sample])
    if kind is list:
        return [prepare(value, options) for value in sample]
    if kind is dict:
        return {key: _prepare_entry(key, value, options) for key, value in sample.items()}
    if isinstance(sample, Image.Image):
        with checks.pil_errors(None):
            data = codec.image_bytes(sample)
        return _prepare_image(EncodedImage(data, None if sample.mode == "RGB" else sample.mode), options)
    return sample


def _prepare_entry(key: Any, value: Any, options: ImageOptions) -> Any:
    try:
        return prepare(value, options)
    except checks.BadImage as error:
        raise checks.BadImage(f"{key}: {error}") from None


def _prepare_image(image: EncodedImage, options: ImageOptions) -> EncodedImage:
    if options.size is None:
        checks.check_image(image)
        if options.decode:
            checks.decode_in_full(image)
        return image
    if image.mode is None:
        return EncodedImage(checks.shrink_image(image, options.size, options.quality))
    with checks.pil_errors(image):
        decoded = decode_pil(image, image.mode)
        if min(decoded.size) <= options.size:
            return image
        # Nearest neighbour: between two classes of a mask, or two depths, there is no mean.
        smaller = decoded.resize(checks.shrunk_size(decoded.size, options.size), Image.Resampling.NEAREST)
        return EncodedImage(codec.image_bytes(smaller), image.mode)


def find_images(value: Any) -> Any:
    """The same value, with every bytes object in it that begins as an image file does as an `EncodedImage`."""
    kind = type(value)
    if kind is tuple:
        return tuple([find_images(v) for v in value])
    if kind is list:
        return [find_images(v) for v in value]
    if kind is dict:
        return {k: find_images(v) for k, v in value.items()}
    return EncodedImage(value) if kind is bytes and checks.looks_like_image(value) else value
