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
``worker.WorkerInfo``, ``_worker_info``,         2.4 - 2.13   DataLoader workers load whole batches
``_generate_state``
``torch._utils.ExceptionWrapper``                2.4 - 2.13   ``import`` fails: nothing else brings an exception over
===============================================  ===========  ==========================================================
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker


def calling_fetcher(collate_fn: Any, frame: FrameType) -> Any:
    """In a worker: what has called this ``collate_fn``, by the frame of that call; None if it is not as expected."""
    fetcher = frame.f_locals.get("self")
    if not callable(getattr(type(fetcher), "fetch", None)) or getattr(fetcher, "collate_fn", None) is not collate_fn:
        return None
    return fetcher


# -- looking ahead


def when_fetcher_is_made(begins: Callable[[Any, Any], object], made: Callable[[Any], object]) -> None:
    """Have this process's fetchers seen as they are made; for a worker only.

    ``begins`` gets dataset and ``collate_fn`` before: a stream's ``__iter__`` is called as its fetcher is made.
    """
    kinds = torch.utils.data._DatasetKind
    create = kinds.create_fetcher

    def create_and_show(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            begins(args[1], args[3])
        fetcher = create(*args, **kwargs)  # type: ignore[no-untyped-call]
        with contextlib.suppress(Exception):
            made(fetcher)
        return fetcher

    kinds.create_fetcher = staticmethod(create_and_show)  # type: ignore[method-assign]


def fetcher_of(iterator: Any) -> Any:
    """What takes an iterator's samples in this process; None if workers do."""
    return getattr(iterator, "_dataset_fetcher", None)


def is_fetched_by_sample(fetcher: Any) -> bool | None:
    """Whether a fetcher asks for each sample by its key (True), or only for the next one (False); None: for neither.

    If it does, it goes through the keys of a batch, whatever they are in.
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
    from torch.utils.data._utils import fetch

    return isinstance(fetcher, fetch._IterableDatasetFetcher)


def set_fatal_handlers() -> None:
    """Have torch report fatal signals of this worker, as it does from a worker's start on."""
    from torch._C import _set_worker_signal_handlers

    _set_worker_signal_handlers()


# -- a process of our own that loads as torch's workers do


def fetcher_for(dataset: Any, collate_fn: Callable[[Any], Any]) -> Any:
    """What torch's workers have to take a batch's samples from a map-style dataset."""
    kinds = torch.utils.data._DatasetKind
    return kinds.create_fetcher(kinds.Map, dataset, True, collate_fn, False)  # type: ignore[no-untyped-call]


def be_a_worker(worker: int, num_workers: int, base_seed: int, dataset: Any) -> None:
    """Have this process be one of torch's workers, from 0, for whoever asks: signals, threads, seeds, WorkerInfo."""
    set_fatal_handlers()
    torch.set_num_threads(1)
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(torch_worker._generate_state(base_seed, worker))  # type: ignore[no-untyped-call]
    torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, num_workers=num_workers, seed=seed, dataset=dataset)


def when_worker_is_asked_for(asked: Callable[[], object]) -> None:
    """Have it seen in this worker when code that is neither torch's nor ours calls ``get_worker_info()``."""
    get_worker_info = torch_worker.get_worker_info

    @functools.wraps(get_worker_info)
    def seen() -> Any:
        asking = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        if asking not in ("torch", "lightning_gpuopt"):
            asked()
        return get_worker_info()

    torch_worker.get_worker_info = torch.utils.data.get_worker_info = seen


def wrap_exception(worker: int) -> Any:
    """The exception that is being handled, as torch's workers send it: its type, and its traceback as text."""
    return ExceptionWrapper(where=f"in DataLoader worker process {worker}")  # type: ignore[no-untyped-call]


def is_wrapped(what: Any) -> bool:
    return isinstance(what, ExceptionWrapper)


def raise_here(error: Any) -> NoReturn:
    """Raise an exception, one that a worker has sent as its own type."""
    try:
        if isinstance(error, ExceptionWrapper):
            error.reraise()  # type: ignore[no-untyped-call]
        raise error
    finally:
        del error  # its traceback has this frame


def can_be_a_worker() -> bool:
    names = ("WorkerInfo", "_generate_state", "_worker_info")
    return all(hasattr(torch_worker, name) for name in names)
