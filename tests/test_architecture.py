"""The pages for developers say what is so: rooms, layers, contracts, files and names; and no import circle."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
NAME = "lightning_gpuopt"
PACKAGE = ROOT / NAME
PAGE = ROOT / "docs/dev/architecture.md"
DECISIONS = ROOT / "docs/dev/decisions.md"
GUIDE = ROOT / "CONTRIBUTING.md"
AT_THE_ROOT = {"__init__.py", "__main__.py", "_version.py"}
MOST_TERMS = 17

_PATH = re.compile(r"(?P<path>[\w./-]+(?:\.(?:py|md|toml|txt|yaml|yml|c)|/))(?:::(?P<name>\w+(?:\.\w+)*))?")


_ROW = re.compile(r"^\| `([\w/]+)/` \| (\S.*) \|$", re.MULTILINE)


def section(title: str) -> str:
    """A part of the page, without its heading."""
    text = PAGE.read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(body)


def rooms() -> list[str]:
    return re.findall(r"^\| `([\w/]+)/` \| \S.*\|$", section("The rooms"), re.MULTILINE)


def layers() -> list[set[str]]:
    lines = re.findall(r"^\d+\. (`.*`)$", section("Who imports whom"), re.MULTILINE)
    return [set(re.findall(r"`(\w+)`", line)) for line in lines]


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# ---- rooms ----


def test_every_folder_with_code_is_a_room_of_the_page_and_the_other_way_round() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in sources()} - {"."}
    assert len(rooms()) == len(set(rooms()))
    assert set(rooms()) == folders


def test_nothing_is_loose_at_the_root() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == AT_THE_ROOT


def test_a_room_says_in_one_line_what_it_is_for() -> None:
    rows = dict(_ROW.findall(section("The rooms")))
    for room in sorted(path.parent for path in sources() if path.name == "__init__.py"):
        first, *others = (ast.get_docstring(tree_of(room / "__init__.py")) or "").split("\n")
        assert first.endswith((".", "``.")), f"{room}: {first!r}"
        assert not others or not others[0]
        name = room.relative_to(PACKAGE).as_posix()
        if name in rows:
            assert rows[name].replace("`", "``").startswith(first)


# ---- private names ----


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def defined() -> set[str]:
    """Every name that this package defines, or sets as an attribute."""
    names = {"_replace", "_make"}  # of named tuples
    for node in (node for path in sources() for node in ast.walk(tree_of(path))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_names_of_others(path: Path) -> list[str]:
    """Where a file imports, or asks an object for, a private name that this package does not define."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined():
            if ast.unparse(node.value) not in STANDARD_LIBRARY:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(NAME):
            parts = [*(node.module or "").split("."), *(each.name for each in node.names)]
            found += [f"{path.name}:{node.lineno}: {part}" for part in parts if is_private(part)]
    return found


STANDARD_LIBRARY = {"os", "sys", "ctypes", "functools", "connection"}
DOORS = {"compat", "dali", "telemetry"}


def test_what_is_private_of_others_is_touched_behind_the_doors_only() -> None:
    outside = [path for path in sources() if path.relative_to(PACKAGE).parts[0] not in DOORS]
    found = {path.relative_to(PACKAGE).as_posix(): private_names_of_others(path) for path in outside}
    derived = {"loading/engine/iterator.py"}  # from the base of torch's iterators
    assert {name for name, names in found.items() if names} == derived, found


# ---- layers ----


def test_the_rooms_are_in_the_order_of_the_layers() -> None:
    rank = {room: number for number, layer in enumerate(layers()) for room in layer}
    ranks = [rank[room.partition("/")[0]] for room in rooms()]
    assert ranks == sorted(ranks)


def contracts(kind: str) -> list[dict[str, Any]]:
    """The contracts of this kind that the linter checks."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [each for each in settings["tool"]["importlinter"]["contracts"] if each["type"] == kind]


def test_the_layers_are_those_that_the_linter_checks() -> None:
    (contract,) = contracts("layers")
    assert layers() == [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]
    assert set.union(*layers()) == {room.partition("/")[0] for room in rooms()}


Contract = tuple[bool, frozenset[str], frozenset[str]]
"""Whether its files alone may import the libraries, rather than not at all; the files; the libraries."""


def contracts_of_the_page() -> set[Contract]:
    """What the sentence "Further contracts" says, clause by clause."""
    (sentence,) = re.findall(
        r"^Further contracts: (.*?)(?=\n\n|\Z)", section("Who imports whom"), re.MULTILINE | re.DOTALL
    )
    found = set()
    for clause in sentence.split(";"):
        spans = re.findall(r"`([^`]+)`", clause)
        files = frozenset(span for span in spans if "/" in span)
        assert clause.strip().startswith("only ") != ("do not import" in clause), clause
        found.add((clause.strip().startswith("only "), files, frozenset(spans) - files))
    return found


def file_of(module: str) -> str:
    """A module, or a package, as the page writes it."""
    path = "/".join(module.split(".")[1:])
    return f"{path}/" if (PACKAGE / path).is_dir() else f"{path}.py"


def test_the_further_contracts_are_those_that_the_linter_checks() -> None:
    checked: set[Contract] = set()
    for each in contracts("forbidden"):
        allowed = [line.partition(" -> ")[0] for line in each.get("ignore_imports", ())]
        assert not allowed or each["source_modules"] == [NAME]
        files = frozenset(map(file_of, allowed or each["source_modules"]))
        checked.add((bool(allowed), files, frozenset(each["forbidden_modules"])))
    assert contracts_of_the_page() == checked


def test_the_page_says_that_there_are_no_circles_as_the_linter_does() -> None:
    assert len(contracts("acyclic_siblings")) == 1
    assert "files do not import one another in a circle" in " ".join(section("Who imports whom").split())


# ---- what the pages name ----


def named(page: Path) -> list[tuple[str, str]]:
    """The paths in a page's code spans, each with the name that follows it; a name may be empty."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = (_PATH.fullmatch(span) for span in re.findall(r"`([^`\n]+)`", text))
    return sorted({(each["path"], each["name"] or "") for each in found if each is not None})


def in_tree(path: str) -> Path | None:
    return next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)


def defines(body: list[ast.stmt], name: str) -> bool:
    """Whether a body defines a name; of ``Class.method`` both."""
    first, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == first:
            return not rest or defines(node.body, rest)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not rest and any(isinstance(each, ast.Name) and each.id == first for each in targets):
            return True
    return False


@pytest.mark.parametrize("page", [PAGE, DECISIONS, GUIDE], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    pairs = named(page)
    assert len(pairs) > 15
    assert [path for path, _ in pairs if in_tree(path) is None] == []
    missing = []
    for path, name in pairs:
        found = in_tree(path)
        if name and found is not None and not defines(tree_of(found).body, name):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_command_of_the_guide_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = re.findall(r"(?:`|^\$ )make ([a-z -]+?)(?:`|  )", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert commands
    assert {target for command in commands for target in command.split()} <= targets


def test_the_glossary_is_short() -> None:
    terms = re.findall(r"^\| ([^|]+) \| ", section("Glossary"), re.MULTILINE)
    assert 0 < len(terms[1:]) <= MOST_TERMS


# ---- circles ----


def is_for_types(node: ast.stmt) -> bool:
    """Whether a statement is ``if TYPE_CHECKING:``."""
    if not isinstance(node, ast.If):
        return False
    return any(getattr(each, "id", getattr(each, "attr", "")) == "TYPE_CHECKING" for each in ast.walk(node.test))


def imports_in(node: ast.AST) -> Iterator[str]:
    """The modules that are imported anywhere below a node, also in functions, but for type checkers alone."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.If) and is_for_types(node):
        for each in node.orelse:
            yield from imports_in(each)
    else:
        for child in ast.iter_child_nodes(node):
            yield from imports_in(child)


def test_no_file_imports_itself_by_way_of_others() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources()}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        named_there = imports_in(tree_of(path))
        known = (each if each in modules else each.rpartition(".")[0] for each in named_there)
        graph[module] = {each for each in known if each in modules and each != module}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle
