"""Finds what grows in a program whose steps get slower, or whose memory grows: lists, dicts, hooks, caches."""

from __future__ import annotations

import logging
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_gpuopt.recorder.containers import (
    PLAIN,
    Container,
    Containers,
    attributes_of,
)
from lightning_gpuopt.utils.plain_containers import CONTAINERS, entries_of, entry_at, length_of
from lightning_gpuopt.utils.weakly import weakly

log = logging.getLogger(__name__)

_MAX_SAMPLED: Final = 512
_MOST_WALKED: Final = 200_000
"""Entries of a dict, set or deque from which the sample is taken: they have to be walked through."""

_PARTS: Final = (64, 16, 8)
"""Parts that are weighed of an entry that is a container or an object itself, by depth."""

_MAX_S: Final = 0.02
"""Seconds at most for weighing those that have grown."""

_GROWN: Final = 64
"""A container has grown if it has at least so many more entries than at the beginning, and twice as many."""

_GROWN_BYTES: Final = 8 << 20
"""Bytes that a process has grown by before it is looked at why."""

_EXPLAINS: Final = 0.25
"""A container explains that a process has grown by holding this share of it."""

_EACH: Final = "[...]"
_GROW: Final = (list, dict, set, deque, defaultdict, OrderedDict)
_FIXED: Final = ("tuple", "frozenset", "array", "table")
_HEAVY_MIB: Final = 1.0
_MIB: Final = 1024 * 1024


@dataclass(frozen=True)
class _Weight:
    """What the entries of a container hold.

    Attributes:
        bytes: of memory of this process, estimated from a sample; what several entries share counts once.
        tensor_mib: of tensors, wherever they are.
        graphs: whether they keep their autograd graphs.
        opaque: whether some are objects whose size Python does not know.
    """

    bytes: float
    tensor_mib: float
    graphs: bool
    opaque: bool


@dataclass(frozen=True)
class _Grown:
    """A container that has grown."""

    name: str
    kind: str
    before: int
    count: int
    weight: _Weight
    suspected: bool = False
    added: float = 0.0

    @property
    def text(self) -> str:
        mib, graphs = self.weight.tensor_mib, self.weight.graphs
        holds = f" and holds {_size(mib)} of tensors" if mib >= _HEAVY_MIB else ""
        keeps = " with their autograd graphs" if graphs and holds else ", with autograd graphs" * graphs
        if not (holds or keeps or self.weight.opaque) and self.weight.bytes >= _HEAVY_MIB * _MIB:
            holds = f" and holds about {_size(self.weight.bytes / _MIB)}"
        entries = "entry" if self.count == 1 else "entries"
        return f"{self.name} ({self.kind}) grew from {self.before:,} to {self.count:,} {entries}{holds}{keeps}"


@dataclass(frozen=True)
class _Moment:
    """The sizes of all containers at one time, and the process's own in bytes."""

    sizes: dict[str, int] = field(default_factory=dict)
    process: int = 0


class Growing:
    """Compares the sizes of a program's containers with those at the beginning.

    The containers are the user's, and in use: other threads may change them meanwhile. One that cannot be looked at is
    left out.

    Args:
        owners: whose attributes to look at, by a name for people, held weakly; what they hold, and the globals of the
            user's modules that their classes are defined in, are looked at as well.
        clock: seconds, for the limit on what a look takes; of this thread, as the GIL may be another's meanwhile.
        process: bytes of this process, where its memory is what is to be explained.
        samples: that this process has read.

    Attributes:
        keeps: entries that what explains the growth has got for each sample that was read; 0 where nothing does, and of
            an ``lru_cache``, which has a bound.
    """

    def __init__(
        self,
        owners: Mapping[str, object],
        clock: Callable[[], float] = time.thread_time,
        *,
        process: int = 0,
        samples: int = 0,
    ) -> None:
        # A dataset ends with its loader, and not with whoever looks at it.
        self._behind = {name: weakly(owner) for name, owner in owners.items()}
        self._clock = clock
        walk = Containers(self._owners.items(), clock)
        self._first = {each.name: count for each, count in _with_inner(_counted(walk))}
        self._complete = walk.complete
        self._middle = self._newest = _Moment(self._first, process)
        self._looks = 0
        self._looked_at = process
        self._why = ""
        self._samples = samples
        self.keeps = 0.0

    @property
    def _owners(self) -> dict[str, object]:
        """Those that are still there."""
        return {name: owner for name, behind in self._behind.items() if (owner := behind()) is not None}

    def look(self, suspect: str = "") -> str:
        """What has grown most, for people; empty where nothing has. Takes a few milliseconds.

        Args:
            suspect: the phase or hook whose time grows: of what it does not own, only what holds tensors is named.
        """
        suspect = suspect.rpartition(".")[0] or {"data_wait": "dataset"}.get(suspect, "module")
        longer = [
            (each, count, count - before)
            for each, count in _counted(Containers(self._owners.items(), self._clock))
            if _has_grown(before := self._before(each.name, count), count)
            and (each.name in self._first or not each.inside)  # what is new in another counts there
        ]
        grown = []
        for each, count, weight, added in self._weighed(longer):
            suspected = self._suspected(each.root, suspect)
            if suspected or weight.graphs or weight.tensor_mib >= _HEAVY_MIB:
                grown.append(_Grown(each.name, each.kind, count - added, count, weight, suspected))
        if not grown:
            return ""
        heavy = _HEAVY_MIB
        return max(
            grown,
            key=lambda each: (each.weight.tensor_mib >= heavy, each.suspected, each.weight.tensor_mib, each.count),
        ).text

    def why(self, process: int, samples: int = 0) -> str:
        """Why this process grows: the container that has taken most of late, for people; empty where none explains it.

        Compared is with a moment about half of the looks ago, so that what was filled before and is at rest does not
        count. Takes a few milliseconds, where the process has grown by 8 MiB since the last time.

        Args:
            process: its bytes now.
            samples: that it has read by now.
        """
        if process - self._looked_at < _GROWN_BYTES:
            return self._why
        self._looked_at = process
        sizes: dict[str, int] = {}
        longer = []
        for each, count in _with_inner(_counted(Containers(self._owners.items(), self._clock))):
            sizes[each.name] = count
            before = self._middle.sizes.get(each.name, self._before(each.name, count))
            if count > before and (each.name in self._middle.sizes or not each.inside):
                longer.append((each, count, count - before))
        taken = process - self._middle.process
        grown = []
        for each, count, weight, added in self._weighed(longer):
            first = self._before(each.name, count)
            of_late = weight.bytes * added / max(count, 1)
            unknown = (weight.opaque or weight.graphs) and _has_grown(first, count)
            if of_late >= max(_EXPLAINS * taken, _GROWN_BYTES / 4) or unknown:
                grown.append(_Grown(each.name, each.kind, min(first, count), count, weight, added=of_late))
        one = [each for each in grown if not each.name.endswith(_EACH)]
        most = max(one or grown, key=lambda each: (each.added, each.count), default=None)
        self._why = most.text if most is not None else ""
        self.keeps = 0.0
        if most is not None and most.kind != "lru_cache" and samples > self._samples:
            self.keeps = (most.count - most.before) / (samples - self._samples)
        self._looks += 1
        if self._looks & (self._looks - 1) == 0:
            self._middle, self._newest = self._newest, _Moment(sizes, process)
        return self._why

    def _before(self, name: str, count: int) -> int:
        """Entries that a container had at the beginning; where not all were seen then, at first sight."""
        return self._first.get(name, 0) if self._complete else self._first.setdefault(name, count)

    def _suspected(self, root: str, suspect: str) -> bool:
        """Whether a container belongs to whoever's time grows: a callback, the data, or the module."""
        owner = self._owners.get(root)
        if suspect == "module":
            return isinstance(owner, torch.nn.Module)
        return isinstance(owner, Dataset) if suspect == "dataset" else root == suspect

    def _weighed(self, longer: list[tuple[Container, int, int]]) -> Iterator[tuple[Container, int, _Weight, int]]:
        """Containers, their entries, what these weigh, and how many were added; those with most added come first."""
        end_s = self._clock() + _MAX_S
        for each, count, added in sorted(longer, key=lambda one: one[2], reverse=True):
            try:
                entries = each.entries()
                unknown = _Weight(0.0, 0.0, graphs=False, opaque=True)
                yield each, count, unknown if entries is None else _weigh(entries, self._clock, end_s), added
            except Exception:  # it is the user's, and another thread may change it
                log.debug("what %s holds could not be looked at", each.name, exc_info=True)


def _counted(walk: Containers) -> Iterator[tuple[Container, int]]:
    for each in walk:
        try:
            if each.kind not in _FIXED:
                yield each, each.count()
        except Exception:  # a class of the user's, which may refuse even that
            log.debug("%s could not be looked at", each.name, exc_info=True)


def _with_inner(counted: Iterable[tuple[Container, int]]) -> Iterator[tuple[Container, int]]:
    """Each container; and of one that holds containers, these together, by its name with ``[...]``."""
    for each, count in counted:
        yield each, count
        try:
            if each.kind == "lru_cache" or each.inside or not count:
                continue
            few = list(islice(entries_of(each.values), _PARTS[0]))  # the first: to go through all would copy them
            lengths = [len(one) for one in few if type(one) in _GROW]
            if lengths:
                inner = replace(each, name=f"{each.name}{_EACH}", kind=type(few[-1]).__name__, inside=True)
                yield inner, sum(lengths) * count // len(few)
        except Exception:  # another thread may change it
            log.debug("the entries of %s could not be looked at", each.name, exc_info=True)


def _has_grown(before: int, count: int) -> bool:
    return count - before >= _GROWN and count >= 2 * before


def _size(mib: float) -> str:
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib:.3g} MiB"


def _weigh(values: Collection[Any], clock: Callable[[], float], end_s: float) -> _Weight:
    """What a container holds, from a sample.

    Args:
        values: the container, or what is in it.
        clock: seconds.
        end_s: when to stop; one entry is looked at in any case.
    """
    scale = _Scale()
    sampled, number = 0, length_of(values)
    for entry in _sample(values, _MAX_SAMPLED):
        sampled += 1
        scale.put(entry)
        if clock() > end_s:
            break
    times = number / max(sampled, 1)
    slots = sys.getsizeof(values)
    return _Weight(scale.bytes * times + slots, scale.tensor_bytes * times / _MIB, scale.graphs, scale.opaque)


class _Scale:
    """Weighs objects with their parts: bytes of each once, of tensors as often as they come."""

    def __init__(self) -> None:
        self.bytes = self.tensor_bytes = 0.0
        self.graphs = self.opaque = False
        self._seen: set[int] = set()

    def put(self, each: Any, times: float = 1.0, depth: int = 0) -> None:
        """Add an object.

        Args:
            each: the object.
            times: how many objects it stands for.
            depth: of the parts of an entry.
        """
        kind = type(each)
        first = times if id(each) not in self._seen else 0.0
        self._seen.add(id(each))
        if issubclass(kind, torch.Tensor):
            bytes_ = each.numel() * each.element_size()
            self.tensor_bytes += times * bytes_
            self.graphs = self.graphs or each.grad_fn is not None
            self.bytes += first * bytes_ if each.device.type == "cpu" else 0.0
        elif issubclass(kind, np.ndarray):
            self.bytes += first * each.nbytes
        else:
            self.bytes += first * sys.getsizeof(each)
            if depth < len(_PARTS) and not issubclass(kind, (*PLAIN, bytearray)):
                self._put_parts(each, kind, times, depth)

    def _put_parts(self, each: Any, kind: type, times: float, depth: int) -> None:
        most = _PARTS[depth]
        if issubclass(kind, CONTAINERS):
            parts = list(_sample(each, most)) + (list(islice(dict.keys(each), most)) if isinstance(each, dict) else [])
            of = max(1.0, length_of(each) / most)
        else:
            named, slots = attributes_of(each)
            if not named and not slots and kind is not object and not callable(each):
                self.opaque = True
            parts, of = [*islice(named.values(), most), *islice(slots.values(), most)], 1.0
        for part in parts:
            self.put(part, times * of, depth + 1)


def _sample(values: Collection[Any], most: int) -> Iterable[Any]:
    """So many of the entries at most, evenly spread; of a dict, its values.

    Those of Python's own containers are taken at once, under the GIL: the next one added would end going through them.
    """
    count = length_of(values)
    if isinstance(values, (list, tuple)):
        return (entry_at(values, index) for index in range(0, count, max(1, -(-count // most))))
    count = min(count, _MOST_WALKED)
    sampled = islice(entries_of(values), 0, count, max(1, -(-count // most)))
    return list(sampled) if isinstance(values, CONTAINERS) else sampled
