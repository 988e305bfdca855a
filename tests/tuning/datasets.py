"""Datasets for the trials; at module level, so that any worker process can have them."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[torch.Tensor]):
    """Sample ``i`` is a tensor of ``i``."""

    def __init__(self, length: int = 1000, size: int = 4) -> None:
        self.length = length
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.full((self.size,), float(index))


class Broken(Numbers):
    """Raises in the middle."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError(f"no sample {index}")


class Stuck(Numbers):
    """Never gives a sample after the first few; with ``from_the_start`` none at all."""

    def __init__(self, from_the_start: bool = False) -> None:
        super().__init__()
        self.left = 0 if from_the_start else 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.left:
            threading.Event().wait()
        self.left -= 1
        return super().__getitem__(index)


class Killed(Numbers):
    """Its worker dies, as one does for want of memory."""

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Interrupting(Numbers):
    """The user presses Ctrl-C while a sample is read."""

    def __init__(self) -> None:
        super().__init__()
        self.parent: int | None = os.getpid()

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.parent is not None:
            os.kill(self.parent, signal.SIGINT)
        self.parent = None
        return super().__getitem__(index)


class Unpicklable(Numbers):
    """Holds what no other process can have."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = lambda: None


class Stream(IterableDataset[torch.Tensor]):
    """Hands out its samples in its own order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return (torch.full((4,), float(index)) for index in range(self.length))


def fail_in_worker(worker_id: int) -> None:
    """A ``worker_init_fn``."""
    raise LookupError(f"worker {worker_id} cannot begin")
