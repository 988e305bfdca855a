"""One look at all GPUs, through the real pynvml and the simulated library."""

from __future__ import annotations

import threading

import pytest

from lightning_gpuopt.telemetry.health import READINGS, HealthQuestion, NvmlHealth
from tests.helpers import wait_for
from tests.simulators.nvml import AMPERE, MIB, Gpu, Simulator, error, hang, mig_instance

PCIE = "nvmlDeviceGetCurrPcieLinkWidth"
LOST = 15


def ask(timeout_s: float = 10.0) -> NvmlHealth:
    question = HealthQuestion()
    question.start()
    return question.answer(timeout_s)


def test_all_that_is_asked_is_told(simulator: Simulator):
    simulator.machine(
        Gpu(
            architecture=AMPERE,
            utilization=3,
            memory_used=1024 * MIB,
            memory_total=4096 * MIB,
            power_limit=250_000,
            power_limit_default=300_000,
            pcie_generation=1,
            pcie_generation_max=4,
            pcie_lanes=8,
            persistence=0,
            ecc=2,
            clock_reasons=0x2,
            driver=550.54,
            cuda=12040,
        )
    )
    health = ask()
    assert (health.driver, health.cuda, health.failure) == ("550.54", (12, 4), "")
    (gpu,) = health.gpus
    assert health.visible == (gpu.device.uuid,)
    assert gpu.unknown == ()
    assert gpu.values == {
        "busy_percent": 3.0,
        "memory_used_mib": 1024.0,
        "memory_percent": 25.0,
        "temperature_c": 60.0,
        "power_w": 200.0,
        "power_limit_w": 250.0,
        "power_limit_default_w": 300.0,
        "sm_clock_mhz": 1500.0,
        "sm_clock_max_mhz": 1980.0,
        "slowed_percent": 0.0,
        "power_capped_percent": 0.0,
        "clock_set_percent": 100.0,
        "persistence": 0.0,
        "pcie_generation": 1.0,
        "pcie_generation_max": 4.0,
        "pcie_lanes": 8.0,
        "pcie_lanes_max": 16.0,
        "mig_mode": 0.0,
        "ecc_mode": 1.0,
        "ecc_errors": 2.0,
    }
    assert set(gpu.values) == READINGS


def test_afterwards_nvml_is_shut_down_and_its_thread_gone(simulator: Simulator):
    simulator.machine(Gpu())
    ask()
    assert simulator.references == 0
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("gpuopt-")] == []
    assert simulator.calls_here() == 0


def test_what_a_gpu_does_not_support_is_named_and_the_rest_is_told(simulator: Simulator):
    simulator.machine(Gpu(pcie_lanes=None, ecc_mode=None))
    (gpu,) = ask().gpus
    assert READINGS - set(gpu.values) == {"pcie_lanes", "ecc_mode"}
    assert len(gpu.unknown) == 1
    assert "is without ecc_mode, pcie_lanes (" in gpu.unknown[0]


def test_of_an_instance_its_memory_is_asked_only(simulator: Simulator):
    simulator.machine(Gpu(mig_mode=1, mig=[mig_instance(1)]))
    health = ask()
    gpu, instance = health.gpus
    assert gpu.values["mig_mode"] == 1.0
    assert instance.values == {"memory_used_mib": 1024.0, "memory_percent": 25.0}
    assert health.visible == (instance.device.uuid,)


def test_only_the_visible_ones_are_visible(simulator: Simulator, monkeypatch: pytest.MonkeyPatch):
    first, second = simulator.machine(Gpu(), Gpu())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert ask().visible == (second.uuid,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    health = ask()
    assert health.visible == ()
    assert [gpu.device.uuid for gpu in health.gpus] == [first.uuid, second.uuid]


def test_a_lost_gpu_does_not_take_the_others_down(simulator: Simulator):
    simulator.machine(Gpu(), Gpu(), error(PCIE, LOST, device=0))
    lost, well = ask().gpus
    assert (lost.values, "is lost" in lost.unknown[0]) == ({}, True)
    assert set(well.values) == READINGS


def test_a_driver_that_refuses_is_a_line(simulator: Simulator):
    simulator.machine(Gpu(), error("nvmlInitWithFlags", 9))
    health = ask()
    assert (health.gpus, health.visible) == ((), None)
    assert health.failure == "Driver Not Loaded"


def test_a_call_that_hangs_is_left_behind_with_what_was_told_before(simulator: Simulator):
    simulator.machine(Gpu(), Gpu(), hang(PCIE, device=1))
    question = HealthQuestion()
    question.start()
    wait_for(lambda: simulator.hanging == 1)
    health = question.answer(0.01)
    assert health.failure == "NVML did not respond within 0.01 s"
    assert health.driver == "580.95"
    assert [set(gpu.values) for gpu in health.gpus] == [set(READINGS)]
    simulator.release()
    wait_for(lambda: simulator.references == 0)
    assert simulator.calls("nvmlDeviceGetMaxPcieLinkWidth") == 1  # the second GPU is asked nothing more
