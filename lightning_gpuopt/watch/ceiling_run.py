"""The callback of ``watch --ceiling``: measures the loader, then batches from memory, and ends the process."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from typing_extensions import override

from lightning_gpuopt.callbacks.stall_detector import StallDetector
from lightning_gpuopt.compat.dry_run import close_progress_bar
from lightning_gpuopt.compat.lightning import STEP_OUTPUT, Callback, LightningModule, Trainer, train_loaders
from lightning_gpuopt.compat.lightning_loops import (
    batches_left,
    more_than_a_step_follows,
    own_transfer,
    replay,
    reset_loaders,
    take_through,
    why_batches_move_otherwise,
)
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard
from lightning_gpuopt.utils.rank_vote import PATIENCE_S, all_said, leave_together
from lightning_gpuopt.watch.ceiling import Ceiling, Meter, Plan, Prediction, plan_of
from lightning_gpuopt.watch.replay import Kept, Recorder, Replay

_JOIN_S = 5.0  # so long a child process may take to end
_ALONE_S = 2.0  # so long ranks wait for each other before they end, if one of them was silent before


class HookClock(Callback):
    """Notes, as ``began_s``, when the ``on_train_batch_end`` of the callback behind it begins."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.began_s = 0.0
        self._clock = clock

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self.began_s = self._clock()


class CeilingRun(CallbackBase):
    """Measures the upper bound of a faster loader's gain in one ``fit``, from which it does not return.

    ``before`` stands before the detector, and this callback behind it; None if the detector is the user's own.
    ``switched`` is called when the steps with the loader are over, ``measured`` on rank 0 of several, and ``leave``
    before the process ends.
    """

    _after_failure = "the run ends"

    def __init__(
        self,
        detector: StallDetector,
        switched: Callable[[], None],
        measured: Callable[[Ceiling], None],
        leave: Callable[[], None],
        before: HookClock | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__()
        self._detector = detector
        self._switched = switched
        self._measured = measured
        self._leave_nothing = leave
        self._before = before
        self._clock = clock
        self._own_s = 0.0
        self._loader, self._free = Meter(), Meter()
        self._kept = Kept()
        self._prediction = Prediction()
        self._replay: Replay | None = None
        self._plan: Plan | None = None
        self._steps = 0
        self._is_off = self._is_done = self._gave_up = False
        self._patience_s = PATIENCE_S
        self._failure = ""
        self.why_not = "no training step ran"  # why nothing was measured, so far

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with Guard(self, trainer):
            if trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._stand_aside("the run is too short, with fast_dev_run")
            else:
                self._detector.add_listener(self._prediction)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The set-up of an epoch is no part of a step."""
        self._leave_out(trainer)
        if self._replay is not None:  # Lightning itself ends none then
            self._give_up(
                f"expected one endless epoch of batches from memory, but the script ended it at step {self._steps}; "
                "for this run remove whatever ends epochs early"
            )
            self._quit(trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_out(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Count the step; after the last one, or where nothing can be measured, the process ends."""
        if self._is_off:
            return
        self._steps += 1
        with Guard(self, trainer):
            if not self._failure:
                self._measure(trainer, batch_idx)
        is_well = False
        with Guard(self, trainer):
            self._meet(trainer, pl_module)
            is_well = True
        if self._is_done or self._gave_up or not is_well:
            self._quit(trainer, pl_module)

    @override
    def _leave(self) -> None:
        error = sys.exc_info()[1]
        self.why_not = self._failure = (
            f"expected to measure each step, but that failed: {type(error).__name__}: {error}; run watch without "
            "--ceiling, which depends less on Lightning"
        )

    @override
    def _at_rest(self) -> dict[str, Any]:
        return {"_kept": Kept(), "_replay": None}

    def _stand_aside(self, why: str) -> None:
        """The run is so short that it goes on to its own end."""
        self.why_not, self._is_off = why, True
        self._detector.remove_listener(self._prediction)

    def _give_up(self, why: str) -> None:
        """The process ends: without loggers and checkpoints, nobody is to train on."""
        self.why_not, self._gave_up = why, True

    def _measure(self, trainer: Trainer, batch_idx: int) -> None:
        if self._before is not None:
            self._own_s += self._clock() - self._before.began_s
        if not self._kept.is_full and self._replay is None:
            take_through(trainer, Recorder, lambda iterator: Recorder(iterator, self._kept))
        plan, step = self._plan, self._steps
        if plan is None:
            return
        self.why_not = f"the run ended after {step} steps, but the measurement needs {plan.steps}"
        if plan.warm_up <= step <= plan.switch_at:
            exactly = step in (plan.warm_up, plan.switch_at) or not self._loader.counts
            exactly = exactly or more_than_a_step_follows(trainer, batch_idx)
            self._loader.step_ends(self._now(trainer, exactly=exactly))
        elif step >= plan.free_from:
            self._free.step_ends(self._now(trainer, exactly=step in (plan.free_from, plan.steps)))

    def _meet(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide with all ranks: at the first step, before batches come from memory, and at the end.

        A rank whose measurement has failed goes on until then: one that ends alone leaves the others in a collective.
        """
        plan, step = self._plan, self._steps
        if self._failure and trainer.world_size == 1:
            self._give_up(self._failure)
        elif plan is None:
            self._make_plan(trainer)
        elif step == plan.switch_at:
            self._switch(trainer, pl_module)
        elif step == plan.steps:
            self._conclude(trainer)

    def _make_plan(self, trainer: Trainer) -> None:
        """One plan for all ranks, by the shortest run among theirs."""
        self._now(trainer, exactly=True)  # all ranks are done with the step: none waits long for another
        left = batches_left(trainer)
        mine = (None if left is None else left + 1, _queued(trainer), trainer.accumulate_grad_batches)
        said = all_said(mine, "watch-ceiling-plan", trainer.global_rank, trainer.world_size)
        if said is None:
            self._give_up(
                f"expected all {trainer.world_size} ranks to agree at the first step on what to measure, but one did "
                f"not respond for {PATIENCE_S:.0f} s, or they have no key-value store (MPI); run each rank under this "
                "command"
            )
            self._patience_s = _ALONE_S
            return
        lengths, queued, rhythms = zip(*said, strict=True)
        steps = min((each for each in lengths if each is not None), default=None)
        self._plan = plan_of(steps, max(queued), max(rhythms))
        if self._plan is None:
            self._stand_aside(f"the run is too short: {steps} steps")
        else:
            self.why_not = f"the run ended after {self._steps} steps, but the measurement needs {self._plan.steps}"

    def _is_agreed(self, trainer: Trainer, why_not: str, name: str) -> bool:
        """Whether no rank has a reason against going on; else all give up."""
        said = all_said(why_not, f"watch-ceiling-{name}", trainer.global_rank, trainer.world_size)
        if said is None:
            self._give_up(
                f"expected a message from all {trainer.world_size} ranks after step {self._steps}, but one sent none "
                f"for {PATIENCE_S:.0f} s; find out what blocks or ended it"
            )
            self._patience_s = _ALONE_S
        elif whys := [(rank, why) for rank, why in enumerate(said) if why]:
            rank, why = whys[0]
            self._give_up(f"rank {rank}: {why}" if trainer.world_size > 1 else why)
        return not self._gave_up

    def _switch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take batches from memory from now on, on all ranks or on none."""
        self._detector.remove_listener(self._prediction)
        self._switched()  # before ranks wait for each other: that is no part of the report
        why = self._failure
        if not why and not (self._kept.items and self._loader.steps_per_s is not None):
            why = (
                "expected consecutive steps in an epoch, but there are none: each epoch has one batch, or a validation "
                "follows each step; for this run give epochs more batches"
            )
        if self._is_agreed(trainer, why, "switch"):
            copies_all = bool(why_batches_move_otherwise(trainer, pl_module) or own_transfer(trainer, pl_module))
            self._replay = Replay(self._kept.items, trainer.strategy.root_device, copies_all=copies_all)
            replay(trainer, self._replay)

    def _conclude(self, trainer: Trainer) -> None:
        if not self._is_agreed(trainer, self._failure, "end"):
            return
        loader, free = self._loader, self._free
        assert loader.steps_per_s is not None
        assert free.steps_per_s is not None
        if trainer.is_global_zero:
            self._measured(
                Ceiling(
                    steps_per_s=loader.steps_per_s,
                    free_steps_per_s=free.steps_per_s,
                    steps=loader.steps,
                    free_steps=free.steps,
                    batches=len(self._kept.items),
                    predicted=self._prediction.at_most,
                    loader_steps_per_s=self._prediction.loader_steps_per_s,
                )
            )
        self._is_done = True

    def _leave_out(self, trainer: Trainer) -> None:
        """What comes now is no part of a step; what the device still does for the steps before is."""
        device, drain_s = trainer.strategy.root_device, 0.0
        if device.type == "cuda" and self._loader.counts and not self._is_off:
            began_s = self._clock()
            torch.cuda.synchronize(device)
            drain_s = self._clock() - began_s
        self._loader.leave_out(drain_s)

    def _now(self, trainer: Trainer, *, exactly: bool) -> float:
        """The clock; on a CPU without what the detector's hook and copies of batches have taken: no step needs them."""
        device = trainer.strategy.root_device
        if device.type != "cpu":  # there the host's work is hidden behind the device's
            if exactly and device.type == "cuda":
                torch.cuda.synchronize(device)
            return self._clock()
        return self._clock() - self._own_s - (self._replay.copied_s if self._replay is not None else 0.0)

    def _quit(self, trainer: Trainer, pl_module: LightningModule) -> NoReturn:
        """End this process, whatever fails on the way: nobody is to train on without checkpoints, or without an end."""
        rank, world_size = trainer.global_rank, trainer.world_size
        ends: tuple[Callable[[], object], ...] = (
            lambda: close_progress_bar(trainer, pl_module),
            self._leave_nothing,
            lambda: reset_loaders(trainer),
            _end_children,
            sys.stdout.flush,
            sys.stderr.flush,
            lambda: leave_together("watch-ceiling-exit", rank, world_size, self._patience_s),
        )
        try:
            for end in ends:
                with suppress(Exception):
                    end()
        finally:
            os._exit(0 if self._is_done else 1)


def as_json(ceiling: Ceiling) -> str:
    return json.dumps({key: value for key, value in asdict(ceiling).items() if value is not None}, indent=2)


def _queued(trainer: Trainer) -> int:
    """Batches that the workers of the training loaders may have made in advance."""
    return sum(
        (getattr(each, "num_workers", 0) or 0) * (getattr(each, "prefetch_factor", 0) or 0)
        for each in train_loaders(trainer)
    )


def _end_children() -> None:
    """End what multiprocessing would end when the interpreter does."""
    children = [each for each in multiprocessing.active_children() if each.daemon]
    for each in children:
        each.terminate()
    for each in children:
        each.join(_JOIN_S)
