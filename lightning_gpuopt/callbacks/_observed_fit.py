"""One ``fit`` under observation, from ``setup`` to its end: what is placed, measured and reported comes together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt import _lightning
from lightning_gpuopt._lightning import LightningModule, Trainer
from lightning_gpuopt._lightning_loops import batches_left
from lightning_gpuopt._measured import ImageSamples, PhaseTimes, RankWork
from lightning_gpuopt._measured_gpu import AheadCopies
from lightning_gpuopt._places import Sampled
from lightning_gpuopt._ranks import RankGather
from lightning_gpuopt.callbacks._device_watch import DeviceWatch
from lightning_gpuopt.callbacks._fit_report import (
    data_in_hyperparameters,
    environment_of,
    notes_of,
    owners_of,
    report_of,
)
from lightning_gpuopt.callbacks._image_samples import describe, images_in, measure
from lightning_gpuopt.callbacks._line_looks import LineLooks
from lightning_gpuopt.callbacks._loader_watch import LoaderWatch
from lightning_gpuopt.callbacks._placement import Placement, forward_is_a_ranks_own
from lightning_gpuopt.callbacks._rank_watch import RankWatch
from lightning_gpuopt.callbacks._seen_run import SeenRunWatch
from lightning_gpuopt.callbacks._steady_part import SteadyPart, work_of
from lightning_gpuopt.callbacks._step_looks import Profile, StepLooks
from lightning_gpuopt.callbacks.cuda_prefetcher import CudaPrefetcher
from lightning_gpuopt.diagnosis.compare import proofs_of
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Change, Finding, Proof
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.diagnosis.stalls import count_stalls, diagnose
from lightning_gpuopt.diagnosis.storage_step import STORAGE_CAUSES
from lightning_gpuopt.timeline.hang import HangWatch, Watched, write_state
from lightning_gpuopt.timeline.pauses import PauseWatch
from lightning_gpuopt.timeline.steps import StepClock
from lightning_gpuopt.timeline.trace import TraceCapture
from lightning_gpuopt.timeline.windows import Windows

log = logging.getLogger(__name__)

_GPU_EVENTS: Final = (
    "batch_arrives",
    "batch_copied",
    "batch_ready",
    "compute_begins",
    "compute_ends",
    "forward_begins",
    "forward_ends",
    "broadcast_begins",
    "broadcast_ends",
    "validation_begins",
    "validation_ends",
    "host_work_begins",
    "host_work_ends",
)


@dataclass(frozen=True)
class Options:
    """What the user asked of the detector that concerns the measuring.

    Attributes:
        threshold: share of wall time from which on a cause is reported, 0-1.
        window_size: training batches in a window.
        warmup_steps: training batches that are left out of findings.
        hang_timeout: seconds without progress that count as a hang; None: no watch.
        nvtx: phases as NVTX ranges.
        profile: whether torch.profiler may look at a few steps.
    """

    threshold: float
    window_size: int
    warmup_steps: int
    hang_timeout: float | None
    nvtx: bool
    profile: Profile = "auto"


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
        self._placed = Placement(trainer, pl_module)
        self.notes: list[str] = []
        self._windows = Windows(options.window_size, options.warmup_steps)
        self._steady: SteadyPart | None = None
        self._proofs: list[Proof] = []
        self._pending: tuple[list[Finding], float] | None = None
        self._ranks: dict[int, RankWork] = {}
        self._gather: RankGather | None = None
        self._hang: HangWatch | None = None
        self._epoch_seen = 0
        self._changed_after: int | None = None
        self.changes: list[Change] | None = None
        self._warmed_up = options.warmup_steps == 0
        self._logged = False
        self.started = False
        self.loader = LoaderWatch(trainer)
        self._placed.undo.callback(self.loader.undo)
        self._device: DeviceWatch | None = None
        self._looks: StepLooks | None = None
        self._trace: TraceCapture | None = None
        self._seen_run: SeenRunWatch | None = None
        self._together: RankWatch | None = None
        self._lines: LineLooks | None = None
        self._own_forward = False
        self._batch_seen = False
        self._images_in_batch: tuple[int, int] | None = None
        self._images: ImageSamples | None = None

    def start(self) -> None:
        """Place the profiler and the few shadows, and begin to measure; called in ``on_train_start``."""
        trainer, placed = self._trainer, self._placed
        self._environment = environment_of(trainer, self._pl_module)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._own_callbacks = frozenset(type(each).__name__ for each in callbacks if _lightning.is_its_own(each))
        self._hyperparameters = data_in_hyperparameters(self._pl_module, getattr(trainer, "datamodule", None))
        on_cuda = trainer.strategy.root_device.type == "cuda"
        self.timeline = placed.timeline(nvtx=self._options.nvtx, detailed=on_cuda)
        self.steps = StepClock(self.timeline, self._options.warmup_steps)
        for event, function in (
            ("epoch_begins", self._epoch_begins),
            ("fetch_begins", self.loader.queues.before_fetch),
            ("fetch_ends", self.loader.queues.after_fetch),
        ):
            placed.observers.connect(event, function, placed.observers.stopped(event))
        if on_cuda:
            self._watch_gpu()
            self._seen_run = SeenRunWatch(trainer, self._pl_module)
        if trainer.world_size > 1:
            self._gather = RankGather("stall-detector", trainer.global_rank, trainer.world_size)
            placed.undo.callback(self._gather.close, 1.0)
        if trainer.is_global_zero:  # who reports
            self._lines = LineLooks(self.timeline, self.loader)
            placed.undo.callback(self._lines.finish)
        placed.place(self.timeline)
        if trainer.world_size > 1:
            self._together = RankWatch(trainer, self._pl_module, self.timeline, placed.reduce, self._link)
            placed.undo.callback(self._together.close)
        self._pauses = PauseWatch(self.timeline)
        placed.undo.callback(self._pauses.stop)
        self._pauses.start()
        self.loader.start()
        self.started = True
        if self._warmed_up:
            self._steady = self._new_part()
        self.timeline.start()

    def _new_part(self) -> SteadyPart:
        """The steady part begins, or begins anew."""
        return SteadyPart(
            self.loader,
            self._device,
            self._looks,
            self.timeline.steps,
            self._copies_ahead,
            lambda: self._images,
            self._pauses,
            owners_of(self._trainer, self._pl_module),
            self._together,
        )

    def _link(self) -> str:
        return self._device.link if self._device is not None else ""

    def _copies_ahead(self) -> AheadCopies | None:
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        prefetchers = [each for each in callbacks if isinstance(each, CudaPrefetcher)]
        return prefetchers[0].copies_ahead() if prefetchers else None

    def see_batch(self, batch: Any) -> None:
        """Look at the first batch: which images are in it, and whether they are read from files; at a few shapes."""
        if self._seen_run is not None:
            self._seen_run.see_batch(batch)
        if self._batch_seen:
            return
        self._batch_seen = True
        self._look_at_images(describe, batch)

    def see_loss(self, loss: Any) -> None:
        """Look at the graphs of the first losses, on CUDA: which operations a step has, and in which precision."""
        if self._seen_run is not None:
            self._seen_run.see_loss(loss)

    def measure_images(self) -> None:
        """Measure what the training loader's images cost, where that decides the advice; at most about half a second.

        Called when training has ended.
        """
        measured = self._measured()
        if measured is None:
            return
        findings = diagnose(measured, self._options.threshold)
        if any(finding.cause in STORAGE_CAUSES for finding in findings):
            self._look_at_images(measure)

    def _look_at_images(
        self, look: Callable[[Any, tuple[int, int] | None], ImageSamples | None], batch: Any = None
    ) -> None:
        loaders = _lightning.train_loaders(self._trainer)
        if len(loaders) != 1:  # of several, which one is late differs from window to window
            return
        try:
            if batch is not None:
                self._images_in_batch = images_in(batch)
            self._images = look(getattr(loaders[0], "dataset", None), self._images_in_batch)
        except Exception:  # whatever a dataset or batch of somebody's own does not like about it
            log.debug("the images of a dataset could not be looked at", exc_info=True)

    def _watch_gpu(self) -> None:
        several = self._trainer.world_size > 1
        self._own_forward = several and forward_is_a_ranks_own(self._trainer, self._pl_module)
        device = DeviceWatch(
            self._trainer.strategy.root_device, self.timeline, forward=self._own_forward, links=several
        )
        self._device = device
        self._looks = StepLooks(
            device,
            self._options.threshold,
            profile=self._options.profile,
            batches_left=lambda: batches_left(self._trainer),
            rank=self._trainer.global_rank,
            several_ranks=several,
            rhythm=self._trainer.accumulate_grad_batches,
            is_taken=lambda: self._trace is not None and self._trace.recording,
        )
        self._placed.undo.callback(device.close)
        self._placed.undo.callback(self._looks.finish)

        def refused(error: Exception) -> None:
            self._placed.observers.disconnect(_GPU_EVENTS)
            self.timeline.forget_host_work()
            device.refuse(error)

        for event in _GPU_EVENTS:
            self._placed.observers.connect(event, getattr(device.clock, event), refused)

    def watch_for_hangs(self, write: Callable[[float], None]) -> None:
        """Have ``write`` called, on a thread of its own, when nothing progresses for ``hang_timeout`` seconds."""
        if self._options.hang_timeout is not None:
            self._hang = HangWatch(self._options.hang_timeout, write)
            self._placed.undo.callback(self._hang.stop)
            saves = Watched(self._trainer.save_checkpoint, self._hang)
            self._placed.undo.callback(_lightning.shadow(self._trainer, "save_checkpoint", saves))
            self._hang.start()

    def progress(self) -> None:
        """A batch of an evaluation has begun, or was finished."""
        if self._hang is not None:
            self._hang.progress()

    def at_end(self, undo: Callable[[], None]) -> None:
        """Have something undone with the rest, when the fit ends."""
        self._placed.undo.callback(undo)

    def record_trace(self, path: Path) -> None:
        """Record the next five steps, as soon as torch.profiler is not at work for a look; once."""
        if self._trace is None:
            self._trace = TraceCapture(path)
            self._placed.undo.callback(self._end_trace)
            self._begin_trace()

    def _begin_trace(self) -> None:
        trace = self._trace
        if trace is None or trace.over or trace.recording:
            return
        if self._looks is not None and not self._looks.leaves_time_for(trace.steps_left):
            return
        try:
            trace.begin()
        except RuntimeError as error:
            trace.end()
            self.notes.append(f"No trace was recorded: {error}")

    def _advance_trace(self, trace: TraceCapture) -> None:
        if trace.recording:
            trace.step_done()
        else:
            self._begin_trace()

    def _end_trace(self) -> None:
        try:
            if self._trace is not None:
                self._trace.end()
        except Exception:
            log.warning("StallDetector could not write its trace", exc_info=True)

    def stop(self) -> None:
        """Freeze the figures, and take in what the other ranks have to say."""
        self.timeline.stop()
        if self._device is not None:
            self._device.catch_up(self._steady.step_done if self._steady is not None else lambda: None)
        for each in (self._looks, self._lines):
            if each is not None:
                each.finish()
        if self._gather is not None:
            self._post(self._measured())
            self._gather.close(3.0)
            self._take_in_ranks()
        self._prove()

    def undo(self) -> None:
        """Take away all that was placed; may be called more than once."""
        if self.started:
            self.timeline.stop()
        self._placed.undo.close()

    def _epoch_begins(self) -> None:
        self.loader.release()

    def step_done(self) -> bool:
        """Count a step; True when a window ends with it."""
        timeline = self.timeline
        timeline.step_done()
        self.steps.step_done(self._kind_of_step())
        if self._hang is not None:
            self._hang.progress()
        # workers are started anew in each epoch, unless they persist, and a finder may change their number at any step
        if timeline.epochs != self._epoch_seen or self.loader.resized():
            self._epoch_seen = timeline.epochs
            self._loaders_may_have_changed()
        if self._device is not None and self._looks is not None:
            self._device.read()
            if self._steady is not None:
                self._steady.step_done()
            gpu = self._steady.gpu if self._steady is not None else None
            self._looks.step_done(timeline.steps - self._options.warmup_steps, gpu)
        if self._trace is not None and not self._trace.over:
            self._advance_trace(self._trace)
        if self._lines is not None:
            self._lines.step_done()
            if self._lines.due(timeline.steps - self._options.warmup_steps) and (measured := self._measured()):
                self._lines.found(diagnose(measured, self._options.threshold))
        return self._windows.due(timeline.steps)

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        """The stacks that were sampled for the findings."""
        return self._lines.sampled() if self._lines is not None else ()

    def _kind_of_step(self) -> bool:
        """Whether gradients were only accumulated: such a step is shorter than one with the optimizer in it."""
        if self._trainer.accumulate_grad_batches == 1:
            return False
        return _lightning.finished_optimizer_step(self._trainer) is None

    def _loaders_may_have_changed(self) -> None:
        before = self.loader.facts
        self.loader.epoch_begins()
        if before.num_workers is not None and self.loader.facts != before:
            self.begin_anew()

    def begin_anew(self) -> None:
        """From here on it is another run: what was found before is to be proved by what comes now."""
        self._prove()
        times = self.timeline.times()
        measured = self._measured(times)
        if self._steady is not None and self._steady.findings and measured is not None and measured.waterfall.step_s:
            self._pending = (self._steady.findings, measured.waterfall.step_s)
        self._steady = None
        self._changed_after = times.steps
        self._windows.restart(times, in_step=self._gather is not None)

    def _prove(self) -> None:
        if self.changes is not None:  # whoever makes them proves them
            return
        measured = self._measured()
        if self._pending is not None and measured is not None and measured.times.steps:
            findings, step_s = self._pending
            self._proofs += proofs_of(findings, step_s, asdict(self.loader.facts), measured.waterfall.step_s)
            self._pending = None

    def close_window(self) -> tuple[Measurement, list[Finding]] | None:
        """End a window.

        Returns:
            What the window measured, and the causes above the threshold since warm-up; None when warm-up ended instead.
        """
        self._pauses.look_for_compiler()
        times = self.timeline.times()
        window = self._windows.close(times)
        self.steps.window_done()
        steady = self._windows.steady(times)
        if window is None or steady is None:
            if self._warmed_up:
                self._post(None)  # for each window of the other ranks one of ours
            if steady is not None:
                self._warmed_up = True
                self._steady = self._new_part()
            return None
        part = self._steady
        assert part is not None
        if self._device is not None:
            self._windows.annotate(self._device.close_window())
        if self._gather is not None:
            self._post(part.measure(steady))
            self._take_in_ranks()
        ranks = self._all_ranks()
        in_window = part.window(window.times, ranks)
        if self._looks is not None:
            self._looks.window_done(part.gpu(), in_window.waterfall.step_s)
        part.findings = diagnose(self._with_lines(part.until_window(steady, ranks)), self._options.threshold)
        slower = [finding for finding in part.findings if finding.cause == "slowdown"]
        if slower and part.look_for_growth(slower[0]):
            part.findings = diagnose(self._with_lines(part.until_window(steady, ranks)), self._options.threshold)
        if self._lines is not None:
            self._lines.found(part.findings)
        return in_window, part.findings

    def _with_lines(self, measured: Measurement) -> Measurement:
        sampled = self._lines.sampled() if self._lines is not None else ()
        return replace(measured, sampled=sampled, hyperparameters=self._hyperparameters)

    def _measured(self, times: PhaseTimes | None = None) -> Measurement | None:
        """The steady part so far; None while warm-up goes on."""
        steady = self._windows.steady(times or self.timeline.times())
        if steady is None or self._steady is None:
            return None
        return self._with_lines(self._steady.measure(steady, self._all_ranks()))

    def report(self) -> StallReport:
        """The report of the run until now."""
        times = self.timeline.times()
        measured = self._measured(times)
        notes = self.notes + self._placed.notes + self._placed.observers.problems + self.loader.notes()
        if self._gather is not None and self._gather.problem is not None:
            notes.append(f"Stragglers could not be looked for: {self._gather.problem}.")
        for each in (self._device, self._looks, self._pauses, self._together):
            if each is not None:
                notes += each.notes
        if self._lines is not None and measured is not None:
            notes += self._lines.notes(diagnose(measured, self._options.threshold))
        return report_of(
            times,
            measured,
            self._options.threshold,
            loader=self.loader.facts,
            step_times=self.steps.times(),
            proofs=list(self._proofs),
            changes=list(self.changes or ()),
            stretches=self._windows.stretches(times),
            notes=notes_of(times, measured, self._options.threshold, notes, self._changed_after),
            environment=self._environment,
            own_callbacks=self._own_callbacks,
            seen_run=self._seen_run,
        )

    def _post(self, measurement: Measurement | None) -> None:
        """Send this rank's work since warm-up on its way to rank 0."""
        if self._gather is not None:
            work = work_of(self._trainer.global_rank, measurement, forward=self._own_forward)
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

    def _all_ranks(self) -> tuple[RankWork, ...]:
        return tuple(self._ranks[rank] for rank in sorted(self._ranks))

    def log_window(self, trainer: Trainer, measured: Measurement) -> None:
        """Send a window's figures to every logger."""
        times, step_s = measured.times, measured.waterfall.step_s or measured.times.step_s
        if step_s is None or not trainer.loggers:
            return
        self._logged = True
        stalls = count_stalls(measured, self._options.threshold)
        metrics: dict[str, float] = {"step/time_s": step_s, "stall/count": float(stalls)}
        for phase, seconds in times.phases.items():
            metrics[f"step/{phase}_percent"] = seconds / times.wall_s * 100
        step = _lightning.logging_step(trainer)
        for each in trainer.loggers:
            each.log_metrics(metrics, step=step)

    def log_rest(self, trainer: Trainer) -> None:
        """Log a run that was shorter than a window as one."""
        measured = self._measured()
        if not self._logged and measured is not None and measured.times.steps:
            self.log_window(trainer, measured)

    def write_hang(self, folder: Path, quiet_s: float) -> Path:
        """Write the state of this process and its workers; returns the file."""
        rank = self._trainer.global_rank
        number = 1 + len(list(folder.glob(f"hang-rank{rank}-*.txt")))
        path = folder / f"hang-rank{rank}-{number}.txt"
        write_state(path, quiet_s, self.loader.describe_workers())
        return path
