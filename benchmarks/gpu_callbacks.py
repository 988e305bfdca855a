"""The event clock and the callbacks beside a GPU that is kept busy, for ``benchmarks/gpu.py``."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gpu_devices import Device
from gpu_parts import Busy, Form, Samples, keep, new_detector, quiet_trainer
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import GpuUtilMonitor, NumWorkersFinder
from tests.gpu.clock_rig import HOOK, ClockRig

IDLE_GAP_TOLERANCE = 0.05


def event_clock(device: Device, form: Form) -> dict[str, Any]:
    """The idle gap that the event clock sees, against a host sleep put there on purpose."""
    load = device.load()
    steps = 8 if form == "trial" else 40
    work = load.times_for(5.0)
    result: dict[str, Any] = {"injected": {}, "checks": {}}
    for sleep_ms in (2.0, 5.0, 20.0, 50.0):
        rig = ClockRig()
        drained: list[float] = []
        slept: list[float] = []
        launched: list[float] = []

        def sleep(sleep_ms: float = sleep_ms, slept: list[float] = slept, drained: list[float] = drained) -> None:
            torch.cuda.synchronize()  # the benchmark's own, so that the sleep is the whole gap
            drained.append(time.perf_counter())
            time.sleep(sleep_ms / 1e3)
            slept.append(time.perf_counter() - drained[-1])

        def compute(launched: list[float] = launched, drained: list[float] = drained) -> None:
            launched.append(time.perf_counter())
            load.run(work)

        for _ in range(steps):
            rig.step(compute, hook=sleep)
        times = rig.finish(steps)
        # a gap ends with the next step's first kernel: what the host does until then is idle time, too
        gaps = [*(end - begin for begin, end in zip(drained, launched[1:], strict=False)), slept[-1]]
        gap_ms, slept_ms = (statistics.mean(each) * 1e3 for each in (gaps, slept))
        seen_ms = times.idle_s / times.steps * 1e3
        hook_ms = times.idle.get(HOOK, 0.0) / times.steps * 1e3
        result["injected"][str(sleep_ms)] = {
            "slept_ms": slept_ms,
            "gap_ms": gap_ms,
            "idle_gap_ms": seen_ms,
            "attributed_to_the_hook_ms": hook_ms,
            "relative_error": seen_ms / gap_ms - 1,
        }
        if sleep_ms >= 5.0:
            for what, ms, truth_ms in (
                ("idle gap", seen_ms, gap_ms),
                ("idle time attributed to the hook", hook_ms, slept_ms),
            ):
                claim = f"{what} of {sleep_ms:.0f} ms within {IDLE_GAP_TOLERANCE:.0%}"
                result["checks"][claim] = abs(ms / truth_ms - 1) <= IDLE_GAP_TOLERANCE
    rig, steps = ClockRig(), 2 * steps
    for _ in range(steps):
        rig.step(lambda: load.run(work), fetch=lambda: time.sleep(0.001))
    times = rig.finish(steps)
    idle_ms = times.idle_s / times.steps * 1e3
    result["host_ahead"] = {"idle_ms_per_step": idle_ms, "steps": times.steps}
    # before the first step's work there is nothing to run ahead of
    result["checks"]["a host that runs ahead leaves less than 0.1 ms idle a step"] = idle_ms < 0.1
    return result


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


def timed_fit(
    device: Device, model: LightningModule, steps: int, callbacks: list[Callback]
) -> tuple[list[float], str | None]:
    """Step times of a run in which CUDA refuses to synchronize, and its words if something tried."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(
            folder, [watch, *callbacks], max_steps=steps, log_every_n_steps=50, **device.trainer_arguments()
        )
        try:
            trainer.fit(model, DataLoader(Samples(steps)))
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
    "detector": lambda: [new_detector()],
    "both": lambda: [GpuUtilMonitor(), new_detector()],
}


class LaunchBound(Busy):
    """A step of kernels that are shorter than their launch: what the host does comes on top."""

    def __init__(self, device: Device, host_ms: float) -> None:
        super().__init__(device, 0)
        self.host_ms = host_ms

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.load[0].tiny(self.host_ms)
        return self.layer(batch).mean()


OVERHEAD_RUNS: dict[Form, tuple[tuple[str, float, int, int], ...]] = {
    "full": (("GPU-bound", 5.0, 400, 4), ("GPU-bound", 50.0, 120, 2), ("launch-bound", 5.0, 400, 8)),
    "quick": (("GPU-bound", 5.0, 300, 2), ("GPU-bound", 50.0, 40, 1), ("launch-bound", 5.0, 150, 6)),
    "trial": (("GPU-bound", 5.0, 20, 1), ("launch-bound", 5.0, 20, 1)),
}
"""What bounds the step, about how many milliseconds it takes, steps, rounds."""


def overhead(device: Device, form: Form) -> dict[str, Any]:
    """Step times with the callbacks against an empty one, with CUDA refusing any synchronize."""
    load = device.load()
    result: dict[str, Any] = {"median_step_ms": {}, "extra_us": {}, "checks": {}}
    for bound, ms, steps, rounds in OVERHEAD_RUNS[form]:
        samples: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
        for turn in range(rounds):
            names = list(CONFIGURATIONS)
            for name in names if turn % 2 == 0 else reversed(names):
                model = Busy(load, load.times_for(ms)) if bound == "GPU-bound" else LaunchBound(device, ms)
                times, refused = timed_fit(device, model, steps, CONFIGURATIONS[name]())
                samples[name] += times
                claim = f"no synchronize with {name} in {bound} steps of {ms:.0f} ms"
                result["checks"][claim] = result["checks"].get(claim, True) and refused is None
                if refused is not None:
                    result.setdefault("refused", {})[claim] = refused
        medians = {name: statistics.median(times) * 1e3 for name, times in samples.items() if times}
        what = f"{bound}, {ms:.0f} ms"
        result["median_step_ms"][what] = medians
        if "empty" in medians:
            result["extra_us"][what] = {name: (each - medians["empty"]) * 1e3 for name, each in medians.items()}
        if {"empty", "both"} <= medians.keys() and bound == "GPU-bound":
            slower = medians["both"] / medians["empty"] - 1
            result["checks"][f"both callbacks cost less than 1 % of a step of {ms:.0f} ms"] = slower < 0.01
        keep(result)
    return result


def detector_idle(device: Device, form: Form) -> dict[str, Any]:
    """StallDetector on a real run whose loader sleeps: its GPU idle time against what was put there."""
    load = device.load()
    result: dict[str, Any] = {"runs": {}, "checks": {}}
    for sleep_ms, compute_ms in ((0.0, 10.0), (20.0, 10.0), (40.0, 10.0), (5.0, 40.0)):
        steps = 24 if form == "trial" else 100
        detector = new_detector(warmup_steps=10)
        with tempfile.TemporaryDirectory() as folder:
            trainer = quiet_trainer(folder, [detector], max_steps=steps, **device.trainer_arguments())
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
        keep(result)
    return result


class OneRow(Busy):
    """Uses a little of a large batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch.flatten()[:8], batch_idx)


class LargeSamples(Samples):
    """Samples of 64 MiB, in ordinary memory."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.sample = torch.zeros(16, 2**20)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def causes(device: Device, form: Form) -> dict[str, Any]:
    """StallDetector's verdict on a healthy run and on large copies; section ``stalls`` has the other causes."""
    load = device.load()
    steps = 30 if form == "trial" else 120
    result: dict[str, Any] = {"runs": {}, "checks": {}}
    runs: dict[str, tuple[LightningModule, Dataset[torch.Tensor]]] = {
        "compute_bound": (Busy(load, load.times_for(10.0)), Samples(steps)),
        "host_to_device": (OneRow(load, load.times_for(5.0)), LargeSamples(steps)),
    }
    for expected, (model, data) in runs.items():
        detector = new_detector(warmup_steps=10, window_size=25)
        with tempfile.TemporaryDirectory() as folder:
            # handed over as it is: collating would copy the large samples on the host first
            trainer = quiet_trainer(folder, [detector], max_steps=steps, **device.trainer_arguments())
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
        keep(result)
    return result


def workers(device: Device, form: Form) -> dict[str, Any]:
    """NumWorkersFinder beside a GPU that works behind the training loop: workers are added where they help."""
    load = device.load()
    steps = 48 if form == "trial" else 160
    result: dict[str, Any] = {"runs": {}, "checks": {}}
    for name, ms in (("fast", 5.0), ("slow", 40.0)):
        finder, watch = NumWorkersFinder(), Stopwatch()
        with tempfile.TemporaryDirectory() as folder:
            trainer = quiet_trainer(folder, [finder, watch], max_steps=steps, **device.trainer_arguments())
            data = DataLoader(Samples(steps + 40, sleep_s=0.02), batch_size=None, num_workers=1, pin_memory=True)
            trainer.fit(Busy(load, load.times_for(ms)), data)
        step_ms = statistics.median(watch.step_s()[3 * steps // 8 :]) * 1e3
        result["runs"][name] = {
            "gpu_ms": ms,
            "step_ms": step_ms,
            "num_workers": finder.optimal_num_workers,
            "limited_by": finder.choices[0].limited_by if 0 in finder.choices else None,
            "trials": [(each.num_workers, each.batches_per_s, each.data_wait_s) for each in finder.trials],
        }
    fast, slow = result["runs"]["fast"], result["runs"]["slow"]
    result["checks"]["a fast GPU gets more workers, and waits no more"] = (
        fast["num_workers"] > 1 and fast["step_ms"] <= 1.25 * fast["gpu_ms"]
    )
    result["checks"]["a GPU that is the bottleneck keeps its one worker"] = slow["num_workers"] == 1
    return result
