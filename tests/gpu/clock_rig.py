"""A GpuClock beside a timeline on the real device, driven step by step without a Trainer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.timeline.gpu_clock import GpuClock
from lightning_gpuopt.timeline.observer import StepObserver
from lightning_gpuopt.timeline.phases import Timeline

HOOK = "Hook.on_train_batch_end"


class ClockRig:
    """What a Trainer does in a step, as its profiler sees it.

    Attributes:
        clock: the clock.
    """

    def __init__(self, *, forward: bool = False) -> None:
        observer = StepObserver()
        self._timeline = Timeline(callback_names={"Hook": "Hook"}, observer=observer, detailed=True)
        self.clock = GpuClock(lambda: torch.cuda.Event(enable_timing=True), self._timeline, forward=forward)
        for name in (each for each in vars(StepObserver) if not each.startswith("_")):
            if getattr(type(self.clock), name) is not getattr(StepObserver, name):
                setattr(observer, name, getattr(self.clock, name))
        self._timeline.start()

    def step(
        self,
        work: Callable[[], object],
        *,
        fetch: Callable[[], object] | None = None,
        copy: Callable[[], object] | None = None,
        after_copy: Callable[[], object] | None = None,
        hook: Callable[[], object] | None = None,
    ) -> None:
        """One step: ``hook`` runs at its end, each part where a Trainer would call it."""
        timeline = self._timeline
        for action, function in (
            ("[_TrainingEpochLoop].train_dataloader_next", fetch),
            ("[LightningModule]Net.on_before_batch_transfer", None),
        ):
            with timeline.span(action):
                if function is not None:
                    function()
        with timeline.span("[Strategy]S.batch_to_device"):
            with timeline.span("[LightningModule]Net.transfer_batch_to_device"):
                if copy is not None:
                    copy()
            with timeline.span("[LightningModule]Net.on_after_batch_transfer"):
                if after_copy is not None:
                    after_copy()
        with timeline.span("run_training_batch"), timeline.span("[Strategy]S.training_step"):
            work()
        with timeline.span("[Callback]Hook.on_train_batch_end"):
            if hook is not None:
                hook()
        timeline.step_done()
        self.clock.read()

    def finish(self, steps: int, timeout_s: float = 60.0) -> GpuTimes:
        """Read until so many steps are in, without waiting for the GPU."""
        deadline_s = time.monotonic() + timeout_s
        while self.clock.times().steps < steps and time.monotonic() < deadline_s:
            self.clock.read()
            time.sleep(0.001)
        return self.clock.times()
