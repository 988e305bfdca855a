"""Fixtures for all tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nvml_simulator import Simulator, build


@pytest.fixture(scope="session")
def simulator_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built NVML simulator."""
    library = build(tmp_path_factory.mktemp("nvml_simulator"))
    if library is None:
        message = "the NVML simulator needs a C compiler: install cc (Debian: apt-get install gcc libc6-dev)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    return library


@pytest.fixture
def simulator(simulator_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """NVML without a GPU. After the test NVML must be shut down, and every thread of ours must be gone."""
    simulator = Simulator(simulator_library, tmp_path / "nvml-scenario.txt")
    monkeypatch.setenv("NVML_SIM_SCENARIO", str(simulator.scenario))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    simulator.machine()
    simulator.forget_calls()
    yield simulator
    simulator.release()
    for thread in threading.enumerate():
        if thread.name.startswith("gpuopt-"):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} survived the test"
    assert simulator.references == 0, "NVML was not shut down"
    assert simulator.gpm_samples_alive == 0, "a GPM sample was not freed"
