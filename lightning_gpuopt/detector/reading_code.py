"""The names that the code uses which reads samples: what it does not name, it does not touch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial, partialmethod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from lightning_gpuopt.recorder.containers import attributes_of
from lightning_gpuopt.timeline.frames import is_own

_READS: Final = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__")
_MAX_S: Final = 0.02
_MOST: Final = 2000
"""Functions that are looked at."""

_BY_ANY_NAME: Final = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "eval", "exec"})
"""Code of the user's that has one of these may read what it does not name."""

_IMPLIED: Final = frozenset(
    (
        *("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "__contains__", "__getattr__"),
        *("__getattribute__", "__enter__", "__exit__", "__eq__", "__hash__", "__lt__", "__missing__", "__reversed__"),
        *("__array__", "__index__", "__add__", "__bool__", "__get__"),
    )
)
"""Methods that are called without their names. A length is asked without a look at what is in a container."""


@dataclass(frozen=True)
class ReadingCode:
    """What is known of the code that reads samples.

    Attributes:
        names: of attributes, globals and variables of closures that it uses.
        whole: whether all of it is known, and it uses nothing by a name that it makes.
    """

    names: frozenset[str]
    whole: bool

    def reaches(self, path: Iterable[str]) -> bool:
        """Whether it names each attribute on the way to an object.

        Args:
            path: their names.
        """
        return all(each in self.names for each in path)


def reading_code(
    datasets: Iterable[object],
    owners: Iterable[tuple[tuple[str, ...], object]],
    clock: Callable[[], float] = time.thread_time,
) -> ReadingCode:
    """The code that reads samples: of the datasets' own methods, and of all that these name, as far as can be seen.

    Nothing is called. It takes some 20 ms at most.

    Args:
        datasets: whose samples are read.
        owners: objects that it may use, datasets among them, by the names of the attributes on the way to them.
        clock: seconds.
    """
    return _Search(list(datasets), list(owners), clock).result()


class _Search:
    def __init__(
        self, datasets: list[object], owners: list[tuple[tuple[str, ...], object]], clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._owners = owners
        self._names: set[str] = set()
        self._whole = True
        self._seen: set[int] = set()
        self._waiting: deque[FunctionType] = deque()
        self._by_name: dict[str, list[Any]] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._kinds: set[type] = set()
        for each in datasets:
            self._starts(type(each))

    def result(self) -> ReadingCode:
        end_s = self._clock() + _MAX_S
        count = 0
        self._reach()
        while self._waiting:
            function = self._waiting.popleft()
            count += 1
            if count > _MOST or self._clock() > end_s:
                self._whole = False
                break
            self._read(function)
            if not self._waiting:
                self._reach()
        return ReadingCode(frozenset(self._names), self._whole)

    def _reach(self) -> None:
        """Take in the objects whose attribute is used by now."""
        reached = [each for each in self._owners if self._names.issuperset(each[0])]
        self._owners = [each for each in self._owners if not self._names.issuperset(each[0])]
        for _, each in reached:
            self._add_kind(type(each))
            for part in attributes_of(each):
                for name, value in part.items():
                    self._offer(name, value)

    def _starts(self, kind: type) -> None:
        found = [each for name in _READS for each in [_in_class(kind, name)] if each is not None]
        functions = [function for each in found for function in _functions(each)]
        if not functions or len(functions) < len(found):
            self._whole = False  # compiled
        for each in functions:
            self._add(each)

    def _add_kind(self, kind: type) -> None:
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        done: set[str] = set()
        for each in kind.__mro__:
            for name, value in list(vars(each).items()):
                if name in done:  # overridden
                    continue
                functions = list(_functions(value))
                if not any("super" in one.__code__.co_names for one in functions):
                    done.add(name)
                if name not in _IMPLIED:
                    self._offer(name, value)
                    continue
                for function in functions:
                    self._add(function)

    def _offer(self, name: str, value: Any) -> None:
        """An attribute, which is looked at once its name is used."""
        entries = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
        few = [value, *entries] if len(entries) <= 64 else [value]
        functions = [function for each in few for function in _functions(each)]
        if name in self._names:
            for function in functions:
                self._add(function)
        elif functions:
            self._by_name.setdefault(name, []).extend(functions)

    def _add(self, function: FunctionType) -> None:
        if id(function.__code__) not in self._seen:
            self._seen.add(id(function.__code__))
            self._waiting.append(function)

    def _read(self, function: FunctionType) -> None:
        names = set(_names(function.__code__))
        if is_own(function.__code__.co_filename) and not names.isdisjoint(_BY_ANY_NAME):
            self._whole = False
        defaults = function.__defaults__ or ()
        code = function.__code__
        names.update(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount])
        names.update(function.__kwdefaults__ or ())
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # empty yet
                continue
            for each in _functions(held):
                self._add(each)
        modules = [function.__globals__]
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType) and is_own(vars(value).get("__file__") or ""):
                modules.append(vars(value))
        for globals_ in modules:
            self._globals.setdefault(id(globals_), globals_)
            self._look_up(globals_, names | self._names if globals_ is not function.__globals__ else names)
        new = names - self._names
        self._names |= names
        for name in new:
            for each in self._by_name.pop(name, ()):
                self._add(each)

    def _look_up(self, globals_: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            value = globals_.get(name)
            if isinstance(value, type):
                self._add_kind(value)
            for each in _functions(value):
                self._add(each)


def _in_class(kind: type, name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions behind an attribute: of a method, a property, a partial, a cache around it."""
    for _ in range(8):
        kind = type(value)
        if kind is FunctionType:
            yield value
            return
        if kind in (MethodType, staticmethod, classmethod):
            value = value.__func__
        elif kind is property:
            value = value.fget
        elif kind in (partial, partialmethod, cached_property):
            value = value.func
        elif "functools" in (kind.__module__ or ""):  # lru_cache
            value = getattr(value, "__wrapped__", None)
        else:
            return


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
        elif isinstance(each, str) and each.isidentifier():  # getattr(self, "rows")
            yield each
