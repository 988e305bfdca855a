"""What is in a batch: the things that Lightning would move to the device, and the tensors in them."""

from __future__ import annotations

from abc import ABC
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

_DEPTH: Final = 4  # levels of objects within objects in which tensors are looked for


class Movable(ABC):  # noqa: B024
    """What Lightning moves to the device: anything with a method ``to``."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        return callable(getattr(subclass, "to", None)) if cls is Movable else NotImplemented


MOVABLE: Final = (torch.Tensor, Movable)  # tensors first: they are found without asking the class
# of tensors that have nothing beside their memory, shape and strides
_DTYPES: Final = frozenset(
    value for value in vars(torch).values() if isinstance(value, torch.dtype) and not value.is_complex
) - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class Found:
    """The tensors of a batch: in its collections, and in the attributes of objects in it."""

    def __init__(self, value: Any) -> None:
        self.tensors: list[torch.Tensor] = []  # those with memory of their own
        self.is_all = True  # nothing was met that could hide others
        self._look(value, _DEPTH)

    def _look(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_nested:
                self.tensors.append(value)
            else:
                self.is_all = False
        elif value is None or isinstance(value, (str, bytes, int, float, complex, type, np.ndarray, torch.dtype)):
            pass
        elif isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
            for each in value.values() if isinstance(value, Mapping) else value:
                self._look(each, depth)
        elif depth:
            self._look_into(value, depth - 1)
        else:
            self.is_all = False

    def _look_into(self, value: Any, depth: int) -> None:
        before = len(self.tensors)
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
        for each in [*(getattr(value, name) for name in slots), *getattr(value, "__dict__", {}).values()]:
            self._look(each, depth)
        if len(self.tensors) == before and callable(getattr(value, "to", None)):
            self.is_all = False  # it moves something that it does not show


def is_on(batch: Any, device: torch.device) -> bool:
    tensors = Found(batch).tensors
    return bool(tensors) and all(each.device == device for each in tensors)


def tensors_of_flat(batch: Any) -> list[torch.Tensor] | None:
    """The tensors of a dict, list or tuple that holds nothing but plain ones, which needs no walk; None for another."""
    if type(batch) is dict:
        tensors = list(batch.values())
    elif type(batch) in (list, tuple):
        tensors = list(batch)
    else:
        return None
    return tensors if tensors and all(map(is_plain, tensors)) else None


def is_plain(leaf: Any) -> bool:
    """Whether a leaf is an ordinary tensor of the host's, which may go into memory of ours."""
    return (
        type(leaf) is torch.Tensor
        and leaf.is_cpu
        and leaf.dtype in _DTYPES
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_neg()
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy has the same strides. One to a GPU has others where not; on a CPU Lightning copies nothing."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
