"""Turns findings into changes, one at a time, and keeps a change only if the windows after it are faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from lightning_gpuopt.autofix.adjustable_loader import AdjustableLoader
from lightning_gpuopt.autofix.policy import (
    CLEAR_GAIN,
    MAX_WINDOWS,
    MIN_BEFORE,
    NOT_PREDICTED,
    Fix,
    Wanted,
    judge,
    wanted_changes,
)
from lightning_gpuopt.autofix.trial_history import ChangeTrial, RunLength, TrialHistory
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import loader_model, speedup_of_workers
from lightning_gpuopt.diagnosis.record import Change, Finding
from lightning_gpuopt.diagnosis.refuted import COSTS_MORE, INTERRUPTED, TOO_SHORT
from lightning_gpuopt.diagnosis.render.wording import change_line
from lightning_gpuopt.measurements.loader_model import net_saving
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.tuning.managed import DRAWS, DRAWS_BY_SAMPLE
from lightning_gpuopt.tuning.rules import CannotChange
from lightning_gpuopt.tuning.running import LostWorkers
from lightning_gpuopt.utils.callback_base import Guard
from lightning_gpuopt.utils.rank_channel import RankBroadcast

log = logging.getLogger(__name__)

_MIN_SET_UPS: Final = 2  # before workers are made persistent: the run's first set-up contains more than the workers
_DRAWS: Final = {"num_workers": DRAWS, "sample_parallel": DRAWS_BY_SAMPLE}
_LAST_EPOCH: Final = "training ended before it could take effect"
_NO_GAIN: Final = "no gain beyond noise"
_WITH_WORKERS: Final = "applied and measured together with num_workers; not predicted separately"


class AutoFixController:
    """Changes one setting at a time, and compares the windows before and after; rank 0 decides for all."""

    def __init__(
        self,
        loader: AdjustableLoader,
        fixes: Sequence[Fix],
        *,
        run_length: Callable[[], RunLength],
        notify: Callable[[str], None],
        guard: Guard,
        rank: int,
        cpus: float,
    ) -> None:
        self._loader, self._fixes = loader, fixes
        self._run_length, self._notify, self._guard = run_length, notify, guard
        self._rank, self._cpus = rank, cpus
        self.changes: list[Change] = []  # what was tried, oldest first
        self.notes: list[str] = []  # sentences for the report
        self._history = TrialHistory()
        self._trial: ChangeTrial | None = None
        self._failed: set[str] = set()
        self._doubted: set[str] = set()  # taken back, though steps seemed clearly faster: they are tried once more
        self._refused: set[tuple[str, str]] = set()
        self._before_change: dict[str, Any] = {}
        self._unpaid: list[ChangeTrial] = []  # kept before an epoch has begun with them
        self._broadcast = RankBroadcast("autofix", rank, 1)  # to nobody, until training begins

    def start(self, broadcast: RankBroadcast) -> None:
        """Start, with a way to send rank 0's decisions to the other ranks; without one nothing is changed."""
        self._broadcast = broadcast
        if broadcast.problem is not None:
            self._fixes = []

    # -- what rank 0 decides

    def window_closed(
        self, window: Measurement, findings: list[Finding], loader: LoaderFacts, set_ups: tuple[float, int]
    ) -> bool:
        awake = self._loader.now("device_prefetch")
        with self._guard:
            workers = self._loader.now("num_workers")
            problem = self._loader.step_done()
            if self._rank:
                return False
            step_s, (setup_s, epochs) = window.waterfall.step_s, set_ups
            self._history.note_set_ups(setup_s - self._loader.looked_s, epochs)  # checked once
            if step_s is None:
                return False
            if problem is not None:
                self._note_problem(workers, problem)
                return False
            if (trial := self._trial) is not None:
                self._go_on(trial, step_s)
            if trial is None or trial.waits:
                self._history.before.append(step_s)
            if trial is None:
                self._look_at_costs()
            if self._trial is None and len(self._history.before) >= MIN_BEFORE and self._loader.is_settled:
                if window.source.key:  # of several loaders the one that is waited for
                    loader = window.loader
                on_gpu, no_shm = window.waterfall.on_gpu, any("shared_memory" in each.why for each in self.changes)
                for wanted in wanted_changes(findings, loader, on_gpu=on_gpu, no_shm=no_shm):
                    if self._may_try(wanted) and self._try(wanted, loader, window):
                        break
        return bool(self._loader.now("device_prefetch")) and not awake

    def _note_problem(self, workers: int, lost: LostWorkers) -> None:
        """Note that workers changed without a decision here: memory ran out, or a worker failed."""
        of, problem = "sample_parallel" if lost.kind == "samples" else "num_workers", lost.why
        if (trial := self._trial) is not None:
            is_tried = trial.wanted.setting == of
            changed = is_tried and of == "num_workers" and workers != self._before_change[of]
            trial.waits = trial.waits and not changed
            self._take_back(trial, problem if is_tried else INTERRUPTED)
            if is_tried:
                return
        self._history.before.clear()
        now = self._loader.now("num_workers")
        if of == "sample_parallel":
            self._failed.add(of)
            self.changes.append(Change(of, True, False, kept=True, why=problem))
        elif now != workers:
            self.changes.append(Change("num_workers", workers, now, kept=True, why=problem))
        elif self._loader.is_waiting("num_workers"):
            self.notes.append(f"AutoFix restores the loader's own num_workers in the next epoch: {problem}.")
        else:
            self.notes.append(f"AutoFix starts workers only at the beginning of an epoch: {problem}.")

    def _may_try(self, wanted: Wanted) -> bool:
        setting, loader = wanted.setting, wanted.loader
        if setting not in self._fixes or setting in self._failed or (loader, setting) in self._refused:
            return False
        if setting in self._doubted and len(self._history.before) < MAX_WINDOWS:
            return False
        if setting == "sample_parallel" and self._loader.now(setting):
            return False
        if setting == "persistent_workers" and len(self._history.set_ups) < _MIN_SET_UPS:
            return False
        return not loader or self._loader.key in (None, loader)

    def _try(self, wanted: Wanted, loader: LoaderFacts, window: Measurement) -> bool:
        """Begin a change; False if it is only advised."""
        setting = wanted.setting
        aims = bool(wanted.loader) and self._loader.aim(wanted.loader)
        before = self._loader.now(setting)
        if before is None:  # nobody knows which of several loaders it is about
            before = getattr(loader, setting, None)
        not_forked = setting == "num_workers" and bool(before) and self._loader.starts_slowly
        pays = self._as_many_as_pay(wanted, before, window) if not_forked and wanted.value > before else wanted
        wanted = pays or wanted
        if setting == "persistent_workers":
            model = loader_model(window)
            first_batch_s = 0.0 if model is None else model.service_s
            predicted = self._history.speedup_of_persistent_workers(self._run_length(), first_batch_s)
            wanted = replace(wanted, predicted=predicted)
        trial = ChangeTrial(
            wanted,
            {setting: len(self.changes)},
            set_ups_before=len(self._history.set_ups),
            length=self._run_length(),
            persisted=bool(self._loader.now("persistent_workers")),
        )
        self.changes.append(Change(setting, before, wanted.value, wanted.predicted, cause=wanted.cause))
        try:
            if pays is None:
                raise CannotChange(COSTS_MORE)
            trial.waits = not self._loader.change(setting, wanted.value)
        except CannotChange as reason:
            self._refused.add((wanted.loader, setting))
            self._conclude(trial, why=str(reason))
            if aims:
                self._loader.key = None  # nothing could be changed of that one: the next aim decides
            return False
        self._trial, self._before_change[setting] = trial, before
        if aims:
            self._broadcast.send(["aim", wanted.loader, None])
            self.notes.append(f"Of several training loaders, AutoFix changes only {wanted.loader!r}.")
        self._broadcast.send(["change", setting, wanted.value])
        there = wanted.value if trial.waits else self._loader.now(setting)
        if there != wanted.value:  # no room for all the workers
            self.changes[-1] = replace(self.changes[-1], to=there, predicted=speedup_of_workers(window, there))
        if not_forked and trial.waits and not trial.persisted:
            self._persist_as_well(trial)
        when = "with the next epoch" if trial.waits else "now"
        self._notify(
            f"AutoFix: {setting} {before} → {there}, {when}, since {wanted.cause} was found"
            + ", with persistent workers" * (len(trial.entries) > 1)
        )
        return True

    def _as_many_as_pay(self, wanted: Wanted, now: int, window: Measurement) -> Wanted | None:
        """The largest number of workers whose start-up cost is repaid, if that is known; None: not even one more."""
        length, history = self._run_length(), self._history
        if not length.steps or not history.set_ups or wanted.predicted is None:
            return wanted
        saving_s = {
            workers: net_saving(
                workers,
                now,
                step_s=fmean(history.before),
                steps=length.epochs_left * length.steps,
                set_up_s=max(history.set_ups[1:] or history.set_ups),
                cpus=self._cpus,
                speedup=wanted.predicted[1],
            )
            for workers in range(now, wanted.value + 1)
        }
        if self._loader.now("persistent_workers"):  # those that run are not started again
            saving_s[now] = 0.0
        best = max(saving_s, key=lambda workers: saving_s[workers])  # of equals the first: the fewest
        if best in (now, wanted.value):
            return None if best == now else wanted
        return replace(wanted, value=best, predicted=speedup_of_workers(window, best))

    def _persist_as_well(self, trial: ChangeTrial) -> None:
        """Make the workers persistent as well, if that changes nothing else: starting them is slow."""
        if "persistent_workers" not in self._fixes or "persistent_workers" in self._failed:
            return
        try:
            self._loader.change("persistent_workers", True)
        except CannotChange as reason:
            log.debug("workers cannot persist: %s", reason)
            return
        self._before_change["persistent_workers"] = False
        self._broadcast.send(["change", "persistent_workers", True])
        trial.entries["persistent_workers"] = len(self.changes)
        self.changes.append(Change("persistent_workers", False, True, why=_WITH_WORKERS, cause=trial.wanted.cause))

    def _go_on(self, trial: ChangeTrial, step_s: float) -> None:
        """A window has ended while a change is tried."""
        setting, refused = trial.wanted.setting, self._loader.refused
        if setting in refused:
            self._failed.add(setting)
            self._conclude(trial, why=refused.pop(setting))
        elif trial.waits:
            if not self._loader.is_waiting(setting):
                trial.waits, trial.length = False, self._run_length()
                trial.set_ups_before = max(len(self._history.set_ups) - 1, 0)  # that of this epoch is one after it
        elif trial.skip:
            trial.skip -= 1
        else:
            trial.after.append(step_s)
            verdict = self._history.verdict(trial)
            if verdict:
                self._keep(trial)
            elif verdict is False:
                before_s, after_s = self._history.set_up_costs(trial)
                steps_alone = judge(self._history.before, trial.after)
                costs_more = after_s > before_s and steps_alone is not False
                doubted = not costs_more and setting != "persistent_workers"  # earlier set-ups count against it
                doubted = doubted and (self._history.measured(trial) or 0) >= CLEAR_GAIN
                self._take_back(trial, COSTS_MORE if costs_more else _NO_GAIN)
                if doubted and setting not in self._doubted:
                    self._doubted.add(setting)
                    self._failed -= {*trial.entries}

    def _look_at_costs(self) -> None:
        """Undo changes kept in mid-epoch whose set-up in the next epoch costs more than their steps save."""
        kept, history = self._unpaid, self._history
        if not kept or len(history.set_ups) <= kept[-1].set_ups_before:
            return
        self._unpaid = []
        before_s, after_s = history.set_up_costs(kept[-1])
        costs_s, step_s = after_s - before_s, fmean(history.before)
        if costs_s <= sum(each.saved_s for each in kept):
            return
        history.before.clear()
        indices = [each.entries["num_workers"] for each in kept]
        self._restore("num_workers", self.changes[indices[0]].from_)
        for index in indices:
            measured = self.changes[index].measured
            slower = None if measured is None else measured * step_s / (step_s + costs_s)
            self._record(index, slower, None, kept=False, why=COSTS_MORE)

    def _restore(self, setting: str, value: Any) -> None:
        """Give a setting its value back on all ranks, and do not try it again."""
        self._failed.add(setting)
        self._loader.take_back(setting, value)
        self._broadcast.send(["back", setting, value])

    def _keep(self, trial: ChangeTrial) -> None:
        self._conclude(trial, kept=True)
        for setting in trial.entries:
            del self._before_change[setting]
            self._broadcast.send(["keep", setting, None])
        if trial.wanted.setting == "num_workers" and len(self._history.set_ups) <= trial.set_ups_before:
            trial.saved_s = fmean(self._history.before) - fmean(trial.after)
            self._unpaid.append(trial)
        if trial.wanted.setting != "persistent_workers":  # the windows after it are those before the next
            self._history.before.clear()
            self._history.before.extend(trial.after)

    def _take_back(self, trial: ChangeTrial, why: str) -> None:
        self._conclude(trial, why=why)
        for setting in trial.entries:
            self._restore(setting, self._before_change.pop(setting))
        self._history.forget(trial)

    def _conclude(self, trial: ChangeTrial, *, kept: bool = False, why: str = "") -> None:
        """Record how a trial has ended; a change that never took effect is neither kept nor refuted."""
        self._trial = None
        measured = None if trial.waits else self._history.measured(trial)
        interval = None if trial.waits else self._history.interval(trial)
        for index in trial.entries.values():
            self.changes[index] = replace(self.changes[index], windows=len(trial.after))
        for setting, index in trial.entries.items():
            reasons = [why or self.changes[index].why]
            if kept and setting in _DRAWS and self._loader.draws:
                reasons.append(_DRAWS[setting])
            if kept and setting == trial.wanted.setting and self.changes[index].predicted is None:
                reasons.append(f"not predicted: {NOT_PREDICTED[setting]}")
            whole = "; ".join(each for each in reasons if each)
            self._record(index, measured, interval, kept=None if trial.waits else kept, why=whole)
            measured = interval = None  # noted once for all that was changed together

    def _record(
        self, index: int, measured: float | None, interval: tuple[float, float] | None, *, kept: bool | None, why: str
    ) -> None:
        self.changes[index] = replace(self.changes[index], measured=measured, interval=interval, kept=kept, why=why)
        self._notify(f"AutoFix: {change_line(self.changes[index])}")

    def training_ended(self) -> None:
        with self._guard:
            self._end_trial()

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        if trial is None:
            return
        if not trial.waits and self._history.verdict(trial):
            self._keep(trial)
        else:
            refused = self._loader.refused.get(trial.wanted.setting, _LAST_EPOCH)
            self._conclude(trial, why=refused if trial.waits else TOO_SHORT)

    # -- what all ranks do

    def epoch_begins(self) -> None:
        self._loader.epoch_begins()

    def obey(self) -> None:
        """Apply rank 0's decisions since the last step."""
        for what, setting, value in self._broadcast.take():
            try:
                if what == "aim":
                    self._loader.aim(setting)
                elif what == "change":
                    self._before_change.setdefault(setting, self._loader.now(setting))
                    self._loader.change(setting, value)
                else:
                    self._before_change.pop(setting, None)
                    if what == "back":
                        self._loader.take_back(setting, value)
            except CannotChange as reason:
                log.debug("rank %d leaves %s: %s", self._rank, setting, reason)

    def undo(self) -> None:
        """Restore the loader's settings and remove our hooks; may be called more than once."""
        try:
            self._end_trial()
        finally:
            self._loader.undo(self._before_change)
        self._broadcast.close()
