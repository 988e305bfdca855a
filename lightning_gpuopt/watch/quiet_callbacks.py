"""Callbacks that keep to themselves what they find, for whoever brings them into a Trainer."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from lightning_gpuopt.callbacks.gpu_util_monitor import GpuUtilMonitor
from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.compat.lightning import LightningModule, Trainer


class QuietMonitor(GpuUtilMonitor):
    """Its figures are in :meth:`summary` alone."""

    public_name: ClassVar[str] = "GpuUtilMonitor"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._logs = False


class QuietDetector(StallDetector):
    """What it finds is in ``report.json`` alone: whoever reads that makes the page."""

    public_name: ClassVar[str] = "StallDetector"
    logs = False
    writes_page = False
