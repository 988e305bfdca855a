"""Finds the Python objects of a dataset that reading touches: a forked worker copies the pages that they are in.

Reading an object counts a reference in it, which writes to its page. Arrays, tensors and bytes are read without that.
"""

from __future__ import annotations

import ast
import inspect
import logging
import math
import random
import sys
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt.measurements.code_location import INSTALLED, short
from lightning_gpuopt.measurements.risks import CopiedObject

log = logging.getLogger(__name__)

_MAX_S: Final = 0.02
"""Seconds at most for finding the containers, and again for weighing them."""

_MAX_DEPTH: Final = 5
_MAX_OBJECTS: Final = 2000
_FEW: Final = 64
"""Entries of a container that are looked at for datasets and other objects with attributes."""

_SAMPLED: Final = 512
_MOST_WALKED: Final = 500_000
"""Entries of a dict or a set from which the sample is taken: they have to be walked through."""

_PARTS: Final = (64, 64, 16, 8)
"""Parts of an entry that are weighed, by depth."""

_LIKE_A_TUPLE: Final = 16
"""In lists of no more items, each place has objects of its own kind."""

_LEAST_BYTES: Final = 1 << 20
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), np.generic)
_SHARED: Final = (np.ndarray, torch.Tensor)
"""Their data is no Python object; what they are themselves takes little."""

_CODE: Final = (type, ModuleType, FunctionType, MethodType, torch.nn.Module)
_LEFT_OUT: Final = (*_PLAIN, *_SHARED, *_CONTAINERS, *_CODE, bytearray, memoryview)
"""Objects whose attributes are not looked at."""

_HEADER: Final = 128
"""Bytes of an array or tensor without its data."""


def copied_object(datasets: Iterable[object], clock: Callable[[], float] = time.perf_counter) -> CopiedObject | None:
    """The largest Python objects of datasets that reading touches; None where there are none of 1 MiB.

    It takes some 40 ms at most.

    The objects are the user's, and other threads may change them meanwhile: what cannot be looked at is left out.

    Args:
        datasets: of the training loaders.
        clock: seconds, for the limit on what a look takes.
    """
    end_s = clock() + _MAX_S
    found = []
    try:
        for each in _containers(datasets):
            found.append(each)
            if clock() > end_s:
                break
    except Exception:
        log.debug("the dataset could not be looked through", exc_info=True)
    found.sort(key=lambda each: len(each.values), reverse=True)
    end_s = clock() + _MAX_S
    largest: tuple[float, _Container, _Weight] | None = None
    for container in found:
        try:
            weight = _weigh(container.values, clock, end_s)
        except Exception:
            log.debug("%s could not be weighed", container.name, exc_info=True)
            continue
        if largest is None or weight.bytes > largest[0]:
            largest = (weight.bytes, container, weight)
        if clock() > end_s:
            break
    if largest is None or largest[0] < _LEAST_BYTES:
        return None
    bytes_, container, weight = largest
    place = _place(container.owner, container.attribute)
    return CopiedObject(container.name, f"{container.kind} of {weight.what}", round(bytes_), weight.plain, place)


@dataclass(frozen=True)
class _Container:
    """A container in a dataset.

    Attributes:
        name: where it is, from the dataset on.
        owner: the object whose attribute it is.
        attribute: the attribute's name.
        kind: ``"a list"``.
        values: the container, or its values as a list.
    """

    name: str
    owner: object
    attribute: str
    kind: str
    values: Collection[Any]


def _containers(datasets: Iterable[object]) -> Iterator[_Container]:
    seen: set[int] = set()
    waiting = deque((each, "", 0) for each in datasets)
    looked_at = 0
    while waiting and looked_at < _MAX_OBJECTS:
        owner, path, depth = waiting.popleft()
        looked_at += 1
        if id(owner) in seen or isinstance(owner, _LEFT_OUT) or depth > _MAX_DEPTH:
            continue
        seen.add(id(owner))
        for attribute, value in _attributes(owner):
            name = f"{path}{attribute}"
            if id(value) in seen:
                continue
            if isinstance(value, _CONTAINERS):
                seen.add(id(value))
                entries = value.values() if isinstance(value, dict) else value
                few = list(entries) if len(value) <= _FEW else []
                inner = [(each, f"{name}[{number}].", depth + 1) for number, each in enumerate(few)]
                inner = [each for each in inner if not isinstance(each[0], _LEFT_OUT)]
                if inner:  # such as the parts of a ConcatDataset
                    waiting.extend(inner)
                else:
                    yield _Container(name, owner, attribute, _kind(value), value)
            else:
                for column, kind, objects in _object_arrays(name, value):
                    yield _Container(column, owner, attribute, kind, objects)
                waiting.append((value, f"{name}.", depth + 1))


def _attributes(owner: object) -> list[tuple[str, Any]]:
    attributes = list(getattr(owner, "__dict__", {}).items())
    for each in type(owner).__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                attributes.append((name, getattr(owner, name)))
    return attributes


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _object_arrays(name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Arrays of Python objects, by name and kind: the value itself, or columns of a table of pandas."""
    if isinstance(value, np.ndarray):
        if value.dtype == object and value.size:
            yield name, "an array", value.reshape(-1)
    elif type(value).__module__.partition(".")[0] == "pandas":
        columns = {f"{name}[{each!r}]": value[each] for each in value.columns} if hasattr(value, "columns") else {}
        for path, column in (columns or {name: value}).items():
            if str(getattr(column, "dtype", "")) == "object":
                yield path, "a column", column.to_numpy()


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
        plain = plain and isinstance(value, _PLAIN)
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
    count = min(len(values), _MOST_WALKED)
    furthest = 2 * max(1, count // _SAMPLED) - 1
    steps = random.Random(0)
    if isinstance(values, (list, tuple, np.ndarray)):
        index = 0
        while index < len(values):
            yield values[index]
            index += steps.randint(1, 2 * max(1, len(values) // _SAMPLED) - 1)
        return
    left = 0
    for entry in islice(values.items() if isinstance(values, dict) else values, count):
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
        role.sizes[id(each)] = min(bytes_, _HEADER) if isinstance(each, _SHARED) else (bytes_ + 15) & ~15
        if len(name) <= len(_PARTS) and not isinstance(each, (*_PLAIN, *_SHARED)):
            for part, value, of in _parts(each, _PARTS[len(name) - 1]):
                self.take((*name, part), value, stands_for * of)


def _parts(each: Any, most: int) -> Iterator[tuple[object, Any, float]]:
    """Name of the role, part, and how many parts it stands for, of so many at most."""
    if isinstance(each, dict):
        of = max(1.0, len(each) / most)
        for key, value in islice(each.items(), most):
            yield "key", key, of
            yield key if of == 1.0 and isinstance(key, str) else "value", value, of
    elif isinstance(each, _CONTAINERS):
        ordered = isinstance(each, (list, tuple)) and len(each) <= _LIKE_A_TUPLE
        for number, value in enumerate(islice(each, most)):
            yield number if ordered else "item", value, max(1.0, len(each) / most)
    else:
        attributes = getattr(each, "__dict__", None)
        if attributes is not None:
            yield "__dict__", attributes, 1.0
        for attribute, value in _attributes(each)[len(attributes or ()) :]:
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
