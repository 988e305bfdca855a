"""NVML without a GPU: a C library with NVML's ABI, which the real pynvml loads in place of the driver's.

A test describes the machine, and what goes wrong on it, in Python::

    def test_something(simulator):
        simulator.machine(Gpu(utilization=[50, 90]), error("nvmlDeviceGetPowerUsage", 999, from_call=3))

The library reads that scenario when NVML is initialised; ``simulator.now(...)`` changes it in mid-run.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

AMPERE, HOPPER = 7, 9  # NVML_DEVICE_ARCH_*
SONAME = "libnvidia-ml.so.1"
MIB = 1024 * 1024

Trace = float | Sequence[float] | None
"""One value for good, or the values of successive readings (the last one stays); None: not supported."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Gpu:
    """One simulated device, in NVML's own units where the name has none."""

    uuid: str = ""
    name: str = "NVIDIA Simulated H100"
    pci: str = ""
    architecture: int = HOPPER
    utilization: Trace = 50
    memory_utilization: Trace = 20
    memory_used: Trace = 2048 * MIB
    memory_total: Trace = 8192 * MIB
    memory_reserved: Trace = 512 * MIB
    power: Trace = 200_000
    power_limit: Trace = 400_000
    temperature: Trace = 60
    sm_clock: Trace = 1500
    sm_clock_max: Trace = 1980
    mem_clock: Trace = 2000
    clock_reasons: Trace = 0
    pcie_tx: Trace = 1024
    pcie_rx: Trace = 2048
    decoder: Trace = 5
    jpeg: Trace = 7
    ecc: Trace = 0
    power_limit_default: Trace = 400_000
    persistence: Trace = 1
    pcie_generation: Trace = 5
    pcie_generation_max: Trace = 5
    pcie_lanes: Trace = 16
    pcie_lanes_max: Trace = 16
    mig_mode: Trace = 0
    ecc_mode: Trace = 1
    driver: Trace = 580.95
    """Of the first device: the machine's, with two decimals."""
    cuda: Trace = 13000
    """Of the first device: the newest CUDA that the driver runs, 1000 × major + 10 × minor."""
    gpm: dict[int, Trace] = field(default_factory=lambda: {2: 60.0, 5: 30.0, 10: 40.0})
    fields: dict[tuple[int, int], Trace] = field(default_factory=dict)
    """(field id, scope id) -> values of ``nvmlDeviceGetFieldValues``."""
    nvlinks: Sequence[Trace] = ()
    """Of each NVLink whether it is up (1) or down (0)."""
    samples: Sequence[Sequence[tuple[int, int]]] = ()
    """What each drain of the utilization buffer newly finds: (time in us, percent)."""
    processes: Sequence[int] = ()
    """Identifiers of the processes that compute on it."""
    mig: Sequence[Gpu] = ()
    gpu_instance: int = 0

    def lines(self, position: int, parent: int = -1) -> Iterator[str]:
        """This device's part of a scenario."""
        yield f"device {self.uuid} {self.pci} {self.architecture} {parent} {self.gpu_instance} {self.name}"
        traces = {name: getattr(self, name) for name in _SIGNALS}
        traces |= {f"gpm.{metric}": values for metric, values in self.gpm.items()}
        traces |= {f"field.{number}.{scope}": values for (number, scope), values in self.fields.items()}
        traces |= {f"nvlink.{link}": values for link, values in enumerate(self.nvlinks)}
        traces |= {"processes": self.processes} if self.processes else {}
        for signal, values in traces.items():
            if values is not None:
                numbers = values if isinstance(values, Sequence) else [values]
                yield f"trace {position} {signal} {' '.join(map(repr, numbers))}"
        for drain, batch in enumerate(self.samples):
            yield from (f"sample {position} {drain} {time_us} {value}" for time_us, value in batch)


_SIGNALS = [
    "utilization",
    "memory_utilization",
    "memory_used",
    "memory_total",
    "memory_reserved",
    "power",
    "power_limit",
    "temperature",
    "sm_clock",
    "sm_clock_max",
    "mem_clock",
    "clock_reasons",
    "pcie_tx",
    "pcie_rx",
    "decoder",
    "jpeg",
    "ecc",
    "power_limit_default",
    "persistence",
    "pcie_generation",
    "pcie_generation_max",
    "pcie_lanes",
    "pcie_lanes_max",
    "mig_mode",
    "ecc_mode",
    "driver",
    "cuda",
]


def mig_instance(gpu_instance: int, **kwargs: object) -> Gpu:
    """A MIG instance, which has its own memory and GPM metrics and nothing else."""
    bare = Gpu(**dict.fromkeys(_SIGNALS))  # type: ignore[arg-type]
    memory: dict[str, object] = {"memory_used": 1024 * MIB, "memory_total": 4096 * MIB, "memory_reserved": 0}
    return replace(bare, gpu_instance=gpu_instance, **{**memory, **kwargs})  # type: ignore[arg-type]


def error(function: str, code: int, *, device: int = -1, from_call: int = 0, times: int = -1) -> str:
    """``function`` (or ``"*"``) returns ``code`` from the k-th call on; ``gpm.<id>`` is a metric's own nvmlReturn."""
    return f"error {device} {function} {from_call} {times} {code}"


def odd(answer: str, value: int = 1, *, device: int = -1, from_call: int = 0, times: int = -1) -> str:
    """An answer that NVML's documentation does not have.

    ``"samples.empty"``: a drain that finds nothing is a success; ``"values.type"``: samples and fields are of type
    ``value``.
    """
    return error(answer, value, device=device, from_call=from_call, times=times)


def slow(function: str, milliseconds: int, *, device: int = -1, from_call: int = 0, times: int = -1) -> str:
    """``function`` takes so long before it answers."""
    return f"slow {device} {function} {from_call} {times} {milliseconds}"


def hang(function: str, *, device: int = -1, from_call: int = 0, times: int = -1) -> str:
    """``function`` does not come back until ``simulator.release()``."""
    return f"hang {device} {function} {from_call} {times} 0"


class Simulator:
    """The loaded library."""

    def __init__(self, library: Path, scenario: Path) -> None:
        self.library = library
        self.scenario = scenario
        self._c = ctypes.CDLL(str(library))
        self._c.sim_calls.restype = ctypes.c_long
        self._c.sim_calls.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self._c.sim_command.argtypes = [ctypes.c_char_p]

    def machine(self, *parts: Gpu | str) -> list[Gpu]:
        """Write the scenario of the next initialisation; returns the physical GPUs with their UUIDs filled in."""
        gpus: list[Gpu] = []
        lines: list[str] = []
        position = 0
        for part in parts:
            if isinstance(part, str):
                continue
            index = len(gpus)
            gpu = _named(part, f"GPU-{index:08d}-aaaa-bbbb-cccc-dddddddddddd", f"00000000:{index + 1:02X}:00.0")
            children = [
                _named(child, f"MIG-{index:08d}-{slot:04d}-bbbb-cccc-dddddddddddd", gpu.pci)
                for slot, child in enumerate(gpu.mig)
            ]
            gpus.append(replace(gpu, mig=children))
            lines += gpu.lines(position)
            for offset, child in enumerate(children, start=1):
                lines += child.lines(position + offset, parent=position)
            position += 1 + len(children)
        lines += [part for part in parts if isinstance(part, str)]
        self.scenario.write_text("\n".join(lines) + "\n")
        return gpus

    def now(self, line: str) -> None:
        """Apply :func:`error`, :func:`slow` or :func:`hang` at once."""
        self._c.sim_command(line.encode())

    def release(self) -> None:
        """Let every hanging call go on."""
        self._c.sim_command(b"release")

    def calls(self, function: str = "*", *, thread: int = 0) -> int:
        """How often ``function`` was called, by the thread with that native id or by all."""
        return int(self._c.sim_calls(function.encode(), thread))

    def calls_here(self) -> int:
        """How many calls the current thread made."""
        return self.calls(thread=threading.get_native_id())

    def forget_calls(self) -> None:
        """Begin to count anew."""
        self._c.sim_forget_calls()

    @property
    def references(self) -> int:
        """Initialisations not yet shut down."""
        return int(self._c.sim_references())

    @property
    def hanging(self) -> int:
        """Threads now held in a hanging call."""
        return int(self._c.sim_hanging())

    @property
    def gpm_samples_alive(self) -> int:
        """GPM samples allocated and not yet freed."""
        return int(self._c.sim_gpm_samples_alive())

    def environment(self) -> dict[str, str]:
        """An environment in which another process finds this library, and this scenario, through the loader."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": f"{self.library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "NVML_SIM_SCENARIO": str(self.scenario),
        }


def _named(gpu: Gpu, uuid: str, pci: str) -> Gpu:
    return replace(gpu, uuid=gpu.uuid or uuid, pci=gpu.pci or pci)


def build(folder: Path) -> Path | None:
    """Compile the library into ``folder``; None where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    library = folder / SONAME
    flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{SONAME}", "-lpthread"]
    subprocess.run([compiler, *_HERE.glob("*.c"), *flags, "-o", library], check=True)
    return library
