"""Turns findings into changes, one at a time, and keeps a change only if the windows after it are faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from lightning_gpuopt.autofix.loader import AdjustableLoader
from lightning_gpuopt.autofix.policy import (
    MIN_BEFORE,
    Fix,
    Wanted,
    first_to_try,
    judge,
    wanted_changes,
    workers_worth_starting,
)
from lightning_gpuopt.autofix.run_length import RunLength
from lightning_gpuopt.autofix.trial import ChangeTrial, Evidence, KeptChange
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Change, Finding
from lightning_gpuopt.diagnosis.refuted import COSTS_MORE, INTERRUPTED, TOO_SHORT
from lightning_gpuopt.diagnosis.render.wording import change_line
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.tuning.managed import DRAWS
from lightning_gpuopt.tuning.rules import CannotChange
from lightning_gpuopt.utils.callback_base import Guard
from lightning_gpuopt.utils.rank_channel import RankBroadcast

log = logging.getLogger(__name__)

_MIN_SET_UPS: Final = 2
"""Epochs that must have begun before workers are made persistent: the first set-up contains more than the workers."""

_LAST_EPOCH: Final = "training ended before it could take effect"
_NO_GAIN: Final = "no gain that could be told from noise"


class AutoFixController:
    """Listens to the detector of one ``fit``, changes one setting at a time, and compares the windows before and after.

    Args:
        loader: the training loader, whose settings can be changed.
        fixes: names of the settings that may be changed.
        run_length: returns what is left of the run.
        notify: reports to the user what is tried, and the result.
        guard: context manager around each call from the detector; catches our own errors.
        rank: this rank; rank 0 decides, the others do the same.
        cpus: usable CPUs.

    Attributes:
        changes: what was tried, oldest first.
        notes: sentences for the report.
    """

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
        self._loader = loader
        self._fixes = fixes
        self._run_length = run_length
        self._notify = notify
        self._guard = guard
        self._rank = rank
        self._cpus = cpus
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self._evidence = Evidence()
        self._trial: ChangeTrial | None = None
        self._failed: set[str] = set()
        self._refused: set[tuple[str, str]] = set()
        self._before_change: dict[str, Any] = {}
        self._unpaid: KeptChange | None = None
        self._broadcast: RankBroadcast | None = None

    def start(self, broadcast: RankBroadcast | None) -> None:
        """Training begins.

        Args:
            broadcast: sends the decisions of rank 0 to the other ranks; None on one rank.
        """
        self._broadcast = broadcast
        if broadcast is not None and broadcast.problem is not None:
            self._fixes = []

    # -- what rank 0 decides

    def window_closed(
        self, window: Measurement, findings: list[Finding], loader: LoaderFacts, set_ups: tuple[float, int]
    ) -> bool:
        """Act on a window; True where the detector has to start its measurements anew."""
        awake = self._loader.now("device_prefetch")
        with self._guard:
            self._act(window, findings, loader, set_ups)
        return bool(self._loader.now("device_prefetch")) and not awake and not self._rank

    def _act(
        self, window: Measurement, findings: list[Finding], loader: LoaderFacts, set_ups: tuple[float, int]
    ) -> None:
        workers = self._loader.now("num_workers")
        problem = self._loader.step_done()
        if self._rank:
            return
        step_s = window.waterfall.step_s
        setup_s, epochs = set_ups
        self._evidence.note_set_ups(setup_s - self._loader.looked_s, epochs)  # checked once
        if step_s is None:
            return
        trial = self._trial
        if problem is not None:
            self._note_problem(trial, workers, problem)
            return
        if trial is None:
            self._evidence.before.append(step_s)
            if self._unpaid is not None:
                self._look_at_its_cost(self._unpaid)
        else:
            self._go_on(trial, step_s)
            if trial.waits:
                self._evidence.before.append(step_s)
        if self._trial is None and len(self._evidence.before) >= MIN_BEFORE and self._loader.is_settled:
            self._look_for_more(window, findings, loader)

    def _note_problem(self, trial: ChangeTrial | None, workers: int, problem: str) -> None:
        """The number of workers changed without a decision here: for lack of memory, or since a worker failed."""
        if trial is not None and trial.wanted.setting == "num_workers":
            self._take_back(trial, problem)
            return
        if trial is not None:
            self._take_back(trial, INTERRUPTED)
        self._evidence.before.clear()
        now = self._loader.now("num_workers")
        if now != workers:
            self.changes.append(Change("num_workers", workers, now, kept=True, why=problem))
        else:
            self.notes.append(f"AutoFix starts workers at the beginning of an epoch only: {problem}.")

    def _look_for_more(self, window: Measurement, findings: list[Finding], loader: LoaderFacts) -> None:
        if window.source is not None and window.source.key:  # of several loaders the one that training waits for
            loader = window.loader
        wanted = wanted_changes(findings, loader, on_gpu=window.waterfall.on_gpu)
        if (key := self._loader.key) is not None:
            wanted = [each for each in wanted if each.loader in ("", key)]
        wanted = [each for each in wanted if (each.loader, each.setting) not in self._refused]
        if len(self._evidence.set_ups) < _MIN_SET_UPS:
            wanted = [each for each in wanted if each.setting != "persistent_workers"]
        while (first := first_to_try(wanted, self._fixes, self._failed)) is not None:
            if self._try(first, loader):
                return
            wanted = [each for each in wanted if (each.loader, each.setting) not in self._refused]

    def _try(self, wanted: Wanted, loader: LoaderFacts) -> bool:
        """Begin a change; False where the setting cannot be changed and the change is only advised."""
        setting, value = wanted.setting, wanted.value
        aims = bool(wanted.loader) and self._loader.aim(wanted.loader)
        before = self._loader.now(setting)
        if before is None:  # nobody knows which of several loaders it is about
            before = getattr(loader, setting, None)
        not_forked = setting == "num_workers" and bool(before) and self._loader.starts_slowly
        worth = self._worth_starting(wanted, before) if not_forked and value > before else value
        if worth is not None and worth != value:
            value, wanted = worth, replace(wanted, value=worth, predicted=None)
        self.changes.append(Change(setting, before, value, wanted.predicted))
        try:
            if worth is None:
                raise CannotChange(COSTS_MORE)
            there = self._loader.change(setting, value)
        except CannotChange as reason:
            self._refused.add((wanted.loader, setting))
            self._conclude(len(self.changes) - 1, why=str(reason))
            if aims:
                self._loader.aim_anew()
            return False
        if aims:
            self._send("aim", wanted.loader, None)
            self.notes.append(f"Of several training loaders AutoFix changes {wanted.loader!r} alone.")
        self._send("change", setting, value)
        if setting == "num_workers" and there and self._loader.now(setting) != value:  # no room for all
            self.changes[-1] = replace(self.changes[-1], to=self._loader.now(setting), predicted=None)
        self._before_change.setdefault(setting, before)
        trial = self._trial = ChangeTrial(
            wanted,
            len(self.changes) - 1,
            waits=not there,
            set_ups_before=len(self._evidence.set_ups),
            epochs_left=self._run_length().epochs_left + 1,
            persisted=bool(self._loader.now("persistent_workers")),
        )
        if not_forked and not there and not trial.persisted:
            self._persist_as_well(trial)
        when = "now" if there else "with the next epoch"
        self._notify(
            f"AutoFix: {setting} {before} → {self.changes[trial.index].to}, {when}, since {wanted.cause} was found"
            + ", with workers that persist" * (trial.with_persistence is not None)
        )
        return True

    def _worth_starting(self, wanted: Wanted, now: int) -> int | None:
        """The largest number of workers whose start-up cost is repaid; the wanted number where that is not known."""
        length, evidence = self._run_length(), self._evidence
        if not length.steps or not evidence.set_ups or wanted.predicted is None or not evidence.before:
            return int(wanted.value)
        return workers_worth_starting(
            wanted.value,
            now,
            step_s=fmean(evidence.before),
            speedup=wanted.predicted[1],
            set_up_s=max(evidence.set_ups[1:] or evidence.set_ups),
            steps=length.steps,
            epochs_left=length.epochs_left,
            cpus=self._cpus,
            persist=bool(self._loader.now("persistent_workers")),
        )

    def _persist_as_well(self, trial: ChangeTrial) -> None:
        """Make the workers persistent as well, where that changes nothing else: starting them is slow."""
        if "persistent_workers" not in self._fixes or "persistent_workers" in self._failed:
            return
        try:
            self._loader.change("persistent_workers", True)
        except CannotChange as reason:
            log.debug("workers cannot persist: %s", reason)
            return
        self._before_change.setdefault("persistent_workers", False)
        self._send("change", "persistent_workers", True)
        trial.with_persistence = len(self.changes)
        self.changes.append(Change("persistent_workers", False, True, why="with num_workers"))

    def _go_on(self, trial: ChangeTrial, step_s: float) -> None:
        """A window has ended while a change is tried."""
        setting, refused = trial.wanted.setting, self._loader.refused
        if setting in refused:
            self._give_up(trial, refused.pop(setting))
            return
        if trial.waits:
            if self._loader.is_waiting(setting):
                return
            trial.waits, trial.set_ups_before = False, len(self._evidence.set_ups)
            trial.epochs_left = self._run_length().epochs_left + 1
            if setting != "persistent_workers" and self._evidence.set_ups:
                trial.set_ups_before -= 1  # the set-up of the epoch in which it took effect counts as one after it
            return
        if trial.skip:
            trial.skip -= 1
            return
        trial.after.append(step_s)
        verdict = self._evidence.verdict(trial, self._run_length().steps)
        if verdict is True:
            self._keep(trial)
        elif verdict is False:
            self._take_back(trial, _NO_GAIN)

    def _look_at_its_cost(self, kept: KeptChange) -> None:
        """Take back a change, kept in mid-epoch, that costs more at the next epoch's set-up than its steps save."""
        trial, evidence = kept.trials[-1], self._evidence
        if len(evidence.set_ups) <= trial.set_ups_before:
            return
        self._unpaid = None
        before_s, after_s = evidence.set_up_costs(trial, self._run_length().steps)
        if after_s - before_s <= kept.saved_s:
            return
        setting = trial.wanted.setting
        self._failed.add(setting)
        step_s = fmean(evidence.before)
        self._loader.take_back(setting, kept.before)
        self._send("change", setting, kept.before)
        evidence.before.clear()
        for each in kept.trials:
            measured = self.changes[each.index].measured
            if measured is not None:
                measured *= step_s / (step_s + after_s - before_s)
            self._conclude(each.index, measured=measured, kept=False, why=COSTS_MORE)

    def _measured(self, trial: ChangeTrial) -> float | None:
        return self._evidence.measured(trial, self._run_length().steps)

    def _keep(self, trial: ChangeTrial) -> None:
        self._trial = None
        setting = trial.wanted.setting
        before = self._before_change.pop(setting, None)
        self._send("keep", setting, None)
        drawn = DRAWS if setting == "num_workers" and self._loader.draws else ""
        self._conclude(trial.index, measured=self._measured(trial), kept=True, why=drawn)
        if trial.with_persistence is not None:
            self._before_change.pop("persistent_workers", None)
            self._send("keep", "persistent_workers", None)
            self._conclude(trial.with_persistence, kept=True, why="with num_workers")
        elif setting == "num_workers" and len(self._evidence.set_ups) <= trial.set_ups_before:
            self._note_unpaid(trial, before)
        if setting != "persistent_workers":
            self._evidence.begin_after(trial)

    def _note_unpaid(self, trial: ChangeTrial, before: Any) -> None:
        """Remember a change that was kept before an epoch has begun with it, and earlier ones of this epoch."""
        saved_s, earlier = self._evidence.saved_s(trial), self._unpaid
        if earlier is None:
            self._unpaid = KeptChange([trial], before, saved_s)
            return
        earlier.trials.append(trial)
        earlier.saved_s += saved_s

    def _take_back(self, trial: ChangeTrial, why: str) -> None:
        setting, evidence = trial.wanted.setting, self._evidence
        before = self._before_change.pop(setting, None)
        if setting == "num_workers" and why == _NO_GAIN:
            before_s, after_s = evidence.set_up_costs(trial, self._run_length().steps)
            if after_s > before_s and judge(evidence.before, trial.after) is not False:
                why = COSTS_MORE
        kept = None if trial.waits else False  # a change that never took effect is not refuted
        self._give_up(trial, why, kept=kept)
        self._loader.take_back(setting, before)
        self._send("back", setting, before)
        self._take_back_persistence(trial, why, kept)
        evidence.before.clear()  # a loader needs some batches to be as it was before the change

    def _take_back_persistence(self, trial: ChangeTrial, why: str, kept: bool | None) -> None:
        """Take back ``persistent_workers`` as well, if it was changed only because of this trial."""
        if trial.with_persistence is None:
            return
        self._failed.add("persistent_workers")
        self._before_change.pop("persistent_workers", None)
        self._loader.take_back("persistent_workers", False)
        self._send("back", "persistent_workers", False)
        self._conclude(trial.with_persistence, kept=kept, why=why)

    def _give_up(self, trial: ChangeTrial, why: str, *, kept: bool | None = None) -> None:
        self._trial = None
        self._failed.add(trial.wanted.setting)
        self._conclude(trial.index, measured=self._measured(trial) if kept is not None else None, kept=kept, why=why)

    def _conclude(self, index: int, *, measured: float | None = None, kept: bool | None = None, why: str = "") -> None:
        change = replace(self.changes[index], measured=measured, kept=kept, why=why)
        self.changes[index] = change
        self._notify(f"AutoFix: {change_line(change)}")

    def training_ended(self) -> None:
        """Training has ended: conclude the trial under way for the report."""
        with self._guard:
            self._end_trial()

    def _end_trial(self) -> None:
        """Judge the trial under way by the windows that there are."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        refused = self._loader.refused
        waits = trial.waits or trial.wanted.setting in refused
        if not waits and self._evidence.verdict(trial, self._run_length().steps) is True:
            self._keep(trial)
            return
        why = refused.get(trial.wanted.setting, _LAST_EPOCH) if waits else TOO_SHORT
        if waits:
            self._conclude(trial.index, why=why)
        else:
            self._conclude(trial.index, measured=self._measured(trial), kept=False, why=why)
        if trial.with_persistence is not None:
            self._conclude(trial.with_persistence, kept=None if waits else False, why=why)

    # -- what all ranks do

    def epoch_begins(self) -> None:
        """The loader is about to be iterated."""
        self._loader.epoch_begins()

    def obey(self) -> None:
        """Apply what rank 0 has decided since the last step."""
        if self._broadcast is None:
            return
        for what, setting, value in self._broadcast.take():
            try:
                if what == "aim":
                    self._loader.aim(setting)
                    continue
                if what == "change":
                    self._before_change.setdefault(setting, self._loader.now(setting))
                    self._loader.change(setting, value)
                    continue
                self._before_change.pop(setting, None)
                if what == "back":
                    self._loader.take_back(setting, value)
            except CannotChange as reason:
                log.debug("rank %d leaves %s: %s", self._rank, setting, reason)

    def _send(self, what: str, setting: str, value: Any) -> None:
        if self._broadcast is not None:
            self._broadcast.send([what, setting, value])

    def undo(self) -> None:
        """Restore the loader's settings and remove our hooks; may be called more than once."""
        try:
            self._end_trial()
        finally:
            self._loader.undo(self._before_change)
        if self._broadcast is not None:
            self._broadcast.close()
