"""Observes a loader's sampler while training iterates it: whether it can be read further ahead.

More workers have more batches under way, so their indices are drawn earlier. If a sampler draws each of them from a
random state that training draws from as well, or reads what training writes, the batches would change.
"""

from __future__ import annotations

import inspect
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
)

from lightning_gpuopt.loading.sampler import DRAW_AT_ONCE, ElasticBatchSampler
from lightning_gpuopt.objects.dataset_state import DatasetState
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.utils.replaced_method import hide_us

# what their iterators run: a sampler of the user's may give one of these
_CODES: Final = frozenset(each.__iter__.__code__ for each in DRAW_AT_ONCE if inspect.isfunction(each.__iter__))
# iterators of what is there as a whole when the iteration begins
_LISTS: Final = tuple(map(type, (iter([]), iter(()), iter(range(1)), iter(range(1 << 65)), iter(array("l")))))
_WRITABLE: Final = (list, array, np.ndarray)

_HELD_BY_ITERATOR: Final = 3  # references to a list by its iterator, a variable and an argument
_WRAPS: Final = (BatchSampler, ElasticBatchSampler)

# seconds that may go to the state of a sampler for each batch, in the mean, and beside that :data:`_FIRST_S`
_MAX_WATCH_S: Final = 0.002
_FIRST_S: Final = 0.5
_KNOWN_PART: Final = 0.1  # of these seconds, for a list that the order comes from

_DATASET_SEEN: Final = 3  # indices after the first that are seen to leave the dataset as it is
# batches of an epoch that show what its sampler reads: an iterator may be made, and dropped after the first
_SHOWN: Final = 8
_UNSEEN: Final = "is too large to check at each batch whether it reads what training writes"


class SeenOrder:
    """Observations on a loader's order: whether it is known ahead, or depends on when it is read."""

    def __init__(self) -> None:
        self.turns = 0  # batches handed out since it is watched
        self.is_list = False  # the sampler gave what is there as a whole when the iteration begins
        self.bound: str | None = None  # why indices must be asked for in their turn, as the end of a sentence about it
        self._keeps_place = False  # iterating it changes its own state
        self._was_left = False  # the last epoch, before its end
        self._kind: type | None = None

    def holds_for(self, loader: DataLoader[Any]) -> bool:
        """Whether observations on one loader hold for its replacement: its sampler has the same class."""
        return self._kind is type(_inner_sampler(loader))

    def why_bound(self, loader: DataLoader[Any]) -> str | None:
        """Why the sampler must never be read earlier, by observations so far."""
        sampler = _inner_sampler(loader)
        bound = self.bound
        if getattr(sampler, "generator", None) is torch.default_generator:
            bound = "draws from the global generator: the order would change"
        return None if bound is None else f"its sampler ({type(sampler).__name__}) {bound}"

    def why_not_ahead(self, loader: DataLoader[Any]) -> str | None:
        """Why the next iterator must not read further ahead than the user set; None if it can."""
        if (reason := self.why_bound(loader)) is not None:
            return reason
        if self.turns >= _SHOWN or self.is_known(loader):
            return None
        name = type(_inner_sampler(loader)).__name__
        return f"its sampler ({name}) may read what training writes; one epoch must be observed first"

    def is_known(self, loader: DataLoader[Any]) -> bool:
        """Whether the order of an epoch is known at its start, by its sampler's class or observations."""
        if isinstance(loader.dataset, IterableDataset) or self.is_list:
            return True
        return _is_known(_inner_sampler(loader))

    def watched(self, loader: DataLoader[Any]) -> Any:
        """The sampler of a loader's batches, observed while it draws."""
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        inner = _inner_sampler(loader)
        if self._keeps_place and self._was_left and self.bound is None:
            self.bound = (
                "keeps its position, and epochs end before it does: read further ahead, the next epoch would start "
                "elsewhere"
            )
        self._kind, self._was_left = type(inner), True
        return _Watched(sampler, inner, loader.dataset, self, is_known=_is_known(inner))


class _Watched:
    """A sampler whose state is compared between one batch and the next request."""

    def __init__(self, sampler: Any, inner: Any, dataset: Any, order: SeenOrder, *, is_known: bool) -> None:
        self._sampler, self._inner, self._dataset, self._order = sampler, inner, dataset, order
        self._known, self._is_first = is_known, not order.turns
        self._is_known = is_known or order.is_list
        self._reads: Any = None if is_known else sampler  # what its order may be read from while it goes on
        if isinstance(inner, SubsetRandomSampler) and is_known:
            self._reads = inner if type(inner) is SubsetRandomSampler else inner.indices
        elif isinstance(inner, _WRITABLE):
            self._reads = inner
        self._state: DatasetState | None = None
        self._batch_size: Any = None
        self._spent_s = 0.0
        self._drawn = 0
        self._length: int | None = None
        with suppress(Exception):  # of the user's: torch does not ask
            self._length = len(sampler)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self._sampler).__name__} has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        numbers = iter(self._sampler)
        if self._sampler is self._inner:
            self.note(numbers)
        return self._rest(numbers)

    def note(self, numbers: Any) -> None:
        is_list = type(numbers) in _LISTS
        self._order.is_list = is_list or getattr(numbers, "gi_code", None) in _CODES
        self._is_known = self._known or self._order.is_list
        if self._is_known and not self._known:
            self._reads = None
        if is_list:
            behind = numbers.__reduce__()[1][0]
            is_held = isinstance(behind, _WRITABLE) and sys.getrefcount(behind) > _HELD_BY_ITERATOR
            if is_held or (isinstance(behind, (list, tuple)) and any(type(each) is not int for each in behind[:1])):
                self._reads = behind  # others that have it, or what is in it, may write to it

    def _rest(self, numbers: Iterator[Any]) -> Iterator[Any]:
        order, before = self._order, None
        while True:
            if self._drawn and order.bound is None and self._has_changed():
                order.bound = "reads state that changes while training runs: read earlier, it would give other batches"
            try:
                number = self._next(numbers)
            except StopIteration:
                order._was_left = False
                return
            except BaseException as error:
                hide_us(error)
                raise
            if number is before and isinstance(number, (*_WRITABLE, dict)):
                order.bound = "reuses one list for all batches: read earlier, it would hold another batch"
            before = number
            self._drawn += 1
            order._was_left = self._drawn != self._length
            if order.bound is None and (self._reads is not None or self._drawn == 1):
                self._take_down()
            yield number

    def _next(self, numbers: Iterator[Any]) -> Any:
        """The next one; the effects of reading it are observed."""
        order = self._order
        if not self._drawn and not self._known:
            return self._first(numbers)
        if self._is_known or order.bound is not None:
            return next(numbers)
        looks = self._is_first and self._drawn <= _DATASET_SEEN
        state = DatasetState(dataset=self._dataset) if looks else None
        states = RandomStates()
        try:
            number = next(numbers)
        finally:  # at its end as well
            if states != RandomStates():
                order.bound = "draws random numbers for each index: the order would change"
        if order.bound is None and state is not None and state.has_changed(but_on_demand=True):
            order.bound = "changes the dataset while it is iterated: read earlier, the dataset would differ"
        return number

    def _first(self, numbers: Iterator[Any]) -> Any:
        """The first one: a BatchSampler then iterates the sampler inside it."""
        outer = self._sampler
        if getattr(outer, "sampler", None) is not self._inner or not _iterates_as(outer, (BatchSampler,)):
            return next(numbers)
        held = vars(outer)  # Lightning may record what is set on it
        held["sampler"] = _Noting(self._inner, self)
        try:
            return next(numbers)
        finally:
            held["sampler"] = self._inner

    def _take_down(self) -> None:
        """Ignore changes made by its own iteration."""
        if self._is_known:
            self._batch_size = getattr(self._sampler, "batch_size", None)
        if self._reads is None:
            return
        began = time.thread_time()
        if self._state is None or self._state.has_changed():
            self._order._keeps_place |= self._state is not None
            self._state = DatasetState(sampler=self._reads)
            if any(each.kind == "trained" for each in self._state.held):
                self._order.bound = "reads what training changes: read earlier, it would give other batches"
            elif not self._state.is_comparable:
                self._order.bound = _UNSEEN
        self._spent_s += time.thread_time() - began

    def _has_changed(self) -> bool:
        if self._is_known and getattr(self._sampler, "batch_size", None) != self._batch_size:
            return True
        if self._state is None:
            return False
        began = time.thread_time()
        changed = self._state.has_changed()
        self._spent_s += time.thread_time() - began
        if not changed and self._is_known and self._spent_s > _KNOWN_PART * (_FIRST_S + _MAX_WATCH_S * self._drawn):
            self._reads = self._state = None  # a long list that nearly nobody writes to
        elif not changed and self._spent_s > _FIRST_S + _MAX_WATCH_S * self._drawn:
            self._order.bound = _UNSEEN
        return changed


class _Noting:
    """Replaces a sampler while it is iterated: notes its values."""

    def __init__(self, sampler: Any, watched: _Watched) -> None:
        self._sampler, self._watched = sampler, watched

    def __iter__(self) -> Iterator[Any]:
        numbers: Iterator[Any] = iter(self._sampler)
        self._watched.note(numbers)
        return numbers

    def __len__(self) -> int:
        return len(self._sampler)


def _inner_sampler(loader: DataLoader[Any]) -> Any:
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while _iterates_as(sampler, _WRAPS) and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return sampler


def _is_known(sampler: Any) -> bool:
    if type(sampler).__module__.startswith("torchdata."):
        return True
    return _iterates_as(sampler, DRAW_AT_ONCE) or type(sampler) in (tuple, range, *_WRITABLE)


def _iterates_as(sampler: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a sampler is of one of these classes and has its ``__iter__``; torchdata's iterate as torch's do."""
    own = getattr(type(sampler), "__iter__", None)
    counts = type(sampler).__module__.startswith("torchdata.")
    return any(isinstance(sampler, kind) and (counts or own is vars(kind).get("__iter__")) for kind in kinds)
