"""A part of an epoch: a copy of the user's DataLoader, and the iterator whose workers make its batches."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import shut_down, workers_of
from lightning_gpuopt.tuning.epoch_indices import RestOfEpoch

log = logging.getLogger(__name__)


class Drained:
    """Batches that have come, and errors, in their turn; and then what an iterator still gives, if there is one."""

    def __init__(self, came: Iterable[tuple[Any, Exception | None]], rest: Any = None) -> None:
        self._came, self._rest = deque(came), rest

    def __next__(self) -> Any:
        if not self._came and self._rest is not None:
            return next(self._rest)
        if not self._came:
            raise StopIteration
        batch, error = self._came.popleft()
        if error is not None:
            raise error
        return batch

    def _shutdown_workers(self) -> None:
        shut_down(self._rest)


@dataclass
class Segment:
    """Part of an epoch: a copy of the loader that reads ``rest``, and the number of its first worker in reports."""

    loader: DataLoader[Any]
    rest: RestOfEpoch
    batches: Any
    first: int = 0

    @property
    def reads_by_sample(self) -> bool:
        return self.rest.most_samples is not None

    @property
    def is_over(self) -> bool:
        """Whether all requested batches have come, and it requests no more."""
        return self.rest.stopped and not self.rest.given

    def ask_again(self) -> None:
        """Request from the workers what could not be drawn at the earlier request."""
        if self.can_be_asked_again:
            times, self.rest.refused = 1 if self.reads_by_sample else self.rest.refused, 0
            for _ in range(times):
                self.batches._try_put_index()

    @property
    def can_be_asked_again(self) -> bool:
        return hasattr(self.batches, "_try_put_index")

    def drain(self) -> None:
        """Receive all requested batches, and end the workers."""
        self.rest.stopped, came = True, list[tuple[Any, Exception | None]]()
        running, is_whole = self.batches, False
        try:
            for _ in range(len(self.rest.given)):
                try:
                    came.append((next(running), None))
                except Exception as error:  # in its turn
                    came.append((None, error))
                    if not self.has_come(error):  # what comes after it, who asks shall see
                        return
            is_whole = True
        finally:
            self.batches = Drained(came, None if is_whole else running)
            if is_whole:
                shut_down(running)

    def has_come(self, error: Exception) -> bool:
        """Whether an error replaced a batch: after torch's own, as a worker's death, the batch still comes."""
        if not self.loader.num_workers:
            return bool(self.rest.given)
        return any(frame.f_code.co_name == "reraise" for frame, _ in traceback.walk_tb(error.__traceback__))

    def end(self) -> None:
        """End its workers in parallel with training."""
        if not self.loader.num_workers:
            return
        holder = [self.batches]
        try:
            threading.Thread(target=_finish, args=(holder,), name="gpuopt-end-workers", daemon=True).start()
        except RuntimeError:  # no more threads
            _finish(holder)

    def may_go_on(self, loader: DataLoader[Any], *, by_sample: bool) -> bool:
        """Whether its workers live, persist, and are as many as a loader should have, with as many batches ahead.

        ``by_sample``: each sample should be a task of theirs.
        """
        mine, wanted = self.loader, (loader.num_workers, loader.prefetch_factor or 2, loader.pin_memory)
        return (
            mine.persistent_workers
            and self.reads_by_sample == by_sample
            and (mine.num_workers, mine.prefetch_factor, mine.pin_memory) == wanted
            and all(each.is_alive() for each in workers_of(self.batches))
        )


def _finish(holder: list[Any]) -> None:
    try:
        shut_down(holder.pop())
    except Exception:  # of a worker that has died
        log.debug("workers did not shut down cleanly", exc_info=True)
