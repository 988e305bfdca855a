"""What is wrong with single samples."""

from __future__ import annotations

import struct

from PIL import Image


class CorruptSampleError(RuntimeError):
    """A sample cannot be read or decoded; the text names it, by its file where it has one."""


def is_bad_image(error: BaseException) -> bool:
    """Whether an error is PIL's word, or simplejpeg's, for a file that is no image, or only part of one."""
    if isinstance(error, OSError):
        return error.errno is None or isinstance(error, FileNotFoundError)  # UnidentifiedImageError is one without
    if isinstance(error, SyntaxError):
        return error.filename is None  # of a broken PNG, not of Python code
    return isinstance(error, (Image.DecompressionBombError, struct.error, EOFError))
