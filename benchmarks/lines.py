"""What it costs to sample a thread for its lines, and how often the line that takes the time is named first.

The cost: one thread does the same work again and again, in Python, in torch, deep in a stack, with a transform in
``nn.Sequential``; stretches with a sampler take turns with stretches without one, in changing order. The median of the
ratios of neighbours counts; a sampler that is off does not exist, and costs nothing.

The lines: the runs of ``evaluation/lines.py``, each in the training process and in a worker.

    python benchmarks/lines.py [--rounds N] [--seconds S] [--output FILE] [--skip-lines]

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from evaluation import lines  # noqa: E402
from lightning_gpuopt.timeline.stacks import StackSampler  # noqa: E402

COST_TARGET_PERCENT = 2.0
NAMED_TARGET_PERCENT = 95.0

_SMALL, _LARGE = torch.randn(8, 8), torch.randn(300, 300)


def in_python() -> None:
    sum(number * number for number in range(2_000))


def in_small_operations() -> None:
    for _ in range(50):
        _SMALL @ _SMALL


def in_large_operations() -> None:
    _LARGE @ _LARGE


def deep(depth: int = 60) -> None:
    if depth:
        deep(depth - 1)
    else:
        in_python()


_MODULES = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(30)))


def in_modules() -> None:
    _MODULES(_SMALL)


WORK: dict[str, Callable[[], None]] = {
    "Python": in_python,
    "small operations of torch": in_small_operations,
    "large operations of torch": in_large_operations,
    "Python, 60 calls deep": deep,
    "modules in nn.Sequential": in_modules,
}


def pace(work: Callable[[], None], seconds: float, *, sampled: bool) -> float:
    """Rounds of the work per second."""
    sampler = StackSampler(threading.get_ident(), lambda: "work")
    if sampled:
        sampler.start()
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        work()
        rounds += 1
    took = time.perf_counter() - began
    sampler.stop()
    return rounds / took


def cost_percent(work: Callable[[], None], rounds: int, seconds: float) -> tuple[float, float, float]:
    """Median of what sampling takes of the pace, and its quartiles."""
    costs = []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        paces = {sampled: pace(work, seconds, sampled=sampled) for sampled in order}
        costs.append((1 - paces[True] / paces[False]) * 100)
    low, mid, high = statistics.quantiles(costs, n=4)
    return low, mid, high


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--skip-lines", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}"
    machine += f", torch {torch.__version__}"
    print(machine)
    found: dict[str, object] = {"machine": machine, "cost_percent": {}, "named": {}}
    passed = True
    costs: dict[str, object] = {}
    for name, work in WORK.items():
        low, mid, high = cost_percent(work, options.rounds, options.seconds)
        costs[name] = {"median": round(mid, 2), "quartiles": [round(low, 2), round(high, 2)]}
        fine = mid <= COST_TARGET_PERCENT
        passed &= fine
        print(f"sampled {name}: {mid:+.2f} % ({low:+.2f} to {high:+.2f}) {'' if fine else 'MISSED'}")
    found["cost_percent"] = costs
    if not options.skip_lines:
        right = {}
        for line in lines.LINES:
            with tempfile.TemporaryDirectory() as folder:
                where = lines.named(line, lines.run(line, Path(folder)))
            right[line.name] = {"right": lines.is_right(line, where), "where": where}
        share = 100 * sum(bool(each["right"]) for each in right.values()) / len(right)
        passed &= share >= NAMED_TARGET_PERCENT
        print(f"named first: {share:.0f} % of {len(right)} lines")
        found["named"] = {"percent": round(share, 1), "lines": right}
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
