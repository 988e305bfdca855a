"""One ``fit`` under observation: what is placed in the Trainer, what is measured, and how it is taken away again."""

from __future__ import annotations

import platform
from contextlib import ExitStack
from typing import Any, Final

import torch

from lightning_gpuopt import _lightning
from lightning_gpuopt._lightning import Callback, Checkpoint, LightningModule, Trainer, shadow
from lightning_gpuopt._version import __version__
from lightning_gpuopt.diagnosis.report import Finding, StallReport, Stretch
from lightning_gpuopt.diagnosis.stalls import Measurement, diagnose, verdict_of
from lightning_gpuopt.telemetry.host import HostWatch
from lightning_gpuopt.timeline.gpu_clock import GpuClock, GpuTimes
from lightning_gpuopt.timeline.loader import LoaderFacts, facts_of, worker_pids
from lightning_gpuopt.timeline.phases import PhaseTimes, Timeline
from lightning_gpuopt.timeline.profiler import TimelineProfiler
from lightning_gpuopt.timeline.windows import Windows

_LOGGER_CALLS: Final = (
    "log_metrics",
    "save",
    "after_save_checkpoint",
    "log_image",
    "log_text",
    "log_table",
    "log_audio",
    "log_video",
)


class ObservedFit:
    """The timeline, the GPU clock and the host watch of one ``fit``.

    Args:
        trainer: the Trainer, at ``on_train_start``.
        pl_module: its module.
        window_size: training batches in a window.
        warmup_steps: training batches that are left out of findings.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, window_size: int, warmup_steps: int) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._warmup_steps = warmup_steps
        self._undo = ExitStack()
        self._notes: list[str] = []
        self._environment = _environment(trainer)
        self._loader = LoaderFacts()
        self._windows = Windows(window_size, warmup_steps)
        self._logged = False
        self._epoch_seen = 0
        self._host = HostWatch()
        self._gpu: GpuClock | None = None
        self._gpu_at_window = self._gpu_warm = GpuTimes()
        if trainer.strategy.root_device.type == "cuda":
            self._gpu = GpuClock(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self.timeline = Timeline(
            checkpoint_callbacks=[each.state_key for each in callbacks if isinstance(each, Checkpoint)],
            callback_names={each.state_key: type(each).__name__ for each in callbacks},
            on_batch_arrives=self._gpu.batch_arrives if self._gpu else None,
            on_compute_begins=self._gpu.compute_begins if self._gpu else None,
            on_compute_ends=self._gpu.compute_ends if self._gpu else None,
        )

    def start(self) -> None:
        """Place the profiler and the few shadows, and begin to book time."""
        trainer = self._trainer
        self._shadow(trainer, "profiler", TimelineProfiler(self.timeline, _lightning.profiler(trainer)))
        validation = _lightning.validation_loop(trainer)
        if validation is not None:
            self._shadow(validation, "run", self.timeline.validating(validation.run))
        else:
            self._notes.append("The start of validation could not be seen: its set-up counts as other.")
        if not self._pl_module.automatic_optimization:  # manual_backward passes the profiler by
            self._shadow(trainer.strategy, "backward", self.timeline.timed(trainer.strategy.backward, "backward"))
        for each in trainer.loggers:
            for name in _LOGGER_CALLS:
                function = getattr(each, name, None)
                if callable(function):
                    self._shadow(each, name, self.timeline.timed(function, "logging"))
        self._loader = facts_of(_lightning.train_loaders(trainer))
        self._host.start()
        self._undo.callback(self._host.stop)
        self.timeline.start()

    def _shadow(self, owner: Any, name: str, replacement: Any) -> None:
        try:
            self._undo.callback(shadow(owner, name, replacement))
        except (AttributeError, TypeError):
            self._notes.append(f"{type(owner).__name__}.{name} could not be timed.")

    def stop(self) -> None:
        """Freeze the figures."""
        self.timeline.stop()
        if self._gpu is not None:
            self._gpu.read(most_steps=1 << 30)

    def undo(self) -> None:
        """Take away all that was placed; may be called more than once."""
        self.timeline.stop()
        self._undo.close()

    def interrupt(self) -> None:
        """Say that the next step does not follow on the last one."""
        if self._gpu is not None:
            self._gpu.interrupt()

    def step_done(self) -> bool:
        """Count a step; True when a window ends with it."""
        timeline = self.timeline
        timeline.step_done()
        if timeline.epochs != self._epoch_seen:  # workers are started anew, unless they persist
            self._epoch_seen = timeline.epochs
            self._loader = facts_of(_lightning.train_loaders(self._trainer))
            self._host.workers(worker_pids(_lightning.train_iterators(self._trainer)))
        if self._gpu is not None:
            self._gpu.read()
        return self._windows.due(timeline.steps)

    def close_window(self) -> Measurement | None:
        """What the window that ends now measured; None when warm-up ended instead."""
        window = self._windows.close(self.timeline.times())
        gpu = self._gpu.times() if self._gpu is not None else None
        if window is None:
            self._host.reset()
            if gpu is not None:
                self._gpu_at_window = self._gpu_warm = gpu
            return None
        before, self._gpu_at_window = self._gpu_at_window, gpu or GpuTimes()
        return Measurement(window.times, self._loader, self._host.activity(), gpu - before if gpu is not None else None)

    def findings(self, threshold: float) -> list[Finding]:
        """The causes above the threshold since warm-up."""
        steady = self._windows.steady(self.timeline.times())
        return diagnose(self._measurement(steady), threshold) if steady is not None else []

    def report(self, threshold: float) -> StallReport:
        """The report of the run until now."""
        times = self.timeline.times()
        steady = self._windows.steady(times)
        measurement = self._measurement(steady) if steady is not None else None
        findings = diagnose(measurement, threshold) if measurement is not None else []
        notes = list(self._notes)
        if steady is None or not steady.steps:
            notes.append(
                f"Only {times.steps} steps have run, of which {self._warmup_steps} are warm-up: nothing is diagnosed."
            )
        return StallReport(
            verdict=verdict_of(findings),
            wall_s=times.wall_s,
            phases=times.phases,
            findings=findings,
            steps=times.steps,
            step_s=steady.step_s if steady is not None else None,
            gpu_idle_s=measurement.gpu.idle_s if measurement is not None and measurement.gpu is not None else None,
            timeline=[
                Stretch(each.start_s, each.times.wall_s, each.times.steps, each.times.phases)
                for each in self._windows.stretches(times)
            ],
            notes=notes,
            environment=self._environment,
        )

    def _measurement(self, steady: PhaseTimes) -> Measurement:
        gpu = self._gpu.times() - self._gpu_warm if self._gpu is not None else None
        return Measurement(steady, self._loader, self._host.activity(), gpu)

    def log_window(self, trainer: Trainer, times: PhaseTimes, stalls: int) -> None:
        """Send a window's figures to every logger."""
        if times.step_s is None or not trainer.loggers:
            return
        self._logged = True
        metrics: dict[str, float] = {"step/time_s": times.step_s, "stall/count": float(stalls)}
        for phase, seconds in times.phases.items():
            metrics[f"step/{phase}_percent"] = seconds / times.wall_s * 100
        step = _lightning.logging_step(trainer)
        for each in trainer.loggers:
            each.log_metrics(metrics, step=step)

    def log_rest(self, trainer: Trainer, threshold: float) -> None:
        """Log a run that was shorter than a window as one."""
        steady = self._windows.steady(self.timeline.times())
        if not self._logged and steady is not None and steady.steps:
            self.log_window(trainer, steady, len(diagnose(self._measurement(steady), threshold)))


def _environment(trainer: Trainer) -> dict[str, str]:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "lightning_gpuopt": __version__,
        "lightning": _lightning.version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "device": f"{device.type} ({name})",
        "ranks": str(trainer.world_size),
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
    }
