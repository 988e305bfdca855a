"""The user's source files as a run has loaded them: text, syntax tree, who binds a name and who reads it."""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

from lightning_gpuopt.patch.notebook import NOTEBOOK
from lightning_gpuopt.watch.code_facts import CallSite, RunCode

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES: Final = (*FUNCTIONS, ast.ClassDef, *_COMPREHENSIONS)


class Refusal(Exception):
    """Why nothing is edited, as a sentence."""


@dataclass(frozen=True)
class Range:
    """Where a node is written: lines from 1, columns in bytes of UTF-8 from 0."""

    line: int
    column: int
    end_line: int
    end_column: int

    @staticmethod
    def of(node: Any) -> Range:
        return Range(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


@dataclass(frozen=True)
class Edit:
    """One change of one file: an argument of a call, a literal, or a value in YAML."""

    file: str
    range: Range  # of the call, or of what is replaced
    value: str  # as source text
    keyword: str = ""  # the argument to set; empty: what is at ``range`` is replaced
    positional: int | None = None  # index of the argument to replace, if it is not given by its name
    imports: str = ""  # the module from which the value comes
    item: bool = False  # the value is added to the list that the argument is
    renames: bool = False  # the value takes the place of the called name
    is_yaml: bool = False


@dataclass(frozen=True)
class Binding:
    """What gives a name its value in a scope."""

    scope: ast.AST  # a module, function, class, or comprehension
    node: ast.AST
    value: ast.expr | None = None  # of a plain assignment; None: in another way


class SourceFile:
    """One file; SyntaxError if it is no Python."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data = name, data
        self.tree = ast.parse(data)
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents.setdefault(child, node)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @property
    def text(self) -> str:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(self.data).readline)
        return self.data.decode(encoding)

    def outwards(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, the innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost function that a node is in the body of."""
        return next((each for each in self.outwards(node) if isinstance(each, FUNCTIONS)), None)

    def class_of(self, function: ast.AST) -> ast.ClassDef | None:
        """The class that a function is a method of."""
        parent = self.parents.get(function)
        return parent if isinstance(parent, ast.ClassDef) else None

    def calls_at(self, site: CallSite) -> list[ast.Call]:
        """The calls that may be the one that was under way: one, or on Python 3.10 all of the line."""
        if site.end is None:
            return [each for each in self.calls if each.lineno == site.line]
        return [each for each in self.calls if (each.end_lineno, each.end_col_offset) == (site.end, site.end_column)]

    def bindings(self, name: str, at: ast.AST) -> list[Binding]:
        """What binds a name that is read at a node: in the innermost scope that does; empty if none does."""
        around = list(self.outwards(at))
        child = at
        for index, scope in enumerate(around):
            skipped = isinstance(scope, ast.ClassDef) and any(isinstance(each, _SCOPES) for each in around[:index])
            of_outer = isinstance(scope, FUNCTIONS) and _is_outside_of_body(scope, child)
            if isinstance(scope, (*_SCOPES, ast.Module)) and not skipped and not of_outer:
                found = list(_bindings_in(scope, name))
                if found:
                    return found
            child = scope
        return []

    def is_declared_global(self, name: str) -> bool:
        """Whether a function may assign to this name of a scope around it."""
        return any(isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names for node in self.nodes)

    def reads(self, name: str, scope: ast.AST | None = None) -> list[ast.AST]:
        """Where a name is read, in one scope and those in it, or anywhere: as a variable."""
        return [
            node
            for node in (self.nodes if scope is None else ast.walk(scope))
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        ]

    def member_reads(self, name: str) -> list[ast.AST]:
        """Where an attribute or a key of this name is read."""
        return [node for node in self.nodes if _reads_member(node, name)]

    def has_text(self, text: str) -> bool:
        return any(isinstance(node, ast.Constant) and node.value == text for node in self.nodes)

    def stores(self, name: str) -> list[ast.AST]:
        """Where an attribute or a key of this name is set, or may be."""
        return [node for node in self.nodes if _may_set_member(node, name)]

    def changes_of(self, name: str) -> list[ast.AST]:
        """Where the dict or object of this name may get members that are not named there."""
        return [node for node in self.nodes if _may_change(node, name)]

    def name_at_end(self, name: str) -> ast.Name:
        """A name as if it was read at the end of the module."""
        node = ast.Name(name, ast.Load(), lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
        self.parents[node] = self.tree
        return node

    def at(self, node: Any) -> str:
        """A place, as people write it: ``train.py:12``."""
        return self.at_line(node.lineno)

    def at_line(self, line: int) -> str:
        if self.name == NOTEBOOK:
            return f"`{self.text.splitlines()[line - 1].strip()}`"
        return f"{Path(self.name).name}:{line}"


class Sources:
    """All source files of a run; a file that has changed since raises Refusal when it is asked for."""

    def __init__(self, code: RunCode) -> None:
        self._code = code
        self._files: dict[str, SourceFile] = {}

    def file(self, name: str) -> SourceFile:
        if name not in self._files:
            self._files[name] = self._read(name)
        return self._files[name]

    def checked(self, name: str) -> bytes:
        """A file's bytes, which are those of the run."""
        if name in self._code.cells:
            return self._code.cells[name].encode()
        try:
            data = Path(name).read_bytes()
            if hashlib.sha256(data).hexdigest() != self._code.files[name]:
                raise Refusal(f"{name} has changed since the run: run it again")
        except KeyError:
            raise Refusal(f"{name} is not one of the run's own source files") from None
        except OSError as error:
            raise Refusal(f"{name} cannot be read: {error.strerror}") from None
        return data

    def _read(self, name: str) -> SourceFile:
        try:
            return SourceFile(name, self.checked(name))
        except (SyntaxError, ValueError):
            raise Refusal(f"{name} is not Python that can be read here") from None

    @property
    def all(self) -> list[SourceFile]:
        """Every file of the run that is Python, by which a name could be read; each module once."""
        names = [name for name in self._code.files if name.endswith(".py")]
        return [self.file(name) for name in (*names, *self._code.cells)]

    def module(self, name: str, importer: SourceFile, level: int = 0) -> SourceFile | None:
        """The file of an imported module; None if it is not one of the user's."""
        if level:
            own = next((key for key, file in self._code.modules.items() if file == importer.name), "")
            package = own if Path(importer.name).name == "__init__.py" else own.rpartition(".")[0]
            if own == "__main__":  # of ``python -m``: the package is the one whose folder the file is in
                beside = str(Path(importer.name).with_name("__init__.py"))
                package = next((key for key, file in self._code.modules.items() if file == beside), "")
                if not package:
                    return None
            for _ in range(level - 1):
                package = package.rpartition(".")[0]
            name = f"{package}.{name}".strip(".")
        file = self._code.modules.get(name)
        return self.file(file) if file is not None else None

    def module_of(self, file: SourceFile, alias: ast.alias) -> tuple[SourceFile | None, str | None]:
        """The module that an import names, and the name in it; None for the module itself."""
        statement = file.parents[alias]
        if isinstance(statement, ast.Import):
            dotted = alias.asname is None and "." in alias.name
            return None if dotted else self.module(alias.name, file), None
        assert isinstance(statement, ast.ImportFrom)
        inner = ".".join(filter(None, (statement.module, alias.name)))
        as_module = self.module(inner, file, statement.level)
        if as_module is not None:
            return as_module, None
        return self.module(statement.module or "", file, statement.level), alias.name

    def definition(self, file: SourceFile, func: ast.AST) -> tuple[Any, SourceFile]:
        """The user's class or function that a name stands for, and its file; None for others."""
        if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name):
            bound = file.bindings(func.value.id, func)
            if len(bound) == 1 and isinstance(bound[0].node, ast.alias):
                module, name = self.module_of(file, bound[0].node)
                if module is not None and name is None:
                    return self.definition(module, module.name_at_end(func.attr))
        bound = file.bindings(func.id, func) if isinstance(func, ast.Name) else []
        if len(bound) != 1:
            return None, file
        if isinstance(bound[0].node, ast.alias):
            module, name = self.module_of(file, bound[0].node)
            return self.definition(module, module.name_at_end(name)) if module is not None and name else (None, file)
        return bound[0].node, file

    def constructed_as(self, cls: ast.ClassDef) -> set[str]:
        """The names of a class, and of those that inherit its constructor."""
        names, before = {cls.name}, 0
        while len(names) != before:
            before = len(names)
            for each in self.classes:
                has_own = any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in each.body)
                if not has_own and any(last_name(base) in names for base in each.bases):
                    names.add(each.name)
        return names

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """All classes of the user's."""
        return [node for file in self.all for node in file.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def _aliases(self) -> list[tuple[str, str]]:
        found = (node for file in self.all for node in file.nodes if isinstance(node, ast.alias))
        return [(each.name.rpartition(".")[2], each.asname) for each in found if each.asname is not None]

    def known_as(self, names: set[str]) -> set[str]:
        """Names, and those under which other files import what they name, also by way of a third file."""
        known, before = set(names), 0
        while len(known) != before:
            before = len(known)
            known |= {alias for name, alias in self._aliases if name in known}
        return known

    def calls_of(self, names: set[str]) -> list[tuple[SourceFile, ast.Call]]:
        """The calls of functions, methods and classes that may be those with these names."""
        known = self.known_as(names)
        return [(file, call) for file in self.all for call in file.calls if last_name(call.func) in known]

    def bases(self, cls: ast.ClassDef) -> set[str]:
        """The names of a class's bases, of theirs, and so on."""
        names, new = set[str](), {last_name(base) for base in cls.bases}
        while new:
            names |= new
            new = {base for name in new for base in self._bases.get(name, ())} - names
        return names

    @cached_property
    def _bases(self) -> dict[str, set[str]]:
        """The names of the direct bases of all classes of a name."""
        found: dict[str, set[str]] = {}
        for each in self.classes:
            found.setdefault(each.name, set()).update(last_name(base) for base in each.bases)
        return found


def last_name(expression: ast.AST) -> str:
    """The last part of a dotted name: ``DataLoader`` of ``torch.utils.data.DataLoader``; empty for anything else."""
    if isinstance(expression, ast.Name):
        return expression.id
    return expression.attr if isinstance(expression, ast.Attribute) else ""


def literal_of(node: ast.AST) -> tuple[Any, ...]:
    """A literal number, string, flag or None, in a tuple; empty if it is something else."""
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) in (bool, int, float, str)):
        return (node.value,)
    return ()


def shortened(node: ast.AST) -> str:
    """An expression's text, on one line and not too long."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def key_of(node: ast.Subscript) -> Any:
    """A subscript's key, if it is a literal."""
    return node.slice.value if isinstance(node.slice, ast.Constant) else None


def _reads_member(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Load):
        return node.attr == name if isinstance(node, ast.Attribute) else key_of(node) == name
    if isinstance(node, ast.MatchClass):
        return name in node.kwd_attrs
    readers = ("get", "getattr", "pop", "attrgetter", "itemgetter")
    is_call = isinstance(node, ast.Call) and last_name(node.func) in readers
    return is_call and any(isinstance(each, ast.Constant) and each.value == name for each in node.args)  # type: ignore[attr-defined]


def _may_set_member(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        return node.attr == name if isinstance(node, ast.Attribute) else key_of(node) == name
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("setattr", "__setattr__", "setdefault", "update"):
        return False
    if last_name(node.func) == "setattr":
        return len(node.args) < 2 or literal_of(node.args[1]) in ((), (name,))
    written = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    hidden = isinstance(node.func, ast.Attribute) and (
        "__dict__" in (text := ast.unparse(node.func)) or "vars(" in text
    )
    return hidden or name in written or any(each.arg == name for each in node.keywords)


def _may_change(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changes = node.func.attr in ("update", "setdefault", "pop", "clear", "merge_with")
        return changes and root_of(node.func.value) == name
    is_set = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and key_of(node) is None
    return is_set and root_of(node.value) == name  # type: ignore[attr-defined]


def root_of(expression: ast.AST) -> str:
    """The name that an expression of attributes and keys begins with: ``args`` of ``vars(args)["a"].b``."""
    while not isinstance(expression, ast.Name):
        if isinstance(expression, (ast.Attribute, ast.Subscript)):
            expression = expression.value
        elif isinstance(expression, ast.Call) and expression.args:
            expression = expression.args[0]
        else:
            return ""
    return expression.id


def _is_outside_of_body(function: Any, child: ast.AST) -> bool:
    """Whether a function's child is evaluated where the function is defined: a decorator, a default."""
    return child is not function.body if isinstance(function, ast.Lambda) else child not in function.body


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of scopes in it, of which only the first node comes."""
    queue = list(ast.iter_child_nodes(scope))
    while queue:
        node = queue.pop(0)
        yield node
        if not isinstance(node, _SCOPES):
            queue += ast.iter_child_nodes(node)


def _bindings_in(scope: ast.AST, name: str) -> Iterator[Binding]:
    if isinstance(scope, FUNCTIONS):
        for each in parameters(scope):
            if each.arg == name:
                yield Binding(scope, each)
    plain: dict[ast.AST, ast.expr | None] = {}
    for node in _inside(scope):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            plain[node.targets[0]] = node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            plain[node.target] = node.value
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            plain[node.optional_vars] = node.context_expr
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            if node in plain or not _is_bare_annotation(scope, node):
                yield Binding(scope, node, plain.get(node))
        elif _binds_otherwise(node, name):
            yield Binding(scope, node)
    if not isinstance(scope, _COMPREHENSIONS):  # ``:=`` in a comprehension binds in the scope around it
        for node in ast.walk(scope):
            if isinstance(node, ast.NamedExpr) and node.target.id == name:
                yield Binding(scope, node)


def _binds_otherwise(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.alias):
        return (node.asname or node.name.partition(".")[0]) == name
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
    return isinstance(node, kinds) and node.name == name


def _is_bare_annotation(scope: ast.AST, name: ast.Name) -> bool:
    return any(isinstance(node, ast.AnnAssign) and node.target is name for node in _inside(scope))


def parameters(function: Any) -> list[ast.arg]:
    given = function.args
    more = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *more]
