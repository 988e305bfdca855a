"""Finds what grows in a program whose steps get slower, or whose memory grows: lists, dicts, hooks, caches."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from lightning_gpuopt.objects.walk import CONTAINERS, Limits, Node, Walk
from lightning_gpuopt.objects.weight import Clock, Weight, weigh
from lightning_gpuopt.utils.plain_containers import entries_of, length_of
from lightning_gpuopt.utils.weakly import weakly

log = logging.getLogger(__name__)

_MAX_S: Final = 0.02  # for finding the containers; for weighing those that have grown, as many
_FEW: Final = 64  # entries of a container in which objects with attributes, and other containers, are looked for
_MOST_CACHED: Final = 100_000  # entries of a bounded cache, which shows all at once, that are asked for
_GROWN: Final = 64  # a container has grown if it has so many more entries than at the beginning, and twice as many
_GROWN_BYTES: Final = 8 << 20  # that a process has grown by before it is looked at why
_EXPLAINS: Final = 0.25  # a container explains that a process has grown by holding this share of it
_EACH: Final = "[...]"
_GROW: Final = (list, dict, set, deque, defaultdict, OrderedDict)
_HEAVY_MIB: Final = 1.0
_MIB: Final = 1024 * 1024


@dataclass
class _Seen:
    """A container, or those in it together."""

    name: str
    kind: str
    count: int  # entries
    node: Node
    inside: bool
    before: int = 0  # entries that there were
    weight: Weight = field(default_factory=lambda: Weight(opaque=True))

    @property
    def entries(self) -> Collection[Any] | None:
        """The container, or what a cache holds, as the garbage collector is shown it; None where that is too much."""
        value: Any = self.node.value
        if self.node.kind != "lru_cache":
            return value  # type: ignore[no-any-return]
        maxsize = value.cache_info().maxsize
        held = gc.get_referents(value) if maxsize is None or self.count <= _MOST_CACHED else []
        if maxsize is None:
            return next((each for each in held if type(each) is dict and each is not vars(value)), None)
        return [each for each in held[: 3 * self.count] if not issubclass(type(each), (type, FunctionType))] or None

    @property
    def has_grown(self) -> bool:
        return self.count - self.before >= _GROWN and self.count >= 2 * self.before

    @property
    def tensor_mib(self) -> float:
        return self.weight.tensor_bytes / _MIB

    @property
    def text(self) -> str:
        holds = f" and holds {_size(self.tensor_mib)} of tensors" if self.tensor_mib >= _HEAVY_MIB else ""
        keeps = " with their autograd graphs" if holds else ", with autograd graphs"
        keeps *= self.weight.graphs
        if not (holds or keeps or self.weight.opaque) and self.weight.bytes >= _HEAVY_MIB * _MIB:
            holds = f" and holds about {_size(self.weight.bytes / _MIB)}"
        entries = "entry" if self.count == 1 else "entries"
        return f"{self.name} ({self.kind}) grew from {self.before:,} to {self.count:,} {entries}{holds}{keeps}"


class Growing:
    """Compares the sizes of what owners, by a name for people, hold and their code names with those at the beginning.

    The clock is this thread's, as the GIL may be another's meanwhile; ``process`` is bytes of this process.
    """

    def __init__(
        self, owners: Mapping[str, object], clock: Clock = time.thread_time, *, process: int = 0, samples: int = 0
    ) -> None:
        # A dataset ends with its loader, and not with whoever looks at it.
        self._behind = {name: weakly(owner) for name, owner in owners.items()}
        self._limits = Limits(of_globals=sys.maxsize, seconds=_MAX_S, clock=clock, few=_FEW, trained=True)
        walk = Walk(self._owners().items(), self._limits)
        self._first = {each.name: each.count for each in _containers(walk)}
        self._complete = walk.is_whole
        self._middle = self._newest = (self._first, process)  # sizes of all containers, and the process's own
        self._looks = 0
        self._looked_at = process
        self._why = ""
        self._samples = samples
        self.keeps = 0.0  # entries that what explains the growth got for each sample; an lru_cache is bounded: none

    def _owners(self) -> dict[str, object]:
        """Those that are still there."""
        return {name: owner for name, behind in self._behind.items() if (owner := behind()) is not None}

    def _containers(self) -> Iterator[_Seen]:
        for each in _containers(Walk(self._owners().items(), self._limits)):
            first = self._first  # where not all were seen then, at first sight
            each.before = first.get(each.name, 0) if self._complete else first.setdefault(each.name, each.count)
            yield each

    def look(self, suspect: str = "") -> str:
        """What has grown most, for people; of what is not the suspect's, a phase or hook, only what holds tensors."""
        suspect = suspect.rpartition(".")[0] or {"data_wait": "dataset"}.get(suspect, "module")
        longer = [
            (each.count - each.before, each)
            for each in self._containers()
            if each.has_grown
            and not each.name.endswith(_EACH)
            and (each.name in self._first or not each.inside)  # what is new in another counts there
        ]
        grown = []
        for _, each in self._weighed(longer):
            suspected, is_heavy = self._suspected(each.node.root, suspect), each.tensor_mib >= _HEAVY_MIB
            if suspected or each.weight.graphs or is_heavy:
                grown.append((is_heavy, suspected, each.tensor_mib, each.count, each.text))
        return max(grown)[-1] if grown else ""

    def why(self, process: int, samples: int = 0) -> str:
        """The container that explains most of what this process has grown by of late; empty where none does.

        Compared is with a moment about half of the looks ago, so that what has come to rest does not count.
        """
        if process - self._looked_at < _GROWN_BYTES:
            return self._why
        self._looked_at = process
        middle, process_then = self._middle
        least = max(_EXPLAINS * (process - process_then), _GROWN_BYTES / 4)
        sizes: dict[str, int] = {}
        longer, grown = [], []
        for each in self._containers():
            sizes[each.name] = each.count
            added = each.count - middle.get(each.name, each.before)
            if added > 0 and (each.name in middle or not each.inside):
                longer.append((added, each))
        for added, each in self._weighed(longer):
            bytes_of_late = each.weight.bytes * added / max(each.count, 1)
            unknown = (each.weight.opaque or each.weight.graphs) and each.has_grown
            each.before = min(each.before, each.count)
            if bytes_of_late >= least or unknown:
                grown.append((not each.name.endswith(_EACH), bytes_of_late, each.count, each))
        self._why, self.keeps = "", 0.0
        if grown:
            most = max(grown, key=lambda each: each[:3])[-1]
            self._why = most.text
            if most.kind != "lru_cache" and samples > self._samples:
                self.keeps = (most.count - most.before) / (samples - self._samples)
        self._looks += 1
        if self._looks & (self._looks - 1) == 0:
            self._middle, self._newest = self._newest, (sizes, process)
        return self._why

    def _suspected(self, root: str, suspect: str) -> bool:
        """Whether a container belongs to whoever's time grows: a callback, the data, or the module."""
        owner = self._owners().get(root)
        if suspect == "module":
            return isinstance(owner, torch.nn.Module)
        return isinstance(owner, Dataset) if suspect == "dataset" else root == suspect

    def _weighed(self, longer: list[tuple[int, _Seen]]) -> Iterator[tuple[int, _Seen]]:
        """What their entries weigh; those with most added come first."""
        clock = self._limits.clock
        end_s = clock() + _MAX_S
        for added, each in sorted(longer, key=lambda one: one[0], reverse=True):
            try:
                if (entries := each.entries) is not None:
                    each.weight = weigh(entries, clock, end_s, with_data=True)
                    each.weight.bytes += sys.getsizeof(entries)
                yield added, each
            except Exception:  # it is the user's, and another thread may change it
                log.debug("what %s holds could not be looked at", each.name, exc_info=True)


def _containers(walk: Walk) -> Iterator[_Seen]:
    """Each container; and of one that holds containers, these together, by its name with ``[...]``."""
    met: set[str] = set()
    for node in walk:
        value = node.value
        if node.kind not in (*CONTAINERS, "lru_cache") or isinstance(value, (tuple, frozenset)) or node.path in met:
            continue
        met.add(node.path)  # a class may have one of the same name
        try:
            if node.kind == "lru_cache":
                yield _Seen(node.path, "lru_cache", value.cache_info().currsize, node, node.inside)
                continue
            count = length_of(value)
            yield _Seen(node.path, type(value).__name__, count, node, node.inside)
            few = list(islice(entries_of(value), _FEW))  # the first: to go through all would copy them
            lengths = [len(one) for one in few if type(one) in _GROW]
            if lengths and not node.inside:
                together = sum(lengths) * count // len(few)
                yield _Seen(f"{node.path}{_EACH}", type(few[-1]).__name__, together, node, inside=True)
        except Exception:  # another thread may change it
            log.debug("%s could not be looked at", node.path, exc_info=True)


def _size(mib: float) -> str:
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib:.3g} MiB"
