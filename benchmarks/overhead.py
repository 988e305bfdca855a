"""What a callback costs the training thread, and what importing the package costs.

A step is measured from one ``training_step`` to the next, so all set-ups are measured at the same point and everything
that Lightning does for a callback is in it. The model is next to nothing, the logger does nothing,
``log_every_n_steps=50``; batches come from a plain loop, from a ``DataLoader`` without workers, and from one with two.
The set-ups take turns, in changing order. Each is compared with the empty ``Callback()`` over the same kind of loader
in the same round, and the median of all rounds counts.

One pair of set-ups trains on the tests' simulated GPU, for what the event clock costs the host: its events are made
in Python, and cost more than CUDA's. Where there is a GPU, every set-up has real ones instead.

A StallDetector that finds something samples which lines take the time, for a while. That has a row of its own, beside
the same detector that finds nothing. ``StallDetector()`` is one as it comes, whatever it finds; in all other rows
nothing is found.

The median step is what nearly every step pays; the mean has the ends of the windows too, where figures are gathered and
logged. What threads of ours take of a core is the process's CPU time less the training thread's, above that under the
empty callback. Where there is no NVIDIA GPU, GpuUtilMonitor reads the NVML simulator of the tests, so that its thread
works.

    python benchmarks/overhead.py [--rounds N] [--steps N] [--output FILE]

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
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
from dataclasses import dataclass
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
MONITOR_OF_TWO = "GpuUtilMonitor, 2 devices"
EMPTY_SIMULATED = f"{EMPTY} (simulated events)"
EVENT_CLOCK = "StallDetector, event clock (simulated events)"
DEFAULTS = "StallDetector(), 0 workers"
SAMPLING = "StallDetector, 0 workers, while it samples"
EVENT_CLOCK_TARGET_US = 60.0
MEAN_TARGET_US = 25.0
SAMPLING_TARGET_PERCENT = 2.0
TARGETS_US = {
    "GpuUtilMonitor": 15.0,
    "StallDetector": 30.0,
    "StallDetector, 0 workers": 30.0,
    "StallDetector, 2 workers": 30.0,
    EVENT_CLOCK: EVENT_CLOCK_TARGET_US,
}
QUIET: dict[str, Any] = {"print_report": False} if "print_report" in inspect.signature(StallDetector).parameters else {}
THREADS_TARGET_PERCENT = 0.5
WINDOW_TARGET_US = 300.0
COLLATE_TARGET_US = 10.0
IMPORT_TARGET_PERCENT = 15.0
IMPORT_ROUNDS = 7
WARMUP_STEPS = 200
BATCH_SIZE, FEATURES = 8, 32


class Samples(Dataset[torch.Tensor]):
    """Samples that are there already."""

    def __init__(self, length: int) -> None:
        self.data = torch.randn(64, FEATURES)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index % len(self.data)]


class OneBatch:
    """A loader that is no DataLoader: hands out one batch ``length`` times."""

    def __init__(self, length: int) -> None:
        self.batch = torch.randn(BATCH_SIZE, FEATURES)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.repeat(self.batch, self.length)


def loader_of(workers: int | None, steps: int) -> Any:
    """So many batches; ``workers=None``: without a DataLoader."""
    if workers is None:
        return OneBatch(steps)
    return DataLoader(Samples(BATCH_SIZE * steps), batch_size=BATCH_SIZE, num_workers=workers)


class TinyModel(LightningModule):
    """One linear layer, for a step of which most is Lightning's own.

    Attributes:
        began_ns: when each step began.
        threads_s: CPU seconds of the other threads at the first step after the warm-up, and at the last.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 2)
        self.steps = steps
        self.began_ns: list[int] = []
        self.threads_s: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """One step on ``[B,32]``."""
        if batch_idx in (WARMUP_STEPS, WARMUP_STEPS + self.steps):
            self.threads_s.append(other_threads_s())
        self.began_ns.append(time.perf_counter_ns())
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def other_threads_s() -> float:
    """CPU seconds of this process's threads other than the calling one."""
    return time.process_time() - time.thread_time()


class SilentLogger(Logger):
    """Takes everything and keeps nothing; some callbacks refuse to work without a logger."""

    name = "silent"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Forget them."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Forget them."""


@dataclass(frozen=True)
class SetUp:
    """One row of the table.

    Attributes:
        callbacks: makes the callbacks of a run.
        workers: of the loader; None: no DataLoader, see :func:`loader_of`.
        simulated: on the simulated GPU, whose copies and kernels take no time.
        beside: the row to compare with, if it is not that of the empty callback.
        samples: whether a StallDetector in it samples lines; None: where it finds something.
    """

    callbacks: Callable[[], list[Callback]]
    workers: int | None = None
    simulated: bool = False
    beside: str | None = None
    samples: bool | None = False

    @property
    def compared_with(self) -> str:
        """The row of the empty callback over the same kind of loader, on the same device; or the one given."""
        if self.beside is not None:
            return self.beside
        if self.simulated:
            return EMPTY_SIMULATED
        return EMPTY if self.workers is None else f"{EMPTY}, {self.workers} workers"


def setups() -> dict[str, SetUp]:
    """All rows."""
    current: Any = "auto" if torch.cuda.is_available() else [0]

    def monitor(devices: Any = current) -> Callback:
        return GpuUtilMonitor(devices=devices)

    def detector(threshold: float = 1.0) -> Callback:
        return StallDetector(threshold, on_stall="ignore", **QUIET)

    rows = {
        "no callback": SetUp(list),
        EMPTY: SetUp(lambda: [Callback()]),
        "GpuUtilMonitor": SetUp(lambda: [monitor()]),
        MONITOR_OF_TWO: SetUp(lambda: [monitor("all")]),
        "StallDetector": SetUp(lambda: [detector()]),
        "both": SetUp(lambda: [monitor(), detector()]),
        "DeviceStatsMonitor": SetUp(lambda: [DeviceStatsMonitor()]),
        "ThroughputMonitor": SetUp(lambda: [ThroughputMonitor(batch_size_fn=len)]),
    }
    for workers in (0, 2):
        rows[f"{EMPTY}, {workers} workers"] = SetUp(lambda: [Callback()], workers)
        rows[f"StallDetector, {workers} workers"] = SetUp(lambda: [detector()], workers)
    rows[SAMPLING] = SetUp(lambda: [detector(0.01)], 0, beside="StallDetector, 0 workers", samples=True)
    rows[DEFAULTS] = SetUp(lambda: [StallDetector(on_stall="ignore", **QUIET)], 0, samples=None)
    if not torch.cuda.is_available():
        rows[EMPTY_SIMULATED] = SetUp(lambda: [Callback()], simulated=True)
        rows[EVENT_CLOCK] = SetUp(lambda: [detector()], simulated=True)
    return rows


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        steps_us: the steps' durations after the warm-up, in microseconds.
        threads_percent: what threads other than the training thread took meanwhile, in percent of a core.
    """

    steps_us: list[float]
    threads_percent: float


@contextlib.contextmanager
def device_of(setup: SetUp) -> Iterator[dict[str, Any]]:
    """Where a set-up trains, as arguments of the Trainer."""
    if not setup.simulated:
        yield {"accelerator": "auto", "devices": 1}
        return
    from tests.simulators.gpu import simulated_gpu

    with simulated_gpu(copy_s=0.0, pinned=True) as gpu:
        yield gpu.trainer_arguments()


def run_once(setup: SetUp, steps: int, folder: str) -> Run:
    """Train."""
    callbacks = setup.callbacks()
    model = TinyModel(steps)
    with device_of(setup) as device:
        trainer = Trainer(
            **device,
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
        trainer.fit(model, loader_of(setup.workers, WARMUP_STEPS + steps + 1))
    for callback in callbacks:
        if isinstance(callback, GpuUtilMonitor) and not callback.summary():
            sys.exit("overhead.py: GpuUtilMonitor read nothing, so its cost would not be its cost")
        if setup.simulated and isinstance(callback, StallDetector) and callback.report.gpu_idle_s is None:
            sys.exit("overhead.py: StallDetector read no event, so its cost would not be its cost")
        if isinstance(callback, StallDetector) and setup.samples not in (None, bool(callback.report.hot_spots)):
            sys.exit("overhead.py: StallDetector sampled lines where it should not, or did not where it should")
    began_ns = model.began_ns[WARMUP_STEPS:]
    wall_s = (began_ns[-1] - began_ns[0]) / 1e9
    return Run(
        [(after - before) / 1e3 for before, after in itertools.pairwise(began_ns)],
        100 * (model.threads_s[1] - model.threads_s[0]) / wall_s,
    )


def measure_steps(rounds: int, steps: int, folder: str) -> dict[str, dict[str, float]]:
    """Median and mean step of each set-up, what its threads take, and how much each is above the empty callback's."""
    made = setups()
    runs: dict[str, list[Run]] = {name: [] for name in made}
    run_once(made["no callback"], 1, folder)  # what the first Trainer of a process loads
    for number in range(rounds):
        order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        for name in order if number % 2 == 0 else reversed(order):
            runs[name].append(run_once(made[name], steps, folder))
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    return {name: summarise(runs[name], runs[setup.compared_with]) for name, setup in made.items()}


def summarise(runs: list[Run], empty: list[Run]) -> dict[str, float]:
    """A set-up's figures: medians over the rounds, in microseconds and in percent of a core."""

    def median(of: Callable[[Run], float]) -> float:
        return statistics.median(map(of, runs))

    def above(of: Callable[[Run], float]) -> float:
        return statistics.median(of(run) - of(other) for run, other in zip(runs, empty, strict=True))

    return {
        "median_step_us": median(lambda run: statistics.median(run.steps_us)),
        "above_empty_us": above(lambda run: statistics.median(run.steps_us)),
        "mean_above_empty_us": above(lambda run: statistics.fmean(run.steps_us)),
        "threads_above_empty_percent": above(lambda run: run.threads_percent),
    }


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
        detector = StallDetector(1.0, on_stall="ignore", warmup_steps=warmup, window_size=size, **QUIET)
        durations = run_once(SetUp(lambda detector=detector: [detector]), steps, folder).steps_us  # type: ignore[misc]
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
        return f"the NVML of {torch.cuda.get_device_name()}, {torch.cuda.device_count()} devices"
    sys.path.insert(0, str(ROOT))
    from tests.simulators.nvml import Gpu, Simulator, build

    library = build(Path(folder))
    if library is None:
        sys.exit("overhead.py: expected an NVIDIA GPU or a C compiler for the NVML simulator, found neither")
    scenario = Path(folder, "scenario.txt")
    os.environ["NVML_SIM_SCENARIO"] = str(scenario)
    Simulator(library, scenario).machine(Gpu(), Gpu())
    return "the NVML simulator (no NVIDIA GPU here), two devices"


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


def limit_us(name: str) -> float:
    """A row's target; on a GPU every StallDetector has an event clock."""
    on_gpu = torch.cuda.is_available() and name.startswith("StallDetector")
    return EVENT_CLOCK_TARGET_US if on_gpu else TARGETS_US[name]


def check_targets(
    steps: dict[str, dict[str, float]], window_us: float, collate_us: float, imports: dict[str, float]
) -> list[dict[str, Any]]:
    """Each target with what was measured."""
    targets = [
        {
            "what": f"{name}, median step above {EMPTY}",
            "measured": steps[name]["above_empty_us"],
            "limit": limit_us(name),
            "unit": "us",
        }
        for name in TARGETS_US
        if name in steps
    ]
    defaults_us = steps[DEFAULTS]["mean_above_empty_us"]
    for what, measured, limit in (
        (f"{DEFAULTS}, mean step above {EMPTY}", defaults_us, MEAN_TARGET_US),
        ("StallDetector, the step that ends a window above the others", window_us, WINDOW_TARGET_US),
        ("StallDetector, timing inside a worker, a batch", collate_us, COLLATE_TARGET_US),
    ):
        targets.append({"what": what, "measured": measured, "limit": limit, "unit": "us"})
    sampled, cost_us = steps[SAMPLING]["median_step_us"], steps[SAMPLING]["above_empty_us"]
    what, percent = f"{SAMPLING}, of a step without that", 100 * cost_us / (sampled - cost_us)
    targets.append({"what": what, "measured": percent, "limit": SAMPLING_TARGET_PERCENT, "unit": "%"})
    percent = steps[MONITOR_OF_TWO]["threads_above_empty_percent"]
    what = f"{MONITOR_OF_TWO}, its thread"
    targets.append({"what": what, "measured": percent, "limit": THREADS_TARGET_PERCENT, "unit": "% of a core"})
    share = 100 * imports["import lightning_gpuopt"] / imports["import torch"]
    what = "import lightning_gpuopt, of the time of import torch"
    targets.append({"what": what, "measured": share, "limit": IMPORT_TARGET_PERCENT, "unit": "%"})
    return [{**target, "passed": target["measured"] <= target["limit"]} for target in targets]


def print_result(result: dict[str, Any]) -> None:
    """The tables."""
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    print(f"{result['rounds']} rounds of {result['steps_per_run']} steps, medians of all rounds, in us")
    print(f"GpuUtilMonitor reads {result['nvml']}")
    print(f"\n{'':<46}{'median step':>12}{'above empty':>13}{'mean above':>12}{'threads above':>15}")
    for name, row in result["steps"].items():
        step, above, mean = (row[column] for column in ("median_step_us", "above_empty_us", "mean_above_empty_us"))
        print(f"{name:<46}{step:12.1f}{above:13.1f}{mean:12.1f}{row['threads_above_empty_percent']:13.2f} %")
    print()
    for name, taken_ms in result["imports_ms"].items():
        print(f"{name:<36}{taken_ms:9.1f} ms")
    print()
    for target in result["targets"]:
        word = "PASS" if target["passed"] else "FAIL"
        print(f"{word}  {target['what']}: {target['measured']:.2f} {target['unit']} (at most {target['limit']:g})")


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
