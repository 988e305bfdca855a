"""What is known of the libraries whose loaders, or datasets, a Trainer may have: a row for each, by name only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lightning_gpuopt.measurements.loader_description import LoaderKind


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """A package, which may be part of a namespace package, in which classes of loaders or datasets are defined."""

    package: str
    version: str  # begins so where what ``loaders/describe.py`` reads of its objects was looked at
    kind: LoaderKind | None = None  # of a loader whose class, or base class, it defines
    keeps_state: bool = False  # its loader has a state that holds for its number of workers, and for no other setting
    divides: bool = False  # its streams divide their samples, or shards, among the workers
    begins_with: str = "index"  # what a worker does first in an epoch: "index", "shards", "buffer"
    # by file, its functions that download a shard, or wait for one; none named: all of them
    downloads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


LIBRARIES: Final = (
    LibraryFacts("torchdata.stateful_dataloader", "0.11", "stateful", keeps_state=True),
    LibraryFacts("torchdata.nodes", "0.11", "nodes"),
    LibraryFacts(
        "litdata",
        "0.2",
        "litdata",
        keeps_state=True,
        divides=True,
        begins_with="shards",
        downloads={
            "litdata/streaming/downloader.py": (),
            "litdata/streaming/item_loader.py": ("_wait_until_chunk_ready",),
            "litdata/streaming/reader.py": ("_acquire_cache_slot", "_force_download", "_download_chunk_indexes"),
        },
    ),
    LibraryFacts(
        "streaming",
        "0.13",
        "mds",
        keeps_state=True,
        divides=True,
        begins_with="shards",
        downloads={
            "streaming/base/dataset.py": ("prepare_shard", "_each_sample_id"),
            "streaming/base/storage/download.py": (),
        },
    ),
    LibraryFacts(
        "webdataset",
        "1.0",
        "webdataset",
        begins_with="buffer",
        downloads={"webdataset/cache.py": ("download", "get_file"), "webdataset/gopen.py": ()},
    ),
    LibraryFacts("datasets", "5.", divides=True),
)


def library_of(value: Any) -> LibraryFacts | None:
    """The library in which the class of an object, or the first known one that it derives from, is defined."""
    modules = [f"{cls.__module__}." for cls in type(value).__mro__]
    return next((row for module in modules for row in LIBRARIES if module.startswith(f"{row.package}.")), None)
