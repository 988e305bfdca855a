"""One rank of DDP runs under GpuUtilMonitor on the CPU."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pynvml

from lightning_gpuopt import GpuUtilMonitor
from tests.helpers import RecordingLogger, TinyModel, tiny_trainer, wait_for
from tests.simulators.nvml import Simulator, error

LAST_CALL = "nvmlDeviceGetUtilizationRates"


def fit(simulator: Simulator, devices: Any, max_steps: int = 4, lose_at: int | None = None) -> dict[str, Any]:
    def in_step(batch_idx: int) -> None:
        if batch_idx == lose_at:
            simulator.now(error("*", pynvml.NVML_ERROR_GPU_IS_LOST, device=1))
        begun = simulator.calls(LAST_CALL)
        wait_for(lambda: simulator.calls(LAST_CALL) >= begun + 4 or not simulator.references)

    model = TinyModel()
    model.in_step = in_step  # type: ignore[method-assign]
    logger = RecordingLogger()
    monitor = GpuUtilMonitor(["utilization"], devices, sample_interval=0.001, log_every_n_steps=2)
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        trainer = {"devices": 2, "strategy": "ddp", "logger": logger, "max_steps": max_steps}
        tiny_trainer(Path(folder), callbacks=[monitor], **trainer).fit(model)
    texts = [str(warning.message) for warning in caught if "GpuUtilMonitor" in str(warning.message)]
    simulator_left = {"references": simulator.references, "calls_here": simulator.calls_here()}
    return {"records": logger.records, "summary": monitor.summary(), "warnings": texts, **simulator_left}


def run(library: str) -> dict[str, Any]:
    """What this rank's logger was given, its summary and its warnings, for each of several runs."""
    simulator = Simulator(Path(library), Path(os.environ["NVML_SIM_SCENARIO"]))
    rank = int(os.environ["LOCAL_RANK"])
    runs = {"own": fit(simulator, [rank]), "all": fit(simulator, "all")}
    runs["lost"] = fit(simulator, [rank], max_steps=6, lose_at=2 if rank == 1 else None)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    runs["isolated"] = fit(simulator, [0])
    return runs
