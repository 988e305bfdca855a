"""A change under trial, with the windows and epochs around it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from lightning_gpuopt.autofix.policy import MAX_WINDOWS, Wanted, gain_of, interval_of, judge, judge_pauses
from lightning_gpuopt.compat.lightning import Trainer
from lightning_gpuopt.diagnosis.predict import speedup_of_persistent_workers
from lightning_gpuopt.measurements.loader_costs import Interval

_MANY_EPOCHS: Final = 100  # epochs to come where no end is set
_OF_SET_UPS: Final = {"num_workers", "persistent_workers", "sample_parallel"}  # what an epoch's set-up depends on


@dataclass(frozen=True)
class RunLength:
    """The rest of a run: the steps of an epoch, 0 if not known, and the epochs after this one, at least 1."""

    steps: int
    epochs_left: int


def run_length_of(trainer: Trainer) -> RunLength:
    batches = trainer.num_training_batches
    steps = int(batches) if batches != float("inf") else 0
    left = float(_MANY_EPOCHS)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        left = min(left, trainer.max_epochs - trainer.current_epoch - 1)
    if trainer.max_steps >= 0 and steps:
        left = min(left, (trainer.max_steps - trainer.global_step) / steps)
    return RunLength(steps, max(int(left), 1))


@dataclass
class ChangeTrial:
    """A change that is being tried."""

    wanted: Wanted
    entries: dict[str, int]  # index among the changes, by setting; workers may be made persistent beside the wanted one
    set_ups_before: int  # set-ups of epochs before it took effect, without that of the epoch with which it came
    length: RunLength  # what was left of the run then
    persisted: bool  # the workers lived on before it
    waits: bool = True  # it has not taken effect
    skip: int = 1  # windows to leave out before it is measured
    after: list[float] = field(default_factory=list)  # seconds per step of each window since
    saved_s: float = 0.0  # seconds a step that it saves, without the set-ups of epochs; known once it is kept


class TrialHistory:
    """Seconds per step of the last eight windows before a change, and seconds of each epoch's set-up so far."""

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=MAX_WINDOWS)
        self.set_ups: list[float] = []
        self._setup_s, self._epochs = 0.0, 0

    def note_set_ups(self, setup_s: float, epochs: int) -> None:
        """Take in the set-ups since the last window, by the seconds of all so far and the epochs that have begun."""
        begun, self._epochs = epochs - self._epochs, epochs
        if begun > 0:
            self.set_ups += [max(setup_s - self._setup_s, 0.0) / begun] * begun
        self._setup_s = setup_s

    def forget(self, trial: ChangeTrial) -> None:
        """A change is taken back: what was seen with it says nothing of the loader as it is now."""
        self.before.clear()  # it needs some batches to be as it was, too
        if not _OF_SET_UPS.isdisjoint(trial.entries):
            del self.set_ups[trial.set_ups_before :]

    def verdict(self, trial: ChangeTrial) -> bool | None:
        """Whether a change has a proven gain; None: more windows may decide."""
        return (judge_pauses if trial.wanted.setting == "persistent_workers" else judge)(*self._around(trial))

    def measured(self, trial: ChangeTrial) -> float | None:
        """Steps per second, after over before; for persistent workers, of whole epochs with earlier steps.

        None before both sides have values, or if whole epochs are needed and an epoch's length is unknown.
        """
        before, after = self._around(trial)
        if not before or not after:
            return None
        if trial.wanted.setting != "persistent_workers":
            return gain_of(before, after)
        epoch_s = self._epoch_s(trial.length)
        return (epoch_s + fmean(before)) / (epoch_s + fmean(after)) if epoch_s else None

    def interval(self, trial: ChangeTrial) -> tuple[float, float] | None:
        """The 95 % interval of what was measured; None if there is none."""
        return None if trial.wanted.setting == "persistent_workers" else interval_of(*self._around(trial))

    def speedup_of_persistent_workers(self, length: RunLength, first_batch_s: float) -> Interval | None:
        """The expected gain of persistent workers, from the set-ups after the run's first; None if unknown."""
        epoch_s = self._epoch_s(length)
        return speedup_of_persistent_workers(epoch_s, fmean(self.set_ups[1:]), first_batch_s) if epoch_s else None

    def _epoch_s(self, length: RunLength) -> float:
        """Seconds of an epoch's steps, 0 if not known: by the median, as a look at the dataset prolongs a window."""
        return length.steps * median(self.before)

    def set_up_costs(self, trial: ChangeTrial) -> tuple[float, float]:
        """Seconds a step that the set-ups of epochs cost before and after a change of ``num_workers``.

        Zeros if no epoch has begun since, or none before; if an epoch's length is unknown; for other settings.
        """
        steps, first = trial.length.steps, trial.set_ups_before
        before, after = self.set_ups[:first], self.set_ups[first:]
        if trial.wanted.setting != "num_workers" or not steps or not before or not after:
            return 0.0, 0.0
        before_s = 0.0 if trial.persisted else fmean(before[1:] or before)  # the run's first: other things as well
        persist = trial.persisted or "persistent_workers" in trial.entries  # what starting them takes is spent once
        after_s = sum(after) / (trial.length.epochs_left + 1) if persist else fmean(after)
        return before_s / steps, after_s / steps

    def _around(self, trial: ChangeTrial) -> tuple[list[float], list[float]]:
        """Seconds a step of each window before and after a change, with its epoch's set-up spread over them.

        For persistent workers, seconds of the epochs' set-ups, without the run's first and the one in which they
        started.
        """
        if trial.wanted.setting == "persistent_workers":
            return self.set_ups[1 : trial.set_ups_before], self.set_ups[trial.set_ups_before + 1 :]
        before_s, after_s = self.set_up_costs(trial)
        return [each + before_s for each in self.before], [each + after_s for each in trial.after]
