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
from lightning_gpuopt.compat.dry_run import close_progress_bar, waits_for_results
from lightning_gpuopt.compat.lightning import STEP_OUTPUT, Callback, LightningModule, Trainer, train_loaders
from lightning_gpuopt.compat.lightning_loops import (
    batches_left,
    own_transfer,
    replay,
    reset_loaders,
    take_through,
    why_batches_move_otherwise,
)
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard
from lightning_gpuopt.utils.rank_vote import all_say
from lightning_gpuopt.watch.ceiling import Ceiling, Meter, Plan, Prediction, plan_of
from lightning_gpuopt.watch.replay import Kept, Recorder, Replay

_JOIN_S = 5.0
"""So long a child process may take to end."""


class HookClock(Callback):
    """Notes when the ``on_train_batch_end`` of the callback behind it begins.

    Args:
        clock: seconds.

    Attributes:
        began_s: the clock then.
    """

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
    """Measures what data can bring at most, in one ``fit``, which it does not return from.

    Args:
        detector: reports on the steps with the loader.
        switched: called when these are over.
        measured: called with what came out, on rank 0 of several.
        leave: called before the process ends; to leave nothing of ours behind.
        before: stands before the detector, and this callback behind it; None where the detector is the user's own.
        clock: seconds.

    Attributes:
        why_not: why nothing was measured, so far.
    """

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
        self._is_off = self._is_done = False
        self.why_not = "no training step was done"

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look whether this run can be measured."""
        with Guard(self, trainer):
            if trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._give_up("the run is too short, with fast_dev_run")
            elif waits_for_results(trainer):
                self._give_up("another process waits for what fit() returns; use strategy='ddp', or one device")
            else:
                self._detector.add_listener(self._prediction)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The set-up of an epoch is no part of a step."""
        self._loader.leave_out()
        if self._replay is not None:  # Lightning itself ends none then
            self._give_up("the script has ended an epoch early")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nor is a validation."""
        self._loader.leave_out()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Count the step; after the last one the process ends."""
        if self._is_off:
            return
        with Guard(self, trainer):
            self._steps += 1
            if self._before is not None:
                self._own_s += self._clock() - self._before.began_s
            if self._replay is None:
                self._with_loader(trainer, pl_module)
            else:
                self._from_memory(trainer)
        if self._replay is not None and (self._is_off or self._is_done):
            self._quit(trainer, pl_module)

    @override
    def _leave(self) -> None:
        self._give_up("the measurement failed")

    @override
    def _at_rest(self) -> dict[str, Any]:
        return {"_kept": Kept(), "_replay": None}

    def _give_up(self, why: str) -> None:
        self.why_not, self._is_off = why, True
        self._detector.remove_listener(self._prediction)

    def _with_loader(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._plan is None:
            left = batches_left(trainer)
            steps = None if left is None else left + 1
            self._plan = plan_of(steps, _queued(trainer), trainer.accumulate_grad_batches)
            if self._plan is None:
                self._give_up(f"the run is too short: {steps} steps")
                return
        plan, step = self._plan, self._steps
        self.why_not = f"the run ended after {step} steps, and the measurement takes {plan.steps}"
        if not self._kept.is_full:
            take_through(trainer, Recorder, lambda iterator: Recorder(iterator, self._kept))
        if step >= plan.warm_up:
            self._loader.step_ends(self._now(trainer, exactly=step in (plan.warm_up, plan.switch_at)))
        if step == plan.switch_at:
            self._switch(trainer, pl_module, plan)

    def _switch(self, trainer: Trainer, pl_module: LightningModule, plan: Plan) -> None:
        """Take batches from memory from now on, on all ranks or on none."""
        can = bool(self._kept.items) and self._loader.steps_per_s is not None
        if not all_say(f"{plan} {can}", "watch-ceiling", trainer.global_rank, trainer.world_size):
            self._give_up("not every rank took part: each has to run under this command")
        elif not can:
            self._give_up("no two steps of an epoch follow each other")
        else:
            self._detector.remove_listener(self._prediction)
            self._switched()
            copies_all = bool(why_batches_move_otherwise(trainer, pl_module) or own_transfer(trainer, pl_module))
            self._replay = Replay(self._kept.items, trainer.strategy.root_device, copies_all=copies_all)
            replay(trainer, self._replay)

    def _from_memory(self, trainer: Trainer) -> None:
        plan, step = self._plan, self._steps
        assert plan is not None
        self.why_not = f"the run ended after {step} steps, and the measurement takes {plan.steps}"
        if step < plan.free_from:
            return
        self._free.step_ends(self._now(trainer, exactly=step in (plan.free_from, plan.steps)))
        if step < plan.steps:
            return
        self._is_done = True
        loader, free = self._loader, self._free
        assert loader.steps_per_s is not None
        assert free.steps_per_s is not None
        if trainer.is_global_zero:
            self._measured(
                Ceiling(
                    loader_steps_per_s=loader.steps_per_s,
                    free_steps_per_s=free.steps_per_s,
                    loader_steps=loader.steps,
                    free_steps=free.steps,
                    batches=len(self._kept.items),
                    predicted=self._prediction.at_most,
                )
            )

    def _now(self, trainer: Trainer, *, exactly: bool) -> float:
        """The clock; on a CPU without what the detector's hook and copies of batches have taken: no step needs them."""
        device = trainer.strategy.root_device
        if device.type != "cpu":  # there the host's work is hidden behind the device's
            if exactly and device.type == "cuda":
                torch.cuda.synchronize(device)
            return self._clock()
        return self._clock() - self._own_s - (self._replay.copied_s if self._replay is not None else 0.0)

    def _quit(self, trainer: Trainer, pl_module: LightningModule) -> NoReturn:
        """End this process, whatever fails on the way: with batches from memory the run has no end."""
        ends: tuple[Callable[[], object], ...] = (
            lambda: close_progress_bar(trainer, pl_module),
            self._leave_nothing,
            lambda: reset_loaders(trainer),
            _end_children,
            lambda: trainer.strategy.barrier("gpuopt-ceiling"),  # no rank leaves another in a collective
            sys.stdout.flush,
            sys.stderr.flush,
        )
        try:
            for end in ends:
                with suppress(Exception):
                    end()
        finally:
            os._exit(0)


def as_json(ceiling: Ceiling) -> str:
    """What is written to ``ceiling.json``."""
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
