"""What a loader's workers are given a copy of: whether it has changed since, and what of it cannot be copied.

A worker has the dataset as it was when the worker was started. A :class:`DatasetState` takes that down, and can say
later, quickly, whether it is still so. On its way it notes what behaves otherwise once several processes have it: an
open file, whose position they would share; a generator, of which each would draw the same numbers.
"""

from __future__ import annotations

import io
import mmap
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any, Final, Literal

import numpy as np
import torch

_MOST_OBJECTS: Final = 20_000
_LARGE: Final = 256
"""Of containers with more items so many are looked at, evenly spread."""

_HUGE: Final = 4096
"""Dicts with more items are looked at at their beginning and their end: to walk through them takes too long."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_WHOLE: Final = (type, ModuleType, torch.dtype, torch.device)
"""What is the same as long as it is the same object."""

_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
GLOBAL_GENERATORS: Final = (
    torch.default_generator,
    getattr(random.random, "__self__", None),
    getattr(np.random.random, "__self__", None),
)
"""Each worker seeds its own."""

_SHARED_ON_PURPOSE: Final = ("multiprocessing", "threading", "_thread", "logging", "weakref", "contextvars", "mmap")
"""Modules whose objects each process may have: made to be shared, or with a state of its own in each."""

_FORK_SAFE: Final = (*_SHARED_ON_PURPOSE, "torch", "numpy", "pyarrow", "pandas", "lightning_gpuopt")
"""Modules whose objects hold no position that processes could move for one another, though some cannot be pickled."""

_LIGHTNING: Final = ("lightning", "pytorch_lightning", "lightning_fabric")
_FRAMEWORK_NAMES: Final = frozenset({"trainer", "_trainer", "_fabric", "_log_hyperparams", "log", "log_dict"})

_PICKLES_ITS_WAY: Final = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")


@dataclass(frozen=True)
class Held:
    """Something in a dataset that processes cannot simply have a copy of.

    Attributes:
        kind: ``"file"``: an open file, a connection, or what says that it cannot be copied; ``"generator"``: of random
            numbers; ``"device"``: a tensor on a GPU.
        name: its type.
        path: where it is, as code has it: ``dataset.transform.rng``.
        value: the object.
    """

    kind: Literal["file", "generator", "device"]
    name: str
    path: str
    value: Any

    def __str__(self) -> str:
        return f"{self.path} ({self.name})"


class _Part:
    """One object whose content may change: how that is read, and how it was."""

    __slots__ = ("is_entries", "is_generator", "read", "was")

    def __init__(self, read: Callable[[], Any], *, is_generator: bool = False, is_entries: bool = False) -> None:
        self.read, self.was = read, read()
        self.is_generator, self.is_entries = is_generator, is_entries

    def has_changed(self) -> bool:
        try:
            return bool(self.read() != self.was)
        except Exception:  # arrays or tensors beside one another: others than before, or they would be the same objects
            return True

    def has_only_opened(self) -> bool:
        """Whether all that is new are files and other resources, as they are opened when they are needed."""
        now, was = self.read(), self.was
        if not isinstance(now, dict) or not isinstance(was, dict) or not was.keys() <= now.keys():
            return False
        return all(now[name] is was.get(name) or is_resource(now[name]) for name in now)


class DatasetState:
    """What these objects hold, as it is now, to be compared with what they hold later.

    Nothing of the user's is called, and whatever the objects are, nothing is raised. Of large containers and arrays a
    part is looked at; the content of a memory map is not.

    Args:
        **roots: a dataset, and what workers are given with it, by name; None is left out.
        also: numbers of samples whose entries are looked at in containers of any size.

    Attributes:
        held: what processes cannot simply have a copy of.
        has_epochs: whether something in it has a ``set_epoch`` method.
        is_whole: whether all of it was looked at, but for the content of large containers and arrays.

    Example::

        state = DatasetState(dataset=dataset)
        ...
        state.has_changed()
    """

    def __init__(self, *, also: Sequence[int] = (), **roots: Any) -> None:
        self.held: list[Held] = []
        self.has_epochs = False
        self.is_whole = True
        self._also = tuple(also)
        self._parts: list[_Part] = []
        self._met: dict[int, Any] = {}  # and keeps them alive: an id is of one object only as long as that lives
        self._picklable: dict[type, bool] = {}
        queue = deque((name, value) for name, value in roots.items() if value is not None)
        while queue:
            path, value = queue.popleft()
            if isinstance(value, (*_PLAIN, *_WHOLE)) or id(value) in self._met:
                continue
            if len(self._met) >= _MOST_OBJECTS:
                self.is_whole = False
                break
            self._met[id(value)] = value
            try:
                queue.extend(self._look_into(path, value))
            except Exception:  # a property of somebody's own, a tensor without a version, an empty closure
                self.is_whole = False

    def has_changed(self, *, most: int | None = None) -> bool:
        """Whether something is no longer as it was, but for files and the like that were opened since.

        Args:
            most: look at so many of the objects only, those nearest to the roots; None: at all.
        """
        return any(each.has_changed() and not each.has_only_opened() for each in islice(self._parts, most))

    def change_by_reading(self) -> Literal["entries", "other"] | None:
        """What reading samples has changed, but for generators and what is opened when it is needed.

        Returns:
            ``"entries"``: only what is kept for single samples, as in a cache; None: nothing.
        """
        changed = [each for each in self._parts if not each.is_generator and each.has_changed()]
        changed = [each for each in changed if not each.has_only_opened()]
        if not changed:
            return None
        return "entries" if all(each.is_entries for each in changed) else "other"

    # -- looking

    def _watch(self, read: Callable[[], Any], *, is_generator: bool = False, is_entries: bool = False) -> None:
        self._parts.append(_Part(read, is_generator=is_generator, is_entries=is_entries))

    def _look_into(self, path: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Note what there is to compare of one object; what it holds, to be looked into next."""
        if isinstance(value, torch.Tensor):
            if value.device.type not in ("cpu", "meta"):
                self._note("device", path, value)
            self._watch(lambda: (value._version, value.shape), is_entries=True)
        elif isinstance(value, np.ndarray):
            return self._of_array(path, value)
        elif isinstance(value, _GENERATORS):
            if not any(value is each for each in GLOBAL_GENERATORS):
                self._note("generator", path, value)
            self._watch(lambda: _drawn_to(value), is_generator=True)
        elif isinstance(value, (dict, MappingProxyType)):  # other mappings may load what they hold
            self._watch(lambda: _of_dict(value, self._also), is_entries=True)
            return [(f"{path}[{key!r}]"[:200], item) for key, item in _some_of(value, self._also)]
        elif isinstance(value, (list, tuple, deque)):
            return self._of_sequence(path, value)
        elif isinstance(value, (set, frozenset)):
            self._watch(lambda: set(value) if len(value) <= _LARGE else len(value))
        elif isinstance(value, FunctionType):
            return self._of_function(path, value)
        elif isinstance(value, BuiltinFunctionType):
            return [(path, value.__self__)]
        elif isinstance(value, MethodType):
            if _is_of(value.__self__, _LIGHTNING):
                return self._of_lightning_method(path, value)
            return [(path, value.__func__), (path, value.__self__)]
        elif isinstance(value, partial):
            self._watch(lambda: (value.args, value.keywords))
            return [(path, each) for each in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, (io.IOBase, GeneratorType)):
            if isinstance(value, GeneratorType) or _is_open(value):
                self._note("file", path, value)
        elif not _is_of(value, _LIGHTNING):  # which hold the whole run
            return self._of_object(path, value)
        return ()

    def _of_array(self, path: str, value: np.ndarray[Any, Any]) -> Iterable[tuple[str, Any]]:
        if _is_mapped(value):
            self._watch(lambda: (value.shape, value.dtype))
            return ()
        step = max(value.size // _LARGE, 1)
        rows = [each for each in self._also if value.ndim and each < len(value)]
        if value.dtype.hasobject:
            self._watch(lambda: (value.shape, value.flat[::step].tolist()))
            return [(path, item) for item in value.flat[::step].tolist()]
        # ravel() would copy what is not contiguous
        self._watch(
            lambda: (value.shape, value.flat[::step].tobytes(), value[rows].tobytes() if rows else b""), is_entries=True
        )
        return ()

    def _of_sequence(self, path: str, value: Sequence[Any]) -> Iterable[tuple[str, Any]]:
        if not isinstance(value, tuple):
            self._watch(lambda: len(value))
            self._watch(lambda: _items(value, self._also), is_entries=True)
        names = getattr(type(value), "_fields", None)
        if names is not None and len(names) == len(value):
            return [(f"{path}.{name}", item) for name, item in zip(names, value, strict=True)]
        return [(f"{path}[...]", item) for item in _items(value, self._also)]

    def _of_function(self, path: str, value: FunctionType) -> Iterable[tuple[str, Any]]:
        cells = value.__closure__ or ()
        self._watch(lambda: [cell.cell_contents for cell in cells])
        held = [*zip(value.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=False)]
        held += [("", each) for each in (value.__defaults__ or ())]
        return [(name or path, item) for name, item in held]

    def _of_lightning_method(self, path: str, value: MethodType) -> Iterable[tuple[str, Any]]:
        """A ``collate_fn`` of the module's own: of the module, only what the method and what it calls read."""
        owner, todo, names = value.__self__, [value.__func__], set[str]()
        while todo:
            code = getattr(todo.pop(), "__code__", None)
            for name in set(_names_in(code)) - names:
                names.add(name)
                method = getattr(type(owner), name, None)
                if isinstance(method, FunctionType) and not method.__module__.startswith(_LIGHTNING):
                    todo.append(method)
        held = vars(owner)
        read = sorted(name for name in names - _FRAMEWORK_NAMES if name in held)
        steps = sorted(names & {"current_epoch", "global_step"})
        self._watch(lambda: [held.get(name) for name in read] + [getattr(owner, name) for name in steps])
        return [(f"{path}.{name}", held[name]) for name in read if not isinstance(held[name], torch.nn.Module)]

    def _of_object(self, path: str, value: Any) -> Iterable[tuple[str, Any]]:
        kind = type(value)
        self.has_epochs |= callable(getattr(kind, "set_epoch", None))
        if _module_of(kind).startswith(_SHARED_ON_PURPOSE) or _module_of(kind).startswith(("pyarrow.", "re.")):
            return ()
        if _module_of(kind).startswith("pandas."):  # its indices keep what they were asked for
            arrays = list(getattr(getattr(value, "_mgr", None), "arrays", ()))
            self._watch(lambda: [id(each) for each in getattr(getattr(value, "_mgr", None), "arrays", ())])
            return [(path, each) for each in arrays]
        if _module_of(kind).startswith("PIL."):
            return [(f"{path}.fp", value.fp)] if getattr(value, "fp", None) is not None else ()
        if _module_of(kind).startswith("h5py.") and not value:
            return ()  # it is closed
        caches = [each for each in (value, *_functions_of(kind)) if hasattr(each, "cache_info")]
        if caches:
            self._watch(lambda: [each.cache_info().currsize for each in caches], is_entries=True)
        held = _attributes(value)
        if not self._is_copyable(value, has_attributes=held is not None):
            self._note("file", path, value)
            return ()
        if held is None:
            return ()
        self._watch(lambda: _attributes(value))
        hides = _is_of(value, ("lightning_gpuopt",)) and any("__getstate__" in vars(base) for base in kind.__mro__[:-1])
        shown = _attributes_sent(value) if hides else held
        return [(f"{path}.{name}", item) for name, item in shown.items()]

    def _is_copyable(self, value: Any, *, has_attributes: bool) -> bool:
        """Whether nothing says that an object cannot be pickled, as files and connections do."""
        kind = type(value)
        if has_attributes and not any(name in vars(base) for base in kind.__mro__[:-1] for name in _PICKLES_ITS_WAY):
            return True  # an object of a class in Python: what it holds will be looked at
        if _is_of(value, _FORK_SAFE):
            return True
        if kind not in self._picklable:
            try:
                value.__reduce_ex__(5)
                self._picklable[kind] = True
            except Exception:
                self._picklable[kind] = False
        return self._picklable[kind]

    def _note(self, kind: Literal["file", "generator", "device"], path: str, value: Any) -> None:
        name = type(value).__name__
        shown = getattr(value, "name", None) if isinstance(value, io.IOBase) else None
        self.held.append(Held(kind, f"{name} {shown}" if isinstance(shown, str) else name, path, value))


def is_resource(value: Any) -> bool:
    """Whether a value is or holds a file, a connection or the like, and so is opened when it is needed."""
    return any(each.kind == "file" for each in DatasetState(value=value).held)


def _module_of(kind: type) -> str:
    return f"{getattr(kind, '__module__', None) or ''}."


def _is_of(value: Any, packages: Sequence[str]) -> bool:
    """Whether an object's class, or one that it derives from, is of these packages."""
    return any(_module_of(base).partition(".")[0] in packages for base in type(value).__mro__[:-1])


def _attributes(value: Any) -> dict[str, Any] | None:
    """What an object of a class in Python holds, by name; None for others."""
    held = getattr(value, "__dict__", None)
    slots = [
        name
        for base in type(value).__mro__
        for name in _listed(vars(base).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    if held is None and not slots:
        return None
    found = dict(held) if isinstance(held, dict) else {}
    return {**found, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}


def _attributes_sent(value: Any) -> dict[str, Any]:
    state = value.__getstate__()
    return state if isinstance(state, dict) else {"": state}


def _listed(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _functions_of(kind: type) -> Iterator[Any]:
    """The functions of a class in Python, and those of its module that they name."""
    for base in kind.__mro__[:-1]:
        if _module_of(base).startswith(("torch.", "builtins.")):
            continue
        for each in vars(base).values():
            yield each
            code, known = getattr(each, "__code__", None), getattr(each, "__globals__", {})
            yield from (known[name] for name in getattr(code, "co_names", ()) if name in known)


def _names_in(code: Any) -> Iterator[str]:
    """The names that a function's code, and the functions in it, read."""
    if code is None:
        return
    yield from code.co_names
    for each in code.co_consts:
        if hasattr(each, "co_names"):
            yield from _names_in(each)


def _is_open(file: io.IOBase) -> bool:
    """Whether there is an open file behind this, and not only memory, or one of the standard streams."""
    if any(file is each for each in (sys.stdin, sys.stdout, sys.stderr)):
        return False
    try:
        return not file.closed and file.fileno() > 2
    except (OSError, ValueError):  # in memory, or closed meanwhile
        return False


def _is_mapped(value: np.ndarray[Any, Any]) -> bool:
    """Whether an array's memory is a file's."""
    base: Any = value
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def _drawn_to(generator: Any) -> bytes:
    """A generator's state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return repr(generator.getstate()).encode()
    bits: Any = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return repr(bits.state if isinstance(generator, np.random.Generator) else bits.get_state()).encode()


def _items(value: Sequence[Any], also: Sequence[int]) -> list[Any]:
    if isinstance(value, deque):
        return list(value) if len(value) <= _LARGE else [value[0], value[-1]]
    return [*value[:: max(len(value) // _LARGE, 1)], *(value[each] for each in also if each < len(value))]


def _some_of(value: Any, also: Sequence[int]) -> Iterator[tuple[Any, Any]]:
    """Some of the entries of a dict."""
    if len(value) > _HUGE:
        first, last = islice(value.items(), _LARGE // 2), islice(reversed(value.items()), _LARGE // 2)
        some: Iterable[tuple[Any, Any]] = chain(list(first), list(last))
    else:
        some = islice(value.items(), 0, None, max(len(value) // _LARGE, 1))
    yield from some
    for each in also:
        if each in value:
            yield each, value[each]


def _of_dict(value: Any, also: Sequence[int]) -> Any:
    return dict(value) if len(value) <= _LARGE else (len(value), list(_some_of(value, also)))
