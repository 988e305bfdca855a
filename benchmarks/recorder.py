"""What the flight recorder costs: a step, a beat, and a sample in a worker.

Nothing else is measured beside it: each part is called many times in a row, and the median of the rounds counts. The
share of a core is that of the recorder's thread with the memory of the training process alone; workers have a thread of
their own, which does less.

    python benchmarks/recorder.py [--rounds N] [--output FILE]

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
import time
from collections.abc import Callable
from pathlib import Path

import lightning
import torch
from lightning.pytorch import Trainer
from torch.utils.data import Dataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.flight import FlightRecorder
from lightning_gpuopt.recorder.sample_notes import note_fetches
from lightning_gpuopt.recorder.worker import BEAT_S
from lightning_gpuopt.timeline.phases import Timeline

STEP_TARGET_US = 3.0
CORE_TARGET_PERCENT = 0.1
BATCH_SIZE = 128
SPANS = 20
"""Actions of Lightning's that are timed in a step."""


class Numbers(Dataset[int]):
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return BATCH_SIZE

    def __getitem__(self, index: int) -> int:
        return index


def seconds_of(call: Callable[[], object], times: int, rounds: int, clock: Callable[[], float]) -> float:
    """Seconds of one call, the median of the rounds."""
    took = []
    for _ in range(rounds):
        began = clock()
        for _ in range(times):
            call()
        took.append((clock() - began) / times)
    return statistics.median(took)


def spans_s(rounds: int, recorder: FlightRecorder | None) -> float:
    """Seconds of timing an action of the training loop, with the open slot shown in the ring or not."""
    timeline = Timeline()
    timeline.start()
    if recorder is not None:
        recorder.follow(timeline, [])
    span = timeline.span("run_training_batch")

    def time_nothing() -> None:
        with span:
            pass

    took_s = seconds_of(time_nothing, 20_000, rounds, time.perf_counter)
    timeline.stop()
    if recorder is not None:
        recorder.forget(timeline)
    return took_s


def fetches_s(rounds: int, *, noted: bool, whole: bool) -> float:
    """Seconds of fetching a batch."""
    fetcher = _MapDatasetFetcher(Numbers(), True, len, False)  # type: ignore[no-untyped-call]
    board = Board()
    board.rank.begin({})
    if noted:
        note_fetches(fetcher, board.rank, whole=whole)
    keys = list(range(BATCH_SIZE))
    took_s = seconds_of(lambda: fetcher.fetch(keys), 500, rounds, time.perf_counter)
    board.close()
    return took_s


def measure(rounds: int, folder: Path) -> dict[str, float]:
    """All figures."""
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    recorder = FlightRecorder(trainer, folder)
    step_s = seconds_of(recorder.step_done, 20_000, rounds, time.perf_counter)
    step_s += SPANS * (spans_s(rounds, recorder) - spans_s(rounds, None))
    beat_s = seconds_of(recorder.beat, 40, rounds, time.thread_time)
    recorder.ended()
    plain_s = fetches_s(rounds, noted=False, whole=False)
    return {
        "step_us": step_s * 1e6,
        "beat_us": beat_s * 1e6,
        "core_percent": beat_s / BEAT_S * 100,
        "sample_in_worker_us": (fetches_s(rounds, noted=True, whole=True) - plain_s) / BATCH_SIZE * 1e6,
        "batch_without_workers_us": (fetches_s(rounds, noted=True, whole=False) - plain_s) * 1e6,
    }


def main() -> int:
    """Measure, print, and compare with the targets."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.rounds, Path(folder))
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"a step:                          {figures['step_us']:.2f} us (target {STEP_TARGET_US:g})")
    print(f"a beat:                          {figures['beat_us']:.0f} us of CPU, every {BEAT_S:g} s")
    print(
        f"its thread:                      {figures['core_percent']:.3f} % of a core (target {CORE_TARGET_PERCENT:g})"
    )
    print(f"a sample, in a worker:           {figures['sample_in_worker_us']:.2f} us")
    print(f"a batch of {BATCH_SIZE}, without workers: {figures['batch_without_workers_us']:.1f} us")
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")
    return int(figures["step_us"] > STEP_TARGET_US or figures["core_percent"] > CORE_TARGET_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
