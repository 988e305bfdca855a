"""Keeps the history of a run: by window, how long its steps took and what the process held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.waterfall import in_steps
from lightning_gpuopt.measurements.gpu import DeviceState
from lightning_gpuopt.measurements.phases import GPU_WORK, SIGNAL_BROADCAST, WindowRecord
from lightning_gpuopt.timeline.windows import BoundedSeries

log = logging.getLogger(__name__)

_MAX_RECORDS: Final = 64
_MIB: Final = 1024 * 1024
_STEP_WORK: Final = ("forward", "backward", "optimizer")
_GPU_MEMORY: Final = (
    ("gpu_allocated_mib", "allocated_bytes.all.current", _MIB),
    ("gpu_reserved_mib", "reserved_bytes.all.current", _MIB),
    ("alloc_retries", "num_alloc_retries", 1),
)


class WindowHistory:
    """Keeps at most 64 records of a run since its last change; beyond that, neighbours are merged in pairs."""

    def __init__(self, device: torch.device | None, process: Callable[[], Mapping[str, float]]) -> None:
        self._device = device  # a CUDA device, or None
        self._process = process
        self._records = BoundedSeries(_MAX_RECORDS, WindowRecord.joined)
        self._clock: tuple[float, float] = (0.0, 0.0)

    @property
    def records(self) -> tuple[WindowRecord, ...]:
        """The records so far, oldest first."""
        return tuple(self._records.items)

    def add(self, window: Measurement, end_step: int) -> None:
        waterfall = window.waterfall
        if waterfall.step_s is None or not waterfall.steps:
            return
        seconds = waterfall.step_s * waterfall.steps
        phases = window.times.phases
        parts = {name: max(value, 0.0) for name, value in waterfall.waits.items() if in_steps(name)}
        host = {}
        if waterfall.on_gpu:
            parts[GPU_WORK] = max(seconds - sum(parts.values()), 0.0)
            host = {name: phases[name] for name in _STEP_WORK}
        else:
            stopped = (window.times.collecting, window.times.compiling)
            for name in _STEP_WORK:
                parts[name] = phases[name] - stopped[0].get(name, 0.0) - stopped[1].get(name, 0.0)
            if not parts.get(SIGNAL_BROADCAST):
                parts.pop(SIGNAL_BROADCAST, None)
        self._records.add(WindowRecord(waterfall.steps, end_step, seconds, parts, self._held(window.device), host))

    def _held(self, device: DeviceState | None) -> dict[str, float]:
        held = dict(self._process())
        if self._device is not None:
            try:
                stats: dict[str, Any] = torch.cuda.memory_stats(self._device)
                held |= {name: stats[key] / unit for name, key, unit in _GPU_MEMORY if key in stats}
            except Exception:  # an allocator of somebody's own keeps no such figures
                log.debug("the GPU's memory could not be read", exc_info=True)
        if device is not None and device.sm_clock_mhz is not None:
            before_mhz, before_s = self._clock
            self._clock = (device.sm_clock_mhz, device.seconds)
            new_s = device.seconds - before_s
            if new_s > 0:  # its mean is of the whole part
                held["sm_clock_mhz"] = (device.sm_clock_mhz * device.seconds - before_mhz * before_s) / new_s
        return held
