"""Facts about classes: the kind of their objects, what these hold, and packages that are not inspected.

No code of the user's runs: no property, no ``__getattr__``, no ``__len__``.
"""

from __future__ import annotations

import array
import ctypes
import functools
import io
import mmap
import os
import random
import socket
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial, partialmethod
from multiprocessing import connection, sharedctypes
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

Kind: TypeAlias = str
"""``class``, ``module``, ``function``, ``method``, ``partial``, ``lru_cache``, ``dict``, ``sequence``, ``set``,
``bytes``, ``array``, ``tensor``, ``object``; ``plain``: immutable; ``table``: of pandas; ``image``: of PIL;
``generator``: of random numbers; ``file``; ``shared``: memory; ``trained``: what training changes in each step;
``lightning``: else of Lightning; ``builtin``: an iterator or function in C; ``closed``: not looked at."""

LRU_CACHE: Final[Any] = functools._lru_cache_wrapper
LIGHTNING: Final = ("lightning", "pytorch_lightning", "lightning_fabric")
# attributes of Lightning's objects that are not the user's
FRAMEWORK_NAMES: Final = frozenset({"trainer", "fabric", "log", "log_dict", "training", "prepare_data_per_node"})
# modules whose objects each process may have: made to be shared, or with a state of its own in each
SHARED_ON_PURPOSE: Final = ("multiprocessing", "threading", "_thread", "logging", "weakref", "contextvars", "mmap")
CLOSED: Final = (*SHARED_ON_PURPOSE, *LIGHTNING, "pyarrow", "re", "torch", "lightning_gpuopt")
_OPENED: Final = (  # of closed packages, what holds data, or what is the user's
    *("torch.utils.data.", "torch.nn.", "torch.distributions.", "torch.optim.lr_scheduler."),
    *(f"lightning_gpuopt.{room}." for room in ("storage", "loading", "images", "dali", "datamodules")),
)
# what a loader holds of ours: an earlier state, to which a collate_fn that is the loader's own method leads
NOTED: Final = "_gpuopt_start"
# modules whose objects hold no position that processes could move for one another, though some cannot be pickled
_FORK_SAFE: Final = (*SHARED_ON_PURPOSE, "torch", "numpy", "pyarrow", "pandas", "_ctypes", "lightning_gpuopt")
_PICKLES_ITS_WAY: Final = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")

_TYPES: Final[tuple[tuple[Kind, tuple[type, ...]], ...]] = (
    ("plain", (bool, int, float, complex, str, bytes, type(None), np.generic, range, slice, types.CodeType)),
    ("plain", (torch.dtype, torch.device, memoryview, ctypes._SimpleCData, ctypes._Pointer, ctypes.CDLL)),
    ("plain", weakref.ProxyTypes),  # nearly all that is asked of one is asked of what it stands for
    ("class", (type,)),
    ("module", (types.ModuleType,)),
    ("tensor", (torch.Tensor,)),
    ("array", (np.ndarray,)),
    ("bytes", (bytearray, array.array)),
    ("generator", (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)),
    ("dict", (dict,)),  # other mappings may load their values on access
    ("sequence", (list, tuple, deque)),
    ("set", (set, frozenset)),
    ("function", (FunctionType,)),
    ("method", (types.MethodType,)),
    ("partial", (partial,)),
    ("lru_cache", (LRU_CACHE,)),
    ("file", (socket.socket, connection._ConnectionBase, types.GeneratorType, io.IOBase)),
    ("trained", (torch.optim.Optimizer,)),
    ("shared", (sharedctypes.SynchronizedBase, ctypes.Array, mmap.mmap)),
)


class Facts(NamedTuple):
    """What is the same for all objects of a class."""

    kind: Kind  # as far as the class says it
    has_epochs: bool  # it has a set_epoch method
    is_open_python: bool  # pickling is left to Python: what its objects hold says all
    packs: bool  # it says itself what is sent to another process
    cached: frozenset[str]  # attributes that are computed once
    dictionary: Any  # the descriptor of __dict__; None if there is none
    slots: tuple[tuple[str, Any], ...]  # descriptors of the attributes beside it


def _facts_of(kind: type) -> Facts:
    own = [vars(base) for base in kind.__mro__[:-1]]
    named = {name for each in own for name in each}
    slots = {name: item for each in reversed(own) if "__slots__" in each for name, item in each.items()}
    return Facts(
        _kind_of_class(kind),
        "set_epoch" in named,
        named.isdisjoint(_PICKLES_ITS_WAY),
        "__getstate__" in named,
        frozenset(name for each in own for name, item in each.items() if issubclass(type(item), cached_property)),
        next((each["__dict__"] for each in own if "__dict__" in each), None),
        tuple((name, item) for name, item in slots.items() if type(item) is MemberDescriptorType),
    )


facts_of: Final[Callable[[Any], Facts]] = cache(_facts_of)


def _kind_of_class(kind: type) -> Kind:
    for name, bases in _TYPES:
        if issubclass(kind, bases):
            return name
    module = module_of(kind)
    if is_of(kind, LIGHTNING):
        return "lightning"
    if is_of(kind, ("multiprocessing",)):
        return "shared"
    if is_in(module, ("pandas", "PIL")):
        return "table" if is_in(module, ("pandas",)) else "image"
    if issubclass(kind, torch.nn.Module):
        return "net"
    if is_closed(kind) and not is_in(module, ("lightning_gpuopt",)):  # which may stand in for what is the user's
        return "closed"
    is_builtin = is_in(module, ("builtins", "itertools", "operator", "functools")) and kind.__dictoffset__ == 0
    return "builtin" if is_builtin and kind is not object else "object"


def kind_of(value: Any) -> Kind:
    """The kind of an object; for modules and Lightning's objects the class alone does not determine it."""
    kind = facts_of(type(value)).kind
    if kind == "net":
        return "trained" if _is_trained(value) else "object"
    if kind == "lightning":  # a Trainer, a module, or what has attributes of the user's: a data module, a callback
        names = {base.__name__ for base in type(value).__mro__}
        with_attributes = names & {"LightningDataModule", "Callback"} and users_attributes(value)
        return "trained" if names & {"Trainer", "Fabric", "LightningModule"} or with_attributes else "lightning"
    return kind


def _is_trained(module: Any) -> bool:
    """Whether a module is a metric, or one of its parameters requires gradients; read past what its class overrides."""
    todo, met = [module], {id(module)}
    while todo:
        if is_of(type(module := todo.pop()), ("torchmetrics",)):
            return True
        held = dict_of(module) or {}
        parameters = held.get("_parameters", {}).values()
        if issubclass(type(module), torch.jit.ScriptModule):  # they are not in Python
            parameters = torch.nn.Module.parameters(module)
        if any(each is not None and each.requires_grad for each in parameters):
            return True
        new = [each for each in held.get("_modules", {}).values() if each is not None and id(each) not in met]
        met.update(map(id, new))
        todo += new
    return False


def is_data_module(kind: type) -> bool:
    return any(base.__name__ == "LightningDataModule" for base in kind.__mro__)


def is_closed(kind: type) -> bool:
    """Whether what an object holds is a whole training, or its library's."""
    if issubclass(kind, (torch.optim.Optimizer, torch.nn.Module)):
        return not issubclass(kind, torch.nn.Module)
    return is_in(module_of(kind), CLOSED) and not module_of(kind).startswith(_OPENED)


@cache
def is_users_own(module: str | None) -> bool:
    """Whether a module, by its name, is neither installed nor Python's."""
    if not isinstance(module, str) or is_in(module, ({*sys.stdlib_module_names, "lightning_gpuopt"} - {"__main__"})):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not any(each in file for each in ("site-packages", "dist-packages", os.path.dirname(os.__file__)))


def module_of(kind: type) -> str:
    """The module of a class, with a dot behind it."""
    module: Any = kind.__module__
    return f"{module}." if isinstance(module, str) else "."


def is_in(module: str | None, packages: Sequence[str] | set[str]) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in packages


def is_of(kind: type, packages: Sequence[str]) -> bool:
    """Whether a class, or one that it derives from, is of these packages."""
    return any(is_in(module_of(base), packages) for base in kind.__mro__[:-1])


_reduced: Final[dict[type, bool]] = {}


def is_copyable(value: Any) -> bool:
    """Whether nothing says that an object cannot be pickled, as files and connections do."""
    kind = type(value)
    facts = facts_of(kind)
    if (facts.is_open_python and (facts.dictionary is not None or facts.slots)) or is_of(kind, _FORK_SAFE):
        return True
    if kind not in _reduced:
        try:
            _reduced[kind] = bool(value.__reduce_ex__(5))
        except Exception:
            _reduced[kind] = False
    return _reduced[kind]


def dict_of(value: Any) -> dict[str, Any] | None:
    dictionary = facts_of(type(value)).dictionary
    if dictionary is None:
        return None
    if type(dictionary) not in (GetSetDescriptorType, MemberDescriptorType):
        raise TypeError(f"{type(value).__name__} has a __dict__ of its own")
    held: dict[str, Any] = dictionary.__get__(value)
    return held


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object of a class in Python holds, by name, without what is computed once; None for others."""
    facts, held = facts_of(type(value)), dict_of(value)
    if not facts.slots and (held is None or facts.cached.isdisjoint(held)):
        found = None if held is None else held.copy()
        (found or {}).pop(NOTED, None)
        return found
    found = {name: item for name, item in (held or {}).items() if name not in facts.cached and name != NOTED}
    for name, slot in facts.slots:
        try:
            found[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return found


def has_attributes(container: Any) -> bool:
    """Whether a container is of a class that derives from one of Python's."""
    return type(container).__module__ not in ("builtins", "collections")


def users_attributes(value: Any) -> dict[str, Any]:
    """What an object of Lightning's holds of the user's."""
    own = ((name, item) for name, item in (dict_of(value) or {}).items() if name not in FRAMEWORK_NAMES)
    return {name: item for name, item in own if name == "_hparams" or not name.startswith("_")}


def data_of(kind: type) -> dict[str, Any]:
    """What a class itself holds beside functions, other classes, descriptors and the like, by name."""
    own = ((name, item) for name, item in list(vars(kind).items()) if not name.startswith(("__", "_abc")))
    return {name: item for name, item in own if not (issubclass(type(item), type) or hasattr(type(item), "__get__"))}


def function_in(value: Any) -> FunctionType | None:
    """The function behind an attribute of a class: a method, a property or the like; None for other attributes."""
    kind = type(value)
    if issubclass(kind, (classmethod, staticmethod)):
        value = value.__func__
    elif issubclass(kind, property):
        value = value.fget
    elif issubclass(kind, (cached_property, partialmethod)):
        value = value.func
    return value if type(value) is FunctionType else None


def arrays_of(value: Any) -> list[Any]:
    """The arrays of a DataFrame, a Series, or of one of their columns."""
    arrays = list(getattr(getattr(value, "_mgr", None), "arrays", ()))
    held = getattr(value, "__dict__", {})
    return arrays or [held[name] for name in ("_ndarray", "_data", "_mask") if name in held]
