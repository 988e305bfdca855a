"""Observes the collectives of this rank: the reduction of gradients, and of metrics in steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from lightning_gpuopt.compat import lightning
from lightning_gpuopt.compat.ddp import reducer_of
from lightning_gpuopt.compat.lightning import LightningModule, Trainer
from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.detector.metric_sync import TimedReduce
from lightning_gpuopt.measurements.ranks import GradientSync, MetricSync, ReducerTimes
from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.probe import Probe

SHARDED: Final = ("FSDP", "DeepSpeed", "ModelParallel")  # strategies whose forward gathers parameters


class RankWatch(Probe):
    """Watches the collectives of one rank; made in ``on_train_start``, when the strategy has wrapped the model."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        timeline: Timeline,
        reduce: TimedReduce | None,
        device: DeviceWatch | None,
    ) -> None:
        self._trainer = trainer
        self._reduce = reduce
        self._device = device
        self._timeline = timeline
        self._notes: list[str] = []
        strategy = trainer.strategy
        on_cpu = strategy.root_device.type == "cpu"
        self._reducer = reducer_of(strategy.model, timed=on_cpu)
        self._read_at = -1
        self._of_parameters = gradients_of(pl_module, accumulated=trainer.accumulate_grad_batches)
        kind = type(strategy).__name__
        if is_sharded(strategy):
            self._of_parameters = replace(self._of_parameters, bytes=None)  # a rank sees its own part of them
        if on_cpu and self._reducer is None:
            self._notes.append(f"Collectives of {kind} on the CPU were not timed: only DDP's can be.")

    @override
    def read(self) -> dict[str, Any]:
        gradients, times, metrics = self._of_parameters, ReducerTimes(), MetricSync()
        if self._reducer is not None:
            if self._timeline.steps != self._read_at:
                self._read_at = self._timeline.steps
                self._reducer.read()
            here, gradients, times = gradients, self._reducer.facts, self._reducer.times or times
            gradients = replace(
                gradients,
                bytes=gradients.bytes if gradients.bytes is not None else here.bytes,
                dtype=here.dtype,
                accumulate_grad_batches=here.accumulate_grad_batches,
            )
        if self._reduce is not None:
            metrics = self._reduce.times
            names = lightning.metrics_reduced_in_steps(self._trainer) if metrics.calls else ()
            metrics = replace(metrics, names=tuple(names))
        link = "network" if self._trainer.num_nodes > 1 else self._device.link if self._device is not None else ""
        return {"reducer": times, "gradients": replace(gradients, link=link), "metrics": metrics}

    @override
    def close(self) -> None:
        """Set torch's default rate of timing the reducer; one that the user set before is not restored."""
        if self._reducer is not None:
            self._reducer.close()


def is_sharded(strategy: object) -> bool:
    kinds = " ".join(cls.__name__ for cls in type(strategy).__mro__)
    return any(name in kinds for name in SHARDED)


def gradients_of(pl_module: LightningModule, *, accumulated: int) -> GradientSync:
    trained = [
        each for each in pl_module.parameters() if each.requires_grad and not isinstance(each, UninitializedParameter)
    ]
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in trained})
    size = sum(each.numel() * each.element_size() for each in trained)
    return GradientSync(bytes=size or None, dtype=", ".join(dtypes), accumulate_grad_batches=accumulated)
