"""What grows with the number of samples, and what does not: an LMDB of small records, and a folder of image files.

Everything is measured in a process of its own. Memory is what that process alone holds more than before (``RssAnon``);
of writing, its peak, looked at 20 times a second. "Cold": the files are not in the page cache, and what is read from
the disk is what the kernel counts (``/proc/self/io``). A record is eight float32 numbers and a label of 1,000 classes;
a folder of a class has 1,000 files, which are empty.

The table goes to 10^9. What is larger than was measured is computed from the largest that was: times as many samples
where a row grows with them, or as far as one shard (8 GiB) where it grows within a shard, and the same where it does
not grow.

    python benchmarks/growth.py [--tiny] [--output FILE]

Needs 3 GB and 1.1 million inodes in the temporary folder. Writes ``benchmarks/results/growth-cpu.json``; ``--tiny`` is
a trial, and writes nothing without ``--output``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from gpu_parts import ROOT
from overhead import machine

from lightning_gpuopt import LMDBDataModule, LMDBDataset, LMDBWriter
from lightning_gpuopt.images.files import find_images
from lightning_gpuopt.loading.image_folder import ImageFolder
from lightning_gpuopt.storage.writer import SHARD_BYTES

RECORDS = (10**4, 10**5, 10**6, 10**7)
FILES = (10**4, 10**5, 10**6)
TINY = (10**3,)
COMPUTED = (10**8, 10**9)
FILES_PER_FOLDER = 1000
BATCH_SIZE = 256

Figures = dict[str, float]


def anonymous_mib() -> float:
    """Memory that only this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def read_mib() -> float:
    """What this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes")) / 2**20


def measured(name: str, function: Callable[[], Any]) -> tuple[Figures, Any]:
    """Time, memory that is held afterwards, and what was read from the disk."""
    memory, read, begin = anonymous_mib(), read_mib(), time.perf_counter()
    result = function()
    seconds = time.perf_counter() - begin
    return {
        f"{name}_s": seconds,
        f"{name}_mib": anonymous_mib() - memory,
        f"{name}_read_mib": read_mib() - read,
    }, result


def out_of_cache(path: Path) -> None:
    """Have the kernel forget a dataset's files."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# ---- what a child process measures ----


def write(path: Path, count: int) -> Figures:
    features = np.arange(8, dtype=np.float32)
    before = peak = anonymous_mib()
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, anonymous_mib())

    looking = threading.Thread(target=look)
    looking.start()
    with contextlib.suppress(InterruptedError), LMDBWriter(path) as writer:
        begin = time.perf_counter()
        for index in range(count):
            writer.write((features + index, index % 1000))
        writer.flush()
        written = time.perf_counter() - begin
        raise InterruptedError
    resumed, again = measured("resume", lambda: LMDBWriter(path, resume=True))
    assert len(again) == count
    finished, info = measured("finish", again.close)
    done.set()
    looking.join()
    files = {suffix: sum(each.stat().st_size for each in path.glob(f"*.{suffix}")) for suffix in ("mdb", "tab", "lab")}
    return {
        "write_s": written,
        "resume_s": resumed["resume_s"],
        "finish_s": finished["finish_s"],
        "writer_mib": peak - before,
        "stored_bytes": info.num_bytes,
        **{f"{suffix}_mib": size / 2**20 for suffix, size in files.items()},
    }


def read(path: Path, count: int) -> Figures:
    opened, dataset = measured("open", lambda: LMDBDataset(path))
    first, sample = measured("first_sample", lambda: dataset[count // 2])
    assert sample[1] == count // 2 % 1000
    return opened | first


def targets(path: Path, count: int) -> Figures:
    dataset = LMDBDataset(path)
    figures, labels = measured("targets", lambda: dataset.targets)
    assert (len(labels), labels[count - 1]) == (count, (count - 1) % 1000)
    return figures


def targets_without_columns(path: Path, count: int) -> Figures:
    dataset = LMDBDataset(path)
    shards = tuple(replace(shard, labels=[], labels_digest=None) for shard in dataset.manifest.shards)
    dataset.manifest = replace(dataset.manifest, shards=shards)
    figures, labels = measured("old_targets", lambda: dataset.targets)
    assert (len(labels), labels[count - 1]) == (count, (count - 1) % 1000)
    return figures


def first_batch(name: str, path: Path, state: dict[str, Any] | None = None) -> Figures:
    datamodule = LMDBDataModule(path, batch_size=BATCH_SIZE, pin_memory=False)
    if state is not None:
        datamodule.load_state_dict(state)

    def batch() -> Any:
        loader = datamodule.train_dataloader()
        return loader, next(iter(loader))

    return measured(name, batch)[0]


def train(path: Path, count: int) -> Figures:
    return first_batch("batch", path)


def resume(path: Path, count: int) -> Figures:
    steps = count // BATCH_SIZE // 2
    made_by = {"num_samples": count, "seed": 0, "shuffle": True, "shuffle_window": None, "weighted": False}
    return first_batch("resumed", path, {"epoch": 3, "consumed": steps * BATCH_SIZE, "batches": steps, **made_by})


def balanced(path: Path, count: int) -> Figures:
    datamodule = LMDBDataModule(path, batch_size=BATCH_SIZE, pin_memory=False, weights="balanced")
    return measured("balanced", datamodule.train_dataloader)[0]


def list_files(path: Path, count: int) -> Figures:
    figures, files = measured("list", lambda: find_images(path))
    assert len(files) == count
    return figures


def open_folder(path: Path, count: int) -> Figures:
    opened, folder = measured("listed", lambda: ImageFolder(path))
    labelled, labels = measured("folder_targets", lambda: folder.targets)
    assert len(folder) == len(labels) == count
    return opened | labelled


COLD = (targets, targets_without_columns, balanced)
CHILDREN = {
    each.__name__: each
    for each in (write, read, targets, targets_without_columns, train, resume, balanced, list_files, open_folder)
}


def in_child(name: str, path: Path, count: int) -> Figures:
    """What a step measures in a process of its own."""
    if CHILDREN[name] in COLD:
        out_of_cache(path)
    environment = {**os.environ, "XDG_CACHE_HOME": str(path.parent / "cache")}
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, str(path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    print(f"{count:,} {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
    return figures


def records(count: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        steps = ("write", "read", "targets", "targets_without_columns", "train", "resume", "balanced")
        return {key: value for name in steps for key, value in in_child(name, Path(folder, "data"), count).items()}


def files(count: int) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder, "images")
        for number in range(0, count, FILES_PER_FOLDER):
            (top / f"class-{number // FILES_PER_FOLDER:07d}").mkdir(parents=True)
            for index in range(number, min(number + FILES_PER_FOLDER, count)):
                file = top / f"class-{number // FILES_PER_FOLDER:07d}" / f"image-{index:09d}.jpg"
                os.close(os.open(file, os.O_WRONLY | os.O_CREAT))
        for each in (top, *top.iterdir()):  # a list of folders that changed just now is not kept
            os.utime(each, (time.time() - 60,) * 2)
        return {**in_child("list_files", top, count), **in_child("open_folder", top, count)}


# ---- the table ----


class Row(NamedTuple):
    """A line of a table.

    Attributes:
        text: what it is.
        figure: its name.
        grows: with the samples, within a shard, or not.
    """

    text: str
    figure: str
    grows: Literal["samples", "shard", "not"]


RECORD_ROWS = (
    Row("`LMDBWriter`: writing", "write_s", "samples"),
    Row("going on with an unfinished shard", "resume_s", "shard"),
    Row("closing: reading back, table, columns", "finish_s", "samples"),
    Row("memory of the writer, peak", "writer_mib", "shard"),
    Row("LMDB files", "mdb_mib", "samples"),
    Row("record tables", "tab_mib", "samples"),
    Row("label columns", "lab_mib", "samples"),
    Row("`LMDBDataset`: opening", "open_s", "not"),
    Row("first sample", "first_sample_s", "not"),
    Row("`targets`, cold", "targets_s", "samples"),
    Row("... read from the disk", "targets_read_mib", "samples"),
    Row("... memory", "targets_mib", "samples"),
    Row("`targets` without columns, cold", "old_targets_s", "samples"),
    Row("... read from the disk", "old_targets_read_mib", "samples"),
    Row("shuffled loader to its first batch", "batch_s", "not"),
    Row("... in mid-epoch, after a resume", "resumed_s", "not"),
    Row("... memory", "batch_mib", "not"),
    Row('loader with `weights="balanced"`, cold', "balanced_s", "samples"),
    Row("... memory", "balanced_mib", "samples"),
)
FILE_ROWS = (
    Row("folder: listed for the first time", "list_s", "samples"),
    Row("... from the list that was kept", "listed_s", "samples"),
    Row("... memory of the list", "listed_mib", "samples"),
    Row("`targets`", "folder_targets_s", "samples"),
    Row("... memory", "folder_targets_mib", "samples"),
)
GROWS = {"samples": "the samples", "shard": "the samples of a shard", "not": "nothing"}


def table(result: dict[str, Any]) -> str:
    """The tables of a result, in Markdown."""
    return "\n\n".join(
        "\n".join(_table(what, {int(count): figures for count, figures in result[what].items()}, rows))
        for what, rows in (("records", RECORD_ROWS), ("files", FILE_ROWS))
    )


def _table(what: str, measurements: dict[int, Figures], rows: tuple[Row, ...]) -> list[str]:
    largest = max(measurements)
    beyond = [count for count in (10**7, *COMPUTED) if count > largest]
    head = [f"10^{len(str(count)) - 1}" for count in measurements]
    head += [f"10^{len(str(count)) - 1}, computed" for count in beyond]
    lines = [f"| {what} | {' | '.join(head)} | grows with |", f"|---|{'---:|' * len(head)}---|"]
    for row in rows:
        cells = [shown(row.figure, figures[row.figure]) for figures in measurements.values()]
        for count in beyond:
            figures = measurements[largest]
            if row.grows == "shard":
                count = min(count, int(largest * SHARD_BYTES / figures["stored_bytes"]))
            factor = 1 if row.grows == "not" else count / largest
            cells.append(shown(row.figure, figures[row.figure] * factor))
        lines.append(f"| {row.text} | {' | '.join(cells)} | {GROWS[row.grows]} |")
    return lines


def shown(figure: str, value: float) -> str:
    """A figure with its unit, in three digits."""
    if figure.endswith("_s"):
        scales = ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"))
    else:
        scales = ((2**20, "TiB"), (2**10, "GiB"), (1, "MiB"), (2**-10, "KiB"))
    scale, unit = next((each for each in scales if value >= each[0]), scales[-1])
    return f"{max(value, 0.0) / scale:.3g} {unit}"


def main() -> int:
    parser = argparse.ArgumentParser(description="What grows with the number of samples, measured on this machine.")
    parser.add_argument("--tiny", action="store_true", help="a trial of a few seconds, which measures nothing")
    parser.add_argument("--output", type=Path, help="the result (default: benchmarks/results/growth-cpu.json)")
    parser.add_argument("--child", nargs=3, metavar=("STEP", "PATH", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        step, path, count = options.child
        print(json.dumps(CHILDREN[step](Path(path), int(count))))
        return 0
    here = {**machine(), "numpy": np.__version__}
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    result: dict[str, Any] = {"tiny": options.tiny, "machine": here}
    result["records"] = {str(count): records(count) for count in (TINY if options.tiny else RECORDS)}
    result["files"] = {str(count): files(count) for count in (TINY if options.tiny else FILES)}
    print(table(result))
    output = options.output or (None if options.tiny else ROOT / "benchmarks/results/growth-cpu.json")
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
