"""A GPU without a GPU: an asynchronous CUDA device on which a real Lightning Trainer runs, on a machine with CPUs only.

Kernels take the time that a test gives them, in order, on streams; the host runs ahead until something makes it wait.
The numbers of tensors are computed on the CPU. ``gpu.ledger`` knows when the device worked, and when it stood idle::

    with simulated_gpu(copy_s=0.005) as gpu:
        model = SimulatedModule(gpu, Step(forward=Work(0.03), backward=Work(0.06)), pin_memory=True)
        Trainer(**gpu.trainer_arguments(), max_steps=20).fit(model)
        gpu.ledger.idle_s(begin_s, end_s)

In a module of one's own, ``gpu.launch(0.03)`` is a kernel and ``gpu.tensor(1.0).item()`` waits for it. On a
:class:`ManualClock` the numbers are exact. Several ranks are processes, started by ``tests.ranks.run_ranks`` with the
``env`` of :func:`rank_environment`.
"""

from tests.simulators.gpu.clock import ManualClock, RealClock
from tests.simulators.gpu.device import Device
from tests.simulators.gpu.events import Event, Refusal, Stream
from tests.simulators.gpu.exchange import Memory, rank_environment
from tests.simulators.gpu.gpu import SimulatedGpu, simulated_gpu
from tests.simulators.gpu.ledger import Activity, Ledger, Union, Wait
from tests.simulators.gpu.module import SimulatedModule, Step, Work
from tests.simulators.gpu.nvml import NvmlFollower
from tests.simulators.gpu.profiler import Profiling
from tests.simulators.gpu.strategies import SimulatedAccelerator, SimulatedDDPStrategy, SimulatedStrategy
from tests.simulators.gpu.tensors import DeviceTensor

__all__ = [
    "Activity",
    "Device",
    "DeviceTensor",
    "Event",
    "Ledger",
    "ManualClock",
    "Memory",
    "NvmlFollower",
    "Profiling",
    "RealClock",
    "Refusal",
    "SimulatedAccelerator",
    "SimulatedDDPStrategy",
    "SimulatedGpu",
    "SimulatedModule",
    "SimulatedStrategy",
    "Step",
    "Stream",
    "Union",
    "Wait",
    "Work",
    "rank_environment",
    "simulated_gpu",
]
