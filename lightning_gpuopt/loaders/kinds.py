"""Which kind of loader an object is, by the modules of its classes: no library is imported for it."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_gpuopt.loaders.inner import dataloader_in
from lightning_gpuopt.measurements.libraries import library_of
from lightning_gpuopt.measurements.loader_description import LoaderKind


def kind_of(loader: Any) -> LoaderKind:
    library = library_of(loader)
    if library is not None and library.kind is not None:
        return library.kind
    if isinstance(getattr(loader, "num_threads", None), int) and callable(getattr(loader, "times", None)):
        return "pipeline"
    return "torch" if isinstance(loader, DataLoader) or dataloader_in(loader) is not None else "iterable"


def keeps_state(loader: Any) -> bool:
    """Whether its state is known to hold for its number of workers, and for no other setting of a DataLoader."""
    library = library_of(loader)
    return library is not None and library.keeps_state
