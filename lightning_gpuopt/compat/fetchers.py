"""The door to what takes samples from a dataset, in a DataLoader's worker or in the training process.

===============================================  ===========  ==========================================================
name                                             torch        when it is gone
===============================================  ===========  ==========================================================
the local ``self`` of a fetcher's ``fetch``      2.4 - 2.13   what a worker does is not timed
``_DatasetKind.create_fetcher``,                 2.4 - 2.13   which sample a worker reads is not recorded
``_MapDatasetFetcher``,
``_IterableDatasetFetcher``
``_dataset_fetcher``                             2.4 - 2.13   the same without workers
``_set_worker_signal_handlers``                  2.4 - 2.13   a fatal signal's stack in a worker is not recorded
===============================================  ===========  ==========================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch


def calling_fetcher(collate_fn: Any, frame: FrameType) -> Any:
    """In a worker: what has called this ``collate_fn``, by the frame of that call; None where it is not as expected."""
    fetcher = frame.f_locals.get("self")
    if not callable(getattr(type(fetcher), "fetch", None)) or getattr(fetcher, "collate_fn", None) is not collate_fn:
        return None
    return fetcher


# -- looking ahead


def when_fetcher_is_made(made: Callable[[Any], object]) -> None:
    """Have this process's fetchers, which take samples from the dataset, seen as they are made; for a worker only."""
    kinds = torch.utils.data._DatasetKind
    create = kinds.create_fetcher

    def create_and_show(*args: Any, **kwargs: Any) -> Any:
        fetcher = create(*args, **kwargs)  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):
            made(fetcher)
        return fetcher

    kinds.create_fetcher = staticmethod(create_and_show)  # type: ignore[method-assign]


def fetcher_of(iterator: Any) -> Any:
    """What takes an iterator's samples in this process; None where workers do."""
    return getattr(iterator, "_dataset_fetcher", None)


def is_fetched_by_sample(fetcher: Any) -> bool | None:
    """Whether a fetcher asks for each sample by its key (True), or only for the next one (False); None: for neither.

    Where it does, it goes through the keys of a batch, whatever they are in.
    """
    from torch.utils.data._utils import fetch

    if type(fetcher) is fetch._IterableDatasetFetcher and fetcher.auto_collation:
        return False
    if type(fetcher) is not fetch._MapDatasetFetcher or not fetcher.auto_collation:
        return None
    dataset = fetcher.dataset
    if _goes_through_keys(dataset):
        return True
    return None if getattr(dataset, "__getitems__", None) else True


def _goes_through_keys(dataset: Any) -> bool:
    """Whether this is torch's own ``Subset``, unchanged, which asks its dataset for one sample after the other."""
    subset = torch.utils.data.Subset
    if type(dataset) is not subset or "__getitems__" in vars(dataset):
        return False
    own = getattr(subset.__getitems__, "__module__", "") == subset.__module__
    return own and not callable(getattr(dataset.dataset, "__getitems__", None))


def is_stream(fetcher: Any) -> bool:
    """Whether a fetcher takes the next samples of an ``IterableDataset``, which have no keys and come to an end."""
    from torch.utils.data._utils import fetch

    return isinstance(fetcher, fetch._IterableDatasetFetcher)


def set_fatal_handlers() -> None:
    """Have torch report fatal signals of this worker, as it does from a worker's start on."""
    from torch._C import _set_worker_signal_handlers

    _set_worker_signal_handlers()
