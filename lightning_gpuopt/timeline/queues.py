"""How full the loader's queues are when the training loop comes for a batch, and who it waits for.

Reads ``_data_queue``, ``_worker_result_queue``, ``_task_info``, ``_tasks_outstanding`` and ``_rcvd_idx`` of torch's
``_MultiProcessingDataLoaderIter`` (torch 2.4 to 2.13). An iterator that is not as expected is left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

from lightning_gpuopt._measured import QueueTimes

_A_WAIT_S: Final = 0.001
"""A fetch that takes longer than this had to wait; only then is the cost of a closer look worth it."""

_NEARLY_ALL: Final = 0.75
"""So much of what the other workers were asked for being ready means that one late batch holds up the rest."""


_ALL_PROBED: Final = 64
"""Fetches of which each is looked at."""

_FEW_WAITS: Final = 1 / 8
"""Where fewer fetches wait, it is enough to look at some after that: each stands for those before it that were skipped.

They are skipped at random, up to ``_MOST_SKIPPED`` in a row, so that no rhythm of the loader falls in with ours.
"""

_MOST_SKIPPED: Final = 6


class QueueProbe:
    """Looks at the queues before and after fetches: at each, or at some where hardly any has to wait.

    Example::

        probe = QueueProbe()
        probe.watch(iterators)          # at the beginning of an epoch
        probe.before_fetch()
        batch = next(iterator)
        probe.after_fetch(wait_s=0.02)
        probe.times().mean_ready
    """

    def __init__(self) -> None:
        self._iterators: list[Any] = []
        self._awaited: list[int | None] = []
        self._fetches = self._ready = self._empty = self._waits = 0
        self._wait_s = self._late_wait_s = self._unpinned_wait_s = 0.0
        self._unpinned = False
        self._passed = self._skip = self._skipped = 0
        self._random = random.Random(0)  # the global one is the program's

    def watch(self, iterators: Sequence[Any]) -> list[Any]:
        """Say which iterators feed the loop from now on.

        Returns:
            Those that can be watched.
        """
        self._iterators = [each for each in iterators if _is_as_expected(each)]
        self._awaited = [None] * len(self._iterators)
        return list(self._iterators)

    def before_fetch(self) -> None:
        """The loop is about to ask for a batch."""
        if not self._iterators:
            return
        for number, iterator in enumerate(self._iterators):
            task = iterator._task_info.get(iterator._rcvd_idx)
            self._awaited[number] = task[0] if task else None
        self._passed += 1
        self._unpinned = False  # of the look before, if this fetch gets none
        if self._skip:
            self._skip -= 1
            return
        self._look()

    def _look(self) -> None:
        stands_for = self._skipped + 1
        ready = 0
        for iterator in self._iterators:
            waiting = iterator._data_queue.qsize()
            ready += waiting
            if not waiting and iterator._worker_result_queue is not iterator._data_queue:
                self._unpinned |= iterator._worker_result_queue.qsize() > 1
        self._fetches += stands_for
        self._ready += ready * stands_for
        self._empty += stands_for if not ready else 0
        if self._passed >= _ALL_PROBED and self._waits < _FEW_WAITS * self._passed:
            self._skip = self._random.randint(0, _MOST_SKIPPED)
        self._skipped = self._skip

    def after_fetch(self, wait_s: float) -> None:
        """The batch is there.

        Args:
            wait_s: seconds that the fetch took.
        """
        if wait_s < _A_WAIT_S or not self._iterators:
            return
        self._waits += 1
        self._wait_s += wait_s
        if self._unpinned:
            self._unpinned_wait_s += wait_s
        elif any(map(_held_up, self._iterators, self._awaited)):
            self._late_wait_s += wait_s

    def times(self) -> QueueTimes:
        """What has been seen so far."""
        return QueueTimes(
            self._fetches,
            self._ready,
            self._empty,
            self._waits,
            self._wait_s,
            self._late_wait_s,
            self._unpinned_wait_s,
        )


def lies_ready(iterator: Any) -> bool | None:
    """Whether there is a batch to take from the queue; None for an iterator that is not as expected.

    It may be another than the one whose turn it is: where they come out of order, that one is still waited for.
    """
    if not _is_as_expected(iterator):
        return None
    task = iterator._task_info.get(iterator._rcvd_idx, ())
    return len(task) < 2 and iterator._data_queue.qsize() > 0


def in_the_making(iterator: Any) -> int | None:
    """Batches that workers were asked for and have not sent; None for an iterator that is not as expected."""
    asked_for = getattr(iterator, "_tasks_outstanding", None)
    if not isinstance(asked_for, int) or not _is_as_expected(iterator):
        return None
    queues = {iterator._data_queue, iterator._worker_result_queue}  # two where batches are pinned
    return max(asked_for - sum(int(each.qsize()) for each in queues), 0)


def batches_there(iterator: Any) -> int | None:
    """Batches that workers have sent and nobody has taken yet; None for an iterator that is not as expected."""
    making = in_the_making(iterator)
    if making is None:
        return None
    received = sum(len(info) == 2 for info in iterator._task_info.values())
    return max(int(iterator._tasks_outstanding) - making, 0) + received


def _is_as_expected(iterator: Any) -> bool:
    names = ("_data_queue", "_worker_result_queue", "_task_info", "_rcvd_idx")
    if not all(hasattr(iterator, name) for name in names) or not isinstance(iterator._task_info, dict):
        return False
    try:
        iterator._data_queue.qsize()
        iterator._worker_result_queue.qsize()
    except (NotImplementedError, OSError):  # macOS has no qsize
        return False
    return True


def _held_up(iterator: Any, awaited: int | None) -> bool:
    """Whether, now that the awaited worker's batch has come, nearly all that the others were asked for is ready.

    What else the awaited worker was asked for cannot be ready: it comes after the late batch.
    """
    others = [info for info in iterator._task_info.values() if info[0] != awaited]
    if not others:
        return False
    ready = sum(len(info) == 2 for info in others) + iterator._data_queue.qsize()
    return bool(ready >= _NEARLY_ALL * len(others))
