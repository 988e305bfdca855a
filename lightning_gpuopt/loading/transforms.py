"""What a dataset's transforms are given: the first of (image, label), and the whole of richer samples."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

log = logging.getLogger(__name__)

Transform: TypeAlias = Callable[[Any], Any]


def transformed(
    sample: Any, transform: Transform | None, target_transform: Transform | None, where: str, *, rich: bool = False
) -> Any:
    """A sample after its transforms.

    A sample of two parts whose second is a label (a number, a text, bytes, None, a vector; never with `rich`) has its
    first part given to `transform`. Others are given to it whole: (image, mask), (image, {"boxes": ...}), dicts, longer
    tuples. `target_transform` gets the second part of two, afterwards; ValueError if there is none.
    """
    pair = type(sample) in (tuple, list) and len(sample) == 2
    if transform is not None:
        if pair and not rich and is_label(sample[1]):
            sample = type(sample)((transform(sample[0]), sample[1]))
        else:
            sample = transform(sample)
            pair = pair and isinstance(sample, (tuple, list)) and len(sample) == 2
    if target_transform is None:
        return sample
    if not pair:
        raise ValueError(
            f"{where}: target_transform needs samples of two parts, but they are {type(sample).__name__}s; do it in "
            "transform, which gets the whole sample"
        )
    return type(sample)((sample[0], target_transform(sample[1])))


def name_sample(error: Exception, name: str, what: str = "a transform") -> None:
    """Have the traceback of an error say which sample it was raised for; the error stays what it is."""
    if hasattr(error, "add_note"):
        error.add_note(f"raised by {what} of {name}")
    else:  # Python 3.10
        log.error("%s of %s raised %s", what, name, type(error).__name__)


def is_label(part: Any) -> bool:
    """Whether part of a sample is a label: no image, no container, no array of more than one dimension."""
    if isinstance(part, (np.ndarray, torch.Tensor)):
        return part.ndim < 2
    return not isinstance(part, (tuple, list, dict, Image.Image))
