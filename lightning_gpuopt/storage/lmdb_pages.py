"""Where LMDB has put its values: offsets in the file, which LMDB itself does not tell.

Reads the pages of a finished file of LMDB's data format 1 (version 0.9), as ``mdb.c`` of that version describes them in
``MDB_meta``, ``MDB_db``, ``MDB_page`` and ``MDB_node``; written on a little-endian machine.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

# magic, format, size of a page, root of the main tree, number of the transaction
_META: Final = struct.Struct("<16x II 16x I44x 40xQ 8x Q")
_MAGIC: Final = 0xBEEFC0DE
_FORMAT: Final = 1
_PAGE: Final = struct.Struct("<10xHH2x")  # flags, and where the list of nodes ends
# low and high half of the value's size (or of a page's number), flags, size of the key
_NODE: Final = struct.Struct("<HHHH")
_BRANCH: Final = 0x01
_ON_OTHER_PAGES: Final = 0x01
_NO_PAGE: Final = (1 << 64) - 1


def values(data: Any) -> Iterator[tuple[bytes, int, int]]:
    """Key, offset in the file and length of every value, in key order; ValueError if LMDB writes no such pages."""
    try:
        yield from _walk(data)
    except (struct.error, IndexError) as err:
        raise ValueError(f"not the pages of an LMDB file: {err}") from None


def _walk(data: Any) -> Iterator[tuple[bytes, int, int]]:
    first = _META.unpack_from(data, 0)
    page_bytes = first[2]
    magic, version, _, root, _ = max(first, _META.unpack_from(data, page_bytes), key=lambda meta: meta[-1])
    if (magic, version) != (_MAGIC, _FORMAT):
        raise ValueError(f"not an LMDB file of format {_FORMAT}")
    todo = [] if root == _NO_PAGE else [root]
    left = len(data) // max(page_bytes, 1)
    while todo:
        if (left := left - 1) < 0:
            raise ValueError("pages of an LMDB file that lead in a circle")
        begin = todo.pop() * page_bytes
        flags, end = _PAGE.unpack_from(data, begin)
        nodes = struct.unpack_from(f"<{(end - _PAGE.size) // 2}H", data, begin + _PAGE.size)
        if flags & _BRANCH:
            for node in reversed(nodes):  # the last one in is the next one out
                low, high, top, _ = _NODE.unpack_from(data, begin + node)
                todo.append(top << 32 | high << 16 | low)
            continue
        for node in nodes:
            low, high, kind, key_bytes = _NODE.unpack_from(data, begin + node)
            at = begin + node + _NODE.size
            key, at = bytes(data[at : at + key_bytes]), at + key_bytes
            if kind & _ON_OTHER_PAGES:
                (page,) = struct.unpack_from("<Q", data, at)
                at = page * page_bytes + _PAGE.size
            yield key, at, high << 16 | low
