"""What the headers of a JPEG file tell: size, orientation, how it is coded; and decoding only its upper rows."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
import simplejpeg

MAGIC: Final = b"\xff\xd8\xff"
ORIENTATION: Final = 0x0112  # EXIF's tag
# what simplejpeg raises of files that it does not know, or finds damaged: PIL decides
UNSURE: Final = (ValueError, KeyError)
_FRAMES: Final = (0xC0, 0xC1, 0xC2)
_PROGRESSIVE: Final = 0xC2
_SCAN: Final = 0xDA
# markers of segments: frames, Huffman and quantization tables, restart interval, applications' data, comment
_COMMON: Final = frozenset({*_FRAMES, 0xC4, _SCAN, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
_XMP: Final = b"tiff:Orientation"
_FRAME = struct.Struct(">BHHB")  # precision, height, width and components, behind marker and length
_FRAME_SIZE = struct.Struct(">HH")
_LEFT_OVER: Final = re.compile("extraneous bytes before marker 0xd[0-79]")
_ROWS_MORE: Final = 16  # the row of blocks below a crop, which smooths the chroma of the last rows


def decode_upper(
    data: bytes | memoryview, frame: int, rows: int, min_height: int, min_width: int
) -> np.ndarray[Any, Any]:
    """The upper rows of a baseline JPEG: the decoder is told that the image is no higher, and stops there.

    Decoding takes time in proportion to its rows, of which random crops leave out a fifth on average.
    """
    height, width = _FRAME_SIZE.unpack_from(data, frame + 5)
    rows = min(height, rows + _ROWS_MORE)
    upper = bytearray(data)
    _FRAME_SIZE.pack_into(upper, frame + 5, rows, width)
    # At the size that the whole image would be decoded at: rounding the fewer rows by themselves may choose another.
    high, wide, _, _ = simplejpeg.decode_jpeg_header(data, min_height=min_height, min_width=min_width, min_factor=2)
    least = {"min_height": high * rows // height, "min_width": wide, "min_factor": 2}
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


def orientation_of(data: bytes | memoryview) -> int | None:
    """The EXIF orientation (1-8) of a JPEG file; 1 if there is none, None if only PIL can say which it is.

    Reads the segments before the image data (JPEG: ITU-T T.81, annex B; EXIF 2.3, section 4.5). PIL is asked where the
    orientation is not written as that standard has it, or in XMP only.
    """
    found = _orientation(data)
    if isinstance(found, tuple):
        return found[0]
    applications = (bytes(data[at : at + length]) for marker, at, length in _segments(data) if marker == 0xE1)
    return None if found == "odd" or any(_XMP in each for each in applications) else 1


def plain_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Height and width, as stored, of a JPEG file that all decoders take; None for all else.

    That is baseline or progressive, of 8 bits, grey or in three colours, with none but common segments.
    """
    frame = None
    for marker, at, length in _segments(data):
        if marker not in _COMMON or at + 2 + length > len(data):
            return None
        if marker in _FRAMES and length >= _FRAME.size + 2:
            frame = marker, *_FRAME.unpack_from(data, at + 4)
        elif marker == _SCAN and frame is not None:
            coding, precision, height, width, components = frame
            if precision != 8 or components not in (1, 3) or (coding == _PROGRESSIVE and data[at + length]):
                return None
            return int(height), int(width)
    return None


def sure_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """As `plain_size`, and the decoder can read the header."""
    size = plain_size(data)
    try:
        return None if size is None else simplejpeg.decode_jpeg_header(data)[:2]
    except UNSURE:
        return None


def with_orientation_1(data: bytes) -> bytes:
    """A JPEG file whose EXIF orientation, if it has one, says that it is upright; nothing else of it changes."""
    found = _orientation(data)
    if not isinstance(found, tuple):
        return data
    _, at, form = found
    changed = bytearray(data)
    struct.pack_into(form, changed, at, 1)
    return bytes(changed)


def baseline_frame(data: bytes | memoryview) -> int | None:
    """Where the frame header of a JPEG file is, if it is coded row by row (baseline or extended sequential Huffman)."""
    for marker, at, _ in _segments(data):
        if marker in (0xC0, 0xC1) and at + 9 <= len(data):
            return at
    return None


def _segments(data: bytes | memoryview) -> Iterator[tuple[int, int, int]]:
    """Marker, place and length of a JPEG file's segments up to its image data."""
    at, size = 2, len(data)
    while at + 4 <= size and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker == 0xFF:  # any marker may have more of these before it
            at += 1
            continue
        yield marker, at, length
        if marker == _SCAN:
            return
        at += 2 + length


def _orientation(data: bytes | memoryview) -> tuple[int, int, str] | Literal["odd"] | None:
    """The EXIF orientation, where it is in the file, and its struct format; "odd" where it is in another form."""
    for marker, at, length in _segments(data):
        if marker == 0xE1 and bytes(data[at + 4 : at + 10]) == b"Exif\0\0":
            return _tiff_orientation(data[at + 10 : at + 2 + length], at + 10)
    return None


def _tiff_orientation(tiff: bytes | memoryview, begin: int) -> tuple[int, int, str] | Literal["odd"] | None:
    found: tuple[int, int, str] | Literal["odd"] | None = None
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if order is None:
        return "odd"
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, number, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == ORIENTATION:
                is_usual = found is None and kind == 3 and number == 1 and 1 <= value <= 8
                found = (int(value), begin + entry + 8, order + "H") if is_usual else "odd"
    except struct.error:  # it is broken off
        return "odd"
    return found
