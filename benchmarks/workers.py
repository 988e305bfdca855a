"""How good the number of workers is that find_num_workers chooses, beside the best of all and what people use.

For each dataset and step time, a loader is read with 1 to 16 workers by a consumer that sleeps for the step: batches
per second once all workers run. Beside that: what find_num_workers chose and how long it took, Lightning's suggestion,
os.cpu_count, Ultralytics' min(CPUs, batch, 8), and 4. The datasets are those that the rules of the search were made
with, and others that they have never seen (``benchmarks/workers_cases.py``); some cases are read by two processes at
the same time, as by two ranks of a node.

Everything is scored from one measurement: rounds in each of which all numbers of workers have their turn, in an order
of chance. A choice's share is its throughput over that of the best number, in each round, where the best number is the
best of the *other* rounds: the best of many measurements is in part the luckiest. Given are the median share and its
range. The size of a choice is over the smallest number that reaches 95 % of the best.

    python benchmarks/workers.py [--datasets io jpeg ...] [--steps 0 5 50] [--rounds N] [--output FILE]

``cold`` needs root, to drop the page cache; without it that dataset is left out. Exit code 1 where fewer than 95 % of
the choices reach 95 % of the best, or a search takes longer than it may.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.find import find_num_workers

sys.path.insert(0, str(Path(__file__).parent))
from workers_cases import FITTED, HELD_OUT, MEMORY_MOST, datasets, drop_caches

BATCH = 16
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
ENOUGH = 0.95
STEPS_MS = (0, 5, 50)
TWO_RANKS = (("io", 5), ("cpu", 0), ("lmdb", 5))
MAX_SECONDS = 10.0
TURN_S = 0.7
USUAL_PREFETCH = 2
Candidate = tuple[int, int]
"""num_workers and prefetch_factor"""


def rate(dataset: Dataset[Any], candidate: Candidate, step_s: float) -> float:
    """Batches per second with so many workers, after the first of each."""
    workers, prefetch = candidate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(
            DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True, prefetch_factor=prefetch)
        )
    for _ in range(workers):
        next(iterator)
    began = now = time.perf_counter()
    count = 0
    while now - began < TURN_S or count < 2 * workers:
        for _ in range(workers):
            if step_s:
                time.sleep(step_s)
            next(iterator)
            count += 1
        now = time.perf_counter()
    return count / (now - began)


def search(dataset: Dataset[Any], step_s: float, ranks: int) -> dict[str, Any]:
    """What find_num_workers chooses, and how long it takes."""
    began = time.perf_counter()
    found = find_num_workers(
        DataLoader(dataset, BATCH, shuffle=True), step_s, max_seconds=MAX_SECONDS, local_world_size=ranks
    )
    return {
        "chosen": (found.num_workers, found.prefetch_factor or USUAL_PREFETCH),
        "limited_by": found.limited_by,
        "trials": [(each.num_workers, each.batches_per_s) for each in found.trials],
        "search_s": time.perf_counter() - began,
    }


class Ranks:
    """Does the same in one process, or in two at the same time, as the ranks of a node would."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, work: Any, *arguments: Any) -> list[Any]:
        if self.count == 1:
            return [work(*arguments)]
        context = multiprocessing.get_context("fork")
        barrier, results = context.Barrier(self.count), context.SimpleQueue()

        def run() -> None:
            barrier.wait()
            results.put(work(*arguments))

        processes = [context.Process(target=run) for _ in range(self.count)]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
        return found


def peers(ranks: int) -> dict[str, int]:
    cpus = len(os.sched_getaffinity(0))
    return {
        "lightning": max(cpus // ranks - 1, 1),
        "cpu_count": os.cpu_count() or 1,
        "ultralytics": min(max(cpus // ranks, 1), BATCH, 8),
        "four": 4,
    }


def compare(dataset: Dataset[Any], step_s: float, most: int, rounds: int, ranks: int, cold: bool) -> dict[str, Any]:
    """All numbers, ours and the peers', for one dataset and step."""
    before = drop_caches if cold else lambda: None
    together = Ranks(ranks)
    before()
    searches = together(search, dataset, step_s, ranks)
    # as NumWorkersFinder does: the ranks of a node take the largest that one of them needs
    ours = max(searches, key=lambda each: each["chosen"])
    chosen: Candidate = ours["chosen"]
    numbers = {name: (min(count, most), USUAL_PREFETCH) for name, count in peers(ranks).items()}
    wanted = {(count, USUAL_PREFETCH) for count in COUNTS if count <= most} | {chosen, *numbers.values()}
    if chosen[1] != USUAL_PREFETCH:  # what it prepares ahead may help every number
        wanted |= {(count, chosen[1]) for count, _ in wanted}
    seen: dict[Candidate, list[float]] = {candidate: [] for candidate in sorted(wanted)}
    chance = random.Random(0)
    for _ in range(rounds):
        for candidate in chance.sample(list(seen), len(seen)):
            before()
            seen[candidate].append(sum(together(rate, dataset, candidate, step_s)))
    medians = {candidate: statistics.median(rates) for candidate, rates in seen.items()}
    best = max(medians, key=lambda candidate: medians[candidate])
    smallest = min(count for (count, _), median in medians.items() if median >= ENOUGH * medians[best])
    return {
        "ranks": ranks,
        "rates": [(*candidate, *rates) for candidate, rates in seen.items()],
        "best": medians[best],
        "best_num_workers": best[0],
        "smallest": smallest,
        "score": {
            name: {
                "num_workers": candidate[0],
                "share": statistics.median(shares := shares_of(candidate, seen)),
                "share_range": (min(shares), max(shares)),
                "size": candidate[0] / smallest,
            }
            for name, candidate in {"ours": chosen, **numbers}.items()
        },
        **ours,
        "search_s": max(each["search_s"] for each in searches),
    }


def shares_of(candidate: Candidate, seen: dict[Candidate, list[float]]) -> list[float]:
    """In each round the throughput over that of what is best in the other rounds."""
    shares = []
    for number, rate_now in enumerate(seen[candidate]):
        others = {
            each: statistics.median(rates[:number] + rates[number + 1 :] or rates) for each, rates in seen.items()
        }
        best = max(others, key=lambda each: others[each])
        shares.append(rate_now / seen[best][number])
    return shares


def show(name: str, step_ms: int, found: dict[str, Any]) -> None:
    ours = found["score"]["ours"]
    trials = " ".join(f"{count}:{value:.0f}" for count, value in found["trials"])
    others = "  ".join(
        f"{peer} {each['num_workers']}: {each['share']:.0%}" for peer, each in found["score"].items() if peer != "ours"
    )
    ranks = "" if found["ranks"] == 1 else f" x {found['ranks']} ranks"
    low, high = ours["share_range"]
    print(
        f"{name + ranks:16} {step_ms:3} ms  best {found['best']:7.1f}/s with {found['best_num_workers']:2}, "
        f"{found['smallest']:2} do  "
        f"ours {ours['num_workers']:2} ({found['limited_by']}): {ours['share']:4.0%} ({low:.0%}-{high:.0%}), "
        f"{ours['size']:.2f}x, {found['search_s']:.1f} s [{trials}]  {others}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+")
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS_MS), help="step times in milliseconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-ranks", action="store_true", help="without the cases of two ranks")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {
        "cpus": usable_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }
    print(json.dumps(machine))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = datasets(Path(folder))
        names = options.datasets or [name for name in (*FITTED, *HELD_OUT) if name in made]
        if unknown := [name for name in names if name not in made]:
            parser.error(f"--datasets: expected some of {', '.join(made)}, got {', '.join(unknown)}")
        for name in names:
            dataset = made[name]()
            most = MEMORY_MOST if name == "memory" else max(COUNTS)
            cases = [(step_ms, 1) for step_ms in options.steps]
            cases += [(step_ms, 2) for each, step_ms in TWO_RANKS if each == name and not options.no_ranks]
            for step_ms, ranks in cases:
                found = compare(dataset, step_ms / 1e3, most, options.rounds, ranks, cold=name == "cold")
                show(name, step_ms, found)
                results[f"{name}/{step_ms}" + ("" if ranks == 1 else f"/{ranks} ranks")] = found
                held_out = {case: each for case, each in results.items() if case.split("/")[0] in HELD_OUT}
                groups = {"all": results, "held_out": held_out}
                summary = {key: summarise(group) for key, group in groups.items() if group}
                if options.output is not None:
                    text = {"machine": machine, "rounds": options.rounds, "summary": summary, "cases": results}
                    options.output.write_text(json.dumps(text, indent=1) + "\n")
    print(json.dumps(summary))
    found = summary["all"]
    return 0 if found["at_least_95_percent"] >= ENOUGH and found["search_s_max"] <= MAX_SECONDS else 1


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Of some cases, for ours and each peer: the share of choices that are good, and that are not too large."""
    ours = [found["score"]["ours"] for found in results.values()]
    searches = [found["search_s"] for found in results.values()]
    return {
        "cases": len(results),
        "at_least_95_percent": sum(each["share"] >= ENOUGH for each in ours) / len(ours),
        "at_most_1.5x": sum(each["size"] <= 1.5 for each in ours) / len(ours),
        "mean_share": statistics.fmean(each["share"] for each in ours),
        "peers_mean_share": {
            peer: statistics.fmean(found["score"][peer]["share"] for found in results.values()) for peer in peers(1)
        },
        "search_s_median": statistics.median(searches),
        "search_s_max": max(searches),
    }


if __name__ == "__main__":
    sys.exit(main())
