"""One ``fit`` under observation: what is placed in the Trainer, what is measured, and how it is taken away again."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from lightning_gpuopt import _lightning
from lightning_gpuopt._lightning import Callback, LightningModule, Trainer, shadow
from lightning_gpuopt._ranks import RankGather
from lightning_gpuopt._version import __version__
from lightning_gpuopt.callbacks._device_watch import DeviceWatch
from lightning_gpuopt.callbacks._loader_watch import LoaderWatch
from lightning_gpuopt.diagnosis.compare import proofs_of
from lightning_gpuopt.diagnosis.measurement import Measurement, RankWork
from lightning_gpuopt.diagnosis.predict import headroom
from lightning_gpuopt.diagnosis.report import Finding, Proof, StallReport, Stretch
from lightning_gpuopt.diagnosis.stalls import count_stalls, diagnose, remarks, verdict_of
from lightning_gpuopt.timeline.gpu_clock import GpuTimes
from lightning_gpuopt.timeline.hang import HangWatch, write_state
from lightning_gpuopt.timeline.loader import LoaderFacts
from lightning_gpuopt.timeline.phases import Marks, PhaseTimes, Timeline
from lightning_gpuopt.timeline.profiler import TimelineProfiler
from lightning_gpuopt.timeline.queues import QueueTimes
from lightning_gpuopt.timeline.steps import StepClock
from lightning_gpuopt.timeline.trace import NvtxTimeline
from lightning_gpuopt.timeline.windows import Windows
from lightning_gpuopt.timeline.worker_clock import WorkerTimes

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Options:
    """What the user asked of the detector that concerns the measuring.

    Attributes:
        threshold: share of wall time from which on a cause is reported, 0-1.
        window_size: training batches in a window.
        warmup_steps: training batches that are left out of findings.
        hang_timeout: seconds without a step that count as a hang; None: no watch.
        nvtx: phases as NVTX ranges.
    """

    threshold: float
    window_size: int
    warmup_steps: int
    hang_timeout: float | None
    nvtx: bool


@dataclass(frozen=True)
class _Baseline:
    """Readings at the end of warm-up, or at a window's."""

    workers: dict[int, tuple[LoaderFacts, WorkerTimes]] = field(default_factory=dict)
    queues: QueueTimes = QueueTimes()  # noqa: RUF009 - frozen
    gpu: GpuTimes = GpuTimes()  # noqa: RUF009 - frozen


class _Borders(Marks):
    """Passes a step's borders on to whoever measures there; one that fails is left out from then on."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def connect(self, border: str, function: Callable[..., None]) -> None:
        def safely(*arguments: Any) -> None:
            try:
                function(*arguments)
            except Exception as error:
                log.debug("a measurement failed", exc_info=True)
                self.problems.append(f"Measuring at {border} stopped: {type(error).__name__}: {error}.")
                setattr(self, border, lambda *arguments: None)

        setattr(self, border, safely)


class ObservedFit:
    """Measures one ``fit``, from ``setup`` to its end.

    Args:
        trainer: the Trainer, in ``setup``.
        pl_module: its module.
        options: what the user asked for.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, options: Options) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._options = options
        self._undo = ExitStack()
        self.notes: list[str] = []
        self._borders = _Borders()
        self._windows = Windows(options.window_size, options.warmup_steps)
        self._warm = self._last_window = _Baseline()
        self._proofs: list[Proof] = []
        self._pending: tuple[list[Finding], float] | None = None
        self._last_findings: list[Finding] = []
        self._ranks: dict[int, RankWork] = {}
        self._gather: RankGather | None = None
        self._hang: HangWatch | None = None
        self._epoch_seen = 0
        self._changed_after: int | None = None
        self._warmed_up = options.warmup_steps == 0
        self._logged = False
        self.started = False
        self.loader = LoaderWatch(trainer)
        self._undo.callback(self.loader.undo)
        self._device: DeviceWatch | None = None

    def start(self) -> None:
        """Place the profiler and the few shadows, and begin to book time; called in ``on_train_start``."""
        trainer = self._trainer
        self._environment = _environment(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        nvtx = self._options.nvtx and self._nvtx_is_there()
        self.timeline = (NvtxTimeline if nvtx else Timeline)(
            checkpoint_callbacks=[each.state_key for each in callbacks if _lightning.is_checkpoint(each)],
            callback_names={each.state_key: type(each).__name__ for each in callbacks},
            marks=self._borders,
        )
        self.steps = StepClock(self.timeline, self._options.warmup_steps)
        self._borders.connect("epoch_begins", self._epoch_begins)
        self._borders.connect("fetch_begins", self.loader.queues.before_fetch)
        self._borders.connect("fetch_ends", self.loader.queues.after_fetch)
        if trainer.strategy.root_device.type == "cuda":
            self._device = DeviceWatch(trainer.strategy.root_device)
            self._undo.callback(self._device.close)
            for border in ("interrupt", "batch_arrives", "batch_copied", "compute_begins", "compute_ends"):
                self._borders.connect(border, getattr(self._device.clock, border))
        if trainer.world_size > 1:
            self._gather = RankGather("stall-detector", trainer.global_rank, trainer.world_size)
            self._undo.callback(self._gather.close, 1.0)
        self._shadow_what_the_profiler_does_not_see()
        self.loader.start()
        self.started = True
        self.timeline.start()

    def _shadow_what_the_profiler_does_not_see(self) -> None:
        trainer, timeline = self._trainer, self.timeline
        self._shadow(trainer, "profiler", TimelineProfiler(timeline, _lightning.profiler(trainer)))
        validation = _lightning.validation_loop(trainer)
        if validation is not None:
            self._shadow(validation, "run", timeline.validating(validation.run))
        else:
            self.notes.append("The start of validation could not be seen: its set-up counts as other.")
        if not self._pl_module.automatic_optimization:  # manual_backward passes the profiler by
            self._shadow(trainer.strategy, "backward", timeline.timed(trainer.strategy.backward, "backward"))
        broadcast = _lightning.signal_broadcast(trainer)
        if broadcast is not None and trainer.world_size > 1:
            owner, name = broadcast
            self._shadow(owner, name, timeline.timed(getattr(owner, name), "signal_broadcast"))
        for each in trainer.loggers:
            for name in _LOGGER_CALLS:
                function = getattr(each, name, None)
                if callable(function):
                    self._shadow(each, name, timeline.timed(function, "logging"))

    def _nvtx_is_there(self) -> bool:
        try:
            torch.cuda.nvtx.range_push("lightning_gpuopt")  # type: ignore[no-untyped-call]
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        except RuntimeError:
            self.notes.append("No NVTX ranges: this torch is built without CUDA.")
            return False
        return True

    def _shadow(self, owner: Any, name: str, replacement: Any) -> None:
        try:
            self._undo.callback(shadow(owner, name, replacement))
        except (AttributeError, TypeError):
            self.notes.append(f"{type(owner).__name__}.{name} could not be timed.")

    def watch_for_hangs(self, write: Callable[[float], None]) -> None:
        """Have ``write`` called, on a thread of its own, when no step is finished for ``hang_timeout`` seconds."""
        if self._options.hang_timeout is not None:
            self._hang = HangWatch(self._options.hang_timeout, write)
            self._undo.callback(self._hang.stop)
            self._hang.start()

    def stop(self) -> None:
        """Freeze the figures, and take in what the other ranks have to say."""
        self.timeline.stop()
        if self._device is not None:
            self._device.clock.read(most_steps=1 << 30)
        if self._gather is not None:
            self._post(self._steady())
            self._gather.close(3.0)
            self._take_in_ranks()
        self._prove()

    def undo(self) -> None:
        """Take away all that was placed; may be called more than once."""
        if self.started:
            self.timeline.stop()
        self._undo.close()

    def _epoch_begins(self) -> None:
        self.loader.release()
        if self._device is not None:
            self._device.clock.epoch_begins()

    def step_done(self) -> bool:
        """Count a step; True when a window ends with it."""
        timeline = self.timeline
        timeline.step_done()
        self.steps.step_done()
        if self._hang is not None:
            self._hang.progress()
        # workers are started anew in each epoch, unless they persist, and a finder may change their number at any step
        if timeline.epochs != self._epoch_seen or self.loader.resized():
            self._epoch_seen = timeline.epochs
            self._loaders_may_have_changed()
        if self._device is not None:
            self._device.step_done()
        return self._windows.due(timeline.steps)

    def _loaders_may_have_changed(self) -> None:
        before = self.loader.facts
        self.loader.epoch_begins()
        if before.num_workers is None or self.loader.facts == before:
            return
        # From here on it is another run: what was found before is to be proved by what comes now.
        self._prove()
        times = self.timeline.times()
        steady = self._windows.steady(times)
        if self._last_findings and steady is not None and steady.step_s is not None:
            self._pending = (self._last_findings, steady.step_s)
        self._last_findings = []
        self._changed_after = times.steps
        self._windows.restart(times, in_step=self._gather is not None)

    def _prove(self) -> None:
        steady = self._windows.steady(self.timeline.times())
        if self._pending is not None and steady is not None and steady.steps:
            findings, step_s = self._pending
            self._proofs += proofs_of(findings, step_s, asdict(self.loader.facts), steady.step_s)
            self._pending = None

    def close_window(self) -> tuple[Measurement, list[Finding]] | None:
        """End a window.

        Returns:
            What the window measured, and the causes above the threshold since warm-up; None when warm-up ended instead.
        """
        times = self.timeline.times()
        window = self._windows.close(times)
        self.steps.window_done()
        now = self._baseline()
        if window is None:
            if self._warmed_up:
                self._post(None)  # for each window of the other ranks one of ours
            self._warmed_up = True
            self.loader.reset_host()
            if self._device is not None:
                self._device.begin_window()
            self._warm = self._last_window = now
            return None
        if self._device is not None:
            self._windows.annotate(self._device.close_window())
        steady = self._windows.steady(times)
        assert steady is not None
        measured = self._since(self._warm, now, steady)
        self._post(measured)
        self._take_in_ranks()
        in_window = self._since(self._last_window, now, window.times)
        self._last_window = now
        self._last_findings = diagnose(replace(measured, ranks=in_window.ranks), self._options.threshold)
        if self._device is not None:
            self._device.look_closer_if_idle(self._last_findings)
        return in_window, self._last_findings

    def _baseline(self) -> _Baseline:
        gpu = self._device.clock.times() if self._device is not None else GpuTimes()
        return _Baseline(self.loader.workers(), self.loader.queues.times(), gpu)

    def _since(self, start: _Baseline, now: _Baseline, times: PhaseTimes) -> Measurement:
        loader, workers = _narrowest(start, now)
        return Measurement(
            times=times,
            loader=loader if loader is not None else self.loader.facts,
            host=self.loader.host(),
            gpu=now.gpu - start.gpu if self._device is not None else None,
            workers=workers,
            queues=now.queues - start.queues,
            device=self._device.state() if self._device is not None else None,
            syncs=self._device.syncs if self._device is not None else None,
            ranks=tuple(self._ranks[rank] for rank in sorted(self._ranks)),
        )

    def _steady(self) -> Measurement | None:
        steady = self._windows.steady(self.timeline.times())
        return self._since(self._warm, self._baseline(), steady) if steady is not None else None

    def report(self) -> StallReport:
        """The report of the run until now."""
        times = self.timeline.times()
        measurement = self._steady()
        findings = diagnose(measurement, self._options.threshold) if measurement is not None else []
        steady = measurement.times if measurement is not None else None
        return StallReport(
            verdict=verdict_of(findings),
            wall_s=times.wall_s,
            phases=times.phases,
            findings=findings,
            steps=times.steps,
            step_s=steady.step_s if steady is not None else None,
            gpu_idle_s=measurement.gpu.idle_s if measurement is not None and measurement.gpu is not None else None,
            headroom=headroom(measurement) if measurement is not None else None,
            loader=self.loader.facts,
            step_times=self.steps.times(),
            proofs=list(self._proofs),
            timeline=[
                Stretch(each.start_s, each.times.wall_s, each.times.steps, each.times.phases, each.gpu_utilization)
                for each in self._windows.stretches(times)
            ],
            notes=self._all_notes(times, measurement),
            environment=self._environment,
        )

    def _all_notes(self, times: PhaseTimes, measurement: Measurement | None) -> list[str]:
        notes = self.notes + self._borders.problems + self.loader.notes()
        if self._gather is not None and self._gather.problem is not None:
            notes.append(f"Stragglers could not be looked for: {self._gather.problem}.")
        if self._device is not None:
            notes += self._device.notes
        if measurement is None or not measurement.times.steps:
            since = "have run" if self._changed_after is None else "have run since the loader was changed"
            steps = times.steps - (self._changed_after or 0)
            notes.append(f"Only {steps} steps {since}, warm-up included: nothing is diagnosed.")
            return notes
        return notes + remarks(measurement, self._options.threshold)

    def _post(self, measurement: Measurement | None) -> None:
        """Send this rank's work since warm-up on its way to rank 0."""
        if self._gather is not None:
            work = _work_of(self._trainer.global_rank, measurement)
            self._gather.post(self.timeline.steps, asdict(work) if work is not None else None)

    def _take_in_ranks(self) -> None:
        if self._gather is None or not self._gather.collects:
            return
        for gathered in self._gather.ready():
            for rank, work in gathered.by_rank.items():
                if work is not None:
                    self._ranks[rank] = RankWork(**work)
                else:
                    self._ranks.pop(rank, None)

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

    def log_rest(self, trainer: Trainer) -> None:
        """Log a run that was shorter than a window as one."""
        measurement = self._steady()
        if not self._logged and measurement is not None and measurement.times.steps:
            self.log_window(trainer, measurement.times, count_stalls(measurement, self._options.threshold))

    def write_hang(self, folder: Path, quiet_s: float) -> Path:
        """Write the state of this process and its workers; returns the file."""
        rank = self._trainer.global_rank
        number = 1 + len(list(folder.glob(f"hang-rank{rank}-*.txt")))
        path = folder / f"hang-rank{rank}-{number}.txt"
        write_state(path, quiet_s, self.loader.describe_workers())
        return path


def _narrowest(start: _Baseline, now: _Baseline) -> tuple[LoaderFacts | None, WorkerTimes | None]:
    """Of several loaders, the one whose workers were busiest: the others wait with the loop for it."""
    since = [
        (facts, times - start.workers[key][1] if key in start.workers else times)
        for key, (facts, times) in now.workers.items()
    ]
    if not since:
        return None, None
    return max(since, key=lambda each: each[1].busy_s / max(each[0].num_workers or 1, 1))


def _work_of(rank: int, measurement: Measurement | None) -> RankWork | None:
    """A mean step of this rank, for rank 0 to compare."""
    if measurement is None or not measurement.times.steps:
        return None
    times, workers = measurement.times, measurement.workers
    own_s = sum(times.phases[phase] for phase in ("transfer", "forward", "logging")) + times.step_hooks_s
    loader_s = None
    if workers is not None and workers.batches:
        loader_s = workers.busy_s / workers.batches / max(measurement.loader.num_workers or 1, 1)
    return RankWork(rank, times.phases["data_wait"] / times.steps, own_s / times.steps, loader_s)


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
