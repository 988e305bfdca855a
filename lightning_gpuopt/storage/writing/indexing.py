"""Tars are indexed before they are built from: in processes, or by the workers of an executor."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from lightning_gpuopt.storage.format import staging_directory
from lightning_gpuopt.storage.sources.tar_index import Indexing, Item
from lightning_gpuopt.storage.writing.fill import Report
from lightning_gpuopt.storage.writing.pool import run_in_processes
from lightning_gpuopt.storage.writing.units import index_unit, send
from lightning_gpuopt.utils.console_progress import ConsoleProgress


def indexing(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    part: tuple[int, int] | None,
    num_proc: int,
    executor: Executor | None,
    progress: bool,
) -> Indexing:
    """How a build's tars are indexed: beside the dataset, or in memory where there is one (nothing will be built)."""
    target = os.path.realpath(path)

    def run(task: Callable[[Item], None], items: Sequence[Item]) -> None:
        with ConsoleProgress(len(items), what="index", unit="tars", enabled=progress, after_s=1.0) as shown:
            if executor is not None:
                units = functools.partial(index_unit, task)
                send(executor, units, items, target, _name, lambda *_: shown.add(1), lambda: None)
            elif min(num_proc, len(items)) > 1:
                counted = functools.partial(_counted, task)
                run_in_processes(counted, items, num_proc, target, _name, lambda *_: shown.add(1))
            else:
                for item in items:
                    task(item)
                    shown.add(1)

    directory = staging_directory(path) if overwrite or not os.path.lexists(path) else None
    return Indexing(directory, run, part or (0, 1))


def _counted(task: Callable[[Item], None], item: Item, report: Report) -> None:
    task(item)
    report(1, 0, [])


def _name(item: Item) -> str:
    return f"the index of {Path(item[0]).name}"
