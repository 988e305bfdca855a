"""What GPU faults are made of: samples, modules, callbacks and loggers for a Trainer on the simulated GPU."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset

from evaluation.parts import spin
from evaluation.pause_parts import HasObjects, compiled_sum
from tests.simulators.gpu import SimulatedGpu, SimulatedModule, Step, Work

_BATCH = 2


@dataclass(frozen=True)
class Scene:
    """Where a case is built.

    Attributes:
        gpu: this rank's simulated GPU.
        rank: this rank.
        folder: for its files.
    """

    gpu: SimulatedGpu
    rank: int
    folder: Path

    def on(self, rank: int, there: float, elsewhere: float = 0.0) -> float:
        """One number on one rank, another on the others."""
        return there if self.rank == rank else elsewhere


@dataclass(frozen=True)
class Parts:
    """What is trained.

    Attributes:
        step: what each step gives the device and the host.
        data: the training set.
        loader: further arguments of its DataLoader.
        module: the kind of module.
        callbacks: besides the detector.
        trainer: further arguments of the Trainer.
        validation: what each validation batch gives the device.
        options: attributes of the module.
    """

    step: Step
    data: Samples = field(default_factory=lambda: Samples())
    loader: dict[str, Any] = field(default_factory=dict)
    module: type[FaultModule] = field(default_factory=lambda: FaultModule)
    callbacks: list[Callback] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    validation: Work = field(default_factory=Work)
    options: dict[str, Any] = field(default_factory=dict)


def steps_of(
    gpu_s: float, host_s: float, kernels: int = 20, all_reduce_s: tuple[float, ...] = (), forward_more_s: float = 0.0
) -> Step:
    """A step of so many seconds on the GPU, which the host needs so many to issue: forward, backward, optimizer."""

    def part(share: float, name: str, more_s: float = 0.0) -> Work:
        return Work(gpu_s * share + more_s, max(1, round(kernels * share)), host_s * share, name)

    return Step(part(0.3, "forward", forward_more_s), part(0.6, "backward"), part(0.1, "optimizer"), all_reduce_s)


# ---- data ----


class Samples(Dataset[Any]):
    """Batches of two that take a given time to load, waiting or computing.

    Args:
        wait_s: seconds a batch, waiting as for a disk.
        compute_s: seconds a batch, computing as a transform does.
        floats: extra numbers in each sample, for the copy.
        batches: in an epoch.
    """

    def __init__(self, wait_s: float = 0.0, compute_s: float = 0.0, floats: int = 0, batches: int = 100_000) -> None:
        self.wait_s, self.compute_s, self.floats, self.batches = wait_s, compute_s, floats, batches

    def __len__(self) -> int:
        return self.batches * _BATCH

    def __getitem__(self, index: int) -> Any:
        if self.wait_s:
            time.sleep(self.wait_s / _BATCH)
        spin(self.compute_s / _BATCH)
        features = torch.ones(4)
        return (features, torch.ones(self.floats)) if self.floats else features


# ---- modules ----


class FaultModule(SimulatedModule):
    """Trains on given parts."""

    def __init__(self, gpu: SimulatedGpu, parts: Parts) -> None:
        super().__init__(gpu, parts.step)
        self.parts = parts
        for name, value in parts.options.items():
            setattr(self, name, value)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.parts.validation.issue(self.gpu)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.parts.data, **{"batch_size": _BATCH, "pin_memory": True, **self.parts.loader})

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(), batch_size=_BATCH, pin_memory=True)


class LogsItsLoss(FaultModule):
    """Shows its loss in the progress bar, which reads it from the device at every step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.detach(), prog_bar=True)
        return loss


class ScalesItsGradients(FaultModule):
    """Asks the device at each optimizer step whether the gradients are finite, as GradScaler does."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.gpu.item()
        super().optimizer_step(*args, **kwargs)


class ReadsItsLoss(FaultModule):
    """Reads its loss between forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last_loss = loss.item()  # the injected wait
        return loss


class CopiesItsLoss(FaultModule):
    """Copies its loss to the host between forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last_loss = loss.detach().cpu()  # the injected copy
        return loss


class Synchronizes(FaultModule):
    """Waits for the whole device between forward and backward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        torch.cuda.synchronize()  # the injected wait
        return loss


class Offloads(FaultModule):
    """Copies gradients to the host and weights back, ``copy_s`` seconds each way, as an offloaded optimizer does."""

    copy_s = 0.0
    pinned = True

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        for direction in ("d2h", "h2d"):
            self.gpu.copy(self.copy_s, direction, pinned=self.pinned, nbytes=2**25)  # type: ignore[arg-type]


class Augments(FaultModule):
    """``on_after_batch_transfer`` queues kernels of ``augment_s`` seconds, and keeps the host for ``host_s``."""

    augment_s = 0.0
    host_s = 0.0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.augment_s:
            self.gpu.launch(self.augment_s, name="augment")
        if self.host_s:
            time.sleep(self.host_s)
        return batch


class PreparesOnTheHost(FaultModule):
    """``on_before_batch_transfer`` keeps the host for ``host_s`` seconds."""

    host_s = 0.0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(self.host_s)
        return batch


class ValidatesWithAMetric(FaultModule):
    """Reads its metric at the end of a validation."""

    def on_validation_epoch_end(self) -> None:
        self.gpu.item()


def open_slowly(worker: int) -> None:
    """A worker that takes a while to start, as one that opens many files."""
    time.sleep(0.2)


def line_of(function: Callable[..., Any], words: str) -> int:
    """The line of the source in which a function has these words."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, text in enumerate(lines) if words in text)


class CollectsGarbage(HasObjects, FaultModule):
    """Collects its garbage at each so many steps, inside of them; ``objects`` stay and are looked through."""

    every = 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % self.every == 0:
            gc.collect()
        return loss


class KeepsObjects(HasObjects, FaultModule):
    """Keeps objects, and does nothing with them."""


class RunsACompiledFunction(FaultModule):
    """Calls a compiled function, with another number for each ``every`` steps."""

    every = 1

    def on_fit_start(self) -> None:
        torch._dynamo.config.cache_size_limit = 64
        self.compiled = compiled_sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        accelerator = getattr(torch, "accelerator", None)  # since torch 2.6; what is compiled is the CPU's
        with patch.object(accelerator, "is_available", lambda: False) if accelerator else nullcontext():
            self.compiled(torch.ones(8), 2 + batch_idx // self.every)
        return super().training_step(batch, batch_idx)


class GrowingWork(FaultModule):
    """Each step has ``each_s`` seconds more for the GPU than the one before."""

    each_s = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.gpu.launch(self.each_s * batch_idx, name="more")
        return loss


class KeepsItsOutputs(FaultModule):
    """The host goes through all that it has kept, in each step: ``each_s`` seconds for each."""

    each_s = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            self.outputs: list[torch.Tensor] = []
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss)
        time.sleep(self.each_s * len(self.outputs))
        return loss


# ---- callbacks and loggers ----


class SlowStart(Callback):
    """Keeps the host for a while before each step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self.seconds)


class GrowingEnd(Callback):
    """Keeps the host for a while after each step, ``each_s`` seconds longer each time."""

    def __init__(self, each_s: float) -> None:
        self.each_s = each_s
        self.history: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.history.append(0.0)
        time.sleep(self.each_s * len(self.history))


class SlowEnd(Callback):
    """Keeps the host for a while after each step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)


class KernelsAtStart(Callback):
    """Queues kernels before each step, as mixup does."""

    def __init__(self, gpu: SimulatedGpu, seconds: float) -> None:
        self.gpu, self.seconds = gpu, seconds

    def on_train_batch_start(self, *args: Any) -> None:
        self.gpu.launch(self.seconds, name="mixup")


class KernelsAtEnd(Callback):
    """Queues kernels after each step, as a moving average of the weights does."""

    def __init__(self, gpu: SimulatedGpu, seconds: float) -> None:
        self.gpu, self.seconds = gpu, seconds

    def on_train_batch_end(self, *args: Any) -> None:
        self.gpu.launch(self.seconds, name="average")


class MetricAtEnd(Callback):
    """Queues kernels after each step, and reads what they have computed."""

    def __init__(self, gpu: SimulatedGpu, seconds: float) -> None:
        self.gpu, self.seconds = gpu, seconds

    def on_train_batch_end(self, *args: Any) -> None:
        self.gpu.launch(self.seconds, name="metric")
        self.gpu.item()


class KernelsAtEpochEnd(Callback):
    """Queues kernels after each epoch."""

    def __init__(self, gpu: SimulatedGpu, seconds: float) -> None:
        self.gpu, self.seconds = gpu, seconds

    def on_train_epoch_end(self, *args: Any) -> None:
        self.gpu.launch(self.seconds, name="average")


class SlowSaving(Callback):
    """Each checkpoint waits for the device, as copying the weights does, and then for the disk."""

    def __init__(self, gpu: SimulatedGpu, seconds: float) -> None:
        self.gpu, self.seconds = gpu, seconds

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        save = trainer.strategy.checkpoint_io.save_checkpoint

        def save_slowly(*args: Any, **kwargs: Any) -> None:
            self.gpu.synchronize()
            time.sleep(self.seconds)
            save(*args, **kwargs)

        trainer.strategy.checkpoint_io.save_checkpoint = save_slowly


class RefusesEvents(Callback):
    """From one step on CUDA refuses events."""

    def __init__(self, gpu: SimulatedGpu, step: int) -> None:
        self.gpu, self.step = gpu, step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.step:
            self.gpu.refuse_events()


class Truth(Callback):
    """Notes where steps, validations and the run since the last change lie on the device.

    Args:
        gpu: the device.
        warmup_steps: after these the run since the last change begins.
    """

    def __init__(self, gpu: SimulatedGpu, warmup_steps: int) -> None:
        self._gpu, self._warmup_steps = gpu, warmup_steps
        self._steps: list[Any] = []
        self._validations: list[Any] = []
        self._begin_s: float | None = None
        self._end: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._steps.append(self._gpu.record())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(self._steps) == self._warmup_steps:
            self._begin_s = self._gpu.clock()
        self._end = self._gpu.record()

    def on_validation_start(self, *args: Any) -> None:
        self._validations.append(self._gpu.record())

    on_validation_end = on_validation_start

    def idle_s(self) -> float | None:
        """Seconds in which the device stood idle in the run since the last change, without validations."""
        if self._begin_s is None or self._end is None:
            return None
        ledger, end_s = self._gpu.ledger, self._end.stamp_s
        idle_s = ledger.idle_s(self._begin_s, end_s)
        stamps = [mark.stamp_s for mark in self._validations]
        for begin_s, done_s in zip(stamps[::2], stamps[1::2], strict=True):
            if done_s > self._begin_s:
                idle_s -= ledger.idle_s(max(begin_s, self._begin_s), min(done_s, end_s))
        return idle_s

    def step_s(self) -> float:
        """Mean seconds from one step to the next on the device, without the first few after the warm-up."""
        first = self._warmup_steps + 5
        stamps = [mark.stamp_s for mark in self._steps]
        return float((stamps[-1] - stamps[first]) / (len(stamps) - 1 - first))
