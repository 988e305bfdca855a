"""The GPU as a program sees it, and its installation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from tests.simulators.gpu import collectives, exchange, profiler, tensors, torch_cuda
from tests.simulators.gpu.clock import Clock
from tests.simulators.gpu.device import Device, Mark
from tests.simulators.gpu.events import Refusal
from tests.simulators.gpu.nvml import NvmlFollower
from tests.simulators.gpu.patches import Patches
from tests.simulators.gpu.syncs import SyncDebug
from tests.simulators.gpu.tensors import DeviceTensor

_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_READ_EVERY_S = 1e-3


class SimulatedGpu(Device):
    """A device with a host's view of it; made by :func:`simulated_gpu`.

    Attributes:
        copy_s: seconds of one batch's copy to the device (one call of ``move_data_to_device``); None: by its size.
        bandwidth: bytes a second of a copy of pinned memory.
        pageable_bandwidth: bytes a second of a copy of pageable memory.
        pinned: whether batches count as pinned; None: what ``tensor.is_pinned()`` says.
        item_s: seconds of the copy of one value to the host.
        list_s: seconds in which ``tolist()`` makes a list of what it has waited for.
        collective_s: seconds of a small collective (the signal broadcast, a logged value).
        memory: what ``torch.cuda.memory_stats()`` says.
        profiling: how ``torch.profiler`` behaves.
        index: this rank's device.
        recorded_streams: streams for which ``record_stream`` was called on a tensor.
        host_memory: what is registered by ``cudaHostRegister``, bytes by address.
        refuses_host_memory: whether that fails.
        keeps_host_memory: whether ``cudaHostUnregister`` fails.
    """

    def __init__(self, clock: Clock | None = None, joins: exchange.Exchange | None = None, **kwargs: Any) -> None:
        super().__init__(clock, joins, **kwargs)
        self.copy_s: float | None = None
        self.bandwidth = 25e9
        self.pageable_bandwidth = 6e9
        self.pinned: bool | None = None
        self.item_s = 2e-6
        self.list_s = 0.0
        self.collective_s = 2e-5
        self.memory: dict[str, int] = {
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "allocated_bytes.all.current": 2**30,
            "allocated_bytes.all.peak": 2**30,
            "reserved_bytes.all.current": 2**31,
            "reserved_bytes.all.peak": 2**31,
        }
        self.profiling = profiler.Profiling()
        self.refusal = Refusal()
        self.sync_debug = SyncDebug()
        self.index = int(os.environ.get("LOCAL_RANK", "0"))
        self.device_count = max(self.exchange.world_size, self.index + 1)
        self.unfinished: list[Any] = []
        self.recorded_streams: list[int] = []
        self.host_memory: dict[int, int] = {}
        self.refuses_host_memory = self.keeps_host_memory = False
        self._batch = threading.local()
        self._undo = ExitStack()
        before_s, now_ns, after_s = self.clock(), time.time_ns(), self.clock()
        self._epoch_ns = now_ns - round((before_s + after_s) / 2 * 1e9)

    # ---- values and waits ----

    def tensor(self, value: Any, **kwargs: Any) -> DeviceTensor:
        """A tensor that a kernel made: reading it waits for the current stream, making it does not."""
        return torch.as_tensor(value, **kwargs).as_subclass(DeviceTensor)

    def item(self, value: float = 0.0) -> float:
        """Read a number from the device, as ``loss.item()`` does: waits for the current stream."""
        self.read_value()
        return value

    def synchronize(self) -> None:
        """Wait for all streams, as ``torch.cuda.synchronize()``; torch's debug mode does not warn of this one."""
        self.finish_host_work()
        self.drain()

    def read_value(self) -> None:
        """What a synchronizing read does to the host."""
        with self.synchronizing_call():
            self.finish_host_work()
            self.copy(self.item_s, "d2h")  # torch reads a number through pinned memory
            self.wait_for(self.record(), "item")

    def synchronizing_call(self) -> AbstractContextManager[None]:
        """Torch's check at a synchronizing operation, around that."""
        return self.sync_debug.call() if self.sync_debug.mode else nullcontext()

    def finish_host_work(self) -> None:
        """Wait for what gloo still does for device tensors."""
        while self.unfinished:
            self.unfinished.pop(0).wait()

    # ---- copies ----

    def copy_in(self, source: torch.Tensor, non_blocking: bool, address: int = 0) -> None:
        """Copy a host tensor to the device; ``address``: into memory that was there before."""
        pinned = tensors.is_pinned(source) if self.pinned is None else self.pinned
        seconds = self._batch_share()
        nbytes = source.numel() * source.element_size()
        if seconds is None:
            seconds = nbytes / (self.bandwidth if pinned else self.pageable_bandwidth)
        with nullcontext() if non_blocking else self.synchronizing_call():
            if seconds > 0:
                self.copy(seconds, "h2d", pinned=pinned, address=address, nbytes=nbytes)
            if pinned and not non_blocking:
                self.wait_for(self.record(), "copy")

    def copy_out(self, target: torch.Tensor, non_blocking: bool, then_s: float = 0.0) -> None:
        """Copy a device tensor to the host; torch allocates pinned memory for one that does not block.

        Args:
            then_s: for so long the host works on in the same call.
        """
        seconds = self.item_s + target.nbytes / self.bandwidth
        with nullcontext() if non_blocking else self.synchronizing_call():
            if not non_blocking:
                self.finish_host_work()
            self.copy(seconds, "d2h", pinned=non_blocking, nbytes=target.nbytes)
            if then_s:
                self.clock.sleep_until(self.clock() + then_s)

    def _batch_share(self) -> float | None:
        """The first tensor of a batch takes the time of all of them."""
        share: float | None = getattr(self._batch, "left_s", None)
        if share is not None:
            self._batch.left_s = 0.0
        return share

    def _timed_batches(self, move: Callable[..., Any]) -> Callable[..., Any]:
        def move_data_to_device(batch: Any, device: Any) -> Any:
            if self.copy_s is None or not tensors.is_cuda(device) or getattr(self._batch, "left_s", None) is not None:
                return move(batch, device)
            self._batch.left_s = self.copy_s
            try:
                return move(batch, device)
            finally:
                self._batch.left_s = None

        return move_data_to_device

    # ---- communication ----

    def all_reduce(self, seconds: float) -> None:
        """All-reduce a bucket of gradients on the communication stream, after what the current stream holds now."""
        self._reduced = self.collective(seconds, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")

    def wait_all_reduce(self) -> None:
        """Let the current stream wait for the last bucket, as DDP's reducer does at the end of backward."""
        mark: Mark | None = getattr(self, "_reduced", None)
        if mark is not None:
            self.wait(mark)

    # ---- what goes wrong ----

    def refuse_events(self, after: int = 0) -> None:
        """``record`` and ``elapsed_time`` raise, as in a CUDA graph's capture, after so many more calls."""
        self.refusal.left = after

    def accept_events(self) -> None:
        """End :meth:`refuse_events`."""
        self.refusal.left = None

    # ---- others who look on ----

    def unix_ns(self, moment_s: float) -> int:
        """A moment of the device's clock as kineto writes it."""
        return self._epoch_ns + round(moment_s * 1e9)

    def follow_nvml(self, simulator: Any, device: int = 0, **kwargs: Any) -> NvmlFollower:
        """Let the NVML simulator's figures follow this device until the GPU is taken away; see NvmlFollower."""
        follower = NvmlFollower(self.ledger, self.clock, simulator, device, **kwargs)
        self._undo.callback(follower.stop)
        follower.start()
        return follower

    def trainer_arguments(self, **strategy: Any) -> dict[str, Any]:
        """Arguments that put a Trainer on this GPU; under several ranks with the DDP strategy.

        Args:
            **strategy: for SimulatedStrategy or SimulatedDDPStrategy.
        """
        from tests.simulators.gpu.strategies import SimulatedAccelerator, SimulatedDDPStrategy, SimulatedStrategy

        world_size = self.exchange.world_size
        made = SimulatedStrategy(**strategy) if world_size == 1 else SimulatedDDPStrategy(**strategy)
        return {"accelerator": SimulatedAccelerator(), "devices": world_size, "strategy": made}

    # ---- installation ----

    def install(self) -> None:
        """Put this GPU into torch and Lightning."""
        if tensors.installed() is not None:
            raise RuntimeError("a simulated GPU is installed already")
        patches = Patches()
        self._undo.callback(patches.undo)
        self._undo.callback(tensors.uninstall)
        tensors.install(self, patches)
        torch_cuda.install(self, patches)
        collectives.install(self, patches)
        profiler.install(self, patches)
        patches.set_everywhere(_LIGHTNING, "move_data_to_device", self._timed_batches)
        if self.exchange.world_size > 1:
            self._publish_in_the_background()

    def uninstall(self) -> None:
        """Take it away."""
        self._undo.close()

    def _publish_in_the_background(self) -> None:
        """Other ranks must hear when this one's streams join, whatever its host does meanwhile."""
        done = threading.Event()

        def publish() -> None:
            while not done.wait(_READ_EVERY_S):
                if self.has_unpublished:
                    self.refresh()

        thread = threading.Thread(target=publish, name="sim-comm", daemon=True)
        thread.start()

        def stop() -> None:
            done.set()
            thread.join()

        self._undo.callback(stop)


@contextmanager
def simulated_gpu(
    clock: Clock | None = None, joins: exchange.Exchange | None = None, **settings: Any
) -> Iterator[SimulatedGpu]:
    """Install a simulated GPU, and take it away again.

    Args:
        clock: real time by default; a ``ManualClock`` for exact numbers.
        joins: how ranks exchange when they join a collective; by default what the environment says.
        **settings: attributes of :class:`SimulatedGpu`, such as ``copy_s=0.01``.
    """
    shared = exchange.from_environment() if joins is None else joins
    launch_queue: int = settings.pop("launch_queue", 1024)
    gpu = SimulatedGpu(clock, shared, launch_queue=launch_queue)
    for name, value in settings.items():
        if not hasattr(gpu, name):
            raise TypeError(f"a simulated GPU has no setting {name!r}")
        setattr(gpu, name, value)
    try:
        gpu.install()
        yield gpu
    finally:
        gpu.uninstall()
        if joins is None and isinstance(shared, exchange.SharedFile):
            shared.close()


__all__: Sequence[str] = ["SimulatedGpu", "simulated_gpu"]
