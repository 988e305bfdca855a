"""What ranks decide together, without a collective.

A rank that does not take part, as one that runs without us, so makes nobody wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from lightning_gpuopt.utils.rank_channel import RankChannel

PATIENCE_S: Final = 30.0  # how long rank 0 waits for the others; those wait twice as long for its word
_LAST_S: Final = 2.0  # so long rank 0 may take to end, once it has said so


class NodeRanks(RankChannel):
    """The ranks of this node, whose global ranks are ``peers``; ``name`` is another for every node."""

    def __init__(self, name: str, rank: int, peers: Sequence[int]) -> None:
        super().__init__(name, rank, len(peers), peers)
        self._rounds = 0

    def most(self, number: int, patience_s: float = 0.0) -> int:
        """The largest of this rank's number and those that came from others in time; every rank asks equally often."""
        self._rounds += 1
        self.say(str(self._rounds), number)
        largest: int = max([number, *self.hear(str(self._rounds), patience_s).values()])
        return largest


class _Voters(RankChannel):
    def all_of(self, key: str, patience_s: float) -> dict[int, Any]:
        """What others have said, nothing if one is silent; other threads cannot use the store meanwhile."""
        try:
            self._store.wait([f"{key}/{each}" for each in self._others], timedelta(seconds=patience_s))
        except Exception:
            return {}
        return self.hear(key)


def all_said(mine: Any, name: str, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> list[Any] | None:
    """What each rank says, by rank; all call it at about the same time, with one ``name``, and get the same answer.

    None if a rank was silent for ``patience_s`` seconds, or the ranks have no store, as with MPI.
    """
    ranks = _Voters(name, rank, world_size)
    answer: list[Any] | None
    if rank:
        ranks.say("mine", mine)
        answer = ranks.all_of("all", 2 * patience_s).get(0)
    else:
        said = {0: mine, **ranks.all_of("mine", patience_s)}
        answer = [said[each] for each in range(world_size)] if len(said) == world_size else None
        ranks.say("all", answer)
    return answer if ranks.problem is None else None


def leave_together(name: str, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> None:
    """Wait until every rank is about to end its process; rank 0 returns first, and the others when it has ended.

    Lightning's launcher runs in rank 0: it kills all processes where another one ends with an error before. Rank 0
    waits ``patience_s`` seconds for the others; those wait twice as long.
    """
    ranks = _Voters(name, rank, world_size)
    if rank:
        ranks.say("here", "")
        if ranks.all_of("ends", 2 * patience_s):
            ranks.all_of("has ended", _LAST_S)  # nobody says it: the store goes with rank 0
    else:
        ranks.all_of("here", patience_s)
        ranks.say("ends", "")
