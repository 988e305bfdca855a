"""Lets the ranks of a node agree on one number, through the key-value store of ``torch.distributed``: no collective."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from lightning_gpuopt.utils.rank_channel import open_store

log = logging.getLogger(__name__)

_POLL_S: Final = 0.05


class NodeRanks:
    """The ranks of this node (``peers``: their global ranks), which load data at the same time.

    ``name`` is the same on every rank of the node, and another for every node and every other user of the store.
    """

    def __init__(self, name: str, rank: int, peers: Sequence[int], *, store: Any = None) -> None:
        self._rank, self._peers, self._rounds = rank, list(peers), 0
        self._store = open_store(name) if store is None and len(self._peers) > 1 else store

    def most(self, number: int, patience_s: float = 0.0) -> int:
        """The largest of this rank's number and those that came from others in time; every rank asks equally often."""
        if self._store is None:
            return number
        self._rounds += 1
        heard, missing = {self._rank: number}, [peer for peer in self._peers if peer != self._rank]
        deadline_s = time.monotonic() + patience_s
        try:
            self._store.set(f"{self._rounds}/{self._rank}", str(number))
            while True:
                for peer in [each for each in missing if self._store.check([f"{self._rounds}/{each}"])]:
                    heard[peer] = int(self._store.get(f"{self._rounds}/{peer}"))
                    missing.remove(peer)
                if not missing or time.monotonic() >= deadline_s:
                    break
                time.sleep(_POLL_S)
        except Exception:  # the store goes away with the process that hosts it
            log.debug("the ranks of this node cannot agree", exc_info=True)
        return max(heard.values())
