"""How far predicted gains are off: drawn runs, in two halves; the widths of intervals come from one, the other checks.

Every case is drawn by a seed: loaders that wait or compute on the CPU and before a simulated GPU, hooks and loggers
beside its steps, and the demo's photographs, read in the ways that its reports advise.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from evaluation.catalogue import WARMUP_STEPS, Fault, loader
from evaluation.gains import HALVES, NINE_OF_TEN, RESULTS, Gain, Prediction, width
from evaluation.gains import score as gains_score
from evaluation.gpu_catalogue import logs
from evaluation.gpu_parts import Parts, Samples, SlowEnd, SlowStart, steps_of
from evaluation.gpu_run import GpuFault
from evaluation.gpu_run import grade as grade_gpu
from evaluation.parts import Data, Model
from lightning_gpuopt.demo.data import Recipe, make
from lightning_gpuopt.demo.demonstration import follow_advice
from lightning_gpuopt.demo.table import Run
from lightning_gpuopt.demo.training import DemoSettings, train
from lightning_gpuopt.diagnosis.predict import SPREADS
from tests.simulators.nvml import build

Case = tuple[str, str, Gain | None]
"""The kind of advice, what was run, and what came of it."""


def score(only: str, grade_cpu: Callable[[Fault], Any], when_and_where: Callable[[], str]) -> tuple[list[str], bool]:
    """Run all cases.

    Args:
        only: words that a case's name must have.
        grade_cpu: runs a fault on the CPU, and again with the advice followed.
        when_and_where: for the results file.

    Returns:
        The table and the score, as Markdown, and whether nine of ten of those held out are in their intervals.
    """
    found: list[Prediction] = []
    for kind, name, gain in chain(_before_a_gpu(only), _on_the_cpu(only, grade_cpu), _of_photographs(only)):
        if gain is not None:
            found.append(Prediction(kind, name, HALVES[sum(each.kind == kind for each in found) % 2], gain))
        print(f"{'none' if gain is None else 'ok  ' if gain.kept else 'OFF '} {name}: {gain}", flush=True)
    lines = ["| the run | half | predicted gain of the advice |", "|---|---|---|"]
    lines += [f"| {each.case} | {each.half} | {each.gain} |" for each in found]
    held_out = [each.gain for each in found if each.half == HALVES[1]]
    kept = sum(each.kept for each in held_out)
    widths = ", ".join(f"{kind} {100 * width(found, kind):.0f} %" for kind in SPREADS)
    text = f"Held out: {gains_score(held_out)} Nine of ten of the other half were within: {widths}."
    print(text, flush=True)
    if not only:
        rows = [asdict(each) for each in found]
        RESULTS.write_text(json.dumps({"machine": when_and_where(), "predictions": rows}, indent=1) + "\n")
    return [*lines, "", text], kept >= NINE_OF_TEN * len(held_out)


def _before_a_gpu(only: str) -> Iterator[Case]:
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        assert library is not None
        for _ in range(10):
            for fault in _gpu_cases(draw):
                if only in fault.name:
                    yield (
                        ("workers" if fault.cure == "settings" else "without"),
                        fault.name,
                        grade_gpu(fault, library).gain,
                    )


def _gpu_cases(draw: random.Random) -> Iterator[GpuFault]:
    gpu_s, host_s = draw.uniform(0.02, 0.07), draw.uniform(0.008, 0.018)
    step, milliseconds = steps_of(gpu_s, host_s), f"a GPU's step of {gpu_s * 1e3:.0f} ms"
    workers, wait_s = draw.randrange(3), draw.uniform(1.3, 3.0) * gpu_s
    each_s = max(workers, 1) * wait_s
    yield GpuFault(
        f"{workers} workers, a batch waits {each_s * 1e3:.0f} ms, {milliseconds}",
        "",
        lambda scene: Parts(step, Samples(wait_s=each_s), {"num_workers": workers}),
        steps=50,
        cure="settings",
    )
    slow_s = draw.uniform(0.8, 2.0) * gpu_s
    kind = draw.choice(["a hook before", "a hook after", "a logger after"])
    ways: dict[str, Callable[[], Parts]] = {
        "a hook before": lambda: Parts(step, callbacks=[SlowStart(slow_s)]),
        "a hook after": lambda: Parts(step, callbacks=[SlowEnd(slow_s)]),
        "a logger after": lambda: logs(slow_s, step),
    }
    name = f"{kind} each step takes {slow_s * 1e3:.0f} ms, {milliseconds}"
    yield GpuFault(name, "", lambda scene: ways[kind](), steps=50, cure=lambda scene: Parts(step))


def _on_the_cpu(only: str, grade: Callable[[Fault], Any]) -> Iterator[Case]:
    draw = random.Random(2)
    for number in range(14):
        step_s, workers = draw.uniform(0.008, 0.03), draw.randrange(4)
        batch_s = max(workers, 1) * step_s * draw.uniform(0.5 if not workers else 1.3, 3.0)
        if number % 2:
            workers, batch_s = min(workers, 1), step_s * draw.uniform(1.2, 2.0)
        how = "computes" if number % 2 else "waits"
        sample_s = batch_s / 4
        name = f"{workers} workers, a batch {how} {batch_s * 1e3:.0f} ms, a step of {step_s * 1e3:.0f} ms"
        fault = Fault(
            name,
            "",
            partial(_model, Data(spin_s=sample_s) if number % 2 else Data(sleep_s=sample_s), workers, step_s),
            steps=WARMUP_STEPS + 80,
            gain=True,
        )
        if only in name:
            yield "workers", name, grade(fault).gain


def _model(data: Data, workers: int, step_s: float) -> Model:
    return Model(loader(data, workers), step_s=step_s)


def _of_photographs(only: str) -> Iterator[Case]:
    draw = random.Random(3)
    most = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images"
        make(images, Recipe(1600))
        for number in range(16):
            batch_size, width, threads = draw.choice([16, 32, 64]), draw.choice([1, 1, 2]), draw.choice([1, most])
            of_threads = "1 thread" if threads == 1 else f"{threads} threads"
            name = f"photographs, batches of {batch_size}, a network {width} times as wide, {of_threads}"
            if only not in name:
                continue
            torch.set_num_threads(threads)
            out = Path(folder) / f"run {number}"
            settings = DemoSettings(images, out, 9, 2400 // batch_size, batch_size, 0, "cpu", 0, False, width=width)
            runs = [Run(settings, train(settings))]
            with redirect_stdout(io.StringIO()):
                follow_advice(runs)
            for run in runs[1:]:
                if run.proof is not None and run.proof.predicted is not None:
                    kind = "search" if run.name == "worker-search" else "storage"
                    yield kind, name, Gain(run.name, *run.proof.predicted, run.proof.measured)
        torch.set_num_threads(most)
