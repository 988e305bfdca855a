"""Instruments a Trainer: the profiler and the replaced methods that show where time goes, and their removal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch

from lightning_gpuopt.compat import lightning
from lightning_gpuopt.compat.lightning import Callback, LightningModule, Trainer, shadow
from lightning_gpuopt.detector.metric_sync import TimedReduce
from lightning_gpuopt.detector.rank_watch import is_sharded
from lightning_gpuopt.measurements.phases import SIGNAL_BROADCAST
from lightning_gpuopt.timeline.observer import StepObserver
from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.profiler import TimelineProfiler

log = logging.getLogger(__name__)

_LOGGER_CALLS: Final = (
    *("log_metrics", "save", "after_save_checkpoint"),
    *("log_image", "log_text", "log_table", "log_audio", "log_video"),
)


class Observers(StepObserver):
    """Calls observers at a step's events; an observer that raises is not called again."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def connect(
        self, event: str, function: Callable[..., None], refused: Callable[[Exception], None] | None = None
    ) -> None:
        """Call a function at a ``StepObserver`` event; where it fails, ``refused`` is called and it is not again."""

        def safely(*arguments: Any) -> None:
            try:
                function(*arguments)
            except Exception as error:
                log.debug("a measurement failed", exc_info=True)
                setattr(self, event, lambda *arguments: None)
                if refused is not None:
                    refused(error)
                else:
                    self.problems.append(f"Measuring at {event} stopped: {type(error).__name__}: {error}.")

        setattr(self, event, safely)

    def disconnect(self, events: tuple[str, ...]) -> None:
        for event in events:
            vars(self).pop(event, None)


class Instrumentation:
    """The profiler and the few shadows in one Trainer, which ``undo`` takes away with what else ends with the fit."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.undo = ExitStack()
        self.observers = Observers()
        self.notes: list[str] = []
        self.reduce: TimedReduce | None = None
        self._trainer = trainer
        self._pl_module = pl_module

    def timeline(self, *, nvtx: bool, detailed: bool) -> Timeline:
        """A timeline for this Trainer's callbacks, begun when it is started; ``detailed`` is for a GPU's clock."""
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return Timeline(
            checkpoint_callbacks=[each.state_key for each in callbacks if lightning.is_checkpoint(each)],
            transfer_callbacks=[each.state_key for each in callbacks if hasattr(each, "copies_ahead")],
            callback_names={each.state_key: _public_name(each) for each in callbacks},
            observer=self.observers,
            silent=self._does_nothing,
            detailed=detailed,
            ranges=self._nvtx_ranges() if nvtx else None,
        )

    def place(self, timeline: Timeline) -> None:
        trainer = self._trainer
        self._shadow(trainer, "profiler", TimelineProfiler(timeline, lightning.profiler(trainer)))
        validation = lightning.validation_loop(trainer)
        if validation is not None:
            self._shadow(validation, "run", timeline.validating(validation.run))
        else:
            self.notes.append("The start of validation could not be detected: its set-up counts as other.")
        if not self._pl_module.automatic_optimization:  # manual_backward does not call the profiler
            self._shadow(trainer.strategy, "backward", timeline.timed(trainer.strategy.backward, "backward"))
        broadcast = lightning.signal_broadcast(trainer)
        if broadcast is not None and trainer.world_size > 1:
            owner, name = broadcast
            self._shadow(owner, name, timeline.timed(getattr(owner, name), SIGNAL_BROADCAST))
        if trainer.world_size > 1:
            self.reduce = TimedReduce(trainer.strategy.reduce, timeline)
            self._shadow(trainer.strategy, "reduce", self.reduce)
        for each in trainer.loggers:
            for name in _LOGGER_CALLS:
                function = getattr(each, name, None)
                if callable(function):
                    self._shadow(each, name, timeline.timed(function, "logging"))

    def look_at_batches(self, around: Callable[[Callable[..., Any]], Any]) -> Callable[[], None]:
        """Put ``around(convert_input)``, which sees each batch before its copy, in place of that; returns the undo."""
        plugin: Any = self._trainer.strategy.precision_plugin
        return self._shadow(plugin, "convert_input", around(plugin.convert_input))

    def _does_nothing(self, action: str) -> bool:
        """Whether an action of the profiler is a hook that its callback, or the module, has not overridden."""
        owner, _, hook = action.rpartition(".")
        if owner.startswith("[LightningModule]"):
            return hook.startswith("on_") and lightning.is_plain_hook(self._pl_module, hook)
        if owner.startswith("[Strategy]"):
            return hook == "on_train_batch_start" and lightning.is_plain_hook(self._trainer.strategy, hook)
        if not owner.startswith("[Callback]"):
            return False
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        named = [each for each in callbacks if each.state_key == owner.removeprefix("[Callback]")]
        return bool(named) and all(
            lightning.is_plain_hook(each, hook) or hook in getattr(each, "idle_hooks", ()) for each in named
        )

    def _nvtx_ranges(self) -> Any:
        """What marks the phases for Nsight; None if this torch cannot."""
        ranges: Any = torch.cuda.nvtx
        try:
            ranges.range_push("lightning_gpuopt")  # without NVTX it fails here, and not in training
            ranges.range_pop()
        except RuntimeError:
            self.notes.append("No NVTX ranges: this torch is built without CUDA.")
            return None
        return ranges

    def _shadow(self, owner: Any, name: str, replacement: Any) -> Callable[[], None]:
        try:
            undo = shadow(owner, name, replacement)
        except (AttributeError, TypeError):
            self.notes.append(f"{type(owner).__name__}.{name} could not be timed.")
            return lambda: None
        self.undo.callback(undo)
        return undo


def _public_name(callback: Callback) -> str:
    """Name of a callback's class; of a private variant of one of ours, that of the public one."""
    return str(getattr(callback, "public_name", type(callback).__name__))


def forward_is_a_ranks_own(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Whether no collective lies in the forward: buffers, ``SyncBatchNorm``, sharding, manual steps put one there."""
    if is_sharded(trainer.strategy) or not pl_module.automatic_optimization:
        return False
    options = getattr(trainer.strategy, "_ddp_kwargs", {})
    broadcasts = options.get("broadcast_buffers", True) and any(True for _ in pl_module.buffers())
    return not broadcasts and not any(isinstance(each, torch.nn.SyncBatchNorm) for each in pl_module.modules())
