"""Simulated GPUs, and an NVML whose readings go by the simulated time, for the callbacks' tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_gpuopt.detector import device_watch
from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.telemetry import nvml_thread
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
