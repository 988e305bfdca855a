"""What each part costs at 1,000 ranks, 100 TB and a billion samples: measured on one machine where that can be done.

- ``order``: a shuffled epoch of so many samples on one of so many ranks: time to its first batch, time for each index,
  memory; in its middle after a resume; with ``shuffle_window``; beside it ``torch.randperm``. That all ranks' batches
  of one step hold no sample twice is counted.
- ``gather``: windows of all ranks through a real key-value store on this machine. Rank 0 is the package's own code;
  what the others do, one ``set`` each, comes from another process.
- ``report``: the straggler among so many ranks, and the files of the report; the monitor's figures of so many GPUs.
- ``manifest``: a dataset's manifest by its number of shards, and a dataset of as many shards as a build makes at most,
  opened and read.
- ``build``: how a build divides the work, by its own plan. This is arithmetic, as is ``sizes``.

    python benchmarks/scale.py [--tiny] [--output FILE]

Writes ``benchmarks/results/scale-cpu.json``; ``--tiny`` is a trial of a few seconds, and writes nothing without
``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from gpu_parts import ROOT
from overhead import machine

from lightning_gpuopt import LMDBDataset, LMDBWriter
from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import BatchIndices, ElasticSampler
from lightning_gpuopt.measurements.ranks import RankWork
from lightning_gpuopt.storage.format import Manifest, Shard, table_bytes
from lightning_gpuopt.storage.writing.plan import plan_shards
from lightning_gpuopt.telemetry.keys import select_metrics
from lightning_gpuopt.telemetry.window import DeviceWindow, Fleet, RankWindow, Stat
from lightning_gpuopt.utils import rank_channel
from tests.diagnosis.numbers import measurement, times

BATCH_SIZE = 256
SEED = 0
GPUS_PER_NODE = 8
ROUNDS = 5
SLOW_RANK_S = 0.05


@dataclass(frozen=True)
class Size:
    """How much.

    Attributes:
        samples: in the dataset.
        num_bytes: of the dataset.
        ranks: processes, one GPU each.
        window: samples of ``shuffle_window``.
        batches: whose indices are timed.
        randperm: numbers that ``torch.randperm`` draws.
        gathered: windows.
        shards: numbers of shards whose manifest is measured.
        samples_per_shard: of the dataset that is opened.
    """

    samples: int = 10**9
    num_bytes: int = 100 * 10**12
    ranks: int = 1000
    window: int = 10**6
    batches: int = 640
    randperm: int = 10**7
    gathered: int = 10
    shards: tuple[int, ...] = (256, 10_000)
    samples_per_shard: int = 64


FULL = Size()
TINY = Size(10**6, 10**11, 40, 10**4, 64, 10**5, 2, (16,), 4)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came."""
    begin = time.perf_counter()
    result = function()
    return time.perf_counter() - begin, result


# ---- the order of the samples ----


def sampler(size: Size, rank: int, window: int | None = None) -> ElasticSampler:
    order = Order(size.samples, SEED, window=window)
    return ElasticSampler(order, BATCH_SIZE, rank=rank, world_size=size.ranks)


def first_batch(size: Size, window: int | None = None, resumed: bool = False) -> BatchIndices:
    """Everything that stands between nothing and a rank's first batch."""
    made = sampler(size, size.ranks // 2, window)
    if resumed:
        steps = made.num_batches() // 2
        made.resume(3, steps * BATCH_SIZE * size.ranks, steps)
        assert len(made) > 0
    return next(made.batches())


def per_index_us(size: Size, window: int | None) -> float:
    batches = sampler(size, 1, window).batches()
    next(batches)
    seconds, indices = timed(lambda: sum(len(next(batches)) for _ in range(size.batches)))
    return seconds / indices * 1e6


def peak_mib(function: Callable[[], Any]) -> float:
    """Memory that a call takes at its peak, as Python and numpy allocate it."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def order_section(size: Size) -> dict[str, Any]:
    first_batch(size)  # what the first call of a process loads
    rows = {}
    for name, window in (("shuffled", None), ("shuffle_window", size.window)):
        starts = [timed(lambda window=window: first_batch(size, window))[0] for _ in range(9)]
        resumes = [timed(lambda window=window: first_batch(size, window, resumed=True))[0] for _ in range(9)]
        rows[name] = {
            "first_batch_ms": statistics.median(starts) * 1e3,
            "first_batch_after_resume_ms": statistics.median(resumes) * 1e3,
            "us_per_index": statistics.median(per_index_us(size, window) for _ in range(3)),
            "peak_mib": peak_mib(lambda window=window: first_batch(size, window)),
        }
    seconds, permutation = timed(lambda: torch.randperm(size.randperm))
    one_step = np.concatenate([next(sampler(size, rank).batches()) for rank in range(size.ranks)])
    return {
        "samples": size.samples,
        "ranks": size.ranks,
        "batch_size": BATCH_SIZE,
        "window": size.window,
        **rows,
        "samples_of_one_step": len(one_step),
        "different_samples_of_one_step": len(np.unique(one_step)),
        "torch_randperm": {
            "numbers": size.randperm,
            "seconds": seconds,
            "mib": permutation.nbytes / 2**20,
            "mib_at_all_samples_by_arithmetic": 8 * size.samples / 2**20,
        },
    }


# ---- windows of all ranks ----

_OTHERS = """
import json, sys, time
import torch.distributed as dist
port, ranks, windows, prefix, payload = sys.argv[1:]
store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", int(port), is_master=False))
begin = time.perf_counter()
for window in range(int(windows)):
    for rank in range(1, int(ranks)):
        store.set(f"{window}/{rank}", payload)
print(json.dumps({"set_us": (time.perf_counter() - begin) / (int(windows) * (int(ranks) - 1)) * 1e6}))
"""


def device_window(rank: int) -> RankWindow:
    """What one rank's monitor sends: its GPU, with the default metrics."""
    readings = {metric.reading for metric in select_metrics("default")}
    stats = {reading: Stat(4321.98 + rank, 50.12, 12.5, 99.75) for reading in sorted(readings)}
    uuid = f"GPU-{rank:08d}-aaaa-bbbb-cccc-dddddddddddd"
    node, local_rank = divmod(rank, GPUS_PER_NODE)
    return RankWindow(node, (DeviceWindow(uuid, local_rank, None, local_rank, stats),))


def gathered(size: Size, name: str, payload: Any) -> dict[str, Any]:
    """Windows of one kind from all ranks to rank 0, all of them waiting at its door at once."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    text, prefix = json.dumps(payload), f"scale/{name}"
    command = [sys.executable, "-c", _OTHERS, str(server.port), str(size.ranks), str(size.gathered), prefix, text]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, rank_channel.open_store = rank_channel.open_store, lambda name: dist.PrefixStore(prefix, server)
    windows: list[rank_channel.Gathered] = []
    try:
        gather = rank_channel.RankGather(name, 0, size.ranks, windows.append)
    finally:
        rank_channel.open_store = kept
    threads = {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}
    assert gather._thread is not None
    native = gather._thread.native_id
    begin = time.perf_counter()
    for window in range(size.gathered):
        gather.post(window, payload)
    while len(windows) < size.gathered:
        time.sleep(0.001)
    seconds = time.perf_counter() - begin
    cpu = {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}
    gather.close()
    assert all(len(each.by_rank) == size.ranks for each in windows)
    store = dist.PrefixStore(prefix, server)
    poll_s, _ = timed(lambda: [store.check([f"later/{rank}"]) for rank in range(1, size.ranks)])
    return {
        "bytes_per_rank": len(text),
        "kib_per_window": len(text) * size.ranks / 1024,
        "set_us_on_a_rank": json.loads(done.stdout)["set_us"],
        "rank_0_ms_per_window": seconds / size.gathered * 1e3,
        "rank_0_poll_ms_while_all_are_missing": poll_s * 1e3,
        "rank_0_thread_cpu_ms_per_window": (cpu[native] - threads.get(native, 0.0)) / size.gathered * 1e3,
    }


def gather_section(size: Size) -> dict[str, Any]:
    work = RankWork(999, 0.0123456789, 0.0345678901, 0.0456789012, 0.0567890123, 0.0012345678, 0.0)
    return {
        "ranks": size.ranks,
        "windows": size.gathered,
        "rounds": ROUNDS,
        "StallDetector": rounds(size, "detector", asdict(work)),
        "GpuUtilMonitor": rounds(size, "monitor", asdict(device_window(size.ranks - 1))),
    }


def rounds(size: Size, name: str, payload: Any) -> dict[str, Any]:
    """The medians of a few rounds, and the longest."""
    made = [gathered(size, f"{name}-{number}", payload) for number in range(ROUNDS)]
    medians = {key: statistics.median(each[key] for each in made) for key in made[0]}
    return medians | {"rank_0_ms_per_window_longest": max(each["rank_0_ms_per_window"] for each in made)}


def report_section(size: Size) -> dict[str, Any]:
    slow = size.ranks * 2 // 3
    works = tuple(
        RankWork(rank, 0.001, 0.02 + (SLOW_RANK_S if rank == slow else 1e-5 * (rank % 7))) for rank in range(size.ranks)
    )
    found = measurement(times(forward=2.0, backward=6.0, other=0.1), ranks=works)
    seconds, findings = timed(lambda: diagnose(found, 0.1))
    (straggler,) = [each for each in findings if each.cause == "straggler"]
    measured = found.times
    report = StallReport(straggler.cause, measured.wall_s, dict(measured.phases), findings, steps=measured.steps)
    fleet = Fleet(select_metrics("default"), multi_node=True)
    windows = [device_window(rank) for rank in range(size.ranks)]
    fleet_s, figures = timed(lambda: fleet.add(windows))
    return {
        "ranks": size.ranks,
        "diagnosis_ms": seconds * 1e3,
        "straggler_found": straggler.evidence["rank"] == slow,
        "report_json_bytes": len(report.to_json()),
        "monitor_keys_per_window": len(figures),
        "monitor_ms_per_window": fleet_s * 1e3,
    }


# ---- the dataset ----


def a_shard(number: int, samples: int, num_bytes: int) -> Shard:
    return Shard(number, samples, num_bytes, num_bytes, None, None, f"{number:016x}", f"{number:016x}")


def manifest_section(size: Size) -> dict[str, Any]:
    rows = []
    for shards in size.shards:
        made = Manifest(
            tuple(a_shard(number, size.samples // shards, size.num_bytes // shards) for number in range(shards)),
            tuple(f"class-{number:04d}" for number in range(1000)),
        )
        with tempfile.TemporaryDirectory() as folder:
            text = made.to_json()
            Path(folder, "manifest.json").write_text(text)
            loads = [timed(lambda folder=folder: Manifest.load(Path(folder))) for _ in range(ROUNDS)]
        assert all(loaded == made for _, loaded in loads)
        load_s = statistics.median(seconds for seconds, _ in loads)  # one may fall into a garbage collection
        rows.append({"shards": shards, "bytes": len(text), "load_ms": load_s * 1e3})
    return {"classes": 1000, "rows": rows, "opened": opened(size)}


def opened(size: Size) -> dict[str, Any]:
    """A dataset of many small shards: opened, and a sample of each read."""
    shards = min(size.shards)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.lmdb")
        with LMDBWriter(path, samples_per_shard=size.samples_per_shard) as writer:
            for number in range(shards * size.samples_per_shard):
                writer.write(number)
        before_files, before_kib = len(os.listdir("/proc/self/fd")), rss_kib()
        open_s, dataset = timed(lambda: LMDBDataset(path))
        read_s, values = timed(lambda: [dataset[number * size.samples_per_shard] for number in range(shards)])
        assert values == [number * size.samples_per_shard for number in range(shards)]
        return {
            "shards": shards,
            "open_ms": open_s * 1e3,
            "first_read_of_each_shard_ms": read_s / shards * 1e3,
            "open_files": len(os.listdir("/proc/self/fd")) - before_files,
            "rss_kib": rss_kib() - before_kib,
        }


def rss_kib() -> int:
    return int(psutil.Process().memory_info().rss // 1024)


def build_section(size: Size) -> dict[str, Any]:
    """What the build's own plan makes of so much, without building."""
    per_shard = plan_shards(size.samples, size.num_bytes)
    shards = -(-size.samples // per_shard)
    return {
        "arithmetic": True,
        "shards": shards,
        "samples_per_shard": per_shard,
        "gb_per_shard": size.num_bytes / shards / 1e9,
        "parts_that_have_work": min(shards, size.ranks),
        "record_tables_gb": shards * table_bytes(per_shard) / 1e9,
        "record_tables_percent": 100 * shards * table_bytes(per_shard) / size.num_bytes,
    }


def sizes_section(size: Size) -> dict[str, Any]:
    """What an array of one number for each sample would take: weights, targets."""
    return {
        "arithmetic": True,
        "weights_gb": 8 * size.samples / 1e9,
        "steps_per_epoch": -(-size.samples // (BATCH_SIZE * size.ranks)),
        "mb_per_rank_and_step": size.num_bytes / size.samples * BATCH_SIZE / 1e6,
    }


SECTIONS: dict[str, Callable[[Size], dict[str, Any]]] = {
    "order": order_section,
    "gather": gather_section,
    "report": report_section,
    "manifest": manifest_section,
    "build": build_section,
    "sizes": sizes_section,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="What each part costs at scale, measured on this machine.")
    parser.add_argument("--tiny", action="store_true", help="a trial of a few seconds, which measures nothing")
    parser.add_argument("--output", type=Path, help="the result (default: benchmarks/results/scale-cpu.json)")
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    here = {**machine(), "numpy": np.__version__}
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    result: dict[str, Any] = {"tiny": options.tiny, "machine": here, "size": asdict(size)}
    for name, section in SECTIONS.items():
        seconds, result[name] = timed(lambda section=section: section(size))
        print(f"{name} ({seconds:.1f} s)\n{json.dumps(result[name], indent=2)}", flush=True)
    result["max_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    output = options.output or (None if options.tiny else ROOT / "benchmarks" / "results" / "scale-cpu.json")
    if output is not None:
        output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
