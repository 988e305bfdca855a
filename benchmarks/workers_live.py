"""How well NumWorkersFinder does while training runs, and what it costs once it has settled.

A network of next to nothing trains with a step that sleeps, on samples that wait (``io``), or wait and compute
(``mixed``), from a loader with one worker and from one with none. Beside it, the same training with a fixed number of
workers from the start: each of 1, 2, 4, 8 and 16, the best of which is the best step time. The steps after the 60th
count; the rounds take turns. The order of the samples is compared by a hash of all their numbers, and no sample may
come twice in an epoch.

The cost of a settled finder is that of its hook and of its two places in the iterator, timed by themselves.

    python benchmarks/workers_live.py [--rounds N] [--output FILE]

Exit code 1 if an order differs, a sample comes twice, the mean step is more than 10 % over the best, or a settled
finder costs more than 5 µs a step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import NumWorkersFinder
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.running import RunningLoader
from lightning_gpuopt.tuning.running_search import LivePolicy

BATCH = 16
SETTLED_BY = 60
STEPS = 180
FIXED = (1, 2, 4, 8, 16)
BEGINS = (0, 1)
CASES = (("io", 5), ("io", 10), ("io", 50), ("mixed", 10), ("mixed", 20))
MAX_US = 5.0
NEAR = 1.1
CALLS = 100_000


class Samples(Dataset[torch.Tensor]):
    """Numbers that take 2 ms of waiting each, and half a millisecond of computing where asked for."""

    def __init__(self, kind: str, length: int) -> None:
        self.compute_s = 0.0005 if kind == "mixed" else 0.0
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        until = time.thread_time() + self.compute_s
        while time.thread_time() < until:
            pass
        return torch.tensor([float(index)])


class Sleeper(LightningModule):
    """Notes which samples come, and when a step ends."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.step_s = step_s
        self.seen: list[int] = []
        self.ends_s: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """One step on ``[B,1]``."""
        self.seen += batch[:, 0].int().tolist()
        time.sleep(self.step_s)
        self.ends_s.append(time.perf_counter())
        return self.layer(batch * 0).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(kind: str, step_s: float, workers: int, callbacks: list[Callback], folder: str) -> Sleeper:
    seed_everything(7, verbose=False)
    model = Sleeper(step_s)
    loader = DataLoader(Samples(kind, BATCH * (STEPS + 20)), BATCH, shuffle=True, num_workers=workers)
    Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    ).fit(model, loader)
    return model


def step_ms(model: Sleeper) -> float:
    """The mean step after the 60th, in milliseconds."""
    return (model.ends_s[-1] - model.ends_s[SETTLED_BY - 1]) / (len(model.ends_s) - SETTLED_BY) * 1e3


def order(model: Sleeper) -> str:
    return hashlib.sha256(json.dumps(model.seen).encode()).hexdigest()[:16]


def compare(kind: str, step: int, rounds: int, folder: str) -> dict[str, Any]:
    times: dict[int, list[float]] = {}
    live: dict[int, list[float]] = {}
    orders: set[str] = set()
    numbers: dict[int, list[int | None]] = {}
    twice = 0
    for _ in range(rounds):
        for workers, finds in [*((fixed, False) for fixed in FIXED), *((begins, True) for begins in BEGINS)]:
            finder = NumWorkersFinder()
            model = train(kind, step / 1e3, workers, [finder] if finds else [], folder)
            (live if finds else times).setdefault(workers, []).append(step_ms(model))
            orders.add(order(model))
            twice += len(model.seen) - len(set(model.seen))
            if finds:
                numbers.setdefault(workers, []).append(finder.optimal_num_workers)
    medians = {workers: statistics.median(each) for workers, each in times.items()}
    best = min(medians, key=lambda workers: medians[workers])
    return {
        "one_worker_ms": medians[1],
        "best_ms": medians[best],
        "best_num_workers": best,
        "live": {
            f"from {begins}": {
                "ms": (live_ms := statistics.median(live[begins])),
                "over_best": live_ms / medians[best],
                "rounds_ms": live[begins],
                "num_workers": numbers[begins],
            }
            for begins in BEGINS
        },
        "orders": len(orders),
        "samples_twice": twice,
    }


class Hook(Callback):
    """Times another callback's hook at the last step."""

    def __init__(self, finder: NumWorkersFinder) -> None:
        self.finder = finder
        self.us = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call it many times."""
        if batch_idx == STEPS - 1:

            def call() -> None:
                self.finder.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

            self.us = per_call_us(call) - per_call_us(lambda: None)


def per_call_us(call: Callable[[], object]) -> float:
    rounds = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
    return min(rounds)


def settled_us(folder: str) -> dict[str, float]:
    """Microseconds a step of the hook, and in the iterator; when nothing is being tried."""
    finder = NumWorkersFinder()
    hook = Hook(finder)
    train("io", 0.05, 1, [finder, hook], folder)

    def fetch(wrapped: bool) -> float:
        loader = DataLoader(range(10 * CALLS), batch_size=None)  # type: ignore[arg-type]
        running = RunningLoader(loader, LivePolicy(0, cpus=1.0))
        running.freeze()
        iterator: Any = running.iterator_wanted()(lambda make: make()) if wrapped else iter(loader)
        next(iterator)
        if wrapped:
            running.follow(iterator)
        return per_call_us(lambda: next(iterator))

    return {"hook_us": hook.us, "fetch_us": max(fetch(True) - fetch(False), 0.0)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    machine = {
        "cpus": usable_cpus(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }
    print(json.dumps(machine))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, step in CASES:
            found = results[f"{kind}/{step}"] = compare(kind, step, options.rounds, folder)
            live = "  ".join(
                f"live {begins} {each['ms']:5.1f} ms ({each['over_best']:.2f}x) with {each['num_workers']}"
                for begins, each in found["live"].items()
            )
            print(
                f"{kind:6} {step:3} ms  1 worker {found['one_worker_ms']:5.1f} ms  "
                f"best {found['best_ms']:5.1f} ms with {found['best_num_workers']:2}  {live}  "
                f"orders {found['orders']}, samples twice {found['samples_twice']}",
                flush=True,
            )
        settled = settled_us(folder)
    print(
        "settled: " + ", ".join(f"{name.removesuffix('_us')} {us:.2f} µs" for name, us in settled.items()) + " a step"
    )
    if options.output is not None:
        text = json.dumps({"machine": machine, "cases": results, "settled": settled}, indent=1)
        options.output.write_text(text + "\n")
    right = all(
        found["orders"] == 1
        and not found["samples_twice"]
        and all(each["over_best"] <= NEAR for each in found["live"].values())
        for found in results.values()
    )
    return 0 if right and sum(settled.values()) <= MAX_US else 1


if __name__ == "__main__":
    sys.exit(main())
