"""Finds what grows in a program whose steps get slower: lists, dicts, hooks of module, callbacks and data."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import Dataset

log = logging.getLogger(__name__)

_MAX_OWNERS: Final = 2000
_MAX_SAMPLED: Final = 512
_MAX_PARTS: Final = 64
"""Parts that are weighed of an entry that is a container itself."""

_MAX_S: Final = 0.02
"""Seconds at most for finding the containers, and again for weighing those that have grown."""

_GROWN: Final = 64
"""A container has grown if it has at least so many more entries than at the beginning, and twice as many."""

_HEAVY_MIB: Final = 1.0
_LEFT_OUT: Final = frozenset({"_modules", "_parameters", "_buffers"})
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class _Grown:
    """A container that has grown."""

    name: str
    kind: str
    before: int
    count: int
    suspected: bool
    mib: float
    graphs: bool

    @property
    def text(self) -> str:
        size = f"{self.mib / 1024:.3g} GiB" if self.mib >= 1024 else f"{self.mib:.3g} MiB"
        holds = f" and holds {size} of tensors" if self.mib >= _HEAVY_MIB else ""
        graphs = " with their autograd graphs" if self.graphs and holds else ", with autograd graphs" * self.graphs
        return f"{self.name} ({self.kind}) grew from {self.before:,} to {self.count:,} entries{holds}{graphs}"


class Growing:
    """Compares the sizes of a program's containers with those at the beginning.

    The containers are the user's, and in use: other threads may change them meanwhile. One that cannot be looked at is
    left out.

    Args:
        owners: whose attributes to look at, by a name for people. Submodules of modules are looked at as well.
        clock: seconds, for the limit on what a look takes.
    """

    def __init__(self, owners: Mapping[str, object], clock: Callable[[], float] = time.perf_counter) -> None:
        self._owners = dict(owners)
        self._clock = clock
        self._sizes = {name: count for name, _, count in self._containers()}

    def look(self, suspect: str = "") -> str:
        """What has grown most, for people; empty where nothing has. Takes a few milliseconds.

        Args:
            suspect: the phase or hook whose time grows: of what it does not own, only what holds tensors is named.
        """
        suspect = suspect.rpartition(".")[0] or {"data_wait": "dataset"}.get(suspect, "module")
        longer = []
        for name, value, count in self._containers():
            before = self._sizes.get(name, 0)
            if count - before >= _GROWN and count >= 2 * before:
                longer.append((name, value, before, count))
        end_s = self._clock() + _MAX_S
        grown = []
        for name, value, before, count in longer:
            try:
                mib, graphs = _tensors_in(value, count, self._clock, end_s)
            except Exception:  # it is the user's, and another thread may change it
                log.debug("what %s holds could not be looked at", name, exc_info=True)
                continue
            suspected = self._suspected(name, suspect)
            if suspected or graphs or mib >= _HEAVY_MIB:
                grown.append(_Grown(name, type(value).__name__, before, count, suspected, mib, graphs))
        if not grown:
            return ""
        return max(grown, key=lambda each: (each.mib >= _HEAVY_MIB, each.suspected, each.mib, each.count)).text

    def _suspected(self, name: str, suspect: str) -> bool:
        """Whether a container belongs to whoever's time grows: a callback, the data, or the module."""
        owner_name = name.partition(".")[0]
        owner = self._owners[owner_name]
        if suspect == "module":
            return isinstance(owner, torch.nn.Module)
        return isinstance(owner, Dataset) if suspect == "dataset" else owner_name == suspect

    def _containers(self) -> Iterator[tuple[str, Collection[Any], int]]:
        """Name, container and number of entries."""
        end_s = self._clock() + _MAX_S
        for owner, each in islice(self._everybody(), _MAX_OWNERS):
            for name, value in list(getattr(each, "__dict__", {}).items()):
                if name in _LEFT_OUT:
                    continue
                try:
                    if isinstance(value, (list, dict, set, deque)):
                        yield f"{owner}.{name}", value, len(value)
                except Exception:  # a class of the user's, which may refuse even that
                    log.debug("%s.%s could not be looked at", owner, name, exc_info=True)
            if self._clock() > end_s:
                return

    def _everybody(self) -> Iterator[tuple[str, object]]:
        for name, each in self._owners.items():
            if isinstance(each, torch.nn.Module):
                for path, module in each.named_modules():
                    yield f"{name}.{path}" if path else name, module
            else:
                yield name, each


def _tensors_in(values: Collection[Any], count: int, clock: Callable[[], float], end_s: float) -> tuple[float, bool]:
    """MiB of the tensors in a container, from a sample; and whether they keep their autograd graphs.

    Args:
        values: the container.
        count: how many entries it has.
        clock: seconds.
        end_s: when to stop; one entry is looked at in any case.
    """
    sampled = 0
    tensor_bytes = 0.0
    graphs = False
    for entry in _sample(values, _MAX_SAMPLED):
        sampled += 1
        is_container = isinstance(entry, (list, tuple, dict))
        parts = list(_sample(entry, _MAX_PARTS)) if is_container else [entry]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if tensors:
            scale = len(entry) / len(parts) if is_container else 1.0
            tensor_bytes += scale * sum(each.numel() * each.element_size() for each in tensors)
            graphs = graphs or any(each.grad_fn is not None for each in tensors)
        if clock() > end_s:
            break
    return tensor_bytes * count / max(sampled, 1) / _MIB, graphs


def _sample(values: Collection[Any], most: int) -> Iterator[Any]:
    """So many of the entries at most, evenly spread; of a dict, its values."""
    count = len(values)
    every = max(1, -(-count // most))
    if isinstance(values, (list, tuple)):
        return (values[index] for index in range(0, count, every))
    return islice(values.values() if isinstance(values, dict) else values, 0, None, every)
