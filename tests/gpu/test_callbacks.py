"""Both callbacks in a Trainer on a real GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_gpuopt import GpuUtilMonitor, StallDetector
from tests.gpu.no_synchronize import NoSynchronize
from tests.helpers import RecordingLogger, final_weights, tiny_trainer

pytestmark = pytest.mark.gpu


def test_the_gpus_figures_are_logged_and_nothing_synchronizes(tmp_path: Path) -> None:
    logger = RecordingLogger()
    monitor = GpuUtilMonitor(log_every_n_steps=10)
    detector = StallDetector(window_size=10, on_stall="ignore")
    trainer = tiny_trainer(
        tmp_path,
        accelerator="gpu",
        max_steps=40,
        logger=logger,
        log_every_n_steps=1000,
        callbacks=[NoSynchronize(), monitor, detector],
    )
    final_weights(trainer)
    keys = {key for _, metrics in logger.records for key in metrics}
    assert {"gpu/0/memory_used_mib", "gpu/0/temperature_c", "step/data_wait_percent"} <= keys
    assert monitor.summary()["gpu/0/memory_used_mib"] > 0
    assert detector.report.gpu_idle_s is not None
    assert detector.report.gpu_idle_s > 0
    assert detector.report.environment["device"].startswith("cuda (")


def test_weights_are_the_same_with_and_without(tmp_path: Path) -> None:
    def trained(callbacks: list[Callback]) -> dict[str, torch.Tensor]:
        return final_weights(tiny_trainer(tmp_path, accelerator="gpu", max_steps=40, callbacks=callbacks))

    plain = trained([])
    watched = trained([GpuUtilMonitor(), StallDetector(on_stall="ignore")])
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
