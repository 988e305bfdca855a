"""The clocks that a simulated device runs on: real time, or time that a test turns."""

from __future__ import annotations

import time
from typing import Protocol

_SPIN_S = 1e-4
_PAUSE_S = 5e-5


class Clock(Protocol):
    """Seconds, and how the host waits for a moment."""

    def __call__(self) -> float:
        """Now, in seconds."""

    def sleep_until(self, moment_s: float) -> None:
        """Come back at ``moment_s``, at once if that has passed."""

    def pause(self) -> None:
        """Wait a little, for something that only another process can do."""


class RealClock:
    """``time.perf_counter``: on Linux the same in all processes of a machine."""

    __call__ = staticmethod(time.perf_counter)

    def sleep_until(self, moment_s: float) -> None:
        """Sleep, and spin through the last tenth of a millisecond."""
        left_s = moment_s - time.perf_counter()
        if left_s > _SPIN_S:
            time.sleep(left_s - _SPIN_S)
        while time.perf_counter() < moment_s:
            pass

    def pause(self) -> None:
        """About a tenth of a millisecond."""
        time.sleep(_PAUSE_S)


class ManualClock:
    """Seconds that pass when a test says so, and while the host waits for the device."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """The host takes so long."""
        self.now_s += seconds

    def sleep_until(self, moment_s: float) -> None:
        """The host has waited."""
        self.now_s = max(self.now_s, moment_s)

    def pause(self) -> None:
        """No other process turns this clock."""
        raise RuntimeError("the host waits for a collective that another rank has not joined")
