"""What a callback costs the training thread, and what importing the package costs.

Every step is measured from one fetch of a batch to the next, by the loader itself, so all set-ups are measured at the
same point and everything that Lightning does for a callback is in it. The model is next to nothing, the logger does
nothing, ``log_every_n_steps=50``. The set-ups take turns, in changing order. Other tenants of a machine disturb whole
rounds, by far more than a callback costs: of each set-up the quietest quarter of its rounds counts, and is compared
with the same of the empty ``Callback()``.

The median step is what nearly every step pays; the mean has the ends of the windows too, where figures are gathered and
logged. Where there is no NVIDIA GPU, GpuUtilMonitor reads the NVML simulator of the tests, so that its thread works.

    python benchmarks/overhead.py [--rounds N] [--steps N] [--output FILE]

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import GpuUtilMonitor, StallDetector
from lightning_gpuopt.timeline.worker_clock import watch_workers

ROOT = Path(__file__).parents[1]

EMPTY = "Callback()"
TARGETS_US = {"GpuUtilMonitor": 15.0, "StallDetector": 30.0}
WINDOW_TARGET_US = 300.0
COLLATE_TARGET_US = 10.0
IMPORT_TARGET_PERCENT = 15.0
IMPORT_ROUNDS = 7
WARMUP_STEPS = 200


class TimedBatches:
    """A loader that hands out one batch ``length`` times and notes when it was asked."""

    def __init__(self, batch: torch.Tensor, length: int) -> None:
        self.batch = batch
        self.length = length
        self.asked_ns: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.length):
            self.asked_ns.append(time.perf_counter_ns())
            yield self.batch

    def steps_us(self) -> list[float]:
        """The steps' durations after the warm-up, in microseconds."""
        asked = self.asked_ns[WARMUP_STEPS:]
        return [(after - before) / 1e3 for before, after in itertools.pairwise(asked)]


class TinyModel(LightningModule):
    """One linear layer, for a step of which most is Lightning's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """One step on ``[B,32]``."""
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class SilentLogger(Logger):
    """Takes everything and keeps nothing; some callbacks refuse to work without a logger."""

    name = "silent"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Forget them."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Forget them."""


def setups() -> dict[str, Callable[[], list[Callback]]]:
    """The callbacks of each set-up, made anew for each run."""
    devices: Any = "auto" if torch.cuda.is_available() else "all"

    def monitor() -> Callback:
        return GpuUtilMonitor(devices=devices)

    def detector() -> Callback:
        return StallDetector(on_stall="ignore")

    return {
        "no callback": lambda: [],
        EMPTY: lambda: [Callback()],
        "GpuUtilMonitor": lambda: [monitor()],
        "StallDetector": lambda: [detector()],
        "both": lambda: [monitor(), detector()],
        "DeviceStatsMonitor": lambda: [DeviceStatsMonitor()],
        "ThroughputMonitor": lambda: [ThroughputMonitor(batch_size_fn=len)],
    }


def run_once(callbacks: list[Callback], steps: int, folder: str) -> list[float]:
    """Train, and return the steps' durations in microseconds."""
    loader = TimedBatches(torch.randn(8, 32), WARMUP_STEPS + steps + 1)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=1,
        callbacks=callbacks,
        logger=SilentLogger(),
        log_every_n_steps=50,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    gc.collect()
    trainer.fit(TinyModel(), loader)
    for callback in callbacks:
        if isinstance(callback, GpuUtilMonitor) and not callback.summary():
            sys.exit("overhead.py: GpuUtilMonitor read nothing, so its cost would not be its cost")
    return loader.steps_us()


def measure_steps(rounds: int, steps: int, folder: str) -> dict[str, dict[str, float]]:
    """Median and mean step of each set-up, and how much they are above the empty callback's."""
    made = setups()
    medians: dict[str, list[float]] = {name: [] for name in made}
    means: dict[str, list[float]] = {name: [] for name in made}
    run_once([], 1, folder)  # what the first Trainer of a process loads
    for number in range(rounds):
        order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        for name in order if number % 2 == 0 else reversed(order):
            durations = run_once(made[name](), steps, folder)
            medians[name].append(statistics.median(durations))
            means[name].append(statistics.fmean(durations))
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    return {name: summarise(medians[name], medians[EMPTY], means[name], means[EMPTY]) for name in made}


def summarise(
    medians: list[float], empty_medians: list[float], means: list[float], empty_means: list[float]
) -> dict[str, float]:
    """A set-up's figures over the rounds, in microseconds."""
    above = [own - empty for own, empty in zip(medians, empty_medians, strict=True)]
    return {
        "median_step_us": quietest(medians),
        "above_empty_us": quietest(medians) - quietest(empty_medians),
        "above_empty_all_rounds_us": statistics.median(above),
        "mean_above_empty_us": quietest(means) - quietest(empty_means),
    }


def quietest(durations: list[float]) -> float:
    """Mean of the quietest quarter of the rounds."""
    return statistics.fmean(sorted(durations)[: max(1, len(durations) // 4)])


def measure_imports() -> dict[str, float]:
    """Milliseconds of an import in a fresh interpreter, medians; the callbacks' after that of Lightning."""
    statements = {
        "import torch": "import torch",
        "import lightning_gpuopt": "import lightning_gpuopt",
        "the two callbacks, after lightning": "from lightning_gpuopt import GpuUtilMonitor, StallDetector",
    }
    taken_ms: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(IMPORT_ROUNDS):
        for name, statement in statements.items():
            before = "import lightning.pytorch; " if "after lightning" in name else ""
            code = f"{before}import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            taken_ms[name].append(float(done.stdout) * 1e3)
    return {name: statistics.median(times) for name, times in taken_ms.items()}


def measure_windows(rounds: int, steps: int, folder: str) -> float:
    """Microseconds by which the step that ends a StallDetector's window is longer than its neighbours."""
    warmup, size = 5, 50
    extra: list[float] = []
    for _ in range(rounds):
        detector = StallDetector(on_stall="ignore", warmup_steps=warmup, window_size=size)
        durations = run_once([detector], steps, folder)
        ends = range((warmup - 1 - WARMUP_STEPS) % size, len(durations), size)
        neighbours = statistics.median(durations)
        extra.append(statistics.median(durations[index] for index in ends) - neighbours)
    return statistics.median(extra)


class Numbers(Dataset[int]):
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> int:
        return index


def measure_collate(rounds: int) -> float:
    """Microseconds that the timing inside a worker adds to a batch, measured in this process."""
    taken_us: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        timed = number % 2 == 1
        loader = DataLoader(Numbers(), batch_size=1, collate_fn=list)
        if timed:
            watch_workers(loader)
        begin = time.perf_counter()
        for _ in loader:
            pass
        taken_us[timed].append((time.perf_counter() - begin) / len(loader) * 1e6)
    return statistics.median(taken_us[True]) - statistics.median(taken_us[False])


def load_nvml(folder: str) -> str:
    """Where there is no NVIDIA GPU, put the tests' NVML simulator in the driver's place; says what is read."""
    if torch.cuda.is_available():
        return f"the NVML of {torch.cuda.get_device_name()}"
    sys.path.insert(0, str(ROOT))
    from tests.nvml_simulator import Gpu, Simulator, build

    library = build(Path(folder))
    if library is None:
        sys.exit("overhead.py: expected an NVIDIA GPU or a C compiler for the NVML simulator, found neither")
    scenario = Path(folder, "scenario.txt")
    os.environ["NVML_SIM_SCENARIO"] = str(scenario)
    Simulator(library, scenario).machine(Gpu())
    return "the NVML simulator (no NVIDIA GPU here), one device"


def machine() -> dict[str, str]:
    """Where this runs."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    packages = {name: version(name) for name in ("torch", "lightning", "lightning-gpuopt")}
    return {"cpu": cpu, "cores": str(os.cpu_count()), **gpu, "python": platform.python_version(), **packages}


def check_targets(
    steps: dict[str, dict[str, float]], window_us: float, collate_us: float, imports: dict[str, float]
) -> list[dict[str, Any]]:
    """Each target with what was measured."""
    targets = [
        {
            "what": f"{name}, median step above {EMPTY}",
            "measured": steps[name]["above_empty_us"],
            "limit": limit,
            "unit": "us",
        }
        for name, limit in TARGETS_US.items()
    ]
    for what, measured, limit in (
        ("StallDetector, the step that ends a window above the others", window_us, WINDOW_TARGET_US),
        ("StallDetector, timing inside a worker, a batch", collate_us, COLLATE_TARGET_US),
    ):
        targets.append({"what": what, "measured": measured, "limit": limit, "unit": "us"})
    share = 100 * imports["import lightning_gpuopt"] / imports["import torch"]
    what = "import lightning_gpuopt, of the time of import torch"
    targets.append({"what": what, "measured": share, "limit": IMPORT_TARGET_PERCENT, "unit": "%"})
    return [{**target, "passed": target["measured"] <= target["limit"]} for target in targets]


def print_result(result: dict[str, Any]) -> None:
    """The tables."""
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"{result['rounds']} rounds of {result['steps_per_run']} steps, the quietest quarter of them, in us")
    print(f"GpuUtilMonitor reads {result['nvml']}")
    print(f"\n{'':<22}{'median step':>12}{'above empty':>13}{'all rounds':>12}{'mean above':>12}")
    columns = ("median_step_us", "above_empty_us", "above_empty_all_rounds_us", "mean_above_empty_us")
    for name, row in result["steps"].items():
        step, above, every, mean = (row[column] for column in columns)
        print(f"{name:<22}{step:12.1f}{above:13.1f}{every:12.1f}{mean:12.1f}")
    print()
    for name, taken_ms in result["imports_ms"].items():
        print(f"{name:<36}{taken_ms:9.1f} ms")
    print()
    for target in result["targets"]:
        word = "PASS" if target["passed"] else "FAIL"
        print(f"{word}  {target['what']}: {target['measured']:.1f} {target['unit']} (at most {target['limit']:g})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=14, help="runs of each set-up")
    parser.add_argument("--steps", type=int, default=2000, help="measured steps of each run")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (default: benchmarks/results/overhead-<device>.json)"
    )
    arguments = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # more gain nothing in a step this small, and take the core of the sampling thread
    with tempfile.TemporaryDirectory() as folder:
        nvml = load_nvml(folder)
        steps = measure_steps(arguments.rounds, arguments.steps, folder)
        window_us = measure_windows(arguments.rounds, arguments.steps, folder)
    collate_us = measure_collate(arguments.rounds)
    imports = measure_imports()
    result: dict[str, Any] = {
        "machine": machine(),
        "nvml": nvml,
        "rounds": arguments.rounds,
        "steps_per_run": arguments.steps,
        "steps": steps,
        "imports_ms": imports,
        "targets": check_targets(steps, window_us, collate_us, imports),
    }
    print_result(result)
    device = result["machine"].get("gpu", "cpu").replace(" ", "-")
    output = arguments.output or ROOT / "benchmarks" / "results" / f"overhead-{device}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(target["passed"] for target in result["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
