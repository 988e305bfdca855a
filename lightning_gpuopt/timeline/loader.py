"""What the training loader is: the facts that decide which advice applies."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt.compat.dataloader import running_workers
from lightning_gpuopt.measurements.loading import LoaderFacts, Pipelines, PipelineTimes

_WORKER_INFO: Final = "get_worker_info"
_MAX_DATASETS: Final = 64


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
    if persistent is not None and len(iterators) == len(loaders):  # AutoFix has them live on behind the loader's back
        persistent = [
            a or bool(getattr(b, "_persistent_workers", False)) for a, b in zip(persistent, iterators, strict=True)
        ]
    factors = [value for loader in loaders if (value := getattr(loader, "prefetch_factor", None)) is not None]
    pinned = all_of("pin_memory")
    return LoaderFacts(
        num_workers=sum(workers) if workers is not None else None,
        persistent_workers=all(persistent) if persistent is not None else None,
        prefetch_factor=min(factors) if factors else None,
        pin_memory=all(pinned) if pinned is not None else None,
        duplicates=_duplicates(loaders),
    )


def pipeline_of(loader: Any) -> Pipelines | None:
    """What a loader has done so far that decodes in a pipeline of its own, as DALIDataModule's; None for another.

    It has ``times() -> PipelineTimes``, ``num_threads`` and ``on_gpu``.

    Args:
        loader: of any kind.
    """
    threads, read = getattr(loader, "num_threads", None), getattr(loader, "times", None)
    if isinstance(loader, DataLoader) or not isinstance(threads, int) or not callable(read):
        return None
    times = read() if hasattr(loader, "on_gpu") else None
    if not isinstance(times, PipelineTimes):
        return None
    size = getattr(loader, "batch_size", None)
    return Pipelines(times, threads, bool(loader.on_gpu), batch_size=size if isinstance(size, int) else None)


def _duplicates(loaders: Sequence[Any]) -> bool | None:
    """Whether workers of these loaders would bring the same samples; None where all datasets are map-style.

    An iterable dataset that asks which worker it runs in, or a ``worker_init_fn``, is taken to divide its samples.
    """
    iterable = [loader for loader in loaders if isinstance(getattr(loader, "dataset", None), IterableDataset)]
    if not iterable:
        return None
    return any(getattr(loader, "worker_init_fn", None) is None and not _asks(loader.dataset) for loader in iterable)


def _asks(dataset: Any) -> bool:
    """Whether the code of a dataset's class, or of a dataset inside it, names ``get_worker_info``."""
    seen: set[int] = set()
    queue = [dataset]
    while queue and len(seen) < _MAX_DATASETS:
        each = queue.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if any(_names_worker_info(method) for cls in type(each).__mro__ for method in vars(cls).values()):
            return True
        queue += [value for value in getattr(each, "__dict__", {}).values() if hasattr(type(value), "__iter__")]
    return False


def _names_worker_info(method: Any) -> bool:
    codes = [getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)]
    while codes:
        code = codes.pop()
        if code is None:
            continue
        if _WORKER_INFO in code.co_names or _WORKER_INFO in code.co_freevars:
            return True
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    return False
