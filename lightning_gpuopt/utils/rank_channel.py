"""What ranks say to one another, without a collective.

Words travel through the key-value store that ``torch.distributed`` made for its own rendezvous, in training on a thread
of ours. So the training thread never waits for another rank, a rank that dies takes nobody along, no GPU is
synchronized, and no process group of our own has to be made, or torn down in the right order.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_gpuopt.compat.torch_internals import default_store

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.02  # how often a rank looks for words that are about to come
_POLL_S = 0.05  # how often rank 0 looks whether the others' figures have come, while it expects some
_PATIENCE_S = 30.0  # how long a window waits for a silent rank, before it is given out without that rank
_RECEIVE_EVERY_S = 1.0  # how often other ranks look for messages of rank 0
_runs: dict[str, int] = {}


class RankChannel:
    """Says what JSON can hold under a key, and hears what others say: rank 0 all ranks, the rest rank 0.

    ``peers`` are whom to hear instead. ``name`` keeps users of the store apart; the same on every rank. A store that
    fails, as when its host has died, is ranks that are silent: nothing is raised, and nobody waits any longer.
    """

    def __init__(self, name: str, rank: int, world_size: int, peers: Sequence[int] | None = None) -> None:
        self.problem: str | None = None  # why nothing can be said or heard; None if it can
        self.rank = rank
        self.world_size = world_size
        if peers is None:
            peers = [0] if rank else range(world_size)
        self._others = [each for each in peers if each != rank] if world_size > 1 else []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = open_store(name) if self._others else None
        if self._others and self._store is None:
            self.problem = "this torch.distributed set-up has no key-value store"

    def say(self, key: str, word: Any) -> None:
        if self._store is not None and self.problem is None:
            try:
                self._store.set(f"{key}/{self.rank}", json.dumps(word))
            except Exception as error:
                self._fail(error)

    def hear(
        self, key: str, patience_s: float = 0.0, every_s: float = _LOOK_EVERY_S, *, forget: bool = False
    ) -> dict[int, Any]:
        """What others have said, by rank; whoever is silent for ``patience_s`` seconds is missing.

        Looks every ``every_s`` seconds, until the channel is being closed; ``forget``: nobody else needs these words.
        """
        heard: dict[int, Any] = {}
        deadline_s = time.monotonic() + patience_s
        while self.problem is None:
            try:
                for rank in [each for each in self._others if each not in heard]:
                    if self._store.check([f"{key}/{rank}"]):
                        heard[rank] = json.loads(self._store.get(f"{key}/{rank}"))
                        if forget:
                            self._store.delete_key(f"{key}/{rank}")
            except Exception as error:
                self._fail(error)
            if len(heard) == len(self._others) or time.monotonic() >= deadline_s or self._closing.wait(every_s):
                break
        return heard

    def _start(self, name: str, run: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=run, name=f"gpuopt-{name}", daemon=True)
        self._thread.start()

    def _fail(self, error: Exception) -> None:
        log.debug("the ranks hear no more of one another", exc_info=True)
        self.problem = f"the ranks' key-value store failed: {error}"


@dataclass(frozen=True)
class Gathered:
    step: int  # the logging step at which the window closed
    by_rank: dict[int, Any]  # what each posted; a silent rank is missing


class RankGather(RankChannel):
    """Bring JSON-able figures of all ranks to rank 0.

    Every rank calls :meth:`post` at the same windows in the same order. On rank 0 ``arrived`` is called with each
    complete window, oldest first: where there is one rank at once, else on the daemon thread that does the talking.
    """

    def __init__(self, name: str, rank: int, world_size: int, arrived: Callable[[Gathered], object]) -> None:
        super().__init__(name, rank, world_size)
        self._arrived = arrived
        self._inbox: queue.SimpleQueue[tuple[int, Any, float] | None] = queue.SimpleQueue()
        # whether windows arrive here: on rank 0, and on every rank that has no way to the others
        self.collects = rank == 0 or self._store is None
        if self._store is not None:
            self._start(f"gather-{name}", self._run)

    def post(self, step: int, figures: Any) -> None:
        """Hand in this rank's figures (what JSON can hold) of the window that closed at a logging step; never waits."""
        if self._thread is not None:
            self._inbox.put((step, figures, time.monotonic()))
        elif self.collects:
            self._arrived(Gathered(step, {self.rank: figures}))

    def close(self, timeout_s: float = 3.0) -> None:
        """Wait up to ``timeout_s`` for windows under way, then end the thread."""
        if self._thread is None:
            return
        self._inbox.put(None)
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join(1.0)
        self._thread = None
        with suppress(queue.Empty):  # where the store does not answer: nobody brings these to the others any more
            while (item := self._inbox.get_nowait()) is not None:
                self.post(*item[:2])
        self._inbox.put(None)  # for a thread that is held up until now

    def _run(self) -> None:
        for number, (step, figures, since_s) in enumerate(iter(self._inbox.get, None)):
            if self.rank:
                self.say(str(number), figures)
                continue
            patience_s = since_s + _PATIENCE_S - time.monotonic()
            others = self.hear(str(number), patience_s, _POLL_S, forget=True)
            try:
                self._arrived(Gathered(step, {0: figures, **others}))
            except Exception:
                log.debug("nobody takes what the ranks have posted", exc_info=True)


class RankBroadcast(RankChannel):
    """Send what JSON can hold from rank 0 to all others, without a collective."""

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        super().__init__(name, rank, world_size)
        self._came: deque[Any] = deque()
        self._number = 0
        if rank and self._store is not None:
            self._start(f"broadcast-{name}", self._run)

    def send(self, message: Any) -> None:
        if not self.rank:
            self.say(str(self._number), message)
            self._number += 1

    def take(self) -> list[Any]:
        """The messages since the last call, in the order in which they were sent. Cheap."""
        return [self._came.popleft() for _ in range(len(self._came))]

    def close(self) -> None:
        """End the thread; may be called more than once."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_RECEIVE_EVERY_S + 1.0)
            self._thread = None

    def _run(self) -> None:
        while came := self.hear(str(self._number), math.inf, _RECEIVE_EVERY_S):
            self._came.append(came[0])
            self._number += 1


def open_store(name: str) -> Any:
    """A part of the default process group's store, under a new prefix; None if there is none, as with MPI."""
    if (store := default_store()) is None:
        return None
    run = _runs[name] = _runs.get(name, 0) + 1
    return dist.PrefixStore(f"lightning_gpuopt/{name}/{run}", store)  # type: ignore[attr-defined]
