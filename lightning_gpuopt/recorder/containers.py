"""Finds the containers that objects hold: in attributes, closures, defaults, classes, modules' globals and caches.

No code of the objects' own runs, but the length of a container whose class is a subclass.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_gpuopt.timeline.frames import is_own
from lightning_gpuopt.utils.plain_containers import CONTAINERS, entries_of, length_of

log = logging.getLogger(__name__)

MAX_S: Final = 0.02
"""Seconds at most that a walk takes."""

FEW: Final = 64
"""Entries of a container in which objects with attributes, and other containers, are looked for."""

_AT_ONCE: Final = 16
"""Containers between two looks at the clock."""

_MAX_DEPTH: Final = 6
_MAX_OBJECTS: Final = 2000

PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), np.generic)
SHARED: Final = (np.ndarray, torch.Tensor)
"""Their data is no Python object; what they are themselves takes little."""

_CACHE: Final[Any] = functools._lru_cache_wrapper
_LEAVES: Final = (*PLAIN, *SHARED, bytearray, memoryview, type)
_CLOSED: Final = frozenset(
    {"lightning", "pytorch_lightning", "lightning_fabric", "torch", "lightning_gpuopt", "logging", "threading"}
)
"""Packages whose objects hold a whole training, or ours."""

_OPENED: Final = ("torch.utils.data", "lightning_gpuopt.storage", "lightning_gpuopt.loading")
_OF_MODULES: Final = frozenset({"_modules", "_parameters", "_buffers"})
_OF_HOOKS: Final = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_LONGEST_KEY: Final = 40
_MOST_CACHED: Final = 100_000
"""Entries of a bounded cache, which shows all at once, that are asked for."""


@dataclass(frozen=True)
class Container:
    """A container.

    Attributes:
        name: where it is, as code has it from the root on: ``"transform.transforms[1].cache"``.
        root: name of the root, or of the module whose global it is.
        path: the names of the attributes, without those of entries.
        owner: the object whose attribute it is.
        kind: ``"list"``, ``"array"`` (of objects), ``"lru_cache"``, ``"table"`` (of pandas).
        values: itself.
        inside: whether it is in another container.
        opened: whether it holds objects with attributes, which were looked at as well.
    """

    name: str
    root: str
    path: tuple[str, ...]
    owner: object
    kind: str
    values: Any
    inside: bool = False
    opened: bool = False

    def count(self) -> int:
        """Entries that it has now."""
        return int(self.values.cache_info().currsize) if type(self.values) is _CACHE else length_of(self.values)

    def entries(self) -> Collection[Any] | None:
        """The container, or what a cache holds of keys and results; None where that is not to be had.

        A cache's entries are those that Python's garbage collector is shown.
        """
        if type(self.values) is not _CACHE:
            return self.values  # type: ignore[no-any-return]
        return _cached(self.values)


class _Item(NamedTuple):
    """Something to look at: where it is, and what."""

    value: Any
    name: str
    root: str
    path: tuple[str, ...]
    owner: object
    depth: int
    inside: bool = False


class Containers:
    """The containers of some objects, the nearest first. To be gone through once.

    Args:
        roots: the objects, by a name for people; names of containers begin with it where it is not empty.
        clock: seconds, for the limit on what this takes.

    Attributes:
        complete: whether all was seen within the time, and what there may be at most.
        owners: the objects whose attributes were looked at, by the names of the attributes on the way to them.
    """

    def __init__(self, roots: Iterable[tuple[str, object]], clock: Callable[[], float]) -> None:
        self.complete = False
        self.owners: list[tuple[tuple[str, ...], object]] = []
        self._clock = clock
        self._seen: set[int] = set()
        self._packages: set[str] = set()
        self._looked_through: dict[str, bool] = {}
        self._waiting: deque[_Item] = deque()
        for name, each in roots:
            self._packages.add(_module_of(each).partition(".")[0])
            self._waiting.append(_Item(each, name, name, (), each, 0))

    def __iter__(self) -> Iterator[Container]:
        end_s = self._clock() + MAX_S
        yielded = 0
        while self._waiting and len(self.owners) < _MAX_OBJECTS:
            item = self._waiting.popleft()
            if id(item.value) in self._seen:
                continue
            self._seen.add(id(item.value))
            try:
                found = self._look_at(item)
            except Exception:  # it is the user's, and another thread may change it
                log.debug("%s could not be looked at", item.name, exc_info=True)
                continue
            if found is not None:
                yielded += 1
                yield found
                if yielded % _AT_ONCE:
                    continue
            if self._clock() > end_s:
                return
        self.complete = not self._waiting

    def _look_at(self, item: _Item) -> Container | None:
        value, kind = item.value, type(item.value)
        if kind is _CACHE:
            self._open(item, vars(value).items())
            return self._container(item, "lru_cache")
        if issubclass(kind, np.ndarray):
            return self._container(item, "array")
        if _module_of_class(kind).partition(".")[0] == "pandas":
            return self._container(item, "table")
        if issubclass(kind, CONTAINERS):
            opened = item.depth < _MAX_DEPTH and length_of(value) <= FEW and self._open_entries(item)
            if kind.__module__ not in ("builtins", "collections"):  # a subclass, with attributes of its own
                self._open(item, _attributes(value))
            return self._container(item, kind.__name__, opened)
        if kind is ModuleType:
            self._open(item, ((name, each) for name, each in list(vars(value).items()) if not name.startswith("__")))
        elif kind is MethodType:
            self._put(item, "__self__", value.__self__, hidden=True)
            self._put(item, "__func__", value.__func__, hidden=True)
        elif kind in (staticmethod, classmethod):
            self._put(item, "__func__", value.__func__, hidden=True)
        elif kind is FunctionType:
            self._open(item, _of_function(value))
            self._open_module(value.__module__)
        elif item.depth <= _MAX_DEPTH and (item.depth == 0 or not _is_closed(kind)):
            self.owners.append((item.path, value))
            own = dict(_attributes(value))
            self._open(item, own.items())
            for each in kind.__mro__:
                if self._is_looked_through(_module_of_class(each)) and id(each) not in self._seen:
                    self._seen.add(id(each))
                    inherited = {n: v for n, v in list(vars(each).items()) if n not in own and _may_hold(n, v)}
                    self._open(item, inherited.items())
                    self._open_module(each.__module__)
        return None

    def _container(self, item: _Item, kind: str, opened: bool = False) -> Container:
        return Container(item.name, item.root, item.path, item.owner, kind, item.value, item.inside, opened)

    def _open(self, item: _Item, attributes: Iterable[tuple[str, Any]]) -> None:
        if item.depth < _MAX_DEPTH or issubclass(type(item.value), torch.nn.Module):
            for name, value in attributes:
                self._put(item, name, value)

    def _put(self, item: _Item, name: str, value: Any, *, hidden: bool = False) -> None:
        kind = type(value)
        if issubclass(kind, _LEAVES) and not (issubclass(kind, np.ndarray) and value.dtype == object):
            return
        if kind is ModuleType:
            self._open_module(value.__name__)
            return
        is_submodule = issubclass(kind, torch.nn.Module) and issubclass(type(item.value), torch.nn.Module)
        depth = item.depth + (not is_submodule and not hidden)
        if hidden:
            self._waiting.append(_Item(value, item.name, item.root, item.path, item.owner, depth))
            return
        full = f"{item.name}.{name}" if item.name else name
        self._waiting.append(_Item(value, full, item.root, (*item.path, name), item.value, depth))

    def _open_entries(self, item: _Item) -> bool:
        """Look at the entries of a container too; True if there are objects with attributes among them."""
        values = item.value
        few = list(dict.items(values)) if isinstance(values, dict) else list(enumerate(entries_of(values)))
        opened = False
        for number, (key, each) in enumerate(few):
            kind = type(each)
            if issubclass(kind, _LEAVES) or kind in (ModuleType, FunctionType, MethodType):
                if kind in (FunctionType, MethodType):
                    self._waiting.append(
                        _Item(each, f"{item.name}[{number}]", item.root, item.path, item.owner, item.depth + 1)
                    )
                continue
            opened = opened or not (issubclass(kind, CONTAINERS) or _is_closed(kind))
            shown = repr(key) if type(key) in (str, int) and len(str(key)) <= _LONGEST_KEY else str(number)
            name = f"{item.name}[{shown}]"
            inside = item.inside or issubclass(kind, CONTAINERS)
            self._waiting.append(_Item(each, name, item.root, item.path, item.owner, item.depth + 1, inside))
        return opened

    def _open_module(self, name: str | None) -> None:
        module = sys.modules.get(name or "")
        if module is not None and id(module) not in self._seen and self._is_looked_through(module.__name__):
            self._waiting.append(_Item(module, module.__name__, module.__name__, (), module, 0))

    def _is_looked_through(self, module_name: str) -> bool:
        """Whether a module's classes and globals are: the user's own, or of a package that a root is from."""
        if module_name not in self._looked_through:
            package = module_name.partition(".")[0]
            module = sys.modules.get(module_name)
            file = vars(module).get("__file__") if module is not None else None
            is_users = module_name == "__main__" or package in self._packages or is_own(file or "<")
            closed = package in _CLOSED or (package in sys.stdlib_module_names and package != "__main__")
            self._looked_through[module_name] = is_users and not closed
        return self._looked_through[module_name]


def attributes_of(owner: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """An object's attributes: those of its ``__dict__`` and those in slots. No property is asked."""
    dictionary, members = _descriptors(type(owner))  # type: ignore[arg-type]
    slots: dict[str, Any] = {}
    for name, each in members:
        try:
            slots[name] = each.__get__(owner)
        except AttributeError:  # not set
            continue
    return dict(dictionary.__get__(owner)) if dictionary is not None else {}, slots


@functools.lru_cache(maxsize=512)
def _descriptors(kind: type) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """Of a class: what gives the ``__dict__`` of its objects, and what gives their slots."""
    dictionary = None
    members: dict[str, Any] = {}
    for each in kind.__mro__:
        for name, value in list(vars(each).items()):
            if name == "__dict__" and type(value) is GetSetDescriptorType:
                dictionary = dictionary or value
            elif type(value) is MemberDescriptorType and each.__module__ != "builtins":
                members.setdefault(name, value)
    return dictionary, tuple(members.items())


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    is_module = issubclass(type(owner), torch.nn.Module)
    for each in attributes_of(owner):
        for name, value in each.items():
            if is_module and name in _OF_MODULES:
                if name == "_modules" and isinstance(value, dict):
                    yield from list(value.items())
                continue
            if is_module and type(value) in (dict, OrderedDict) and not value and name.endswith(_OF_HOOKS):
                continue  # most have none, and there are many
            yield name, value


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function keeps: variables of its closure, defaults, attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # empty yet
            continue
    defaults = function.__defaults__ or ()
    code = function.__code__
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()
    yield from list(function.__dict__.items())


def _may_hold(name: str, value: Any) -> bool:
    """Whether an attribute of a class may be or keep a container: data, caches, functions with defaults or closures."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if type(value) is FunctionType:
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__)
    if type(value) in (GetSetDescriptorType, MemberDescriptorType, property):
        return False
    return not (name.startswith("__") and name.endswith("__"))


def _is_closed(kind: type) -> bool:
    if issubclass(kind, torch.nn.Module):
        return False
    module = _module_of_class(kind)
    return module.partition(".")[0] in _CLOSED and not module.startswith(_OPENED)


def _module_of(each: object) -> str:
    return each.__module__ or "" if type(each) is FunctionType else _module_of_class(type(each))


def _module_of_class(kind: type) -> str:
    module: object = kind.__module__
    return module if isinstance(module, str) else ""


def _cached(wrapper: Any) -> Collection[Any] | None:
    count, maxsize = wrapper.cache_info().currsize, wrapper.cache_info().maxsize
    if maxsize is not None and count > _MOST_CACHED:
        return None
    held = gc.get_referents(wrapper)
    if maxsize is None:
        return next((each for each in held if type(each) is dict and each is not vars(wrapper)), None)
    return [each for each in islice(held, 3 * count) if not isinstance(each, (type, FunctionType))]
