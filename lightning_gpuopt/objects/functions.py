"""What functions reach: the variables that their code names, and of a Lightning object what its method reads."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

from lightning_gpuopt.objects.classes import (
    FRAMEWORK_NAMES,
    LIGHTNING,
    dict_of,
    function_in,
    is_in,
    is_of,
    is_users_own,
)

_OF_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "SUPER_ATTR", "SUPER_METHOD")
_MISSING: Final = object()


Read: TypeAlias = tuple[dict[str, Any], str]
"""A variable that a function reads: a module's namespace, and the name in it."""


def is_users(function: FunctionType) -> bool:
    """Whether a function was written in the user's program; what decorates it may have copied another's module."""
    return is_users_own(function.__globals__.get("__name__"))


def reads_of(function: FunctionType) -> list[Read]:
    """The globals that a function's code names, and what it names of the user's modules; nothing installed."""
    known, names = function.__globals__, names_in(function.__code__)
    variables, imports = _variables_of(function.__code__)
    found: list[Read] = [(known, name) for name in variables if name in known]
    modules = [known[name] for _, name in found if type(known[name]) is ModuleType]
    modules += [each for name in imports for each in _imported(name, known)]
    met = {id(known)}
    while modules:  # they may import one another
        module = modules.pop()
        inside = vars(module)
        if id(inside) not in met and is_users_own(module.__name__):
            met.add(id(inside))
            found += [(inside, name) for name in sorted(names & inside.keys())]
            modules += [inside[name] for name in names & inside.keys() if type(inside[name]) is ModuleType]
    return [each for each in found if _may_change(each[0][each[1]])]


def _imported(name: str, known: dict[str, Any]) -> Iterator[ModuleType]:
    """What ``import`` inside a function refers to, if it was imported already."""
    for full in (name, f"{known.get('__package__')}.{name}"):
        if isinstance(module := sys.modules.get(full), ModuleType):
            yield module


def _may_change(value: Any) -> bool:
    kind = type(value)
    if kind is ModuleType:
        return False
    return not (issubclass(kind, (type, FunctionType)) and not is_users_own(value.__module__))


@cache
def names_in(code: Any) -> frozenset[str]:
    """The names that a function's code, and the functions in it, read; of what has no code none."""
    inner = (each for each in getattr(code, "co_consts", ()) if isinstance(each, CodeType))
    return frozenset(getattr(code, "co_names", ())).union(*map(names_in, inner))


@cache
def _variables_of(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of global variables that code, and the functions in it, read, and of modules that it imports."""
    own = [(each.opname, each.argval) for each in dis.get_instructions(code)]
    variables = [name for step, name in own if step in ("LOAD_GLOBAL", "LOAD_NAME")]
    imports = [name for step, name in own if step == "IMPORT_NAME"]
    for each in code.co_consts:
        if isinstance(each, CodeType):
            variables += _variables_of(each)[0]
            imports += _variables_of(each)[1]
    return tuple(dict.fromkeys(variables)), tuple(dict.fromkeys(imports))


def cells_of(function: FunctionType) -> dict[str, Any]:
    """The variables of a function's closure; without those that have no value yet."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it is empty
            continue
    return found


def kept_by(function: FunctionType) -> dict[str, Any]:
    """What a function keeps: variables of its closure, defaults, attributes."""
    code, defaults = function.__code__, function.__defaults__ or ()
    by_place = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    named = dict(zip(by_place, defaults, strict=False))
    return {**cells_of(function), **named, **(function.__kwdefaults__ or {}), **vars(function)}


class OwnReads(NamedTuple):
    """What a method of a Lightning object reads of it.

    Attributes:
        owner: the object.
        functions: the method, and those that it calls.
        names: of attributes.
    """

    owner: Any
    functions: list[Any]
    names: frozenset[str]

    def values(self) -> dict[str, Any]:
        """What it reads, as it is now."""
        held = dict_of(self.owner) or {}
        parts = [held, *(held.get(each) or {} for each in ("_modules", "_parameters", "_buffers"))]
        found = {name: each[name] for each in parts for name in self.names & each.keys()}
        for name in self.names - found.keys():
            item = inspect.getattr_static(type(self.owner), name, _MISSING)
            if item is not _MISSING and function_in(item) is None and not hasattr(type(item), "__get__"):
                found[name] = item
        for name in self.names & {"current_epoch", "global_step"}:
            try:
                found[name] = getattr(self.owner, name, None)
            except RuntimeError:  # it has no Trainer
                found[name] = None
        return found


def own_reads(method: MethodType) -> OwnReads | None:
    """The attributes that a method of a Lightning object, and what it calls of that, reads; None: maybe all."""
    owner, function = method.__self__, method.__func__
    if not is_of(type(owner), LIGHTNING) or not isinstance(function, FunctionType):
        return None
    todo, names, functions = [function], set[str](), list[Any]()
    while todo:
        functions.append(todo.pop())
        for name in names_in(functions[-1].__code__) - names:
            names.add(name)
            inner = function_in(inspect.getattr_static(type(owner), name, None))
            if inner is not None and not is_in(inner.__module__, LIGHTNING):
                todo.append(inner)
    if names & {"trainer", "__dict__"} or any(passes_itself_on(each) for each in functions):
        return None
    if "hparams" in names:
        names.add("_hparams")
    return OwnReads(owner, functions, frozenset(names - FRAMEWORK_NAMES))


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
