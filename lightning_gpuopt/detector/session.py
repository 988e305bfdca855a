"""Observes one ``fit`` from ``setup`` to its end; brings instrumentation, measurements and report together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning_gpuopt.compat import lightning
from lightning_gpuopt.compat.lightning import LightningModule, Trainer
from lightning_gpuopt.detector.accumulator import SteadyStateAccumulator
from lightning_gpuopt.detector.copies_ahead import CopiesProbe
from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.detector.image_samples import ImageLook
from lightning_gpuopt.detector.instrumentation import Instrumentation, forward_is_a_ranks_own
from lightning_gpuopt.detector.loader_watch import LoaderWatch
from lightning_gpuopt.detector.memory_risks import MemoryRisks
from lightning_gpuopt.detector.options import DetectorOptions, WindowListener
from lightning_gpuopt.detector.padding_watch import PaddingWatch
from lightning_gpuopt.detector.profiling_passes import ProfilingPasses
from lightning_gpuopt.detector.progress import ProgressWatch, write_hang
from lightning_gpuopt.detector.rank_exchange import RankExchange, work_of
from lightning_gpuopt.detector.rank_watch import RankWatch
from lightning_gpuopt.detector.report_builder import (
    data_in_hyperparameters,
    environment_of,
    notes_of,
    owners_of,
    report_of,
)
from lightning_gpuopt.detector.risk_watch import RiskWatch
from lightning_gpuopt.detector.run_settings import RunSettingsWatch
from lightning_gpuopt.detector.stack_sampling import StackSampling
from lightning_gpuopt.detector.window_history import WindowHistory
from lightning_gpuopt.diagnosis.causes.table import cause_of
from lightning_gpuopt.diagnosis.compare import proofs_of
from lightning_gpuopt.diagnosis.diagnose import count_stalls, diagnose
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding, Proof, Risk
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.diagnosis.waterfall import Waterfall
from lightning_gpuopt.measurements.phases import PhaseTimes
from lightning_gpuopt.recorder.flight import FlightRecorder
from lightning_gpuopt.timeline.gpu_clock import GPU_EVENTS
from lightning_gpuopt.timeline.pauses import PauseWatch
from lightning_gpuopt.timeline.probe import Probe
from lightning_gpuopt.timeline.steps import StepClock
from lightning_gpuopt.timeline.windows import Windows

log = logging.getLogger(__name__)

P = TypeVar("P", bound=Probe)

# seconds of run between two diagnoses for each that one takes: 0.5 % of the time, however short windows are
_WAIT_PER_DIAGNOSIS: Final = 200
_MAX_WAIT_S: Final = 1.0


class DetectorSession:
    """Measures one ``fit``, from ``setup`` to its end; ``risks`` is there from :meth:`start` on."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        options: DetectorOptions,
        listeners: list[WindowListener],
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._options = options
        self._instruments = Instrumentation(trainer, pl_module)
        self.notes: list[str] = []
        self._windows = Windows(options.window_size, options.warmup_steps)
        self._accumulator: SteadyStateAccumulator | None = None
        self._proofs: list[Proof] = []
        self._pending: tuple[list[Finding], Waterfall] | None = None
        self._exchange: RankExchange | None = None
        self._recorder = recorder
        self._memory_risks: MemoryRisks | None = None
        self.progress = ProgressWatch(trainer)
        self._epoch_seen = 0
        self._changed_after: int | None = None
        self._listeners = listeners  # the detector's own list, which may change meanwhile
        self._heard: list[WindowListener] = []
        self._warmed_up = options.warmup_steps == 0
        self._logged = False
        self.started = False
        self.measures_windows = self.sees_batches = True  # to know what each window measured takes half of its end
        self._probes: list[Probe] = []
        self.loader = self._with(LoaderWatch(trainer))
        self._device: DeviceWatch | None = None
        self._run_settings: RunSettingsWatch | None = None
        self._own_forward = False
        self._padding = PaddingWatch(lambda: bool(trainer.training))
        self._images = self._with(ImageLook(lambda: lightning.train_loaders(trainer)))
        self._with(CopiesProbe(trainer))

    def _with(self, probe: P) -> P:
        """Have a probe read and its notes reported after those before it, and have it closed when the fit ends."""
        self._probes.append(probe)
        self._instruments.undo.callback(probe.close)
        return probe

    def start(self, risk_found: Callable[[Risk], None] = lambda risk: None) -> None:
        """Begin to measure, in ``on_train_start``; ``risk_found`` is called once for each kind, on any thread."""
        trainer, placed = self._trainer, self._instruments
        self.risks = RiskWatch(
            lambda: lightning.train_datasets(trainer), trainer.global_rank, trainer.world_size, risk_found
        )
        placed.undo.callback(self.risks.close)
        self._environment = environment_of(trainer, self._pl_module)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._own_callbacks = frozenset(type(each).__name__ for each in callbacks if lightning.is_its_own(each))
        hyperparameters = data_in_hyperparameters(self._pl_module, getattr(trainer, "datamodule", None))
        self._known = {"hyperparameters": hyperparameters, "async_saves_copy": lightning.async_saves_copy()}
        on_cuda = trainer.strategy.root_device.type == "cuda"
        self.timeline = placed.timeline(nvtx=self._options.nvtx, detailed=on_cuda)
        self.steps = StepClock(self.timeline, self._options.warmup_steps)
        placed.observers.connect("epoch_begins", self._epoch_begins)
        placed.observers.connect("fetch_begins", self.loader.queues.before_fetch)
        placed.observers.connect("fetch_ends", self.loader.queues.after_fetch)
        if trainer.world_size > 1:
            self._exchange = self._with(RankExchange(trainer.global_rank, trainer.world_size))
        if on_cuda:
            self._watch_gpu()
        self.profiling = self._with(
            ProfilingPasses(
                trainer,
                self._pl_module,
                threshold=self._options.threshold,
                profile=self._options.profile,
                device=self._device,
                stacks=StackSampling(self.timeline, self.loader) if trainer.is_global_zero else None,  # who reports
            )
        )
        placed.place(self.timeline)
        self._padding.end = placed.look_at_batches(self._padding.around)
        self._pauses = self._with(PauseWatch(self.timeline))
        self._pauses.start()
        if trainer.world_size > 1:
            self._with(RankWatch(trainer, self._pl_module, self.timeline, placed.reduce, self._device))
        self.loader.start()
        self.started = True
        if self._warmed_up:
            self._accumulator = self._new_accumulator()
        self.timeline.start()
        if self._recorder is not None:
            self._recorder.follow(self.timeline, [*callbacks, self._pl_module])
            placed.undo.callback(self._recorder.forget, self.timeline)
            self._memory_risks = MemoryRisks(
                trainer, self._recorder, self.loader, self.risks, lambda: owners_of(trainer, self._pl_module)
            )
            self._recorder.each_second = self._memory_risks.look

    def _epoch_begins(self) -> None:
        self.loader.release()
        self.risks.epoch_begins(self._trainer)

    def _new_accumulator(self) -> SteadyStateAccumulator:
        history = WindowHistory(self._device.device if self._device is not None else None, self.loader.process)
        owners = owners_of(self._trainer, self._pl_module)
        return SteadyStateAccumulator(self._probes, history, self.timeline.steps, owners, self._known)

    def see_batch(self, batch: Any) -> None:
        if self._run_settings is not None:
            self._run_settings.see_batch(batch)
        self._images.see_batch(batch)
        self.sees_batches = self._run_settings is not None

    def see_loss(self, loss: Any) -> None:
        if self._run_settings is not None:
            self._run_settings.see_loss(loss)

    def _watch_gpu(self) -> None:
        self._run_settings = RunSettingsWatch(self._trainer, self._pl_module)
        several = self._trainer.world_size > 1
        self._own_forward = several and forward_is_a_ranks_own(self._trainer, self._pl_module)
        device = self._device = self._with(
            DeviceWatch(self._trainer.strategy.root_device, self.timeline, forward=self._own_forward, links=several)
        )

        def refused(error: Exception) -> None:
            self._instruments.observers.disconnect(GPU_EVENTS)
            self.timeline.forget_host_work()
            device.refuse(error)

        for event in GPU_EVENTS:
            self._instruments.observers.connect(event, getattr(device.clock, event), refused)

    def watch_progress(self, write: Callable[[float], None]) -> None:
        """Have ``write`` called, on a thread of its own, when nothing progresses for ``hang_timeout`` seconds."""
        self.progress = ProgressWatch(self._trainer, self._recorder, self._options.hang_timeout, write)
        self._instruments.undo.callback(self.progress.close)

    def at_end(self, undo: Callable[[], None]) -> None:
        self._instruments.undo.callback(undo)

    def stop(self) -> None:
        self.timeline.stop()
        if self._device is not None:
            self._device.catch_up()
        self.profiling.finish()
        if self._exchange is not None:
            self._post(self._measured())
            self._exchange.close(3.0)
        if self._memory_risks is not None:
            self._memory_risks.look_now()
        self.risks.close()
        self._prove()
        for listener in self._hear():
            listener.training_ended()

    def undo(self) -> None:
        """Remove all instrumentation; may be called more than once."""
        if self.started:
            self.timeline.stop()
        self._instruments.undo.close()

    def step_done(self) -> bool:
        """Count a step; True when a window ends with it."""
        timeline = self.timeline
        timeline.step_done()
        self.steps.step_done(self._kind_of_step())
        self.progress.step_done()
        # workers are started anew in each epoch, unless they persist, and a finder may change their number at any step
        if timeline.epochs != self._epoch_seen or self.loader.resized():
            self._epoch_seen = timeline.epochs
            self._loaders_may_have_changed()
        gpu = None
        if self._device is not None:
            self._device.read_events()
            gpu = self._device.gpu if self._accumulator is not None else None
        self.profiling.step_done(timeline.steps - self._options.warmup_steps, gpu, self._findings_now)
        return self._windows.due(timeline.steps)

    def _findings_now(self) -> list[Finding] | None:
        return self._diagnose(self._measured()) if self._accumulator is not None else None

    def _kind_of_step(self) -> bool:
        """Whether gradients were only accumulated: such a step is shorter than one with the optimizer in it."""
        if self._trainer.accumulate_grad_batches == 1:
            return False
        return lightning.finished_optimizer_step(self._trainer) is None

    def _loaders_may_have_changed(self) -> None:
        before = self.loader.facts
        self.loader.epoch_begins()
        self.timeline.fetches_watched = self._device is not None or self.loader.queues.watches
        if before.num_workers is not None and self.loader.facts != before:
            self._begin_anew()

    @property
    def set_ups(self) -> tuple[float, int]:
        """The set-ups of epochs until now: their seconds, and how many there were."""
        times = self.timeline.times()
        return times.phases["epoch_setup"], times.epochs

    def notify(self, window: Measurement, findings: list[Finding]) -> None:
        of_training = [each for each in findings if each.evidence.get("loader") != "validation"]
        for each in self._hear():
            if each.window_closed(window, of_training, self.loader.facts, self.set_ups):
                self._begin_anew()

    def _hear(self) -> list[WindowListener]:
        """The listeners; those that have left stay in the report."""
        self._heard += [each for each in self._listeners if not any(each is heard for heard in self._heard)]
        return list(self._listeners)

    def _begin_anew(self) -> None:
        """Start the measurements anew; the findings so far are proved or not by the windows after it."""
        self._prove()
        times = self.timeline.times()
        part, measured = self._accumulator, self._measured(times)
        if part is not None and part.findings and measured.waterfall.step_s:
            self._pending = (part.findings, measured.waterfall)
        self._accumulator = None
        self._changed_after = times.steps
        self._windows.restart(times, in_step=self._exchange is not None)

    def _prove(self) -> None:
        if self._heard:  # whoever changes something proves it
            return
        measured = self._measured()
        if self._pending is not None and measured.times.steps:
            (findings, before), after = self._pending, measured.waterfall
            steps = before.steps, after.steps
            self._proofs += proofs_of(findings, before.step_s, asdict(self.loader.facts), after.step_s, steps)
            self._pending = None

    def close_window(self) -> tuple[Measurement | None, list[Finding]] | None:
        """End a window: what it measured (None: nobody needs it), and the causes; None when warm-up ended instead."""
        self._pauses.look_for_compiler()
        times = self.timeline.times()
        window = self._windows.close(times)
        self.steps.window_done()
        steady = self._windows.steady(times)
        if window is None or steady is None:
            if self._warmed_up:
                self._post(Measurement())  # for each window of the other ranks one of ours
            if steady is not None:
                self._warmed_up = True
                self._accumulator = self._new_accumulator()
            return None
        part = self._accumulator
        assert part is not None
        if self._device is not None:
            self._windows.annotate(self._device.close_window())
        if self._exchange is not None:
            self._post(part.measure(steady))
        in_window = part.window(window.times) if self.measures_windows or self._device is not None else None
        if in_window is not None and self._device is not None:
            self.profiling.window_done(self._device.gpu(), in_window.waterfall.step_s)
        if steady.wall_s >= part.diagnose_after_s:
            began_s = time.perf_counter()
            if in_window is None:
                part.end_window()
            self._find(part, steady)
            took_s = time.perf_counter() - began_s
            part.diagnose_after_s = steady.wall_s + took_s + min(_WAIT_PER_DIAGNOSIS * took_s, _MAX_WAIT_S)
        return in_window, part.findings

    def _find(self, part: SteadyStateAccumulator, steady: PhaseTimes) -> None:
        part.findings = self._diagnose(self._with_stacks(part.until_window(steady)))
        slower = [finding for finding in part.findings if finding.cause == "slowdown"]
        if slower and part.look_for_growth(slower[0]):
            part.findings = self._diagnose(self._with_stacks(part.until_window(steady)))
        self.profiling.found(part.findings)

    def _with_stacks(self, measured: Measurement) -> Measurement:
        return replace(measured, sampled=self.profiling.sampled)

    def _measured(self, times: PhaseTimes | None = None) -> Measurement:
        steady = self._windows.steady(times or self.timeline.times())
        if steady is None or self._accumulator is None:
            return Measurement()
        return self._with_stacks(self._accumulator.measure(steady))

    def _diagnose(self, measured: Measurement) -> list[Finding]:
        findings = diagnose(measured, self._options.threshold)
        source = measured.source
        if source.changes or not any("num_workers" in each.settings for each in findings):
            return findings
        source = self.loader.with_changes(source)  # not earlier: it looks at the dataset
        if source.unshared is None:
            return findings
        return diagnose(replace(measured, source=source), self._options.threshold)

    def report(self, *, measure_images: bool = False) -> StallReport:
        """The report of the run until now; ``measure_images`` takes half a second at most, once training has ended."""
        times = self.timeline.times()
        measured = self._measured(times)
        findings = self._diagnose(measured)
        if measure_images and any(cause_of(each.cause).storage for each in findings):
            self._images.measure()
            measured = replace(measured, images=self._images.samples)
            findings = self._diagnose(measured)
        heard = [note for each in self._heard for note in each.notes]
        notes = self.notes + heard + self._instruments.notes + self._instruments.observers.problems
        notes += [note for each in self._probes for note in each.notes]
        notes += self.profiling.notes_on(findings if self._accumulator is not None else None)
        return report_of(
            times,
            measured,
            findings,
            self._options.threshold,
            loader=self.loader.facts,
            step_times=self.steps.times(),
            proofs=list(self._proofs),
            changes=[change for each in self._heard for change in each.changes],
            stretches=self._windows.stretches(times),
            notes=notes_of(
                times, measured, self._options.threshold, notes, self._changed_after, self._windows.least_steps
            ),
            environment=self._environment,
            own_callbacks=self._own_callbacks,
            run_settings=self._run_settings,
            padded=self._padding.batches,
            risks=self.risks.risks,
        )

    def _post(self, measurement: Measurement) -> None:
        if self._exchange is not None:
            work = work_of(self._trainer.global_rank, measurement, forward=self._own_forward)
            self._exchange.send(self.timeline.steps, work)

    def log_window(self, trainer: Trainer, measured: Measurement) -> None:
        times, step_s = measured.times, measured.waterfall.step_s or measured.times.step_s
        if step_s is None or not trainer.loggers:
            return
        self._logged = True
        stalls = count_stalls(measured, self._options.threshold)
        metrics: dict[str, float] = {"step/time_s": step_s, "stall/count": float(stalls)}
        for phase, seconds in times.phases.items():
            metrics[f"step/{phase}_percent"] = seconds / times.wall_s * 100
        step = lightning.logging_step(trainer)
        for each in trainer.loggers:
            each.log_metrics(metrics, step=step)

    def log_rest(self, trainer: Trainer) -> None:
        """Log a run that was shorter than a window as one."""
        measured = self._measured()
        if not self._logged and measured.times.steps:
            self.log_window(trainer, measured)

    def write_hang(self, folder: Path, quiet_s: float) -> Path:
        return write_hang(folder, self._trainer.global_rank, quiet_s, self.loader.describe_workers(), self._recorder)
