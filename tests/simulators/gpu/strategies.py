"""The simulated GPU as Lightning's accelerator, and the strategies for one rank and for several."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from typing_extensions import override


class SimulatedAccelerator(CUDAAccelerator):
    """``accelerator="cuda"`` without CUDA."""

    @override
    def setup_device(self, device: torch.device) -> None:
        """Nothing to choose."""

    @override
    def setup(self, trainer: Trainer) -> None:
        """Nothing to set up."""

    @override
    def teardown(self) -> None:
        """Nothing to free."""

    @staticmethod
    @override
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        return list(range(int(devices))) if isinstance(devices, (int, str)) else devices

    @staticmethod
    @override
    def is_available() -> bool:
        return True


def _leave_on_host(module: Any, root_device: torch.device, module_on_device: bool) -> None:
    """The parameters stay where they are; ``module.device`` says so, or pretends."""
    for each in module.modules():
        if hasattr(each, "_device"):
            each._device = root_device if module_on_device else torch.device("cpu")


class SimulatedStrategy(SingleDeviceStrategy):
    """One rank.

    Args:
        module_on_device: ``LightningModule.device`` says ``cuda``, as it does on a GPU; then ``self.log(name, 1.0)``
            makes its tensor there, which waits for the device, as it does on a GPU. Else it says ``cpu``.
        **kwargs: for ``SingleDeviceStrategy``.
    """

    def __init__(self, *, module_on_device: bool = False, **kwargs: Any) -> None:
        super().__init__(device=torch.device("cuda", 0), **kwargs)
        self._module_on_device = module_on_device

    @override
    def model_to_device(self) -> None:
        _leave_on_host(self.model, self.root_device, self._module_on_device)


class SimulatedDDPStrategy(DDPStrategy):
    """Several ranks over gloo. The gradients are not reduced: the time of that is what ``gpu.all_reduce`` takes.

    Real DDP over gloo would hold the host in backward, which NCCL does not. The weights start alike on all ranks.

    Args:
        module_on_device: see :class:`SimulatedStrategy`.
        **kwargs: for ``DDPStrategy``.
    """

    def __init__(self, *, module_on_device: bool = False, **kwargs: Any) -> None:
        super().__init__(**{"process_group_backend": "gloo", **kwargs})
        self._module_on_device = module_on_device

    @override
    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, LightningModule)
        _sync_module_states(self.model)

    @override
    def model_to_device(self) -> None:
        _leave_on_host(self.model, self.root_device, self._module_on_device)
