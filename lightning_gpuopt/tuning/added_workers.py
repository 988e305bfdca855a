"""What becomes of the work of workers that were added to a running iterator, and die or hang.

Others do it, once for each batch, where the result queue can still be used. It cannot where a worker has died with the
queue's lock, and so perhaps in the middle of a message; or where the pin-memory thread reads from it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable
from multiprocessing import connection
from typing import Any, Final

from lightning_gpuopt.compat.dataloader import CHECK_EVERY_S, WorkersIterator, may_write, raises_for, result_reader
from lightning_gpuopt.objects.dataset_state import DatasetState

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 30.0
"""A worker that was forked from a running process may wait for ever for a lock that some thread of that held. After so
long without its first batch, while all others have nothing left to do, its work goes to them."""

_GRACE_S: Final = 1.0
"""Seconds within which a process has ended that has closed its files."""


class NoWorkersLeft(Exception):
    """All workers that stood in for the training process have died."""


class AddedWorkers(WorkersIterator):
    """The part of a resizable iterator that receives batches, and looks after the workers that were added."""

    _gpuopt_added: set[Any]
    """Workers that were started here, and not by the user's loader."""
    _gpuopt_new: dict[Any, float]
    """New workers without a batch so far, and when they were started."""
    _gpuopt_again: dict[int, bool]
    """Batches that two workers make, and whether one of the two has arrived."""
    _gpuopt_stuck: list[tuple[Any, Any]]
    """Processes that were given up, with their index queues."""
    _gpuopt_given: dict[int, Any]
    """Indices of the batches that were requested, by number; some that were taken by the consumer may be left."""
    _gpuopt_resetting: bool
    """Whether torch waits for all workers to begin another epoch."""
    _gpuopt_state: DatasetState | None
    """What workers got that work in place of the training process; None if the user's loader has workers."""
    failure: str | None
    """Why no more workers are started here: one never gave a batch, was given none, or died; None where none did."""

    def _give_up(self, worker: Any, why: str) -> None:
        raise NotImplementedError

    def _fetch_from_here_on(self) -> None:
        raise NotImplementedError

    @property
    def saves_work(self) -> bool:
        """Whether the work of an added worker that dies can be given to others: not behind the pin-memory thread."""
        return result_reader(self) is not None

    def _try_get_data(self, timeout: float = CHECK_EVERY_S) -> tuple[bool, Any]:
        added = [worker for worker in self._workers if worker in self._gpuopt_added]
        try:
            success, data = self._get(timeout, added) if added and self.saves_work else self._plain_get(timeout)
        except (ConnectionError, FileNotFoundError, EOFError):  # what a worker has sent goes with it
            if not self._dead_of_added(_GRACE_S) and not self._gpuopt_stuck:
                raise
            success, data = False, None
        except RuntimeError as error:
            if not (dead := self._dead_of_added()):
                raise
            raise RuntimeError(f"{error}{self._why(dead[0])}") from error
        if not success:
            self._look_after_dead()
            self._look_after_new()
        elif self._gpuopt_new or self._gpuopt_again:
            number = data[0]
            info = self._task_info.get(number)
            if info is not None:
                self._gpuopt_new.pop(self._workers[info[0]], None)
            if self._gpuopt_again.get(number):
                return False, None  # the second of two
            if number in self._gpuopt_again:
                self._gpuopt_again[number] = True
        return success, data

    def _plain_get(self, timeout: float) -> tuple[bool, Any]:
        success, data = super()._try_get_data(timeout)  # type: ignore[no-untyped-call]
        return success, data

    def _get(self, timeout: float, added: list[Any]) -> tuple[bool, Any]:
        """Wait for a message, or for the death of an added worker; then read it, if it is whole."""
        ready = connection.wait([result_reader(self), *(worker.sentinel for worker in added)], timeout)
        status = self._workers_status
        of_the_user = [up and each not in added for up, each in zip(status, self._workers, strict=True)]
        if result_reader(self) not in ready:
            if ready:
                self._dead_of_added(_GRACE_S)
            for worker in itertools.compress(self._workers, of_the_user):
                if not worker.is_alive():
                    raise RuntimeError(f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly")
            return False, None
        self._workers_status = of_the_user
        is_whole = may_write(self, 0.0)  # nobody is in the middle of a message, so what is there to be read is one
        try:
            with contextlib.nullcontext() if is_whole else raises_for(added):  # one that dies now may leave half of one
                if not is_whole and (dead := self._dead_of_added()) and not may_write(self, _GRACE_S):
                    raise RuntimeError(f"DataLoader worker (pid(s) {dead[0].pid}) exited unexpectedly")
                return self._plain_get(timeout)
        finally:
            self._workers_status = status

    def _dead_of_added(self, wait_s: float = 0.0) -> list[Any]:
        """The workers that were started here and have died, after so many seconds at most."""
        here = [worker for worker in self._workers if worker in self._gpuopt_added]
        ended = connection.wait([worker.sentinel for worker in here], wait_s) if wait_s else ()
        for worker in [each for each in here if each.sentinel in ended]:
            worker.join(_GRACE_S)  # a process closes its files a moment before it has ended
        return [worker for worker in here if not worker.is_alive()]

    def _why(self, worker: Any) -> str:
        """What to add to torch's error where a worker that was added has died."""
        before = len(self._workers) - len(self._gpuopt_added)
        return f": {_ended(worker)}. num_workers was {before} before"

    def _look_after_dead(self) -> None:
        """Give the work of added workers that have died to others, once for each batch.

        Raises:
            RuntimeError: as torch has it, where the result queue cannot be used any more, a batch has ended two, or
                torch waits for all workers.
            NoWorkersLeft: none is left of those that stood in for the training process, which goes on by itself.
        """
        for worker in self._dead_of_added():
            number = self._workers.index(worker)
            orphans = [task for task, info in self._task_info.items() if info == (number,)]
            lost = self._gpuopt_resetting or not self.saves_work or bool(self._gpuopt_again.keys() & orphans)
            if lost or not may_write(self, CHECK_EVERY_S):
                raise RuntimeError(f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly{self._why(worker)}")
            log.warning("%s; others do its work", _ended(worker))
            self._give_up(worker, _ended(worker))
            if not self._workers and self._gpuopt_state is not None:
                self._fetch_from_here_on()
                raise NoWorkersLeft
            self._hand_on(orphans)

    def _look_after_new(self) -> None:
        """After seconds without a batch, give the work of new workers that are stuck to others."""
        busy = {self._workers[info[0]] for info in self._task_info.values() if len(info) == 1}
        if not busy or not busy <= self._gpuopt_new.keys() or len(busy) == len(self._workers):
            return
        latest = time.monotonic() - _PATIENCE_S
        orphans: list[int] = []
        for worker in [each for each in busy if self._gpuopt_new[each] <= latest]:
            log.warning("worker %s gave no batch within %.0f s; others do its work", worker.pid, _PATIENCE_S)
            number = self._workers.index(worker)
            orphans += [task for task, info in self._task_info.items() if info == (number,)]
            self._give_up(worker, "a worker that was started in mid-epoch never gave a batch")
        self._hand_on(orphans)

    def _hand_on(self, orphans: Iterable[int]) -> None:
        """Have other workers make these batches, which their own worker will not."""
        for number in sorted(orphans):
            other = next(self._worker_queue_idx_cycle)
            self._index_queues[other].put((number, self._gpuopt_given[number]))
            self._task_info[number] = (other,)
            if hasattr(self, "_workers_num_tasks"):
                self._workers_num_tasks[other] += 1
            self._gpuopt_again[number] = False


def _ended(worker: Any) -> str:
    """How a worker has ended, for people."""
    code = worker.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"worker {worker.pid}, which was added while training ran, died ({how})"
