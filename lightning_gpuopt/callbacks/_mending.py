"""One ``fit`` under repair: findings become changes, one at a time, and what follows decides whether they stay."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from lightning_gpuopt._lightning import Trainer, say_once, tell
from lightning_gpuopt._ranks import RankNews
from lightning_gpuopt.callbacks._fixed_loader import CannotChange, FixedLoader
from lightning_gpuopt.callbacks._guard import Guard
from lightning_gpuopt.callbacks._observed_fit import ObservedFit
from lightning_gpuopt.callbacks._tuned_loader import DRAWS
from lightning_gpuopt.callbacks.cuda_prefetcher import CudaPrefetcher
from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.diagnosis.fixes import (
    COSTS_MORE,
    LEAST_BEFORE,
    MOST_WINDOWS,
    TOO_SHORT,
    Fix,
    SetUps,
    Wanted,
    first_to_try,
    gain_of,
    judge,
    judge_pauses,
    wanted_changes,
    workers_worth_starting,
)
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Change, Finding
from lightning_gpuopt.diagnosis.render.wording import change_line
from lightning_gpuopt.telemetry.host import usable_cpus

log = logging.getLogger(__name__)

_LEAST_SET_UPS = 2
"""Epochs that must have begun before their workers are kept: the first begins with other things as well."""

_LAST_EPOCH = "training ended before it could take effect"
_NO_GAIN = "no gain that could be told from noise"
_MANY_EPOCHS = 100
"""Epochs to come where no end is set."""


class _Trial:
    """A change that is being tried.

    Attributes:
        wanted: the change.
        index: of its entry among the changes.
        waits: whether it waits for the loader's next iterator.
        skip: windows to leave out before it is measured.
        after: mean seconds per step of each window since.
        pauses: set-ups of epochs that there were before it took effect.
        epochs_left: epochs to come when it took effect.
        persisted: whether the workers lived on before it.
        with_persistence: of the entry of ``persistent_workers``, where that is tried with it; None where it is not.
    """

    def __init__(self, wanted: Wanted, index: int, *, waits: bool) -> None:
        self.wanted, self.index, self.waits = wanted, index, waits
        self.skip = 1
        self.after: list[float] = []
        self.pauses = 0
        self.epochs_left = 1
        self.persisted = False
        self.with_persistence: int | None = None


@dataclass
class _Kept:
    """A change that was kept before an epoch has begun with it.

    Attributes:
        trial: the change.
        before: its setting's value before it.
        saved_s: seconds a step that it saves.
    """

    trial: _Trial
    before: Any
    saved_s: float


class Mending:
    """One ``fit`` under repair: listens to the detector, changes one thing at a time, and compares.

    Args:
        trainer: the Trainer, in ``setup``.
        fixes: what may be changed.
        detector: whose findings count.
        prefetcher: sleeps until it is needed; None: not to be used.
        guard: around what is done when the detector calls.

    Attributes:
        loader: the training loader.
        changes: what was tried, in its order.
    """

    def __init__(
        self,
        trainer: Trainer,
        fixes: Sequence[Fix],
        detector: StallDetector,
        prefetcher: SleepingPrefetcher | None,
        guard: Guard,
    ) -> None:
        self._trainer = trainer
        self._fixes = fixes
        self._detector = detector
        self._prefetcher = prefetcher
        self._guard = guard
        self.loader = FixedLoader(trainer)
        self.changes: list[Change] = []
        self._before: deque[float] = deque(maxlen=MOST_WINDOWS)
        self._trial: _Trial | None = None
        self._failed: set[str] = set()
        self._back: dict[str, Any] = {}
        self._pauses: list[float] = []
        self._unpaid: _Kept | None = None
        self._setup_s = 0.0
        self._epochs = 0
        self._news: RankNews | None = None
        detector.add_listener(self)

    def start(self) -> None:
        """Training begins."""
        trainer = self._trainer
        if trainer.world_size > 1:
            self._news = RankNews("autofix", trainer.global_rank, trainer.world_size)
            if self._news.problem is not None:
                say_once(trainer, "autofix-ranks", f"AutoFix changes nothing: {self._news.problem}.")
                self._fixes = []

    # -- what rank 0 decides

    def window_closed(self, run: ObservedFit, window: Measurement, findings: list[Finding]) -> None:
        """Act on what was measured."""
        run.changes = self.changes
        with self._guard:
            self._act(run, window, findings)

    def _act(self, run: ObservedFit, window: Measurement, findings: list[Finding]) -> None:
        workers = self._now("num_workers")
        problem = self.loader.step_done()
        if self._trainer.global_rank:
            return
        step_s = window.waterfall.step_s
        self._note_pauses(*self._detector.set_ups(run))
        if step_s is None:
            return
        trial = self._trial
        if problem is not None:
            self._note_problem(run, trial, workers, problem)
            return
        if trial is not None:
            self._go_on(trial, step_s)
        elif self._unpaid is not None:
            self._look_at_its_cost(self._unpaid)
        if self._trial is None or self._trial.waits:
            self._before.append(step_s)
        if self._trial is None and len(self._before) >= LEAST_BEFORE and self.loader.is_settled:
            self._look_for_more(run, window, findings)

    def _note_problem(self, run: ObservedFit, trial: _Trial | None, workers: int, problem: str) -> None:
        """Something has become of the workers that nobody decided on here."""
        if trial is not None and trial.wanted.setting == "num_workers":
            self._take_back(trial, problem)
            return
        if trial is not None:
            self._take_back(trial, "the number of workers has changed meanwhile")
        self._before.clear()
        now = self._now("num_workers")
        if now != workers:
            self.changes.append(Change("num_workers", workers, now, kept=True, why=problem))
        else:
            run.notes.append(f"AutoFix starts workers at the beginning of an epoch only: {problem}.")

    def _note_pauses(self, setup_s: float, epochs: int) -> None:
        """Take the set-ups of the epochs that have begun since the last window apart."""
        setup_s -= self.loader.looked_s  # spent once
        begun = epochs - self._epochs
        if begun > 0:
            self._pauses += [max(setup_s - self._setup_s, 0.0) / begun] * begun
        self._setup_s, self._epochs = setup_s, epochs

    def _look_for_more(self, run: ObservedFit, window: Measurement, findings: list[Finding]) -> None:
        facts = replace(run.loader.facts)
        wanted = wanted_changes(findings, facts, on_gpu=window.waterfall.on_gpu)
        if len(self._pauses) < _LEAST_SET_UPS:
            wanted = [each for each in wanted if each.setting != "persistent_workers"]
        while (choice := first_to_try(wanted, self._fixes, self._failed)) is not None:
            if self._try(run, choice):
                return

    def _try(self, run: ObservedFit, wanted: Wanted) -> bool:
        """Begin a change; False where it can only be advised."""
        setting, value = wanted.setting, wanted.value
        before = self._now(setting)
        if before is None:  # of several loaders, what the finding is about
            before = getattr(run.loader.facts, setting, None)
        not_forked = setting == "num_workers" and bool(before) and self.loader.starts_slowly
        worth = self._worth_starting(wanted, before) if not_forked and value > before else value
        if worth is not None and worth != value:
            value, wanted = worth, replace(wanted, value=worth, predicted=None)
        self.changes.append(Change(setting, before, value, wanted.predicted))
        try:
            if worth is None:
                raise CannotChange(COSTS_MORE)
            there = self._apply(setting, value)
        except CannotChange as reason:
            self._failed.add(setting)
            self._conclude(len(self.changes) - 1, why=str(reason))
            return False
        self._send("change", setting, value)
        if setting == "num_workers" and there and self._now(setting) != value:  # no room for more
            self.changes[-1] = replace(self.changes[-1], to=self._now(setting), predicted=None)
        self._back.setdefault(setting, before)
        self._trial = _Trial(wanted, len(self.changes) - 1, waits=not there)
        self._trial.pauses, self._trial.epochs_left = len(self._pauses), self._epochs_left + 1
        self._trial.persisted = bool(self._now("persistent_workers"))
        if not_forked and not there and not self._trial.persisted:
            self._persist_as_well(self._trial)
        if setting == "device_prefetch":
            run.begin_anew()
        when = "now" if there else "with the next epoch"
        tell(
            self._trainer,
            f"AutoFix: {setting} {before} → {self.changes[self._trial.index].to}, {when}, since {wanted.cause} was "
            "found" + ", with workers that persist" * (self._trial.with_persistence is not None),
        )
        return True

    def _worth_starting(self, wanted: Wanted, now: int) -> int | None:
        """How many workers pay for what starting them takes; as many as are wanted where that is not known."""
        steps = self._steps_of_an_epoch
        if not steps or not self._pauses or wanted.predicted is None or not self._before:
            return int(wanted.value)
        return workers_worth_starting(
            wanted.value,
            now,
            step_s=fmean(self._before),
            speedup=wanted.predicted[1],
            set_up_s=max(self._pauses[1:] or self._pauses),
            steps=steps,
            epochs_left=self._epochs_left,
            cpus=usable_cpus(),
            persist=bool(self._now("persistent_workers")),
        )

    def _persist_as_well(self, trial: _Trial) -> None:
        """Have the workers live on once they are started, where that changes nothing else."""
        if "persistent_workers" not in self._fixes or "persistent_workers" in self._failed:
            return
        try:
            self._apply("persistent_workers", True)
        except CannotChange as reason:
            log.debug("workers cannot persist: %s", reason)
            return
        self._back.setdefault("persistent_workers", False)
        self._send("change", "persistent_workers", True)
        trial.with_persistence = len(self.changes)
        self.changes.append(Change("persistent_workers", False, True, why="with num_workers"))

    @property
    def _steps_of_an_epoch(self) -> int:
        """Batches of an epoch; 0 where that is not known."""
        batches = self._trainer.num_training_batches
        return int(batches) if batches != float("inf") else 0

    @property
    def _epochs_left(self) -> int:
        """Epochs to come after the one that runs."""
        trainer, steps = self._trainer, self._steps_of_an_epoch
        left = float(_MANY_EPOCHS)
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            left = min(left, trainer.max_epochs - trainer.current_epoch - 1)
        if trainer.max_steps >= 0 and steps:
            left = min(left, (trainer.max_steps - trainer.global_step) / steps)
        return max(int(left), 1)

    def _go_on(self, trial: _Trial, step_s: float) -> None:
        """A window has ended while a change is tried."""
        setting = trial.wanted.setting
        if setting in self.loader.refused:
            self._give_up(trial, self.loader.refused.pop(setting))
            return
        if trial.waits:
            if self.loader.is_waiting(setting):
                return
            trial.waits, trial.pauses = False, len(self._pauses)
            trial.epochs_left = self._epochs_left + 1
            if trial.wanted.setting != "persistent_workers" and self._pauses:
                trial.pauses -= 1  # of the epoch that it began with
            return
        if trial.skip:
            trial.skip -= 1
            return
        trial.after.append(step_s)
        verdict = self._verdict(trial)
        if verdict is True:
            self._keep(trial)
        elif verdict is False:
            self._take_back(trial, _NO_GAIN)

    def _verdict(self, trial: _Trial) -> bool | None:
        if trial.wanted.setting == "persistent_workers":
            return judge_pauses(*self._set_ups(trial))
        return judge(*self._with_set_ups(trial))

    def _with_set_ups(self, trial: _Trial) -> tuple[list[float], list[float]]:
        """Seconds a step of each window before and after a change, with its epoch's set-up spread over them."""
        if trial.wanted.setting != "num_workers":
            return list(self._before), trial.after
        before_s, after_s = self._costs(trial).per_step_s
        return [each + before_s for each in self._before], [each + after_s for each in trial.after]

    def _costs(self, trial: _Trial) -> SetUps:
        persist = trial.with_persistence is not None or trial.persisted
        before_s, after_s = self._pauses[: trial.pauses], self._pauses[trial.pauses :]
        return SetUps(self._steps_of_an_epoch, before_s, after_s, persist, trial.epochs_left, trial.persisted)

    def _look_at_its_cost(self, kept: _Kept) -> None:
        """A change was kept in mid-epoch: once an epoch has begun with it, see what that has cost."""
        trial = kept.trial
        if len(self._pauses) <= trial.pauses:
            return
        self._unpaid = None
        before_s, after_s = self._costs(trial).per_step_s
        if after_s - before_s <= kept.saved_s:
            return
        setting, change = trial.wanted.setting, self.changes[trial.index]
        self._failed.add(setting)
        measured = None
        if change.measured is not None and self._before:
            step_s = fmean(self._before)
            measured = change.measured * (step_s / (step_s + after_s - before_s))
        self._restore(setting, kept.before)
        self._send("change", setting, kept.before)
        self._before.clear()
        self._conclude(trial.index, measured=measured, kept=False, why=COSTS_MORE)

    def _set_ups(self, trial: _Trial) -> tuple[list[float], list[float]]:
        """Seconds of the epochs' set-ups before and after a change, without those of the run and of the change."""
        return self._pauses[1 : trial.pauses - 1], self._pauses[trial.pauses :]

    def _measured(self, trial: _Trial) -> float | None:
        if trial.wanted.setting == "persistent_workers":
            before, after = self._set_ups(trial)
            return (sum(before) / len(before)) / max(sum(after) / len(after), 1e-9) if before and after else None
        return gain_of(*self._with_set_ups(trial)) if self._before and trial.after else None

    def _keep(self, trial: _Trial) -> None:
        self._trial = None
        setting = trial.wanted.setting
        before = self._back.pop(setting, None)
        self._send("keep", setting, None)
        drawn = DRAWS if setting == "num_workers" and self.loader.draws else ""
        self._conclude(trial.index, measured=self._measured(trial), kept=True, why=drawn)
        if trial.with_persistence is not None:
            self._back.pop("persistent_workers", None)
            self._send("keep", "persistent_workers", None)
            self._conclude(trial.with_persistence, kept=True, why="with num_workers")
        elif setting == "num_workers" and len(self._pauses) <= trial.pauses:
            self._unpaid = _Kept(trial, before, fmean(self._before) - fmean(trial.after))
        if setting != "persistent_workers":
            self._before = deque(trial.after, MOST_WINDOWS)

    def _take_back(self, trial: _Trial, why: str) -> None:
        setting = trial.wanted.setting
        before = self._back.pop(setting, None)
        if (
            setting == "num_workers"
            and why == _NO_GAIN
            and self._costs(trial).per_step_s[1] > self._costs(trial).per_step_s[0]
        ):
            why = COSTS_MORE if judge(self._before, trial.after) is not False else why
        self._give_up(trial, why, kept=False)
        self._restore(setting, before)
        self._send("back", setting, before)
        self._take_back_persistence(trial, why)
        self._before.clear()  # a loader that was changed and changed back is not at once as it was

    def _take_back_persistence(self, trial: _Trial, why: str) -> None:
        """Where workers were to persist only since others were started."""
        if trial.with_persistence is None:
            return
        self._failed.add("persistent_workers")
        self._back.pop("persistent_workers", None)
        self._restore("persistent_workers", False)
        self._send("back", "persistent_workers", False)
        self._conclude(trial.with_persistence, kept=False, why=why)

    def _give_up(self, trial: _Trial, why: str, *, kept: bool | None = None) -> None:
        self._trial = None
        self._failed.add(trial.wanted.setting)
        self._conclude(trial.index, measured=self._measured(trial) if kept is not None else None, kept=kept, why=why)

    def _conclude(self, index: int, *, measured: float | None = None, kept: bool | None = None, why: str = "") -> None:
        change = replace(self.changes[index], measured=measured, kept=kept, why=why)
        self.changes[index] = change
        tell(self._trainer, f"AutoFix: {change_line(change)}")

    def run_ends(self, run: ObservedFit) -> None:
        """Training has ended: the report is to have all."""
        run.changes = self.changes
        with self._guard:
            self._end_trial()

    def _end_trial(self) -> None:
        """What is being tried is judged by what there is."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        setting = trial.wanted.setting
        if not (trial.waits or setting in self.loader.refused) and self._verdict(trial) is True:
            self._keep(trial)
            return
        waits = trial.waits or setting in self.loader.refused
        why = self.loader.refused.get(setting, _LAST_EPOCH) if waits else TOO_SHORT
        if waits:
            self._conclude(trial.index, why=why)
        else:
            self._conclude(trial.index, measured=self._measured(trial), kept=False, why=why)
        if trial.with_persistence is not None:
            self._conclude(trial.with_persistence, kept=None if waits else False, why=why)

    # -- what all ranks do

    def obey(self) -> None:
        """Do what rank 0 has decided since the last step."""
        if self._news is None:
            return
        for what, setting, value in self._news.take():
            try:
                if what == "change":
                    self._back.setdefault(setting, self._now(setting))
                    self._apply(setting, value)
                    continue
                self._back.pop(setting, None)
                if what == "back":
                    self._restore(setting, value)
            except CannotChange as reason:
                log.debug("rank %d leaves %s: %s", self._trainer.global_rank, setting, reason)

    def _send(self, what: str, setting: str, value: Any) -> None:
        if self._news is not None:
            self._news.send([what, setting, value])

    def _now(self, setting: str) -> Any:
        if setting == "device_prefetch":
            return self._prefetcher is not None and self._prefetcher.is_awake
        return self.loader.now(setting)

    def _apply(self, setting: str, value: Any) -> bool:
        if setting != "device_prefetch":
            return self.loader.change(setting, value)
        if self._prefetcher is None:
            raise CannotChange("there is no CudaPrefetcher to wake")
        self._prefetcher.wake()
        return True

    def _restore(self, setting: str, value: Any) -> None:
        if setting != "device_prefetch":
            self.loader.take_back(setting, value)
        elif self._prefetcher is not None:
            self._prefetcher.sleep()

    def undo(self) -> None:
        """Take away all that was placed; may be called more than once."""
        self._detector.remove_listener(self)
        try:
            self._end_trial()
        finally:
            self.loader.undo(self._back)
        if self._news is not None:
            self._news.close()


class SleepingPrefetcher(CudaPrefetcher):
    """A CudaPrefetcher that leaves the batches as they come until it is woken."""

    _begins_asleep = True

    def __init__(self) -> None:
        super().__init__()
        self.is_awake = False

    def wake(self) -> None:
        """Copy batches ahead from now on.

        Raises:
            CannotChange: it cannot look ahead in this run.
        """
        if self._run is None:
            raise CannotChange("CudaPrefetcher cannot be used in this run")
        if (reason := self._run.why_not) is not None:
            raise CannotChange(reason)
        self._run.wake()
        self.is_awake = True

    def sleep(self) -> None:
        """Leave the batches as they come again."""
        self.is_awake = False
        if self._run is not None:
            self._run.sleep()
