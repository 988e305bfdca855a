"""What it brings that each sample, not each batch, is a task: ``SampleLoader`` beside its peers, in the same run.

- ``tail``: one sample in 100 takes 10, 50 or 200 times the others' 1 ms, asleep or busy: samples per second. Peers:
  ``DataLoader``, with ``in_order=False`` too, and SPDL's pipeline in order of completion (of threads for samples that
  are asleep, of processes for those that are busy).
- ``large``: batches of 1, 8 and 40 MiB from a cheap ``__getitem__``: batches per second.
- ``taking``: the training thread's CPU time to take each of those batches after a step of 20 ms that sleeps; and to
  free the batch before.
- ``images``: JPEGs decoded, resized and flipped in Python, all equally slow.
- ``never_slower``: rows of a table, texts, and detection samples, whose ``collate_fn`` leaves them to torch's workers.
- ``fix``: a Trainer with a plain ``DataLoader`` under ``AutoFix``: steps per second in the last third of the run.

All loaders have the same number of workers, samples and seeds. A loader's first batches are not measured. Loaders take
turns; medians of the rounds count, and the ratio is SampleLoader's over that peer's.

    python benchmarks/sample_parallel.py [--rows tail large ...] [--workers N] [--rounds N] [--tiny] [--output FILE]

Writes ``benchmarks/results/sample-parallel-cpu.json`` if all rows ran; ``--tiny`` is a trial of a few seconds, and
writes nothing without ``--output``. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import io
import itertools
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from gpu_parts import ROOT
from overhead import machine
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from lightning_gpuopt import AutoFix, SampleLoader

OURS, PLAIN, ANY_ORDER, SPDL, FIXED = "SampleLoader", "DataLoader", "in_order=False", "SPDL", "AutoFix"
USUAL_S, ONE_IN = 1e-3, 100
LARGE_BATCH, STEP_S = 32, 0.02
LENGTH = 1_000_000  # of each dataset: no run comes to its end
Maker = Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Size:
    rounds: int = 3
    tails: tuple[int, ...] = (10, 50, 200)  # times as long as others a slow sample takes
    tail_batches: tuple[int, ...] = (4, 8, 64)  # batch sizes
    warm: int = 300  # samples before those that are measured
    tail: int = 400  # samples that are measured, and at least 12 batches; of slower tails more, to see as many
    mib: tuple[int, ...] = (1, 8, 40)  # of a large batch
    batches: int = 400  # that are measured in other rows, divided by what a batch costs
    steps: int = 1500  # of a training


FULL = Size()
TINY = Size(1, (10,), (4,), 8, 16, (1,), 20, 30)


def spin(seconds: float) -> None:
    """Take so much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


WAITS: dict[str, Callable[[float], None]] = {"asleep": time.sleep, "busy": spin}


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH


class Tail(Samples):
    """One sample in each hundred, at a random place, is slow."""

    def __init__(self, kind: str, times: int) -> None:
        self.wait, self.times = WAITS[kind], times
        self.slow = [random.Random(number).randrange(ONE_IN) for number in range(1000)]

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        is_slow = index % ONE_IN == self.slow[index // ONE_IN % len(self.slow)]
        self.wait(USUAL_S * (self.times if is_slow else 1))
        return np.full(16, index, np.float32)


class Large(Samples):
    def __init__(self, mib: int) -> None:
        self.rows = torch.rand(2 * LARGE_BATCH, (mib << 20) // 4 // LARGE_BATCH)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % len(self.rows)].clone()


class Images(Samples):
    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self.files = []
        for _ in range(64):
            image = Image.fromarray(draws.integers(0, 256, (24, 32, 3), np.uint8)).resize((256, 192))
            image.save(file := io.BytesIO(), "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(self.files[index % len(self.files)])).convert("RGB").resize((224, 224))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255), index


class Table(Samples):
    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).random((10_000, 32), np.float32)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index % len(self.rows)]
        return {"features": row, "label": index % 10, "weight": 1.0 + index % 3, "is_new": index % 2 == 0}


class Texts(Samples):
    def __init__(self) -> None:
        self.tokens = torch.randint(50_000, (1_000_000,))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = index * 512 % (len(self.tokens) - 513)
        return {"tokens": self.tokens[first : first + 512], "targets": self.tokens[first + 1 : first + 513]}


class Detection(Samples):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": torch.full((3, 128, 128), index % 256 / 256), "boxes": torch.ones(1 + index % 7, 4)}


# ---- what is measured of a loader ----


def pace(make: Maker, warm: int, batches: int, per_batch: int = 1) -> float:
    """Batches, or samples, per second after the first ones."""
    loader = make()
    iterator = iter(loader)
    for _ in range(warm):
        next(iterator)
    began = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    return batches * per_batch / (time.perf_counter() - began)


def taking_us(make: Maker, warm: int, batches: int, *, frees: bool) -> float:
    """Microseconds of this thread's CPU time to take a batch; with `frees` to free the one before, too."""
    loader = make()
    iterator, took, batch = iter(loader), 0.0, None
    for number in range(warm + batches):
        time.sleep(STEP_S)
        if not frees:
            batch = None
        began = time.thread_time()
        batch = next(iterator)
        took += (time.thread_time() - began) * (number >= warm)
    del batch
    return took / batches * 1e6


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    @override
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[:, :16]).sum()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def training(make: Maker, steps: int, changes: list[list[str]] | None = None) -> float:
    """Steps per second in the last third; with a list for the changes it is under AutoFix."""
    ended: list[float] = []
    clock = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *_: ended.append(time.perf_counter()))
    fix, third = AutoFix(), steps // 3
    callbacks: list[pl.Callback] = [clock] if changes is None else [clock, fix]
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # of AutoFix's report
        trainer = pl.Trainer(max_steps=steps, accelerator="cpu", default_root_dir=folder, callbacks=callbacks, **quiet)
        trainer.fit(Net(), make())
    if changes is not None:
        changes.append(
            [f"{each.setting}: {each.from_} to {each.to}, kept: {each.kept}, {each.why}" for each in fix.changes]
        )
    return third / (ended[-1] - ended[-1 - third])


# ---- loaders ----


def torchs(dataset: Dataset[Any], batch_size: int, workers: int, **more: Any) -> Maker:
    return lambda: DataLoader(dataset, batch_size, num_workers=workers, **more)


def ours(dataset: Dataset[Any], batch_size: int, workers: int, **more: Any) -> Maker:
    return lambda: SampleLoader(dataset, batch_size, num_workers=workers, **more)


_shared: Dataset[Any]
"""What SPDL's processes read: they are forked, so that no task has to carry it."""


def read(index: int) -> Any:
    return _shared[index]


def spdls(dataset: Tail, batch_size: int, workers: int) -> Iterator[Any]:
    """Batches of samples in the order in which they are done."""
    global _shared
    _shared = dataset
    asleep = dataset.wait is time.sleep
    builder = importlib.import_module("spdl.pipeline").PipelineBuilder().add_source(range(LENGTH))
    with ThreadPoolExecutor(workers) if asleep else ProcessPoolExecutor(workers, get_context("fork")) as executor:
        builder.pipe(read, concurrency=workers, executor=executor).aggregate(batch_size).pipe(default_collate)
        with (pipeline := builder.add_sink(2).build(num_threads=1)).auto_stop():
            yield from pipeline


def spdl_version() -> str | None:
    try:
        importlib.import_module("spdl.pipeline")
    except ImportError:
        return None
    return version("spdl-core")


# ---- rows ----


def compare(
    case: str, unit: str, figures: Mapping[str, Callable[[], float]], *goals: tuple[float, str, str], rounds: int
) -> dict[str, Any]:
    """Figures of loaders that take turns.

    A goal is a bound, whose figure, and over whose: the least ratio; over nobody's: the most.
    """
    seen: dict[str, list[float]] = {name: [] for name in figures}
    for _ in range(rounds):
        for name, measured in figures.items():
            torch.manual_seed(0)
            seen[name].append(measured())
            gc.collect()  # a loader that is left would keep its workers
    medians = {name: statistics.median(each) for name, each in seen.items()}
    print(f"{case}: " + "  ".join(f"{name} {value:,.4g}" for name, value in medians.items()) + f" {unit}", flush=True)
    judged: list[dict[str, Any]] = []
    for bound, of, over in goals:
        value = medians[of] / medians.get(over, math.nan) if over else medians[of]
        verdict = "not measured" if math.isnan(value) else "met" if (value >= bound) == bool(over) else "missed"
        what, goal = (f"{of} over {over}", f"at least {bound:g}") if over else (of, f"at most {bound:g}")
        judged.append({"what": what, "value": None if math.isnan(value) else value, "goal": goal, "verdict": verdict})
        print(f"    {what}: {value:.3g}, goal {goal}: {verdict}", flush=True)
    return {"case": case, "unit": unit, "medians": medians, "rounds": seen, "goals": judged}


def tail(size: Size, workers: int) -> Iterator[dict[str, Any]]:
    for kind, times, batch in itertools.product(WAITS, size.tails, size.tail_batches):
        given = Tail(kind, times), batch, workers
        loaders = {PLAIN: torchs(*given)}
        if "in_order" in inspect.signature(DataLoader).parameters:
            loaders[ANY_ORDER] = torchs(*given, in_order=False)
        if spdl_version() is not None:
            loaders[SPDL] = partial(spdls, *given)
        loaders[OURS] = ours(*given)
        warm, count = -(-size.warm // batch), max(12, size.tail * max(1, times // 25) // batch)
        figures = {name: partial(pace, make, warm, count, batch) for name, make in loaders.items()}
        goal = 0.95, OURS, ANY_ORDER
        yield compare(f"{kind}, {times} times, batches of {batch}", "samples/s", figures, goal, rounds=size.rounds)


def large(size: Size, workers: int) -> Iterator[dict[str, Any]]:
    for mib in size.mib:
        dataset, count, more = Large(mib), max(20, size.batches // mib), f"DataLoader, {2 * workers} workers"
        loaders = {PLAIN: torchs(dataset, LARGE_BATCH, workers), more: torchs(dataset, LARGE_BATCH, 2 * workers)}
        loaders[OURS] = ours(dataset, LARGE_BATCH, workers)
        figures = {name: partial(pace, make, 8, count) for name, make in loaders.items()}
        goals = [(2.0, OURS, peer) for peer in (PLAIN, more)]
        yield compare(f"{mib} MiB", "batches/s", figures, *goals, rounds=size.rounds)


def taking(size: Size, workers: int) -> Iterator[dict[str, Any]]:
    for mib in size.mib:
        loaders = {PLAIN: torchs(Large(mib), LARGE_BATCH, workers), OURS: ours(Large(mib), LARGE_BATCH, workers)}
        for frees, case in ((False, f"{mib} MiB"), (True, f"{mib} MiB, and freeing the one before")):
            each = {name: partial(taking_us, make, 8, size.batches // 4, frees=frees) for name, make in loaders.items()}
            goals = [] if frees else [(60.0, OURS, "")]
            yield compare(case, "microseconds/batch", each, *goals, rounds=size.rounds)


def images(size: Size, workers: int) -> Iterator[dict[str, Any]]:
    yield beside_torch("JPEGs", Images(), 32, size.batches // 16, 1.0, size.rounds, workers)


def never_slower(size: Size, workers: int) -> Iterator[dict[str, Any]]:
    yield beside_torch("table", Table(), 256, size.batches // 2, 0.97, size.rounds, workers)
    yield beside_torch("texts", Texts(), 32, size.batches * 2, 0.97, size.rounds, workers)
    yield beside_torch("detection", Detection(), 16, size.batches // 2, 0.97, size.rounds, workers, collate_fn=tuple)


def beside_torch(
    case: str, dataset: Dataset[Any], batch: int, count: int, least: float, rounds: int, workers: int, **more: Any
) -> dict[str, Any]:
    loaders = {PLAIN: torchs(dataset, batch, workers, **more), OURS: ours(dataset, batch, workers, **more)}
    figures = {name: partial(pace, make, 8, max(4, count), batch) for name, make in loaders.items()}
    return compare(case, "samples/s", figures, (least, OURS, PLAIN), rounds=rounds)


def fix(size: Size, workers: int) -> Iterator[dict[str, Any]]:
    cases = {"asleep, 50 times, batches of 8": (Tail("asleep", 50), 8), "8 MiB": (Large(8), LARGE_BATCH)}
    for case, (dataset, batch) in cases.items():
        changes: list[list[str]] = []
        plain = torchs(dataset, batch, workers)
        figures = {PLAIN: partial(training, plain, size.steps), FIXED: partial(training, plain, size.steps, changes)}
        figures[OURS] = partial(training, ours(dataset, batch, workers), size.steps)
        yield compare(case, "steps/s", figures, (0.95, FIXED, OURS), rounds=size.rounds) | {"changes": changes}
        print(f"    changes of AutoFix: {changes}", flush=True)


ROWS = {each.__name__: each for each in (tail, large, taking, images, never_slower, fix)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--tiny", action="store_true", help="a trial of a few seconds, which measures nothing")
    parser.add_argument("--output", type=Path, help="the result (default: benchmarks/results/sample-parallel-cpu.json)")
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    size = replace(size, rounds=options.rounds or size.rounds)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    here = {**machine(), "spdl": spdl_version() or "not installed"}
    print(", ".join(f"{name}: {value}" for name, value in here.items()), flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in options.rows:
        print(name, flush=True)
        rows[name] = list(ROWS[name](size, options.workers))
    verdicts = Counter(goal["verdict"] for cases in rows.values() for each in cases for goal in each["goals"])
    print(", ".join(f"{verdict}: {count}" for verdict, count in verdicts.items()))
    whole = not options.tiny and options.rows == list(ROWS)
    output = options.output or (ROOT / "benchmarks" / "results" / "sample-parallel-cpu.json" if whole else None)
    if output is not None:
        found = {"tiny": options.tiny, "machine": here, "workers": options.workers, "size": asdict(size)}
        output.write_text(json.dumps({**found, "goals": verdicts, "rows": rows}, indent=1) + "\n")
    return 1 if verdicts["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
