"""All checks together: NVML is simulated, and the process that asks CUDA is one that prints what a test says."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import pytest

from lightning_gpuopt.doctor import gatherers as module
from lightning_gpuopt.doctor.check import Check
from lightning_gpuopt.doctor.examine import examine
from lightning_gpuopt.doctor.facts import CopyRates, CudaDeviceFacts, CudaFacts, MemoryRates, TorchFacts
from tests.simulators.nvml import Gpu, Simulator, error, mig_instance


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_cpus", lambda: 1.0)
    monkeypatch.setattr(module, "memory_rates", lambda host: MemoryRates(11.0, 22.0, host.affinity_cpus))
    monkeypatch.setattr(module, "torch_facts", lambda: TorchFacts("2.9.0", (12, 8), 1, "file_descriptor"))


def checks(*devices: CudaDeviceFacts, **facts: Any) -> dict[str, Check]:
    printed = json.dumps(asdict(CudaFacts(True, ("sm_90",), devices, **facts)))
    return {check.name: check for check in examine(probe=[sys.executable, "-c", f"print({printed!r})"])}


def device(number: int, copies: CopyRates | None = None) -> CudaDeviceFacts:
    return CudaDeviceFacts("H100", f"{number:08d}-aaaa-bbbb-cccc-dddddddddddd", (9, 0), copies)


def test_copies_belong_to_the_gpu_of_that_uuid(simulator: Simulator):
    simulator.machine(Gpu(), Gpu(pcie_generation=1))
    found = checks(device(1, CopyRates(20.0, 6.0, 4)), device(0))
    assert "gpu0.copies" not in found
    assert found["gpu1.copies"].measured == {"pinned_gb_s": 20.0, "pageable_gb_s": 6.0, "link_gb_s": 31.5}
    assert found["gpu1.pcie"].found == "PCIe 4 x16 of PCIe 5 x16 while it copies"
    assert found["gpu0.pcie"].status == "ok"


def test_a_device_whose_copies_failed(simulator: Simulator):
    simulator.machine(Gpu())
    found = checks(device(0), failure="cuda:0: CUDA error: out of memory")
    assert found["torch"].status == "unknown"
    assert found["torch"].found.endswith("cuda:0: CUDA error: out of memory")


def test_a_split_gpu_is_judged_and_its_instances_are_counted(simulator: Simulator):
    simulator.machine(Gpu(mig_mode=1, mig=[mig_instance(1), mig_instance(2)]))
    found = checks(device(0))
    assert found["gpu0.mig"].status == "note"
    assert found["gpus"].measured == {"gpus": 1, "visible": 1}


def test_without_nvml_cuda_is_asked_all_the_same(simulator: Simulator):
    simulator.machine(Gpu(), error("nvmlInitWithFlags", 9))
    found = checks(device(0))
    assert (found["gpus"].status, found["torch"].status) == ("unknown", "ok")
    assert found["torch"].found == "torch 2.9.0, built for CUDA 12.8; it sees 1 GPU"


def test_a_probe_that_cannot_be_started(simulator: Simulator):
    simulator.machine(Gpu())
    found = {check.name: check for check in examine(probe=["/there/is/no/such/program"])}
    assert found["torch"].status == "unknown"
    assert "no process could be started" in found["torch"].found


def test_names_are_unique(simulator: Simulator):
    simulator.machine(Gpu(), Gpu(mig_mode=1, mig=[mig_instance(1)]), Gpu(pcie_lanes=None))
    printed = json.dumps(asdict(CudaFacts(True, ("sm_90",), (device(0), device(2)))))
    names = [check.name for check in examine(probe=[sys.executable, "-c", f"print({printed!r})"])]
    assert len(names) == len(set(names))


def test_the_host_s_memory_bandwidth_is_measured_beside_the_copies(simulator: Simulator):
    simulator.machine(Gpu())
    found = checks(device(0, CopyRates(20.0, 6.0, 4)))
    assert found["memory_bandwidth"].measured["one_thread_gb_s"] == 11.0
    assert found["gpu0.copies"].measured["pinned_gb_s"] == 20.0
