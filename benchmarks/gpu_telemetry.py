"""Readings of GPUs beside ``nvidia-smi``'s, for ``benchmarks/gpu.py``."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_devices import simulated_nvml
from gpu_parts import Form, Load, Samples, Skip, quiet_trainer
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_gpuopt import GpuUtilMonitor
from tests.simulators.nvml import MIB, Gpu

SMI_FIELDS = {
    "utilization": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "power_w": "power.draw.instant",
    "temperature_c": "temperature.gpu",
    "sm_clock_mhz": "clocks.current.sm",
}


def nvidia_smi(uuid: str) -> dict[str, float]:
    """What nvidia-smi shows now; a field that it does not have is left out."""
    readings: dict[str, float] = {}
    for name, field in SMI_FIELDS.items():
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", uuid]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        try:
            readings[name] = float(answer)
        except ValueError:
            continue
    return readings


class KeepBusy(threading.Thread):
    """Keeps the GPU busy for a share of the time until it is told to stop."""

    def __init__(self, load: Load, duty: float) -> None:
        super().__init__(daemon=True)
        self.load, self.duty, self.halt = load, duty, threading.Event()

    def run(self) -> None:
        period_ms = 20.0
        while not self.halt.is_set():
            begin = time.perf_counter()
            if self.duty > 0:
                self.load.run(self.load.times_for(period_ms * self.duty))
                torch.cuda.synchronize()
            time.sleep(max(0.0, period_ms / 1e3 - (time.perf_counter() - begin)))


def monitored(seconds: float, read: Callable[[], dict[str, float]]) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The monitor's summary of a stretch, and somebody else's readings in it."""
    smi: list[dict[str, float]] = []

    class Wait(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                smi.append(read())
            return self.layer(batch.to(self.device)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    monitor = GpuUtilMonitor(metrics="all", devices="all")
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, [monitor], max_steps=1, accelerator="cpu").fit(Wait(), DataLoader(Samples(1)))
    return {key.removeprefix("gpu/0/"): value for key, value in monitor.summary().items()}, smi


TRUTH = Gpu(utilization=37, memory_used=3000 * MIB, power=250_000, temperature=55, sm_clock=1410)
"""The simulated GPU's readings, in NVML's units."""


def simulated_telemetry() -> dict[str, Any]:
    """The monitor over the NVML simulator, whose figures are known."""
    with simulated_nvml(TRUTH):
        ours, theirs = monitored(1.0, dict)
    del theirs
    known = {"utilization": 37.0, "memory_used_mib": 3000.0, "power_w": 250.0, "temperature_c": 55.0}
    known |= {"sm_clock_mhz": 1410.0}
    checks = {f"{name}: {value} as NVML gives it": ours.get(name) == value for name, value in known.items()}
    return {"ours": ours, "nvml": known, "checks": checks}


def telemetry(form: Form) -> dict[str, Any]:
    """NVML and GPM readings beside nvidia-smi's, at rest, at half load and at full load."""
    if shutil.which("nvidia-smi") is None:
        raise Skip("nvidia-smi is not on the PATH")
    load = Load()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".replace("GPU-GPU-", "GPU-")
    result: dict[str, Any] = {"user": "root" if os.geteuid() == 0 else "not root", "duty": {}, "checks": {}}
    for duty in (0.0, 0.5, 1.0):
        busy = KeepBusy(load, duty)
        busy.start()
        time.sleep(2.0)  # NVML averages over up to a second
        ours, smi = monitored(6.0 if form == "full" else 4.0, partial(nvidia_smi, uuid))
        busy.halt.set()
        busy.join()
        shown = {name: [each[name] for each in smi if name in each] for name in SMI_FIELDS}
        theirs = {name: statistics.mean(values) for name, values in shown.items() if values}
        result["duty"][str(duty)] = {"ours": ours, "nvidia_smi": theirs}
        allowed = {"utilization": 5.0, "memory_used_mib": 16.0, "temperature_c": 2.0}
        for name, most in allowed.items():
            if name in ours and name in theirs:
                result["checks"][f"{name} at duty {duty} within {most} of nvidia-smi"] = (
                    abs(ours[name] - theirs[name]) <= most
                )
    gpm = [name for name in ("sm_activity", "tensor_activity", "dram_activity") if name in ours]
    result["gpm_metrics"] = gpm
    if gpm:
        at_rest = result["duty"]["0.0"]["ours"]["sm_activity"]
        half, full = (result["duty"][duty]["ours"]["sm_activity"] for duty in ("0.5", "1.0"))
        result["checks"]["sm_activity: at rest < half load < full load"] = at_rest < half < full
    return result


_READ_GPM = """
import json, time
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
answer = {}
try:
    answer["supported"] = bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)
    first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    pynvml.nvmlGpmSampleGet(handle, first)
    time.sleep(0.2)
    pynvml.nvmlGpmSampleGet(handle, second)
    get = pynvml.c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics, get.sample1, get.sample2 = pynvml.NVML_GPM_METRICS_GET_VERSION, 1, first, second
    get.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
    pynvml.nvmlGpmMetricsGet(get)
    answer["metric_return"] = get.metrics[0].nvmlReturn
    answer["works"] = get.metrics[0].nvmlReturn == 0
except pynvml.NVMLError as error:
    answer["works"], answer["error"] = False, str(error)
pynvml.nvmlShutdown()
print(json.dumps(answer))
"""


def gpm_without_root(*, simulated: bool = False) -> dict[str, Any]:
    """Whether GPM answers a user who is not root.

    Args:
        simulated: ask the NVML simulator.
    """
    if os.geteuid() != 0:
        raise Skip("only root can become somebody else to try it")
    nobody = 65534

    def become_nobody() -> None:
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)

    environment = dict(os.environ)
    if simulated:
        with simulated_nvml(TRUTH) as simulator:
            environment = simulator.environment()
    answers: dict[str, Any] = {}
    for who, before in (("root", None), ("nobody", become_nobody)):
        run = subprocess.run(
            [sys.executable, "-c", _READ_GPM],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            preexec_fn=before,
            env=environment,
        )
        try:
            answers[who] = json.loads(run.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            answers[who] = {"works": None, "error": run.stderr.strip().splitlines()[-1:]}
    return {"answers": answers, "checks": {}}
