"""What an expression is: a member of an object, a target, the default of a parameter, a call with certain arguments."""

from __future__ import annotations

import ast
from typing import Any, Final

from lightning_gpuopt.patch.sources import FUNCTIONS, Binding, SourceFile, key_of, last_name, literal_of

# positional parameters of torch's DataLoader (2.4 to 2.13); Lightning's Trainer has none
POSITIONAL: Final = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
# what an argument is that nobody gives; a loader without workers has no prefetch_factor, one with them 2
DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    "num_workers": (0,), "prefetch_factor": (None, 2), "pin_memory": (False,), "persistent_workers": (False,),
    "batch_size": (1, None), "drop_last": (False,), "timeout": (0,), "shuffle": (None, False),
    "accelerator": ("auto",), "strategy": ("auto",), "devices": ("auto",), "precision": (None,), "benchmark": (None,),
    "log_every_n_steps": (None, 50),
}  # fmt: skip


def member_of(node: ast.AST) -> tuple[ast.expr, str] | None:
    """An object, and the attribute or key of it that an expression is."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Subscript) and isinstance(key_of(node), str):
        return node.value, key_of(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key = literal_of(node.args[0])
        return (node.func.value, key[0]) if key and isinstance(key[0], str) else None
    return None


def imported_reads(file: SourceFile, name: str) -> list[ast.AST]:
    aliases = [node for node in file.nodes if isinstance(node, ast.alias) and node.name in (name, "*")]
    names = {name if each.name == "*" else each.asname or name for each in aliases}
    return [read for each in sorted(names) for read in file.reads(each)]


def first_of_tuple(file: SourceFile, node: ast.AST) -> ast.expr | None:
    """``args, rest = parser.parse_known_args()``: the call."""
    parent = file.parents[node]
    statement = file.parents.get(parent)
    if isinstance(parent, ast.Tuple) and parent.elts[0] is node and isinstance(statement, ast.Assign):
        value = statement.value
        return value if isinstance(value, ast.Call) and last_name(value.func) == "parse_known_args" else None
    return None


def is_gathered(bound: Binding) -> bool:
    return isinstance(bound.scope, FUNCTIONS) and bound.node is bound.scope.args.kwarg


def default_of_parameter(function: Any, name: str) -> tuple[Any, ...]:
    given = function.args
    pairs = [*zip(reversed([*given.posonlyargs, *given.args]), reversed(given.defaults), strict=False)]
    pairs += [*zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    found = next((value for each, value in pairs if each.arg == name), None)
    return literal_of(found) if found is not None else ()


def fits(call: ast.Call, values: dict[str, Any]) -> bool:
    """Whether a call's literals are an object's values, and what it leaves out the defaults, as far as is written."""
    given = {each.arg: each.value for each in call.keywords} | dict(zip(POSITIONAL, call.args, strict=False))
    if None in given or "batch_sampler" in given or any(isinstance(each, ast.Starred) for each in call.args):
        return True
    for name, value in values.items():
        allowed = (value,) if name in given else (*DEFAULTS.get(name, ()),)
        literal = literal_of(given[name]) if name in given else ()
        if (name not in given and value not in allowed) or (literal and literal[0] not in (*allowed, None)):
            return False
    return True


def targets_of(node: ast.stmt) -> list[ast.expr]:
    """What an assignment assigns to; of other statements nothing."""
    if isinstance(node, ast.Assign):
        return list(node.targets)
    return [node.target] if isinstance(node, ast.AnnAssign) else []
