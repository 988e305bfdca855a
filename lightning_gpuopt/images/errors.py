"""What is wrong with single samples."""

from __future__ import annotations

import re
from typing import Final


class CorruptSampleError(RuntimeError):
    """A sample's image cannot be decoded, or its bytes are damaged; the text names it, by its file where it has one."""


_DECODERS: Final = re.compile(r"PIL\.(\w+ImagePlugin|ImageFile|_binary)|(simplejpeg|torchvision\.io)(\.\w+)*")


def is_bad_image(error: BaseException) -> bool:
    """Whether an error is what a decoder says of an image's bytes.

    Decoders raise errors of every type, and so do storage and programs: the place where it was raised decides. Ask in
    the process that raised it, since a traceback does not travel.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
        return False
    if isinstance(error, (UnidentifiedImageError, Image.DecompressionBombError)):
        return True
    module, function = raised_in(error)
    if (module, function) == ("PIL.Image", "load"):  # a palette that is none
        return True
    plugins = {factory.__module__ for factory, _ in Image.OPEN.values()}  # other packages bring some, too
    is_decoder = _DECODERS.fullmatch(module) is not None or module in plugins
    return is_decoder and function != "read_file"  # torchvision's, which has RuntimeError for what the storage says


def raised_in(error: BaseException) -> tuple[str, str]:
    """The module and the function that raised an error; what torch raises in an operator is its caller's."""
    module, function = "", ""
    trace = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name != "torch._ops":
            module, function = name, trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return module, function


def reason_of(error: BaseException) -> str:
    """An error's words in one line, without the addresses of objects, so that the same reason is the same text."""
    text = re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "its bytes", " ".join(str(error).split()))
    return text or type(error).__name__
