"""How full the loader's queues are when the training loop comes for a batch, and who it waits for.

Reads ``_data_queue``, ``_worker_result_queue``, ``_task_info``, ``_tasks_outstanding`` and ``_rcvd_idx`` of torch's
``_MultiProcessingDataLoaderIter`` (torch 2.4 to 2.13). An iterator that is not as expected is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_A_WAIT_S: Final = 0.001
"""A fetch that takes longer than this had to wait; only then is the cost of a closer look worth it."""

_NEARLY_ALL: Final = 0.75
"""So much of what the other workers were asked for being ready means that one late batch holds up the rest."""


@dataclass(frozen=True, slots=True)
class QueueTimes:
    """What was seen at the fetches of the watched loaders, the first of each epoch left out.

    Attributes:
        fetches: fetches seen.
        ready: batches that lay ready at the beginning of a fetch, summed over the fetches.
        empty: fetches that began with nothing ready.
        waits: fetches that had to wait.
        wait_s: seconds of those.
        late_wait_s: those of them that ended with nearly all other batches ready: one late batch held up the rest.
        unpinned_wait_s: those that began with results of workers waiting for the pin-memory thread, and none pinned.
    """

    fetches: int = 0
    ready: int = 0
    empty: int = 0
    waits: int = 0
    wait_s: float = 0.0
    late_wait_s: float = 0.0
    unpinned_wait_s: float = 0.0

    @property
    def mean_ready(self) -> float | None:
        """Batches ready at the beginning of a fetch; None before the first."""
        return self.ready / self.fetches if self.fetches else None

    def __sub__(self, earlier: QueueTimes) -> QueueTimes:
        return QueueTimes(
            self.fetches - earlier.fetches,
            self.ready - earlier.ready,
            self.empty - earlier.empty,
            self.waits - earlier.waits,
            self.wait_s - earlier.wait_s,
            self.late_wait_s - earlier.late_wait_s,
            self.unpinned_wait_s - earlier.unpinned_wait_s,
        )


class QueueProbe:
    """Looks at the queues before and after each fetch.

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

    def watch(self, iterators: Sequence[Any]) -> list[Any]:
        """Say which iterators feed the loop from now on.

        Returns:
            Those that can be watched.
        """
        self._iterators = [each for each in iterators if _is_as_expected(each)]
        self._awaited = [None] * len(self._iterators)
        return list(self._iterators)

    def before_fetch(self) -> None:
        """The loop is about to ask for a batch; costs about 5 µs a loader."""
        if not self._iterators:
            return
        self._fetches += 1
        ready = 0
        self._unpinned = False
        for number, iterator in enumerate(self._iterators):
            task = iterator._task_info.get(iterator._rcvd_idx)
            self._awaited[number] = task[0] if task else None
            waiting = iterator._data_queue.qsize()
            ready += waiting
            if not waiting and iterator._worker_result_queue is not iterator._data_queue:
                self._unpinned |= iterator._worker_result_queue.qsize() > 1
        self._ready += ready
        self._empty += not ready

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
