"""What functions reach: the variables that their code names, and of a Lightning object what its method reads."""

from __future__ import annotations

import dis
import inspect
import sys
from functools import cache
from itertools import chain, pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, TypeAlias

from lightning_gpuopt.objects import classes
from lightning_gpuopt.objects.classes import dict_of, function_in, is_users_own

_OF_ATTRIBUTES: Final = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "SUPER_ATTR", "SUPER_METHOD")
_MISSING: Final = object()

Read: TypeAlias = tuple[dict[str, Any], str]  # a variable: a module's namespace, and the name in it


def is_users(function: FunctionType) -> bool:
    """Whether a function was written in the user's program; what decorates it may have copied another's module."""
    return is_users_own(function.__globals__.get("__name__"))


def reads_of(function: FunctionType) -> list[Read]:
    """The globals that a function's code names, and what it names of the user's modules; nothing installed."""
    known, names = function.__globals__, names_in(function.__code__)
    variables, imports = _variables_of(function.__code__)
    found: list[Read] = [(known, name) for name in variables if name in known]
    modules = [known[name] for _, name in found]
    modules += [sys.modules.get(each) for name in imports for each in (name, f"{known.get('__package__')}.{name}")]
    met = {id(known)}
    while modules:  # they may import one another
        module = modules.pop()
        if type(module) is ModuleType and id(inside := vars(module)) not in met and is_users_own(module.__name__):
            met.add(id(inside))
            found += [(inside, name) for name in sorted(names & inside.keys())]
            modules += [inside[name] for name in names & inside.keys()]
    return [each for each in found if _may_change(each[0][each[1]])]


def _may_change(value: Any) -> bool:
    if issubclass(type(value), (type, FunctionType)):
        return is_users_own(value.__module__)
    return type(value) is not ModuleType


@cache
def _codes_in(code: Any) -> tuple[Any, ...]:
    """Code, and that of the functions in it; what has no code names nothing."""
    inner = [each for each in getattr(code, "co_consts", ()) if isinstance(each, CodeType)]
    return (code, *chain.from_iterable(map(_codes_in, inner)))


@cache
def names_in(code: Any) -> frozenset[str]:
    return frozenset(name for each in _codes_in(code) for name in getattr(each, "co_names", ()))


@cache
def _variables_of(code: CodeType) -> tuple[list[str], list[str]]:
    """The names of global variables that code, and the functions in it, read, and of modules that it imports."""
    steps = [(step.opname, step.argval) for each in _codes_in(code) for step in dis.get_instructions(each)]
    variables = dict.fromkeys(name for step, name in steps if step in ("LOAD_GLOBAL", "LOAD_NAME"))
    return list(variables), list(dict.fromkeys(name for step, name in steps if step == "IMPORT_NAME"))


def kept_by(function: FunctionType) -> dict[str, Any]:
    """What a function keeps: variables of its closure, defaults, attributes."""
    code, defaults = function.__code__, function.__defaults__ or ()
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # it is empty
            continue
    by_place = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {**found, **dict(zip(by_place, defaults, strict=False)), **(function.__kwdefaults__ or {}), **vars(function)}


class OwnReads(NamedTuple):
    """What a method of a Lightning object, and those that it calls, read of the object."""

    owner: Any
    functions: list[Any]
    names: frozenset[str]

    def values(self) -> dict[str, Any]:
        held = dict_of(self.owner) or {}
        parts = [held, *(held.get(each) or {} for each in ("_modules", "_parameters", "_buffers"))]
        found = {name: each[name] for each in parts for name in self.names & each.keys()}
        for name in self.names - found.keys():
            item = inspect.getattr_static(type(self.owner), name, _MISSING)
            if item is not _MISSING and function_in(item) is None and not hasattr(type(item), "__get__"):
                found[name] = item
        return found


def own_reads(method: MethodType) -> OwnReads | None:
    """The attributes that a method of a Lightning object, and what it calls of that, reads; None: maybe all."""
    owner, function = method.__self__, method.__func__
    if not classes.is_of(type(owner), classes.LIGHTNING) or not isinstance(function, FunctionType):
        return None
    todo, names, functions = [function], set[str](), list[Any]()
    while todo:
        functions.append(todo.pop())
        for name in names_in(functions[-1].__code__) - names:
            names.add(name)
            inner = function_in(inspect.getattr_static(type(owner), name, None))
            if inner is not None and not classes.is_in(inner.__module__, classes.LIGHTNING):
                todo.append(inner)
    of_training = names & {"trainer", "current_epoch", "global_step", "__dict__"}
    if of_training or any(passes_itself_on(each.__code__) for each in functions):
        return None
    if "hparams" in names:
        names.add("_hparams")
    return OwnReads(owner, functions, frozenset(names - classes.FRAMEWORK_NAMES))


@cache
def passes_itself_on(code: CodeType, name: str | None = None) -> bool:
    """Whether code uses its first argument, or this variable, for more than attributes that it names."""
    if name is None and not code.co_argcount:
        return True
    name = name or code.co_varnames[0]
    # a cell is loaded as a whole only to make a closure, whose own code is looked at below
    loads = "LOAD_DEREF" if name in code.co_cellvars + code.co_freevars else "LOAD_FAST"
    steps = (each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG")
    for step, following in pairwise(steps):
        # Python 3.13 loads two variables at once
        *others, last = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        passes = name in others or (last == name and not following.opname.endswith(_OF_ATTRIBUTES))
        if passes and loads in step.opname:
            return True
    inner = (each for each in code.co_consts if isinstance(each, CodeType) and name in each.co_freevars)
    return any(passes_itself_on(each, name) for each in inner)
