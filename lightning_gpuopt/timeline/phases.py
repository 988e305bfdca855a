"""Exclusive time per phase of the training loop, through Lightning's profiler seam.

Everything that the Trainer does passes ``trainer.profiler``: the fetch, the strategy's hooks, every callback's every
hook. The actions nest, so each nanosecond belongs to the innermost open one, and the phases add up to wall time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Final

from lightning_gpuopt.timeline.actions import BETWEEN_STEPS, PHASES, STEP_HOOKS, phase_of

_SLOTS: Final = {phase: slot for slot, phase in enumerate(PHASES)}
_CALLBACKS: Final = _SLOTS["callbacks"]
_VALIDATION: Final = _SLOTS["validation"]
_EPOCH_SETUP: Final = _SLOTS["epoch_setup"]
_OTHER: Final = _SLOTS["other"]

_MOST_ACTIONS: Final = 4096
"""Action names remembered; a program that makes up a new name at every step must not fill the memory."""

_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Where the time of a stretch of training went.

    Attributes:
        wall_s: length of the stretch, in seconds.
        steps: training batches finished in it.
        phases: exclusive seconds by phase; every phase is there, and they sum to ``wall_s``.
        callbacks: exclusive seconds by hook of a callback or of the module, ``"MyCallback.on_train_batch_end"``; they
            sum to ``phases["callbacks"]``.
        epochs: epochs begun in it.
        signal_broadcast_s: seconds in the broadcast, before each step under DDP, by which Lightning agrees on whether a
            signal told it to stop; part of ``phases["other"]``.
    """

    wall_s: float
    steps: int
    phases: dict[str, float]
    callbacks: dict[str, float]
    epochs: int
    signal_broadcast_s: float = 0.0

    @property
    def step_s(self) -> float | None:
        """Mean seconds per training batch, without validation, checkpoints, the set-up of epochs and their hooks."""
        if not self.steps:
            return None
        aside_s = sum(self.phases[phase] for phase in BETWEEN_STEPS) + self.phases["callbacks"] - self.step_hooks_s
        return max(self.wall_s - aside_s, 0.0) / self.steps

    @property
    def step_hooks_s(self) -> float:
        """Seconds in those hooks of callbacks and module that are called in every step."""
        return sum(seconds for name, seconds in self.callbacks.items() if name.rpartition(".")[2] in STEP_HOOKS)

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        """Both stretches together."""
        names = self.callbacks.keys() | other.callbacks.keys()
        return PhaseTimes(
            wall_s=self.wall_s + other.wall_s,
            steps=self.steps + other.steps,
            phases={name: value + other.phases[name] for name, value in self.phases.items()},
            callbacks={name: self.callbacks.get(name, 0.0) + other.callbacks.get(name, 0.0) for name in names},
            epochs=self.epochs + other.epochs,
            signal_broadcast_s=self.signal_broadcast_s + other.signal_broadcast_s,
        )

    def __sub__(self, earlier: PhaseTimes) -> PhaseTimes:
        """What came after ``earlier``, which is an earlier reading of the same timeline."""
        return PhaseTimes(
            wall_s=self.wall_s - earlier.wall_s,
            steps=self.steps - earlier.steps,
            phases={name: value - earlier.phases[name] for name, value in self.phases.items()},
            callbacks={name: value - earlier.callbacks.get(name, 0.0) for name, value in self.callbacks.items()},
            epochs=self.epochs - earlier.epochs,
            signal_broadcast_s=self.signal_broadcast_s - earlier.signal_broadcast_s,
        )


class _Span:
    """Reusable context manager: while it is open, and nothing opened inside it is, time goes to its slot."""

    __slots__ = ("slot", "timeline")

    def __init__(self, timeline: Timeline, slot: int) -> None:
        self.timeline = timeline
        self.slot = slot

    def __enter__(self) -> None:
        self.timeline._enter(self.slot)

    def __exit__(self, *exception: object) -> None:
        self.timeline._leave()


class _FetchSpan(_Span):
    """The fetch of a batch; the first of an epoch also waits for workers to start, so it counts as set-up."""

    __slots__ = ("began_ns",)

    def __enter__(self) -> None:
        timeline = self.timeline
        if timeline._epoch_begins:
            timeline._enter(_EPOCH_SETUP)
            return
        timeline._enter(self.slot)
        self.began_ns = timeline._last_ns
        timeline._marks.fetch_begins()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        timeline._leave()
        if not timeline._epoch_begins:
            timeline._marks.fetch_ends((timeline._last_ns - self.began_ns) / 1e9)
            return
        timeline._epoch_begins = False
        if timeline._current == _EPOCH_SETUP:  # else fetched inside the step (`dataloader_iter`)
            timeline._current = _OTHER


class _EpochSpan(_Span):
    """The run of an epoch; until its first batch has come, its own time is set-up."""

    __slots__ = ()

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(_EPOCH_SETUP)
        timeline._epoch_begins = True
        timeline._epochs += 1
        timeline._marks.epoch_begins()


class _CheckpointSpan(_Span):
    """A checkpoint; the next step does not follow on the last one."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.timeline._enter(self.slot)
        self.timeline._marks.interrupt()


class _TransferSpan(_Span):
    """The copy of a training batch to the device."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.timeline._enter(self.slot)
        self.timeline._marks.batch_arrives()

    def __exit__(self, *exception: object) -> None:
        self.timeline._marks.batch_copied()
        self.timeline._leave()


class _StepSpan(_Span):
    """The step's own work."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.timeline._enter(self.slot)
        self.timeline._marks.compute_begins()

    def __exit__(self, *exception: object) -> None:
        self.timeline._marks.compute_ends()
        self.timeline._leave()


class _ValidationSpan(_Span):
    """A whole validation: inside it nearly everything is validation."""

    __slots__ = ("outer",)

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(self.slot)
        timeline._marks.interrupt()
        self.outer = timeline._spans
        timeline._spans = timeline._validation_spans

    def __exit__(self, *exception: object) -> None:
        self.timeline._spans = self.outer
        self.timeline._leave()


class _Timed:
    """A function whose time is booked; pickled and copied as the function itself."""

    def __init__(self, function: Callable[..., Any], span: _Span) -> None:
        self._function = function
        self._span = span
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._span.timeline._thread != threading.get_ident():
            return self._function(*args, **kwargs)
        with self._span:
            return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self._function,)


def itself(value: Any) -> Any:
    """What was given; what stands in front of something pickles as that something through this."""
    return value


class Marks:
    """What happens at the borders of a training step; by default nothing. Called on the training thread."""

    def epoch_begins(self) -> None:
        """An epoch is about to ask for its iterators, or has just got them, and then for its first batch."""

    def interrupt(self) -> None:
        """Something other than the next step follows: validation or a checkpoint."""

    def fetch_begins(self) -> None:
        """The loop asks for a batch; not for the first of an epoch."""

    def fetch_ends(self, wait_s: float) -> None:
        """The batch is there, after so many seconds."""

    def batch_arrives(self) -> None:
        """The batch is about to go to the device."""

    def batch_copied(self) -> None:
        """The copy has been issued."""

    def compute_begins(self) -> None:
        """The step's own work is about to be issued."""

    def compute_ends(self) -> None:
        """All of it has been issued."""


class Timeline:
    """Books the training thread's time to phases, from :meth:`start` to :meth:`stop`.

    Outside of that, and on any other thread than the one that called :meth:`start`, nothing is booked.

    Attributes:
        slots_between_steps: places in :meth:`snapshot` whose time is no part of a training step.

    Args:
        checkpoint_callbacks: state keys of callbacks whose hooks are checkpointing.
        callback_names: state key to the name shown to people.
        marks: told when a step passes its borders.
        clock_ns: a monotonic clock, in nanoseconds.

    Example::

        timeline = Timeline()
        timeline.start()
        with timeline.span("[Strategy]SingleDeviceStrategy.training_step"):
            ...
        timeline.step_done()
        timeline.stop()
        assert abs(sum(timeline.times().phases.values()) - timeline.times().wall_s) < 1e-6
    """

    def __init__(
        self,
        *,
        checkpoint_callbacks: Sequence[str] = (),
        callback_names: dict[str, str] | None = None,
        marks: Marks | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._checkpoint_callbacks = frozenset(checkpoint_callbacks)
        self._callback_names = callback_names or {}
        self._marks = marks or Marks()
        # Nanoseconds by slot: one slot a phase, then one for each callback hook and for the signal broadcast.
        self._ns = [0] * len(PHASES)
        self._hooks: dict[int, str] = {}
        self.slots_between_steps = [_SLOTS[phase] for phase in BETWEEN_STEPS]
        self._broadcast_slot = self._new_slot()
        self._training_spans: dict[str, AbstractContextManager[Any]] = {}
        self._validation_spans: dict[str, AbstractContextManager[Any]] = {}
        self._spans = self._training_spans
        self._current = _EPOCH_SETUP
        self._open: list[int] = []
        self._last_ns = 0
        self._started_ns = 0
        self._stopped_ns: int | None = None
        self._thread = 0
        self._epoch_begins = False
        self._epochs = 0
        self._steps = 0

    @property
    def steps(self) -> int:
        """Training batches finished."""
        return self._steps

    @property
    def epochs(self) -> int:
        """Epochs begun."""
        return self._epochs

    def start(self) -> None:
        """Begin to book this thread's time. What is open around this call is not seen."""
        self._started_ns = self._last_ns = self._clock_ns()
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Close the books. What is still open gets its time until now; calling it again changes nothing."""
        if self._thread:
            self._stopped_ns = self._clock_ns()
            self._ns[self._current] += self._stopped_ns - self._last_ns
            self._thread = 0
            self._open.clear()

    def step_done(self) -> None:
        """Count a finished training batch."""
        self._steps += 1

    def span(self, action: str) -> AbstractContextManager[Any]:
        """The context manager that books an action of Lightning's profiler.

        Args:
            action: name of the action; an unknown one leaves its time with the action around it.
        """
        if self._thread != threading.get_ident():
            return _NOTHING
        span = self._spans.get(action)
        return span if span is not None else self._make_span(action)

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Wrap a function so that its time is booked to a phase, for what Lightning's profiler does not see.

        Args:
            function: what to call.
            phase: one of :data:`PHASES`, or ``"signal_broadcast"``.
        """
        slot = self._broadcast_slot if phase == "signal_broadcast" else _SLOTS[phase]
        return _Timed(function, _Span(self, slot))

    def validating(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a validation loop's ``run``: what is no callback, logger or checkpoint inside it is validation."""
        return _Timed(run, _ValidationSpan(self, _VALIDATION))

    def snapshot(self) -> list[int]:
        """Nanoseconds booked so far: one number a phase, in the order of :data:`PHASES`, then those of callback hooks.

        Cheap enough for every step. It goes to the last border of an action, not to this very moment.
        """
        return self._ns.copy()

    def phases_between(self, before: list[int], after: list[int]) -> list[int]:
        """Nanoseconds by phase, in the order of :data:`PHASES`, from one snapshot to a later one."""
        start = before + [0] * (len(after) - len(before))
        ns = [b - a for a, b in zip(start, after, strict=True)]
        phases = ns[: len(PHASES)]
        for slot in range(len(PHASES), len(ns)):
            phases[_CALLBACKS if slot in self._hooks else _OTHER] += ns[slot]
        return phases

    def name_of(self, slot: int) -> str:
        """What a slot of :meth:`snapshot` holds, for people: a phase, or a callback's hook."""
        return PHASES[slot] if slot < len(PHASES) else self._hooks.get(slot, "signal_broadcast")

    def times(self) -> PhaseTimes:
        """Everything booked so far, in seconds."""
        ns = self.snapshot()
        end = self._stopped_ns
        if end is None:
            end = self._clock_ns() if self._thread else self._started_ns
            ns[self._current] += end - self._last_ns
        phases = self.phases_between([], ns)
        callbacks: dict[str, float] = {}
        for slot, name in self._hooks.items():
            if ns[slot]:
                callbacks[name] = callbacks.get(name, 0.0) + ns[slot] / 1e9
        return PhaseTimes(
            wall_s=(end - self._started_ns) / 1e9,
            steps=self._steps,
            phases={phase: value / 1e9 for phase, value in zip(PHASES, phases, strict=True)},
            callbacks=callbacks,
            epochs=self._epochs,
            signal_broadcast_s=ns[self._broadcast_slot] / 1e9,
        )

    def _enter(self, slot: int) -> None:
        now = self._clock_ns()
        current = self._current
        self._ns[current] += now - self._last_ns
        self._open.append(current)
        self._current = slot
        self._last_ns = now

    def _leave(self) -> None:
        if not self._open:  # opened before start(), or closed after stop()
            return
        now = self._clock_ns()
        self._ns[self._current] += now - self._last_ns
        self._current = self._open.pop()
        self._last_ns = now

    def _new_slot(self) -> int:
        self._ns.append(0)
        return len(self._ns) - 1

    def _make_span(self, action: str) -> AbstractContextManager[Any]:
        validating = self._spans is self._validation_spans
        phase = phase_of(action)
        span: AbstractContextManager[Any]
        if phase is None:
            span = _NOTHING
        elif phase == "callbacks":
            span = _Span(self, self._hook_slot(action))
        elif phase == "checkpoint":
            span = _CheckpointSpan(self, _SLOTS[phase])
        elif validating:
            span = _Span(self, _VALIDATION)
        elif action == "run_training_epoch":
            span = _EpochSpan(self, _OTHER)
        elif action == "run_training_batch":
            span = _StepSpan(self, _OTHER)
        elif action.endswith(".batch_to_device"):
            span = _TransferSpan(self, _SLOTS[phase])
        elif phase == "data_wait":
            span = _FetchSpan(self, _SLOTS[phase])
        else:
            span = _Span(self, _SLOTS[phase])
        if phase is not None and len(self._spans) < _MOST_ACTIONS:
            self._spans[action] = span
        return span

    def _hook_slot(self, action: str) -> int:
        key, _, hook = action.partition("]")[2].rpartition(".")
        if action.startswith("[Callback]") and key in self._checkpoint_callbacks:
            return _SLOTS["checkpoint"]
        if len(self._ns) >= _MOST_ACTIONS:
            return _CALLBACKS
        slot = self._new_slot()
        self._hooks[slot] = f"{self._callback_names.get(key, key)}.{hook}"
        if hook not in STEP_HOOKS:
            self.slots_between_steps.append(slot)
        return slot
