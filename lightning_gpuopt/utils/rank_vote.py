"""What all ranks decide together, through the key-value store of ``torch.distributed``, without a collective.

A rank that does not take part, as one that runs without us, so makes nobody wait for ever.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

from lightning_gpuopt.utils.rank_channel import open_store

log = logging.getLogger(__name__)

PATIENCE_S: Final = 30.0  # how long rank 0 waits for the others; those wait twice as long for its word
_LAST_S: Final = 2.0  # so long rank 0 may take to end, once it has said so


def all_said(mine: str, name: str, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> list[str] | None:
    """What each rank says, by rank; all call it at about the same time, with one ``name``, and get the same answer.

    None where a rank was silent for ``patience_s`` seconds, or the ranks have no store, as with MPI.
    """
    if world_size == 1:
        return [mine]
    store = open_store(name)
    if store is None:
        return None
    try:
        if rank:
            store.set(str(rank), mine)
            store.wait(["all"], timedelta(seconds=2 * patience_s))
        else:
            others = [str(each) for each in range(1, world_size)]
            heard = _wait_for(store, others, patience_s)
            said = [mine, *(store.get(each).decode() for each in others)] if heard else None
            store.set("all", json.dumps(said))
        answer: list[str] | None = json.loads(store.get("all"))
        return answer
    except Exception:  # rank 0 says nothing, or the process that hosts the store has gone
        log.debug("no word of all ranks", exc_info=True)
        return None


def leave_together(name: str, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> None:
    """Wait until every rank is about to end its process; rank 0 returns first, and the others when it has ended.

    Lightning's launcher runs in rank 0: it kills all processes where another one ends with an error before. Rank 0
    waits ``patience_s`` seconds for the others; those wait twice as long.
    """
    store = open_store(name) if world_size > 1 else None
    if store is None:
        return
    with suppress(Exception):  # the store has gone, with rank 0
        if rank:
            store.set(str(rank), "")
            if _wait_for(store, ["ends"], 2 * patience_s):
                _wait_for(store, ["has ended"], _LAST_S)
        else:
            _wait_for(store, [str(each) for each in range(1, world_size)], patience_s)
            store.set("ends", "")


def _wait_for(store: Any, keys: list[str], patience_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=patience_s))
    except Exception:
        return False
    return True
