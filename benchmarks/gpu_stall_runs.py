"""The short training runs of section ``stalls``: what a step does, what is injected, and what is measured of it."""

from __future__ import annotations

import inspect
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from gpu_devices import KERNEL, Device
from gpu_parts import Samples, new_detector, quiet_trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_gpuopt import StallReport

FEATURES: Final = 64
CONDITIONS: Final = ("plain", "bar", "16-mixed", "compile", "augmentation", "accumulation")
FAULTS: Final = ("fetch", "on_train_batch_start", "on_train_batch_end", "logger", "on_after_batch_transfer")
_PROFILED_STEPS: Final = 8
_DROPPED_STEPS: Final = 2
"""At the beginning of a recording, whose start costs the host time."""


@dataclass(frozen=True)
class Setup:
    """One run.

    Attributes:
        condition: one of :data:`CONDITIONS`.
        fault: one of :data:`FAULTS`, where the host sleeps; ``""``: nowhere.
        sleep_ms: for so long, at each step.
        work_ms: length of the step's kernel.
        augment_ms: length of the kernel that ``on_after_batch_transfer`` queues under ``"augmentation"``.
        inside: ``"launch_bound"``: the step's work is made of tiny kernels; ``"gpu_sync"``: the host waits for the
            step's kernel, and then launches tiny ones, which would else be hidden behind it.
        steps: measured training batches.
        warmup: training batches before them.
        loader: further arguments of the DataLoader.
    """

    condition: str = "plain"
    fault: str = ""
    sleep_ms: float = 0.0
    work_ms: float = 20.0
    augment_ms: float = 5.0
    inside: str = ""
    steps: int = 40
    warmup: int = 8
    loader: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For tables."""
        what = self.inside or (f"{self.fault} {self.sleep_ms:.0f} ms" if self.sleep_ms else "healthy")
        return f"{self.condition}, {what}"

    @property
    def kernels(self) -> int:
        """Kernels of a known length in each step."""
        return 2 if self.condition == "augmentation" else 1

    def sleep_s(self, fault: str) -> float:
        """For how long the host sleeps there."""
        return self.sleep_ms / 1e3 if self.fault == fault else 0.0


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


class Model(LightningModule):
    """A small network beside kernels of a known length."""

    def __init__(self, device: Device, setup: Setup) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, FEATURES), torch.nn.ReLU(), torch.nn.Linear(FEATURES, 8)
        )
        self.gpu, self.setup_of_run = device, setup
        self.forward_of: Any = self.layer
        self.last_loss = 0.0

    def on_fit_start(self) -> None:
        if self.setup_of_run.condition == "compile":
            self.forward_of = self.gpu.compile(self.layer)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        _sleep(self.setup_of_run.sleep_s("on_after_batch_transfer"))
        if self.setup_of_run.condition == "augmentation":
            self.gpu.work(self.setup_of_run.augment_ms)
        return batch

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        setup = self.setup_of_run
        if setup.inside == "launch_bound":
            self.gpu.tiny(setup.work_ms)
        else:
            self.gpu.work(setup.work_ms)
        loss: torch.Tensor = self.forward_of(batch).square().mean()
        if setup.inside == "gpu_sync":
            self.last_loss = loss.item()  # the injected wait
            self.gpu.tiny(setup.work_ms / 3)
        if setup.fault == "logger":
            self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def line_of_the_wait() -> int:
    """The line of this file in which ``training_step`` waits for the GPU."""
    lines, first = inspect.getsourcelines(Model.training_step)
    return first + next(number for number, text in enumerate(lines) if "the injected wait" in text)


class Bar(Callback):
    """Reads the loss after every step, as a progress bar does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()


class Sleeper(Callback):
    """Sleeps in a hook."""

    def __init__(self, setup: Setup) -> None:
        self.start_s, self.end_s = (setup.sleep_s(hook) for hook in ("on_train_batch_start", "on_train_batch_end"))

    def on_train_batch_start(self, *args: Any) -> None:
        _sleep(self.start_s)

    def on_train_batch_end(self, *args: Any) -> None:
        _sleep(self.end_s)


class SleepingLogger(Logger):
    """Takes its time for what the module logs; the detector's own figures come too seldom to be a part of each step."""

    name = "sleeping"
    version = 0

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics:
            _sleep(self.seconds)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class WallClock(Callback):
    """Times the measured steps, from a GPU that has nothing left to do to one that has nothing left to do.

    It synchronizes in the warm-up and at the end only. Its place is right before the detector, which so measures the
    same stretch.
    """

    def __init__(self, setup: Setup) -> None:
        self.warmup, self.steps = setup.warmup, setup.steps
        self.ends_s: list[float] = []
        self.at_s: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.ends_s) < self.warmup:
            torch.cuda.synchronize()
        self.ends_s.append(time.perf_counter())
        if len(self.ends_s) == self.warmup:
            self.at_s.append(self.ends_s[-1])

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self.at_s.append(time.perf_counter())

    @property
    def step_ms(self) -> float:
        """Mean milliseconds of a step."""
        return (self.at_s[1] - self.at_s[0]) / self.steps * 1e3

    def median_ms(self, first: int, last: int) -> float:
        """Median milliseconds from step to step on the host, between two of the measured steps."""
        ends_s = self.ends_s[self.warmup + first : self.warmup + last]
        return statistics.median(after - before for before, after in itertools.pairwise(ends_s)) * 1e3


class Records(Callback):
    """Records kernels with torch.profiler over a few steps, once the warm-up is over."""

    def __init__(self, setup: Setup) -> None:
        self.first, self.done, self.per_step = setup.warmup, 0, setup.kernels
        self.profiler: Any = None
        self.kernels: list[tuple[str, float, float]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.done += 1
        if self.done == self.first:
            torch.cuda.synchronize()
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profiler.start()
        elif self.done == self.first + _PROFILED_STEPS:
            torch.cuda.synchronize()
            self.profiler.stop()
            on_device = torch.autograd.DeviceType.CUDA
            self.kernels = sorted(
                (
                    (each.name, each.time_range.start / 1e3, each.time_range.end / 1e3)
                    for each in self.profiler.events()
                    if each.device_type == on_device and not each.name.startswith(("Memcpy", "Memset", "ProfilerStep"))
                ),
                key=lambda each: each[1],
            )

    def busy_and_idle_ms(self, *, marked: bool = True) -> tuple[float, float] | None:
        """Busy and idle milliseconds of a mean step; None where nothing was recorded.

        Args:
            marked: count steps by their kernels of a known length; else the whole record is the steps that it is of.
        """
        if not self.kernels:
            return None
        starts = [start for name, start, _ in self.kernels if KERNEL in name][:: self.per_step][_DROPPED_STEPS:]
        if marked and len(starts) < 2:
            return None
        begin, end, steps = (
            (starts[0], starts[-1], len(starts) - 1)
            if marked
            else (self.kernels[0][1], self.kernels[-1][2], _PROFILED_STEPS)
        )
        busy, reached = 0.0, begin
        for _, start, stop in self.kernels:
            start, stop = max(start, reached), min(stop, end)
            if stop > start:
                busy += stop - start
                reached = stop
        return busy / steps, (end - begin - busy) / steps


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        setup: the run.
        report: the detector's.
        step_ms: mean step by the synchronized wall clock.
        first_ms: median of the first steps, before a look at their inside.
        last_ms: median of the last steps, after it.
        profiler_left_on: whether torch.profiler was still at work after it.
    """

    setup: Setup
    report: StallReport
    step_ms: float
    first_ms: float
    last_ms: float
    profiler_left_on: bool

    @property
    def idle_ms(self) -> float:
        """The detector's idle time of a mean step."""
        return (self.report.gpu_idle_s or 0.0) / self.setup.steps * 1e3

    def cause_ms(self, cause: str) -> float:
        """What a mean step loses to one cause: its share of the wall time."""
        return sum(each.share for each in self.report.findings if each.cause == cause) * self.step_ms


def run(device: Device, setup: Setup) -> Outcome:
    """Train under the detector, whose diagnosis at a window's end would count in runs as short as the most."""
    window_size = 20 if setup.inside else 10 * setup.steps
    wall, detector = WallClock(setup), new_detector(warmup_steps=setup.warmup, window_size=window_size)
    _fit(device, setup, [], [wall, detector])
    left_on = bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]
    some = setup.steps // 5
    first_ms, last_ms = wall.median_ms(0, some), wall.median_ms(setup.steps - some, setup.steps)
    return Outcome(setup, detector.report, wall.step_ms, first_ms, last_ms, left_on)


def profiled(device: Device, setup: Setup) -> Records:
    """Train without the detector, and record kernels."""
    records = Records(setup)
    _fit(device, setup, [records], [])
    return records


def _fit(device: Device, setup: Setup, first: Sequence[Callback], last: Sequence[Callback]) -> None:
    steps = setup.warmup + setup.steps
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, **device.trainer_arguments()}
    if setup.condition == "16-mixed":
        options["precision"] = "16-mixed"
    if setup.condition == "accumulation":
        options["accumulate_grad_batches"] = 4
    if setup.fault == "logger":
        options["logger"] = SleepingLogger(setup.sleep_s("logger"))
    bar = [Bar()] if setup.condition == "bar" else []
    data = Samples(steps, setup.sleep_s("fetch"), FEATURES)
    loader = DataLoader(data, batch_size=1, pin_memory=True, **setup.loader)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(folder, [*first, *bar, Sleeper(setup), *last], **options)
        trainer.fit(Model(device, setup), loader)
