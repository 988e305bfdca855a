"""The indices of an epoch's batches: the sampler is iterated once, for one segment after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from lightning_gpuopt.loading.sampler import BatchIndices, Later


class EpochIndices:
    """The indices of an epoch's batches, drawn from the loader's sampler for one segment after the other."""

    def __init__(self, sampler: Any, due: int, ahead: Callable[[], bool], seed: int = 0) -> None:
        self._seed, self._samples = seed, 0  # ``seed`` stands for the epoch; samples whose indices were drawn
        self.due = due  # indices that the user's own number of workers would have asked for by now
        self._sampler = sampler
        self.ahead = ahead  # whether more than those may be drawn
        self._iterator: Iterator[Any] = iter(())
        self.waiting: deque[Any] = deque()  # drawn, and given to no segment
        self.drawn = 0
        self.ended = False
        self._error: Exception | None = None
        self._length: int | None = None
        with suppress(Exception):  # of the user's: torch does not ask
            self._length = len(sampler)

    def begin(self) -> None:
        self._iterator = iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def left(self) -> int | None:
        """Number of indices not given to a segment yet; None if the sampler does not know its length."""
        if self.ended:
            return len(self.waiting)
        return None if self._length is None else max(self._length - self.drawn, 0) + len(self.waiting)

    def take(self) -> Any:
        """The next one, for a segment; StopIteration also if there is none yet."""
        # nor the last one early, which may be shorter: to make it a BatchSampler asks for the end, at which torch's
        # samplers draw once more, and the epoch may be left before
        more = self._length is None or self.drawn < self._length - 1
        if not self.waiting and (self.drawn < self.due or (more and self.ahead())):
            self._draw()
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()

    def give_back(self, indices: Iterable[Any]) -> None:
        """Move these batches of an earlier segment to the next one."""
        self.waiting.extendleft(reversed(list(indices)))

    def draw_what_is_due(self) -> None:
        """Ask the sampler as far ahead as it would have been; its errors come at the batch at which they would have."""
        while self.drawn < self.due and not self.ended:
            self._draw()
        if self._error is not None and self.drawn < self.due:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # whose traceback holds this frame

    def _draw(self) -> None:
        if self.ended:
            return
        try:
            index = next(self._iterator)
        except StopIteration:
            self.ended = True
        except Exception as error:
            self.ended, self._error = True, error
        else:
            if type(index) is list:
                index, self._samples = _Placed(index, self._seed, self._samples), self._samples + len(index)
            self.waiting.append(index)
            self.drawn += 1


class _Placed(BatchIndices):
    """A batch's indices of the user's sampler, with their place in the epoch."""


class RestOfEpoch:
    """The sampler of one segment: the rest of the epoch, until the segment is stopped.

    With ``most_samples`` of a batch it is read sample by sample: indices come with their place in the epoch.
    """

    may_be_read_ahead = True  # as far as the user's sampler may

    def __init__(self, indices: EpochIndices, *, begins: bool, most_samples: int | None = None) -> None:
        self.most_samples = most_samples
        self.begin(indices, begins=begins)

    def begin(self, indices: EpochIndices, *, begins: bool) -> None:
        self.indices, self.begins = indices, begins  # ``begins``: iterating it iterates the user's sampler
        self.given: deque[Any] = deque()  # what it gave, and whose batches have not come
        self.stopped, self.refused = False, 0  # ``refused``: how often it was asked too early

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        if self.begins:
            self.indices.begin()
        return self

    def __next__(self) -> Any:
        if self.stopped:
            raise Later
        try:
            index = self.indices.take()
        except StopIteration:
            if self.indices.ended:
                raise
            self.refused += 1
            raise Later from None
        self.given.append(index)
        return list(index) if type(index) is _Placed and self.most_samples is None else index
