"""Which image files of a sample are photographs, and which are kept exactly: masks, depth maps."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final, Literal

from PIL import Image, ImageOps

from lightning_gpuopt.images.decode import is_turned
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.codec import EncodedImage

Kind = Literal["exact", "photograph"]
NO_KINDS: Final[Mapping[str, Kind]] = {}

_NAMES: Final = re.compile(r"(?<![a-z])(mask|seg|label|depth)(?![a-z])")
_MODES: Final = ("P", "1", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_JPEG: Final = b"\xff\xd8\xff"


def with_kinds(sample: Any, several: bool | None = None, kinds: Mapping[str, Kind] = NO_KINDS) -> Any:
    """A sample whose image files have a mode where their values count; `kinds` overrules by name.

    These are a part that is named mask, seg, label or depth (a word of its key, as in ``mask.png``), whatever its mode;
    and in samples of several images (`several`; None: as this one) those of mode P, 1, I, I;16 and F. All others are
    photographs.
    """
    return _with_kinds(sample, "", _count(sample) > 1 if several is None else several, kinds)


def part_names(sample: Any) -> list[str]:
    """The names of a sample's parts: the keys of its dicts, on whatever level."""
    if not isinstance(sample, (tuple, list, dict)):
        return []
    names = [str(key) for key in sample] if isinstance(sample, dict) else []
    within = sample.values() if isinstance(sample, dict) else sample
    return list(dict.fromkeys([*names, *(name for each in within for name in part_names(each))]))


def _count(value: Any) -> int:
    if isinstance(value, (tuple, list, dict)):
        return sum(map(_count, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (EncodedImage, Image.Image))


def _with_kinds(value: Any, name: str, several: bool, kinds: Mapping[str, Kind]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_with_kinds(each, name, several, kinds) for each in value)
    if kind is dict:
        return {key: _with_kinds(each, str(key), several, kinds) for key, each in value.items()}
    if kind is not EncodedImage or value.mode is not None or kinds.get(name) == "photograph":
        return value
    named = name in kinds or _NAMES.search(name.lower()) is not None
    if not named and (not several or value[:3] == _JPEG):  # a JPEG has none of the modes
        return value
    try:
        return _exact(value, named)
    except Exception:  # whoever checks the image says what is wrong with it
        return value


def _exact(data: EncodedImage, named: bool) -> EncodedImage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Image.Image = Image.open(io.BytesIO(data))
        # Some versions of PIL open a PNG of 16 bits, which has no more, as one of 32.
        mode = "I;16" if image.format == "PNG" and image.mode == "I" else image.mode
        if not named and mode not in _MODES:
            return data
        if is_turned(data):  # as of any file, its orientation is applied; images of a mode are read as they are stored
            return EncodedImage(codec.image_bytes(ImageOps.exif_transpose(image)), mode)
    return EncodedImage(data, mode)
