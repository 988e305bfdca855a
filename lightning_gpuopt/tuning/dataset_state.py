"""What can be seen of a dataset's state: workers have a copy of it from when they were started."""

from __future__ import annotations

import mmap
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

_MOST_OBJECTS: Final = 20_000
_LARGE: Final = 256
"""Of containers with more items so many are looked at, evenly spread."""

_DEEPEST: Final = 100
"""Objects that hold one another: each takes up to four frames of Python's stack."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_WHOLE: Final = (type, ModuleType, torch.dtype, torch.device)
"""What is the same as long as it is the same object."""


@dataclass(frozen=True)
class DatasetState:
    """A state, to be compared with another.

    Attributes:
        digest: the same for the same state, as far as was looked.
        has_epochs: whether something in it has a ``set_epoch`` method.
        is_whole: whether all of it was looked at, but for what large containers and arrays hold. What cannot be looked
            into is the same as long as it is the same object, and a memory map as long as it is the same one.
    """

    digest: int
    has_epochs: bool
    is_whole: bool


def state_of(*roots: Any) -> DatasetState:
    """Walk through what these objects hold, and take it down; whatever they are, nothing is raised.

    Args:
        *roots: a dataset, and what workers are given with it.
    """
    walk = _Walk()
    digest = hash(tuple(walk.of(root) for root in roots))
    return DatasetState(digest, walk.has_epochs, walk.left > 0 and walk.is_seen)


class _Walk:
    def __init__(self) -> None:
        self.left = _MOST_OBJECTS
        self.has_epochs = False
        self.is_seen = True
        self._depth = 0
        self._met: dict[int, Any] = {}

    def of(self, value: Any) -> int:
        self._depth += 1
        try:
            return self._of(value)
        except Exception:  # somebody's own __getstate__ or property, a tensor without a version, an empty closure
            self.is_seen = False
            return hash(id(value))
        finally:
            self._depth -= 1

    def _of(self, value: Any) -> int:
        if isinstance(value, _PLAIN):
            return hash((type(value), value))
        if isinstance(value, _WHOLE) or id(value) in self._met or self.left <= 0:
            return hash(id(value))
        if self._depth > _DEEPEST:
            self.is_seen = False
            return hash(id(value))
        self.left -= 1
        self._met[id(value)] = value  # and keeps it alive: an id is of one object only as long as that lives
        return hash((type(value), *(each if isinstance(each, int) else self.of(each) for each in self._parts(value))))

    def _parts(self, value: Any) -> Iterator[Any]:
        """What makes up a value: hashes as they are, and what is to be walked through as such."""
        if isinstance(value, torch.Tensor):
            yield hash((id(value), value._version, tuple(value.shape)))
        elif isinstance(value, np.ndarray) and _is_mapped(value):  # its pages are files', and may be on a slow disk
            yield hash((value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str))
        elif isinstance(value, np.ndarray):
            # ravel() would copy what is not contiguous, such as a transposed memory map
            yield hash((id(value), value.shape, value.flat[:: max(value.size // _LARGE, 1)].tobytes()))
        elif isinstance(value, torch.Generator):
            yield hash(value.get_state().numpy().tobytes())
        elif isinstance(value, random.Random):
            yield hash(value.getstate())
        elif isinstance(value, np.random.Generator):
            yield hash(repr(value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            yield hash(repr(value.get_state()))
        elif isinstance(value, (dict, MappingProxyType)):  # other mappings may load what they hold
            yield len(value)
            for key, item in _some(value.items(), len(value)):
                yield self.of(key)
                yield self.of(item)
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            yield len(value)
            items = value if isinstance(value, (list, tuple, deque)) else ()
            for item in _some(items, len(items)):
                yield self.of(item)
        elif isinstance(value, FunctionType):
            yield id(value.__code__)
            for cell in value.__closure__ or ():
                yield self.of(cell.cell_contents)
        elif isinstance(value, MethodType):
            yield id(value.__func__)
            yield self.of(value.__self__)
        elif isinstance(value, partial):
            for item in (value.func, value.args, value.keywords):
                yield self.of(item)
        else:
            yield from self._of_object(value)

    def _of_object(self, value: Any) -> Iterator[Any]:
        self.has_epochs |= callable(getattr(type(value), "set_epoch", None))
        if any("__getstate__" in base.__dict__ for base in type(value).__mro__[:-1]):
            # what a worker would be sent: without open files and the like
            yield self.of(value.__getstate__())
            return
        held = getattr(value, "__dict__", None)
        if held is None:
            yield id(value)
            return
        for name in sorted(held):
            yield hash(name)
            yield self.of(held[name])


def _is_mapped(array: np.ndarray[Any, Any]) -> bool:
    """Whether it lies in a memory map."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def _some(items: Iterable[Any], length: int) -> Iterator[Any]:
    return islice(items, 0, None, max(length // _LARGE, 1))
