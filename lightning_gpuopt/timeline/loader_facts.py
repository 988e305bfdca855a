"""What the training loaders are together: the facts that decide which advice applies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpuopt.measurements.loader_description import WITHOUT_SETTINGS, LoaderDescription
from lightning_gpuopt.measurements.loading import LoaderFacts, Pipelines, PipelineTimes


def facts_of(loaders: Sequence[LoaderDescription]) -> LoaderFacts:
    """Sums and minima over loaders; None if one does not have a setting, as other loaders have none."""
    if not loaders or any(each.kind in WITHOUT_SETTINGS for each in loaders):
        return LoaderFacts(duplicates=_duplicates(loaders))
    workers = [each.num_workers for each in loaders if each.num_workers is not None]
    factors = [each.prefetch_factor for each in loaders if each.prefetch_factor is not None]
    complete = len(workers) == len(loaders)
    return LoaderFacts(
        num_workers=sum(workers) if complete else None,
        persistent_workers=all(each.persistent_workers for each in loaders) if complete else None,
        prefetch_factor=min(factors) if factors else None,
        pin_memory=all(each.pin_memory for each in loaders) if complete else None,
        sample_parallel=any(each.sample_parallel for each in loaders) or None,
        duplicates=_duplicates(loaders),
    )


def _duplicates(loaders: Sequence[LoaderDescription]) -> bool | None:
    known = [each.duplicates for each in loaders if each.duplicates is not None]
    return any(known) if known else None


def pipeline_of(loader: Any) -> Pipelines | None:
    """What a loader did that decodes in its own pipeline (``times()``, ``num_threads``, ``on_gpu``), or None."""
    threads, read = getattr(loader, "num_threads", None), getattr(loader, "times", None)
    if isinstance(loader, DataLoader) or not isinstance(threads, int) or not callable(read):
        return None
    times = read() if hasattr(loader, "on_gpu") else None
    if not isinstance(times, PipelineTimes):
        return None
    size = getattr(loader, "batch_size", None)
    return Pipelines(times, threads, bool(loader.on_gpu), batch_size=size if isinstance(size, int) else None)
