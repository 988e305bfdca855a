"""Exclusive time per phase of the training loop, through Lightning's profiler.

Everything that the Trainer does passes ``trainer.profiler``: the fetch, the strategy's hooks, every callback's every
hook. The actions nest, so each nanosecond belongs to the innermost open one, and the phases add up to wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Final, cast

from lightning_gpuopt.measurements.phases import (
    GARBAGE_COLLECTION,
    PHASES,
    RECOMPILATION,
    SIGNAL_BROADCAST,
    STEP_HOOKS,
    PhaseTimes,
)
from lightning_gpuopt.timeline.actions import COPY_AHEAD, WAIT_FOR_COPY, phase_of
from lightning_gpuopt.timeline.observer import StepObserver
from lightning_gpuopt.timeline.slot_clock import SlotClock
from lightning_gpuopt.timeline.spans import (
    BatchHookSpan,
    BatchSpan,
    CopyAheadSpan,
    EpochSpan,
    FetchSpan,
    HostSpan,
    ObservedSpan,
    Span,
    Timed,
    TransferSpan,
    ValidationFetchSpan,
    ValidationSpan,
)

_SLOTS: Final = {phase: slot for slot, phase in enumerate(PHASES)}
_CALLBACKS, _VALIDATION, _EPOCH_SETUP = _SLOTS["callbacks"], _SLOTS["validation"], _SLOTS["epoch_setup"]
_OTHER, _BACKWARD, _TRANSFER = _SLOTS["other"], _SLOTS["backward"], _SLOTS["transfer"]

# action names remembered; a program that makes up a new name at every step must not fill the memory
_MAX_ACTIONS: Final = 4096
_LOOP_NAMES: Final = {"run_training_batch": "optimization loop"}
_VALIDATION_FETCHES: Final = (".val_next", ".validate_next")
_BATCH_HOOKS: Final = ("on_before_batch_transfer", "on_after_batch_transfer")

# hooks of a module that Lightning calls inside an action of the same phase: to time that is enough on the CPU
_WITHIN_THEIR_PHASE: Final = (".transfer_batch_to_device", ".optimizer_zero_grad", ".configure_gradient_clipping")


class _Nothing:
    """A context that does nothing, entered some twenty times a step: without a call of a Python function."""

    __slots__ = ()
    __enter__ = __exit__ = "".format  # takes any arguments, and what it returns is false


_NOTHING: Final = cast(AbstractContextManager[Any], _Nothing())


class Timeline(SlotClock):
    """Attributes the time of the thread that calls :meth:`start` to phases, until :meth:`stop`.

    Callbacks are given as state keys: those whose hooks are checkpointing, those that bring batches to the device, and
    names for people. ``silent`` tells an action that does nothing, such as a hook that nobody has overridden: its time
    stays with the action around it, which costs less than to measure it. ``detailed`` keeps the order in which the host
    did things, and calls the observer around long hooks as well, for a GPU's clock, which reads :meth:`take_host_work`.
    ``ranges``, as ``torch.cuda.nvtx``, marks what is open, for a tool that looks from outside; :meth:`stop` closes what
    is still open.
    """

    __slots__ = ("_callback_names", "_phase_of_callback", "_silent", "_started_ns", "_stopped_ns", "steps")

    def __init__(
        self,
        *,
        checkpoint_callbacks: Sequence[str] = (),
        transfer_callbacks: Sequence[str] = (),
        callback_names: dict[str, str] | None = None,
        observer: StepObserver | None = None,
        silent: Callable[[str], bool] = lambda action: False,
        detailed: bool = False,
        ranges: Any = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__(observer or StepObserver(), ranges, clock_ns, detailed=detailed)
        self._phase_of_callback = dict.fromkeys(transfer_callbacks, "transfer")
        self._phase_of_callback |= dict.fromkeys(checkpoint_callbacks, "checkpoint")
        self._callback_names = callback_names or {}
        self._silent = silent
        self._started_ns = 0
        self._stopped_ns: int | None = None
        self.steps = 0

    def start(self) -> None:
        """Begin to measure this thread's time. What is open around this call is not seen."""
        self._started_ns = self.last_ns = self.clock_ns()
        self.thread = get_ident()

    def stop(self) -> None:
        """Stop measuring. What is still open gets its time until now; calling it again changes nothing."""
        if self.thread:
            if self._ranges is not None and self.thread == get_ident():  # whose they are
                for _ in self._open:
                    self._ranges.range_pop()
            self._stopped_ns = self.clock_ns()
            self._ns[self._current] += self._stopped_ns - self.last_ns
            self.thread = 0
            self._open.clear()

    def step_done(self) -> None:
        self.steps += 1

    @property
    def in_backward(self) -> bool:
        """Whether the thread is in the backward pass, of which other threads of torch do a part."""
        return self._current == _BACKWARD

    def pause(self, kind: str, begun_ns: int, ended_ns: int) -> bool:
        return self.pauses.add(kind, self._current, begun_ns, ended_ns)

    def span(self, action: str) -> AbstractContextManager[Any]:
        """What times an action of Lightning's profiler; an unknown one leaves its time with the one around it."""
        if self.thread != get_ident():
            return _NOTHING
        try:
            return self._spans[action]
        except KeyError:
            return self._make_span(action)

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Wrap what Lightning's profiler does not see, for one of :data:`PHASES` or ``"signal_broadcast"``."""
        if phase == SIGNAL_BROADCAST:
            span: Span = ObservedSpan(self, self._broadcast_slot, "broadcast_begins", "broadcast_ends")
        else:
            span = self._host_span(_SLOTS[phase]) if phase == "logging" else Span(self, _SLOTS[phase])
        return Timed(function, span)

    def validating(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a validation loop's ``run``: all inside it but callbacks, loggers and checkpoints is validation."""
        return Timed(run, ValidationSpan(self, _VALIDATION))

    def snapshot(self) -> list[int]:
        """Nanoseconds so far, to the last event: a number a phase, as in :data:`PHASES`, then callback hooks. Cheap."""
        return self._ns.copy()

    @property
    def inside_steps_ns(self) -> int:
        """Nanoseconds until the last beginning or end of an action, without what is no part of a step."""
        ns = self._ns
        aside = 0
        for slot in self.slots_between_steps:
            aside += ns[slot]
        return self.last_ns - self._started_ns - aside

    def phases_between(self, before: list[int], after: list[int]) -> list[int]:
        """Nanoseconds by phase, in the order of :data:`PHASES`, from one snapshot to a later one."""
        start = before + [0] * (len(after) - len(before))
        ns = [b - a for a, b in zip(start, after, strict=True)]
        phases = ns[: len(PHASES)]
        for slot in range(len(PHASES), len(ns)):
            if ns[slot]:  # most are slots of pauses that never came
                phases[self._phase_slot(slot)] += ns[slot]
        return phases

    def _phase_slot(self, slot: int) -> int:
        slot = self.pauses.stopped.get(slot, slot)
        if slot < len(PHASES):
            return slot
        if slot in self._hooks:
            return _CALLBACKS
        if slot == self._first_fetch_slot:
            return _EPOCH_SETUP
        return _TRANSFER if slot in self._batch_hooks else _OTHER

    @property
    def activity(self) -> str | None:
        """What the measured thread does now, by :meth:`name_of`; None while nothing is measured. Any thread may ask."""
        return self.name_of(self._current) if self.thread else None

    def forget_host_work(self) -> None:
        self._host_work = None
        self._watched = self._ranges is not None
        self.pauses.forget_long()

    def take_host_work(self) -> list[int]:
        """What the host did since the last call, to :attr:`last_ns`: slot, end, slot, end ...; only if ``detailed``."""
        work = self._host_work
        if work is None:
            return []
        self._host_work = []
        return self.pauses.split(work) if self.pauses.long else work

    def times(self) -> PhaseTimes:
        ns = self.snapshot()
        end = self._stopped_ns
        if end is None:
            end = self.clock_ns() if self.thread else self._started_ns
            ns[self._current] += end - self.last_ns
        phases = self.phases_between([], ns)
        pauses = self.pauses.seconds_by_stopped(ns)
        for made, slot in self.pauses.stopped.items():
            ns[slot] += ns[made]
        return PhaseTimes(
            wall_s=(end - self._started_ns) / 1e9,
            steps=self.steps,
            phases={phase: value / 1e9 for phase, value in zip(PHASES, phases, strict=True)},
            callbacks=self._named({slot: ns[slot] / 1e9 for slot in self._hooks if ns[slot]}),
            epochs=self.epochs,
            signal_broadcast_s=ns[self._broadcast_slot] / 1e9,
            first_fetch_s=ns[self._first_fetch_slot] / 1e9,
            validation_setup_s=self._validation_setup_ns / 1e9,
            validations=self._validations,
            loops={name: ns[slot] / 1e9 for slot, name in self._loops.items() if ns[slot]},
            collecting=self._named(pauses[GARBAGE_COLLECTION]),
            compiling=self._named(pauses[RECOMPILATION]),
            batch_hooks=self._named({slot: ns[slot] / 1e9 for slot in self._batch_hooks if ns[slot]}),
        )

    def _named(self, seconds: dict[int, float]) -> dict[str, float]:
        named: dict[str, float] = {}
        for slot, value in seconds.items():
            name = self.name_of(slot)
            named[name] = named.get(name, 0.0) + value
        return named

    def _make_span(self, action: str) -> AbstractContextManager[Any]:
        validating = self._spans is self._validation_spans
        phase = phase_of(action)
        if phase == "callbacks" and action.startswith("[Callback]"):
            key = action.partition("]")[2].rpartition(".")[0]
            phase = self._phase_of_callback.get(key, phase)
        span: AbstractContextManager[Any]
        within = action.startswith("[Lightning") and action.endswith(_WITHIN_THEIR_PHASE)
        if phase is None or self._silent(action) or (within and not self._watched):
            span = _NOTHING
        elif self._spans is self._copy_ahead_spans:
            span = Span(self, _SLOTS[phase])
        elif phase == "callbacks":
            span = self._host_span(self._hook_slot(action))
        elif phase == "checkpoint":
            span = self._host_span(_SLOTS[phase])
        elif validating:
            fetches = action.endswith(_VALIDATION_FETCHES)
            span = ValidationFetchSpan(self, _VALIDATION) if fetches else Span(self, _VALIDATION)
        elif action == COPY_AHEAD:
            span = CopyAheadSpan(self, _TRANSFER)
        elif action == "run_training_epoch":
            span = EpochSpan(self, _EPOCH_SETUP)
        elif phase == "data_wait":
            span = FetchSpan(self, _SLOTS[phase])
        else:
            span = self._step_span(action, self._slot_in_loop(action) if phase == "other" else _SLOTS[phase])
        if phase is not None and len(self._spans) < _MAX_ACTIONS:
            self._spans[action] = span
        return span

    def _step_span(self, action: str, slot: int) -> Span:
        """A part of the step; a GPU's clock needs to be called at some of them."""
        if action.endswith(_BATCH_HOOKS):
            slot = self._named_slot(self._batch_hooks, action.partition("]")[2], _TRANSFER)
            return Span(self, slot) if self._host_work is None else BatchHookSpan(self, slot)
        if self._host_work is None:
            return Span(self, slot)
        if action == "run_training_batch":
            return ObservedSpan(self, slot, "compute_begins", "compute_ends")
        if action.endswith(".batch_to_device"):
            return BatchSpan(self, slot)
        if action == WAIT_FOR_COPY or action.endswith(".transfer_batch_to_device"):
            return TransferSpan(self, slot)
        if action.startswith("[Strategy]") and action.endswith(".training_step"):
            return ObservedSpan(self, slot, "forward_begins", "forward_ends")
        return Span(self, slot)

    def _slot_in_loop(self, action: str) -> int:
        """A slot for Lightning's own work: the loop around the optimizer, a hook of a strategy."""
        return self._named_slot(self._loops, _LOOP_NAMES.get(action, action.rpartition("]")[2]), _OTHER)

    def _host_span(self, slot: int) -> Span:
        if self._host_work is None:
            return Span(self, slot)
        return HostSpan(self, slot, rare=slot in self.slots_between_steps and slot in self._hooks)

    def _hook_slot(self, action: str) -> int:
        key, _, hook = action.partition("]")[2].rpartition(".")
        name = f"{self._callback_names.get(key, key)}.{hook}"
        return self._named_slot(self._hooks, name, _CALLBACKS, in_step=hook in STEP_HOOKS)

    def _named_slot(self, names: dict[int, str], name: str, otherwise: int, *, in_step: bool = True) -> int:
        """A new slot of this name; ``otherwise`` where there are too many."""
        if len(self._ns) >= _MAX_ACTIONS:
            return otherwise
        slot = self._new_slot()
        names[slot] = name
        if in_step:
            self.pauses.watch(slot)
        else:
            self.slots_between_steps.append(slot)
        return slot
