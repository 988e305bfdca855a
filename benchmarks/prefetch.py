"""How much of the copies to the GPU CudaPrefetcher hides, and what it costs the training thread.

**Copies.** A real Trainer, a loader with workers and ``pin_memory=True``, steps of one kernel of a known length, with
and without an ``.item()`` at their end. Beside CudaPrefetcher, in the same rounds: pageable batches, Lightning's own
copy of page-locked ones, timm's PrefetchLoader and torchtnt's CudaDataPrefetcher where they are installed. The GPU's
idle time between the kernels of two steps is measured on the GPU: by events on CUDA, by its ledger on the tests'
simulated GPU. What is longer about it than with a batch of next to nothing, everything else alike, is the copy's
exposed part; the hidden share is 1 - (exposed with) / (exposed without).

The workers hand over batches that lie ready in the memory of the training process, page-locked where batches are
pinned: so the loader keeps up whatever their size, and what is measured is the copy. timm's loader also turns its uint8
images into normalised float32.

**Host time.** The training thread's CPU time from step to step, with the callback and with an empty ``Callback()``,
over batches of 1 to 500 small tensors that wait in a queue, as a DataLoader's pin-memory thread leaves them; and
``enabled="auto"`` in a Trainer on the CPU. The two take turns, and the median of the rounds' differences counts.

    python benchmarks/prefetch.py [--simulated] [--quick] [--rounds N] [--output FILE]

``--simulated`` is the default where there is no CUDA. Its copies take as long as their bytes would at 25 GB/s
(pageable: 6 GB/s), but its events and tensors are made in Python, and cost the host more than CUDA's. ``--quick`` takes
less than a minute, and writes nothing without ``--output``.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import platform
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_devices import KERNEL, Device, RealDevice, SimulatedDevice
from gpu_parts import ROOT, new_event, quiet_trainer
from lightning.pytorch import Callback, LightningModule
from overhead import machine
from prefetch_host import READY_BATCHES, make_ready, measure_auto, measure_host, refuse_idle, target, worker_loader

from lightning_gpuopt import CudaPrefetcher
from tests.simulators.gpu import SimulatedGpu, simulated_gpu

HIDDEN_TARGET_PERCENT = 95.0
DISTURBED_PERCENT = 105.0
"""More cannot be hidden: the run with next to nothing, against which the share is held, was disturbed."""
SLOWER_TARGET_PERCENT = 1.0
WARMUP_STEPS, LAST_STEPS = 8, 1
TINY_MIB = 0.0

PINNED, PREFETCHED = "pin_memory", "CudaPrefetcher"

EXPLAINED = (
    "Idle: between two steps' kernels. Exposed copy: what the same way leaves idle beyond that with a batch of next to "
    "nothing. Hidden: 1 - exposed / exposed under pin_memory."
)


# ---- where it runs ----


@dataclass
class CopyWorkload:
    """A GPU whose idle time between the steps' kernels is known.

    Attributes:
        device: makes kernels of a known length.
        mib: sizes of batches.
        work_ms: lengths of steps.
        image_side: pixels of an image that stands for one of 256 x 256.
    """

    device: Device
    mib: tuple[int, ...]
    work_ms: tuple[float, ...]
    image_side: int = 256
    simulated = False
    _events: list[tuple[Any, Any]] = field(default_factory=list)
    _made: tuple[float, bool] | None = None

    def begin(self) -> None:
        """A run begins."""
        self._events.clear()

    def step(self, ms: float) -> None:
        """Queue a step's kernel."""
        begins, ends = new_event(), new_event()
        begins.record()
        self.device.work(ms)
        ends.record()
        self._events.append((begins, ends))

    def spans_ms(self) -> list[tuple[float, float]]:
        """When each step's kernel ran."""
        torch.cuda.synchronize()
        first = self._events[0][0]
        return [(first.elapsed_time(begins), first.elapsed_time(ends)) for begins, ends in self._events]

    def make_ready(self, mib: float, *, pinned: bool) -> None:
        """Have batches ready: uint8 ``[B,3,H,W]`` and int64 ``[B]``."""
        if self._made == (mib, pinned):
            return
        self._made = mib, pinned
        count, side = max(1, round(mib * 2**20 / (3 * 256 * 256))), self.image_side
        shapes = {(count, 3, side, side): torch.uint8, (count,): torch.int64}
        batches = range(READY_BATCHES)
        make_ready(
            ([torch.ones(*shape, dtype=dtype) for shape, dtype in shapes.items()] for _ in batches), pinned=pinned
        )


class SimulatedWorkload(CopyWorkload):
    """The simulated GPU, whose ledger knows."""

    simulated = True

    def __init__(self, gpu: SimulatedGpu, image_side: int) -> None:
        super().__init__(SimulatedDevice(gpu), mib=(256, 512), work_ms=(15.0, 40.0), image_side=image_side)
        self.gpu = gpu

    def begin(self) -> None:
        self._began_s = self.gpu.clock()

    def step(self, ms: float) -> None:
        self.device.work(ms)

    def spans_ms(self) -> list[tuple[float, float]]:
        self.gpu.synchronize()
        kernels = [each for each in self.gpu.ledger.activities if each.name == KERNEL]
        return [(each.start_s * 1e3, each.end_s * 1e3) for each in kernels if each.start_s >= self._began_s]


@contextlib.contextmanager
def a_workload(*, simulated: bool) -> Iterator[CopyWorkload]:
    if not simulated:
        yield CopyWorkload(RealDevice(), mib=(16, 64, 256), work_ms=(5.0, 20.0))
        return
    side = 8
    smaller = (256 / side) ** 2  # the host need not copy hundreds of MiB for the time that they would take
    with simulated_gpu(bandwidth=25e9 / smaller, pageable_bandwidth=6e9 / smaller) as gpu:
        yield SimulatedWorkload(gpu, side)


# ---- how batches may come to the device ----


@dataclass(frozen=True)
class Way:
    """One of them.

    Attributes:
        pinned: the loader pins batches.
        callbacks: of the Trainer.
        wrap: what is put around the loader.
        missing: why it cannot be used.
    """

    pinned: bool = True
    callbacks: Callable[[], list[Callback]] = list
    wrap: Callable[[Any], Any] = lambda loader: loader
    missing: str | None = None


def peer(package: str, module: str, wrap: Callable[[Any, Any], Any]) -> Way:
    """Another project's loader, if it is there."""
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        return Way(missing="not installed" if error.name == package else f"needs {error.name}")
    except Exception as error:  # made for another torch
        return Way(missing=f"{package} does not import: {type(error).__name__}: {error}")
    return Way(wrap=lambda loader: wrap(home, loader))


def ways() -> dict[str, Way]:
    cuda = torch.device("cuda", 0)
    return {
        "pageable": Way(pinned=False),
        PINNED: Way(),
        PREFETCHED: Way(callbacks=lambda: [CudaPrefetcher()]),
        "timm": peer("timm", "timm.data.loader", lambda home, loader: home.PrefetchLoader(loader, device=cuda)),
        "torchtnt": peer(
            "torchtnt",
            "torchtnt.utils.data.data_prefetcher",
            lambda home, loader: home.CudaDataPrefetcher(loader, cuda),
        ),
    }


# ---- copies ----


@dataclass(frozen=True)
class Cell:
    """A step of the grid.

    Attributes:
        mib: of a batch; :data:`TINY_MIB`: next to nothing.
        work_ms: its kernel.
        item: whether it ends with an ``.item()``.
    """

    mib: float
    work_ms: float
    item: bool

    def __str__(self) -> str:
        return f"{self.mib:g} MiB, {self.work_ms:g} ms{', .item()' if self.item else ''}"


class Model(LightningModule):
    def __init__(self, workload: CopyWorkload, cell: Cell) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.workload, self.cell = [workload], cell

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.workload[0].step(self.cell.work_ms)
        loss: torch.Tensor = self.layer(batch[0].flatten()[:8].float()).mean()
        if self.cell.item:
            loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@dataclass
class Times:
    """What was measured of one way in one cell, in all rounds; milliseconds."""

    steps: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        return statistics.median(self.steps)

    @property
    def idle_ms(self) -> float:
        return statistics.median(self.idle)


def train(workload: CopyWorkload, cell: Cell, way: Way, steps: int, times: Times) -> None:
    """One run."""
    workload.make_ready(cell.mib, pinned=way.pinned)
    loader = way.wrap(worker_loader(WARMUP_STEPS + steps + LAST_STEPS, pinned=way.pinned))
    with tempfile.TemporaryDirectory() as folder:
        callbacks = way.callbacks()
        trainer = quiet_trainer(folder, callbacks, max_epochs=1, **workload.device.trainer_arguments())
        workload.begin()
        trainer.fit(Model(workload, cell), loader)
    refuse_idle(callbacks)
    kernels = itertools.pairwise(workload.spans_ms()[WARMUP_STEPS:-LAST_STEPS])
    for (begin, end), (next_begin, _) in kernels:
        times.steps.append(next_begin - begin)
        times.idle.append(next_begin - end)


def measure_copies(workload: CopyWorkload, rounds: int, steps: int, *, quick: bool) -> dict[Cell, dict[str, Times]]:
    """Every way in every cell, in turns; each also with a batch of next to nothing."""
    work_ms = workload.work_ms[-1:] if quick else workload.work_ms
    mib = workload.mib[-1:] if quick else workload.mib
    cells = [Cell(size, ms, item) for ms in work_ms for item in (False, True) for size in (TINY_MIB, *mib)]
    usable = {name: way for name, way in ways().items() if way.missing is None}
    found: dict[Cell, dict[str, Times]] = {cell: {name: Times() for name in usable} for cell in cells}
    train(workload, Cell(TINY_MIB, 1.0, False), Way(), 1 + LAST_STEPS, Times())  # what the first Trainer loads
    for number in range(rounds):
        for cell in cells:
            for name in usable if number % 2 == 0 else reversed(usable):
                train(workload, cell, usable[name], steps, found[cell][name])
        print(f"  copies, round {number + 1} of {rounds}", file=sys.stderr)
    return found


def judge_copies(found: dict[Cell, dict[str, Times]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the table, and each target with what was measured."""
    rows, targets = [], []
    for cell, by_way in found.items():
        stock = by_way[PINNED]
        exposed = {name: times.idle_ms - _tiny(found, cell, name).idle_ms for name, times in by_way.items()}
        copy_ms = exposed[PINNED]
        for name, times in by_way.items():
            row = {
                "mib": cell.mib,
                "work_ms": cell.work_ms,
                "item": cell.item,
                "way": name,
                "step_ms": times.step_ms,
                "of_stock": times.step_ms / stock.step_ms,
                "idle_ms": times.idle_ms,
            }
            if cell.mib:
                row |= {"exposed_ms": exposed[name], "hidden": 1 - exposed[name] / copy_ms}
            rows.append(row)
        if not cell.mib:
            continue
        ours = by_way[PREFETCHED]
        if copy_ms < cell.work_ms:
            hidden = 100 * (1 - exposed[PREFETCHED] / copy_ms)
            disturbed = hidden > DISTURBED_PERCENT
            what = f"{cell}: share of a copy of {copy_ms:.2f} ms that is hidden{', disturbed' if disturbed else ''}"
            targets.append(target(what, hidden, HIDDEN_TARGET_PERCENT, "%", least=True))
            targets[-1]["passed"] &= not disturbed
        slower = 100 * (ours.step_ms / stock.step_ms - 1)
        targets.append(target(f"{cell}: longer step than without", slower, SLOWER_TARGET_PERCENT, "%"))
    return rows, targets


def judge_tiny(found: dict[Cell, dict[str, Times]]) -> list[dict[str, Any]]:
    """Where there is nothing to hide, only the callback's own time is left."""
    return [
        target(
            f"next to nothing, {cell.work_ms:g} ms{', .item()' if cell.item else ''}: longer step than without",
            100 * (by_way[PREFETCHED].step_ms / by_way[PINNED].step_ms - 1),
            SLOWER_TARGET_PERCENT,
            "%",
        )
        for cell, by_way in found.items()
        if not cell.mib
    ]


def _tiny(found: dict[Cell, dict[str, Times]], cell: Cell, way: str) -> Times:
    return found[Cell(TINY_MIB, cell.work_ms, cell.item)][way]


# ---- the result ----


def versions() -> dict[str, str]:
    """Where this runs, and of what."""
    here = machine()
    for package in ("timm", "torchtnt"):
        try:
            here[package] = version(package)
        except PackageNotFoundError:
            here[package] = "not installed"
    here["system"] = platform.platform()
    return here


def copies_section(workload: CopyWorkload, rounds: int, *, quick: bool, steps: int | None = None) -> dict[str, Any]:
    """The grid, judged; in runs of so many steps (None: 40, or 24 where it is quick)."""
    steps = steps or (24 if quick else 40)
    found = measure_copies(workload, rounds, steps, quick=quick)
    rows, targets = judge_copies(found)
    tiny = judge_tiny(found)
    return {
        "simulated": workload.simulated,
        "rounds": rounds,
        "steps_per_run": steps,
        "rows": rows,
        "left_out": {name: way.missing for name, way in ways().items() if way.missing is not None},
        # Events made in Python are most of the simulated GPU's share here.
        "targets": targets if workload.simulated else targets + tiny,
        "notes": tiny if workload.simulated else [],
    }


def host_sections(rounds: int, *, simulated: bool, quick: bool, steps: int = 250) -> dict[str, Any]:
    """Host time, judged."""
    accelerators = ("cpu",) if simulated else ("cpu", "gpu")
    made = [measure_host(each, rounds, steps, quick=quick) for each in accelerators]
    auto = measure_auto(min(5, 2 * rounds) if quick else 4 * rounds, 8 * steps // 5)
    return {"host": made, "auto": auto, "host_rounds": rounds}


def all_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    hosts = [each for host in result["host"] for each in host["targets"]]
    return [*result["copies"]["targets"], *hosts, result["auto"]]


def claim(each: dict[str, Any]) -> str:
    return f"{each['what']}: {each['measured']:.4g} {each['unit']} ({each['bound']} {each['limit']:g})"


def render(result: dict[str, Any]) -> str:
    """The tables and verdicts, in markdown."""
    copies = result["copies"]
    where = "the simulated GPU of the tests" if copies["simulated"] else result["machine"].get("gpu", "CUDA")
    text = ["# CudaPrefetcher", "", ", ".join(f"{name} {value}" for name, value in result["machine"].items()), ""]
    text += [f"## Copies, on {where}", ""]
    text += [f"{copies['rounds']} rounds of {copies['steps_per_run']} steps, medians over all of them. {EXPLAINED}", ""]
    text += [f"- {name}: {why}" for name, why in copies["left_out"].items()]
    text += ["", "| batch, MiB | kernel, ms | .item() | way | step, ms | of pin_memory | idle, ms | exposed copy, ms |"]
    text[-1] += " hidden |"
    text += ["|---:|---:|---|---|---:|---:|---:|---:|---:|"]
    for row in copies["rows"]:
        mib = f"{row['mib']:g}" if row["mib"] else "next to nothing"
        cells = [mib, f"{row['work_ms']:g}", "yes" if row["item"] else "no", row["way"]]
        cells += [f"{row['step_ms']:.2f}", f"{row['of_stock']:.3f}", f"{row['idle_ms']:.2f}"]
        exposed = "hidden" in row
        cells += [f"{row['exposed_ms']:.2f}", f"{100 * row['hidden']:.0f} %"] if exposed else ["", ""]
        text.append(f"| {' | '.join(cells)} |")
    for host in result["host"]:
        text += ["", f"## Host time of a step on the {host['accelerator'].upper()}, in us", ""]
        text += [f"The training thread's CPU time; medians of {result['host_rounds']} rounds.", ""]
        text += [
            "| tensors | step with Callback() | Lightning's move | ours in its place | added | added, no workers |"
        ]
        text += ["|---:|---:|---:|---:|---:|---:|"]
        for row in host["rows"]:
            names = ("empty_us", "own_move_us", "whole_us", "added_us", "in_process_us")
            text.append(f"| {row['tensors']} | {' | '.join(f'{row[name]:.1f}' for name in names)} |")
    text += ["", "## Targets", "", "```"]
    text += [f"{'PASS' if each['passed'] else 'FAIL'}  {claim(each)}" for each in all_targets(result)]
    text += [f"note  {claim(each)}" for each in copies["notes"]]
    return "\n".join([*text, "```", ""])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lightning says nothing, and torch computes on one thread: the step is next to nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--simulated", action="store_true", help="on the tests' simulated GPU (default without CUDA)")
    parser.add_argument("--quick", action="store_true", help="one cell, fewer rounds: less than a minute")
    parser.add_argument("--rounds", type=int, help="runs of each way in each cell (default: 3; host time: 15)")
    parser.add_argument("--output", type=Path, help="the file (default: benchmarks/results/prefetch-<device>.md)")
    arguments = parser.parse_args()
    simulated, quick = arguments.simulated or not torch.cuda.is_available(), arguments.quick
    here = versions()
    print(", ".join(f"{name} {value}" for name, value in here.items()), flush=True)
    with quiet():
        with a_workload(simulated=simulated) as workload:
            copies = copies_section(workload, arguments.rounds or (1 if quick else 3), quick=quick)
        host = host_sections(arguments.rounds or (3 if quick else 15), simulated=simulated, quick=quick)
    result: dict[str, Any] = {"machine": here, "copies": copies, **host}
    text = render(result)
    print(text)
    device = "cpu" if simulated else re.sub(r"[^a-z0-9]+", "-", here["gpu"].lower()).strip("-")
    output = arguments.output or (None if quick else ROOT / "benchmarks" / "results" / f"prefetch-{device}.md")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
        print(f"written to {output}")
    return 0 if all(each["passed"] for each in all_targets(result)) else 1


if __name__ == "__main__":
    sys.exit(main())
