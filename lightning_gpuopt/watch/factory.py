"""The callback that ``lightning-gpuopt watch`` brings into every Trainer of the processes under it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from typing_extensions import override

from lightning_gpuopt.callbacks.auto_fix import WINDOW_SIZE, AutoFix
from lightning_gpuopt.callbacks.gpu_util_monitor import GpuUtilMonitor
from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.compat.dry_run import leave_no_traces, never_start_loggers, trainer_being_made, waits_for_results
from lightning_gpuopt.compat.lightning import (
    STEP_OUTPUT,
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    hide_from_log,
    hold_messages,
)
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.loaders.registry import LoaderRegistry
from lightning_gpuopt.recorder.after_fit import watch_this_process
from lightning_gpuopt.utils.added_callbacks import AddedCallbacks
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard
from lightning_gpuopt.utils.whole_file import write_whole
from lightning_gpuopt.watch.ceiling import CEILING_FILE, Ceiling
from lightning_gpuopt.watch.ceiling_run import CeilingRun, HookClock, as_json
from lightning_gpuopt.watch.code_facts import CODE_FILE, CodeWatch
from lightning_gpuopt.watch.shared_notes import Watch

log = logging.getLogger(__name__)

GPU_FILE: Final = "gpu.json"
ENTRY_POINT: Final = "lightning_gpuopt_watch"

_REFUSED: Final = (
    "expected a strategy under which this process can end inside fit(), but another process waits for its result "
    "(ddp_spawn); use strategy='ddp', or one device"
)


def _nothing() -> None:
    """There is nothing to undo."""


class QuietMonitor(GpuUtilMonitor):
    """Its figures are in :meth:`summary` alone."""

    public_name: ClassVar[str] = "GpuUtilMonitor"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._logs = False


class QuietDetector(StallDetector):
    """What it finds is in ``report.json`` alone: whoever reads that makes the page."""

    public_name: ClassVar[str] = "StallDetector"
    logs = False
    writes_page = False


def watched_callbacks() -> list[Callback]:
    """What a watched process adds to a Trainer's callbacks; KeyError: no watch, OSError: its folder is gone."""
    watch = Watch.of_this_process()
    watch.note("trainer")
    if not watch.ceiling:  # what ends that one is our own
        watch_this_process()
    hide_from_log(ENTRY_POINT)
    if watch.ceiling and (trainer := trainer_being_made()) is not None and not waits_for_results(trainer):
        never_start_loggers(trainer)
    return [WatchedRun(watch)]


class WatchedRun(CallbackBase):
    """Measures each ``fit`` of its Trainer, and leaves the report in a folder of its own.

    Brings GpuUtilMonitor and StallDetector, or AutoFix, where the Trainer has none: for ``fit``. What StallDetector's
    flight recorder notes is noted of ``validate``, ``test`` and ``predict`` as well. Nothing is printed, and nothing
    goes to the user's loggers. It has no ``state_dict``: the list of callbacks that it is added to is the user's own,
    and may serve several Trainers. Under ``--ceiling`` it brings CeilingRun as well.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._parts = AddedCallbacks()
        self._folder: Path | None = None
        self._monitor: GpuUtilMonitor | None = None
        self._detector: StallDetector | None = None
        self._ceiling: CeilingRun | None = None
        self._of_loader: StallReport | None = None
        self._messages: list[str] = []
        self._code: CodeWatch | None = None
        self._unsubscribe: Callable[[], None] = _nothing
        self._steps = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bring what is missing, if a ``fit`` begins."""
        self._leave()
        self._parts.leave()  # of a fit that ended without a hook
        if self._is_second(trainer):
            return
        if stage != "fit":
            with Guard(self, trainer):
                self._record(trainer)
        elif not self._watch.ceiling:
            with Guard(self, trainer):
                self._begin(trainer, pl_module)
        elif waits_for_results(trainer):
            self._refuse(trainer)
        else:  # its failure ends the run: one without checkpoints is not to train on
            self._begin(trainer, pl_module)

    def _record(self, trainer: Trainer) -> None:
        """Record ``validate``, ``test`` and ``predict``, which have no report."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(each, StallDetector) for each in callbacks):
            self._parts.add(trainer, self, [QuietDetector(on_stall="ignore", print_report=False)])

    def _refuse(self, trainer: Trainer) -> NoReturn:
        """End ``fit`` on each rank, before anything is taken out or trained."""
        with suppress(OSError):
            if trainer.is_global_zero:
                folder = self._watch.new_fit()
                self._watch.note("end", folder=str(folder), no_ceiling=_REFUSED)
                folder.rmdir()
        raise MisconfigurationException(f"lightning-gpuopt watch --ceiling: {_REFUSED}.")

    def _is_second(self, trainer: Trainer) -> bool:
        """Whether the list of callbacks has served another Trainer, which has added one of these."""
        watched = [each for each in trainer.callbacks if isinstance(each, WatchedRun)]  # type: ignore[attr-defined]
        return watched[0] is not self

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._watch.ceiling:
            leave_no_traces(trainer, self)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not any(type(each).__module__.startswith("lightning_gpuopt.") for each in callbacks if each is not self):
            self._messages = hold_messages(trainer)
        own = next((each for each in callbacks if isinstance(each, StallDetector)), None)
        with suppress(OSError):  # a folder that is gone or full: this rank measures all the same, as the others do
            if trainer.is_global_zero:
                self._folder = self._watch.new_fit()
                self._watch.note("fit", folder=str(self._folder))
            else:
                self._watch.note("rank", rank=trainer.global_rank)
        # of the other ranks none writes a report
        folder = self._folder or Path(self._watch.folder)
        parts: list[Callback] = []
        monitor = next((each for each in callbacks if isinstance(each, GpuUtilMonitor)), None)
        if monitor is None and trainer.strategy.root_device.type == "cuda":
            monitor = QuietMonitor()
            parts.append(monitor)
        before = None
        if own is None:
            if self._watch.ceiling:
                parts.append(before := HookClock())
            own = QuietDetector(
                window_size=WINDOW_SIZE if self._watch.fix or self._watch.ceiling or self._watch.steps else 50,
                on_stall="ignore",
                report_dir=folder,
                print_report=False,
                profile="off" if self._watch.ceiling else "auto",  # a look would slow down what is measured
            )
            parts.append(own)
        autofix = next((each for each in callbacks if isinstance(each, AutoFix)), None)
        if self._watch.fix and autofix is None:
            autofix = AutoFix(exact=self._watch.exact)
            parts.append(autofix)
        if self._folder is not None and not self._watch.ceiling:
            self._watch_code(trainer, own, autofix)
        self._monitor, self._detector = monitor, own
        if self._watch.ceiling:
            self._ceiling = CeilingRun(
                own, self._loader_measured, self._ceiling_measured, lambda: self._quit(pl_module), before
            )
            parts.append(self._ceiling)
        self._parts.add(trainer, self, parts)

    def _watch_code(self, trainer: Trainer, detector: StallDetector, autofix: AutoFix | None) -> None:
        """Note where the loaders were made, for a patch."""
        with suppress(Exception):  # without it there is no patch, and the measurement goes on
            self._code = CodeWatch(trainer, lambda: autofix.changes if autofix is not None else [])
        if self._code is None:
            return
        self._unsubscribe = LoaderRegistry.of(trainer).subscribe(self._code, trainer)
        detector.add_listener(self._code)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """End a run that is compared with another after as many steps."""
        self._steps += 1
        if self._watch.steps and self._steps >= self._watch.steps:
            trainer.should_stop = True

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the report as far as it is known; Lightning calls no ``teardown`` then."""
        with Guard(self, trainer):
            self._parts.on_exception(pl_module, exception)
            self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with Guard(self, trainer):
            self._parts.teardown(pl_module, stage)
            self._end()

    def _end(self) -> None:
        folder, detector = self._folder, self._detector
        if folder is not None and detector is not None and self._of_loader is None and detector.report.steps:
            self._write_gpu(folder)
            if detector.folder != str(folder):  # the user's own
                detector.report.save_json(folder / "report.json")
        elif folder is not None and self._of_loader is not None:  # the detector's own has other batches in it
            self._of_loader.save_json(folder / "report.json")
        if folder is not None and self._code is not None and detector is not None and detector.report.steps:
            with suppress(Exception):
                self._code.write(folder / CODE_FILE)
        self._note_end()

    def _note_end(self) -> None:
        folder, self._folder = self._folder, None
        if folder is None:
            return
        known = {} if self._ceiling is None else {"no_ceiling": self._ceiling.why_not}
        self._watch.note("end", folder=str(folder), messages=list(self._messages), **known)
        with suppress(OSError):  # it is empty if training never began, as Tuner ends its fit: the next one's, then
            folder.rmdir()

    def _write_gpu(self, folder: Path) -> None:
        if self._monitor is not None and (figures := self._monitor.summary()):
            write_whole(folder / GPU_FILE, json.dumps(figures, indent=2))

    # ---- under --ceiling ----

    def _loader_measured(self) -> None:
        """From now on batches come from memory: the report is of those before."""
        if self._folder is not None and self._detector is not None:
            self._of_loader = self._detector.report
            with suppress(OSError):  # the measurement goes on without it
                self._of_loader.save_json(self._folder / "report.json")
                self._write_gpu(self._folder)

    def _ceiling_measured(self, ceiling: Ceiling) -> None:
        if self._folder is not None:
            write_whole(self._folder / CEILING_FILE, as_json(ceiling))

    def _quit(self, pl_module: LightningModule) -> None:
        if self._of_loader is None:
            with suppress(Exception):  # what has failed may have been this
                self._loader_measured()
        self._parts.teardown(pl_module, "fit")
        self._note_end()

    @override
    def _at_rest(self) -> dict[str, Any]:
        return dict.fromkeys(("_folder", "_monitor", "_detector", "_ceiling", "_of_loader", "_code")) | {
            "_parts": AddedCallbacks(),
            "_messages": [],
            "_unsubscribe": _nothing,
        }

    def _leave(self) -> None:
        """Do nothing more. The added callbacks stay in the Trainer: Lightning may be iterating over its list."""
        code, self._code = self._code, None
        if code is not None and self._detector is not None:
            self._detector.remove_listener(code)
        self._unsubscribe()
        self._unsubscribe, self._steps = _nothing, 0
        self._folder = self._monitor = self._detector = self._ceiling = self._of_loader = None

    @override
    def _is_user_error(self, error: Exception) -> bool:
        return False
