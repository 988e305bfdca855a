"""Checks of CPUs, threads, memory, shared memory and open files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from lightning_gpuopt.doctor.check import Check, not_known
from lightning_gpuopt.doctor.facts import HostFacts, TorchFacts
from lightning_gpuopt.doctor.gpu_checks import count_of_gpus
from lightning_gpuopt.measurements.loader_model import most_workers
from lightning_gpuopt.tuning.worker_limits import files_wanted

_CPUS_A_GPU: Final = 2.0  # one for the training process and one for a worker, at least
_BUSY_SHARE: Final = 0.5  # where less than this share of the CPUs is idle, others use them
_THROTTLED_PERCENT: Final = 5.0

# Docker's 64 MiB hold not even a batch or two; 16 workers with two batches of 20 MB each need 640 MB
_MIN_SHM_MIB: Final = 1024
_MIN_MEMORY_MIB: Final = 2048

# tensors in a batch, for an estimate: images and labels are two, a detection or text batch has more
_TENSORS: Final = 8


def host_checks(host: HostFacts, torch: TorchFacts, gpus: int) -> Iterator[Check]:
    """What the host leaves to training on so many visible GPUs: each rank has its own workers."""
    yield _cpus(host, gpus)
    yield _free(host)
    yield _threads(host, torch)
    yield _shared_memory(host)
    yield _files(host, torch)
    yield _memory(host)
    yield _memory_rates(host)


def _cpus(host: HostFacts, gpus: int) -> Check:
    usable = host.usable_cpus
    measured: dict[str, Any] = {"machine_cpus": host.machine_cpus, "affinity_cpus": host.affinity_cpus}
    if host.quota_cpus is not None:
        measured["quota_cpus"] = host.quota_cpus
    if host.throttled_percent is not None:
        measured["throttled_percent"] = round(host.throttled_percent, 1)
    found = f"{_count(usable)} of {host.machine_cpus} CPUs are usable"
    if host.affinity_cpus == 1 < host.machine_cpus:
        why = "The training process and all its workers share one CPU."
        fix = "request more (srun --cpus-per-task, --cpuset-cpus, taskset); unset GOMP_CPU_AFFINITY and OMP_PROC_BIND"
        return Check("cpus", "problem", f"{found}: this process is bound to one", measured, why, fix)
    if gpus and usable < _CPUS_A_GPU * gpus:
        why = "Each GPU needs a CPU for its training process, and more for its workers."
        fix = "request more CPUs (--cpus, --cpus-per-task, the pod's limits.cpu), or decode on the GPU (DALIDataModule)"
        return Check("cpus", "problem", f"{found}, for {count_of_gpus(gpus)}", measured, why, fix)
    if (host.throttled_percent or 0.0) >= _THROTTLED_PERCENT:
        why = "The cgroup's quota throttles its processes: the workers and the training process stop meanwhile."
        found = f"{found}; the quota throttled them in {host.throttled_percent:.0f} % of its periods"
        fix = "raise the quota (--cpus, limits.cpu), or start fewer workers"
        return Check("cpus", "problem", found, measured, why, fix)
    if host.quota_cpus is not None and host.quota_cpus < host.affinity_cpus:
        why = f"os.cpu_count() returns {host.machine_cpus}: worker and thread counts derived from it are too large."
        fix = f"set num_workers and OMP_NUM_THREADS for {_count(usable)} CPUs; lightning-gpuopt find-workers helps"
        return Check("cpus", "note", f"{found}: a cgroup quota", measured, why, fix)
    return Check("cpus", "ok", found, measured)


def _free(host: HostFacts) -> Check:
    if host.free_cpus is None:
        return not_known("free_cpus", "/proc/stat cannot be read")
    free, usable = host.free_cpus, host.usable_cpus
    measured = {"free_cpus": round(free, 1), "usable_cpus": round(usable, 2)}
    found = f"{free:.1f} of {_count(usable)} CPUs are idle"
    if free < _BUSY_SHARE * usable:
        why = "Other programs use the rest: workers wait for a CPU, and measurements made now are too slow."
        fix = "find them with top; measure again when the CPUs are idle"
        return Check("free_cpus", "note", found, measured, why, fix)
    return Check("free_cpus", "ok", found, measured)


def _threads(host: HostFacts, torch: TorchFacts) -> Check:
    usable = max(math.ceil(host.usable_cpus), 1)
    measured: dict[str, Any] = {"torch_threads": torch.threads, "usable_cpus": round(host.usable_cpus, 2)}
    for name, value in (("omp_num_threads", host.omp_num_threads), ("mkl_num_threads", host.mkl_num_threads)):
        if value is not None:
            measured[name] = value
    found = f"torch uses {torch.threads} threads per operation on {_count(host.usable_cpus)} CPUs"
    asked = _number(host.omp_num_threads)
    if asked > max(torch.threads, usable):  # torch may use fewer all the same, other libraries do not
        found += f", OMP_NUM_THREADS is {asked}"
    if max(torch.threads, asked) > usable:
        why = "More threads than CPUs wait for each other; libraries (OpenCV, NumPy) start as many in every worker."
        fix = f"export OMP_NUM_THREADS={usable} MKL_NUM_THREADS={usable}"
        return Check("threads", "problem", found, measured, why, fix)
    return Check("threads", "ok", found, measured)


def _shared_memory(host: HostFacts) -> Check:
    if host.shm_total_mib is None or host.shm_free_mib is None:
        return not_known("shared_memory", "there is no /dev/shm, through which workers send their batches")
    measured = {"shm_total_mib": round(host.shm_total_mib), "shm_free_mib": round(host.shm_free_mib)}
    found = f"/dev/shm: {_mib(host.shm_free_mib)} free of {_mib(host.shm_total_mib)}"
    if host.shm_free_mib < _MIN_SHM_MIB:
        why = "Workers send batches through it; a batch that does not fit kills its worker with a bus error."
        if host.shm_total_mib < _MIN_SHM_MIB:
            fix = "docker run --shm-size=16g (or --ipc=host); in a pod an emptyDir with medium: Memory at /dev/shm"
        else:
            fix = "remove leftover files: ls -l /dev/shm"
        return Check("shared_memory", "problem", found, measured, why, fix)
    return Check("shared_memory", "ok", found, measured)


def _files(host: HostFacts, torch: TorchFacts) -> Check:
    workers = most_workers(host.usable_cpus)
    wanted = files_wanted(workers, 2, _TENSORS if torch.sharing == "file_descriptor" else 0)
    measured: dict[str, Any] = {"sharing_strategy": torch.sharing, "workers": workers, "files_wanted": wanted}
    if host.files_limit is None:
        return Check("open_files", "ok", "no limit of open files", measured)
    measured["files_limit"] = host.files_limit
    found = f"{host.files_limit} open files are allowed, {workers} workers need about {wanted}"
    if host.files_limit - (host.files_open or 0) < wanted:
        why = f"With torch's sharing strategy {torch.sharing} each tensor of a batch in flight is an open file."
        fix = "ulimit -n 65536 (limits.conf, or docker --ulimit nofile)"
        return Check("open_files", "problem", found, measured, why, fix)
    return Check("open_files", "ok", found, measured)


def _memory(host: HostFacts) -> Check:
    if host.memory_available_mib is None:
        return not_known("memory", "the system does not report it")
    measured = {"memory_available_mib": round(host.memory_available_mib)}
    found = f"{_mib(host.memory_available_mib)} of memory available"
    if host.memory_total_mib is not None:
        measured["memory_total_mib"] = round(host.memory_total_mib)
        found += f", the machine has {_mib(host.memory_total_mib)}"
    if host.memory_available_mib < _MIN_MEMORY_MIB:
        why = "Each worker needs a few hundred MiB; if memory runs out, processes are swapped out or killed."
        return Check("memory", "problem", found, measured, why, "free some memory, or raise the container's limit")
    return Check("memory", "ok", found, measured)


def _memory_rates(host: HostFacts) -> Check:
    rates = host.memory_rates
    if rates is None:
        return not_known("memory_bandwidth", "there is too little memory for a copy of 256 MiB")
    measured = {
        "one_thread_gb_s": round(rates.one_thread_gb_s, 1),
        "all_threads_gb_s": round(rates.all_threads_gb_s, 1),
        "threads": rates.threads,
    }
    found = f"copies within memory: {rates.one_thread_gb_s:.1f} GB/s with one thread"
    if rates.threads > 1:
        found += f", {rates.all_threads_gb_s:.1f} GB/s with {rates.threads}"
    return Check("memory_bandwidth", "ok", found, measured)


def _number(variable: str | None) -> int:
    """What an OpenMP variable asks for at the outermost level; 0 if it asks for nothing."""
    first = (variable or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _count(cpus: float) -> str:
    return f"{cpus:.0f}" if cpus == round(cpus) else f"{cpus:.2g}"


def _mib(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
