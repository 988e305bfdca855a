"""NVML's figures as the simulated device makes them, written into ``tests.simulators.nvml`` while it runs."""

from __future__ import annotations

import threading
from typing import Any

from tests.simulators.gpu.clock import Clock
from tests.simulators.gpu.ledger import Ledger

GPM_SM_ACTIVITY = 2


class NvmlFollower:
    """Keeps one device's utilization, and its SM activity, at what the device did in the last sixth of a second.

    Args:
        ledger: the device's.
        clock: the device's.
        simulator: a loaded ``tests.simulators.nvml.Simulator``.
        device: its position in the scenario.
        window_s: how far NVML looks back.
        interval_s: time between two updates.
        sm_share: SM activity while a kernel runs, 0-1.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        simulator: Any,
        device: int = 0,
        *,
        window_s: float = 1 / 6,
        interval_s: float = 0.05,
        sm_share: float = 0.6,
    ) -> None:
        self.sm_share = sm_share
        self._ledger, self._clock, self._simulator, self._device = ledger, clock, simulator, device
        self._window_s, self._interval_s = window_s, interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sim-nvml", daemon=True)

    def start(self) -> None:
        """Follow from now on."""
        self.update()
        self._thread.start()

    def stop(self) -> None:
        """Follow no longer; the last figures stay."""
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()

    def set(self, signal: str, value: float) -> None:
        """Set another figure: ``sm_clock`` (MHz), ``power`` (mW), ``clock_reasons`` (bits) and so on."""
        self._simulator.now(f"trace {self._device} {signal} {value!r}")

    def update(self) -> None:
        """Write the figures of the window that ends now."""
        now_s = self._clock()
        percent = 100.0 * self._ledger.busy_s(now_s - self._window_s, now_s) / self._window_s
        self.set("utilization", round(percent))
        self.set(f"gpm.{GPM_SM_ACTIVITY}", percent * self.sm_share)

    def _run(self) -> None:
        while not self._done.wait(self._interval_s):
            self.update()
