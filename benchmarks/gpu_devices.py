"""Makes kernels of a known length: on a real GPU, or on the tests' simulated one for trying the benchmark out."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from gpu_parts import Load, Skip, new_event

from tests.simulators.gpu import SimulatedGpu, simulated_gpu
from tests.simulators.nvml import Gpu, Simulator, build

KERNEL = "spin_kernel"
"""A part of the name of :meth:`Device.work`'s kernel (aten/src/ATen/cuda/Sleep.cu)."""

_TINY_PIECES = 20


class Device(Protocol):
    """What the sections need of a GPU."""

    simulated: bool

    def work(self, ms: float) -> None:
        """Queue one kernel of so many milliseconds."""

    def tiny(self, host_ms: float) -> None:
        """Queue kernels that are much shorter than their launch, for so many milliseconds of the host's time."""

    def trainer_arguments(self) -> dict[str, Any]:
        """What puts a Trainer on this device."""

    def compile(self, layer: torch.nn.Module) -> Any:
        """The layer under ``torch.compile``."""

    def load(self) -> Load | SimulatedLoad:
        """Work that keeps it busy for a given time."""


class SimulatedLoad:
    """The simulated counterpart of Load: short kernels, so that a few steps fill the queue of launches, as there."""

    ms_each = 0.25

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def run(self, times: int) -> None:
        for _ in range(times):
            self._gpu.launch(self.ms_each / 1e3, name="gemm")

    def times_for(self, ms: float) -> int:
        return max(1, round(ms / self.ms_each))


class RealDevice:
    """CUDA device 0. ``torch.cuda._sleep`` keeps it busy for a number of its own clock cycles."""

    simulated = False

    def __init__(self) -> None:
        self._small = torch.zeros(8, device="cuda")
        self._sleep = getattr(torch.cuda, "_sleep", None)
        if self._sleep is None:
            raise Skip("this torch has no torch.cuda._sleep")
        cycles = 10_000_000
        for _ in range(20):  # until the clocks are up
            self._sleep(cycles)
        torch.cuda.synchronize()
        begin, end = new_event(), new_event()
        begin.record()
        for _ in range(20):
            self._sleep(cycles)
        end.record()
        end.synchronize()
        self.cycles_per_ms = cycles / (begin.elapsed_time(end) / 20)
        count = 2000
        for _ in range(2):
            begin_s = time.perf_counter()
            for _ in range(count):
                self._small.add_(1.0)
            self.launch_ms = (time.perf_counter() - begin_s) / count * 1e3
            torch.cuda.synchronize()

    def work(self, ms: float) -> None:
        self._sleep(round(ms * self.cycles_per_ms))

    def tiny(self, host_ms: float) -> None:
        for _ in range(max(1, round(host_ms / self.launch_ms))):
            self._small.add_(1.0)

    def trainer_arguments(self) -> dict[str, Any]:
        return {"accelerator": "gpu", "devices": 1}

    def compile(self, layer: torch.nn.Module) -> Any:
        compiled = torch.compile(layer)
        try:
            compiled(torch.zeros(1, 64, device="cuda")).sum().backward()
        except Exception as error:  # no C compiler, no Triton
            reason = str(error).strip().splitlines()
            raise Skip(f"torch.compile does not work here: {reason[0] if reason else type(error).__name__}") from error
        return compiled

    def load(self) -> Load:
        return Load()


class SimulatedDevice:
    """The simulated GPU."""

    simulated = True

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def work(self, ms: float) -> None:
        self._gpu.launch(ms / 1e3, name=KERNEL)

    def tiny(self, host_ms: float) -> None:
        host_s = host_ms / 1e3 / _TINY_PIECES
        self._gpu.issue(_TINY_PIECES, host_s, 0.3 * host_s, name="vectorized_elementwise_kernel")

    def trainer_arguments(self) -> dict[str, Any]:
        return self._gpu.trainer_arguments()

    def compile(self, layer: torch.nn.Module) -> Any:
        raise Skip("torch.compile cannot trace the simulated GPU's tensors")

    def load(self) -> SimulatedLoad:
        return SimulatedLoad(self._gpu)


@cache
def _nvml_library() -> Path:
    """The NVML simulator, built once for this process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # another user of this machine reads it, too: section gpm_without_root
    library = build(folder)
    if library is None:
        raise Skip("the NVML simulator needs a C compiler")
    return library


@contextlib.contextmanager
def simulated_nvml(*gpus: Gpu) -> Iterator[Simulator]:
    """NVML of these GPUs, which the real bindings load."""
    scenario = _nvml_library().parent / "scenario.txt"
    os.environ["NVML_SIM_SCENARIO"] = str(scenario)
    simulator = Simulator(_nvml_library(), scenario)
    simulator.machine(*gpus)
    yield simulator


@contextlib.contextmanager
def a_device(*, simulated: bool) -> Iterator[Device]:
    """The real device, or the simulated one with its NVML."""
    if not simulated:
        yield RealDevice()
        return
    with simulated_nvml(Gpu(gpm={})) as simulator, simulated_gpu() as gpu:
        gpu.follow_nvml(simulator)
        yield SimulatedDevice(gpu)
