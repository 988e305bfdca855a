"""No module of the package gives a name at its top level twice: the second value would silently win."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_gpuopt"


def assigned(statements: list[ast.stmt]) -> Iterator[str]:
    """The names that statements at a module's top level assign; alternatives, in ``if`` and ``try``, are left out."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def twice(source: str) -> list[str]:
    return [name for name, times in Counter(assigned(ast.parse(source).body)).items() if times > 1]


def test_no_module_assigns_a_name_twice() -> None:
    found = {str(path.relative_to(PACKAGE)): twice(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert not {path: names for path, names in found.items() if names}


def test_a_second_assignment_is_found() -> None:
    assert twice("_POLL_S = 0.05\n_OTHER: int = 2\n_POLL_S: float = 1.0") == ["_POLL_S"]
    assert not twice("try:\n    import a\nexcept ImportError:\n    a = None\nb, c = 1, 2")
