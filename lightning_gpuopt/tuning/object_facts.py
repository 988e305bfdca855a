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
from itertools import chain, islice, pairwise
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_gpuopt.utils import plain_containers

LARGE: Final = 256
"""Of containers with more items so many are looked at, evenly spread."""

HUGE: Final = 4096
"""Lists and dicts up to this size are compared whole. To walk through larger dicts takes too long: of these the
beginning and the end are looked at."""

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
    if (module or "").partition(".")[0] in {*sys.stdlib_module_names, "lightning_gpuopt"} - {"__main__"}:
        return False
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
        for _, each in functions_of(base):
            yield from (item for _, item in globals_named_by(each))


def function_in(value: Any) -> FunctionType | None:
    """The function behind an attribute of a class: a method, a property or the like; None for other attributes."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, (cached_property, functools.partialmethod)):
        value = value.func
    return value if isinstance(value, FunctionType) else None


def functions_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The functions that a class itself has, by name, also those behind properties and the like."""
    for name, each in vars(kind).items():
        if (function := function_in(each)) is not None:
            yield name, function


def globals_named_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The global variables that a function reads, by name; nothing of another object."""
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None:
        yield from ((name, known[name]) for name in _globals_of(code) if name in known)


def passes_itself_on(method: Any) -> bool:
    """Whether a method uses its first argument for anything but to read or set attributes that it names."""
    code = getattr(method, "__code__", None)
    return code is None or not code.co_argcount or _is_passed_on(code, code.co_varnames[0])


@cache
def _is_passed_on(code: CodeType, name: str) -> bool:
    of_cells = {*code.co_cellvars, *code.co_freevars}
    for (step, variable), (following, _) in pairwise(_steps(code)):
        # a cell is loaded as a whole only to make a closure, whose own code is looked at below
        reads = step == "LOAD_DEREF" or (step.startswith("LOAD_FAST") and variable not in of_cells)
        if reads and variable == name and not following.endswith(_OF_ATTRIBUTES):
            return True
    inner = (each for each in code.co_consts if isinstance(each, CodeType) and name in each.co_freevars)
    return any(_is_passed_on(each, name) for each in inner)


def _steps(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Instructions and their arguments; those that Python 3.13 has made of two, as two."""
    for each in dis.get_instructions(code):
        if isinstance(each.argval, tuple) and each.opname.count("_FAST") == 2:
            first, second = each.opname.split("_FAST_", 1)
            yield f"{first}_FAST", each.argval[0]
            yield second, each.argval[1]
        elif each.opname not in ("CACHE", "EXTENDED_ARG"):
            yield each.opname, each.argval


_OF_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "SUPER_ATTR", "SUPER_METHOD")


def is_a(value: Any, names: Sequence[str]) -> bool:
    """Whether an object's class, or one that it derives from, has one of these names."""
    return any(base.__name__ in names for base in type(value).__mro__)


def is_trained(value: Any) -> bool:
    """Whether training changes an object in each step: parameters, an optimizer, a metric."""
    if isinstance(value, torch.nn.Module):
        trained = any(each.requires_grad for each in torch.nn.Module.parameters(value))
        return trained or is_of(value, ("torchmetrics",))
    return isinstance(value, torch.optim.Optimizer)


def environment() -> dict[Any, Any]:
    """The environment variables, as their bytes where these can be had: they are compared for each batch."""
    return dict(getattr(os.environ, "_data", os.environ))


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


def items_of(value: Sequence[Any], also: Sequence[int], whole: int = LARGE) -> list[Any]:
    """The items of a sequence of up to so many; of a longer one some, and those of these samples."""
    length = plain_containers.length_of(value)
    if isinstance(value, deque):
        return (
            list(plain_containers.entries_of(value))
            if length <= LARGE
            else [plain_containers.entry_at(value, each) for each in (0, length - 1)]
        )
    some = plain_containers.entry_at(value, slice(None, None, max(length // LARGE, 1) if length > whole else 1))
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
    return dict(items) if length <= HUGE else (length, list(some_of(value, also)))
