"""torchvision's classes of tensors (``tv_tensors``): what a dataset keeps of them, and how they are made again.

torchvision is no dependency: it is imported where a sample that has such a class is read.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, Final

import torch

_PACKAGE: Final = "torchvision.tv_tensors"
_CLASSES: Final = ("Image", "Video", "Mask", "BoundingBoxes", "KeyPoints")
_ATTRIBUTES: Final = ("format", "canvas_size", "clamping_mode")


def describe(tensor: torch.Tensor) -> dict[str, Any] | None:
    """A tensor's class and what it knows beside its elements, as msgpack takes it; None for any other tensor."""
    for each in type(tensor).__mro__:
        if f"{each.__module__}.".startswith(f"{_PACKAGE}.") and each.__name__ in _CLASSES:
            known = {name: getattr(tensor, name) for name in _ATTRIBUTES if hasattr(tensor, name)}
            return {"class": each.__name__, **{name: _plain(value) for name, value in known.items()}}
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    return [int(side) for side in value] if isinstance(value, (tuple, list)) else value


def maker(described: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes a tensor of the class that was described; of one that is not there, a plain tensor, with a warning."""
    module = _torchvision()
    kind = getattr(module, described["class"], None)
    if kind is None:
        return lambda tensor: tensor
    known = {name: value for name, value in described.items() if name in _ATTRIBUTES}
    if "format" in known:
        known["format"] = module.BoundingBoxFormat[known["format"]]
    if "canvas_size" in known:
        known["canvas_size"] = tuple(known["canvas_size"])

    def make(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = tensor.as_subclass(kind)
        for name, value in known.items():
            setattr(made, name, value)
        return made

    return make


@lru_cache(maxsize=1)
def _torchvision() -> Any:
    try:
        return importlib.import_module(_PACKAGE)
    except Exception as error:  # it is not there, or one that was built for another torch
        warnings.warn(
            f"samples have tensors of torchvision's classes (tv_tensors), which cannot be imported ({error}): they "
            "come as plain tensors; install torchvision",
            stacklevel=2,
        )
        return None
