"""Who else reads what was followed to a literal: an edit of it would change that as well."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from lightning_gpuopt.patch.sources import (
    FUNCTIONS,
    Refusal,
    SourceFile,
    Sources,
    key_of,
    last_name,
    literal_of,
    parameters,
)

# where what a container holds gets another name, or becomes part of another one
_PASSES_ON: Final = (
    *(ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.Return, ast.Yield, ast.Lambda, ast.IfExp),
    *(ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.Starred, ast.arguments),
)
_COPIES: Final = ("vars", "asdict", "astuple", "dict", "list", "copy", "deepcopy", "replace", "partial", "update")


class Reads:
    """The reads on the way to one literal, and all others of the same names and members."""

    def __init__(self, sources: Sources) -> None:
        self.followed: set[ast.AST] = set()
        self.unpacked = False  # a ``**`` has the value: nobody reads its key
        self._sources = sources
        self._others: list[tuple[SourceFile, ast.AST]] = []
        self._given: set[ast.AST] = set()  # the arguments that were looked at

    @property
    def others(self) -> list[str]:
        """Where somebody else reads it."""
        return list(dict.fromkeys(file.at(node) for file, node in self._others if node not in self.followed))

    def note(self, own: ast.AST, reads: Sequence[ast.AST], file: SourceFile) -> None:
        self.followed.add(own)
        self._others += [(file, each) for each in reads]

    def note_whole(self, own: ast.AST, reads: Sequence[ast.AST], file: SourceFile, path: Sequence[str]) -> None:
        """Reads of a container by which the value at a path may be read or set, too."""
        self.note(own, [each for each in reads if self._may_reach(file, each, path)], file)

    def _may_reach(self, file: SourceFile, node: ast.AST, path: Sequence[str]) -> bool:
        parent = file.parents.get(node)
        if not path:
            return True
        if isinstance(parent, (ast.Subscript, ast.Attribute)) and parent.value is node:
            key = key_of(parent) if isinstance(parent, ast.Subscript) else parent.attr
            if key == path[0]:
                return not isinstance(parent.ctx, ast.Load) or (
                    self.unpacked and self._may_reach(file, parent, path[1:])
                )
            return key in (None, "items", "values", "copy", "update", "pop", "setdefault", "__dict__")
        whole = isinstance(parent, ast.keyword) and parent.arg is None
        call = file.parents.get(parent) if isinstance(parent, ast.keyword) else parent
        takes = isinstance(call, ast.Call) and last_name(call.func) in _COPIES
        passed_on = whole or takes or isinstance(parent, _PASSES_ON)
        return passed_on or self.unpacked or self._is_used_whole(file, node, path)

    def _is_used_whole(self, file: SourceFile, node: ast.AST, path: Sequence[str]) -> bool:
        """Whether a function of the user's that is given a container may read or set what is at a path of it."""
        keyword = file.parents.get(node)
        call = file.parents.get(keyword) if isinstance(keyword, ast.keyword) else keyword
        if not isinstance(call, ast.Call) or call.func is node or node in self._given:
            return False
        self._given.add(node)
        found, where = self._sources.definition(file, call.func)
        if isinstance(found, ast.ClassDef):
            found = next((each for each in found.body if getattr(each, "name", "") == "__init__"), None)
        called = [(where, found)] if found is not None else self._methods(last_name(call.func))
        for where, each in called:
            names = [parameter.arg for parameter in parameters(each)] if isinstance(each, FUNCTIONS) else []
            added_to = [last_name(inner.target) for inner in ast.walk(each) if isinstance(inner, ast.AugAssign)]
            if not set(added_to).isdisjoint(names):
                return True
            if any(self._may_reach(where, read, path) for name in names for read in where.reads(name, each)):
                return True
        return False

    def _methods(self, name: str) -> list[tuple[SourceFile, ast.AST]]:
        """The methods of the user's that have this name."""
        found = [(file, node) for file in self._sources.all for node in file.nodes if getattr(node, "name", "") == name]
        return [(file, node) for file, node in found if file.class_of(node) is not None]

    def refuse_named_in_text(self, name: str, *, constant: bool = False) -> None:
        """A name that code may read as a text: ``getattr(it, name)``; with ``constant`` such a text itself is seen."""
        for file in self._sources.all:
            for call in (each for each in file.nodes if isinstance(each, ast.Call)):
                if last_name(call.func) in ("getattr", "attrgetter", "methodcaller") and call.args:
                    text = literal_of(call.args[min(1, len(call.args) - 1)])
                    if text == () and any(each.has_text(name) for each in self._sources.all):
                        raise Refusal(f"`{name}` may be read at {file.at(call)}, where the name is computed")
                    if text and text[0] == name and not constant:
                        raise Refusal(f"`{name}` is read at {file.at(call)} in a way that is not followed")
