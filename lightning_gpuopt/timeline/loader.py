"""What the training loader is: the facts that decide which advice applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """The settings of the training loaders that matter for the diagnosis.

    Attributes:
        num_workers: worker processes over all loaders; None where a loader does not say (it is no DataLoader).
        persistent_workers: whether workers live on from epoch to epoch.
        prefetch_factor: batches that each worker prepares ahead; None without workers.
        pin_memory: whether batches come in page-locked memory.
    """

    num_workers: int | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None


def facts_of(loaders: Sequence[Any], iterators: Sequence[Any] = ()) -> LoaderFacts:
    """Read the settings of the training loaders.

    Args:
        loaders: the loaders behind the Trainer's CombinedLoader, of any kind.
        iterators: what runs over each of them; their workers count, where a loader is to have others from its next
            iterator on. Empty: nothing runs.

    Returns:
        Sums and minima over the loaders; a setting that one of them does not have is None.
    """
    if not loaders:
        return LoaderFacts()

    def all_of(name: str) -> list[Any] | None:
        values = [getattr(loader, name, None) for loader in loaders]
        return None if any(value is None for value in values) else values

    workers = all_of("num_workers")
    if workers is not None and len(iterators) == len(loaders):
        workers = [running_workers(*each) for each in zip(loaders, iterators, strict=True)]
    persistent = all_of("persistent_workers")
    factors = [value for loader in loaders if (value := getattr(loader, "prefetch_factor", None)) is not None]
    pinned = all_of("pin_memory")
    return LoaderFacts(
        num_workers=sum(workers) if workers is not None else None,
        persistent_workers=all(persistent) if persistent is not None else None,
        prefetch_factor=min(factors) if factors else None,
        pin_memory=all(pinned) if pinned is not None else None,
    )


def running_workers(loader: Any, iterator: Any) -> int:
    """The workers behind an iterator; what its loader has, where it is not torch's own.

    Reads ``_num_workers`` of torch's iterators (torch 2.4 to 2.13).
    """
    workers = getattr(iterator, "_num_workers", None)
    return int(loader.num_workers if workers is None else workers)


def worker_pids(iterators: Sequence[Any]) -> list[int]:
    """Process ids of the workers that run behind these iterators.

    Args:
        iterators: the running iterators of the training loaders. ``_workers`` of torch's
            ``_MultiProcessingDataLoaderIter`` is read (torch 2.4 to 2.13); iterators without it have no workers for us.
    """
    pids = [getattr(worker, "pid", None) for iterator in iterators for worker in getattr(iterator, "_workers", ())]
    return [pid for pid in pids if pid is not None]
