"""The gatherers: a fake /proc and cgroup, real processes, and a simulated GPU."""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch

from lightning_gpuopt.doctor import cuda_probe, gatherers
from lightning_gpuopt.doctor.facts import CopyRates, CudaDeviceFacts, CudaFacts, HostFacts, MemoryRates
from lightning_gpuopt.doctor.gatherers import ask_cuda, free_cpus, host_facts, memory_rates, torch_facts, versions_of
from tests.helpers import Clock
from tests.simulators.gpu import simulated_gpu
from tests.simulators.nvml import Gpu, Simulator, hang
from tests.simulators.simulated_time import SimulatedTime


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    """A cgroup with a quota of 2.5 CPUs, which was stopped in a quarter of its periods, with 512 MiB left."""
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cpu.max").write_text("250000 100000\n")
    (root / "cpu.stat").write_text("usage_usec 5\nnr_periods 400\nnr_throttled 100\nthrottled_usec 7\n")
    (root / "memory.max").write_text(str(1024 << 20))
    (root / "memory.current").write_text(str(600 << 20))
    (root / "memory.stat").write_text(f"inactive_file {88 << 20}\n")
    return root


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self/fd").mkdir(parents=True)
    for number in range(7):
        (folder / f"self/fd/{number}").touch()
    (folder / "self/cgroup").write_text("0::/\n")
    return folder


class TestHost:
    def test_what_the_container_allows(self, proc: Path, cgroup: Path, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
        facts = host_facts(1.5, proc, cgroup, tmp_path)
        assert (facts.quota_cpus, facts.throttled_percent, facts.free_cpus) == (2.5, 25.0, 1.5)
        assert facts.memory_available_mib == 512.0
        assert facts.files_open == 7
        assert (facts.omp_num_threads, facts.mkl_num_threads) == ("3", None)
        assert facts.affinity_cpus == len(os.sched_getaffinity(0))
        assert facts.usable_cpus == min(2.5, facts.affinity_cpus)

    def test_what_cannot_be_read_is_not_known(self, tmp_path: Path):
        nowhere = tmp_path / "nowhere"
        facts = host_facts(None, nowhere, nowhere, nowhere)
        assert (facts.quota_cpus, facts.throttled_percent, facts.shm_total_mib, facts.shm_free_mib) == (None,) * 4
        assert facts.files_open is None

    def test_without_meminfo_memory_is_not_known(self, tmp_path: Path, monkeypatch):
        def refused() -> None:
            raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")

        monkeypatch.setattr(psutil, "virtual_memory", refused)
        facts = host_facts(None, tmp_path, tmp_path, tmp_path)
        assert (facts.memory_total_mib, facts.memory_available_mib) == (None, None)

    def test_cpus_that_are_idle(self, proc: Path, cgroup: Path):
        clock = Clock()
        cpus = sorted(os.sched_getaffinity(0))

        def stat(idle_ticks: int) -> None:
            lines = [f"cpu{cpu} 0 0 0 {idle_ticks if cpu == cpus[0] else 0} 0 0\n" for cpu in cpus]
            (proc / "stat").write_text("cpu 0 0 0 0 0\n" + "".join(lines) + "intr 1\n")

        def sleep(seconds: float) -> None:
            assert seconds == 0.5
            clock.now_s += seconds
            stat(os.sysconf("SC_CLK_TCK") // 5)

        stat(0)
        assert free_cpus(proc, cgroup, sleep, clock) == pytest.approx(0.4)
        assert free_cpus(proc / "nowhere", cgroup, sleep, clock) is None


class TestMemoryRates:
    """The clock is the test's: a copy takes so many seconds of it."""

    HOST = HostFacts(machine_cpus=4, affinity_cpus=3, memory_available_mib=4096.0)

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gatherers, "_COPIED", 1000)

    def copying(self, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> tuple[Clock, list[int]]:
        clock, threads, left = Clock(), [], iter(seconds)
        copy = torch.Tensor.copy_

        def slow(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            threads.append(torch.get_num_threads())
            clock.now_s += next(left)
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", slow)
        return clock, threads

    def test_the_fastest_of_three_copies_counts_with_one_thread_and_with_all(self, monkeypatch):
        before = torch.get_num_threads()
        clock, threads = self.copying(monkeypatch, 4e-6, 2e-6, 3e-6, 1e-6, 5e-7, 1e-6)
        rates = memory_rates(self.HOST, clock)
        assert rates is not None
        assert (rates.one_thread_gb_s, rates.all_threads_gb_s) == pytest.approx((0.5, 2.0))
        assert (rates.threads, threads) == (3, [1, 1, 1, 3, 3, 3])
        assert torch.get_num_threads() == before

    def test_a_slow_machine_copies_once(self, monkeypatch):
        clock, threads = self.copying(monkeypatch, 0.25, 0.125, 0.125)
        assert memory_rates(self.HOST, clock) == MemoryRates(1e-6 / 0.25, 1e-6 / 0.125, 3)
        assert threads == [1, 3, 3]

    def test_on_one_cpu_there_is_one_figure(self, monkeypatch):
        clock, threads = self.copying(monkeypatch, *[0.125] * 2)
        one = replace(self.HOST, quota_cpus=0.5)
        assert memory_rates(one, clock) == MemoryRates(1e-6 / 0.125, 1e-6 / 0.125, 1)
        assert threads == [1, 1]

    def test_little_memory_is_left_alone(self, monkeypatch):
        clock, threads = self.copying(monkeypatch)
        assert memory_rates(replace(self.HOST, memory_available_mib=2047.0), clock) is None
        assert threads == []

    def test_a_limit_of_the_process_is_no_error(self, monkeypatch):
        def refuse(*size: int, **options: object) -> torch.Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(torch, "empty", refuse)
        assert memory_rates(self.HOST) is None

    def test_real_copies(self):
        rates = memory_rates(replace(self.HOST, affinity_cpus=1))
        assert rates is not None
        assert rates.one_thread_gb_s == rates.all_threads_gb_s > 0


def test_torch_as_it_is_installed():
    facts = torch_facts()
    assert (facts.version, facts.threads) == (torch.__version__, torch.get_num_threads())
    assert (facts.cuda is None) == (torch.version.cuda is None)
    assert facts.sharing in ("file_descriptor", "file_system")


def test_versions_of_what_is_installed_only():
    found = versions_of(["torch", "there-is-no-such-distribution"])
    assert list(found) == ["torch"]


class TestAskCuda:
    FACTS = CudaFacts(
        True,
        ("sm_90",),
        (CudaDeviceFacts("H200", "0-1", (9, 0), CopyRates(55.0, 9.0, 5)), CudaDeviceFacts("H200", "0-2", (9, 0))),
    )

    def ask(self, code: str) -> CudaFacts:
        return ask_cuda(60.0, [sys.executable, "-c", code])

    def test_what_it_prints_last_is_its_answer(self):
        line = json.dumps(asdict(self.FACTS))
        assert self.ask(f"print('a banner'); print({line!r})") == self.FACTS

    @pytest.mark.matrix
    def test_the_real_one_on_a_build_without_cuda(self):
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        assert ask_cuda(120.0) == CudaFacts()

    def test_one_that_hangs_is_ended(self):
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        assert ask_cuda(0.1, command) == CudaFacts(failure="CUDA did not respond within 0.1 s")
        assert not any(each.cmdline() == command for each in psutil.Process().children())

    def test_one_that_dies_is_a_line(self):
        found = self.ask("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        assert found == CudaFacts(failure="the CUDA probe ended with code -11")

    def test_one_that_prints_something_else_is_a_line(self):
        assert self.ask("print('hello')").failure.startswith("the CUDA probe printed")


class TestOnASimulatedGpu:
    """With copies at 25 GB/s from pinned memory and 6 GB/s from ordinary memory."""

    def test_copies_and_the_link_while_they_run(self, simulated_time: SimulatedTime, simulator: Simulator):
        simulator.machine(Gpu(pcie_generation=4))
        with simulated_gpu(simulated_time):
            rates = cuda_probe.copy_rates(
                torch.device("cuda", 0), "00000000-aaaa-bbbb-cccc-dddddddddddd", simulated_time
            )
        assert rates.pinned_gb_s == pytest.approx(25.0, rel=0.02)
        assert rates.pageable_gb_s == pytest.approx(6.0, rel=0.02)
        assert (rates.generation, rates.lanes) == (4, 16)

    def test_an_nvml_that_hangs_costs_the_generation_only(self, simulated_time: SimulatedTime, simulator: Simulator):
        simulator.machine(Gpu(), hang("nvmlDeviceGetCurrPcieLinkGeneration"))
        with simulated_gpu(simulated_time):
            rates = cuda_probe.copy_rates(
                torch.device("cuda", 0), "00000000-aaaa-bbbb-cccc-dddddddddddd", simulated_time
            )
        assert (rates.generation, rates.lanes) == (None, None)

    def test_torch_s_words_on_why_it_can_use_no_gpu_are_kept(self, monkeypatch: pytest.MonkeyPatch):
        def refused() -> bool:
            warnings.warn(
                "CUDA initialization: Error 802: system\nnot yet initialized (Triggered internally at CUDA.cpp:36.)",
                stacklevel=1,
            )
            return False

        monkeypatch.setattr(torch.cuda, "is_available", refused)
        assert cuda_probe.probe() == CudaFacts(refusal="CUDA initialization: Error 802: system not yet initialized")

    def test_a_device_that_refuses_is_named_and_the_others_are_told(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(device: torch.device, uuid: str, clock: object) -> CopyRates:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

        monkeypatch.setattr(cuda_probe, "copy_rates", refuse)
        with simulated_gpu():
            monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
            facts = cuda_probe.probe()
        assert facts.failure == "cuda:0: CUDA error: out of memory"
        assert [(each.name, each.capability, each.copies) for each in facts.devices] == [
            ("Simulated GPU", (9, 0), None)
        ]
