"""Simulated GPUs, an NVML whose readings go by the simulated time, and a policy that decides as a test has written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_gpuopt.detector import device_watch
from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.telemetry import nvml_thread
from lightning_gpuopt.tuning.running import RunningLoader
from lightning_gpuopt.tuning.running_search import LivePolicy, LoaderStats
from lightning_gpuopt.tuning.search_result import Trial
from lightning_gpuopt.tuning.worker_limits import Cap
from tests.helpers import wait_for
from tests.simulators.gpu import SimulatedGpu, simulated_gpu
from tests.simulators.nvml import Simulator
from tests.simulators.simulated_time import SimulatedTime

_EACH_READING = "nvmlDeviceGetUtilizationRates"


@pytest.fixture
def gpu(simulated_time: SimulatedTime) -> Iterator[SimulatedGpu]:
    with simulated_gpu(simulated_time, copy_s=0.0005) as device:
        yield device


@pytest.fixture
def real_gpu() -> Iterator[SimulatedGpu]:
    """For loaders with workers, whose time is real."""
    with simulated_gpu(copy_s=0.0005) as device:
        yield device


@pytest.fixture
def nvml(simulator: Simulator, simulated_time: SimulatedTime, monkeypatch: pytest.MonkeyPatch) -> Simulator:
    """NVML whose readings go by the simulated time: four a second."""
    monkeypatch.setitem(DeviceWatch.__init__.__kwdefaults__, "clock", simulated_time)
    monkeypatch.setattr(device_watch, "_READ_EVERY_S", 2e-3)
    monkeypatch.setattr(nvml_thread, "_WAIT_PER_CPU_S", 0.0)

    def let_it_be_read() -> None:
        for thread in threading.enumerate():
            if thread.name == "gpuopt-gpu-sampler":
                enough = simulator.calls(_EACH_READING) + 2
                wait_for(lambda: simulator.calls(_EACH_READING) >= enough or not thread.is_alive())  # noqa: B023

    simulated_time.every(0.25, let_it_be_read)
    return simulator


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the policy decides: for (workers now), the workers to have; others stay. Windows are of two steps."""
    wanted: dict[int, int] = {}

    def decide(self: LivePolicy, seen: LoaderStats, cap: Cap) -> int:
        before = self.num_workers
        self._trials[before] = Trial(before, 10.0 * max(before, 1), 0.0)
        if wanted.get(before, before) == before:
            self._settle(seen)
        else:
            self._change(wanted[before], seen)
        self.skip, self.window = 0, 2
        return wanted.get(before, before)

    real = LivePolicy.__init__

    def init(self: LivePolicy, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.skip, self.window = 0, 2

    monkeypatch.setattr(LivePolicy, "decide", decide)
    monkeypatch.setattr(LivePolicy, "__init__", init)
    monkeypatch.setattr(RunningLoader, "_pays_now", lambda self, num_workers: True)
    return wanted


@pytest.fixture
def wants_more(decisions: dict[int, int], cheap_workers: None) -> None:
    """The policy wants more workers from the first window on."""
    decisions.update({0: 3, 1: 3, 2: 4})
