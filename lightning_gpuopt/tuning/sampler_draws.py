"""Whether a loader's sampler may be asked for indices earlier than it would have been: what it draws from, and reads.

More workers have more batches under way, so their indices are drawn earlier. Where a sampler draws each of them from a
random state that training draws from as well, or reads what training writes, they would come out otherwise. What a
sampler of the user's reads is seen as it is iterated in training, for an epoch: :class:`Order`.
"""

from __future__ import annotations

import inspect
import multiprocessing
import signal
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_gpuopt.compat.dataloader import watch_sampler
from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler
from lightning_gpuopt.objects.contents import length_of
from lightning_gpuopt.objects.dataset_state import DatasetState
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.utils.replacement import hide_us

_DRAW_AT_ONCE: Final = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    ElasticSampler,
)
"""Samplers that draw from a random state when they are iterated, and not again for each index."""

_CODES: Final = frozenset(each.__iter__.__code__ for each in _DRAW_AT_ONCE if inspect.isfunction(each.__iter__))
"""What their iterators run: a sampler of the user's may give one of these."""

_WRAPS: Final = (BatchSampler, ElasticBatchSampler)
_MAX_S: Final = 1.0
"""So long an unknown sampler is iterated at most."""

_PATIENCE_S: Final = 3.0
"""So long the process in which it is iterated may take in all."""

_MANY: Final = 100_000
"""One that has drawn nothing for so many indices, and is not at its end by then, draws at once."""

_EPOCHS: Final = 2
"""A sampler that never ends has been seen whole when it gave so many times the dataset's length."""

_answers: weakref.WeakKeyDictionary[Any, tuple[str | None, bool]] = weakref.WeakKeyDictionary()
"""What was seen of each sampler: why it must not be asked earlier, and whether its order is known ahead."""

_LISTS: Final = tuple(map(type, (iter([]), iter(()), iter(range(1)), iter(range(1 << 65)), iter(array("l")))))
"""Iterators of what is there as a whole when the iteration begins."""

_MAX_WATCH_S: Final = 0.002
"""Seconds that may go to the state of a sampler for each batch, in the mean, and beside that :data:`_FIRST_S`."""

_FIRST_S: Final = 0.5


def why_not_earlier(loader: DataLoader[Any], *, look: bool = True) -> str | None:
    """Why a map-style loader's sampler must be asked when it would have been; None where that is no matter.

    One that is not torch's is iterated once in a process of its own, forked for that: here nothing changes. It is not
    where it holds what processes share.

    Args:
        loader: the loader.
        look: iterate it there; else the answer is that nobody has looked.
    """
    sampler = _inner_sampler(loader)
    name = type(sampler).__name__
    if getattr(sampler, "generator", None) is torch.default_generator:
        return f"its sampler ({name}) draws from the global generator: another order would come of it"
    if _is_known(sampler):
        return None
    if not look:
        return f"its sampler ({name}) was not looked at"
    try:
        if sampler not in _answers:
            _answers[sampler] = _seen_in_a_fork(sampler, loader.dataset)
        seen, _ = _answers[sampler]
    except TypeError:  # it has no place for weak references
        seen, _ = _seen_in_a_fork(sampler, loader.dataset)
    return None if seen is None else f"its sampler ({name}) {seen}"


def _inner_sampler(loader: DataLoader[Any]) -> Any:
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while _iterates_as(sampler, _WRAPS) and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return sampler


def _is_known(sampler: Any) -> bool:
    """Whether the order of a whole epoch is there as it begins, by what the sampler is."""
    if type(sampler).__module__.startswith("torchdata."):
        return True
    return _iterates_as(sampler, _DRAW_AT_ONCE) or type(sampler) in (list, tuple, range, array, np.ndarray)


class Order:
    """What was seen of a loader's order: whether it is known ahead, or changes while training runs.

    Attributes:
        has_begun: an epoch was iterated under observation.
        changes: what decides on it has changed in mid-epoch, by something else than the sampler's own iteration.
        is_unseen: the sampler holds too much to compare it for each batch.
    """

    def __init__(self) -> None:
        self.has_begun = self.changes = self.is_unseen = False

    def why_not_ahead(self, loader: DataLoader[Any]) -> str | None:
        """Why the next iterator must not ask further ahead than the user has set it; None where it may."""
        name = type(_inner_sampler(loader)).__name__
        if self.changes:
            return f"its sampler ({name}) reads what changes while training runs: earlier, it would give other batches"
        if self.is_unseen:
            return f"its sampler ({name}) holds too much to see for each batch whether it reads what training writes"
        if self.has_begun or self.is_known(loader):
            return None
        return f"its sampler ({name}) may read what training writes, which an epoch has to show first"

    @staticmethod
    def is_known(loader: DataLoader[Any]) -> bool:
        """Whether the order of an epoch is there as it begins, by what its sampler is, or gives an iterator of."""
        if isinstance(loader.dataset, IterableDataset) or _is_known(sampler := _inner_sampler(loader)):
            return True
        try:
            return _answers.get(sampler, (None, False))[1]
        except TypeError:  # it has no place for weak references
            return False

    def watch(self, loader: DataLoader[Any], iterator: Any) -> None:
        """See the training loop's next iterator draw.

        Args:
            loader: torch itself makes its iterators.
            iterator: has just been made.
        """
        watch_sampler(iterator, lambda sampler: _Watched(sampler, self, is_known=self.is_known(loader)))


class _Watched:
    """A sampler whose state is compared between what it has given and what it is asked for next."""

    def __init__(self, sampler: Any, order: Order, *, is_known: bool) -> None:
        self._sampler, self._order, self._is_known = sampler, order, is_known
        self._state: DatasetState | None = None
        self._batch_size: Any = None
        self._spent_s = 0.0

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return self.rest(iter(self._sampler))

    def rest(self, numbers: Iterator[Any]) -> Iterator[Any]:
        """Its iterator, from where that is."""
        order = self._order
        for drawn in count():
            if drawn and not order.changes and not order.is_unseen:
                order.changes = self._has_changed(drawn)
            try:
                number = next(numbers)
            except StopIteration:
                return
            except BaseException as error:
                hide_us(error)
                raise
            order.has_begun = True
            if not order.changes and not order.is_unseen:
                self._take_down()
            yield number

    def _take_down(self) -> None:
        """What its own iteration has changed is no change."""
        if self._is_known:
            self._batch_size = getattr(self._sampler, "batch_size", None)
            return
        began = time.perf_counter()
        if self._state is None or self._state.has_changed():
            self._state = DatasetState(sampler=self._sampler)
            self._order.changes = any(each.kind == "trained" for each in self._state.held)
            self._order.is_unseen = not self._state.is_comparable
        self._spent_s += time.perf_counter() - began

    def _has_changed(self, drawn: int) -> bool:
        if self._is_known:
            return bool(getattr(self._sampler, "batch_size", None) != self._batch_size)
        began = time.perf_counter()
        changed = self._state is not None and self._state.has_changed()
        self._spent_s += time.perf_counter() - began
        self._order.is_unseen = not changed and self._spent_s > _FIRST_S + _MAX_WATCH_S * drawn
        return changed


def _iterates_as(sampler: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a sampler is of these, or of a class that derives from one and has its ``__iter__``.

    Those of torchdata iterate as torch's, and count.
    """
    own = getattr(type(sampler), "__iter__", None)
    counts = type(sampler).__module__.startswith("torchdata.")
    return any(isinstance(sampler, kind) and (counts or own is vars(kind).get("__iter__")) for kind in kinds)


def _seen_in_a_fork(sampler: Any, dataset: Any) -> tuple[str | None, bool]:
    """What iterating a sampler does that depends on when, None for nothing; and whether its order is known ahead.

    Seen in a process that ends with it.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return "was not looked at", False
    if (shared := _shared(sampler, dataset)) is not None:
        return f"holds {shared}, which a look at it would change", False
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_seen, args=(sender, sampler, dataset), daemon=True)
    try:
        with sender:
            process.start()
        if not receiver.poll(_PATIENCE_S):
            why = "gave no answer in a process of its own, where it is iterated to see whether it draws for each index"
            return why, False
        seen: tuple[str | None, bool] = receiver.recv()
        return seen
    except EOFError:
        return "ends the process in which it is iterated to see whether it draws random numbers for each index", False
    except Exception as error:  # no more processes; a daemon, which may have none; a warning that is an error
        return f"cannot be looked at: {error}", False
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()


def _shared(sampler: Any, dataset: Any) -> str | None:
    """Something that a sampler would change for this process as well if it were iterated in another."""
    own = {name: each for name, each in getattr(sampler, "__dict__", {}).items() if each is not dataset}
    own = {name: each for name, each in own.items() if not isinstance(each, Dataset)}
    state = DatasetState(sampler=own, its_class=type(sampler))
    return next((str(each) for each in (*state.held, *state.shared) if each.kind in ("file", "shared")), None)


def _send_seen(sender: Any, sampler: Any, dataset: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to this process as well
    torch.set_num_threads(1)  # the threads of a parallel region are not there after a fork
    sender.send(_seen(sampler, dataset))


def _seen(sampler: Any, dataset: Any) -> tuple[str | None, bool]:
    own = [each for each in getattr(sampler, "__dict__", {}).values() if isinstance(each, Dataset)]
    state = DatasetState(dataset=[dataset, *own])
    try:
        numbers = iter(sampler)
        is_known = type(numbers) in _LISTS or getattr(numbers, "gi_code", None) in _CODES
        next(numbers, None)
        first = RandomStates()
        whole = _exhaust(numbers, _EPOCHS * max(length_of(dataset) or 1, 1))
    except Exception as error:  # maybe of the fork: CUDA, a thread that is not there
        return f"cannot be looked at: {type(error).__name__}: {error}", False
    if state.has_changed(but_on_demand=True):
        return "changes the dataset as it is iterated: earlier would be another dataset", False
    if RandomStates() != first:
        return "draws random numbers for each index: another order would come of it", False
    return None if whole else "is too slow to see whether it draws random numbers for each index", is_known


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
