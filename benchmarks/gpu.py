"""Check and measure, on a machine with an NVIDIA GPU, everything this project claims about GPUs.

    python benchmarks/gpu.py [--output DIR] [--only SECTION ...]

Each section writes its figures into ``benchmarks/results/<gpu-name>.json`` as it ends, with a verdict for each claim. A
section whose package is missing is skipped with a word. Takes less than nine minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from lightning_gpuopt import GpuUtilMonitor, NumWorkersFinder, StallDetector  # noqa: E402
from lightning_gpuopt.timeline.gpu_clock import GpuClock  # noqa: E402

IDLE_GAP_TOLERANCE = 0.05
SIZE = 4096


class Skip(Exception):
    """Why a section cannot run here."""


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class Load:
    """Matrix products that keep the GPU busy for a given time, issued without waiting."""

    def __init__(self) -> None:
        self.a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)
        self.run(20)
        torch.cuda.synchronize()
        start = new_event()
        end = new_event()
        start.record()
        self.run(50)
        end.record()
        end.synchronize()
        self.ms_each = start.elapsed_time(end) / 50

    def run(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.a, self.a, out=self.out)

    def times_for(self, ms: float) -> int:
        return max(1, round(ms / self.ms_each))


# --- Telemetry against nvidia-smi ------------------------------------------------------------------------------------

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


def monitored(seconds: float, uuid: str) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The monitor's summary of a stretch, and nvidia-smi's readings in it."""
    smi: list[dict[str, float]] = []

    class Wait(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                smi.append(nvidia_smi(uuid))
            return self.layer(batch.to(self.device)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    monitor = GpuUtilMonitor(metrics="all", devices="all")
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, [monitor], max_steps=1, accelerator="cpu").fit(Wait(), DataLoader(Samples(1)))
    return {key.removeprefix("gpu/0/"): value for key, value in monitor.summary().items()}, smi


def telemetry() -> dict[str, Any]:
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
        ours, smi = monitored(6.0, uuid)
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


def gpm_without_root() -> dict[str, Any]:
    """Whether GPM answers a user who is not root."""
    if os.geteuid() != 0:
        raise Skip("only root can become somebody else to try it")
    nobody = 65534

    def become_nobody() -> None:
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)

    answers: dict[str, Any] = {}
    for who, before in (("root", None), ("nobody", become_nobody)):
        run = subprocess.run(
            [sys.executable, "-c", _READ_GPM],
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            preexec_fn=before,
        )
        try:
            answers[who] = json.loads(run.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            answers[who] = {"works": None, "error": run.stderr.strip().splitlines()[-1:]}
    return {"answers": answers, "checks": {}}


# --- The event clock -------------------------------------------------------------------------------------------------


def event_clock() -> dict[str, Any]:
    """The idle gap that the event clock sees, against a host sleep put there on purpose."""
    load = Load()
    work = load.times_for(5.0)
    result: dict[str, Any] = {"injected": {}, "checks": {}}
    for sleep_ms in (2.0, 5.0, 20.0, 50.0):
        clock = GpuClock(new_event)
        slept: list[float] = []
        for _ in range(40):
            clock.batch_arrives()
            clock.compute_begins()
            load.run(work)
            clock.compute_ends()
            torch.cuda.synchronize()  # the benchmark's own, so that the sleep is the whole gap
            begin = time.perf_counter()
            time.sleep(sleep_ms / 1e3)
            slept.append(time.perf_counter() - begin)
            clock.read()
        torch.cuda.synchronize()
        clock.read(most_steps=100)
        times = clock.times()
        truth_ms = statistics.mean(slept[:-1]) * 1e3
        seen_ms = times.idle_s / times.gaps * 1e3
        result["injected"][str(sleep_ms)] = {
            "slept_ms": truth_ms,
            "idle_gap_ms": seen_ms,
            "relative_error": seen_ms / truth_ms - 1,
        }
        if sleep_ms >= 5.0:
            result["checks"][f"idle gap of {sleep_ms:.0f} ms within {IDLE_GAP_TOLERANCE:.0%}"] = (
                abs(seen_ms / truth_ms - 1) <= IDLE_GAP_TOLERANCE
            )
    clock = GpuClock(new_event)
    for _ in range(100):
        time.sleep(0.001)
        clock.batch_arrives()
        clock.compute_begins()
        load.run(work)
        clock.compute_ends()
        clock.read()
    torch.cuda.synchronize()
    clock.read(most_steps=200)
    times = clock.times()
    result["host_ahead"] = {"idle_ms_per_step": times.idle_s / times.gaps * 1e3, "gaps": times.gaps}
    result["checks"]["a host that runs ahead leaves less than 0.1 ms idle a step"] = times.idle_s / times.gaps < 1e-4
    return result


# --- Callbacks in a Trainer ------------------------------------------------------------------------------------------


class Samples(Dataset[torch.Tensor]):
    def __init__(self, length: int, sleep_s: float = 0.0) -> None:
        self.length, self.sleep_s = length, sleep_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return torch.zeros(8)


class Busy(LightningModule):
    """A step of so many matrix products, without a single wait for the GPU."""

    def __init__(self, load: Load, products: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.load, self.products = [load], products

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.load[0].run(self.products)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet_trainer(folder: str, callbacks: list[Callback], **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "gpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "callbacks": callbacks,
    }
    return Trainer(**{**defaults, **kwargs})


class Stopwatch(Callback):
    """Time from step to step, and CUDA's refusal of any synchronize while training runs."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.times) == 5:
            torch.cuda.set_sync_debug_mode("error")
        self.times.append(time.perf_counter())

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def step_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times[10:], self.times[11:], strict=False)]


def timed_fit(load: Load, ms: float, steps: int, callbacks: list[Callback]) -> tuple[list[float], str | None]:
    """Step times of a run in which CUDA refuses to synchronize, and its words if something tried."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(folder, [watch, *callbacks], max_steps=steps, log_every_n_steps=50)
        try:
            trainer.fit(Busy(load, load.times_for(ms)), DataLoader(Samples(steps)))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return watch.step_s(), str(error).splitlines()[0]
    torch.cuda.synchronize()
    return watch.step_s(), None


CONFIGURATIONS: dict[str, Callable[[], list[Callback]]] = {
    "none": list,
    "empty": lambda: [Callback()],
    "monitor": lambda: [GpuUtilMonitor()],
    "detector": lambda: [StallDetector(on_stall="ignore")],
    "both": lambda: [GpuUtilMonitor(), StallDetector(on_stall="ignore")],
}


def overhead() -> dict[str, Any]:
    """Step times with the callbacks against an empty one, with CUDA refusing any synchronize."""
    load = Load()
    result: dict[str, Any] = {"median_step_ms": {}, "checks": {}}
    for ms, steps, rounds in ((5.0, 400, 4), (50.0, 120, 2)):
        samples: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
        for turn in range(rounds):
            names = list(CONFIGURATIONS)
            for name in names if turn % 2 == 0 else reversed(names):
                times, refused = timed_fit(load, ms, steps, CONFIGURATIONS[name]())
                samples[name] += times
                claim = f"no synchronize with {name} at {ms:.0f} ms"
                result["checks"][claim] = result["checks"].get(claim, True) and refused is None
                if refused is not None:
                    result.setdefault("refused", {})[claim] = refused
        medians = {name: statistics.median(times) * 1e3 for name, times in samples.items() if times}
        result["median_step_ms"][str(ms)] = medians
        if "empty" in medians and "both" in medians:
            slower = medians["both"] / medians["empty"] - 1
            result["checks"][f"both callbacks cost less than 1 % of a step of {ms:.0f} ms"] = slower < 0.01
    return result


def detector_idle() -> dict[str, Any]:
    """StallDetector on a real run whose loader sleeps: its GPU idle time against what was put there."""
    load = Load()
    result: dict[str, Any] = {"runs": {}, "checks": {}}
    for sleep_ms, compute_ms in ((0.0, 10.0), (20.0, 10.0), (40.0, 10.0), (5.0, 40.0)):
        steps = 100
        detector = StallDetector(on_stall="ignore", warmup_steps=10)
        with tempfile.TemporaryDirectory() as folder:
            trainer = quiet_trainer(folder, [detector], max_steps=steps)
            trainer.fit(Busy(load, load.times_for(compute_ms)), DataLoader(Samples(steps, sleep_ms / 1e3)))
        report = detector.report
        idle_ms = (report.gpu_idle_s or 0.0) / (steps - 10) * 1e3
        name = f"loader {sleep_ms:.0f} ms, compute {compute_ms:.0f} ms"
        result["runs"][name] = {
            "verdict": report.verdict,
            "gpu_idle_ms_per_step": idle_ms,
            "step_ms": (report.step_s or 0.0) * 1e3,
            "phases": report.phases,
        }
        stalls = sleep_ms > compute_ms
        expected = "main_process_loading" if stalls else "compute_bound"
        result["checks"][f"{name}: {expected}"] = report.verdict == expected
    return result


class Injected(Busy):
    """A step with one thing wrong with it."""

    def __init__(self, load: Load, products: int, fault: str) -> None:
        super().__init__(load, products)
        self.fault = fault
        self.small = [torch.zeros(8, device="cuda")]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch = batch[0] if isinstance(batch, (list, tuple)) else batch
        if self.fault == "launch_bound":
            for _ in range(2000):  # each far quicker than its launch
                self.small[0].add_(1.0)
        elif self.fault == "gpu_sync":
            for _ in range(self.products):
                self.load[0].run(1)
                self.small[0].sum().item()
                time.sleep(0.0005)  # what the host does with the number, while the GPU has nothing to do
        else:
            self.load[0].run(self.products)
        return self.layer(batch.flatten()[:8].float()).mean()


class LargeSamples(Samples):
    """Samples of 64 MiB, in ordinary memory."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.sample = torch.zeros(16, 2**20)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def causes() -> dict[str, Any]:
    """StallDetector's verdict on faults that only a GPU can have."""
    load = Load()
    result: dict[str, Any] = {"runs": {}, "checks": {}}
    work = load.times_for(10.0)
    runs: dict[str, tuple[LightningModule, Dataset[torch.Tensor]]] = {
        "compute_bound": (Busy(load, work), Samples(120)),
        "launch_bound": (Injected(load, 0, "launch_bound"), Samples(120)),
        "gpu_sync": (Injected(load, work, "gpu_sync"), Samples(120)),
        "host_to_device": (Injected(load, load.times_for(5.0), "host_to_device"), LargeSamples(120)),
    }
    for expected, (model, data) in runs.items():
        detector = StallDetector(on_stall="ignore", warmup_steps=10, window_size=25)
        with tempfile.TemporaryDirectory() as folder:
            # handed over as it is: collating would copy the large samples on the host first
            trainer = quiet_trainer(folder, [detector], max_steps=120)
            trainer.fit(model, DataLoader(data, batch_size=None))
        report = detector.report
        result["runs"][expected] = {
            "verdict": report.verdict,
            "findings": {finding.cause: finding.share for finding in report.findings},
            "evidence": report.findings[0].evidence if report.findings else {},
            "notes": report.notes,
            "step_ms": (report.step_s or 0.0) * 1e3,
        }
        result["checks"][f"verdict {expected}"] = report.verdict == expected
    return result


def workers() -> dict[str, Any]:
    """NumWorkersFinder beside a GPU that works behind the training loop: workers are added where they help."""
    load = Load()
    result: dict[str, Any] = {"runs": {}, "checks": {}}
    for name, ms in (("fast", 5.0), ("slow", 40.0)):
        finder, watch = NumWorkersFinder(), Stopwatch()
        with tempfile.TemporaryDirectory() as folder:
            trainer = quiet_trainer(folder, [finder, watch], max_steps=160)
            data = DataLoader(Samples(200, sleep_s=0.02), batch_size=None, num_workers=1, pin_memory=True)
            trainer.fit(Busy(load, load.times_for(ms)), data)
        step_ms = statistics.median(watch.step_s()[60:]) * 1e3
        result["runs"][name] = {
            "gpu_ms": ms,
            "step_ms": step_ms,
            "num_workers": finder.optimal_num_workers,
            "limited_by": finder.choices[0].limited_by,
            "trials": [(each.num_workers, each.batches_per_s, each.data_wait_s) for each in finder.trials],
        }
    fast, slow = result["runs"]["fast"], result["runs"]["slow"]
    result["checks"]["a fast GPU gets more workers, and waits no more"] = (
        fast["num_workers"] > 1 and fast["step_ms"] <= 1.25 * fast["gpu_ms"]
    )
    result["checks"]["a GPU that is the narrow place keeps its one worker"] = slow["num_workers"] == 1
    return result


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "telemetry": telemetry,
    "gpm_without_root": gpm_without_root,
    "event_clock": event_clock,
    "detector_idle": detector_idle,
    "causes": causes,
    "overhead": overhead,
    "workers": workers,
}


def environment() -> dict[str, str]:
    versions = {}
    for package in ("torch", "lightning", "torchmetrics", "nvidia-ml-py"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    driver = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(len(os.sched_getaffinity(0))),
        **versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every claim about GPUs on this machine's GPU.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the result")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a CUDA GPU and a CUDA build of torch, found none", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"environment": environment(), "sections": {}}
    name = re.sub(r"[^a-z0-9]+", "-", results["environment"]["gpu"].lower()).strip("-")
    target = arguments.output / f"{name}.json"
    arguments.output.mkdir(parents=True, exist_ok=True)
    failed = 0
    for section in arguments.only:
        begin = time.perf_counter()
        try:
            outcome = SECTIONS[section]()
        except Skip as reason:
            outcome = {"skipped": str(reason)}
        except ImportError as error:
            outcome = {"skipped": f"missing: {error.name}"}
        except Exception as error:  # the other sections still have something to say
            outcome = {"error": f"{type(error).__name__}: {error}", "checks": {"ran": False}}
        outcome["seconds"] = round(time.perf_counter() - begin, 1)
        results["sections"][section] = outcome
        target.write_text(json.dumps(results, indent=2) + "\n")
        print(f"{section} ({outcome['seconds']} s) {outcome.get('skipped') or outcome.get('error') or ''}", flush=True)
        for claim, held in outcome.get("checks", {}).items():
            failed += not held
            print(f"  {'ok  ' if held else 'FAIL'} {claim}", flush=True)
    print(f"written to {target}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
