"""Which image files are of a plain flavour, by their header: all decoders show the same pixels, or refuse alike."""

from __future__ import annotations

import re
import struct
from typing import Final

# of a PNG with at most 8 bits a sample: bits, type of colour, compression, filter, interlaced or not
_PNG_HEADER: Final = re.compile(
    rb"\x89PNG\r\n\x1a\n\0\0\0\rIHDR.{8}([\1\2\4\x08][\0\3]|\x08[\2\4\6])\0\0[\0\1]", re.DOTALL
)
# chunks that change no pixel for any decoder: not APNG's, of which decoders show other frames, nor EXIF's
_PNG_CHUNKS: Final = frozenset(
    b"IHDR PLTE IDAT tRNS gAMA cHRM sRGB iCCP cICP sBIT bKGD hIST pHYs tIME tEXt zTXt iTXt".split()
)
_PNG_METADATA: Final = re.compile(b"(?i)exif|xmp|raw profile")  # in the keyword of a text which may turn the image
_KEYWORD: Final = 79  # bytes at most

# the beginning of a BMP of 24 bits that is not compressed
_PLAIN_BMP: Final = re.compile(rb"BM.{12}[\x28\x34\x38\x6c\x7c]\0\0\0.{8}\x01\0\x18\0\0\0\0\0", re.DOTALL)
# chunks of a WebP that is one image, and not turned
_WEBP_CHUNKS: Final = frozenset((b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ICCP"))
_CHUNK_OF_WEBP: Final = struct.Struct("<4sI")
_CHUNK_OF_PNG: Final = struct.Struct(">I4s")


def is_png(data: bytes | memoryview) -> bool:
    """Whether it is a PNG of one image, of at most 8 bits a sample, which its metadata cannot turn."""
    header = _PNG_HEADER.match(data)
    if header is None:
        return False
    needed = {b"IDAT", b"PLTE"} if header[1].endswith(b"\3") else {b"IDAT"}
    at, before = 8, b""
    while at + 8 <= len(data):
        length, kind = _CHUNK_OF_PNG.unpack_from(data, at)
        if kind == b"IEND":
            return not needed
        if kind not in _PNG_CHUNKS or (kind.endswith(b"Xt") and _PNG_METADATA.search(data, at + 8, at + 8 + _KEYWORD)):
            return False
        if kind == b"IDAT" and before != kind and kind not in needed:  # pixels in two places
            return False
        if length:
            needed.discard(kind)
        at, before = at + 12 + length, kind
    return False


def is_webp(data: bytes | memoryview) -> bool:
    """Whether it is a WebP of one image, which its metadata cannot turn."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return False
    at = 12
    while at + 8 <= len(data):
        kind, length = _CHUNK_OF_WEBP.unpack_from(data, at)
        if kind not in _WEBP_CHUNKS:
            return False
        at += 8 + length + length % 2
    return True


def is_bmp(data: bytes | memoryview) -> bool:
    """Whether it is a BMP of 24 bits that is not compressed."""
    return _PLAIN_BMP.match(data) is not None
