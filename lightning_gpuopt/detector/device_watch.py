"""Observes this rank's GPU: its event clock, and NVML's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from typing_extensions import override

from lightning_gpuopt.measurements.gpu import DeviceState, GpuTimes
from lightning_gpuopt.telemetry.cuda import choose_current
from lightning_gpuopt.telemetry.nvml_sources import NEIGHBOUR
from lightning_gpuopt.telemetry.sampler import GpuSampler
from lightning_gpuopt.telemetry.window import Stat, merge
from lightning_gpuopt.timeline.gpu_clock import GpuClock
from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.probe import Probe
from lightning_gpuopt.utils.cuda_events import new_event

_READ_EVERY_S: Final = 0.25
_CLOSE_S: Final = 1.0
_CATCH_UP_S: Final = 3.0
_POLL_S: Final = 0.002
_READINGS: Final = (
    *("utilization", "sm_activity", "slowed_percent", "power_capped_percent", "sm_clock_mhz", "sm_clock_max_mhz"),
    "neighbours",
)


class DeviceWatch(Probe):
    """Watches one CUDA device; ``forward`` times the forward's own kernels, for the comparison of ranks."""

    def __init__(
        self,
        device: torch.device,
        host: Timeline,
        *,
        forward: bool = False,
        links: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = GpuClock(partial(new_event, enable_timing=True), host, forward=forward)
        self._notes: list[str] = []
        self.device = device
        self._host = host
        self._reads = True
        self._seconds_now = clock
        readings = (*_READINGS, "active_nvlinks") if links else _READINGS
        self._nvlinks: float | None = None
        self._sampler = GpuSampler(readings, choose_current(device.index or 0), interval_s=_READ_EVERY_S)
        self._stats: dict[str, Stat] = {}
        self._names: dict[int, str] = {}
        self._highest_mhz: float | None = None
        self._since_s = clock()
        self._sampler.start()

    def refuse(self, error: Exception) -> None:
        """Stop the clock: CUDA refuses its events, for example while a graph is captured."""
        if self._reads:
            self._reads = False
            self._notes.append(f"The GPU's times end here: CUDA refused an event ({error}).")

    def catch_up(self) -> None:
        """Training has ended: read what the GPU still has to finish, for a short time."""
        deadline_s = self._seconds_now() + _CATCH_UP_S
        self.read_events()
        while self._reads and self.clock.unread and self._seconds_now() < deadline_s:
            time.sleep(_POLL_S)
            self.read_events()
        self._take_notices()

    def drained(self) -> bool:
        """Whether the GPU has done all that it was given; waits for that for a few seconds at most."""
        try:
            event: Any = new_event()
            event.record()
            deadline_s = self._seconds_now() + _CATCH_UP_S
            while not event.query() and self._seconds_now() < deadline_s:
                time.sleep(_POLL_S)
            return bool(event.query())
        except RuntimeError:  # a device that has failed waits for nothing
            return True

    def read_events(self) -> None:
        if self._reads:
            try:
                self.clock.read()
            except RuntimeError as error:  # for example after the program has changed streams in a step
                self.refuse(error)

    @override
    def restart(self) -> None:
        """Reset NVML's figures, and leave out the steps that the host has done: the GPU may have some before it."""
        self._sampler.cut()
        self._stats.clear()
        self._since_s = self._seconds_now()
        self.clock.take_snapshot(self._host.steps)

    @override
    def read(self) -> dict[str, Any]:
        return {"gpu": self.gpu()}

    @override
    def known(self) -> dict[str, Any]:
        return {"device": self.state()}

    def gpu(self) -> GpuTimes:
        """What the GPU did since the last restart, once it has finished the steps before that."""
        before = self.clock.snapshot
        return self.clock.times() - before if before is not None else GpuTimes()

    def close_window(self) -> float | None:
        """End NVML's window; returns the GPU's utilization in it, 0-100 %."""
        self._take_notices()
        window = self._window_of(self._sampler.cut)
        merge(self._stats, window)
        return window["utilization"].mean if "utilization" in window else None

    def state(self) -> DeviceState:
        """What NVML reported since the last restart, the window under way included."""
        stats = dict(self._stats)
        merge(stats, self._window_of(self._sampler.peek))

        def mean(reading: str) -> float | None:
            return stats[reading].mean if reading in stats else None

        # drivers that do not tell the device's highest clock: the highest of the run
        highest = next((stats[name].high for name in ("sm_clock_max_mhz", "sm_clock_mhz") if name in stats), None)
        if highest is not None:
            self._highest_mhz = max(highest, self._highest_mhz or 0.0)
        return DeviceState(
            utilization=mean("utilization"),
            sm_activity=mean("sm_activity"),
            seconds=self._seconds_now() - self._since_s if stats else 0.0,
            throttled_percent=mean("slowed_percent"),
            power_capped_percent=mean("power_capped_percent"),
            sm_clock_mhz=mean("sm_clock_mhz"),
            sm_clock_mhz_max=self._highest_mhz,
            neighbours=tuple(self._neighbours(stats)),
        )

    @property
    def link(self) -> str:
        """The link between this machine's GPUs: ``"NVLink"`` or ``"PCIe"``; empty while NVML has not reported it."""
        if self._nvlinks is None:
            stat = self._stats.get("active_nvlinks") or self._window_of(self._sampler.peek).get("active_nvlinks")
            self._nvlinks = stat.high if stat is not None else None
        return "" if self._nvlinks is None else "NVLink" if self._nvlinks else "PCIe"

    @override
    def close(self) -> None:
        self._sampler.stop(_CLOSE_S)
        self._take_notices()

    def _neighbours(self, stats: Mapping[str, Stat]) -> Iterator[str]:
        """The other processes on the GPU; their names where this process sees them."""
        unnamed = stats["neighbours"].high if "neighbours" in stats else 0.0
        if unnamed and not any(name.startswith(NEIGHBOUR) for name in stats):
            yield f"{unnamed:.0f} in another container or on the host"
        for series in sorted(name for name in stats if name.startswith(NEIGHBOUR)):
            pid = int(series.removeprefix(NEIGHBOUR))
            if pid not in self._names:
                with suppress(OSError):
                    self._names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
            yield f"{self._names.get(pid, 'process')} (pid {pid})"

    def _window_of(self, take: Callable[[], tuple[object, ...]]) -> dict[str, Stat]:
        devices = take()
        return dict(devices[0].stats) if devices else {}  # type: ignore[attr-defined]

    def _take_notices(self) -> None:
        while self._sampler.notices:
            self._notes.append(self._sampler.notices.popleft().text)
