"""What ``torch.cuda`` and ``torch.accelerator`` answer while a simulated GPU is installed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.simulators.gpu import events
from tests.simulators.gpu.device import Queue
from tests.simulators.gpu.patches import Patches

if TYPE_CHECKING:
    from tests.simulators.gpu.gpu import SimulatedGpu

GIB = 2**30
NAME = "Simulated GPU"


class StreamContext:
    """``torch.cuda.stream(stream)``."""

    def __init__(self, gpu: SimulatedGpu, stream: events.Stream | None) -> None:
        self._gpu, self.stream = gpu, stream
        self._before: Queue | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before, self._gpu.current = self._gpu.current, self.stream.queue

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            self._gpu.current, self._before = self._before, None


def properties(index: int) -> SimpleNamespace:
    """Agrees with device ``index`` of ``tests.simulators.nvml``."""
    return SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=80 * GIB,
        multi_processor_count=132,
        uuid=f"{index:08d}-aaaa-bbbb-cccc-dddddddddddd",
        pci_domain_id=0,
        pci_bus_id=index + 1,
        pci_device_id=0,
    )


def _index(device: Any, default: int) -> int:
    if isinstance(device, int):
        return device
    number = None if device is None else torch.device(device).index
    return default if number is None else number


class Runtime:
    """``torch.cuda.cudart()``: host memory that is not torch's own is page-locked through it."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """As CUDA's; 0, or the error's code."""
        if self._gpu.refuses_host_memory:
            return 2  # cudaErrorMemoryAllocation
        if any(address < at + there and at < address + size for at, there in self._gpu.host_memory.items()):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self._gpu.host_memory[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        """As CUDA's."""
        if self._gpu.keeps_host_memory:
            return 900  # cudaErrorStreamCaptureUnsupported
        return 0 if self._gpu.host_memory.pop(address, 0) else 713  # cudaErrorHostMemoryNotRegistered


def check_error(code: int) -> None:
    """As torch's."""
    if code:
        raise RuntimeError(f"CUDA error {code}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """For what the simulated device has no use for."""


def install(gpu: SimulatedGpu, patches: Patches) -> None:
    """Replace what asks for a device; NVTX stays as it is."""
    cuda: Any = torch.cuda

    class Event(events.Event):
        __slots__ = ()

        def __init__(
            self,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> None:
            super().__init__(gpu, gpu.refusal, enable_timing)

    class Stream(events.Stream):
        def __init__(self, device: Any = None, priority: int = 0, *, queue: Queue | None = None) -> None:
            super().__init__(gpu, queue, gpu.index)

    def wrap(queue: Queue) -> Stream:
        return Stream(queue=queue)

    def default_stream(device: Any = None) -> Stream:
        return wrap(gpu.default)

    def stream(stream: Any) -> StreamContext:
        return StreamContext(gpu, stream)

    def set_stream(stream: Any) -> None:
        gpu.current = stream.queue

    def synchronize(device: Any = None) -> None:
        gpu.synchronize()

    def memory(key: str) -> Any:
        return lambda device=None: gpu.memory[key]

    def reset_peak(device: Any = None) -> None:
        for kind in ("allocated", "reserved"):
            gpu.memory[f"{kind}_bytes.all.peak"] = gpu.memory[f"{kind}_bytes.all.current"]

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return 80 * GIB - gpu.memory["reserved_bytes.all.current"], 80 * GIB

    device = torch.device("cuda", gpu.index)
    patches.set_all(
        cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=_nothing,
        _lazy_init=_nothing,
        device_count=lambda: gpu.device_count,
        current_device=lambda: gpu.index,
        set_device=_nothing,
        device=lambda device=None: contextlib.nullcontext(),
        get_device_name=lambda device=None: NAME,
        get_device_properties=lambda device=None: properties(_index(device, gpu.index)),
        get_device_capability=lambda device=None: (9, 0),
        is_bf16_supported=lambda *args, **kwargs: True,
        is_current_stream_capturing=lambda: False,
        Event=Event,
        Stream=Stream,
        stream=stream,
        StreamContext=lambda stream: StreamContext(gpu, stream),
        set_stream=set_stream,
        current_stream=lambda device=None: wrap(gpu.current),
        default_stream=default_stream,
        synchronize=synchronize,
        memory_stats=lambda device=None: dict(gpu.memory),
        memory_allocated=memory("allocated_bytes.all.current"),
        max_memory_allocated=memory("allocated_bytes.all.peak"),
        memory_reserved=memory("reserved_bytes.all.current"),
        max_memory_reserved=memory("reserved_bytes.all.peak"),
        reset_peak_memory_stats=reset_peak,
        mem_get_info=mem_get_info,
        empty_cache=_nothing,
        cudart=lambda: Runtime(gpu),
        check_error=check_error,
        ipc_collect=_nothing,
        manual_seed=_nothing,
        manual_seed_all=_nothing,
        get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
        set_rng_state=_nothing,
        get_rng_state_all=list,
        set_rng_state_all=_nothing,
    )
    patches.set_all(
        torch._C,
        _cuda_get_sync_debug_mode=gpu.sync_debug.get,
        _cuda_set_sync_debug_mode=gpu.sync_debug.set,
    )
    accelerator: Any = getattr(torch, "accelerator", None)  # since torch 2.6; DataLoader pins through it
    if accelerator is not None:
        patches.set_all(
            accelerator,
            is_available=lambda: True,
            current_accelerator=lambda check_available=False: device,
            device_count=lambda: gpu.device_count,
            current_device_index=lambda: gpu.index,
            set_device_index=_nothing,
            synchronize=synchronize,
        )
