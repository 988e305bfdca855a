"""Finds the Python objects of a dataset that reading touches: a forked worker copies the pages that they are in.

Reading an object counts a reference in it, which writes to its page. Arrays, tensors and bytes are read without that.
"""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.measurements.code_location import INSTALLED, short
from lightning_gpuopt.measurements.risks import CopiedObject
from lightning_gpuopt.objects.classes import facts_of
from lightning_gpuopt.objects.memory_size import Clock, Weight, weigh
from lightning_gpuopt.objects.walk import CONTAINERS, Limits, Node, Walk
from lightning_gpuopt.utils.plain_containers import entries_of, length_of

log = logging.getLogger(__name__)

_MAX_S: Final = 0.02  # for weighing the containers, and as many for finding them
_FEW: Final = 64  # entries of a container in which other containers are looked for
_LEAST_BYTES: Final = 1 << 20


def copied_object(datasets: Iterable[object], clock: Clock = time.thread_time) -> CopiedObject | None:
    """The largest Python objects of datasets, or of globals that their code names, from 1 MiB on; 40 ms at most."""
    walk = Walk([("", each) for each in datasets], Limits(seconds=_MAX_S, clock=clock, few=_FEW))
    found: list[tuple[str, str, Any, Node]] = []
    for node in walk:
        found += _containers(node)
        if node.kind == "table":
            walk.leave_out()
    found.sort(key=lambda each: length_of(each[2]), reverse=True)
    end_s = clock() + _MAX_S
    weighed: list[tuple[Weight, str, str, int, Node]] = []
    for name, kind, values, node in found:
        try:
            weight = weigh(values, clock, end_s, with_data=False)
        except Exception:
            log.debug("%s could not be weighed", name, exc_info=True)
            continue
        if weight.bytes >= _LEAST_BYTES:
            weighed.append((weight, name, kind, length_of(values), node))
        if clock() > end_s:
            break
    if not weighed:
        return None
    weight, name, kind, count, node = max(weighed, key=lambda each: each[0].bytes)
    return CopiedObject(
        name,
        f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind} of {count:,} {weight.what}",
        round(weight.bytes),
        weight.plain,
        _place(node.owner, node.attribute) if node.attribute else "",
        round(sum(each.bytes for each, *_ in weighed)),
    )


def _containers(node: Node) -> Iterator[tuple[str, str, Any, Node]]:
    """Name, kind and entries of a container, of an array of objects, or of such columns of a table of pandas."""
    value = node.value
    try:
        if node.kind == "table":
            columns = {f"{node.path}[{each!r}]": value[each] for each in getattr(value, "columns", ())}
            for name, column in (columns or {node.path: value}).items():
                if str(getattr(column, "dtype", "")) == "object":
                    yield name, "column", column.to_numpy(), node
        elif node.kind == "array" and value.dtype.hasobject and value.size:
            yield node.path, "array", value.reshape(-1), node
        elif node.kind in CONTAINERS and not node.inside:
            few = entries_of(value) if length_of(value) <= _FEW else ()
            if not any(facts_of(type(each)).kind == "object" for each in few):  # each is looked at itself
                yield node.path, type(value).__name__, value, node
    except Exception:
        log.debug("%s could not be looked through", node.path, exc_info=True)


def _place(owner: object, attribute: str) -> str:
    """File and line of the user's own that first assigns an attribute, ``"data.py:41"``; empty if there is none."""
    target = rf"\w+\.{attribute}\b|{attribute}\s*:"
    assigns = re.compile(rf"\s*(\w+\.\w+\s*,\s*)*({target})[^=()\[\]]*(\[[^=]*\]\s*)?=(?!=)")
    for each in type(owner).__mro__[:-1]:
        with suppress(OSError, TypeError):  # it has no source
            file, (lines, first) = inspect.getsourcefile(each) or "", inspect.getsourcelines(each)
            found = (number for number, line in enumerate(lines, first) if assigns.match(line))
            if not any(folder in Path(file).parts for folder in INSTALLED) and (number := next(found, 0)):
                return f"{short(file)}:{number}"
    return ""
