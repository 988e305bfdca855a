"""Describes a loader of any kind; no library is imported for it, and what is not as expected is left out."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from lightning_gpuopt.compat.dataloader import running_workers
from lightning_gpuopt.loaders.kinds import dataloader_in, keeps_state, kind_of
from lightning_gpuopt.measurements.libraries import LibraryFacts, library_of
from lightning_gpuopt.measurements.loader_description import LoaderDescription, Work

log = logging.getLogger(__name__)

_WORKER_INFO: Final = "get_worker_info"
_MAX_DATASETS: Final = 64
_MAX_NODES: Final = 256

Facts = dict[str, Any]


def describe(loader: Any, iterator: Any = None, *, key: str = "") -> LoaderDescription:
    """What a loader is, at ``key`` of a CombinedLoader; workers of an ``iterator`` that runs count before settings."""
    kind, inner = kind_of(loader), dataloader_in(loader)
    found: Facts = {"kind": kind, "name": type(loader).__name__, "key": key, "keeps_state": keeps_state(loader)}
    notes: list[str] = []
    _read(found, notes, "a loader's length", lambda: {"length": _length(loader)})
    if inner is not None:
        _read(found, notes, f"a {type(inner).__name__}", lambda: _of_dataloader(inner, iterator))
        dataset = getattr(inner, "dataset", None)
        library = library_of(dataset)
        if found.get("is_iterable") and library is not None and library.package in _DATASETS:
            read = _DATASETS[library.package]
            _read_library(found, notes, library, lambda: read(dataset))
        _count_idle(found, notes)
    elif kind == "nodes" and (library := library_of(loader)) is not None:
        _read_library(found, notes, library, lambda: _of_nodes(loader))
    elif kind == "pipeline":
        size = getattr(loader, "batch_size", None)
        found |= {"work": "threads", "batch_size": size if isinstance(size, int) else None}
    return LoaderDescription(**found, notes=tuple(notes))


def _read(found: Facts, notes: list[str], what: str, read: Callable[[], Facts]) -> None:
    try:
        found |= read()
    except Exception:  # whatever a loader of somebody's own, or another version of a library, does not like about it
        log.debug("%s is not as expected", what, exc_info=True)
        notes.append(f"Part of {what} could not be read: it is not as expected.")


def _read_library(found: Facts, notes: list[str], library: LibraryFacts, read: Callable[[], Facts]) -> None:
    """Read what is special about a library's object; of another version than its row says nothing is looked at."""
    names = (library.package, library.package.partition(".")[0])
    versions = (getattr(sys.modules.get(name), "__version__", None) for name in names)
    version = str(next(filter(None, versions), "unknown"))
    if version.startswith(library.version):
        _read(found, notes, f"{names[1]} {version}", read)
    else:
        notes.append(f"Details of {names[1]} {version} were not read: this version is unknown.")


def _length(loader: Any) -> int | None:
    if not hasattr(type(loader), "__len__"):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an iterable dataset need not have a length
        return None


# -- torch's DataLoader, and the datasets behind it


def _of_dataloader(loader: DataLoader[Any], iterator: Any) -> Facts:
    workers = running_workers(loader, iterator)
    streams = isinstance(loader.dataset, IterableDataset)
    duplicates = _duplicates(loader) if streams else None
    return {
        "work": "processes" if workers else "training process",
        "num_workers": workers,
        # AutoFix has workers live on behind the loader's back
        "persistent_workers": loader.persistent_workers or bool(getattr(iterator, "_persistent_workers", False)),
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": loader.pin_memory,
        "sample_parallel": bool(getattr(iterator, "reads_by_sample", False)),
        "batch_size": loader.batch_size,
        "is_iterable": streams,
        "duplicates": duplicates,
        "sharding": "sampler" if not streams else None if duplicates else "dataset",
        "may_be_sample_parallel": not streams and _may_be_sample_parallel(loader),
    }


def _may_be_sample_parallel(loader: DataLoader[Any]) -> bool:
    """Whether a SampleLoader would make a plain loader's batches sample by sample, as far as is known."""
    collate_fn = getattr(loader.collate_fn, "collate_fn", loader.collate_fn)  # behind what times it
    if type(loader) is not DataLoader or collate_fn is not default_collate or loader.batch_size is None:
        return False
    dataset: Any = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return not hasattr(dataset, "__getitems__")  # else batches are its own to make


def _count_idle(found: Facts, notes: list[str]) -> None:
    """Workers without a batch, or without a shard, and the note that says so."""
    workers, batches, shards = found.get("num_workers") or 0, found.get("length"), found.get("shards")
    if not found.get("is_iterable") and batches and batches < workers:
        found["idle_workers"] = workers - batches
        notes.append(
            f"An epoch has {batches} batches, fewer than the {workers} workers of its loader: {workers - batches} of "
            f"them are not needed. num_workers={batches} is enough."
        )
    elif shards is not None and workers > shards:
        found["idle_workers"] = workers - shards
        notes.append(
            f"The stream has {shards} shards for this rank, and its loader {workers} workers: {workers - shards} of "
            f"them have nothing to read. num_workers={shards} is enough, or divide the data into more shards."
        )
    elif shards is not None and workers and shards % workers:
        notes.append(
            f"The {shards} shards of the stream do not divide evenly among the {workers} workers of its loader: "
            "workers with one shard fewer are idle at the end of an epoch."
        )


def _ranks() -> int:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def _of_litdata(dataset: Any) -> Facts:
    folders = [
        each.cache_dir.path or each.input_dir.path
        for each in getattr(dataset, "_datasets", (dataset,))
        if each.input_dir.url is not None
    ]
    return {"caches": tuple(str(each) for each in folders if each)}


def _of_mds(dataset: Any) -> Facts:
    return {"caches": tuple(str(each.local) for each in dataset.streams if each.remote)}


def _of_webdataset(dataset: Any) -> Facts:
    stages = list(dataset.pipeline)
    names = [getattr(stage, "__name__", type(stage).__name__) for stage in stages]
    urls = getattr(stages[0], "urls", None)
    known = names[0] == "SimpleShardList" and "split_by_worker" in names and isinstance(urls, list)
    folders = [str(each.cache_dir) for each in stages if getattr(each, "cache_dir", None)]
    ranks = _ranks() if "split_by_node" in names else 1
    return {"shards": -(-len(urls) // ranks) if known and urls is not None else None, "caches": tuple(folders)}


def _of_datasets(dataset: Any) -> Facts:
    return {"shards": int(dataset.num_shards)}


_DATASETS: Final[dict[str, Callable[[Any], Facts]]] = {
    "litdata": _of_litdata,
    "streaming": _of_mds,
    "webdataset": _of_webdataset,
    "datasets": _of_datasets,
}


def _duplicates(loader: DataLoader[Any]) -> bool:
    """Whether workers bring the same samples; a ``worker_init_fn``, or asking for the worker, is taken to divide."""
    dataset, library = loader.dataset, library_of(loader.dataset)
    if loader.worker_init_fn is not None or (library is not None and library.divides):
        return False
    if library is not None and library.package == "webdataset":  # a stage of it does
        names = [getattr(stage, "__name__", type(stage).__name__) for stage in getattr(dataset, "pipeline", ())]
        return not {"split_by_worker", "ResampledShards"} & set(names)
    return not _asks(dataset)


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


# -- torchdata.nodes


def _of_nodes(loader: Any) -> Facts:
    found: Facts = {"num_workers": 0, "pin_memory": False}
    work: Work = "training process"
    for node in _nodes(loader.root):
        name = type(node).__name__
        if name == "ParallelMapper" and node.num_workers:
            found["num_workers"] += node.num_workers
            if work != "processes":
                work = "processes" if node.method == "process" else "threads"
        elif name == "Prefetcher":
            found["prefetch_factor"] = max(node.prefetch_factor, found.get("prefetch_factor") or 0)
            work = "threads" if work == "training process" else work
        elif name == "Batcher":
            found.setdefault("batch_size", node.batch_size)
        elif name == "PinMemory":
            found["pin_memory"] = True
    return found | {"work": work}


def _nodes(root: Any) -> Iterator[Any]:
    """The nodes of a graph, from its root on: what a node reads from is one of its attributes, or in one of them."""
    seen: set[int] = set()
    queue = [root]
    while queue and len(seen) < _MAX_NODES:
        node = queue.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for name, value in vars(node).items():
            if name != "_it":  # the iterator over the same sources
                held = list(value.values()) if isinstance(value, dict) else value
                queue += [each for each in (held if isinstance(held, (list, tuple)) else (held,)) if _is_node(each)]


def _is_node(value: Any) -> bool:
    return any(
        cls.__name__ == "BaseNode" and cls.__module__.startswith("torchdata.nodes") for cls in type(value).__mro__
    )
