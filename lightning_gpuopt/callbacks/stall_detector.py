"""``StallDetector``: where the training loop's time goes, and why."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from typing_extensions import override

from lightning_gpuopt.compat.lightning import STEP_OUTPUT, LightningModule, Trainer, rank_zero_warn, say_once
from lightning_gpuopt.detector.kernel_profiling import Profile
from lightning_gpuopt.detector.options import DetectorOptions, WindowListener
from lightning_gpuopt.detector.report_files import is_remote, read_report, write_report
from lightning_gpuopt.detector.session import DetectorSession
from lightning_gpuopt.diagnosis.causes.table import cause_of
from lightning_gpuopt.diagnosis.code_places import finding_name
from lightning_gpuopt.diagnosis.compare import compare
from lightning_gpuopt.diagnosis.diagnose import StallError
from lightning_gpuopt.diagnosis.render.text import render_text
from lightning_gpuopt.diagnosis.report import Finding, Risk, StallReport
from lightning_gpuopt.measurements.code_location import Sampled
from lightning_gpuopt.measurements.flight import SETS_UP, TRAINS, VALIDATES
from lightning_gpuopt.measurements.phases import PHASES
from lightning_gpuopt.recorder.flight import FlightRecorder
from lightning_gpuopt.recorder.handover import Watcher
from lightning_gpuopt.recorder.ring_reader import FOLDER
from lightning_gpuopt.utils.arguments import choice, flag, or_none, real_number, refuse, whole_number
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard
from lightning_gpuopt.utils.progress_bar import BarItem, print_once_fit_has_ended
from lightning_gpuopt.utils.rank_stop import RankStop
from lightning_gpuopt.utils.replaced_method import hide_us

log = logging.getLogger(__name__)

OnStall = Literal["warn", "raise", "ignore"]


class StallDetector(CallbackBase):
    """Find out where the time of a training run goes, why it waits, what to change, and the expected gain.

    The time from ``on_train_start`` to ``on_train_end`` is attributed to phases, whose seconds are exclusive and add
    up to wall time. On CUDA only GPU idle time counts, measured with events that are read later.

    Every ``window_size`` batches it logs ``step/time_s``, ``step/{phase}_percent`` and ``stall/count``, and reports
    each cause above ``threshold`` once. ``report.json`` and ``report.html`` are written to ``report_dir`` when ``fit``
    ends, also after an exception. If advice of an earlier ``report.json`` there was followed, its measured gain is
    shown.

    Weights, batches, their order and random state do not change. A rank reports its own time, and rank 0 also which
    rank delays the others.

    Args:
        threshold: minimum share of wall time, 0-1, for a cause to be reported.
        window_size: training batches in a window.
        warmup_steps: initial batches of ``fit`` that findings ignore (compilation, cold caches); they are still in the
            report's ``phases``.
        on_stall: ``"warn"`` once for each cause, ``"raise"`` a ``StallError`` at the end of the window, or
            ``"ignore"``. Several ranks raise at the same step, a few steps after the window, agreed through the
            key-value store of ``torch.distributed``, or when training ends; rank 0's findings count.
        report_dir: folder of the report; by default ``<trainer.log_dir>/gpuopt``, and none under ``fast_dev_run``.
        hang_timeout: seconds without progress (a finished step, validation batch or save), counted from
            ``on_train_start``, after which the stacks of this process and the state of its workers are written to
            ``report_dir/hang-*.txt`` and a warning is given, once for each hang. A validation batch and a save are
            timed from their own beginning. Training is not ended. ``watch`` and ``post-mortem`` also use the limit.
        nvtx: also mark the phases as NVTX ranges, for Nsight Systems. Needs a CUDA build of torch.
        capture_trace: when a stall is found, record the next five steps, once, with ``torch.profiler``, into
            ``report_dir/trace.json.gz``, which Perfetto opens; under ``profile="auto"`` as well. It waits for a
            profiler recording that is in progress.
        print_report: print the report's table when ``fit`` has ended, on rank 0's stdout and as wide as the terminal,
            under ``on_stall="ignore"`` too. Also after Ctrl-C, but not after other exceptions.
        prog_bar: show ``data 42 %`` in the Trainer's progress bar: the share of the last window spent waiting for data
            (on CUDA, GPU idle time). Refreshed with each window.
        profile: whether torch.profiler may record a few steps on CUDA, once, to see inside a step. Once used, it can
            slow down later steps. ``"auto"``: with one rank, in the last steps before a foreseeable end
            (``max_steps``; ``max_epochs`` with a known number of batches). ``"on"`` (or True): whenever needed; with
            several ranks on rank 0. ``"off"`` (or False): never. If a recording was needed but disabled, and nothing
            else was found, the verdict is ``"unknown"``, and a note says how to enable it.
        recorder: keep a flight recorder of this process and its loader's workers in ``report_dir/recorder``, which
            ``lightning-gpuopt post-mortem`` reads when a run has died or hangs. It is removed when ``fit`` ends well.

    Raises:
        ValueError: an argument is out of range, or ``capture_trace=True`` with ``profile="off"``.
        MisconfigurationException: two StallDetectors in one Trainer.
        StallError: a stall was found, with ``on_stall="raise"``.

    Example::

        from lightning.pytorch import Trainer
        from lightning_gpuopt import StallDetector

        detector = StallDetector()
        trainer = Trainer(callbacks=[detector])
        trainer.fit(model, train_dataloader)  # prints the report at its end
        print(detector.report.verdict)
    """

    logs: ClassVar[bool] = True
    """Whether the figures of each window go to the Trainer's loggers."""

    writes_page: ClassVar[bool] = True
    """Whether ``report.html`` is written beside ``report.json``."""

    def __init__(
        self,
        threshold: float = 0.1,
        window_size: int = 50,
        warmup_steps: int = 5,
        on_stall: OnStall = "warn",
        report_dir: str | Path | None = None,
        hang_timeout: float | None = None,
        nvtx: bool = False,
        capture_trace: bool = False,
        print_report: bool = True,
        prog_bar: bool = False,
        profile: Profile | bool = "auto",
        recorder: bool = True,
    ) -> None:
        super().__init__()
        self.idle_hooks: tuple[str, ...] = ()
        if report_dir is not None and not isinstance(report_dir, (str, os.PathLike)):
            refuse("report_dir", "a path, or None", report_dir, wrong_type=True)
        self.threshold = real_number("threshold", threshold, "a share of wall time", above=0, at_most=1)
        self.window_size = whole_number("window_size", window_size, "a number of batches", least=1)
        self.warmup_steps = whole_number("warmup_steps", warmup_steps, "a number of batches", least=0)
        self.on_stall: OnStall = choice("on_stall", on_stall, get_args(OnStall))
        self.report_dir = report_dir
        self.hang_timeout = or_none(real_number, "hang_timeout", hang_timeout, "seconds", above=0)
        self.nvtx = flag("nvtx", nvtx)
        self.capture_trace = flag("capture_trace", capture_trace)
        self.print_report = flag("print_report", print_report)
        self.recorder = flag("recorder", recorder)
        self.prog_bar = flag("prog_bar", prog_bar)
        words: dict[object, object] = {True: "on", False: "off"}  # what YAML makes of an unquoted on or off
        word = words[profile] if isinstance(profile, bool) else profile
        self.profile: Profile = choice("profile", word, get_args(Profile))  # type: ignore[arg-type]
        if self.capture_trace and self.profile == "off":
            raise ValueError(
                'capture_trace=True records with torch.profiler, and profile="off" forbids that: remove one of them'
            )
        self._bar_item = BarItem("data")
        self._listeners: list[WindowListener] = []
        self._session: DetectorSession | None = None
        self._recorder: FlightRecorder | None = None
        self._stop: RankStop | None = None
        self._report: StallReport | None = None
        self._sampled: tuple[Sampled, ...] = ()
        self._baseline: StallReport | None = None
        self._folder: str | None = None
        self._reported: set[str] = set()

    @property
    def report(self) -> StallReport:
        """The report of the run so far, or of the last ``fit``, frozen when training ended."""
        if self._session is not None and self._session.started:
            return self._with_proofs(self._session.report())
        if self._report is not None:
            return self._report
        note = f"No training has run yet: a verdict needs at least {self.warmup_steps + 1} steps."
        return StallReport("not_measured", 0.0, dict.fromkeys(PHASES, 0.0), [], notes=[note])

    def add_listener(self, listener: WindowListener) -> None:
        """Notify another callback of findings; once for each object.

        Args:
            listener: called on the training thread.
        """
        if not any(each is listener for each in self._listeners):
            self._listeners.append(listener)

    def remove_listener(self, listener: WindowListener) -> None:
        """Stop notifying it; does nothing if it is not registered."""
        self._listeners[:] = [each for each in self._listeners if each is not listener]

    @property
    def folder(self) -> str | None:
        """The folder of the last ``fit``'s report, also before it is written; None if none is written."""
        return self._folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the Trainer's set-up, find the report's folder, and intercept the loaders."""
        if stage != "fit":
            self._record_evaluation(trainer, stage)
            return
        self._refuse_second(trainer, StallDetector, "StallDetectors", ": each would measure the other")
        self._leave()
        self._end_recording()  # of a fit whose end nobody told of
        self._reported.clear()
        self._report = None
        self._sampled = ()
        self._folder = None
        if self.report_dir is not None:  # no other rank is asked: one may be without a detector, under a watch
            self._folder = str(self.report_dir).rstrip("/")
        else:
            log_dir = trainer.log_dir  # asks the other ranks, so every rank asks
            if not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._folder = f"{str(log_dir or trainer.default_root_dir).rstrip('/')}/gpuopt"
        self._baseline = read_report(self._folder)
        options = DetectorOptions(
            self.threshold, self.window_size, self.warmup_steps, self.hang_timeout, self.nvtx, self.profile
        )
        with Guard(self, trainer):
            self._recorder = self._begin_recording(trainer, self._folder)
            self._session = DetectorSession(trainer, pl_module, options, self._listeners, self._recorder)

    def _record_evaluation(self, trainer: Trainer, stage: str) -> None:
        """Also record ``validate``, ``test`` and ``predict``, which are not measured, if a folder was given."""
        if self._recorder is not None and self._recorder.goes_on:  # one that a callback begins inside of fit
            return
        if self.report_dir is not None or Watcher.of_this_process() is not None:
            with Guard(self, trainer):
                self._recorder = self._begin_recording(trainer, self.report_dir, stage)

    def _begin_recording(
        self, trainer: Trainer, folder: str | os.PathLike[str] | None, stage: str = "fit"
    ) -> FlightRecorder | None:
        if not self.recorder:
            return None
        try:
            local = Path(folder, FOLDER) if folder is not None and not is_remote(str(folder)) else None
            return FlightRecorder(trainer, local, stage)
        except Exception:  # no memory for it, or not Linux: all else is measured without
            log.debug("no flight recorder", exc_info=True)
            return None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start measuring."""
        session = self._session
        if session is None:
            return
        with Guard(self, trainer):
            self.idle_hooks = () if trainer.strategy.root_device.type == "cuda" else ("on_before_backward",)
            session.start(self._warn_of_risk)
            if self.prog_bar:
                self._bar_item = BarItem("data")
                session.at_end(self._bar_item.show_in(trainer))
            session.watch_progress(lambda quiet_s: self._report_hang(session, quiet_s))
            if self.on_stall == "raise" and trainer.world_size > 1:
                stop = RankStop("stall-detector-stop", trainer.global_rank, trainer.world_size)
                if stop.problem is None:
                    self._stop = stop
                else:
                    session.notes.append(f"Each rank raises a stall on its own: {stop.problem}.")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Count the step; at the end of a window, log and report."""
        session = self._session
        if session is None or not session.started:
            return
        with Guard(self, trainer):
            if session.sees_batches:
                session.see_batch(batch)
            if session.step_done():
                self._close_window(trainer, session)
            if self._stop is not None and (why := self._stop.step_done(session.timeline.steps)) is not None:
                raise StallError(why)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """No hang: a batch has come."""
        if self._session is not None:
            self._session.progress.begins(VALIDATES)
        elif self._recorder is not None:
            self._recorder.batch_begins()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """No hang: a batch is done."""
        if self._session is not None:
            self._session.progress.done(VALIDATES)
        elif self._recorder is not None:
            self._recorder.batch_ends()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No hang: a validation is done."""
        if self._session is not None:
            self._session.progress.done(TRAINS if trainer.training or trainer.validating else SETS_UP)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No hang: an epoch is done."""
        if self._session is not None:
            self._session.progress.done(SETS_UP)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Inspect the graphs of the first losses."""
        if self._session is not None and self._session.started:
            self._session.see_loss(loss)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze and write the report, and restore the Trainer."""
        self._finish(trainer, ended=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Freeze and write the report of a run that ends early; Lightning calls no ``teardown`` then."""
        if self._recorder is not None:
            self._recorder.failed(exception)
        hide_us(exception)
        self._finish(trainer, ended=False)
        if isinstance(exception, KeyboardInterrupt):
            self._print(trainer, interrupted=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report: progress bars are closed by now."""
        self._print(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer, however training ended."""
        self._leave()
        self._end_recording()

    def _end_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.ended()

    @override
    def _at_rest(self) -> dict[str, Any]:
        return {"_session": None, "_recorder": None, "_stop": None, "_listeners": []}

    def _close_window(self, trainer: Trainer, session: DetectorSession) -> None:
        logs = self.logs and bool(trainer.loggers)
        session.measures_windows = logs or self.prog_bar or bool(self._listeners)
        closed = session.close_window()
        if closed is None:
            return
        window, findings = closed
        if logs and window is not None:
            session.log_window(trainer, window)
        if window is not None:
            session.notify(window, findings)
        if self.prog_bar and window is not None and window.waterfall.wall_s > 0:
            self._bar_item.set_percent(window.waterfall.share(window.waterfall.wait("data_wait")) * 100)
        local = self._folder if trainer.is_global_zero else None
        if findings and self.capture_trace and local is not None and not is_remote(local):
            session.profiling.record_trace(Path(local) / "trace.json.gz")
        self._report_findings(trainer, findings)

    def _report_findings(self, trainer: Trainer, findings: list[Finding]) -> None:
        for text in self._unreported(findings):
            if self.on_stall == "raise":
                if self._stop is None:
                    raise StallError(text)
                if trainer.is_global_zero:  # the verdict is its own
                    self._stop.ask(text)
            if self.on_stall == "warn":
                rank_zero_warn(f"StallDetector: {text}")

    def _warn_of_risk(self, risk: Risk) -> None:
        """Called once for each kind of risk, on any thread."""
        if self.on_stall != "ignore":
            rank_zero_warn(f"StallDetector: {risk.text} {risk.advice}")

    def _unreported(self, findings: list[Finding]) -> Iterator[str]:
        """Report the causes that were not reported yet."""
        for finding in findings:
            who = finding_name(finding)
            if who in self._reported:
                continue
            self._reported.add(who)
            text = f"Training waits: {who} takes {finding.share * 100:.0f} % of the time. {finding.advice}"
            if "where" in finding.evidence and "{where}" not in cause_of(finding.cause).advice:
                text += f" Where: {finding.evidence['where']}."
            yield text

    def _report_hang(self, session: DetectorSession, quiet_s: float) -> None:
        """Called on the watch's thread; any rank can hang."""
        folder = self._folder
        local = Path(folder) if folder is not None and not is_remote(folder) else Path(tempfile.gettempdir())
        path = session.write_hang(local, quiet_s)
        warnings.warn(
            f"StallDetector: no progress for {quiet_s:.0f} s. The state of every thread and worker is in {path}. "
            "Training keeps waiting.",
            stacklevel=2,
        )

    def _finish(self, trainer: Trainer, *, ended: bool) -> None:
        stop, self._stop = self._stop, None
        try:
            self._freeze(trainer, ended=ended)
            findings = self._report.findings if self._report is not None else []
            if ended and stop is None:
                self._report_findings(trainer, findings)
            elif ended and stop is not None:
                why = stop.end(next(self._unreported(findings), None))
                if why is not None:
                    raise StallError(why)
        finally:
            if stop is not None:
                stop.close()

    def _freeze(self, trainer: Trainer, *, ended: bool) -> None:
        """Build and write the report, and restore the Trainer."""
        session = self._session
        if session is None or not session.started:
            self._leave()
            return
        try:
            with Guard(self, trainer):
                session.stop()
                self._report = self._with_proofs(session.report(measure_images=ended and trainer.is_global_zero))
                self._sampled = session.profiling.sampled
                if self.logs:
                    session.log_rest(trainer)
        finally:
            self._leave()
        if self._report is None:
            return
        if trainer.is_global_zero and self._folder is not None:
            self._write(trainer, self._folder, self._report)

    def _print(self, trainer: Trainer, *, interrupted: bool = False) -> None:
        report = self._report
        if not self.print_report or report is None:
            return
        with Guard(self, trainer):
            text = render_text(report, shutil.get_terminal_size().columns)
            print_once_fit_has_ended(trainer, text, interrupted=interrupted)

    def _with_proofs(self, report: StallReport) -> StallReport:
        if self._baseline is None:
            return report
        return report.with_proofs(compare(self._baseline, report).proofs)

    def _write(self, trainer: Trainer, folder: str, report: StallReport) -> None:
        try:
            write_report(folder, report, self._sampled, page=self.writes_page)
        except Exception as error:
            say_once(trainer, "report-not-written", f"StallDetector could not write to {folder}: {error}")

    def _leave(self) -> None:
        session, self._session = self._session, None
        stop, self._stop = self._stop, None
        if stop is not None:
            stop.close()
        if session is not None:
            session.undo()

    @override
    def _is_user_error(self, error: Exception) -> bool:
        return isinstance(error, StallError)
