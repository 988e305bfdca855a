"""An edit of a file: made with libcst, which keeps all formatting, and compared with what was meant."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_gpuopt.patch.sources import Edit, Range, Refusal

if TYPE_CHECKING:
    import libcst

_MISSING: Final = 'expected libcst, which edits the source, got none; install it: pip install "lightning-gpuopt[patch]"'


def library() -> Any:
    """Libcst; ImportError with the line that installs it."""
    try:
        import libcst
        import libcst.metadata
    except ImportError:
        raise ImportError(_MISSING) from None
    return libcst


def edited(data: bytes, edit: Edit) -> bytes:
    """The file's bytes with the edit; Refusal if more, or something else, would change."""
    if edit.is_yaml:
        return _spliced(data, edit)
    cst = library()
    lines = _lines(data)
    try:
        module = cst.parse_module(data)
        wrapper = cst.metadata.MetadataWrapper(module, unsafe_skip_copy=True)
        spans = wrapper.resolve(cst.metadata.PositionProvider)
        if edit.imports:
            after = _with_import(cst, module, edit)
        else:
            target = _node_at(cst, spans, _in_characters(lines, edit.range), edit)
            after = module.deep_replace(target, _replacement(cst, target, edit))
        result: bytes = after.bytes
    except (cst.ParserSyntaxError, cst.CSTValidationError, UnicodeError, KeyError):
        raise Refusal(f"{edit.file} cannot be edited: libcst does not read it") from None
    if not differs_only_at(data, result, edit):
        raise Refusal(
            f"{edit.file}:{edit.range.line} cannot be edited without changing more than {edit.keyword or 'it'}"
        )
    return result


def differs_only_at(before: bytes, after: bytes, edit: Edit) -> bool:
    """Whether the syntax tree after is the one before with the edit, and nothing else."""
    try:
        meant, found = ast.parse(before), ast.parse(after)
        value = ast.parse(edit.value, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    if edit.imports:
        meant.body.insert(
            _import_index(meant, edit.range.line), ast.ImportFrom(edit.imports, [ast.alias(edit.value)], 0)
        )
        return ast.dump(meant) == ast.dump(found)
    wanted: Any = ast.Call if edit.keyword or edit.renames else (ast.Constant, ast.Call)
    nodes = [node for node in ast.walk(meant) if isinstance(node, wanted) and Range.of(node) == edit.range]
    if len(nodes) != 1:
        return False
    node: Any = nodes[0]
    if edit.renames:
        node.func = value
    elif edit.positional is not None:
        node.args[edit.positional] = value
    elif edit.keyword:
        _set_keyword(node, edit, value)
    else:
        meant = _Exchange(node, value).visit(meant)
    return ast.dump(meant) == ast.dump(found)


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def all_edited(data: bytes, edits: Sequence[Edit]) -> bytes:
    """The file's bytes with several edits, whose ranges are those of the file before any of them."""
    functions = {
        Range.of(node): ast.dump(node.func)
        for node in (() if any(each.is_yaml for each in edits) else ast.walk(ast.parse(data)))
        if isinstance(node, ast.Call)
    }
    inside = sorted(dict.fromkeys(each for each in edits if not each.imports), key=_place, reverse=True)
    for edit in inside:
        if edit.keyword or edit.renames:  # its end has moved, if another edit is in the same call
            calls = [node for node in ast.walk(ast.parse(data)) if isinstance(node, ast.Call)]
            same = [each for each in calls if _begins(each, edit) and ast.dump(each.func) == functions.get(edit.range)]
            if len(same) != 1:
                raise Refusal(f"{edit.file}:{edit.range.line} cannot be edited: the call is not where it was")
            edit = replace(edit, range=Range.of(same[0]))
        data = edited(data, edit)
    for edit in dict.fromkeys(each for each in edits if each.imports):
        data = edited(data, edit)
    return data


def _place(edit: Edit) -> tuple[int, int, bool]:
    return edit.range.line, edit.range.column, not edit.renames


def _begins(call: ast.Call, edit: Edit) -> bool:
    return (call.lineno, call.col_offset) == (edit.range.line, edit.range.column)


def _set_keyword(call: ast.Call, edit: Edit, value: ast.expr) -> None:
    given = next((each for each in call.keywords if each.arg == edit.keyword), None)
    if edit.item:
        value = ast.List([*(given.value.elts if given is not None else []), value], ast.Load())  # type: ignore[attr-defined]
    if given is not None:
        given.value = value
    else:
        call.keywords.append(ast.keyword(edit.keyword, value))


def _import_index(module: ast.Module, line: int) -> int:
    """Behind the last import above a line: what runs before it, as ``os.environ[...] = ...``, still does."""
    above = [at for at, each in enumerate(module.body) if (each.end_lineno or 0) < line]
    imports = [at for at in above if isinstance(module.body[at], (ast.Import, ast.ImportFrom))]
    return 1 + max(imports, default=0 if ast.get_docstring(module, clean=False) is not None else -1)


def _with_import(cst: Any, module: libcst.Module, edit: Edit) -> libcst.Module:
    line = f"from {edit.imports} import {edit.value}"
    tree = ast.parse(module.bytes)
    index, statements = _import_index(tree, edit.range.line), list(module.body)
    if index < len(statements) and isinstance(statements[index], cst.BaseCompoundStatement) and not index:
        raise Refusal(f"{edit.file} has no imports, behind which another could be added")
    if any(isinstance(each, cst.SimpleStatementLine) and len(each.body) != 1 for each in statements[:index]):
        raise Refusal(f"{edit.file} has several statements on a line where an import is to be added")
    if any(_binds(node, edit.value) for node in ast.walk(tree)):
        raise Refusal(f"{edit.file} has another {edit.value} of its own")
    config = module.config_for_parsing
    added = cst.parse_module(line + module.default_newline, config).body[0]
    return module.with_changes(body=[*statements[:index], added, *statements[index:]])


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.arg):
        return node.arg == name
    return name in (getattr(node, "name", None), getattr(node, "asname", None), getattr(node, "rest", None))


def _replacement(cst: Any, target: Any, edit: Edit) -> Any:
    value = cst.parse_expression(edit.value)
    if edit.renames:
        return target.with_changes(func=value)
    if not edit.keyword:
        return value
    args = list(target.args)
    if edit.positional is not None:
        args[edit.positional] = args[edit.positional].with_changes(value=value)
        return target.with_changes(args=args)
    given = next(
        (index for index, each in enumerate(args) if each.keyword and each.keyword.value == edit.keyword), None
    )
    if given is not None:
        new = _with_item(cst, args[given].value, value) if edit.item else value
        args[given] = args[given].with_changes(value=new)
        return target.with_changes(args=args)
    new = cst.List([cst.Element(value)]) if edit.item else value
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    added = cst.Arg(new, cst.Name(edit.keyword), equal)
    return target.with_changes(args=_appended(cst, args, added, target.whitespace_before_args))


def _with_item(cst: Any, value: Any, item: Any) -> Any:
    elements, bracket = list(value.elements), value.rbracket
    if elements and isinstance(elements[-1].comma, cst.Comma):  # what is behind a last comma belongs to the bracket
        comma = elements[-1].comma.with_changes(whitespace_after=bracket.whitespace_before)
        elements[-1] = elements[-1].with_changes(comma=comma)
        bracket = bracket.with_changes(whitespace_before=cst.SimpleWhitespace(""))
    added = _appended(cst, elements, cst.Element(item), value.lbracket.whitespace_after)
    return value.with_changes(elements=added, rbracket=bracket)


def _appended(cst: Any, items: list[Any], new: Any, lead: Any) -> list[Any]:
    """Items with one more, on a line of its own if they have one each; ``lead`` stands before the first."""
    if not items:
        return [new]
    last, inner = items[-1], [each.comma.whitespace_after for each in items[:-1]]
    is_argument, has_comma = isinstance(last, cst.Arg), isinstance(last.comma, cst.Comma)
    nothing, lines = cst.SimpleWhitespace(""), cst.ParenthesizedWhitespace
    behind = last.comma.whitespace_after if has_comma else last.whitespace_after_arg if is_argument else nothing
    space = inner[-1] if inner else lead
    follows, closing = cst.SimpleWhitespace(" "), behind
    if isinstance(behind, lines) and isinstance(space, lines):  # a comment stays behind its argument
        follows, closing = behind.with_changes(indent=space.indent, last_line=space.last_line), _plain(cst, behind)
    elif inner and isinstance(space, lines):
        follows = _plain(cst, space)
    last = last.with_changes(comma=cst.Comma(whitespace_after=follows))
    if has_comma:
        new = new.with_changes(comma=cst.Comma(whitespace_after=closing))
    if is_argument:
        last = last.with_changes(whitespace_after_arg=nothing)
        new = new if has_comma else new.with_changes(whitespace_after_arg=closing)
    return [*items[:-1], last, new]


def _plain(cst: Any, space: Any) -> Any:
    """The same line break and indentation without comments."""
    return space.with_changes(first_line=cst.TrailingWhitespace(newline=space.first_line.newline), empty_lines=())


def _node_at(cst: Any, spans: Any, where: Range, edit: Edit) -> Any:
    kinds = (cst.Call,) if edit.keyword or edit.renames else (cst.BaseExpression,)
    found = [
        node
        for node, span in spans.items()
        if isinstance(node, kinds)
        and Range(span.start.line, span.start.column, span.end.line, span.end.column) == where
    ]
    if not found:
        raise Refusal(f"{edit.file}:{edit.range.line} cannot be edited: the call is not where it was")
    return found[0]


def _lines(data: bytes) -> list[str]:
    """The lines as Python counts them."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    return re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))


def _in_characters(lines: Sequence[str], where: Range) -> Range:
    def column(line: int, at: int) -> int:
        return len(lines[line - 1].encode()[:at].decode())

    return Range(where.line, column(where.line, where.column), where.end_line, column(where.end_line, where.end_column))


def _spliced(data: bytes, edit: Edit) -> bytes:
    """YAML with another scalar; everything else is as it was."""
    from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

    lines = data.split(b"\n")
    line, where = lines[edit.range.line - 1], edit.range
    lines[where.line - 1] = line[: where.column] + edit.value.encode() + line[where.end_column :]
    result = b"\n".join(lines)
    try:
        differences = _differences(safe_load(data), safe_load(result))
    except YAMLError:
        differences = 0
    if differences != 1:
        raise Refusal(f"{edit.file}:{where.line} cannot be edited without changing more than this value")
    return result


def _differences(before: Any, after: Any) -> int:
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        return sum(_differences(before[key], after[key]) for key in before)
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return sum(map(_differences, before, after))
    return int(before != after)
