"""Which kind of loader an object is, and the DataLoader inside it, by its classes: no library is imported for it."""

from __future__ import annotations

import inspect
from typing import Any, Final

from torch.utils.data import DataLoader

from lightning_gpuopt.measurements.libraries import library_of
from lightning_gpuopt.measurements.loader_description import LoaderKind

_MAX_ATTRIBUTES: Final = 64
_MAX_DEPTH: Final = 3


def kind_of(loader: Any) -> LoaderKind:
    library = library_of(loader)
    if library is not None and library.kind is not None:
        return library.kind
    if isinstance(getattr(loader, "num_threads", None), int) and callable(getattr(loader, "times", None)):
        return "pipeline"
    return "torch" if dataloader_in(loader) is not None else "iterable"


def keeps_state(loader: Any) -> bool:
    """Whether its state is known to hold for its number of workers, and for no other setting of a DataLoader."""
    library = library_of(loader)
    return library is not None and library.keeps_state


def dataloader_in(loader: Any, depth: int = _MAX_DEPTH) -> DataLoader[Any] | None:
    """The loader itself where it is a DataLoader; the only one behind its attributes, so many deep; else None."""
    if isinstance(loader, DataLoader):
        return loader
    if depth <= 0 or isinstance(loader, (str, bytes, dict, set, range)) or type(loader).__module__ == "builtins":
        return None
    stages = inspect.getattr_static(loader, "pipeline", None)  # webdataset's: each stage feeds the next
    if isinstance(stages, (list, tuple)) and stages and isinstance(stages[0], DataLoader):
        return stages[0]
    try:
        held = list(vars(loader).values())[:_MAX_ATTRIBUTES]
    except Exception:  # it has none, or says that it has
        return None
    found = [each for each in held if isinstance(each, DataLoader)]
    if not found and depth > 1:
        deeper = (dataloader_in(each, depth - 1) for each in held if hasattr(type(each), "__iter__"))
        found = [each for each in deeper if each is not None]
    return found[0] if len({id(each) for each in found}) == 1 else None
