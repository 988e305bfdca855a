"""Image files for a decoder outside Python: as they are where it shows the same pixels as PIL, else decoded by PIL."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from typing import Final

from PIL import Image

from lightning_gpuopt.images import jpeg
from lightning_gpuopt.images.decode import decode_pil, is_swapped, jpeg_size

_PNG_HEADER: Final = re.compile(rb"\x89PNG\r\n\x1a\n\0\0\0\rIHDR.{8}[\1\2\4\x08]", re.DOTALL)
"""Of a PNG with at most 8 bits a sample: of 16, decoders round differently."""

_PNG_CHUNKS: Final = frozenset(
    b"IHDR PLTE IDAT tRNS gAMA cHRM sRGB iCCP cICP sBIT bKGD hIST pHYs tIME tEXt zTXt iTXt".split()
)
"""Chunks that change no pixel for any decoder: not APNG's, of which decoders show other frames, nor EXIF's."""

_PNG_METADATA: Final = re.compile(b"(?i)exif|xmp|raw profile")
"""In the keyword of a text which may turn the image."""

_PLAIN_BMP: Final = re.compile(rb"BM.{12}[\x28\x34\x38\x6c\x7c]\0\0\0.{8}\x01\0\x18\0\0\0\0\0", re.DOTALL)
"""The beginning of a BMP of 24 bits that is not compressed."""

_WEBP_CHUNKS: Final = frozenset((b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ICCP"))
"""Chunks of a WebP that is one image, and not turned."""

_CHUNK_OF_WEBP: Final = struct.Struct("<4sI")
_CHUNK_OF_PNG: Final = struct.Struct(">I4s")


def for_other_decoder(data: bytes | memoryview) -> tuple[bytes | memoryview, int, int]:
    """An image file for a decoder outside Python, with its height and width as it is shown, upright.

    By its header alone a file stays as it is: a JPEG that is baseline or progressive, of 8 bits, grey or YCbCr; a PNG
    of at most 8 bits a sample, and a WebP, of one image, which their metadata cannot turn; a BMP of 24 bits. Of all
    other formats and flavours some are shown differently by other decoders, or crash them: these PIL decodes.

    Args:
        data: The image file.

    Returns:
        The file, or a PPM file; height and width.

    Raises:
        OSError: As `decode_pil`.
    """
    header = jpeg_size(data)
    if header is not None and jpeg.orientation_of(data) is not None:
        height, width, orientation = header
        return (data, width, height) if is_swapped(orientation) else (data, height, width)
    if _is_plain_png(data) or _is_plain_webp(data) or _PLAIN_BMP.match(data):
        with Image.open(io.BytesIO(data)) as image:  # which refuses what is too large
            return data, image.height, image.width
    return as_ppm(data)


def as_ppm(data: bytes | memoryview) -> tuple[bytes, int, int]:
    """An image file as PIL decodes it, as a PPM file of 8 bits, which every decoder reads; height and width.

    Raises:
        OSError: As `decode_pil`.
    """
    decoded = decode_pil(data)
    out = io.BytesIO()
    decoded.save(out, "PPM")
    return out.getvalue(), decoded.height, decoded.width


def _is_plain_png(data: bytes | memoryview) -> bool:
    if not _PNG_HEADER.match(data):
        return False
    for kind, begin in _png_chunks(data):
        if kind == b"IEND":
            return True
        if kind not in _PNG_CHUNKS or (kind.endswith(b"Xt") and _PNG_METADATA.search(data, begin, begin + 79)):
            return False
    return False


def _png_chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int]]:
    """Kinds of the chunks, and where their contents begin."""
    at = 8
    while at + 8 <= len(data):
        length, kind = _CHUNK_OF_PNG.unpack_from(data, at)
        yield kind, at + 8
        at += 12 + length


def _is_plain_webp(data: bytes | memoryview) -> bool:
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return False
    at = 12
    while at + 8 <= len(data):
        kind, length = _CHUNK_OF_WEBP.unpack_from(data, at)
        if kind not in _WEBP_CHUNKS:
            return False
        at += 8 + length + length % 2
    return True
