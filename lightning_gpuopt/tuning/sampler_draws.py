"""Whether a loader's sampler may be asked for indices earlier than it would have been: what it draws from, and when.

More workers have more batches under way, so their indices are drawn earlier. Where a sampler draws each of them from a
random state that training draws from as well, they would come out otherwise.
"""

from __future__ import annotations

import copy
import logging
import operator
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.tuning.dataset_state import GLOBAL_GENERATORS, DatasetState
from lightning_gpuopt.tuning.object_facts import facts_of, is_mapped

log = logging.getLogger(__name__)

_DRAW_AT_ONCE: Final = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    ElasticSampler,
)
"""Samplers that draw from a random state when they are iterated, and not again for each index."""

_WRAPS: Final = (BatchSampler, ElasticBatchSampler)
_MAX_S: Final = 1.0
"""So long a copy of an unknown sampler is iterated at most."""

_MAX_COPIED_BYTES: Final = 64 << 20
"""Arrays of a dataset up to this size are copied for a sampler that is iterated to be looked at."""

_MANY: Final = 100_000
"""One that has drawn nothing for so many indices, and is not at its end by then, draws at once."""

_EPOCHS: Final = 2
"""A sampler that never ends has been seen whole when it gave so many times the dataset's length."""


def why_not_earlier(loader: DataLoader[Any], *, look: bool = True) -> str | None:
    """Why a map-style loader's sampler must be asked when it would have been; None where that is no matter.

    Of a sampler that is not torch's a copy is iterated, while the random states are put back afterwards.

    Args:
        loader: the loader.
        look: iterate such a copy; else the answer is that nobody has looked.
    """
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while _iterates_as(sampler, _WRAPS) and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    if getattr(sampler, "generator", None) is torch.default_generator:
        return f"its sampler ({type(sampler).__name__}) draws from the global generator: another order would come of it"
    if _iterates_as(sampler, _DRAW_AT_ONCE) or type(sampler) in (list, tuple, range):
        return None
    return _why_not_by_a_copy(sampler, loader) if look else f"its sampler ({type(sampler).__name__}) was not looked at"


def _iterates_as(sampler: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a sampler is of these, or of a class that derives from one and has its ``__iter__``.

    Those of torchdata iterate as torch's, and count.
    """
    own = getattr(type(sampler), "__iter__", None)
    counts = type(sampler).__module__.startswith("torchdata.")
    return any(isinstance(sampler, kind) and (counts or own is vars(kind).get("__iter__")) for kind in kinds)


def _why_not_by_a_copy(sampler: Any, loader: DataLoader[Any]) -> str | None:
    name, states = type(sampler).__name__, RandomStates()
    held = list(_held_by(sampler, loader))
    datasets = [(own, twin) for own, twin in held if isinstance(own, Dataset) or own is loader.dataset]
    was = DatasetState(dataset=[own for own, _ in datasets])
    try:
        twin = copy.deepcopy(sampler, {id(own): copied for own, copied in held})
    except Exception:
        states.restore()
        return f"its sampler ({name}) cannot be copied to see whether it draws random numbers for each index"
    first, whole = states, True
    try:
        numbers = iter(twin)
        next(numbers, None)
        first = RandomStates()
        whole = _exhaust(numbers, _EPOCHS * _length(loader))
    except Exception:  # training meets it where the sampler raises it
        log.debug("a copy of the sampler fails", exc_info=True)
    finally:
        draws = RandomStates() != first
        states.restore()
    if was.has_changed() or not all(_are_alike(*each) for each in datasets):
        return f"its sampler ({name}) changes the dataset as it is iterated: earlier would be another dataset"
    if draws:
        return f"its sampler ({name}) draws random numbers for each index: another order would come of it"
    return None if whole else f"its sampler ({name}) is too slow to see whether it draws random numbers for each index"


def _held_by(sampler: Any, loader: DataLoader[Any]) -> Iterable[tuple[Any, Any]]:
    """What a copy of a sampler has in common with it: what is large, the global states; and copies of the others."""
    yield loader.dataset, _with_own_attributes(loader.dataset)
    yield from ((each, each) for each in GLOBAL_GENERATORS)
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, torch.Tensor):
            yield value, value
        elif isinstance(value, Dataset) and value is not loader.dataset:
            yield value, _with_own_attributes(value)
        elif isinstance(value, torch.Generator):  # which the oldest torch cannot copy
            yield value, torch.Generator().set_state(value.get_state())


def _with_own_attributes(dataset: Any) -> Any:
    """A dataset that keeps to itself what a sampler does to its attributes; itself where a copy may do harm."""
    kind = type(dataset)
    if hasattr(kind, "__del__") or any(vars(each).get("__slots__") for each in kind.__mro__):
        return dataset
    try:
        twin = object.__new__(kind)
        vars(twin).update({name: _own(value) for name, value in vars(dataset).items()})
    except TypeError:  # such as a list
        return dataset
    return twin


def _own(value: Any) -> Any:
    """A copy of a container or an array that a sampler may change in place; else the same object."""
    if isinstance(value, np.ndarray):
        return value if value.nbytes > _MAX_COPIED_BYTES or is_mapped(value) else copy.copy(value)
    if type(value) is torch.Tensor:
        is_plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
        return value.detach().clone() if is_plain and value.nbytes <= _MAX_COPIED_BYTES else value
    return copy.copy(value) if type(value) in (list, dict, set, deque, bytearray) else value


def _are_alike(own: Any, twin: Any) -> bool:
    """Whether a twin's attributes are as those that it was made with; what is computed on demand may be new."""
    mine, theirs = getattr(own, "__dict__", {}), getattr(twin, "__dict__", {})
    kind: Any = type(own)
    on_demand = facts_of(kind).cached
    names = [name for name in mine if mine[name] is not None and name not in on_demand]
    return all(name in theirs and _is_same(mine[name], theirs[name]) for name in names)


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, torch.Tensor):
        same = (one == other) | ((one != one) & (other != other)) if one.shape == other.shape else None  # NaN is NaN
        return same is not None and bool(same.all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))
    if isinstance(one, (list, deque)):
        return len(one) == len(other) and all(map(operator.is_, one, other))
    return bool(one == other)


def _exhaust(numbers: Iterable[Any], most: int) -> bool:
    """Iterate to the end, or so far; False where the time is up before."""
    until = time.perf_counter() + _MAX_S
    seen = 0
    for number in numbers:
        seen += len(number) if isinstance(number, (list, tuple)) else 1
        if seen >= most:
            break
        if time.perf_counter() > until:
            return seen >= _MANY
    return True


def _length(loader: DataLoader[Any]) -> int:
    try:
        return max(len(loader.dataset), 1)  # type: ignore[arg-type]
    except Exception:
        return 1
