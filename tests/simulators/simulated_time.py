"""Time that passes only when a test sleeps: what a real Trainer measures is then exact, and takes no time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_gpuopt.timeline.phases import Timeline

TICK_NS = 1000


@dataclass
class _Round:
    """Something to do again and again."""

    every_ns: int
    action: Callable[[], object]
    due_ns: int


class SimulatedTime:
    """The clocks of the thread that made it: ``perf_counter``, ``time_ns`` and ``thread_time`` of the module ``time``.

    ``time.sleep`` passes its seconds at once, and each reading takes a microsecond of wall and CPU time, so that a loop
    which waits for the clock ends. Other threads read the same time and really sleep; worker processes have real time.
    ``time.monotonic`` stays real: on it threads wait for one another.

    It is a clock for ``tests.simulators.gpu`` too.
    """

    def __init__(self) -> None:
        self.now_ns = 100 * 10**9
        self.cpu_ns = 10**9
        self._epoch_ns = time.time_ns() - self.now_ns
        self._rounds: list[_Round] = []
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._real = {name: getattr(time, name) for name in ("perf_counter_ns", "thread_time_ns", "sleep")}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put it in place of the real time until ``patch`` is undone."""
        clocks: dict[str, Any] = {
            "perf_counter": self,
            "perf_counter_ns": self.wall_ns,
            "thread_time": lambda: self.thread_ns() / 1e9,
            "thread_time_ns": self.thread_ns,
            "sleep": self.sleep,
            "time_ns": self.unix_ns,
        }
        for name, clock in clocks.items():
            patch.setattr(time, name, clock)
        patch.setitem(Timeline.__init__.__kwdefaults__, "clock_ns", self.wall_ns)

    def every(self, seconds: float, action: Callable[[], object]) -> None:
        """Call ``action`` whenever so much time has passed, while it passes."""
        self._rounds.append(_Round(round(seconds * 1e9), action, self.now_ns + round(seconds * 1e9)))

    def wall_ns(self) -> int:
        """``time.perf_counter_ns``."""
        if os.getpid() != self._process:
            return int(self._real["perf_counter_ns"]())
        self._tick()
        return self.now_ns

    def thread_ns(self) -> int:
        """``time.thread_time_ns``."""
        if not self._is_own():
            return int(self._real["thread_time_ns"]())
        self._tick()
        return self.cpu_ns

    def unix_ns(self) -> int:
        """``time.time_ns``, as records of torch's profiler are dated."""
        return self._epoch_ns + self.wall_ns()

    def sleep(self, seconds: float) -> None:
        """``time.sleep``."""
        if self._is_own():
            self._pass_until(self.now_ns + round(seconds * 1e9))
        else:
            self._real["sleep"](seconds)

    # ---- a clock of the simulated GPU ----

    def __call__(self) -> float:
        """``time.perf_counter``."""
        return self.wall_ns() / 1e9

    def sleep_until(self, moment_s: float) -> None:
        """The host has waited for the device."""
        self._pass_until(round(moment_s * 1e9))

    def pause(self) -> None:
        """No other process turns this clock."""
        raise RuntimeError("the host waits for a collective that another rank has not joined")

    def _is_own(self) -> bool:
        return os.getpid() == self._process and threading.get_ident() == self._thread

    def _pass_until(self, moment_ns: int) -> None:
        while due := [each for each in self._rounds if each.due_ns <= moment_ns]:
            first = min(due, key=lambda each: each.due_ns)
            self.now_ns = max(self.now_ns, first.due_ns)
            first.due_ns += first.every_ns
            first.action()
        self.now_ns = max(self.now_ns, moment_ns)

    def _tick(self) -> None:
        if threading.get_ident() == self._thread:
            self.now_ns += TICK_NS
            self.cpu_ns += TICK_NS
