"""Sends each rank's mean step to rank 0 once a window."""

from __future__ import annotations

from dataclasses import asdict

from lightning_gpuopt.measurements.ranks import RankWork
from lightning_gpuopt.utils.rank_channel import RankGather


class RankExchange:
    """Sends this rank's work to rank 0, which collects that of all ranks; without a collective."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._gather = RankGather("stall-detector", rank, world_size)
        self._works: dict[int, RankWork] = {}

    @property
    def problem(self) -> str | None:
        """Why nothing can be sent; None where it can."""
        return self._gather.problem

    @property
    def works(self) -> tuple[RankWork, ...]:
        """The work of all ranks, as far as it is known here, in the order of the ranks."""
        return tuple(self._works[rank] for rank in sorted(self._works))

    def post(self, step: int, work: RankWork | None) -> None:
        """Once a window on each rank: send this rank's work since warm-up (None: none yet), and take in what came."""
        self._gather.post(step, asdict(work) if work is not None else None)
        self._take_in()

    def end(self) -> None:
        """After training: wait a few seconds for the other ranks' last figures."""
        self.close(3.0)
        self._take_in()

    def close(self, patience_s: float = 1.0) -> None:
        """Send and receive no more."""
        self._gather.close(patience_s)

    def _take_in(self) -> None:
        if not self._gather.collects:
            return
        for gathered in self._gather.ready():
            for rank, work in gathered.by_rank.items():
                if work is not None:
                    self._works[rank] = RankWork(**work)
                else:
                    self._works.pop(rank, None)
