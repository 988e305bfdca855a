"""Are these bytes an image that readers can decode, and how to make it smaller."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import simplejpeg
from PIL import Image, UnidentifiedImageError

from lightning_gpuopt.images import jpeg, plain
from lightning_gpuopt.images.errors import is_bad_image, reason_of
from lightning_gpuopt.images.rgb import to_rgb

_END_OF_IMAGE: Final = b"\xff\xd9"
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_MAGIC: Final = (jpeg.MAGIC, _PNG, b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*")


class BadImage(Exception):
    """An image of a source cannot be decoded; the text is the reason."""


def looks_like_image(data: bytes) -> bool:
    """Whether bytes begin as a JPEG, PNG, WebP, GIF, TIFF or AVIF file does."""
    return (
        data.startswith(_MAGIC)
        or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")
        or data[4:12] in (b"ftypavif", b"ftypavis")
    )


def check_image(data: bytes) -> None:
    """See whether an image file can be decoded; BadImage, with the reason, where it cannot.

    A JPEG whose header can be read and which ends as a JPEG must is taken to be whole: to decode them all would take
    several times as long as everything else in a build. Of a PNG the checksums of all chunks are compared. Anything
    else, and a JPEG or PNG whose header is not that of a plain one, is decoded in full.
    """
    if not data:
        raise BadImage("it is empty")
    size = jpeg.sure_size(data) if data[:3] == jpeg.MAGIC and data[-2:] == _END_OF_IMAGE else None
    if size is not None and within_limit(*size):
        return
    with pil_errors(data):
        if data.startswith(_PNG):
            with Image.open(io.BytesIO(data)) as image:
                image.verify()
        if not plain.is_png(data):
            with Image.open(io.BytesIO(data)) as image:
                image.load()


def decode_in_full(data: bytes) -> None:
    """Decode an image file; several times as dear as `check_image`, it finds damage within a JPEG too (BadImage)."""
    if data[:3] == jpeg.MAGIC:
        try:
            simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True, strict=True)
        except jpeg.UNSURE:
            pass  # PIL decides, as it does where images are read
        else:
            return
    with pil_errors(data), Image.open(io.BytesIO(data)) as image:
        image.load()


def within_limit(width: int, height: int) -> bool:
    """Whether PIL decodes an image of so many pixels; it refuses one that may be a decompression bomb."""
    limit = Image.MAX_IMAGE_PIXELS  # PIL warns of more than these
    return limit is None or width * height <= 2 * limit


def shrink_image(data: bytes, size: int, quality: int) -> bytes:
    """Bring an image file's shorter side down to `size` pixels, as an upright RGB JPEG; a smaller one stays as it came.

    Bilinear with antialiasing, the longer side floored (as torchvision does). BadImage if it cannot be decoded.
    """
    with pil_errors(data), Image.open(io.BytesIO(data)) as opened:
        if min(opened.size) <= size:
            opened.load()
            return data
        scale = 2 * size / min(opened.size)
        if scale < 1:  # libjpeg shrinks by halves as it decodes; twice the size is left to the filter
            opened.draft(None, (int(opened.width * scale), int(opened.height * scale)))
        opened.load()
        image = to_rgb(opened)
        out = io.BytesIO()
        image.resize(shrunk_size(image.size, size), Image.Resampling.BILINEAR).save(out, "JPEG", quality=quality)
        return out.getvalue()


def shrunk_size(full: tuple[int, int], size: int) -> tuple[int, int]:
    """Width and height of an image whose shorter side is brought to `size` pixels, the longer one floored."""
    short, long = sorted(full)
    longer = int(size * long / short)
    return (size, longer) if full[0] <= full[1] else (longer, size)


@contextmanager
def pil_errors(data: bytes | None) -> Iterator[None]:
    """Turns PIL's many errors into `BadImage`, and keeps its warnings to itself.

    With `data`, the whole file in memory, nothing else can be at fault; with None, errors of whatever it is read from
    come through.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (BadImage, MemoryError):
            raise
        except Exception as error:
            if data is None and not is_bad_image(error):
                raise
            if isinstance(error, UnidentifiedImageError) and data is not None:
                raise BadImage(f"not an image file (it begins with {data[:12]!r})") from None
            raise BadImage(reason_of(error)) from None
