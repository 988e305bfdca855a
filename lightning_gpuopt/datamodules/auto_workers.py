"""``num_workers="auto"``: the CPUs of a rank, unless something speaks against processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.loading.elastic_loader import ElasticLoader
from lightning_gpuopt.loading.engine.iterator import why_not_served
from lightning_gpuopt.objects.dataset_state import UnshareableObject
from lightning_gpuopt.telemetry.resources import free_shared_memory
from lightning_gpuopt.timeline.worker_clock import nbytes_of
from lightning_gpuopt.tuning.main_script import is_guarded, script_run_again
from lightning_gpuopt.tuning.sharing import held_by
from lightning_gpuopt.tuning.worker_limits import PART_OF_SHARED_MEMORY, workers_in

# where batches of so many bytes have room in ``/dev/shm``, nobody looks how large they are
_LARGE_BATCH: Final = 256 << 20


def settle_workers(loader: ElasticLoader, loaders_on_node: int, *, unasked: bool) -> str | None:
    """Know what speaks against a loader's processes; with `unasked` have fewer, or none, then: why, if worth a word.

    ``loaders_on_node`` are those whose batches lie in ``/dev/shm`` at the same time, of all ranks.
    """
    source, before = loader._reader().dataset, loader.num_workers
    held = held_by(loader) if before and getattr(source, "seeds", True) else []
    loader.keeps_readers = any(each.kind == "generator" for each in held)
    number, why = _fitting(loader, held, loaders_on_node) if unasked and before else (before, None)
    if number < before:
        loader.num_workers = loader.cpus = number
    if not number:
        loader.prefetch_factor, loader.timeout, vars(loader)["persistent_workers"] = None, 0, False
    return None if why is None else f"num_workers='auto' is {number} here, not {before}: {why}"


def _fitting(loader: ElasticLoader, held: list[UnshareableObject], loaders_on_node: int) -> tuple[int, str | None]:
    """How many of a loader's processes start unasked, and why fewer; `held`: what its dataset holds for one process."""
    if not starts_unasked():
        return 0, None
    shared = next((each for each in held if each.kind in ("file", "device")), None)
    if shared is not None:
        return 0, (
            f"its dataset holds {shared}, which processes cannot share. If you open it when the first sample is read, "
            "num_workers='auto' uses all CPUs"
        )
    if why_not_served(loader._reader()) is None:
        return loader.num_workers, None
    return _workers_that_fit(loader, loaders_on_node)


def starts_unasked() -> bool:
    """Whether processes may be started in a program that has not said so.

    One that is not forked runs the script once more: without a guard, or where that is not known, it could train again.
    """
    if torch.multiprocessing.get_context().get_start_method() == "fork":
        return True
    script = script_run_again()
    return script is None or is_guarded(script) is True


def _workers_that_fit(loader: ElasticLoader, loaders_on_node: int) -> tuple[int, str | None]:
    """As many of torch's workers as have room for their batches in ``/dev/shm``, which the loaders share."""
    wanted, free, ahead = loader.num_workers, free_shared_memory(), loader.prefetch_factor or 1
    if free is None:
        return wanted, None
    share = PART_OF_SHARED_MEMORY * free / max(1, loaders_on_node)
    if workers_in(share, _LARGE_BATCH, ahead) >= wanted:
        return wanted, None
    batches: Any = loader.batch_sampler
    size = getattr(batches, "batch_size", None) or (len(batches[0]) if isinstance(batches, Sequence) and batches else 0)
    batch_bytes = size * (_sample_bytes(loader) or 0) if isinstance(size, int) else 0
    if not batch_bytes or (fitting := workers_in(share, batch_bytes, ahead)) >= wanted:
        return wanted, None
    needed = batch_bytes * (wanted * ahead + 1) * loaders_on_node / PART_OF_SHARED_MEMORY
    return fitting, (
        f"/dev/shm has {free / 2**20:.0f} MiB free, and a batch is {batch_bytes / 2**20:.1f} MiB. All fit after "
        f"`docker run --shm-size={math.ceil(needed / 2**20)}m` (or --ipc=host); a smaller batch_size or "
        "prefetch_factor lets more fit, and num_workers=<number> is used unchanged"
    )


def _sample_bytes(loader: ElasticLoader) -> int | None:
    """Bytes of a sample in a batch, by the first one; None if that cannot be read.

    It is read in a worker process: this process's random numbers, and the files that a dataset opens, stay as they are.
    """
    dataset: Any = loader.dataset
    once = DataLoader(
        dataset,
        batch_sampler=[[0]],
        collate_fn=partial(_num_bytes, loader.collate_fn),
        num_workers=1,
        generator=torch.Generator(),
    )
    try:
        return int(next(iter(once)))
    except Exception:  # whoever trains with it is told
        return None


def _num_bytes(collate_fn: Callable[[Any], Any], samples: Any) -> int:
    """Of a batch, which itself stays in its worker: there may be no room for it."""
    return nbytes_of(collate_fn(samples))
