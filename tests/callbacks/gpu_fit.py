"""A fit on a simulated GPU under StallDetector."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_gpuopt import StallDetector, StallReport
from lightning_gpuopt.detector.kernel_profiling import Profile
from tests.callbacks.gpu_rank import Samples
from tests.simulators.gpu import NvmlFollower, SimulatedGpu, SimulatedModule, Step, Work
from tests.simulators.nvml import Simulator
from tests.simulators.simulated_time import SimulatedTime

STEPS, WARMUP_STEPS = 45, 5
STEP = Step(Work(0.01, kernels=4, host_s=0.002), Work(0.02, kernels=4, host_s=0.002))
MANY_KERNELS = Step(Work(0.004, kernels=20, host_s=0.016), Work(0.004, kernels=20, host_s=0.016))


def follow(gpu: SimulatedGpu, nvml: Simulator, clock: SimulatedTime) -> None:
    """Let NVML's figures be what the device does."""
    follower = NvmlFollower(gpu.ledger, clock, nvml)
    follower.update()
    clock.every(0.05, follower.update)


class Stretch(Callback):
    """When the first and the last step after the warm-up ended, by the host's clock."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


class At(Callback):
    """Calls a function in one hook."""

    def __init__(self, hook: str, function: Callable[[], object]) -> None:
        setattr(self, hook, lambda *args: function() and None)


def fit(
    gpu: SimulatedGpu,
    folder: Path,
    model: SimulatedModule,
    *callbacks: Callback,
    steps: int = STEPS,
    detector: StallDetector | None = None,
    profile: Profile = "auto",
    **trainer: Any,
) -> StallReport:
    detector = detector or StallDetector(
        on_stall="ignore", window_size=20, warmup_steps=WARMUP_STEPS, report_dir=folder, profile=profile
    )
    defaults: dict[str, Any] = {
        "max_steps": steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "default_root_dir": folder,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(**gpu.trainer_arguments(), callbacks=[*callbacks, detector], **(defaults | trainer)).fit(model)
    return detector.report


def module(gpu: SimulatedGpu, step: Step = STEP, *, sample_s: float | None = None, workers: int = 0) -> SimulatedModule:
    model = SimulatedModule(gpu, step, batches=10_000)
    if sample_s is not None:
        loader = DataLoader(Samples(sample_s), batch_size=2, num_workers=workers, persistent_workers=workers > 0)
        model.train_dataloader = lambda: loader  # type: ignore[method-assign]
    return model


def causes(report: StallReport) -> list[str]:
    return [finding.cause for finding in report.findings]
