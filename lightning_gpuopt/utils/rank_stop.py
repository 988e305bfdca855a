"""Have all ranks end training at the same step, which none of them has passed, without a collective.

A rank that raised alone would leave the others in their next collective, until their connection or a watchdog ends it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from contextlib import suppress
from typing import Any, Final

from lightning_gpuopt.utils.rank_channel import open_store

log = logging.getLogger(__name__)

_ASKED: Final = "asked"
_DECIDED: Final = "decided"
_ENDED: Final = "ended"

_LOOK_EVERY_S = 1.0  # how often other ranks look whether rank 0 has asked
_POLL_S = 0.02  # the same while an answer is about to come
_PATIENCE_S = 30.0  # how long a silent rank is waited for


class RankStop:
    """Rank 0 asks all ranks (two or more) to stop, and each of them learns after which step.

    Once a rank has heard of it, on a thread of ours, it promises not to pass the end of its next step before it knows
    the decision. Rank 0 decides for the furthest of these steps: no rank has passed it, and all of them come there.
    ``name`` is the same on every rank.
    """

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self.problem: str | None = None  # why the ranks cannot agree; None where they can
        self._rank = rank
        self._others = range(1, world_size)
        self._lock = threading.Lock()
        self._step = 0
        self._promised: int | None = None
        self._stop_at: int | None = None
        self._why: str | None = None
        self._ended = False
        self._asked = threading.Event()
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._store: Any = open_store(name)
        if self._store is None:
            self.problem = "this torch.distributed set-up has no key-value store"
            return
        self._thread = threading.Thread(target=self._run, name=f"gpuopt-stop-{name}", daemon=True)
        self._thread.start()

    def ask(self, why: str) -> None:
        """On rank 0: have all ranks stop soon, and say why; never waits. Only the first time counts."""
        if self._why is None:
            self._why = why
            self._promise()
            self._asked.set()

    def step_done(self, step: int) -> str | None:
        """Why to stop after this step, counted alike on every rank, or None.

        Costs next to nothing until a rank has asked; then it may wait a moment for the decision.
        """
        with self._lock:
            self._step = step
            promised = self._promised
        if promised is None or step < promised:
            return None
        if not self._settled.wait(3 * _PATIENCE_S):  # rank 0 itself waits for silent ranks, twice
            self.problem = "the other ranks did not answer"
            self._settled.set()
        return self._why if self._stop_at is not None and step >= self._stop_at else None

    def end(self, why: str | None = None) -> str | None:
        """Why to stop, the same on each rank, or None, once training has ended here; waits for rank 0's word.

        On rank 0 ``why`` may be given; what was asked before counts more.
        """
        self._ended = True
        try:
            if self._rank:
                end_s = time.monotonic() + _PATIENCE_S
                while not self._store.check([_ENDED]) and time.monotonic() < end_s:
                    time.sleep(_POLL_S)
                reason = json.loads(self._store.get(_ENDED)) if self._store.check([_ENDED]) else None
                self._store.set(f"{_ENDED}/{self._rank}", "")
                return reason if reason is None else str(reason)
            if self._why is not None:
                self._settled.wait(_PATIENCE_S)
            why = self._why or why
            self._store.set(_ENDED, json.dumps(why))
            self._answers(_ENDED)
        except Exception as error:  # the store goes away with the process that hosts it
            self._fail(error)
        return why

    def close(self) -> None:
        """End the thread; other ranks wait for this one no longer."""
        self._closing.set()
        self._asked.set()
        if self._store is None:
            return
        self._thread.join(_LOOK_EVERY_S + 1.0)
        if not self._ended:
            with suppress(Exception):
                for key in (_ASKED, _DECIDED, _ENDED):
                    self._store.set(f"{key}/{self._rank}", "0")
                if not self._rank:
                    self._store.set(_ENDED, "null")

    def _promise(self) -> int:
        with self._lock:
            self._promised = self._step + 1
            return self._promised

    def _run(self) -> None:
        try:
            if self._rank:
                self._follow()
            else:
                self._lead()
        except Exception as error:
            self._fail(error)
        finally:
            self._settled.set()

    def _fail(self, error: Exception) -> None:
        log.debug("the ranks do not agree", exc_info=True)
        self.problem = f"the ranks' key-value store failed: {error}"

    def _lead(self) -> None:
        self._asked.wait()
        if self._why is None or self._promised is None:
            return
        self._store.set(_ASKED, "")
        at = max([self._promised, *map(int, self._answers(_ASKED))])
        self._store.set(_DECIDED, json.dumps([at, self._why]))
        self._answers(_DECIDED)  # this rank may be the store's host, and about to end
        self._stop_at = at

    def _follow(self) -> None:
        while not self._store.check([_ASKED]):
            if self._closing.wait(_LOOK_EVERY_S):
                return
        self._store.set(f"{_ASKED}/{self._rank}", str(self._promise()))
        while not self._store.check([_DECIDED]):
            if self._closing.wait(_POLL_S):
                return
        self._stop_at, self._why = json.loads(self._store.get(_DECIDED))
        self._store.set(f"{_DECIDED}/{self._rank}", "")

    def _answers(self, key: str) -> list[str]:
        """What the other ranks have to say to something; one that stays silent is left out."""
        answers = []
        end_s = time.monotonic() + _PATIENCE_S
        for rank in self._others:
            while not (came := self._store.check([f"{key}/{rank}"])) and time.monotonic() < end_s:
                time.sleep(_POLL_S)
            if came:
                answers.append(self._store.get(f"{key}/{rank}").decode())
        return answers
