"""What a program's text does not say for sure: code that sets names by computed ones, or runs in several ways."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from lightning_gpuopt.patch.sources import (
    FUNCTIONS,
    Edit,
    Range,
    Refusal,
    SourceFile,
    Sources,
    key_of,
    last_name,
    literal_of,
)

_CONFIGURED: Final = ("default_config_files", "default_env", "auto_envvar_prefix", "default_map", "context_settings")
_PLAIN_BASES: Final = ("object", "NamedTuple", "Namespace", "SimpleNamespace", "ABC", "Generic")
_CONSTRUCTORS: Final = ("__init__", "__post_init__")
_CHANGES_LIST: Final = ("append", "extend", "insert", "remove", "pop", "clear")


def refuse_hidden_stores(sources: Sources, edited: str) -> None:
    """Code that may set any name: ``exec`` in the edited file, a computed key of ``globals()`` or the like."""
    for file in sources.all:
        for node in file.nodes:
            is_exec = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "exec"
            if is_exec and file.name == edited:
                raise Refusal(f"`exec` at {file.at(node)} may set anything")
            by_name = isinstance(node, ast.Call) and last_name(node.func) == "__setattr__"
            if by_name and not any(literal_of(each) for each in node.args[:2]):  # type: ignore[attr-defined]
                raise Refusal(f"a computed name is set at {file.at(node)}")
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and key_of(node) is None:
                base = node.value
                is_call = isinstance(base, ast.Call) and last_name(base.func) in ("vars", "globals", "locals")
                if is_call or last_name(base) == "__dict__":
                    raise Refusal(f"a computed name is set at {file.at(node)}")


def refuse_other_options(sources: Sources) -> None:
    """Options whose values come from more than a default and the command line, or whose command line is changed."""
    for file in sources.all:
        for node in file.nodes:
            if isinstance(node, ast.keyword) and (
                node.arg in _CONFIGURED or (node.arg == "action" and literal_of(node.value) == ("config",))
            ):
                raise Refusal(f"options may get their values in another way, by `{node.arg}` at {file.at(node.value)}")
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and node.attr == "default":
                raise Refusal(f"the default of an option is set at {file.at(node)}")
            parent: Any = file.parents.get(node)
            is_argv = isinstance(node, ast.Attribute) and node.attr == "argv" and last_name(node.value) == "sys"
            changed = isinstance(parent, ast.Attribute) and parent.attr in _CHANGES_LIST
            set_there = isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load)
            if is_argv and (not isinstance(node.ctx, ast.Load) or changed or set_there):  # type: ignore[attr-defined]
                raise Refusal(f"the command line is changed at {file.at(node)}")
            of_command = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if of_command and node.func.attr in ("invoke", "callback", "main") and _is_click(sources):  # type: ignore[attr-defined]
                raise Refusal(f"a command is called at {file.at(node)}, beside its command line")


def _is_click(sources: Sources) -> bool:
    return any(
        isinstance(node, ast.alias) and node.name.partition(".")[0] == "click"
        for file in sources.all
        for node in file.nodes
    )


def refuse_called_again(sources: Sources, edit: Edit) -> None:
    """A literal inside a function that is called in several places: the edit would change each of them."""
    if edit.is_yaml:
        return
    file = sources.file(edit.file)
    at = next((each for each in file.nodes if hasattr(each, "end_lineno") and Range.of(each) == edit.range), None)
    function, seen = None if at is None else file.function_of(at), set[Any]()
    while function is not None and function not in seen:
        seen.add(function)
        calls = list(_calls_of(sources, file, function))
        if len(calls) > 1:
            places = ", ".join(where.at(call) for where, call in calls)
            name = getattr(function, "name", "lambda")
            raise Refusal(f"it is set in `{name}`, which is called at {places}: what each of them makes would change")
        if not calls:
            return
        file, call = calls[0]
        function = file.function_of(call)


def _calls_of(sources: Sources, file: SourceFile, function: Any) -> Iterator[tuple[SourceFile, ast.Call]]:
    """The calls of a function, method or, for a constructor, of its class, as far as a name tells."""
    if isinstance(function, ast.Lambda):
        return
    cls = file.class_of(function)
    is_init = cls is not None and function.name == "__init__"
    names = sources.constructed_as(cls) if is_init and cls is not None else {function.name}
    for each, call in sources.calls_of(names):
        found, _ = sources.definition(each, call.func)
        if cls is None or is_init:
            if found is function or (is_init and isinstance(found, ast.ClassDef) and found.name in names):
                yield each, call
        elif isinstance(call.func, ast.Attribute) and found is None:
            of_lightning = last_name(call.func.value).endswith("trainer")  # its methods have such names, too
            yield from () if of_lightning else ((each, call),)


def refuse_many_bases(sources: Sources, cls: ast.ClassDef) -> None:
    """Which class's attribute or constructor counts is not followed where a class has several bases."""
    for each in sources.classes:
        if (each is cls or cls.name in sources.bases(each)) and len(each.bases) > 1:
            raise Refusal(f"`{each.name}` has several bases: which of them gives the value is not followed")


def refuse_made_by_base(sources: Sources, file: SourceFile, cls: ast.ClassDef) -> None:
    """A class without a constructor of its own whose base has one: what that does with an argument is not followed."""
    bases = sources.bases(cls)
    own = [each for each in sources.classes if each.name in bases]
    strange = bases - {each.name for each in own} - set(_PLAIN_BASES)
    if strange or any(getattr(node, "name", "") in _CONSTRUCTORS for each in own for node in each.body):
        raise Refusal(f"`{cls.name}` at {file.at(cls)} is made by a base's constructor, which is not followed")


def refuse_overridden(sources: Sources, cls: ast.ClassDef, key: str) -> None:
    """A class attribute that a constructor's call may give instead, or that a related class has as well."""
    constructed = sources.constructed_as(cls)
    for each in sources.classes:
        related = each is not cls and (cls.name in sources.bases(each) or each.name in sources.bases(cls))
        if related and any(key in _bound_by(node) for node in each.body):
            raise Refusal(f"`{key}` of `{cls.name}` is set in `{each.name}`, too")
    if any(isinstance(each, FUNCTIONS) and each.name == "__init__" for each in cls.body):
        return
    for file, call in sources.calls_of(constructed):
        found, _ = sources.definition(file, call.func)
        is_made = isinstance(found, ast.ClassDef) and found.name in constructed
        if is_made and (call.args or any(given.arg in (None, key) for given in call.keywords)):
            raise Refusal(f"`{cls.name}` is made at {file.at(call)}, which may give `{key}`")


def _bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    return (
        {last_name(node) for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        else set()
    )
