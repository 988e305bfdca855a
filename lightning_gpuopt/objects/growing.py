"""Finds what grows in a program whose steps get slower, or whose memory grows: lists, dicts, hooks, caches."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from lightning_gpuopt.objects.memory_size import Clock, Weight, weigh
from lightning_gpuopt.objects.walk import CONTAINERS, Limits, Node, Walk
from lightning_gpuopt.utils.plain_containers import length_of
from lightning_gpuopt.utils.weak_reference import weakly

log = logging.getLogger(__name__)

_MAX_S: Final = 0.02  # for finding the containers; for weighing those that have grown, as many
_FEW: Final = 64  # entries of a container in which objects with attributes, and other containers, are looked for
_MOST_CACHED: Final = 100_000  # entries of a bounded cache, which shows all at once, that are asked for
_GROWN: Final = 64  # a container has grown if it has so many more entries than at the beginning, and twice as many
_GROWN_BYTES: Final = 8 << 20  # that a process has grown by before it is looked at why
_EXPLAINS: Final = 0.25  # a container explains that a process has grown by holding this share of it
_HEAVY: Final = 1 << 20  # bytes that are said


@dataclass
class _Seen:
    node: Node
    count: int  # entries
    before: int = 0  # entries that there were
    weight: Weight = field(default_factory=lambda: Weight(opaque=True))

    @property
    def entries(self) -> Collection[Any] | None:
        """The container, or what a cache holds, as the garbage collector is shown it; None if that is too much."""
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
    def text(self) -> str:
        tensors = self.weight.tensor_bytes
        holds = f" and holds {_size(tensors)} of tensors" if tensors >= _HEAVY else ""
        keeps = " with their autograd graphs" if holds else ", with autograd graphs"
        keeps *= self.weight.graphs
        if not (holds or keeps or self.weight.opaque) and self.weight.bytes >= _HEAVY:
            holds = f" and holds about {_size(self.weight.bytes)}"
        entries = "entry" if self.count == 1 else "entries"
        kind = "lru_cache" if self.node.kind == "lru_cache" else type(self.node.value).__name__
        return f"{self.node.path} ({kind}) grew from {self.before:,} to {self.count:,} {entries}{holds}{keeps}"


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
        self._first = {each.node.path: each.count for each in _containers(walk)}
        self._complete = walk.is_whole
        self._middle = self._newest = (self._first, process)  # sizes, the process's too, about half of the looks ago
        self._looks = 0
        self._looked_at = process
        self._why = ""
        self._samples = samples
        self.keeps = 0.0  # entries that what explains the growth got for each sample; an lru_cache is bounded: none

    def _owners(self) -> dict[str, object]:
        return {name: owner for name, behind in self._behind.items() if (owner := behind()) is not None}

    def _containers(self) -> Iterator[_Seen]:
        for each in _containers(Walk(self._owners().items(), self._limits)):
            first, name = self._first, each.node.path  # where not all were seen then, at first sight
            each.before = first.get(name, 0) if self._complete else first.setdefault(name, each.count)
            yield each

    def look(self, suspect: str = "") -> str:
        """What has grown most, for people; of what is not the suspect's, a phase or hook, only what holds tensors."""
        suspect = suspect.rpartition(".")[0] or {"data_wait": "dataset"}.get(suspect, "module")
        longer = [
            (each.count - each.before, each)
            for each in self._containers()
            # what is new in another counts there
            if each.has_grown and (each.node.path in self._first or not each.node.inside)
        ]
        grown, owners = [], self._owners()
        for _, each in self._weighed(longer):
            owner, is_heavy = owners.get(each.node.root), each.weight.tensor_bytes >= _HEAVY
            kind = {"module": torch.nn.Module, "dataset": Dataset}.get(suspect)
            suspected = each.node.root == suspect if kind is None else isinstance(owner, kind)
            if suspected or each.weight.graphs or is_heavy:
                grown.append((is_heavy, suspected, each.weight.tensor_bytes, each.count, each.text))
        return max(grown)[-1] if grown else ""

    def why(self, process: int, samples: int = 0) -> str:
        """The container that explains most of what this process has grown by of late; empty if none does."""
        if process - self._looked_at < _GROWN_BYTES:
            return self._why
        self._looked_at = process
        middle, process_then = self._middle
        least = max(_EXPLAINS * (process - process_then), _GROWN_BYTES / 4)
        sizes: dict[str, int] = {}
        longer, grown = [], []
        for each in self._containers():
            name = each.node.path
            sizes[name] = each.count
            added = each.count - middle.get(name, each.before)
            if added > 0 and (name in middle or not each.node.inside):
                longer.append((added, each))
        for added, each in self._weighed(longer):
            bytes_of_late = each.weight.bytes * added / max(each.count, 1)
            unknown = (each.weight.opaque or each.weight.graphs) and each.has_grown
            each.before = min(each.before, each.count)
            if bytes_of_late >= least or unknown:
                grown.append((bytes_of_late, each.count, each))
        self._why, self.keeps = "", 0.0
        if grown:
            most = max(grown, key=lambda each: each[:2])[-1]
            self._why = most.text
            if most.node.kind != "lru_cache" and samples > self._samples:
                self.keeps = (most.count - most.before) / (samples - self._samples)
        self._looks += 1
        if self._looks & (self._looks - 1) == 0:
            self._middle, self._newest = self._newest, (sizes, process)
        return self._why

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
                log.debug("what %s holds could not be looked at", each.node.path, exc_info=True)


def _containers(walk: Walk) -> Iterator[_Seen]:
    met: set[str] = set()
    for node in walk:
        is_cache = node.kind == "lru_cache"
        if (is_cache or node.kind in CONTAINERS) and not isinstance(node.value, (tuple, frozenset)):
            if node.path not in met:  # a class may have one of the same name
                yield _Seen(node, node.value.cache_info().currsize if is_cache else length_of(node.value))
            met.add(node.path)


def _size(size: float) -> str:
    mib = size / (1 << 20)
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib:.3g} MiB"
