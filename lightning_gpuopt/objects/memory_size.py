"""What the entries of a container take in memory, estimated from a sample."""

from __future__ import annotations

import gc
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from lightning_gpuopt.objects.classes import facts_of
from lightning_gpuopt.utils.plain_containers import CONTAINERS, entries_of, entry_at, length_of

Clock: TypeAlias = Callable[[], float]  # seconds

_FEW: Final = 64  # entries that are looked at first, whatever the time
_SAMPLED: Final = 512
_MOST_WALKED: Final = 500_000  # entries of a dict, set or deque, which have to be walked through, for the sample
_MOST_WEIGHED: Final = 10_000  # objects
_PARTS: Final = (64, 64, 16, 8)  # parts of an entry that are weighed, by depth
_LIKE_A_TUPLE: Final = 16  # in objects of no more parts, each place has objects of its own kind
_HEADER: Final = 128  # bytes of an array or tensor without its data
_ARRAYS: Final = (np.ndarray, torch.Tensor)
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), np.generic)
_CODE: Final = ("class", "module", "function", "method")


@dataclass
class Weight:
    bytes: float = 0.0  # of memory of this process; what several entries share counts once
    what: str = "entries"  # what most of them are: "str", "tuple (str, int)"
    plain: bool = True  # all are strings, bytes or numbers
    tensor_bytes: float = 0.0  # of tensors, wherever they are, as often as they come
    graphs: bool = False  # tensors keep their autograd graphs
    opaque: bool = False  # some are objects whose size Python does not know


def weigh(values: Collection[Any], clock: Clock, end_s: float, *, with_data: bool) -> Weight:
    """Weigh what a container holds, with the data of arrays, tensors and modules, or only the objects themselves."""
    number = length_of(values)  # now: others may add some
    scale, kinds, looked_at = _Scale(with_data), Counter[str](), 0
    for key, value in _sample(values):
        looked_at += 1
        kinds[_what(value)] += 1
        scale.weight.plain &= issubclass(type(value), _PLAIN)
        scale.put(("value",), value, 1.0)
        if key is not None:
            scale.put(("key",), key, 1.0)
        if (looked_at >= _FEW and clock() > end_s) or scale.count > _MOST_WEIGHED:
            break
    times, weight = number / max(looked_at, 1), scale.weight
    weight.bytes = sum(role.bytes(times) for role in scale.roles.values())
    weight.tensor_bytes *= times
    weight.what = kinds.most_common(1)[0][0] if kinds else weight.what
    return weight


@dataclass
class _Role:
    """Objects in the same place of each entry: the first item of a tuple, a dict's value by its key."""

    sizes: dict[int, int] = field(default_factory=dict)  # bytes, by identity
    seen: int = 0
    stand_for: float = 0.0  # how many there are in the entries that were looked at

    def bytes(self, times: float) -> float:
        """What all of them take in so many times the entries; one that several entries share counts once."""
        count, total = len(self.sizes), self.stand_for * times
        different = total
        # if there are K different ones, n that are drawn are K - K exp(-n / K) different ones
        for _ in range(200 if count < 0.98 * self.seen else 0):
            different = min(total, count / -math.expm1(-self.seen / different))
        return sum(self.sizes.values()) / count * different


class _Scale:
    """Weighs objects with their parts, by their role: a name has a part for each container that the object is in."""

    def __init__(self, with_data: bool) -> None:
        self.weight = Weight()
        self.roles: dict[tuple[object, ...], _Role] = {}
        self.count = 0
        self._with_data = with_data
        self._first: dict[int, _Role] = {}

    def put(self, name: tuple[object, ...], each: Any, stands_for: float) -> None:
        """Count an object, which stands for so many in this entry, and its parts."""
        kind, role = type(each), self.roles.setdefault(name, _Role())
        role.seen += 1
        role.stand_for += stands_for
        self.count += 1
        if issubclass(kind, torch.Tensor):
            self.weight.tensor_bytes += stands_for * each.numel() * each.element_size()
            self.weight.graphs |= each.grad_fn is not None
        facts = facts_of(kind)
        is_code = facts.kind in _CODE or (not self._with_data and issubclass(kind, torch.nn.Module))
        is_first = self._first.setdefault(id(each), role) is role
        role.sizes[id(each)] = self._size(each) if is_first and each is not None and not is_code else 0
        is_small = is_code or issubclass(kind, (*_PLAIN, *_ARRAYS))
        if is_small or not is_first or len(name) > len(_PARTS) or self.count > _MOST_WEIGHED:
            return
        most, length = _PARTS[len(name) - 1], length_of(each) if issubclass(kind, CONTAINERS) else 0
        parts = list(islice(entries_of(each), most)) if length > most else gc.get_referents(each)[:most]
        has_parts = facts.dictionary is not None or facts.slots or issubclass(kind, (*CONTAINERS, bytearray))
        self.weight.opaque |= not has_parts and kind is not object and not callable(each)
        for place, part in enumerate(parts):
            place_or_any = place if max(length, len(parts)) <= _LIKE_A_TUPLE else "part"
            self.put((*name, place_or_any), part, stands_for * max(1.0, length / most))

    def _size(self, each: Any) -> int:
        if not issubclass(type(each), _ARRAYS):
            return (sys.getsizeof(each) + 15) & ~15
        if not self._with_data:
            return min(sys.getsizeof(each), _HEADER)
        return int(each.nbytes) if issubclass(type(each), np.ndarray) or each.device.type == "cpu" else 0


def _sample(values: Collection[Any]) -> Iterable[tuple[Any, Any]]:
    """Entries, of a dict with their keys, at random distances where they have numbers: some repeat with a period."""
    number = length_of(values)
    if isinstance(values, (list, tuple, np.ndarray)):
        steps, index = random.Random(0), 0
        while index < number:
            yield None, entry_at(values, index)
            index += steps.randint(1, 2 * max(1, number // _SAMPLED) - 1)
        return
    count = min(number, _MOST_WALKED)
    items: Any = dict.items(values) if isinstance(values, dict) else zip(repeat(None), entries_of(values))
    # at once, under the GIL: the next one added would end going through them
    yield from list(islice(items, 0, count, max(1, count // _SAMPLED)))


def _what(value: Any) -> str:
    """What an entry is: ``"str"``, ``"tuple (str, int)"``."""
    kind = type(value).__name__
    if issubclass(type(value), tuple) and 0 < tuple.__len__(value) <= 4:
        return f"{kind} ({', '.join(type(each).__name__ for each in entries_of(value))})"
    return kind
