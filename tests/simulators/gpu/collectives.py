"""``torch.distributed`` on the simulated device: the numbers go through gloo, the time through the comm stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from tests.simulators.gpu.device import Mark
from tests.simulators.gpu.patches import Patches
from tests.simulators.gpu.tensors import DeviceTensor

if TYPE_CHECKING:
    from tests.simulators.gpu.gpu import SimulatedGpu


class Work:
    """What an asynchronous collective hands back: ``wait`` holds the current stream, and not the host."""

    def __init__(self, gpu: SimulatedGpu, mark: Mark) -> None:
        self._gpu, self._mark = gpu, mark

    def wait(self, timeout: Any = None) -> bool:
        self._gpu.wait(self._mark)
        return True

    def is_completed(self) -> bool:
        return self._gpu.passed(self._mark)


def install(gpu: SimulatedGpu, patches: Patches) -> None:
    """Let collectives of device tensors run on ``gpu``; others, and groups other than WORLD, stay as they are."""
    distributed: Any = torch.distributed
    if not distributed.is_available():
        return
    plain_broadcast, plain_all_reduce = distributed.broadcast, distributed.all_reduce
    plain_barrier = distributed.barrier

    def ours(tensor: Any, group: Any) -> bool:
        return isinstance(tensor, DeviceTensor) and (group is None or group is distributed.group.WORLD)

    def finish(mark: Mark, async_op: bool) -> Work | None:
        if async_op:
            return Work(gpu, mark)
        gpu.wait(mark)
        return None

    def broadcast(tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if not ours(tensor, group):
            return plain_broadcast(tensor, src, group, async_op, **kwargs)
        source = kwargs.get("group_src", src)
        # The host goes on at once, as under NCCL; whoever reads a value first waits for gloo as well.
        gpu.unfinished.append(plain_broadcast(tensor.plain(), source, async_op=True))
        return finish(gpu.collective(gpu.collective_s, "ncclDevKernel_Broadcast_RING_LL", [source or 0]), async_op)

    def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        operation = distributed.ReduceOp.SUM if op is None else op
        if not ours(tensor, group):
            return plain_all_reduce(tensor, operation, group, async_op)
        mark = gpu.collective(gpu.collective_s, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
        gpu.finish_host_work()
        plain_all_reduce(tensor.plain(), operation)
        return finish(mark, async_op)

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        if group is not None and group is not distributed.group.WORLD:
            return plain_barrier(group, async_op)
        mark = gpu.collective(gpu.collective_s, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
        gpu.finish_host_work()
        gpu.wait_for(mark, "barrier", "cudaStreamSynchronize")
        return plain_barrier(async_op=async_op)

    patches.set_all(distributed, broadcast=broadcast, all_reduce=all_reduce, barrier=barrier)
