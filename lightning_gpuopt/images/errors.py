"""What is wrong with single samples."""

from __future__ import annotations

import re
from typing import Final


class CorruptSampleError(RuntimeError):
    """A sample's image cannot be decoded, or its bytes are damaged; the text names it, by its file where it has one."""


DECODERS: Final[dict[str, tuple[str, ...]]] = {
    "PIL.ImageFile": (),
    "PIL._binary": (),
    "simplejpeg": (),
    "torchvision.io": ("read_file",),
    "torchcodec.decoders": ("_normalize_mode", "_source_to_tensor", "_validate_output_dtype"),
    "torchcodec._core": (),
}
"""The decoders beside PIL's plugins: modules, with all below them, whose errors are about an image's bytes; and their
functions whose errors are not, but about files or arguments."""

_PIL_PLUGIN: Final = re.compile(r"PIL\.\w+ImagePlugin")


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
    for decoder, others in DECODERS.items():
        if f"{module}.".startswith(f"{decoder}."):
            return function not in others
    plugins = {factory.__module__ for factory, _ in Image.OPEN.values()}  # other packages bring some, too
    return _PIL_PLUGIN.fullmatch(module) is not None or module in plugins


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
