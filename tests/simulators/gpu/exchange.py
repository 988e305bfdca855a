"""How the ranks of one machine tell each other when they join a collective: a small shared file, read at leisure.

Each rank writes when its own stream is ready for its k-th collective. Whoever needs to know when that one ends reads
the others' moments: ``perf_counter`` is the same clock in all of them, so nobody has to be there at the time.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

ENVIRONMENT = "GPU_SIMULATOR_EXCHANGE"
_SLOTS = 4096
_ENTRY = struct.Struct("<dQ")


class Exchange(Protocol):
    """When each rank was ready for each collective."""

    rank: int
    world_size: int

    def publish(self, number: int, ready_s: float) -> None:
        """This rank's stream is ready for collective ``number``."""

    def latest(self, number: int, ranks: Iterable[int]) -> float | None:
        """When the last of ``ranks`` was ready; None while one of them is not known to be."""


class Memory:
    """For ranks within one process; a lone rank by default.

    Args:
        rank: this rank.
        board: shared by the ranks, (collective, rank) -> seconds.
        world_size: how many ranks.
    """

    def __init__(self, rank: int = 0, board: dict[tuple[int, int], float] | None = None, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._board = {} if board is None else board

    def publish(self, number: int, ready_s: float) -> None:
        self._board[number, self.rank] = ready_s
        self._board.pop((number - _SLOTS, self.rank), None)

    def latest(self, number: int, ranks: Iterable[int]) -> float | None:
        moments = [self._board.get((number, rank)) for rank in ranks]
        known = [moment for moment in moments if moment is not None]
        return max(known) if len(known) == len(moments) else None


class SharedFile:
    """For ranks in processes of their own.

    Args:
        path: the file, made by :func:`rank_environment`.
        rank: this rank.
        world_size: how many ranks.
    """

    def __init__(self, path: str | Path, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SLOTS * world_size * _ENTRY.size)

    def publish(self, number: int, ready_s: float) -> None:
        offset = self._offset(number, self.rank)
        struct.pack_into("<d", self._map, offset, ready_s)
        struct.pack_into("<Q", self._map, offset + 8, number + 1)  # last: it says that the moment is valid

    def latest(self, number: int, ranks: Iterable[int]) -> float | None:
        latest_s = float("-inf")
        for rank in ranks:
            ready_s, tag = _ENTRY.unpack_from(self._map, self._offset(number, rank))
            if tag != number + 1:
                return None
            latest_s = max(latest_s, ready_s)
        return latest_s

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def _offset(self, number: int, rank: int) -> int:
        return (number % _SLOTS * self.world_size + rank) * _ENTRY.size


def rank_environment(folder: Path, world_size: int, name: str = "collectives.bin") -> dict[str, str]:
    """An environment for ``tests.ranks.run_ranks`` in which the ranks' simulated GPUs find one another.

    Args:
        folder: where the shared file is made; one file serves one run of each rank.
        world_size: how many ranks.
        name: the file's name.
    """
    path = folder / name
    path.write_bytes(bytes(_SLOTS * world_size * _ENTRY.size))
    return {**os.environ, ENVIRONMENT: str(path)}


def from_environment() -> Exchange:
    """What the process was started with: the shared file of its ranks, or a lone rank."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Memory()
    if ENVIRONMENT not in os.environ:
        raise RuntimeError(f"{world_size} ranks need a shared file: start them with the env of rank_environment()")
    return SharedFile(os.environ[ENVIRONMENT], int(os.environ["RANK"]), world_size)
