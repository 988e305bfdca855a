"""One number for all ranks of a node, without a collective: each says what it needs, the first answers with the most.

It travels through the key-value store of ``torch.distributed``, on a thread of ours: no rank waits for the number of
another, and one that fails or dies takes nobody along. A rank that gets no answer goes on with what it needs itself.
Only before trials of their own do the ranks wait for one another, for some seconds at most.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from lightning_gpuopt._ranks import open_store

log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_QUIET_POLL_S: Final = 0.5
_QUIET_AFTER_S: Final = 30.0
_PATIENCE_S: Final = 10.0


class RankAgreement:
    """Agree on a number with the other ranks of this node.

    Args:
        name: keeps two users of the store apart; the same on every rank of the node, and another on every node.
        rank: this process's global rank.
        peers: global ranks of all processes on this node, the same list everywhere; the first one answers.
        begins_with: the number that each of them has; None: they have none, and will all say what they need.
        patience_s: after so long without an answer a rank takes its own number.
        clock: seconds.
        store: a ``torch.distributed`` store; None: the default process group's.

    Example::

        agreement = RankAgreement("num-workers", rank=0, peers=[0])
        agreement.wish(4)
        agreement.news()    # 4
    """

    def __init__(
        self,
        name: str,
        rank: int,
        peers: Sequence[int],
        begins_with: int | None = None,
        *,
        patience_s: float = _PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        store: Any = None,
    ) -> None:
        self._rank = rank
        self._peers = list(peers)
        self._patience_s = patience_s
        self._clock = clock
        self._inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        # A rank that is content with what it has does not say so.
        self._wishes: dict[int, int] = {} if begins_with is None else dict.fromkeys(self._peers, begins_with)
        self._wishes_read = dict.fromkeys(self._peers, 0)
        self._sent = self._answers = self._met = 0
        self._asked: tuple[int, float] | None = None
        self._thread: threading.Thread | None = None
        self._store = store
        if len(self._peers) > 1:
            self._store = store if store is not None else open_store(name)
        if self._store is not None:
            self._thread = threading.Thread(target=self._run, name=f"gpuopt-agree-{name}", daemon=True)
            self._thread.start()

    def wish(self, number: int) -> None:
        """Say what this rank needs; never waits. Every wish is answered in :meth:`news`."""
        if self._thread is None or not self._thread.is_alive():
            self._news.put(number)
        else:
            self._inbox.put(number)

    def meet(self, patience_s: float | None = None, *, sleep: Callable[[float], object] = time.sleep) -> bool:
        """Wait for the other ranks of this node to come here too, so that they measure side by side.

        Each meeting is for all.

        Args:
            patience_s: seconds to wait at most; one that never comes holds up nobody for ever. None: the patience.
            sleep: lets seconds pass.

        Returns:
            Whether all are here.
        """
        if self._store is None:
            return True
        self._met += 1
        deadline = self._clock() + (self._patience_s if patience_s is None else patience_s)
        try:
            self._store.set(f"here/{self._met}/{self._rank}", "")
            expected = [f"here/{self._met}/{peer}" for peer in self._peers]
            while not self._store.check(expected):
                if self._clock() > deadline:
                    return False
                sleep(_POLL_S)
        except Exception:  # the store goes away with the process that hosts it
            log.debug("the ranks of this node cannot meet", exc_info=True)
            return False
        return True

    def news(self) -> int | None:
        """The number that was agreed on since the last call, also by a wish of another rank; None: no news."""
        number = None
        while not self._news.empty():  # only this thread takes from it
            number = self._news.get()
        return number

    def close(self) -> None:
        """End the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join(1.0)

    def _run(self) -> None:
        active = self._clock()
        try:
            while True:
                quiet = self._clock() - active > _QUIET_AFTER_S
                try:
                    number = self._inbox.get(timeout=_QUIET_POLL_S if quiet else _POLL_S)
                except queue.Empty:
                    pass
                else:
                    if number is None:
                        return
                    self._post(number)
                if self._answer() if self._rank == self._peers[0] else self._read_answers():
                    active = self._clock()
        except Exception:  # the store goes away with the process that hosts it
            log.debug("the ranks of this node cannot agree any more", exc_info=True)
        if self._asked is not None:
            self._news.put(self._asked[0])
        while not self._inbox.empty():
            if (number := self._inbox.get()) is not None:
                self._news.put(number)

    def _post(self, number: int) -> None:
        self._asked = number, self._clock()
        if self._rank == self._peers[0]:
            self._wishes[self._rank] = number
        else:
            self._store.set(f"wish/{self._rank}/{self._sent}", str(number))
            self._sent += 1

    def _answer(self) -> bool:
        """On the first rank: take in the wishes, and answer when there are new ones."""
        anything = self._asked is not None
        for peer in self._peers[1:]:
            while (number := self._take(f"wish/{peer}/{self._wishes_read[peer]}")) is not None:
                self._wishes_read[peer] += 1
                self._wishes[peer] = number
                anything = True
        if anything:
            agreed = max(self._wishes.values())
            for peer in self._peers[1:]:
                self._store.set(f"answer/{peer}/{self._answers}", str(agreed))
            self._answers += 1
            self._asked = None
            self._news.put(agreed)
        return anything

    def _read_answers(self) -> bool:
        agreed = None
        while (number := self._take(f"answer/{self._rank}/{self._answers}")) is not None:
            self._answers += 1
            agreed = number
        if agreed is None and self._asked is not None and self._clock() - self._asked[1] > self._patience_s:
            agreed = self._asked[0]
        if agreed is None:
            return self._asked is not None
        self._asked = None
        self._news.put(agreed)
        return True

    def _take(self, key: str) -> int | None:
        if not self._store.check([key]):
            return None
        number = int(self._store.get(key))
        self._store.delete_key(key)
        return number
