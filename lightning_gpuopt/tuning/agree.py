"""Lets the ranks of a node run their trials at the same time and agree on one number, without a collective.

Their numbers go through the key-value store of ``torch.distributed``. No rank waits for another longer than its
patience. If a rank fails or dies, the others go on with the numbers that they have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from lightning_gpuopt.utils.rank_channel import open_store

log = logging.getLogger(__name__)

_POLL_S: Final = 0.05


class NodeRanks:
    """The ranks of this node, which load data at the same time.

    Args:
        name: keeps two users of the store apart; the same on every rank of the node, and another on every node.
        rank: this process's global rank.
        peers: global ranks of all processes on this node, the same list everywhere.
        clock: seconds.
        sleep: lets seconds pass.
        store: a ``torch.distributed`` store; None: the default process group's.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        peers: Sequence[int],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        store: Any = None,
    ) -> None:
        self._rank = rank
        self._peers = list(peers)
        self._clock = clock
        self._sleep = sleep
        self._rounds = 0
        self._store = open_store(name) if store is None and len(self._peers) > 1 else store

    def most(self, number: int, patience_s: float = 0.0) -> int:
        """Exchange numbers with the other ranks; waits for them, for a limited time.

        Every rank calls this equally often.

        Args:
            number: what this rank needs.
            patience_s: seconds to wait for the others at most; one that never comes holds up nobody for ever.

        Returns:
            The largest of the numbers that came.
        """
        if self._store is None:
            return number
        self._rounds += 1
        heard, missing = {self._rank: number}, [peer for peer in self._peers if peer != self._rank]
        deadline = self._clock() + patience_s
        try:
            self._store.set(f"{self._rounds}/{self._rank}", str(number))
            while True:
                for peer in [each for each in missing if self._store.check([f"{self._rounds}/{each}"])]:
                    heard[peer] = int(self._store.get(f"{self._rounds}/{peer}"))
                    missing.remove(peer)
                if not missing or self._clock() >= deadline:
                    break
                self._sleep(_POLL_S)
        except Exception:  # the store goes away with the process that hosts it
            log.debug("the ranks of this node cannot agree", exc_info=True)
        return max(heard.values())
