"""Finds the Python objects of a dataset that reading touches: a forked worker copies the pages that they are in.

Reading an object counts a reference in it, which writes to its page. Arrays, tensors and bytes are read without that.
"""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import math
import random
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt.detector.reading_code import reading_code
from lightning_gpuopt.measurements.code_location import INSTALLED, short
from lightning_gpuopt.measurements.risks import CopiedObject
from lightning_gpuopt.recorder.containers import (
    PLAIN,
    SHARED,
    Container,
    Containers,
    attributes_of,
)
from lightning_gpuopt.utils.plain_containers import CONTAINERS, entries_of, entry_at, length_of

log = logging.getLogger(__name__)

_MAX_S: Final = 0.02
"""Seconds at most for weighing the containers; for finding them, and the code that reads them, as many each."""

_FEW: Final = 64
"""Entries that are looked at first, whatever the time."""

_SAMPLED: Final = 512
_MOST_WALKED: Final = 500_000
"""Entries of a dict or a set from which the sample is taken: they have to be walked through."""

_PARTS: Final = (64, 64, 16, 8)
"""Parts of an entry that are weighed, by depth."""

_LIKE_A_TUPLE: Final = 16
"""In lists of no more items, each place has objects of its own kind."""

_LEAST_BYTES: Final = 1 << 20
_CODE: Final = (type, ModuleType, FunctionType, MethodType, torch.nn.Module)
_HEADER: Final = 128
"""Bytes of an array or tensor without its data."""


def copied_object(datasets: Iterable[object], clock: Callable[[], float] = time.thread_time) -> CopiedObject | None:
    """The largest Python objects of datasets that reading touches; None where there are none of 1 MiB.

    These are the ones that the code names which reads samples. Where it names none, and may read what it does not name,
    or where the garbage collector touches them, they are not certain. It takes some 60 ms at most.

    The objects are the user's, and other threads may change them meanwhile: what cannot be looked at is left out.

    Args:
        datasets: of the training loaders.
        clock: seconds, for the limit on what a look takes.
    """
    roots = list(datasets)
    walk = Containers([("", each) for each in roots], clock)
    found = [one for each in walk if not each.inside and not each.opened for one in _parts_of(each)]
    code = reading_code(roots, walk.owners)
    read = {id(each) for each in found if code.reaches(each.path)}
    found.sort(key=lambda each: (id(each) in read, len(each.values)), reverse=True)
    end_s = clock() + _MAX_S
    weighed: list[tuple[Container, _Weight, bool]] = []
    for container in found:
        try:
            certain = id(container) in read
            possible = not container.root and (not code.whole or _is_collected(container.values))
            if certain or possible:
                weighed.append((container, _weigh(container.values, clock, end_s), certain))
        except Exception:
            log.debug("%s could not be weighed", container.name, exc_info=True)
            continue
        if clock() > end_s:
            break
    weighed = [each for each in weighed if each[1].bytes >= _LEAST_BYTES]
    if not weighed:
        return None
    container, weight, certain = max(weighed, key=lambda each: (each[2], each[1].bytes))
    return CopiedObject(
        container.name,
        f"{_article(container.kind)} of {weight.what}",
        round(weight.bytes),
        weight.plain,
        _place(container.owner, container.path[-1]) if container.path else "",
        certain,
        round(sum(each.bytes for _, each, read_too in weighed if read_too == certain)),
    )


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"


def _parts_of(container: Container) -> Iterator[Container]:
    """The container, or its columns where it is a table of pandas."""
    if container.kind == "table":
        try:
            for name, column in _columns(container.name, container.values):
                yield replace(container, name=name, kind="column", values=column)
        except Exception:
            log.debug("%s could not be looked through", container.name, exc_info=True)
    elif container.kind == "array":
        if container.values.size:
            yield replace(container, values=container.values.reshape(-1))
    elif container.kind != "lru_cache":
        yield container


def _columns(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    columns = {f"{name}[{each!r}]": value[each] for each in value.columns} if hasattr(value, "columns") else {}
    for path, column in (columns or {name: value}).items():
        if str(getattr(column, "dtype", "")) == "object":
            yield path, column.to_numpy()


def _is_collected(values: Collection[Any]) -> bool:
    """Whether Python's garbage collector looks at the entries, and so writes to them, whoever reads them."""
    few = list(islice(entries_of(values), _FEW))
    return 2 * sum(gc.is_tracked(each) for each in few) > len(few)


@dataclass
class _Role:
    """Objects in the same place of each entry: the first item of a tuple, a dict's value by its key.

    Attributes:
        sizes: bytes by identity, of those that were seen.
        seen: how often one was seen.
        stand_for: how many there are in the entries that were looked at.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    seen: int = 0
    stand_for: float = 0.0

    def bytes(self, scale: float) -> float:
        """What all of them take in so many times the entries; one that several entries share counts once."""
        different = _different(len(self.sizes), self.seen, self.stand_for * scale)
        return sum(self.sizes.values()) / len(self.sizes) * different


@dataclass(frozen=True)
class _Weight:
    """What a container's entries take.

    Attributes:
        bytes: estimated from a sample.
        what: how many of what: ``"1,281,167 str"``.
        plain: whether they are strings, bytes or numbers.
    """

    bytes: float
    what: str
    plain: bool


def _weigh(values: Collection[Any], clock: Callable[[], float], end_s: float) -> _Weight:
    roles = _Roles()
    kinds: Counter[str] = Counter()
    plain = True
    looked_at = 0
    for entry in _sample(values):
        key, value = entry if isinstance(values, dict) else (None, entry)
        looked_at += 1
        kinds[_names(value)] += 1
        plain = plain and isinstance(value, PLAIN)
        roles.take(("value",), value, 1.0)
        if key is not None:
            roles.take(("key",), key, 1.0)
        if looked_at >= _FEW and clock() > end_s:
            break
    scale = len(values) / max(looked_at, 1)
    what = kinds.most_common(1)[0][0] if kinds else "entries"
    return _Weight(sum(role.bytes(scale) for role in roles.by_name.values()), f"{len(values):,} {what}", plain)


def _sample(values: Collection[Any]) -> Iterator[Any]:
    """Entries at random distances, so that what repeats is seen to; of a dict, keys with values."""
    number = length_of(values)
    count = min(number, _MOST_WALKED)
    furthest = 2 * max(1, count // _SAMPLED) - 1
    steps = random.Random(0)
    if isinstance(values, (list, tuple, np.ndarray)):
        index = 0
        while index < number:
            yield entry_at(values, index)
            index += steps.randint(1, 2 * max(1, number // _SAMPLED) - 1)
        return
    left = 0
    for entry in islice(dict.items(values) if isinstance(values, dict) else entries_of(values), count):
        if left == 0:
            yield entry
            left = steps.randint(1, furthest)
        left -= 1


class _Roles:
    """The objects of some entries by their role.

    Attributes:
        by_name: the roles; a name has a part for each container that the object is in.
    """

    def __init__(self) -> None:
        self.by_name: dict[tuple[object, ...], _Role] = {}
        self._first: dict[int, _Role] = {}

    def take(self, name: tuple[object, ...], each: object, stands_for: float) -> None:
        """Count an object and its parts.

        Args:
            name: of the object's role.
            each: the object.
            stands_for: how many objects of this entry it stands for.
        """
        role = self.by_name.setdefault(name, _Role())
        role.seen += 1
        role.stand_for += stands_for
        counted = self._first.setdefault(id(each), role)
        if counted is not role or each is None or isinstance(each, _CODE):
            role.sizes[id(each)] = 0
            return
        bytes_ = sys.getsizeof(each)
        role.sizes[id(each)] = min(bytes_, _HEADER) if isinstance(each, SHARED) else (bytes_ + 15) & ~15
        if len(name) <= len(_PARTS) and not isinstance(each, (*PLAIN, *SHARED)):
            for part, value, of in _parts(each, _PARTS[len(name) - 1]):
                self.take((*name, part), value, stands_for * of)


def _parts(each: Any, most: int) -> Iterator[tuple[object, Any, float]]:
    """Name of the role, part, and how many parts it stands for, of so many at most."""
    if isinstance(each, dict):
        of = max(1.0, length_of(each) / most)
        for key, value in islice(dict.items(each), most):
            yield "key", key, of
            yield key if of == 1.0 and isinstance(key, str) else "value", value, of
    elif isinstance(each, CONTAINERS):
        ordered = isinstance(each, (list, tuple)) and length_of(each) <= _LIKE_A_TUPLE
        for number, value in enumerate(islice(entries_of(each), most)):
            yield number if ordered else "item", value, max(1.0, length_of(each) / most)
    else:
        named, slots = attributes_of(each)
        if named:
            yield "__dict__", vars(each), 1.0
        for attribute, value in slots.items():
            yield attribute, value, 1.0


def _names(value: object) -> str:
    """What an entry is: ``"str"``, ``"tuple (str, int)"``."""
    kind = type(value).__name__
    if isinstance(value, tuple) and 0 < len(value) <= 4:
        return f"{kind} ({', '.join(type(each).__name__ for each in value)})"
    return kind


def _different(different: int, seen: int, all_: float) -> float:
    """How many different objects there are, if a sample of some had so many: K - K exp(-seen / K) of K are drawn."""
    if different >= 0.98 * seen:
        return all_
    low, high = float(different), max(all_, different)
    for _ in range(40):
        middle = (low + high) / 2
        if middle * -math.expm1(-seen / middle) < different:
            low = middle
        else:
            high = middle
    return high


def _place(owner: object, attribute: str) -> str:
    """File and line of the user's own that first assigns an attribute, ``"data.py:41"``; empty where there is none."""
    for each in type(owner).__mro__:
        if each.__module__.partition(".")[0] in ("builtins", "torch"):
            continue
        try:
            file = inspect.getsourcefile(each) or ""
            lines, first = inspect.getsourcelines(each)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except Exception:  # no source, or none that can be parsed alone
            log.debug("the source of %s could not be read", each, exc_info=True)
            continue
        if not any(folder in Path(file).parts for folder in INSTALLED):
            found = sorted(
                node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt) and _assigns(node, attribute)
            )
            if found:
                return f"{short(file)}:{first + found[0] - 1}"
    return ""


def _assigns(node: ast.stmt, attribute: str) -> bool:
    if isinstance(node, ast.Assign):
        targets = [part for each in node.targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    else:
        return False
    return any(
        (isinstance(each, ast.Attribute) and each.attr == attribute)
        or (isinstance(node, ast.AnnAssign) and isinstance(each, ast.Name) and each.id == attribute)
        for each in targets
    )
