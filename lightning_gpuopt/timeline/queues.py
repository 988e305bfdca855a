"""How full the loader's queues are when the training loop comes for a batch, and who it waits for.

An iterator that is not as expected is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from lightning_gpuopt.compat.dataloader import awaited_worker, has_queues, shares_of_others, waiting
from lightning_gpuopt.measurements.loading import QueueTimes
from lightning_gpuopt.utils.weak_reference import weakly

# a fetch that takes longer than this had to wait; only then is the cost of a closer look worth it
_A_WAIT_S: Final = 0.001
# so much of what the other workers were asked for being ready means that one late batch holds up the rest
_NEARLY_ALL: Final = 0.75


_ALL_PROBED: Final = 64  # fetches of which each is looked at
_FEW_WAITS: Final = 1 / 8
"""Where fewer fetches wait, it is enough to look at some after that: each stands for those before it that were skipped.

They are skipped at random, up to ``_MAX_SKIPPED`` in a row, so that no rhythm of the loader falls in with ours.
"""

_MAX_SKIPPED: Final = 6


class QueueProbe:
    """Looks at the queues before and after fetches: at each, or at some where hardly any has to wait."""

    def __init__(self) -> None:
        self._iterators: list[Callable[[], Any]] = []
        self._awaited: list[int | None] = []
        self._fetches = self._ready = self._empty = self._waits = 0
        self._wait_s = self._late_wait_s = self._unpinned_wait_s = 0.0
        self._unpinned = False
        self._passed = self._skip = self._skipped = 0
        self._random = random.Random(0)  # the global one is the program's

    @property
    def watches(self) -> bool:
        return bool(self._iterators)

    def watch(self, iterators: Sequence[Any]) -> list[Any]:
        """Say which iterators feed the loop from now on; returns those that can be watched."""
        watched = [each for each in iterators if has_queues(each)]
        self._iterators = [weakly(each) for each in watched]
        self._awaited = [None] * len(watched)
        return watched

    def _alive(self) -> list[Any]:
        """The iterators, as long as all of them are there."""
        alive = [each() for each in self._iterators]
        return [] if None in alive else alive

    def before_fetch(self) -> None:
        if not (iterators := self._alive()):
            return
        for number, iterator in enumerate(iterators):
            self._awaited[number] = awaited_worker(iterator)
        self._passed += 1
        self._unpinned = False  # of the look before, if this fetch gets none
        if self._skip:
            self._skip -= 1
            return
        self._look(iterators)

    def _look(self, iterators: list[Any]) -> None:
        stands_for = self._skipped + 1
        looks = [waiting(iterator) for iterator in iterators]
        self._unpinned |= any(unpinned for _, unpinned in looks)
        ready = min(here for here, _ in looks)  # of several loaders a step takes one batch each
        self._fetches += stands_for
        self._ready += ready * stands_for
        self._empty += stands_for if not ready else 0
        if self._passed >= _ALL_PROBED and self._waits < _FEW_WAITS * self._passed:
            self._skip = self._random.randint(0, _MAX_SKIPPED)
        self._skipped = self._skip

    def after_fetch(self, wait_s: float) -> None:
        if wait_s < _A_WAIT_S or not (iterators := self._alive()):
            return
        self._waits += 1
        self._wait_s += wait_s
        if self._unpinned:
            self._unpinned_wait_s += wait_s
        elif all(map(_held_up, iterators, self._awaited)):  # of several loaders one that is fast has all ready
            self._late_wait_s += wait_s

    def times(self) -> QueueTimes:
        return QueueTimes(
            self._fetches, self._ready, self._empty, self._waits, self._wait_s, self._late_wait_s, self._unpinned_wait_s
        )


def _held_up(iterator: Any, awaited: int | None) -> bool:
    """Whether the other workers' batches are nearly all ready, now that the awaited worker's has come.

    The awaited worker's next batches do not count: they cannot be ready before the late one.
    """
    others, ready = shares_of_others(iterator, awaited)
    return bool(others) and ready >= _NEARLY_ALL * others
