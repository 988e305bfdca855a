"""A unified diff of files' bytes that ``git apply`` and ``patch -p1`` take."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import diff_bytes, unified_diff
from typing import Final

_NO_NEWLINE: Final = b"\\ No newline at end of file\n"


def unified(files: Mapping[str, tuple[bytes, bytes]]) -> bytes:
    """The diff of some files, each by its path in the tree with its bytes before and after."""
    return b"".join(_of_file(path, *files[path]) for path in sorted(files) if files[path][0] != files[path][1])


def _of_file(path: str, before: bytes, after: bytes) -> bytes:
    name = path.encode("utf-8", "surrogateescape")
    end = b"\t" if b" " in name else b""  # without it GNU patch takes the name to end at the blank
    lines = diff_bytes(
        unified_diff, _lines(before), _lines(after), b"a/" + name + end, b"b/" + name + end, lineterm=b"\n"
    )
    return b"".join(line if line.endswith(b"\n") else line + b"\n" + _NO_NEWLINE for line in lines)


def _lines(data: bytes) -> list[bytes]:
    r"""Lines as diff counts them: they end at ``\n`` only."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
