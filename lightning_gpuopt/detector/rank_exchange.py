"""Sends each rank's mean step to rank 0 once a window."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_gpuopt.measurements.ranks import RankWork
from lightning_gpuopt.utils.rank_channel import Gathered, RankGather


class RankExchange(RankGather):
    """Sends this rank's work to rank 0, which collects that of all ranks; without a collective."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._works: dict[int, Any] = {}
        super().__init__("stall-detector", rank, world_size, self._collect)

    @property
    def works(self) -> tuple[RankWork, ...]:
        """The work of all ranks, as far as it is known here, in the order of the ranks."""
        return tuple(RankWork(**work) for _, work in sorted(self._works.items()) if work is not None)

    def send(self, step: int, work: RankWork | None) -> None:
        """Once a window on each rank: send this rank's work since warm-up (None: none yet)."""
        self.post(step, asdict(work) if work is not None else None)

    def _collect(self, gathered: Gathered) -> None:
        self._works = {**self._works, **gathered.by_rank}  # anew: another thread may go through it
