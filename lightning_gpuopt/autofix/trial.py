"""A change that is being tried, and what the windows and epochs around it say of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lightning_gpuopt.autofix.policy import MAX_WINDOWS, SetUps, Wanted, gain_of, judge, judge_pauses


@dataclass
class ChangeTrial:
    """A change that is being tried.

    Attributes:
        wanted: the change.
        index: of its entry among the changes.
        waits: whether it waits for the loader's next iterator.
        skip: windows to leave out before it is measured.
        after: mean seconds per step of each window since.
        set_ups_before: set-ups of epochs that there were before it took effect.
        epochs_left: epochs to come when it took effect.
        persisted: whether the workers lived on before it.
        with_persistence: index of the entry of ``persistent_workers``, where that is tried with it; None where it is
            not.
    """

    wanted: Wanted
    index: int
    waits: bool
    set_ups_before: int
    epochs_left: int
    persisted: bool
    skip: int = 1
    after: list[float] = field(default_factory=list)
    with_persistence: int | None = None


@dataclass
class KeptChange:
    """Changes of one setting that were kept before an epoch has begun with them.

    Attributes:
        trials: the changes, in their order.
        before: the setting's value before them.
        saved_s: seconds a step that they save.
    """

    trials: list[ChangeTrial]
    before: Any
    saved_s: float


class Evidence:
    """Seconds a step of the windows before a change, and of the set-ups of epochs.

    Attributes:
        before: mean seconds per step of the last windows, at most eight.
        set_ups: seconds of each epoch's set-up so far.
    """

    def __init__(self) -> None:
        self.before: deque[float] = deque(maxlen=MAX_WINDOWS)
        self.set_ups: list[float] = []
        self._setup_s = 0.0
        self._epochs = 0

    def note_set_ups(self, setup_s: float, epochs: int) -> None:
        """Take in the set-ups of the epochs that have begun since the last window.

        Args:
            setup_s: seconds of all set-ups so far.
            epochs: that have begun so far.
        """
        begun = epochs - self._epochs
        if begun > 0:
            self.set_ups += [max(setup_s - self._setup_s, 0.0) / begun] * begun
        self._setup_s, self._epochs = setup_s, epochs

    def begin_after(self, trial: ChangeTrial) -> None:
        """The windows after a change that was kept are those before the next."""
        self.before = deque(trial.after, MAX_WINDOWS)

    def verdict(self, trial: ChangeTrial, steps: int) -> bool | None:
        """Whether a change has proved a gain; None: more windows may tell.

        Args:
            trial: the change.
            steps: batches of an epoch; 0 where that is not known.
        """
        if trial.wanted.setting == "persistent_workers":
            return judge_pauses(*self._set_ups_around(trial))
        return judge(*self._with_set_ups(trial, steps))

    def measured(self, trial: ChangeTrial, steps: int) -> float | None:
        """Steps per second, after over before; of persistent workers the set-ups', before over after."""
        if trial.wanted.setting == "persistent_workers":
            before, after = self._set_ups_around(trial)
            return fmean(before) / max(fmean(after), 1e-9) if before and after else None
        return gain_of(*self._with_set_ups(trial, steps)) if self.before and trial.after else None

    def set_up_costs(self, trial: ChangeTrial, steps: int) -> tuple[float, float]:
        """Seconds a step that the set-ups of epochs cost before and after a change."""
        persist = trial.with_persistence is not None or trial.persisted
        before_s, after_s = self.set_ups[: trial.set_ups_before], self.set_ups[trial.set_ups_before :]
        return SetUps(steps, before_s, after_s, persist, trial.epochs_left, trial.persisted).per_step_s

    def saved_s(self, trial: ChangeTrial) -> float:
        """Seconds a step that a change saves, the set-ups of epochs left out."""
        return fmean(self.before) - fmean(trial.after)

    def _set_ups_around(self, trial: ChangeTrial) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of the epochs' set-ups before and after a change, without those of the run and of the change."""
        return self.set_ups[1 : trial.set_ups_before - 1], self.set_ups[trial.set_ups_before :]

    def _with_set_ups(self, trial: ChangeTrial, steps: int) -> tuple[list[float], list[float]]:
        """Seconds a step of each window before and after a change, with its epoch's set-up spread over them."""
        if trial.wanted.setting != "num_workers":
            return list(self.before), trial.after
        before_s, after_s = self.set_up_costs(trial, steps)
        return [each + before_s for each in self.before], [each + after_s for each in trial.after]
