"""Which kind of loader an object is, by the modules of its classes: no library is imported for it."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import DataLoader

from lightning_gpuopt.loaders.inner import dataloader_in
from lightning_gpuopt.measurements.loader_description import LoaderKind

_BY_MODULE: Final[dict[str, LoaderKind]] = {
    "torchdata.stateful_dataloader": "stateful",
    "litdata": "litdata",
    "streaming": "mds",
    "webdataset": "webdataset",
    "torchdata.nodes": "nodes",
}
"""The package in which a class is defined, and the kind that it is, or that a class derived from it is."""

KNOWN_STATES: Final = ("stateful", "litdata", "mds")
"""Kinds whose state holds for their number of workers, and for no other setting of a DataLoader."""


def kind_of(loader: Any) -> LoaderKind:
    """The kind of a loader.

    Args:
        loader: a loader of any kind.
    """
    for cls in type(loader).__mro__:
        module = f"{cls.__module__}."
        for prefix, kind in _BY_MODULE.items():
            if module.startswith(f"{prefix}."):
                return kind
    if isinstance(getattr(loader, "num_threads", None), int) and callable(getattr(loader, "times", None)):
        return "pipeline"
    return "torch" if isinstance(loader, DataLoader) or dataloader_in(loader) is not None else "iterable"
