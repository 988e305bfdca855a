"""The first batches of a training run, kept as the loader gave them, and handed out again and again."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from lightning_gpuopt.prefetch.leaves import Found

MAX_BATCHES: Final = 5
_MAX_BYTES: Final = 2**29  # of all kept batches; one is kept whatever its size
Item = tuple[Any, int, int]  # a batch, its index, and that of its loader, as Lightning's fetcher has it


class Kept:
    def __init__(self) -> None:
        self.items: list[Item] = []
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return len(self.items) >= MAX_BATCHES or self._bytes >= _MAX_BYTES

    def add(self, item: Item) -> None:
        """Keep a copy of a batch that is about to be handed out; page-locked memory stays so."""
        if not self.is_full:
            self.items.append((copied(item[0], lambda tensor: True), *item[1:]))
            self._bytes += sum(tensor.nbytes for tensor in Found(self.items[-1][0]).tensors)


class Recorder(Iterator[Item]):
    """Passes an epoch's batches on, and keeps the first ones."""

    def __init__(self, iterator: Iterator[Item], kept: Kept) -> None:
        self._iterator = iterator
        self._kept = kept

    def __next__(self) -> Item:
        item = next(self._iterator)
        self._kept.add(item)
        return item


class Replay(Iterator[Item]):
    """Hands out the kept batches for ever; whatever the step does to one, the next time it is as the loader gave it.

    What the way to the device copies is handed out as it is kept, of everything else a copy is made; with
    ``copies_all`` of all, as the user's own code sees batches before they come there.
    """

    def __init__(
        self,
        items: list[Item],
        device: torch.device,
        *,
        copies_all: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._items = items
        self._needs_copy = lambda tensor: copies_all or tensor.device == device
        self._clock = clock
        self._next = 0
        self.copied_s = 0.0  # seconds that copying has taken

    def __next__(self) -> Item:
        began_s = self._clock()
        batch, index, loader = self._items[self._next]
        self._next = (self._next + 1) % len(self._items)
        fresh = copied(batch, self._needs_copy)
        self.copied_s += self._clock() - began_s
        return fresh, index, loader


def copied(value: Any, needs_copy: Callable[[torch.Tensor], bool]) -> Any:
    """A batch like another: new collections, copies of tensors where needed, and of other objects where they can be."""
    if isinstance(value, torch.Tensor):
        return _clone(value) if needs_copy(value) else value
    if type(value) is dict:
        return {key: copied(each, needs_copy) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(each, needs_copy) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(each, needs_copy) for each in value))
    try:
        return copy.deepcopy(value)
    except Exception:  # it cannot be copied: it is handed out again as the step has left it
        return value


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    clone = tensor.detach().clone()
    if tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned():
        clone = clone.pin_memory()
    return clone.requires_grad_(tensor.requires_grad)
