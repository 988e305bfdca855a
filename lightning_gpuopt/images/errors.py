"""What is wrong with single samples."""

from __future__ import annotations

import re
import struct


class CorruptSampleError(RuntimeError):
    """A sample cannot be read or decoded; the text names it, by its file where it has one."""


def is_bad_image(error: BaseException) -> bool:
    """Whether an error is PIL's word, or simplejpeg's, for a file that is no image, or only part of one."""
    if isinstance(error, OSError):
        return error.errno is None or isinstance(error, FileNotFoundError)  # UnidentifiedImageError is one without
    if isinstance(error, SyntaxError):
        return error.filename is None  # of a broken PNG, not of Python code
    if isinstance(error, (struct.error, EOFError)):
        return True
    from PIL.Image import DecompressionBombError

    return isinstance(error, DecompressionBombError)


def reason_of(error: BaseException) -> str:
    """An error's words in one line, without the addresses of objects, so that the same reason is the same text."""
    text = re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "its bytes", " ".join(str(error).split()))
    return text or type(error).__name__
