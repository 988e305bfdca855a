"""A LightningModule whose steps take the GPU, and the host that issues them, a given time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from tests.simulators.gpu.gpu import SimulatedGpu

_FEATURES = 4


@dataclass(frozen=True)
class Work:
    """Kernels of equal length.

    Attributes:
        gpu_s: seconds of all of them on the device.
        kernels: how many.
        host_s: seconds that the host takes to issue them all.
        name: theirs.
    """

    gpu_s: float = 0.0
    kernels: int = 1
    host_s: float = 0.0
    name: str = "kernel"

    def issue(self, gpu: SimulatedGpu) -> None:
        """Give them to the current stream."""
        gpu.issue(self.kernels, self.host_s / self.kernels, self.gpu_s / self.kernels, name=self.name)


@dataclass(frozen=True)
class Step:
    """What a training step gives the device.

    Attributes:
        forward: work of ``training_step``.
        backward: work of ``backward``, spread over the buckets.
        optimizer: work of the optimizer's step.
        all_reduce_s: each bucket's all-reduce, which starts when its share of backward is done.
    """

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    optimizer: Work = field(default_factory=Work)
    all_reduce_s: tuple[float, ...] = ()


class SimulatedModule(LightningModule):
    """One linear layer, trained for real on the CPU, under work that is simulated.

    Override ``training_step``, call ``super()``, and add what a test is about: ``loss.item()``, ``self.log``, a sleep.

    Args:
        gpu: the device.
        step: what each step gives it.
        batches: how many the default loader has.
        **loader: arguments of the default ``DataLoader``.
    """

    def __init__(self, gpu: SimulatedGpu, step: Step | None = None, batches: int = 64, **loader: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(_FEATURES, 1)
        self.gpu, self.step, self.batches, self.loader = gpu, step or Step(), batches, loader

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.step.forward.issue(self.gpu)
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        loss: torch.Tensor = self.layer(inputs).pow(2).mean()
        return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        whole, buckets = self.step.backward, self.step.all_reduce_s
        if not buckets:
            whole.issue(self.gpu)
            return
        count = len(buckets)
        share = Work(whole.gpu_s / count, max(1, whole.kernels // count), whole.host_s / count, whole.name)
        for seconds in buckets:
            share.issue(self.gpu)
            self.gpu.all_reduce(seconds)
        self.gpu.wait_all_reduce()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.step.optimizer.issue(self.gpu)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step.forward.issue(self.gpu)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        arguments = {"batch_size": 2, **self.loader}
        dataset = arguments.pop("dataset", None)
        samples = torch.ones(self.batches * arguments["batch_size"], _FEATURES)
        return DataLoader(dataset or TensorDataset(samples), **arguments)

    val_dataloader = train_dataloader
