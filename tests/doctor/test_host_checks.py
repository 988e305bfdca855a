"""The checks of the host: numbers in, checks out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.doctor.check import Check
from lightning_gpuopt.doctor.facts import HostFacts, MemoryRates, TorchFacts
from lightning_gpuopt.doctor.host_checks import host_checks

TORCH = TorchFacts("2.9.0", (12, 8), 16, "file_descriptor")
WELL = HostFacts(
    machine_cpus=16,
    affinity_cpus=16,
    free_cpus=15.5,
    memory_total_mib=131072.0,
    memory_available_mib=120000.0,
    shm_total_mib=65536.0,
    shm_free_mib=65536.0,
    files_limit=1024,
    files_open=20,
    memory_rates=MemoryRates(11.04, 85.26, 16),
)


def found(name: str, torch: TorchFacts = TORCH, gpus: int = 1, **facts: Any) -> Check:
    return {check.name: check for check in host_checks(replace(WELL, **facts), torch, gpus)}[name]


def brief(check: Check) -> tuple[str, str]:
    return check.status, check.found


def test_a_host_with_room_is_well():
    assert [(check.name, check.status) for check in host_checks(WELL, TORCH, 1)] == [
        ("cpus", "ok"),
        ("free_cpus", "ok"),
        ("threads", "ok"),
        ("shared_memory", "ok"),
        ("open_files", "ok"),
        ("memory", "ok"),
        ("memory_bandwidth", "ok"),
    ]


class TestCpus:
    def test_bound_to_one(self):
        check = found("cpus", affinity_cpus=1)
        assert brief(check) == ("problem", "1 of 16 CPUs are usable: this process is bound to one")
        assert found("cpus", machine_cpus=1, affinity_cpus=1, gpus=0).status == "ok"

    def test_fewer_than_two_a_gpu(self):
        assert brief(found("cpus", gpus=9)) == ("problem", "16 of 16 CPUs are usable, for 9 GPUs")
        assert found("cpus", gpus=8).status == "ok"
        assert found("cpus", quota_cpus=1.5, gpus=0).status == "note"

    def test_a_quota_below_the_cpus_that_programs_count(self):
        check = found("cpus", quota_cpus=4.0)
        assert brief(check) == ("note", "4 of 16 CPUs are usable: a cgroup quota")
        assert check.measured == {"machine_cpus": 16, "affinity_cpus": 16, "quota_cpus": 4.0}
        assert found("cpus", quota_cpus=16.0).status == "ok"

    def test_a_quota_that_has_stopped_us(self):
        check = found("cpus", quota_cpus=4.0, throttled_percent=31.25)
        assert brief(check) == (
            "problem",
            "4 of 16 CPUs are usable; the quota throttled them in 31 % of its periods",
        )
        assert check.measured["throttled_percent"] == 31.2
        assert found("cpus", quota_cpus=4.0, throttled_percent=4.9).status == "note"


def test_cpus_that_others_use():
    assert brief(found("free_cpus", free_cpus=7.9)) == ("note", "7.9 of 16 CPUs are idle")
    assert found("free_cpus", free_cpus=8.0).status == "ok"
    assert found("free_cpus", free_cpus=None).status == "unknown"


def test_more_threads_than_cpus():
    check = found("threads", quota_cpus=2.5, omp_num_threads="16")
    assert brief(check) == ("problem", "torch uses 16 threads per operation on 2.5 CPUs")
    assert check.fix == "export OMP_NUM_THREADS=3 MKL_NUM_THREADS=3"
    assert check.measured == {"torch_threads": 16, "usable_cpus": 2.5, "omp_num_threads": "16"}
    assert found("threads", torch=replace(TORCH, threads=1)).status == "ok"


@pytest.mark.parametrize(("asked", "status"), [("99", "problem"), ("99,2", "problem"), ("4", "ok"), ("many", "ok")])
def test_threads_that_other_libraries_would_start_count_too(asked: str, status: str):
    check = found("threads", torch=replace(TORCH, threads=2), omp_num_threads=asked)
    assert check.status == status
    assert check.found.endswith(", OMP_NUM_THREADS is 99") == (status == "problem")


class TestSharedMemory:
    def test_a_container_s_default_is_too_small(self):
        check = found("shared_memory", shm_total_mib=64.0, shm_free_mib=64.0)
        assert brief(check) == ("problem", "/dev/shm: 64 MiB free of 64 MiB")
        assert "--shm-size" in check.fix

    def test_one_that_others_have_filled(self):
        assert found("shared_memory", shm_free_mib=1023.0).fix.startswith("remove leftover files")

    def test_without_one(self):
        assert found("shared_memory", shm_total_mib=None, shm_free_mib=None).status == "unknown"


class TestOpenFiles:
    def test_a_limit_that_workers_reach(self):
        check = found("open_files", files_limit=256)
        assert brief(check) == ("problem", "256 open files are allowed, 32 workers need about 712")
        assert check.measured == {
            "sharing_strategy": "file_descriptor",
            "workers": 32,
            "files_wanted": 712,
            "files_limit": 256,
        }

    def test_files_that_are_open_already_count(self):
        assert found("open_files", files_open=400).status == "problem"

    def test_by_name_tensors_are_no_open_files(self):
        by_name = replace(TORCH, sharing="file_system")
        assert found("open_files", torch=by_name, files_limit=256).measured["files_wanted"] == 192

    def test_without_a_limit(self):
        assert brief(found("open_files", files_limit=None)) == ("ok", "no limit of open files")


def test_little_memory():
    check = found("memory", memory_available_mib=1500.0)
    assert brief(check) == ("problem", "1.5 GiB of memory available, the machine has 128.0 GiB")
    assert found("memory", memory_available_mib=None).status == "unknown"


class TestMemoryBandwidth:
    def test_with_one_thread_and_with_all(self):
        check = found("memory_bandwidth")
        assert check.found == "copies within memory: 11.0 GB/s with one thread, 85.3 GB/s with 16"
        assert check.measured == {"one_thread_gb_s": 11.0, "all_threads_gb_s": 85.3, "threads": 16}

    def test_of_one_cpu_there_is_one_figure(self):
        check = found("memory_bandwidth", memory_rates=MemoryRates(11.04, 11.04, 1))
        assert brief(check) == ("ok", "copies within memory: 11.0 GB/s with one thread")

    def test_where_it_was_not_measured(self):
        assert brief(found("memory_bandwidth", memory_rates=None)) == (
            "unknown",
            "not known: there is too little memory for a copy of 256 MiB",
        )
