"""Have all ranks end training at the same step, which none of them has passed, without a collective.

A rank that raised alone would leave the others in their next collective, until their connection or a watchdog ends it.
"""

from __future__ import annotations

import math
import threading
from typing import Final

from lightning_gpuopt.utils.rank_channel import RankChannel

_ASKED: Final = "asked"
_DECIDED: Final = "decided"
_ENDED: Final = "ended"

_LOOK_EVERY_S = 1.0  # how often other ranks look whether rank 0 has asked
_PATIENCE_S = 30.0  # how long a silent rank is waited for


class RankStop(RankChannel):
    """Rank 0 asks all ranks (two or more) to stop, and each of them learns after which step.

    Once a rank has heard of it, on a thread of ours, it promises not to pass the end of its next step before it knows
    the decision. Rank 0 decides for the furthest of these steps: no rank has passed it, and all of them come there.
    """

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        super().__init__(name, rank, world_size)
        self._lock = threading.Lock()
        self._step = 0
        self._promised: int | None = None
        self._stop_at: int | None = None
        self._why: str | None = None
        self._ended = False
        self._settled = threading.Event()
        self._name = f"stop-{name}"
        if rank and self._store is not None:
            self._start(self._name, self._follow)

    def ask(self, why: str) -> None:
        """On rank 0: have all ranks stop soon, and say why; never waits. Only the first time counts."""
        if self._why is None:
            self._why, promised = why, self._promise()
            self._start(self._name, lambda: self._lead(why, promised))

    def step_done(self, step: int) -> str | None:
        """Why to stop after this step, alike on every rank, or None; waits only once a rank has asked."""
        with self._lock:
            self._step = step
            promised = self._promised
        if promised is None or step < promised:
            return None
        if not self._settled.wait(3 * _PATIENCE_S):  # rank 0 itself waits for silent ranks, twice
            self._settled.set()
        return self._why if self._stop_at is not None and step >= self._stop_at else None

    def end(self, why: str | None = None) -> str | None:
        """Why to stop, the same on each rank, or None, once training has ended here; waits for rank 0's word.

        On rank 0 ``why`` may be given; what was asked before counts more.
        """
        self._ended = True
        if self.rank:
            said = self.hear(_ENDED, _PATIENCE_S).get(0)
            self.say(_ENDED, "")
            return said if self.problem is None else why
        if self._why is not None:
            self._settled.wait(_PATIENCE_S)
        why = self._why or why
        self.say(_ENDED, why)
        self.hear(_ENDED, _PATIENCE_S)
        return why

    def close(self) -> None:
        """End the thread; other ranks wait for this one no longer."""
        if self.rank:  # rank 0 still decides what it was asked
            self._closing.set()
        if self._thread is not None:
            self._thread.join(_LOOK_EVERY_S + 1.0)
        if not self._ended:
            for key in (_ASKED, _DECIDED, _ENDED) if self.rank else (_ENDED,):
                self.say(key, 0 if self.rank else None)

    def _promise(self) -> int:
        with self._lock:
            self._promised = self._step + 1
            return self._promised

    def _lead(self, why: str, promised: int) -> None:
        try:
            self.say(_ASKED, "")
            at = max([promised, *self.hear(_ASKED, _PATIENCE_S).values()])
            self.say(_DECIDED, [at, why])
            self.hear(_DECIDED, _PATIENCE_S)  # this rank may be the store's host, and about to end
            if self.problem is None:
                self._stop_at = at
        finally:
            self._settled.set()

    def _follow(self) -> None:
        try:
            if self.hear(_ASKED, math.inf, _LOOK_EVERY_S):
                self.say(_ASKED, self._promise())
                if decided := self.hear(_DECIDED, math.inf):
                    self._stop_at, self._why = decided[0]
                    self.say(_DECIDED, "")
        finally:
            self._settled.set()
