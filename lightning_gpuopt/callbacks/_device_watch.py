"""This rank's GPU under observation: its event clock, what NVML says of it, and a close look where it idles."""

from __future__ import annotations

from typing import Final

import torch

from lightning_gpuopt.diagnosis.measurement import DeviceState, SyncSighting
from lightning_gpuopt.diagnosis.report import Finding
from lightning_gpuopt.telemetry.keys import select_metrics
from lightning_gpuopt.telemetry.monitor import GpuMonitor
from lightning_gpuopt.timeline.gpu_clock import GpuClock
from lightning_gpuopt.timeline.syncs import SyncLook

_READ_EVERY_S: Final = 0.25
_METRICS: Final = ("utilization", "throttled_percent", "sm_clock_mhz")


class DeviceWatch:
    """Watches one CUDA device.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = GpuClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self.syncs: SyncSighting | None = None
        self.notes: list[str] = []
        self._look: SyncLook | None = None
        self._monitor = GpuMonitor(
            select_metrics(_METRICS), "auto", interval_s=_READ_EVERY_S, current=device.index or 0
        )
        self._clock_reads = True
        self._windows = 0
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._clock_max = 0.0

    def step_done(self) -> None:
        """A step has ended."""
        if self._clock_reads:
            try:
                self.clock.read()
            except RuntimeError as error:  # CUDA refuses, for example after the program has changed streams in a step
                self._clock_reads = False
                self.notes.append(f"The GPU's own times end here: {error}")
        if self._look is not None and self._look.step_done():
            self.syncs = SyncSighting(self._look.steps, self._look.count, self._look.where)
            self._look = None

    def begin_window(self) -> None:
        """Warm-up has ended: forget what was read."""
        self._monitor.restart()

    def close_window(self) -> float | None:
        """End NVML's window; returns the GPU's utilization in it, 0-100 %."""
        self._windows += 1
        self._monitor.cut(self._windows)
        self.notes += [notice.text for notice in self._monitor.notices()]
        utilization = None
        for _, figures in self._monitor.ready():
            for key, value in figures.items():
                name = key.rpartition("/")[2]
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1
                if name == "utilization":
                    utilization = value
                elif name == "sm_clock_mhz":
                    self._clock_max = max(self._clock_max, value)
        return utilization

    def state(self) -> DeviceState:
        """What NVML said since warm-up."""

        def mean(name: str) -> float | None:
            return self._sums[name] / self._counts[name] if name in self._counts else None

        return DeviceState(
            mean("utilization"), mean("throttled_percent"), mean("sm_clock_mhz"), self._clock_max or None
        )

    def look_closer_if_idle(self, findings: list[Finding]) -> None:
        """Where the GPU idles inside the step, look once for calls that make the host wait for it."""
        if self.syncs is None and self._look is None and any(each.cause == "launch_bound" for each in findings):
            self._look = SyncLook()
            self._look.begin()

    def close(self) -> None:
        """End the threads and the look."""
        if self._look is not None:
            self._look.end()
            self._look = None
        self._monitor.close(self._windows, 3.0, 0.0)
