"""Who gathers the numbers for the checks: of the host, of torch, of what is installed, and of CUDA."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from lightning_gpuopt.doctor.facts import CopyRates, CudaDeviceFacts, CudaFacts, HostFacts, MemoryRates, TorchFacts
from lightning_gpuopt.telemetry.host import HostWatch, allowed_cpus, cgroups, quota_cpus, throttling
from lightning_gpuopt.telemetry.memory import entries

_MIB: Final = 1024 * 1024
_COPIED: Final = 256 * _MIB  # larger than the caches of a socket, but for a few of the largest
_COPIES: Final = 3
_COPIES_S: Final = 0.25  # no further copy is made after so long
_MEMORY_LEFT_MIB: Final = 2048.0  # with less memory available nothing is copied
_IDLE_OVER_S: Final = 0.5
PROBE: Final = (sys.executable, "-m", "lightning_gpuopt.doctor.cuda_probe")  # the command that asks CUDA


def free_cpus(
    proc: Path = Path("/proc"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> float | None:
    """CPUs that are idle just now, of those that this process may use; None if that cannot be read."""
    watch = HostWatch(proc=proc, cgroup_root=cgroup_root, clock=clock)
    watch.read()
    sleep(_IDLE_OVER_S)
    watch.read()
    return watch.activity().free_cpus


def host_facts(
    free: float | None,
    proc: Path = Path("/proc"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    shm: Path = Path("/dev/shm"),
) -> HostFacts:
    """What the host leaves to a training process; ``free`` is from :func:`free_cpus`."""
    from lightning_gpuopt.telemetry.resources import available_memory

    quota = quota_cpus(cgroup_root, proc)
    stopped = throttling([f"{group}/cpu.stat" for group in cgroups("cpu", cgroup_root, proc)])
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm_total: float | None = None
    shm_free: float | None = None
    with contextlib.suppress(OSError):
        shm_total, _, shm_free = (size / _MIB for size in shutil.disk_usage(shm))
    memory_total: float | None = None
    memory_available: float | None = None
    with contextlib.suppress(OSError, ValueError, KeyError):  # no /proc/meminfo, or one with other lines
        memory_total = psutil.virtual_memory().total / _MIB
        memory_available = available_memory(cgroup_root, proc) / _MIB
    return HostFacts(
        machine_cpus=os.cpu_count() or 1,
        affinity_cpus=allowed_cpus(),
        quota_cpus=None if math.isinf(quota) else quota,
        throttled_percent=None if stopped is None else 100.0 * stopped[1] / stopped[0],
        free_cpus=free,
        memory_total_mib=memory_total,
        memory_available_mib=memory_available,
        shm_total_mib=shm_total,
        shm_free_mib=shm_free,
        files_limit=None if soft == resource.RLIM_INFINITY else soft,
        files_open=entries(f"{proc}/self/fd"),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        mkl_num_threads=os.environ.get("MKL_NUM_THREADS"),
    )


def memory_rates(host: HostFacts, clock: Callable[[], float] = time.perf_counter) -> MemoryRates | None:
    """Copies within memory, with one thread and with all, in half a second; None if there is too little memory."""
    import torch

    if host.memory_available_mib is not None and host.memory_available_mib < _MEMORY_LEFT_MIB:
        return None
    threads = max(int(host.usable_cpus), 1)

    def rate(number: int) -> float:
        torch.set_num_threads(number)
        ends_s = [clock()]
        while len(ends_s) <= _COPIES and (len(ends_s) == 1 or ends_s[-1] - ends_s[0] < _COPIES_S):
            target.copy_(source)
            ends_s.append(clock())
        return _COPIED / 1e9 / min(end - begin for begin, end in itertools.pairwise(ends_s))

    before = torch.get_num_threads()
    try:
        source, target = (torch.empty(_COPIED, dtype=torch.uint8).fill_(1) for _ in range(2))  # no page is fresh
        one = rate(1)
        return MemoryRates(one, rate(threads) if threads > 1 else one, threads)
    except RuntimeError:  # a limit of the process that no counter shows
        return None
    finally:
        torch.set_num_threads(before)


def torch_facts() -> TorchFacts:
    """The torch that is installed; imports it, so a broken installation may raise anything."""
    import torch
    import torch.multiprocessing

    major, _, minor = (torch.version.cuda or "").partition(".")
    cuda = (int(major), int(minor.partition(".")[0] or 0)) if major else None
    sharing: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    return TorchFacts(str(torch.__version__), cuda, torch.get_num_threads(), sharing)


def versions_of(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def ask_cuda(timeout_s: float, command: Sequence[str] = PROBE) -> CudaFacts:
    """What CUDA says in a process of its own, which may hang or die; it prints the facts as a line of JSON."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        return CudaFacts(failure=f"no process could be started: {error}")
    try:
        printed, _ = process.communicate(timeout=timeout_s)
        if process.returncode:
            return CudaFacts(failure=f"the CUDA probe ended with code {process.returncode}")
        return _cuda_facts(json.loads(printed.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return CudaFacts(failure=f"CUDA did not respond within {timeout_s:g} s")
    except (ValueError, IndexError, KeyError, TypeError) as error:
        return CudaFacts(failure=f"the CUDA probe printed unexpected output ({error!r})")
    finally:
        process.kill()  # nothing, if it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel does not let go is left
            process.wait(1.0)
        if process.stdout is not None:
            process.stdout.close()


def _cuda_facts(data: dict[str, Any]) -> CudaFacts:
    devices = tuple(
        CudaDeviceFacts(
            each["name"],
            each["uuid"],
            (each["capability"][0], each["capability"][1]),
            CopyRates(**each["copies"]) if each["copies"] is not None else None,
        )
        for each in data["devices"]
    )
    return CudaFacts(data["available"], tuple(data["architectures"]), devices, data["failure"], data["refusal"])
