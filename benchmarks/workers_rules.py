"""Which rules of the search for a number of workers earn their place, on cases that none of them was fitted to.

Each case is a loader and its consumer drawn at random from a fixed seed: what a batch costs in wall and CPU time, how
uneven that is, what taking it costs, the step, the CPUs, what the workers share (a disk, a lock), how much more workers
than CPUs disturb one another, and how a trial scatters: a few per cent always, and now and then far more, as beside
other people's jobs. The search sees what trials would have seen; its choice is scored by what the case gives in truth:
its share of the best of 1 to 16 workers, and its size over the smallest number that reaches 95 % of the best.

Then the same cases with one rule of ``tuning/search.py`` left out at a time. A rule stays if without it more choices
are bad or too large.

    python benchmarks/workers_rules.py [--cases N] [--seed S] [--output FILE]

Numbers only: no process is started, and the result is the same on every machine. Exit code 1 where fewer than 95 % of
the choices reach 95 % of the best.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpuopt.tuning.search import Search
from lightning_gpuopt.tuning.search_result import Measured, Trial
from lightning_gpuopt.tuning.worker_limits import Cap

MOST = 16
CAP = Cap(MOST, "max_num_workers")
ENOUGH = 0.95
TOO_LARGE = 1.5


@dataclass(frozen=True)
class Case:
    """A loader and its consumer; seconds per batch."""

    wall_s: float
    cpu_s: float
    unevenness: float
    step_s: float
    receive_s: float
    own_cpu_s: float
    cpus: float
    shared_per_s: float
    crowding: float
    scatter: float
    disturbed: float

    def rate(self, count: int) -> float:
        """Batches per second, in truth."""
        crowd = 1 + self.crowding * max(count - self.cpus, 0.0) / self.cpus * (self.cpu_s / self.wall_s)
        # slow batches hold up those behind them, less so where more are prepared ahead
        late = 1 + self.unevenness / (1 + count)
        limits = (
            count / (self.wall_s * crowd * late),
            self.cpus / (self.cpu_s + self.own_cpu_s) / crowd,
            1 / (self.step_s + self.receive_s),
            self.shared_per_s,
        )
        # Near a knee both limits are felt.
        return sum(limit**-8.0 for limit in limits) ** (-1 / 8)

    def trial(self, count: int, chance: random.Random) -> Measured:
        """What a trial of a second would see."""
        rate = self.rate(count) * (1 + chance.gauss(0, self.scatter))
        if chance.random() < self.disturbed:
            rate *= chance.uniform(0.6, 0.95)
        busy_s = min(max(self.wall_s, count * (self.cpu_s + self.own_cpu_s) / self.cpus), count / rate)
        if rate >= 0.9 * self.shared_per_s:
            busy_s = count / rate
        own_s = min(self.step_s + self.receive_s, 1 / rate)
        return Measured(
            Trial(count, rate, max(1 / rate - self.step_s, 0.0)),
            service_s=busy_s * (1 + chance.gauss(0, self.scatter)),
            cpu_s=min(self.cpu_s, busy_s),
            consumer_s=own_s,
            consumer_cpu_s=self.own_cpu_s,
            unevenness=self.unevenness * chance.uniform(0.7, 1.3),
        )


def draw(chance: random.Random) -> Case:
    """A case."""
    wall_s = 10 ** chance.uniform(-3.3, -0.5)
    cpus = chance.choice([1.0, 2.0, 4.0, 8.0])
    receive_s = 10 ** chance.uniform(-3.5, -2.5)
    return Case(
        wall_s=wall_s,
        cpu_s=wall_s * chance.choice([0.02, 0.1, 0.3, 0.6, 1.0]),
        unevenness=chance.choice([0.0, 0.0, 0.02, 0.1, 0.5, 1.5]),
        step_s=chance.choice([0.0, 10 ** chance.uniform(-2.5, -0.8)]),
        receive_s=receive_s,
        own_cpu_s=receive_s * chance.uniform(0.3, 1.0),
        cpus=cpus,
        shared_per_s=chance.choice([1e9, 1e9, chance.uniform(1, 12) / wall_s]),
        crowding=chance.choice([0.0, 0.05, 0.2]),
        scatter=chance.choice([0.005, 0.015, 0.03]),
        disturbed=chance.choice([0.0, 0.1, 0.25]),
    )


def without(*names: str) -> type[Search]:
    """The search with some of its methods answering None, or nothing."""
    members: dict[str, Any] = {name: (lambda self, cap: None) for name in names}
    return type(f"Without{''.join(names)}", (Search,), members)


def score(make: Callable[[float], Search], cases: list[Case], seed: int) -> dict[str, float]:
    """Shares of good and of lean choices, and the trials they took."""
    good, lean, trials, shares = 0, 0, [], []
    for number, case in enumerate(cases):
        chance = random.Random(f"{seed}/{number}")
        search = make(case.cpus)
        while (count := search.next_count(CAP)) is not None:
            search.seen.append(case.trial(count, chance))
        choice = search.choose(CAP).num_workers
        rates = {count: case.rate(count) for count in range(1, MOST + 1)}
        best = max(rates.values())
        smallest = min(count for count, rate in rates.items() if rate >= ENOUGH * best)
        share = rates[choice] / best
        shares.append(share)
        good += share >= ENOUGH
        lean += choice <= math.ceil(TOO_LARGE * smallest)
        trials.append(len(search.seen))
    return {
        "at_least_95_percent": good / len(cases),
        "at_most_1.5x": lean / len(cases),
        "worst_percentile": statistics.quantiles(shares, n=100)[0],
        "trials": statistics.fmean(trials),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    cases = [draw(chance) for _ in range(options.cases)]
    rules = {name: without(name) for name in ("_more", "_fewer", "_again")}
    results = {}
    for name, kind in {"all rules": Search, **{f"without {name}": kind for name, kind in rules.items()}}.items():
        results[name] = found = score(kind, cases, options.seed)
        print(
            f"{name:18} 95 % of the best: {found['at_least_95_percent']:6.1%}   at most 1.5x: "
            f"{found['at_most_1.5x']:6.1%}   worst of 100: {found['worst_percentile']:.0%}   "
            f"trials {found['trials']:.1f}",
            flush=True,
        )
    if options.output is not None:
        summary = {"cases": options.cases, "seed": options.seed, "most_workers": MOST}
        options.output.write_text(json.dumps({"summary": summary, "rules": results}, indent=1) + "\n")
    return 0 if results["all rules"]["at_least_95_percent"] >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
