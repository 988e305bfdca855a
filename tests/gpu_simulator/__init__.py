"""A GPU without a GPU: an asynchronous CUDA device on which a real Lightning Trainer runs, on a machine with CPUs only.

Kernels take the time that a test gives them, in order, on streams; the host runs ahead until something makes it wait.
The numbers of tensors are computed on the CPU. ``gpu.ledger`` knows when the device worked, and when it stood idle::

    with simulated_gpu(copy_s=0.005) as gpu:
        model = SimulatedModule(gpu, Step(forward=Work(0.03), backward=Work(0.06)), pin_memory=True)
        Trainer(**gpu.trainer_arguments(), max_steps=20).fit(model)
        gpu.ledger.idle_s(begin_s, end_s)

In a module of one's own, ``gpu.launch(0.03)`` is a kernel and ``gpu.tensor(1.0).item()`` waits for it. On a
:class:`ManualClock` the numbers are exact. Several ranks are processes, started by ``tests.helpers.run_ranks`` with the
``env`` of :func:`rank_environment`.
"""

from tests.gpu_simulator.clock import ManualClock, RealClock
from tests.gpu_simulator.device import Device
from tests.gpu_simulator.events import Event, Refusal, Stream
from tests.gpu_simulator.exchange import Memory, rank_environment
from tests.gpu_simulator.gpu import SimulatedGpu, simulated_gpu
from tests.gpu_simulator.ledger import Activity, Ledger, Union, Wait
from tests.gpu_simulator.module import SimulatedModule, Step, Work
from tests.gpu_simulator.nvml import NvmlFollower
from tests.gpu_simulator.profiler import Profiling
from tests.gpu_simulator.strategies import SimulatedAccelerator, SimulatedDDPStrategy, SimulatedStrategy
from tests.gpu_simulator.tensors import DeviceTensor

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
