"""Section ``demo`` of ``benchmarks/gpu.py``: the package's demo, and how busy the GPU is before and after."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_devices import simulated_nvml
from gpu_parts import ROOT, Form, Skip

from lightning_gpuopt import GpuUtilMonitor
from lightning_gpuopt.cli import main
from lightning_gpuopt.demo import training as demo_training
from tests.simulators.nvml import Gpu

BEFORE_PERCENT, AFTER_PERCENT = 30.0, 90.0
"""What the demo is to show: a GPU that is busy for so much of the time before the advice, and after it."""

SIZES: dict[Form, tuple[str, ...]] = {
    "full": (),
    "quick": (),
    "trial": ("--images", "128", "--batch-size", "2", "--epochs", "1"),
}
UTILIZATION = "/utilization"


def demo(*, simulated: bool = False, form: Form = "full") -> dict[str, Any]:
    """Train as it is and with the advice, as ``lightning-gpuopt demo`` does.

    Args:
        simulated: on the CPU, with a monitor that reads the NVML simulator.
        form: ``"trial"``: a hundred images.

    Raises:
        Skip: the demo's extra is not installed.
    """
    if importlib.util.find_spec("skimage") is None:
        raise Skip("missing: scikit-image, of the extra [demo]")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        places = ("--data-dir", str(Path(folder, "data")), "--output-dir", str(output))
        run = _on_the_simulator if simulated else _on_the_gpu
        shown = run(["demo", *places, *SIZES[form]])
        reports = sorted(output.rglob("report.json"), key=lambda report: report.stat().st_mtime)
        runs = [_run(report.parent) for report in reports]
    result: dict[str, Any] = {"runs": runs, "output": shown.splitlines(), "checks": {}}
    _judge(result)
    return result


def _on_the_gpu(arguments: Sequence[str]) -> str:
    command = [sys.executable, "-m", "lightning_gpuopt", *arguments, "--accelerator", "gpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the demo ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def _on_the_simulator(arguments: Sequence[str]) -> str:
    every = partial(GpuUtilMonitor, devices="all")
    shown = io.StringIO()
    monitored = mock.patch.object(demo_training, "GpuUtilMonitor", every)
    with simulated_nvml(Gpu()), monitored, contextlib.redirect_stdout(shown):
        code = main([*arguments, "--accelerator", "cpu"])
    if code:
        raise RuntimeError(f"the demo ended with exit code {code}")
    return shown.getvalue()


def _run(folder: Path) -> dict[str, Any]:
    """What one training of the demo left in its folder."""
    report = json.loads((folder / "report.json").read_text())
    run = {"folder": folder.name, **{name: report.get(name) for name in ("verdict", "steps", "step_s", "gpu_idle_s")}}
    metrics = folder / "metrics.csv"
    rows = list(csv.DictReader(metrics.open())) if metrics.exists() else []
    readings = [float(value) for row in rows for key, value in row.items() if key.endswith(UTILIZATION) and value]
    if readings:
        run["gpu_utilization_percent"] = statistics.mean(readings)
    return run


def _judge(result: dict[str, Any]) -> None:
    first, last = result["runs"][0], result["runs"][-1]
    before, after = (run.get("gpu_utilization_percent") for run in (first, last))
    result["before_percent"], result["after_percent"] = before, after
    checks = result["checks"]
    checks["the demo finds something to change"] = last is not first
    if before is None or after is None:
        result["left_out"] = {"utilization": "the monitor logged no GPU"}
        return
    checks[f"GPU utilization of {before:.0f} % before the advice, at most {BEFORE_PERCENT:.0f} %"] = (
        before <= BEFORE_PERCENT
    )
    checks[f"GPU utilization of {after:.0f} % after it, at least {AFTER_PERCENT:.0f} %"] = after >= AFTER_PERCENT
    if last is not first and first["step_s"] and last["step_s"]:
        gain = first["step_s"] / last["step_s"]
        checks[f"a step is {gain:.2f} times as fast after it, more than 1.1 times"] = gain > 1.1
