"""Settings that come from outside of the code: options of a command line, the environment, YAML."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.patch.sources import Edit, Range, Refusal, SourceFile, key_of, last_name, literal_of
from lightning_gpuopt.watch.code_facts import RunCode

_SPECIAL: Final = ("envvar", "callback", "multiple", "is_flag", "flag_value", "expose_value", "default_map")


def variable(node: ast.AST) -> tuple[str, ast.expr | None] | None:
    """The environment's variable that an expression reads, and its default."""
    if isinstance(node, ast.Subscript) and last_name(node.value) == "environ" and isinstance(key_of(node), str):
        return key_of(node), None
    if isinstance(node, ast.Call) and node.args and (name := literal_of(node.args[0])):
        of_environ = isinstance(node.func, ast.Attribute) and last_name(node.func.value) == "environ"
        if last_name(node.func) == "getenv" or (of_environ and last_name(node.func) == "get"):
            return str(name[0]), node.args[1] if len(node.args) > 1 else None
    return None


# ---- options ----


def destination(call: ast.AST) -> str | None:
    """The name under which an option's value is found: ``dest``, or its first long option."""
    if not isinstance(call, ast.Call):
        return None
    dest = next((each.value for each in call.keywords if each.arg == "dest"), None)
    if dest is not None:
        return str(dest.value) if isinstance(dest, ast.Constant) else None
    names = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
    plain = [each for each in names if not each.startswith("-")]
    long = [each for each in names if each.startswith("--")] or names
    return plain[-1] if plain else long[0].lstrip("-").replace("-", "_") if long else None


def is_command(decorator: ast.AST) -> bool:
    """Whether a decorator is one of click's, which calls the function with its options."""
    return isinstance(decorator, ast.Call) and last_name(decorator.func) in ("command", "option", "argument")


def refuse_special(file: SourceFile, call: ast.Call) -> None:
    if any(each.arg in _SPECIAL for each in call.keywords):
        raise Refusal(f"the option at {file.at(call)} has more than a default")


def option_of(files: Sequence[SourceFile], key: str) -> tuple[SourceFile, ast.Call]:
    """The ``add_argument`` that declares an argument."""
    found = []
    for file in files:
        for node in (each for each in file.nodes if isinstance(each, ast.Call)):
            if last_name(node.func) == "set_defaults" and any(each.arg in (None, key) for each in node.keywords):
                raise Refusal(f"`{key}` may get its default at {file.at(node)}")
            if last_name(node.func) == "add_argument" and destination(node) == key:
                found.append((file, node))
    if len(found) != 1:
        where = f"at {', '.join(file.at(node) for file, node in found)}" if found else "nowhere"
        raise Refusal(f"the argument `{key}` is declared {where}: expected one place")
    return found[0]


def default_of(code: RunCode, file: SourceFile, call: ast.Call, value: Any) -> ast.expr:
    """An option's default, which the command line must not have overridden."""
    flags = [
        str(each.value) for each in call.args if isinstance(each, ast.Constant) and str(each.value).startswith("-")
    ]
    add = f"{max(flags, key=len, default='')} {value}"
    default = next((each.value for each in call.keywords if each.arg == "default"), None)
    if any(_is_given(argument, flags) for argument in code.arguments):
        raise Refusal(f"the default at {file.at(call)} is overridden on the command line: give {add} there")
    kind = next((each.value for each in call.keywords if each.arg == "type"), None)
    if kind is not None and last_name(kind) not in ("int", "float", "str"):
        raise Refusal(f"the option at {file.at(call)} has a type of its own: add {add} to the command line")
    if default is None or not flags or any(each.arg == "action" for each in call.keywords):
        raise Refusal(
            f"the option at {file.at(call)} has no default that is written there: add {add} to the command line"
        )
    return default


def _is_given(argument: str, flags: Sequence[str]) -> bool:
    """Whether an argument of the command line is one of these options, abbreviated or with its value."""
    if argument.startswith("@"):  # a file of arguments
        return True
    name = argument.partition("=")[0]
    for flag in flags:
        if flag.startswith("--") and len(name) > 2 and flag.startswith(name):
            return True
        combined = argument.startswith("-") and not argument.startswith("--") and flag[1:2] in argument[1:]
        if not flag.startswith("--") and combined:
            return True
    return False


# ---- YAML ----


def reads_yaml(call: ast.Call) -> bool:
    loads = isinstance(call.func, ast.Attribute) and re.fullmatch(r"(safe_|full_|unsafe_)?load", call.func.attr)
    return bool(loads) and last_name(call.func.value) in ("yaml", "OmegaConf")  # type: ignore[attr-defined]


def opened(code: RunCode, file: SourceFile, call: ast.Call) -> Path:
    """The file that a loader of YAML reads: by a literal, an ``open()`` of one, or a path beside the script."""
    node: Any = call.args[0] if call.args else None
    if isinstance(node, ast.Name):
        bound = file.bindings(node.id, node)
        node = bound[0].value if len(bound) == 1 else None
    while isinstance(node, ast.Call):
        is_method = isinstance(node.func, ast.Attribute) and last_name(node.func) in ("open", "read_text")
        node = node.func.value if is_method else node.args[0] if node.args else None  # type: ignore[attr-defined]
    beside = r"(pathlib\.)?Path\(__file__\)\.parent"
    if (
        isinstance(node, ast.BinOp)
        and re.fullmatch(beside, ast.unparse(node.left))
        and (name := literal_of(node.right))
    ):
        return Path(file.name).parent / str(name[0])
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        if not Path(node.value).is_absolute() and any(last_name(each) == "chdir" for each in file.nodes):
            raise Refusal(f"which file is read at {file.at(call)} depends on the folder, which the program changes")
        return Path(code.folder) / node.value
    raise Refusal(f"which file is read at {file.at(call)} is computed")


def in_yaml(code: RunCode, files: Sequence[Path], paths: Sequence[tuple[str, ...]], now: Any, value: Any) -> Edit:
    """The edit of the scalar at one of these paths in one of these files."""
    from yaml import ScalarNode, YAMLError, compose, safe_load  # type: ignore[import-untyped]

    found = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            root = compose(text)
            found += [(file, text, node) for path in paths if (node := _node_at(root, path)) is not None]
        except (OSError, ValueError, YAMLError):
            raise Refusal(f"{file} cannot be read as YAML") from None
    if len(found) != 1 or not isinstance(found[0][2], ScalarNode):
        raise Refusal(f"`{'.'.join(paths[0])}` is not written in {', '.join(each.name for each in files)}, once")
    file, text, node = found[0]
    if str(file) not in code.files or re.search(r"[&*]\w|<<|\$\{|^defaults:", text, re.MULTILINE):
        raise Refusal(f"{file.name} was not there when the run began, or has anchors or references")
    start, end = node.start_mark, node.end_mark
    raw = text[start.index : end.index]
    try:
        read = safe_load(raw)
    except YAMLError:
        raise Refusal(f"{raw} at {file.name}:{start.line + 1} is no plain value") from None
    if read != now or type(read) is not type(now):
        raise Refusal(f"{raw} is written at {file.name}:{start.line + 1}, and the run has used {now!r}")
    written = {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    place = Range(start.line + 1, len(text.splitlines()[start.line][: start.column].encode()), end.line + 1, 0)
    return Edit(
        str(file), Range(place.line, place.column, place.line, place.column + len(raw.encode())), written, is_yaml=True
    )


def _node_at(root: Any, path: Sequence[str]) -> Any:
    node = root
    for key in path:
        pairs = node.value if node is not None and node.id == "mapping" else ()
        node = next((value for each, value in pairs if each.value == key), None)
    return node


# ---- LightningCLI ----


def by_lightning_cli(code: RunCode) -> bool:
    """Whether the Trainer was made by LightningCLI."""
    return code.trainer is not None and any(each.file.endswith("/pytorch/cli.py") for each in code.trainer.calls)


def of_lightning_cli(code: RunCode, bases: Sequence[str], key: str, now: Any, value: Any) -> Edit:
    """An argument that LightningCLI gives to a class: in the configuration of the run, or on its command line."""
    group = "data" if any("DataModule" in each for each in bases) else "model"
    option, arguments = f"--{group}.{key}", code.arguments
    if any(each.partition("=")[0] in (option, f"--{group}.init_args.{key}") for each in arguments):
        raise Refusal(f"the command line gives {option}: give {option} {value} there")
    add = f"add {option} {value} to the command line"
    configs = [
        Path(code.folder) / each.removeprefix("--config=")
        for before, each in zip(["", *arguments], arguments, strict=False)
        if before in ("--config", "-c") or each.startswith("--config=")
    ]
    whole = [f"{each}={value}" for each, value in zip(arguments, [*arguments[1:], ""], strict=True)] + [*arguments]
    if not configs or any(each.startswith(f"--{group}=") and re.search(r"[{]|[.](ya?ml|json)", each) for each in whole):
        raise Refusal(add)
    paths = [(*front, group, *inner, key) for front in ((), ("fit",)) for inner in ((), ("init_args",))]
    try:
        return in_yaml(code, configs, paths, now, value)
    except Refusal as refusal:
        raise Refusal(f"{refusal}: {add}") from None
