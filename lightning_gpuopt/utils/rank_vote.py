"""A decision of all ranks, through the key-value store of ``torch.distributed``, without a collective.

A rank that does not take part, as one that runs without us, so makes nobody wait for ever.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from lightning_gpuopt.utils.rank_channel import open_store

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long rank 0 waits for the others; those wait twice as long for its word."""


def all_say(vote: str, name: str, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> bool:
    """Whether every rank says the same; called by each at about the same time, and the answer is the same on each.

    Args:
        vote: what this rank says.
        name: keeps two decisions apart; the same on every rank.
        rank: this process's global rank.
        world_size: number of ranks.
        patience_s: seconds; a rank that has said nothing by then says something else.

    Returns:
        False also where the ranks have no store, as with MPI.
    """
    if world_size == 1:
        return True
    store = open_store(name)
    if store is None:
        return False
    try:
        if rank:
            store.set(str(rank), vote)
            store.wait(["agreed"], timedelta(seconds=2 * patience_s))
        else:
            others = [str(each) for each in range(1, world_size)]
            agreed = _wait_for(store, others, patience_s) and all(store.get(each) == vote.encode() for each in others)
            store.set("agreed", "yes" if agreed else "no")
        return bool(store.get("agreed") == b"yes")
    except Exception:  # rank 0 says nothing, or the process that hosts the store has gone
        log.debug("no decision of all ranks", exc_info=True)
        return False


def _wait_for(store: object, keys: list[str], patience_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=patience_s))  # type: ignore[attr-defined]
    except Exception:
        return False
    return True
