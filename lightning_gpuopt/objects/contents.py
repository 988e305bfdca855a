"""The content of objects, to be compared with what it is later: entries, digests of arrays, states of generators."""

from __future__ import annotations

import io
import math
import mmap
import operator
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count, islice, repeat
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt.objects.classes import is_users_own
from lightning_gpuopt.utils.plain_containers import entries_of, entry_at, length_of

LARGE: Final = 256  # of containers with more items so many are looked at, evenly spread
HUGE: Final = (
    4096  # containers up to this size are compared whole; of larger ones a part, of those without numbers the beginning
)
WHOLE_BYTES: Final = 1 << 17  # arrays up to this size are compared whole
_SAMPLED: Final = 4096  # of larger ones so many elements are, beside those of the samples that are asked for


def same(was: Any, now: Any) -> bool:
    """Whether two contents are alike. Objects of the user's classes are not asked: another one is another."""
    if was is now:
        return True
    kind = type(now)
    if type(was) is not kind:
        return False
    if kind is dict:
        return len(was) == len(now) and _all_same(was.values(), now.values()) and _all_same(was, now)
    if kind in (list, tuple, deque):
        return len(was) == len(now) and _all_same(was, now)
    return (kind in (int, bytes, str) or not is_users_own(kind.__module__)) and bool(was == now)


def _all_same(was: Iterable[Any], now: Iterable[Any]) -> bool:
    return all(map(operator.is_, was, now)) or all(map(same, was, now))


def some_of(value: Any, also: Sequence[int] = ()) -> Iterator[tuple[Any, Any]]:
    """Some of the entries of a container of Python's, those of these samples among them, with their keys or None."""
    length = length_of(value)
    step = max(length // LARGE, 1)
    if isinstance(value, (list, tuple)):
        yield from zip(range(0, length, step), entry_at(value, slice(None, None, step)), strict=False)
        yield from ((key, entry_at(value, key)) for key in also if key < length)
        return
    keys = repeat(None) if isinstance(value, (set, frozenset)) else count()
    items: Any = dict.items(value) if isinstance(value, dict) else zip(keys, entries_of(value), strict=False)
    yield from list(islice(items, 0, None, step) if length <= HUGE else islice(items, LARGE))
    if isinstance(value, dict):
        yield from ((key, entry_at(value, key)) for key in also if dict.__contains__(value, key))


def content_of(value: Any, also: Sequence[int] = ()) -> Any:
    """What to compare of a container of Python's: all of it, or its length and some entries."""
    length = length_of(value)
    if length > HUGE:
        return length, [each for _, each in some_of(value, also)]
    if not isinstance(value, dict):
        return list(entries_of(value))
    return dict.copy(value) if type(value).__iter__ is dict.__iter__ else dict(dict.items(value))


def is_open(file: io.IOBase) -> bool:
    """Whether there is an open file behind this, and not only memory, or one of the standard streams."""
    is_standard = any(file is each for each in (sys.stdin, sys.stdout, sys.stderr))
    with suppress(OSError, ValueError):  # in memory, or closed meanwhile
        return not is_standard and not file.closed and file.fileno() > 2
    return False


def is_mapped(value: np.ndarray[Any, Any]) -> bool:
    base: Any = value
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def digest_of(value: np.ndarray[Any, Any]) -> int:
    """A number for an array's content; of a large one, for some of its elements, spread over rows and columns."""
    if value.nbytes <= WHOLE_BYTES and value.size * value.itemsize == value.nbytes:
        return hash(value.tobytes())
    step = max(value.size // _SAMPLED, 1)
    while any(side > 1 and math.gcd(step, side) > 1 for side in value.shape[1:]):  # so that it meets all columns
        step += 1
    return hash(value.flat[::step].tobytes())  # ravel() would copy what is not contiguous


def drawn_to(generator: Any) -> bytes:
    """A generator's state, to be compared."""
    state = state_of_generator(generator)
    return bytes(state.numpy().tobytes()) if isinstance(state, torch.Tensor) else repr(state).encode()


def state_of_generator(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def restore_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
