"""Tars are indexed before they are built from: in processes, or by the workers of an executor."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from pathlib import Path

from lightning_gpuopt.storage.format import staging_directory
from lightning_gpuopt.storage.sources.tar_index import Indexing, Item, write_index
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

    def write(items: list[Item]) -> None:
        items = in_turn(items, part or (0, 1))
        with ConsoleProgress(len(items), what="index", unit="tars", enabled=progress, after_s=1.0) as shown:
            if executor is not None:
                send(executor, index_unit, items, target, _name, lambda *_: shown.add(1), lambda: None)
            elif min(num_proc, len(items)) > 1:
                run_in_processes(_write, items, num_proc, target, _name, lambda *_: shown.add(1))
            else:
                for item in items:
                    write_index(item)
                    shown.add(1)

    directory = staging_directory(path) if overwrite or not os.path.lexists(path) else None
    return Indexing(directory, write)


def in_turn(items: list[Item], part: tuple[int, int]) -> list[Item]:
    """The tars in the order in which a part (i, n) takes them: its share, then towards it those of others."""
    i, n = part
    first, last = len(items) * i // n, len(items) * (i + 1) // n
    return items[first:last] + (items[last:] + items[:first])[::-1]


def _write(item: Item, report: Report) -> None:
    write_index(item)
    report(1, 0, [])


def _name(item: Item) -> str:
    return f"the index of {Path(item[0]).name}"
