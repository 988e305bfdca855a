"""DALIDataModule on the CPU, beside NVIDIA's own iterator, PIL and the LMDB fast path, in one run over the same images.

Sections (``--sections``, all by default):

- ``speed``: random-resized crops of 224 out of photographs of 500x375, normalised: images per second, and per second of
  CPU time (of this process with all its threads, and of the workers). NVIDIA's DALIClassificationIterator with its file
  reader has the same operators, threads, batch size and prefetch depth as DALIDataModule has.
- ``start``: seconds from a new DALIDataModule to its first batch, in a process that has imported everything.
- ``memory``: resident memory (RSS) over 50 epochs of a small set.
- ``values``: evaluation against PIL: mean absolute error of the normalised values.

In ``speed`` all take turns, in another order each round. A turn is several epochs, and its clock runs while the loader
is busy: from the fifth batch to the fifth but last, epoch ends in between included. Before a turn everything comes to
rest: an iterator that works ahead would otherwise do so in another's turn. Ratios are medians of the rounds' ratios.

    python benchmarks/dali.py [--sections speed ...] [--rounds N] [--scale 0.1] [--threads N] [--json FILE]

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import dali_peers as peers
from dali_peers import Loaded, cpu_s
from gpu_parts import Skip
from overhead import machine
from storage import make_jpegs

from lightning_gpuopt import DALIDataModule
from lightning_gpuopt.storage.writing.build import build_lmdb

SECTIONS = ("speed", "start", "memory", "values")
NVIDIA, FOLDER, LMDB, PIL, FAST_PATH = (
    "NVIDIA DALIClassificationIterator",
    "DALIDataModule, folder",
    "DALIDataModule, LMDB",
    "DataLoader, PIL",
    "LMDBDataModule, decode='tensor'",
)

IMAGES, BATCH = 2000, 64
TURN_EPOCHS = 2
EDGE_BATCHES = 4
"""Batches at both ends of a turn that are not timed: the queues fill, and empty."""

OF_NVIDIA_TARGET = 0.98
START_TARGET_S = 2.0
STARTS = 5
EPOCHS = 50
SETTLED = 10
"""Epochs until the allocators have what they need."""
SMALL_BATCH = 4
"""Between equal epochs, RSS moves by the size of some batches."""
GROWTH_TARGET_PERCENT = 2.0
"""Of the median RSS, from the first epochs behind that to the last ones."""


@dataclass(frozen=True)
class Turn:
    """What a loader did in a turn.

    Attributes:
        images: that came in the time.
        wall_s: seconds.
        cpu_s: CPU seconds of all processes.
    """

    images: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.wall_s

    @property
    def per_cpu(self) -> float:
        """Images per second of CPU time: images per second and core in use."""
        return self.images / self.cpu_s

    @property
    def cores(self) -> float:
        """Cores in use."""
        return self.cpu_s / self.wall_s


# ---- speed ----


def come_to_rest(interval_s: float = 0.2, limit_s: float = 10.0) -> None:
    """Wait until no thread and no child of this process computes any longer."""
    until = time.perf_counter() + limit_s
    before = cpu_s()
    while time.perf_counter() < until:
        time.sleep(interval_s)
        now = cpu_s()
        if now - before < 0.1 * interval_s:
            return
        before = now


def turn(loaded: Loaded, epochs: int) -> Turn:
    """Read a loader for so many epochs; the clock runs while it is busy."""
    gc.collect()
    come_to_rest()
    last = epochs * loaded.num_batches - EDGE_BATCHES
    count = images = 0
    begin = begin_cpu = wall = cpu = 0.0
    for _ in range(epochs):
        for _, labels in loaded.epoch():
            count += 1
            if count == EDGE_BATCHES:
                begin, begin_cpu = time.perf_counter(), cpu_s()
            elif EDGE_BATCHES < count <= last:
                images += len(labels)
            if count == last:
                wall, cpu = time.perf_counter() - begin, cpu_s() - begin_cpu
    if not images:
        raise SystemExit(f"expected more than {2 * EDGE_BATCHES} batches a turn, got {count}: raise --scale")
    return Turn(images, wall, cpu)


def speed(folder: Path, stored: Path, threads: int, rounds: int) -> dict[str, Any]:
    workers = peers.usable_cores()
    loaders: dict[str, Loaded] = {
        NVIDIA: peers.nvidia(folder, batch_size=BATCH, num_threads=threads),
        FOLDER: peers.ours(folder, batch_size=BATCH, device="cpu", num_threads=threads),
        LMDB: peers.ours(stored, batch_size=BATCH, device="cpu", num_threads=threads),
        PIL: peers.pil(folder, batch_size=BATCH, num_workers=workers),
        FAST_PATH: peers.lmdb(stored, batch_size=BATCH, num_workers=workers),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in loaders}
    names = list(loaders)
    for number in range(rounds + 1):
        random.Random(number).shuffle(names)
        for name in names:
            done = turn(loaders[name], TURN_EPOCHS)
            if number:  # the first round starts workers, and fills caches
                turns[name].append(done)
    return {
        "threads": threads,
        "workers": workers,
        "batch_size": BATCH,
        "rounds": rounds,
        "loaders": {name: summarised(of, turns[NVIDIA]) for name, of in turns.items()},
        "targets": [
            target(
                f"{name}: images/s of NVIDIA's",
                statistics.median(ratios(turns[name], turns[NVIDIA])),
                "x",
                at_least=OF_NVIDIA_TARGET,
            )
            for name in (FOLDER, LMDB)
        ],
    }


def ratios(ours: list[Turn], theirs: list[Turn], of: Callable[[Turn], float] = lambda done: done.rate) -> list[float]:
    """Of each round: what disturbs a round disturbs both."""
    return [of(mine) / of(other) for mine, other in zip(ours, theirs, strict=True)]


def summarised(turns: list[Turn], nvidia: list[Turn]) -> dict[str, Any]:
    return {
        "images_s": statistics.median(each.rate for each in turns),
        "images_s_per_core": statistics.median(each.per_cpu for each in turns),
        "cores": statistics.median(each.cores for each in turns),
        "of_nvidia": statistics.median(ratios(turns, nvidia)),
        "of_nvidia_quartiles": statistics.quantiles(ratios(turns, nvidia), n=4)[::2] if len(turns) > 1 else None,
        "of_nvidia_per_core": statistics.median(ratios(turns, nvidia, lambda done: done.per_cpu)),
        "rounds": [round(each.rate, 1) for each in turns],
    }


# ---- start ----

_FIRST_BATCH = """
import sys, time
import nvidia.dali.fn, nvidia.dali.types, nvidia.dali.pipeline
import torch
from lightning_gpuopt import DALIDataModule
begin = time.perf_counter()
datamodule = DALIDataModule(sys.argv[1], batch_size=int(sys.argv[2]), device="cpu", num_threads=int(sys.argv[3]))
datamodule.setup("fit")
next(iter(datamodule.train_dataloader()))
print(time.perf_counter() - begin)
"""


def start(folder: Path, threads: int) -> dict[str, Any]:
    """Seconds to the first batch, each time in a process of its own."""
    command = [sys.executable, "-c", _FIRST_BATCH, str(folder), str(BATCH), str(threads)]
    seconds = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(STARTS)]
    median = statistics.median(seconds)
    return {
        "seconds": seconds,
        "targets": [target("a new DALIDataModule's first batch", median, "s", at_most=START_TARGET_S)],
    }


# ---- memory ----

_EPOCHS = """
import sys, psutil
from lightning_gpuopt import DALIDataModule
folder, epochs, batch_size, threads = sys.argv[1], *map(int, sys.argv[2:])
datamodule = DALIDataModule(folder, batch_size=batch_size, device="cpu", num_threads=threads)
datamodule.setup("fit")
loader, own = datamodule.train_dataloader(), psutil.Process()
for _ in range(epochs):
    for batch in loader:
        pass
    print(own.memory_info().rss / 2**20)
"""


def memory(folder: Path, threads: int) -> dict[str, Any]:
    """Resident memory after each epoch, in a process of its own."""
    command = [sys.executable, "-c", _EPOCHS, str(folder), str(EPOCHS), str(SMALL_BATCH), str(threads)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    mib = [float(line) for line in lines]
    before, after = (statistics.median(part) for part in (mib[SETTLED - 1 : 2 * SETTLED - 1], mib[-SETTLED:]))
    grown = 100 * (after / before - 1)
    what = f"growth of the median RSS from epochs {SETTLED}-{2 * SETTLED - 1} to {EPOCHS - SETTLED + 1}-{EPOCHS}"
    return {
        "mib": {f"epoch {SETTLED}": mib[SETTLED - 1], f"epoch {EPOCHS}": mib[-1]},
        "mib_each_epoch": mib,
        "targets": [target(what, grown, "%", at_most=GROWTH_TARGET_PERCENT)],
    }


# ---- values ----


def values(folder: Path, threads: int) -> dict[str, Any]:
    """Evaluation batches against what PIL makes of the same files."""
    datamodule = DALIDataModule(
        val=folder, batch_size=BATCH, resize_size=peers.RESIZE, crop_size=peers.CROP, device="cpu", num_threads=threads
    )
    datamodule.setup("validate")
    files = [Path(file) for file, _ in peers.Folder(folder).samples]
    errors, largest, at = [], 0.0, 0
    for images, _ in datamodule.val_dataloader():
        for image in images:
            difference = (image - peers.pil_center(files[at])).abs()
            errors.append(difference.mean().item())
            largest = max(largest, difference.max().item())
            at += 1
    one = 1 / 255 / statistics.mean(peers.STD)
    return {
        "images": at,
        "mean_absolute_error": statistics.mean(errors),
        "worst_image": max(errors),
        "largest": largest,
        "one_step_of_255": one,
        "targets": [],
    }


# ---- output ----


def target(
    what: str, measured: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    """A target with what was measured."""
    passed = (at_least is None or measured >= at_least) and (at_most is None or measured <= at_most)
    bound = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
    return {"what": what, "measured": measured, "unit": unit, "target": bound, "passed": passed}


def show(section: str, found: dict[str, Any]) -> str:
    lines = [f"\n# {section}\n"]
    if section == "speed":
        lines += [
            f"{found['threads']} DALI threads, {found['workers']} workers, batches of {found['batch_size']}, "
            f"medians of {found['rounds']} rounds\n",
            "| loader | images/s | of NVIDIA's | quartiles | images/s per core in use | of NVIDIA's | cores in use |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name, row in sorted(found["loaders"].items(), key=lambda item: -item[1]["images_s"]):
            quartiles = "-".join(f"{each:.3f}" for each in row["of_nvidia_quartiles"] or ())
            cells = [f"{row['images_s']:,.0f}", f"{row['of_nvidia']:.3f}", quartiles]
            cells += [f"{row['images_s_per_core']:,.0f}", f"{row['of_nvidia_per_core']:.3f}", f"{row['cores']:.2f}"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    elif section == "start":
        lines.append(f"seconds: {', '.join(f'{each:.2f}' for each in found['seconds'])}")
    elif section == "memory":
        lines.append(f"RSS: {', '.join(f'{when} {mib:.1f} MiB' for when, mib in found['mib'].items())}")
    else:
        lines.append(
            f"{found['images']} images: mean absolute error {found['mean_absolute_error']:.4f}, of the worst image "
            f"{found['worst_image']:.4f}, largest {found['largest']:.3f}; one step of 255 is "
            f"{found['one_step_of_255']:.4f}"
        )
    for each in found["targets"]:
        verdict = "PASS" if each["passed"] else "FAIL"
        lines.append(f"{verdict}  {each['what']}: {each['measured']:.3f} {each['unit']} ({each['target']})")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """The machine, and what is measured on it."""
    here = {**machine(), "usable cores": str(peers.usable_cores())}
    wheels = sorted({each.metadata["Name"] for each in distributions()})
    dali = [name for name in wheels if name.startswith("nvidia-dali")]
    return here | {name: version(name) for name in ("pillow", "simplejpeg", *dali)}


def measure(section: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder, stored = work / "images", work / "stored"
    if section == "speed":
        return speed(folder, stored, options.threads, options.rounds)
    if section == "start":
        return start(folder, options.threads)
    return {"memory": memory, "values": values}[section](work / "few", options.threads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help=f"share of the {IMAGES} images, for a quick look")
    parser.add_argument("--threads", type=int, default=peers.usable_cores(), help="of DALI (default: the cores)")
    parser.add_argument("--dir", type=Path, help="where to put the images (default: the system's)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    try:
        peers.need_dali()
    except Skip as reason:
        print(f"benchmarks/dali.py: {reason}")
        return 0
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {"machine": versions()}
    print(", ".join(f"{name} {value}" for name, value in results["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        work = Path(name)
        make_jpegs(work / "images", max(1, int(IMAGES * options.scale)))
        make_jpegs(work / "few", 64)
        build_lmdb(work / "images", work / "stored", progress=False)
        for section in options.sections:
            results[section] = measure(section, work, options)
            print(show(section, results[section]), flush=True)
            if options.json is not None:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(each["passed"] for section in options.sections for each in results[section]["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
