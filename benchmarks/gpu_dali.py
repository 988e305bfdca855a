"""Section ``dali`` of ``benchmarks/gpu.py``: DALIDataModule on a GPU.

- ``sweep``: images per second, and the time between batches, for shares of the hardware JPEG decoder and numbers of
  CPU threads; beside it NVIDIA's own iterator, and torchcodec's CUDA JPEG decoder (torchvision's where torchcodec has
  none), each in the same run.
- ``training``: ResNet-50 in bf16-mixed and channels-last, fed by a DataLoader with PIL, LMDBDataModule, DALIDataModule,
  and by one batch that lies on the GPU already: what the data costs.

    python benchmarks/gpu_dali.py [--device cpu] [--quick] [--json FILE]

``--device cpu`` runs all of it with next to no images on the CPU: it tries the benchmark out, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import dali_peers as peers
import numpy as np
import torch
from dali_parts import FULL, QUICK, TRIAL, USUAL_THREADS, DecodeWorkload, Watch, make_data
from dali_peers import Loaded
from dali_training import FOLDER, LMDB, training
from gpu_parts import Skip
from prefetch import quiet

from lightning_gpuopt.dali.library import load_dali

OF_NVIDIA_TARGET = 0.98
OF_SYNTHETIC_TARGET = 0.95


def endless(loaded: Loaded) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        yield from loaded.epoch()


def read(workload: DecodeWorkload, loaded: Loaded) -> dict[str, float]:
    """Read a loader as fast as it goes, and wait for each batch.

    Returns:
        Images per second; median and 99th percentile of the milliseconds between batches; CPU and GPU figures.
    """
    watch, gaps, images = Watch(workload), [], 0
    with closing(endless(loaded)) as batches:
        for _ in range(workload.size.warmup):
            next(batches)
        watch.begin()
        before = perf_counter()
        for _ in range(workload.size.batches):
            _, labels = next(batches)
            workload.wait()
            now = perf_counter()
            gaps.append(1e3 * (now - before))
            before, images = now, images + len(labels)
        found = watch.end(images)
    p50, p99 = np.percentile(gaps, [50, 99]).tolist()
    return {**found, "p50_ms": p50, "p99_ms": p99}


def sweep(workload: DecodeWorkload) -> dict[str, Any]:
    """Every share of the hardware decoder with every number of threads, and the peers."""
    size, device_id = workload.size, 0 if workload.device == "cuda" else None
    common = {"batch_size": size.batch_size}

    def ours(load: float, threads: int) -> dict[str, float]:
        loaded = peers.ours(
            workload.folder, device=workload.dali_device, num_threads=threads, hw_decoder_load=load, **common
        )
        try:
            return read(workload, loaded)
        finally:
            loaded.loader.close()

    grid = [(load, threads) for threads in size.threads for load in size.loads]
    random.Random(0).shuffle(grid)  # what warms up or throttles is no part of the curve
    rows = [{"hw_decoder_load": load, "num_threads": threads, **ours(load, threads)} for load, threads in grid]
    rows.sort(key=lambda row: (row["num_threads"], row["hw_decoder_load"]))
    usual = min(size.threads, key=lambda threads: abs(threads - USUAL_THREADS))
    result: dict[str, Any] = {"rows": rows, "peers": {}, "threads_of_peers": usual}

    # ours and NVIDIA's in turn, the median of the rounds' ratios
    pairs = []
    for _ in range(size.rounds):
        theirs = read(workload, peers.nvidia(workload.folder, num_threads=usual, device_id=device_id, **common))
        pairs.append((ours(peers.HW_DECODER_LOAD, usual), theirs))
    mine, theirs = (
        {name: statistics.median(pair[at][name] for pair in pairs) for name in pairs[0][at]} for at in (0, 1)
    )
    result["peers"] = {"DALIDataModule": mine, "NVIDIA DALIClassificationIterator": theirs}
    result["of_nvidia"] = statistics.median(pair[0]["images_s"] / pair[1]["images_s"] for pair in pairs)
    try:
        name, decode = peers.cuda_decoder()
        batches = peers.DecodedByTorch(workload.folder, size.batch_size, decode, workload.device)
        result["peers"][f"{name} decode_jpeg"] = read(workload, Loaded(batches, peers.as_it_is, len(batches)))
    except Skip as reason:
        result["left_out"] = {"torchcodec or torchvision": str(reason)}
    except (RuntimeError, TypeError, ValueError) as error:  # their decoders are young
        result["left_out"] = {name: f"{type(error).__name__}: {error}"}
    return result


# ---- the section ----


def dali(*, quick: bool = False, device: str = "cuda", trial: bool = False) -> dict[str, Any]:
    """All figures.

    Args:
        quick: fewer cells and rounds.
        device: ``"cuda"``, or ``"cpu"`` with `trial`.
        trial: next to no images: tries the benchmark out.

    Raises:
        Skip: there is no GPU, or DALI is not installed.
    """
    peers.need_dali()
    if device == "cuda" and not torch.cuda.is_available():
        raise Skip("there is no CUDA GPU, or torch is built without CUDA")
    with tempfile.TemporaryDirectory() as work, quiet():
        workload = make_data(Path(work), device, TRIAL if trial else QUICK if quick else FULL)
        result: dict[str, Any] = {"dali": load_dali().version, "sweep": sweep(workload), "training": training(workload)}
    rows = result["training"]["rows"]
    of_nvidia = result["sweep"]["of_nvidia"]
    result["checks"] = {
        f"images/s at least {OF_NVIDIA_TARGET} of NVIDIA's iterator: {of_nvidia:.3f}": of_nvidia >= OF_NVIDIA_TARGET,
        **{
            f"training with {name} at least {OF_SYNTHETIC_TARGET} of synthetic: {rows[name]['of_synthetic']:.3f}": (
                rows[name]["of_synthetic"] >= OF_SYNTHETIC_TARGET
            )
            for name in (FOLDER, LMDB)
        },
    }
    print(render(result), flush=True)
    return result


def render(result: dict[str, Any]) -> str:
    """The tables."""
    figures = ("images_s", "p50_ms", "p99_ms", "images_s_per_core", "cores", "nvjpg_utilization", "utilization")
    shown = ("images/s", "p50, ms", "p99, ms", "images/s per core", "cores", "NVJPG, %", "GPU, %")
    swept = result["sweep"]
    text = ["| hw_decoder_load | threads | " + " | ".join(shown) + " |", "|---:" * (2 + len(shown)) + "|"]
    text += [f"| {row['hw_decoder_load']:g} | {row['num_threads']} | {cells(row, figures)} |" for row in swept["rows"]]
    text += [
        f"| {name} | {swept['threads_of_peers']} | {cells(row, figures)} |" for name, row in swept["peers"].items()
    ]
    text += [f"left out: {name} ({why})" for name, why in swept.get("left_out", {}).items()]
    figures = ("images_s", "of_synthetic", "utilization", "sm_activity", "cores", "nvjpg_utilization")
    trained = result["training"]
    text += ["", f"{trained['network']}, medians of {trained['rounds']} rounds", ""]
    text += [
        "| data | images/s | of synthetic | GPU, % | SM activity, % | cores | NVJPG, % |",
        "|---" + "|---:" * 6 + "|",
    ]
    text += [f"| {name} | {cells(row, figures)} |" for name, row in trained["rows"].items()]
    return "\n".join(text)


def cells(row: dict[str, float], figures: tuple[str, ...]) -> str:
    """A row's figures; what is missing stays empty."""
    return " | ".join(f"{row[name]:.4g}" if name in row else "" for name in figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial that measures nothing")
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.device == "cpu":
        print("a trial on the CPU: these figures say nothing")
    try:
        result = dali(quick=options.quick, device=options.device, trial=options.device == "cpu")
    except Skip as reason:
        print(f"skipped: {reason}")
        return 0
    for claim, held in result["checks"].items() if options.device == "cuda" else ():
        print(f"{'PASS' if held else 'FAIL'} {claim}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if options.device == "cpu" or all(result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
