"""The callback that ``lightning-gpuopt watch`` brings into every Trainer of the processes under it."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from lightning_gpuopt.callbacks.auto_fix import WINDOW_SIZE, AutoFix
from lightning_gpuopt.callbacks.gpu_util_monitor import GpuUtilMonitor
from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.compat.lightning import Callback, LightningModule, Trainer, hide_from_log, hold_messages
from lightning_gpuopt.diagnosis.report import write_whole
from lightning_gpuopt.utils.added_callbacks import AddedCallbacks
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard
from lightning_gpuopt.watch.mailbox import Watch
from lightning_gpuopt.watch.quiet_callbacks import QuietDetector, QuietMonitor

log = logging.getLogger(__name__)

GPU_FILE: Final = "gpu.json"
ENTRY_POINT: Final = "lightning_gpuopt_watch"


def watched_callbacks() -> list[Callback]:
    """What a watched process adds to a Trainer's callbacks; called in the Trainer's constructor.

    Raises:
        KeyError: this process is under no watch.
        OSError: the folder of the watched run is gone.
    """
    watch = Watch.of_this_process()
    watch.note("trainer")
    hide_from_log(ENTRY_POINT)
    return [WatchedRun(watch)]


class WatchedRun(CallbackBase):
    """Measures each ``fit`` of its Trainer, and leaves the report in a folder of its own.

    Brings GpuUtilMonitor and StallDetector, or AutoFix, where the Trainer has none: for ``fit`` only. Nothing is
    printed, and nothing goes to the user's loggers. It has no ``state_dict``: the list of callbacks that it is added to
    is the user's own, and may serve several Trainers.

    Args:
        watch: the watch that this process is under.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._parts = AddedCallbacks()
        self._folder: Path | None = None
        self._monitor: GpuUtilMonitor | None = None
        self._detector: StallDetector | None = None
        self._messages: list[str] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Bring what is missing, where a ``fit`` begins."""
        self._leave()
        self._parts.leave()  # of a fit that ended without a hook
        if stage != "fit" or self._is_second(trainer):
            return
        with Guard(self, trainer):
            self._begin(trainer)

    def _is_second(self, trainer: Trainer) -> bool:
        """Whether the list of callbacks has served another Trainer, which has added one of these."""
        watched = [each for each in trainer.callbacks if isinstance(each, WatchedRun)]  # type: ignore[attr-defined]
        return watched[0] is not self

    def _begin(self, trainer: Trainer) -> None:
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
        if own is None:
            steps = WINDOW_SIZE if self._watch.fix else 50
            own = QuietDetector(window_size=steps, on_stall="ignore", report_dir=folder, print_report=False)
            parts.append(own)
        if self._watch.fix and not any(isinstance(each, AutoFix) for each in callbacks):
            parts.append(AutoFix(exact=self._watch.exact))
        self._monitor, self._detector = monitor, own
        self._parts.add(trainer, self, parts)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave what there is of a report; Lightning calls no ``teardown`` then."""
        with Guard(self, trainer):
            self._parts.on_exception(pl_module, exception)
            self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the report, and the Trainer as it was."""
        with Guard(self, trainer):
            self._parts.teardown(pl_module, stage)
            self._end()

    def _end(self) -> None:
        folder, self._folder = self._folder, None
        detector = self._detector
        if folder is None:
            return
        if detector is not None and detector.report.steps:
            if self._monitor is not None and (figures := self._monitor.summary()):
                write_whole(folder / GPU_FILE, json.dumps(figures, indent=2))
            if detector.folder != str(folder):  # the user's own
                detector.report.save_json(folder / "report.json")
        self._watch.note("end", folder=str(folder), messages=list(self._messages))
        with suppress(OSError):  # it is empty where training never began, as Tuner ends its fit: the next one's, then
            folder.rmdir()

    @override
    def _at_rest(self) -> dict[str, Any]:
        return dict.fromkeys(("_folder", "_monitor", "_detector")) | {"_parts": AddedCallbacks(), "_messages": []}

    def _leave(self) -> None:
        """Do nothing more. The added callbacks stay in the Trainer: Lightning may be iterating over its list."""
        self._folder = self._monitor = self._detector = None

    @override
    def _is_user_error(self, error: Exception) -> bool:
        return False
