"""What is known of an object of anybody's: its attributes, how it is pickled, a digest of what it holds."""

from __future__ import annotations

import dis
import functools
import io
import math
import mmap
import os
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import chain, islice
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_gpuopt.utils import plain_containers

LARGE: Final = 256
"""Of containers with more items so many are looked at, evenly spread."""

HUGE: Final = 4096
"""Dicts with more items are looked at at their beginning and their end: to walk through them takes too long."""

WHOLE_BYTES: Final = 1 << 17
"""Arrays up to this size are compared whole."""

_SAMPLED: Final = 4096
"""Of larger ones so many elements are, beside those of the samples that are asked for."""

SHARED_ON_PURPOSE: Final = ("multiprocessing", "threading", "_thread", "logging", "weakref", "contextvars", "mmap")
"""Modules whose objects each process may have: made to be shared, or with a state of its own in each."""

_FORK_SAFE: Final = (
    *SHARED_ON_PURPOSE,
    "torch",
    "numpy",
    "pyarrow",
    "pandas",
    "_ctypes",
    "lightning_gpuopt",
)
"""Modules whose objects hold no position that processes could move for one another, though some cannot be pickled."""

_PICKLES_ITS_WAY: Final = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")

LRU_CACHE: Final = functools._lru_cache_wrapper


class Facts(NamedTuple):
    """What is the same for all objects of a class.

    Attributes:
        module: of the class, with a dot behind it.
        has_epochs: whether it has a ``set_epoch`` method.
        is_open_python: whether pickling it is left to Python, so that what it holds says all.
        packs: whether it says itself what is sent to another process.
        caches: its functions that keep what they have returned, and those of its module that it names.
        slots: names of attributes beside its ``__dict__``.
        cached: names of attributes that are computed once.
    """

    module: str
    has_epochs: bool
    is_open_python: bool
    packs: bool
    caches: tuple[Any, ...]
    slots: tuple[str, ...]
    cached: frozenset[str]


@cache
def facts_of(kind: Any) -> Facts:
    """Look at a class, once."""
    own = kind.__mro__[:-1]
    named = [name for base in own for name in vars(base)]
    slots = [name for base in own for name in _listed(vars(base).get("__slots__", ()))]
    return Facts(
        module_of(kind),
        callable(getattr(kind, "set_epoch", None)),
        not any(name in _PICKLES_ITS_WAY for name in named),
        "__getstate__" in named,
        tuple(each for each in _functions_of(kind) if type(each) is LRU_CACHE),
        tuple(name for name in slots if name not in ("__dict__", "__weakref__")),
        frozenset(name for base in own for name, item in vars(base).items() if isinstance(item, cached_property)),
    )


@cache
def is_users_own(module: str | None) -> bool:
    """Whether a module, by its name, is neither installed nor Python's."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return not any(each in file for each in ("site-packages", "dist-packages", os.path.dirname(os.__file__)))


def data_of(kind: type) -> dict[str, Any]:
    """What a class holds beside functions, other classes and the like, by name."""
    odd = (FunctionType, classmethod, staticmethod, property, cached_property, type)
    return {
        name: item
        for name, item in vars(kind).items()
        if not name.startswith(("__", "_abc")) and not isinstance(item, odd) and not hasattr(type(item), "__get__")
    }


def is_copyable(value: Any) -> bool:
    """Whether nothing says that an object cannot be pickled, as files and connections do."""
    return is_of(value, _FORK_SAFE) or _can_reduce(value, type(value))


_reduced: dict[type, bool] = {}


def _can_reduce(value: Any, kind: type) -> bool:
    if kind not in _reduced:
        try:
            value.__reduce_ex__(5)
            _reduced[kind] = True
        except Exception:
            _reduced[kind] = False
    return _reduced[kind]


def module_of(kind: type) -> str:
    """The module of a class, with a dot behind it."""
    return f"{getattr(kind, '__module__', None) or ''}."


def is_in(module: str | None, packages: Sequence[str]) -> bool:
    """Whether a module is of one of these packages."""
    return (module or "").partition(".")[0] in packages


def is_of(value: Any, packages: Sequence[str]) -> bool:
    """Whether an object's class, or one that it derives from, is of these packages."""
    return any(is_in(module_of(base), packages) for base in type(value).__mro__[:-1])


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object of a class in Python holds, by name, without what is computed once; None for others."""
    kind: Any = type(value)
    facts = facts_of(kind)
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        if not facts.slots:
            return None
        held = {}
    if not facts.slots and not facts.cached:
        return dict(held)
    found = {name: item for name, item in held.items() if name not in facts.cached}
    for name in facts.slots:
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue
    return found


def _listed(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _functions_of(kind: type) -> Iterator[Any]:
    """The functions of a class in Python, and those of its module that they name."""
    for base in kind.__mro__[:-1]:
        if is_in(base.__module__, ("torch", "builtins")):
            continue
        for each in vars(base).values():
            yield each
            yield from (item for _, item in named_by(each))


def named_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The global variables that a function reads, and its arguments' defaults, by name; nothing of another object."""
    function = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None:
        return
    yield from ((name, known[name]) for name in _globals_of(code) if name in known)
    yield from ((f"{function.__name__}(...)", each) for each in getattr(function, "__defaults__", None) or ())
    yield from (getattr(function, "__kwdefaults__", None) or {}).items()


@cache
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The names of global variables that code, and the functions in it, read."""
    own = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = (name for each in code.co_consts if isinstance(each, CodeType) for name in _globals_of(each))
    return tuple(dict.fromkeys([*own, *inner]))


def names_in(code: Any) -> Iterator[str]:
    """The names that a function's code, and the functions in it, read."""
    if code is None:
        return
    yield from code.co_names
    for each in code.co_consts:
        if hasattr(each, "co_names"):
            yield from names_in(each)


def number_of(owner: Any, name: str) -> Any:
    """A property of a Lightning object's; None for one that has no Trainer, or no such property."""
    try:
        return getattr(owner, name, None)
    except RuntimeError:
        return None


def in_cell(cell: Any) -> Any:
    """What a closure's cell holds; None where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def length_of(dataset: Any) -> int | None:
    """The length of a dataset; None where it does not say."""
    try:
        return len(dataset)
    except Exception:
        return None


def is_open(file: io.IOBase) -> bool:
    """Whether there is an open file behind this, and not only memory, or one of the standard streams."""
    if any(file is each for each in (sys.stdin, sys.stdout, sys.stderr)):
        return False
    try:
        return not file.closed and file.fileno() > 2
    except (OSError, ValueError):  # in memory, or closed meanwhile
        return False


def is_mapped(value: np.ndarray[Any, Any]) -> bool:
    """Whether an array's memory is a file's."""
    base: Any = value
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def arrays_of(value: Any) -> list[Any]:
    """The arrays of a DataFrame, a Series, or of one of their columns."""
    arrays = list(getattr(getattr(value, "_mgr", None), "arrays", ()))
    held = getattr(value, "__dict__", {})
    return arrays or [held[name] for name in ("_ndarray", "_data", "_mask") if name in held]


def digest(data: Any) -> int:
    """A number for these bytes; of many of them, for some."""
    if len(data) <= WHOLE_BYTES:
        return hash(bytes(data))
    return hash(bytes(data[:: len(data) // _SAMPLED | 1]))


def digest_of(value: np.ndarray[Any, Any]) -> int:
    """A number for an array's content; of a large one, for some of its elements, spread over rows and columns."""
    if value.nbytes <= WHOLE_BYTES and value.size * value.itemsize == value.nbytes:
        return hash(value.tobytes())
    # ravel() would copy what is not contiguous
    return hash(value.flat[:: _step_through(value.shape, max(value.size // _SAMPLED, 1))].tobytes())


def _step_through(shape: tuple[int, ...], least: int) -> int:
    """A step through the elements of an array that has no divisor in common with its sides: it meets all columns."""
    step = least
    while any(side > 1 and math.gcd(step, side) > 1 for side in shape[1:]):
        step += 1
    return step


def row_digest(value: np.ndarray[Any, Any], row: int) -> int:
    """A number for one row of an array."""
    return hash(value[row].tobytes())


def entry_of(value: Any, sample: int) -> Any:
    """One entry of a container."""
    return plain_containers.entry_at(value, sample)


def drawn_to(generator: Any) -> bytes:
    """A generator's state, to be compared."""
    state = state_of_generator(generator)
    return bytes(state.numpy().tobytes()) if isinstance(state, torch.Tensor) else repr(state).encode()


def state_of_generator(generator: Any) -> Any:
    """A generator's state, to be restored."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    """Have a generator draw from a state of :func:`state_of_generator` on."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def items_of(value: Sequence[Any], also: Sequence[int]) -> list[Any]:
    """Some of the items of a sequence, and those of these samples."""
    length = plain_containers.length_of(value)
    if isinstance(value, deque):
        return (
            list(plain_containers.entries_of(value))
            if length <= LARGE
            else [plain_containers.entry_at(value, each) for each in (0, length - 1)]
        )
    some = plain_containers.entry_at(value, slice(None, None, max(length // LARGE, 1)))
    return [
        *plain_containers.entries_of(some),
        *(plain_containers.entry_at(value, each) for each in also if each < length),
    ]


def some_of(value: Any, also: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Some of the entries of a dict."""
    items = dict.items(value) if isinstance(value, dict) else value.items()
    length = plain_containers.length_of(value)
    if length > HUGE:
        first, last = islice(items, LARGE // 2), islice(reversed(items), LARGE // 2)
        some: Iterable[tuple[Any, Any]] = chain(list(first), list(last))
    else:
        some = islice(items, 0, None, max(length // LARGE, 1))
    yield from some
    for each in also:
        if holds(value, each):
            yield each, plain_containers.entry_at(value, each)


def holds(value: Any, key: Any) -> bool:
    """Whether a dict has a key, without asking a class of the user's."""
    return dict.__contains__(value, key) if isinstance(value, dict) else key in value


def entries_of(value: Any, also: Sequence[int]) -> Any:
    """The entries of a dict, or its length and some of them."""
    items = dict.items(value) if isinstance(value, dict) else value.items()
    length = plain_containers.length_of(value)
    return dict(items) if length <= LARGE else (length, list(some_of(value, also)))
