"""What every rank measured, brought to rank 0 once a window, without a collective.

The figures travel through the key-value store that ``torch.distributed`` made for its own rendezvous, on a thread of
ours. So the training thread never waits for another rank, a rank that dies takes nobody along, no GPU is synchronized,
and no process group of our own has to be made, or torn down in the right order.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lightning_gpuopt.compat.torch_internals import default_store

log = logging.getLogger(__name__)

_POLL_S = 0.05  # how often rank 0 looks whether the others' figures have come, while it expects some
_PATIENCE_S = 30.0  # how long a window waits for a silent rank, before it is given out without that rank
_RECEIVE_EVERY_S = 1.0  # how often other ranks look for messages of rank 0
_runs: dict[str, int] = {}


@dataclass(frozen=True)
class Gathered:
    """One window of all ranks."""

    step: int  # the logging step at which the window closed
    by_rank: dict[int, Any]  # what each posted; a silent rank is missing


@dataclass
class _Pending:
    number: int
    step: int
    since: float
    arrived: dict[int, Any] = field(default_factory=dict)


class RankGather:
    """Bring JSON-able figures of all ranks to rank 0.

    Every rank calls :meth:`post` at the same windows in the same order. On one rank this is a list that hands back what
    was put in; on many, a daemon thread does the talking, and calls ``arrived`` with each complete window in place of
    :meth:`ready`. ``name`` keeps users of the store apart; the same on every rank.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, arrived: Callable[[Gathered], object] | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.problem: str | None = None
        self._done: deque[Gathered] = deque()
        self._give = arrived or self._done.append
        self._inbox: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._number = 0
        self._closing = threading.Event()
        self._close_deadline = float("inf")
        self._thread: threading.Thread | None = None
        self._store: Any = None
        if world_size > 1:
            self._store = open_store(name)
            if self._store is None:
                self.problem = "this torch.distributed set-up has no key-value store"
        if self._store is not None:
            self._thread = threading.Thread(target=self._run, name=f"gpuopt-gather-{name}", daemon=True)
            self._thread.start()

    @property
    def collects(self) -> bool:
        """Whether :meth:`ready` hands out windows here: on rank 0, and on every rank that has no way to the others."""
        return self.rank == 0 or self._store is None

    def post(self, step: int, figures: Any) -> None:
        """Hand in this rank's figures (what JSON can hold) of the window that closed at a logging step; never waits."""
        self._inbox.put((step, figures))
        if self._thread is None or self.problem is not None:
            self._keep_own()

    @property
    def has_ready(self) -> bool:
        """Whether :meth:`ready` would give anything."""
        return bool(self._done)

    def ready(self) -> list[Gathered]:
        """The windows that are complete since the last call, oldest first; on other ranks than 0 always empty."""
        done: list[Gathered] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self, timeout_s: float = 3.0) -> None:
        """Wait up to ``timeout_s`` for windows under way, then end the thread. What came is still in :meth:`ready`."""
        if self._thread is None:
            return
        self._close_deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._inbox.put(None)
        self._thread.join(timeout_s + 1.0)
        self._thread = None
        self._keep_own()

    def _run(self) -> None:
        pending: deque[_Pending] = deque()
        try:
            while pending or not self._closing.is_set() or not self._inbox.empty():
                self._take_inbox(pending)
                while pending and self._collect(pending[0]):
                    done = pending.popleft()
                    self._give(Gathered(done.step, done.arrived))
        except Exception as error:  # the store goes away with the process that hosts it
            log.debug("gather stopped", exc_info=True)
            for each in pending:
                self._give(Gathered(each.step, each.arrived))
            self.problem = f"the ranks' key-value store failed: {error}"

    def _keep_own(self) -> None:
        """Give out what nobody will bring to the others any more."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None and self.collects:
                self._give(Gathered(item[0], {self.rank: item[1]}))

    def _take_inbox(self, pending: deque[_Pending]) -> None:
        try:
            item = self._inbox.get(timeout=_POLL_S if pending else None)
        except queue.Empty:
            return
        if item is None:
            return
        step, figures = item
        if self.rank == 0:
            pending.append(_Pending(self._number, step, time.monotonic(), {0: figures}))
        else:
            self._store.set(f"{self._number}/{self.rank}", json.dumps(figures))
        self._number += 1

    def _collect(self, window: _Pending) -> bool:
        """Take what has arrived for this window; True when there is nothing left to wait for."""
        for rank in range(1, self.world_size):
            key = f"{window.number}/{rank}"
            if rank not in window.arrived and self._store.check([key]):
                window.arrived[rank] = json.loads(self._store.get(key))
                self._store.delete_key(key)
        if len(window.arrived) == self.world_size:
            return True
        now = time.monotonic()
        return now - window.since > _PATIENCE_S or now > self._close_deadline


class RankBroadcast:
    """Send what JSON can hold from rank 0 to all others, without a collective; ``name`` is the same on every rank."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self.problem: str | None = None  # why nothing can be sent or received; None where it can
        self._rank = rank
        self._came: deque[Any] = deque()
        self._number = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = open_store(name) if world_size > 1 else None
        if world_size > 1 and self._store is None:
            self.problem = "this torch.distributed set-up has no key-value store"
        if self._store is not None and rank:
            self._thread = threading.Thread(target=self._run, name=f"gpuopt-broadcast-{name}", daemon=True)
            self._thread.start()

    def send(self, message: Any) -> None:
        """Send a message to all other ranks; does nothing on other ranks than 0, and where there is one rank only."""
        if self._store is None or self._rank:
            return
        try:
            self._store.set(str(self._number), json.dumps(message))
            self._number += 1
        except Exception as error:
            self.problem = f"the ranks' key-value store failed: {error}"

    def take(self) -> list[Any]:
        """The messages since the last call, in the order in which they were sent. Cheap."""
        came: list[Any] = []
        while self._came:
            came.append(self._came.popleft())
        return came

    def close(self) -> None:
        """End the thread; may be called more than once."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_RECEIVE_EVERY_S + 1.0)
            self._thread = None

    def _run(self) -> None:
        try:
            while not self._closing.wait(_RECEIVE_EVERY_S):
                while self._store.check([str(self._number)]):
                    self._came.append(json.loads(self._store.get(str(self._number))))
                    self._number += 1
        except Exception as error:  # the store goes away with the process that hosts it
            log.debug("no more messages of rank 0", exc_info=True)
            self.problem = f"the ranks' key-value store failed: {error}"


def open_store(name: str) -> Any:
    """A part of the default process group's store, under a new prefix; None where there is none, as with MPI."""
    if (store := default_store()) is None:
        return None
    run = _runs[name] = _runs.get(name, 0) + 1
    return dist.PrefixStore(f"lightning_gpuopt/{name}/{run}", store)  # type: ignore[attr-defined]
