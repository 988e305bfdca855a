"""One rank of DDP runs under StallDetector on a simulated GPU."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import StallDetector
from lightning_gpuopt.detector.kernel_profiling import Profile
from lightning_gpuopt.diagnosis import waterfall
from tests.simulators.gpu import SimulatedGpu, SimulatedModule, Step, Work, simulated_gpu
from tests.simulators.nvml import Simulator
from tests.standstill import Standstill

RANK = int(os.environ.get("RANK", "0"))
WARMUP_STEPS = 5


class Samples(Dataset[torch.Tensor]):
    """Each takes its time, as from a disk."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(4)


class Bar(Callback):
    """Reads a value from the GPU after every step, as a progress bar does."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu

    def on_train_batch_end(self, *args: Any) -> None:
        self.gpu.item()


def step(forward_s: float = 0.02, buckets: int = 2) -> Step:
    return Step(
        forward=Work(forward_s, kernels=4, host_s=0.004),
        backward=Work(0.04, kernels=8, host_s=0.008),
        all_reduce_s=(0.002,) * buckets,
    )


def cases(gpu: SimulatedGpu) -> dict[str, tuple[SimulatedModule, list[Callback]]]:
    """What is run, by the name that a test asks for."""

    def module(work: Step, sample_s: float = 0.0) -> SimulatedModule:
        model = SimulatedModule(gpu, work)
        model.train_dataloader = lambda: DataLoader(Samples(sample_s), batch_size=2)  # type: ignore[method-assign]
        return model

    class Gathers(SimulatedModule):
        """A small collective in the forward, as ``sync_dist=True`` puts there."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.gpu.all_reduce(0.0005)
            self.gpu.wait_all_reduce()
            return super().training_step(batch, batch_idx)

    gathers = Gathers(gpu, step())
    seconds = 0.015 if RANK == 1 else 0.0
    gathers.train_dataloader = lambda: DataLoader(Samples(seconds), batch_size=2)  # type: ignore[method-assign]
    return {
        "gathers_slow_data": (gathers, []),
        "gathers_slow_gpu": (Gathers(gpu, step(0.05 if RANK == 1 else 0.02), batches=1000), []),
        "healthy": (module(step()), []),
        # the host issues for half of the step
        "suspect": (module(Step(Work(0.02, kernels=4, host_s=0.012), Work(0.04, kernels=8, host_s=0.024))), [Bar(gpu)]),
        "bar": (module(step()), [Bar(gpu)] if RANK == 0 else []),
        "loader": (module(step(), sample_s=0.012), []),
        "slow_gpu": (module(step(0.05 if RANK == 1 else 0.02)), []),
        "slow_data": (module(step(), sample_s=0.015 if RANK == 1 else 0.0), []),
        "communication": (module(Step(Work(0.02), Work(0.02), all_reduce_s=(0.03,))), []),
    }


def run(
    name: str, profile: Profile, nvml_library: str | None = None, nvml_scenario: str | None = None
) -> dict[str, Any]:
    """What this rank's report says.

    Args:
        name: of the case.
        profile: of StallDetector.
        nvml_library: the built NVML simulator, where there is one.
        nvml_scenario: its scenario's file.
    """
    warnings.simplefilter("ignore")
    if nvml_library is not None and nvml_scenario is not None:
        Simulator(Path(nvml_library), Path(nvml_scenario))
        waterfall.ENOUGH_S = 1.0  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder, simulated_gpu(copy_s=0.0002) as gpu, Standstill() as standstill:
        model, callbacks = cases(gpu)[name]
        report_dir = Path(folder)
        detector = StallDetector(
            on_stall="ignore",
            window_size=20,
            warmup_steps=WARMUP_STEPS,
            report_dir=report_dir,
            profile=profile,
        )
        Trainer(
            **gpu.trainer_arguments(),
            max_steps=WARMUP_STEPS + 45,
            max_epochs=-1,
            callbacks=[detector, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
        ).fit(model)
    report = detector.report
    return {
        "verdict": report.verdict,
        "findings": [[each.cause, round(each.share, 3), each.evidence] for each in report.findings],
        "step_s": report.step_s,
        "idle_s": report.gpu_idle_s,
        "notes": report.notes,
        "stood_still_s": standstill.longest_s,
        "profiler_on": torch.autograd._profiler_enabled(),  # type: ignore[attr-defined]
    }
