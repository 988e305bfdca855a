"""``AutoFix``: applies fixes while training runs, and keeps those that help."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lightning_gpuopt.autofix.adjustable_loader import AdjustableLoader
from lightning_gpuopt.autofix.controller import AutoFixController
from lightning_gpuopt.autofix.policy import FIXES, Fix
from lightning_gpuopt.autofix.trial_history import run_length_of
from lightning_gpuopt.callbacks._sleeping_prefetcher import SleepingPrefetcher
from lightning_gpuopt.callbacks.cuda_prefetcher import CudaPrefetcher
from lightning_gpuopt.callbacks.num_workers_finder import NumWorkersFinder
from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.compat.lightning import STEP_OUTPUT, Callback, LightningModule, Trainer, notify, say_once
from lightning_gpuopt.diagnosis.record import Change
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.utils.added_callbacks import AddedCallbacks
from lightning_gpuopt.utils.arguments import flag, real_number, refuse
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard
from lightning_gpuopt.utils.rank_channel import RankBroadcast

# steps in a window of its own StallDetector: several windows decide on a change, and runs are short at times
WINDOW_SIZE = 20


class AutoFix(CallbackBase):
    """Apply the advice of StallDetector while training runs, one setting at a time, and keep changes with proven gain.

    It adds a :class:`~lightning_gpuopt.StallDetector` to the Trainer, or uses the one that is there. More workers are
    added to the running loader at once, and so is ``sample_parallel``: each sample, not each batch, is then a task of
    the workers. ``prefetch_factor``, ``pin_memory``, ``persistent_workers`` and a loader's first workers come with its
    next iterator. ``device_prefetch`` is a :class:`~lightning_gpuopt.CudaPrefetcher` that is inactive until it is
    needed. The windows after a change are compared with those before it (a rank-sum test),
    and a change without a gain is undone.

    Samples, their order and the random state of training stay the same. Random numbers drawn in workers depend on how
    many workers run and for how long, as everywhere in PyTorch. Changes that would affect more are only suggested.
    With several ranks, rank 0 decides, and all apply the change.

    Args:
        threshold: minimum share of wall time, 0-1, for a cause to be fixed.
        fixes: ``"all"``, or a list of ``"num_workers"``, ``"prefetch_factor"``, ``"pin_memory"``,
            ``"persistent_workers"``, ``"device_prefetch"``, ``"sample_parallel"``.
        report_dir: folder of the report; by default ``<trainer.log_dir>/gpuopt``. If the Trainer has a StallDetector
            already, its folder is used.
        exact: change only the workers of loaders known not to draw random numbers: a worker reads a few batches
            first. If its random state changes, or the dataset holds a generator, the workers stay the same.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: two AutoFix in one Trainer.

    Example::

        from lightning.pytorch import Trainer
        from lightning_gpuopt import AutoFix

        autofix = AutoFix()
        trainer = Trainer(callbacks=[autofix])
        trainer.fit(model, train_dataloader)
        print(autofix.changes)
    """

    def __init__(
        self,
        threshold: float = 0.1,
        fixes: Literal["all"] | list[Fix] = "all",
        report_dir: str | Path | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        if report_dir is not None and not isinstance(report_dir, (str, os.PathLike)):
            refuse("report_dir", "a path, or None", report_dir, wrong_type=True)
        self.threshold = real_number("threshold", threshold, "a share of wall time", above=0, at_most=1)
        self.fixes = _checked(fixes)
        self.report_dir = report_dir
        self.exact = flag("exact", exact)
        self._parts = AddedCallbacks()
        self._controller: AutoFixController | None = None
        self._detector: StallDetector | None = None
        self._changes: list[Change] = []

    @property
    def changes(self) -> list[Change]:
        """The changes that were tried, in order: ``setting``, ``from``, ``to``, ``predicted``, ``measured``, ``kept``.

        ``from`` is a Python keyword: use ``change["from"]`` or ``change.from_``.
        """
        return list(self._changes if self._controller is None else self._controller.changes)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add the missing callbacks when a ``fit`` begins."""
        if stage != "fit":
            return
        self._refuse_second(trainer, AutoFix, "AutoFix")
        self._leave()
        self._parts.leave()  # of a fit whose end nobody told of
        self._changes = []
        with Guard(self, trainer):
            self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        parts: list[Callback] = []
        detector = next((each for each in callbacks if isinstance(each, StallDetector)), None)
        if detector is None:
            detector = StallDetector(self.threshold, WINDOW_SIZE, report_dir=self.report_dir)
            parts.append(detector)
        theirs = {
            setting
            for kind, setting in ((NumWorkersFinder, "num_workers"), (CudaPrefetcher, "device_prefetch"))
            if any(isinstance(each, kind) for each in callbacks)
        }
        fixes = [fix for fix in self.fixes if fix not in theirs]
        prefetcher = None
        if "device_prefetch" in fixes and trainer.strategy.root_device.type == "cuda":
            prefetcher = SleepingPrefetcher()
            parts.append(prefetcher)
        else:
            fixes = [fix for fix in fixes if fix != "device_prefetch"]
        self._controller = AutoFixController(
            AdjustableLoader(trainer, prefetcher, exact=self.exact),
            fixes,
            run_length=lambda: run_length_of(trainer),
            notify=lambda message: notify(trainer, message),
            guard=Guard(self, trainer),
            rank=trainer.global_rank,
            cpus=usable_cpus(),
        )
        detector.add_listener(self._controller)
        self._detector = detector
        self._parts.add(trainer, self, parts)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From now on the ranks can communicate."""
        if self._controller is not None:
            with Guard(self, trainer):
                broadcast = RankBroadcast("autofix", trainer.global_rank, trainer.world_size)
                if broadcast.problem is not None:
                    say_once(trainer, "autofix-ranks", f"AutoFix changes nothing: {broadcast.problem}.")
                self._controller.start(broadcast)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the loader is iterated."""
        if self._controller is not None:
            with Guard(self, trainer):
                self._controller.epoch_begins()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """On other ranks: apply rank 0's decision."""
        if self._controller is not None:
            with Guard(self, trainer):
                self._controller.obey()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the Trainer; Lightning calls no ``teardown`` then."""
        self._parts.on_exception(pl_module, exception)
        self._leave()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer; the loader keeps the settings that were kept."""
        self._parts.teardown(pl_module, stage)
        self._leave()

    @override
    def _at_rest(self) -> dict[str, Any]:
        return {"_parts": AddedCallbacks(), "_controller": None, "_detector": None, "_changes": self.changes}

    def _leave(self) -> None:
        controller, self._controller = self._controller, None
        detector, self._detector = self._detector, None
        if controller is not None:
            self._changes = controller.changes
            if detector is not None:
                detector.remove_listener(controller)
            controller.undo()  # its parts stay: they go on by themselves, and Lightning is walking through them


def _checked(fixes: object) -> list[Fix]:
    expected = f'"all", or a list of {", ".join(map(repr, FIXES))}'
    if fixes == "all":
        return list(FIXES)
    if not isinstance(fixes, (list, tuple)):
        refuse("fixes", expected, fixes, wrong_type=not isinstance(fixes, str))
    unknown = [each for each in fixes if each not in FIXES]
    if unknown or not fixes:
        refuse("fixes", expected, fixes)
    return list(dict.fromkeys(fixes))
