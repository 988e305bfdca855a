"""GpuUtilMonitor against the driver's own NVML and CUDA."""

from __future__ import annotations

import os
import time

import pytest
import torch

from lightning_gpuopt import GpuUtilMonitor
from lightning_gpuopt.telemetry.cuda import cuda_devices
from lightning_gpuopt.telemetry.nvml import NvmlSession
from lightning_gpuopt.telemetry.visible import visible_devices
from tests.helpers import RecordingLogger, TinyModel, tiny_trainer

pytestmark = pytest.mark.gpu
MIB = 1024 * 1024


def test_every_cuda_ordinal_is_matched_to_a_gpu_of_the_same_name():
    torch.cuda.init()
    session = NvmlSession()
    visible = visible_devices(session.devices(), os.environ.get("CUDA_VISIBLE_DEVICES"), cuda=cuda_devices())
    session.close()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert [device.name if device else None for device in visible.devices] == names


def test_a_run_on_the_gpu_has_its_figures(tmp_path):
    monitor = GpuUtilMonitor("all", sample_interval=0.05, log_every_n_steps=5)
    model = TinyModel()
    ballast = torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
    work = torch.randn(4096, 4096, device="cuda")

    def in_step(batch_idx: int) -> None:
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            (work @ work).sum().item()

    model.in_step = in_step  # type: ignore[method-assign]
    logger = RecordingLogger()
    tiny_trainer(tmp_path, accelerator="gpu", max_steps=20, logger=logger, callbacks=[monitor]).fit(model)
    summary = monitor.summary()
    assert logger.steps("gpu/0/") == [4, 9, 14, 19]
    assert summary["gpu/0/utilization"] > 50
    assert summary["gpu/0/memory_used_mib_max"] > ballast.numel() / MIB
    assert 0 < summary["gpu/0/memory_percent"] < 100
    assert summary["gpu/0/power_w"] > 10
    assert 10 < summary["gpu/0/temperature_c"] < 110
    assert summary["gpu/0/sm_clock_mhz"] > 100
