"""What the page of a long run costs: seconds and bytes of ``save_html`` after 100,000 steps.

The steps pass the real timeline, windows and step clock, under a clock that is moved by hand; the first call is in a
fresh process and has the imports in it.

    python benchmarks/report.py [--steps N]

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lightning_gpuopt.diagnosis.report import StallReport, Stretch
from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.steps import StepClock
from lightning_gpuopt.timeline.windows import Windows

TARGET_S = 2.0
TARGET_BYTES = 1_000_000
WARMUP_STEPS = 5

ACTIONS = {
    "[_TrainingEpochLoop].train_dataloader_next": 0.020,
    "[Strategy]SingleDeviceStrategy.batch_to_device": 0.002,
    "[Strategy]SingleDeviceStrategy.training_step": 0.030,
    "[Strategy]SingleDeviceStrategy.backward": 0.045,
    "[Callback]ModelCheckpoint.on_train_batch_end": 0.001,
}
"""Mean seconds of what a step passes."""


def long_run(steps: int) -> StallReport:
    """The report of a run in which one step in 500 is ten times as slow as the others."""
    now_ns = 0
    rng = random.Random(0)
    timeline = Timeline(clock_ns=lambda: now_ns)
    clock, windows = StepClock(timeline, WARMUP_STEPS), Windows(50, WARMUP_STEPS)
    timeline.start()
    for _ in range(steps):
        slow = 10.0 if rng.random() < 0.002 else 1.0
        for action, seconds in ACTIONS.items():
            with timeline.span(action):
                now_ns += round(seconds * slow * rng.lognormvariate(0.0, 0.1) * 1e9)
        timeline.step_done()
        clock.step_done()
        if windows.due(timeline.steps):
            windows.close(timeline.times())
            windows.annotate(rng.uniform(60, 90))
            clock.window_done()
    times = timeline.times()
    return StallReport(
        "compute_bound",
        times.wall_s,
        times.phases,
        [],
        steps=times.steps,
        step_s=times.step_s,
        step_times=clock.times(),
        timeline=[
            Stretch(each.start_s, each.times.wall_s, each.times.steps, each.times.phases, each.gpu_utilization)
            for each in windows.stretches(times)
        ],
    )


def save_once(folder: Path) -> tuple[float, int]:
    """Seconds and bytes of ``save_html`` in a fresh process, imports included."""
    code = (
        "import sys, time; from pathlib import Path; from lightning_gpuopt.diagnosis.report import StallReport;"
        "folder = Path(sys.argv[1]); report = StallReport.from_json((folder / 'report.json').read_text());"
        "start = time.perf_counter(); report.save_html(folder / 'report.html'); print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return float(done.stdout), (folder / "report.html").stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure save_html after a long run.")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of the run")
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}")
    report = long_run(options.steps)
    print(
        f"{report.steps} steps: {len(report.timeline)} stretches, {len(report.step_times.counts)} bins, "
        f"{len(report.step_times.outliers)} of {report.step_times.outlier_count} outliers"
    )
    with tempfile.TemporaryDirectory() as folder:
        report.save_json(Path(folder) / "report.json")
        first_s, size = save_once(Path(folder))
        report.save_html(Path(folder) / "again.html")
        start = time.perf_counter()
        report.save_html(Path(folder) / "again.html")
        again_s = time.perf_counter() - start
    passed = [first_s < TARGET_S, size < TARGET_BYTES]
    print(f"save_html, first call: {first_s:.2f} s (target {TARGET_S:.0f} s)  {'PASS' if passed[0] else 'FAIL'}")
    print(f"save_html, later calls: {again_s:.2f} s")
    print(f"report.html: {size:,} bytes (target {TARGET_BYTES:,})  {'PASS' if passed[1] else 'FAIL'}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
