"""Exclusive time per phase of the training loop, through Lightning's profiler.

Everything that the Trainer does passes ``trainer.profiler``: the fetch, the strategy's hooks, every callback's every
hook. The actions nest, so each nanosecond belongs to the innermost open one, and the phases add up to wall time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import Any, Final

from lightning_gpuopt._measured import BETWEEN_STEPS, FIRST_FETCH, PHASES, SIGNAL_BROADCAST, STEP_HOOKS, PhaseTimes
from lightning_gpuopt.timeline.actions import COPY_AHEAD, WAIT_FOR_COPY, phase_of
from lightning_gpuopt.timeline.observer import StepObserver

_SLOTS: Final = {phase: slot for slot, phase in enumerate(PHASES)}
_CALLBACKS: Final = _SLOTS["callbacks"]
_VALIDATION: Final = _SLOTS["validation"]
_EPOCH_SETUP: Final = _SLOTS["epoch_setup"]
_OTHER: Final = _SLOTS["other"]

_MOST_ACTIONS: Final = 4096
"""Action names remembered; a program that makes up a new name at every step must not fill the memory."""

_LONG_NS: Final = 500_000
"""A hook that takes longer than this gets two events of a GPU's clock, which cost less than a hundredth of it."""

_TRANSFER: Final = _SLOTS["transfer"]
_BATCH_HOOKS: Final = ("on_before_batch_transfer", "on_after_batch_transfer")

_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()


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


class _HostSpan(_Span):
    """A hook, a logger call or a fetch under a GPU's clock: where it is long, the observer is called at both ends."""

    __slots__ = ("began_ns", "long")

    def __init__(self, timeline: Timeline, slot: int) -> None:
        super().__init__(timeline, slot)
        self.long = True  # until it was seen to be short

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(self.slot)
        self.began_ns = timeline._last_ns
        if self.long:
            timeline._observer.host_work_begins()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        timeline._leave()
        long = timeline._last_ns - self.began_ns >= _LONG_NS
        if long or self.long:
            timeline._observer.host_work_ends()
        self.long = long


class _BatchHookSpan(_HostSpan):
    """A hook around the copy of a batch, which may queue work however short it is."""

    __slots__ = ()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.timeline._batch_hook_ran = True


class _FetchSpan(_Span):
    """The fetch of a batch; the first of an epoch also waits for workers to start, so it counts as set-up."""

    __slots__ = ("began_ns", "long")

    def __init__(self, timeline: Timeline, slot: int) -> None:
        super().__init__(timeline, slot)
        self.long = timeline._host_work is not None

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(timeline._first_fetch_slot if timeline._epoch_begins else self.slot)
        self.began_ns = timeline._last_ns
        if self.long:
            timeline._observer.host_work_begins()
        if not timeline._epoch_begins:
            timeline._observer.fetch_begins()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        timeline._leave()
        if not timeline._epoch_begins:
            fetch_ns = timeline._last_ns - self.began_ns
            self.long = fetch_ns >= _LONG_NS and timeline._host_work is not None
            timeline._observer.fetch_ends(fetch_ns / 1e9)
            return
        timeline._epoch_begins = False
        if timeline._current == _EPOCH_SETUP:  # else fetched inside the step (`dataloader_iter`)
            timeline._become(_OTHER)


class _EpochSpan(_Span):
    """The run of an epoch; until its first batch has come, its own time is set-up."""

    __slots__ = ()

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(_EPOCH_SETUP)
        timeline._epoch_begins = True
        timeline._epochs += 1
        timeline._observer.epoch_begins()


class _ObservedSpan(_Span):
    """A span at whose beginning and end the observer is called."""

    __slots__ = ("begins", "ends")

    def __init__(self, timeline: Timeline, slot: int, begins: str, ends: str) -> None:
        super().__init__(timeline, slot)
        # by name: what is connected to the observer later counts, too
        self.begins = begins
        self.ends = ends

    def __enter__(self) -> None:
        self.timeline._enter(self.slot)
        getattr(self.timeline._observer, self.begins)()

    def __exit__(self, *exception: object) -> None:
        self.timeline._leave()
        getattr(self.timeline._observer, self.ends)()


class _BatchSpan(_Span):
    """All that brings a batch to the device. Where the hook that copies was not seen, the whole counts as the copy."""

    __slots__ = ("copies",)

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(self.slot)
        self.copies = not timeline._copied_by_hook
        timeline._copied_by_hook = timeline._batch_hook_ran = False
        if self.copies:
            timeline._observer.batch_arrives()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        timeline._leave()
        if not timeline._copied_by_hook:
            if self.copies:
                timeline._observer.batch_copied()
        elif timeline._batch_hook_ran:
            timeline._observer.batch_ready()


class _CopyAheadSpan(_Span):
    """A copy on a stream of its own: inside it nothing concerns the stream that the observer watches."""

    __slots__ = ("outer",)

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(self.slot)
        self.outer = timeline._spans
        timeline._spans = timeline._copy_ahead_spans

    def __exit__(self, *exception: object) -> None:
        self.timeline._spans = self.outer
        self.timeline._leave()


class _TransferSpan(_Span):
    """What the device's own stream waits for while a batch is copied to it."""

    __slots__ = ()

    def __enter__(self) -> None:
        self.timeline._enter(self.slot)
        self.timeline._copied_by_hook = True
        self.timeline._observer.batch_arrives()

    def __exit__(self, *exception: object) -> None:
        self.timeline._leave()
        self.timeline._observer.batch_copied()


class _ValidationSpan(_Span):
    """A whole validation: inside it nearly everything is validation."""

    __slots__ = ("outer",)

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(self.slot)
        timeline._observer.validation_begins()
        self.outer = timeline._spans
        timeline._spans = timeline._validation_spans

    def __exit__(self, *exception: object) -> None:
        self.timeline._spans = self.outer
        self.timeline._leave()
        self.timeline._observer.validation_ends()


class _Timed:
    """A function whose time is measured; pickled and copied as the function itself."""

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


class Timeline:
    """Attributes the training thread's time to phases, from :meth:`start` to :meth:`stop`.

    Outside of that, and on any other thread than the one that called :meth:`start`, nothing is measured.

    Attributes:
        slots_between_steps: places in :meth:`snapshot` whose time is no part of a training step.

    Args:
        checkpoint_callbacks: state keys of callbacks whose hooks are checkpointing.
        transfer_callbacks: state keys of callbacks whose hooks bring batches to the device.
        callback_names: state key to the name shown to people.
        observer: called at the events of a step.
        silent: whether an action does nothing, such as a hook that nobody has overridden: its time stays with the
            action around it, which costs less than to measure it.
        detailed: keep the order in which the host did things, and call the observer around long hooks as well: for a
            GPU's clock, which reads :meth:`take_host_work`.
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
        transfer_callbacks: Sequence[str] = (),
        callback_names: dict[str, str] | None = None,
        observer: StepObserver | None = None,
        silent: Callable[[str], bool] = lambda action: False,
        detailed: bool = False,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._phase_of_callback = dict.fromkeys(transfer_callbacks, "transfer")
        self._phase_of_callback |= dict.fromkeys(checkpoint_callbacks, "checkpoint")
        self._callback_names = callback_names or {}
        self._observer = observer or StepObserver()
        self._silent = silent
        self._host_work: list[int] | None = [] if detailed else None
        # Nanoseconds by slot: one slot a phase, then one for each callback hook and for the signal broadcast.
        self._ns = [0] * len(PHASES)
        self._hooks: dict[int, str] = {}
        self._batch_hooks: dict[int, str] = {}
        self._copied_by_hook = self._batch_hook_ran = False
        self.slots_between_steps = [_SLOTS[phase] for phase in BETWEEN_STEPS]
        self._broadcast_slot = self._new_slot()
        self._first_fetch_slot = self._new_slot()
        self.slots_between_steps.append(self._first_fetch_slot)
        self._training_spans: dict[str, AbstractContextManager[Any]] = {}
        self._validation_spans: dict[str, AbstractContextManager[Any]] = {}
        self._copy_ahead_spans: dict[str, AbstractContextManager[Any]] = {}
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
        """Begin to measure this thread's time. What is open around this call is not seen."""
        self._started_ns = self._last_ns = self._clock_ns()
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Stop measuring. What is still open gets its time until now; calling it again changes nothing."""
        if self._thread:
            self._stopped_ns = self._clock_ns()
            self._ns[self._current] += self._stopped_ns - self._last_ns
            self._thread = 0
            self._open.clear()

    def step_done(self) -> None:
        """Count a finished training batch."""
        self._steps += 1

    def span(self, action: str) -> AbstractContextManager[Any]:
        """The context manager that times an action of Lightning's profiler.

        Args:
            action: name of the action; an unknown one leaves its time with the action around it.
        """
        if self._thread != threading.get_ident():
            return _NOTHING
        span = self._spans.get(action)
        return span if span is not None else self._make_span(action)

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Wrap a function so that its time is attributed to a phase, for what Lightning's profiler does not see.

        Args:
            function: what to call.
            phase: one of :data:`PHASES`, or ``"signal_broadcast"``.
        """
        if phase == SIGNAL_BROADCAST:
            span: _Span = _ObservedSpan(self, self._broadcast_slot, "broadcast_begins", "broadcast_ends")
        else:
            span = self._host_span(_SLOTS[phase]) if phase == "logging" else _Span(self, _SLOTS[phase])
        return _Timed(function, span)

    def validating(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a validation loop's ``run``: what is no callback, logger or checkpoint inside it is validation."""
        return _Timed(run, _ValidationSpan(self, _VALIDATION))

    def snapshot(self) -> list[int]:
        """Nanoseconds so far: one number a phase, in the order of :data:`PHASES`, then those of callback hooks.

        Cheap enough for every step. It goes to the last beginning or end of an action, not to this very moment.
        """
        return self._ns.copy()

    @property
    def inside_steps_ns(self) -> int:
        """Nanoseconds until the last beginning or end of an action, without what is no part of a step."""
        ns = self._ns
        aside = 0
        for slot in self.slots_between_steps:
            aside += ns[slot]
        return self._last_ns - self._started_ns - aside

    def phases_between(self, before: list[int], after: list[int]) -> list[int]:
        """Nanoseconds by phase, in the order of :data:`PHASES`, from one snapshot to a later one."""
        start = before + [0] * (len(after) - len(before))
        ns = [b - a for a, b in zip(start, after, strict=True)]
        phases = ns[: len(PHASES)]
        for slot in range(len(PHASES), len(ns)):
            phases[self._phase_slot(slot)] += ns[slot]
        return phases

    def _phase_slot(self, slot: int) -> int:
        if slot in self._hooks:
            return _CALLBACKS
        if slot == self._first_fetch_slot:
            return _EPOCH_SETUP
        return _TRANSFER if slot in self._batch_hooks else _OTHER

    def name_of(self, slot: int) -> str:
        """What a slot of :meth:`snapshot` holds, for people: a phase, or a callback's hook."""
        if slot < len(PHASES):
            return PHASES[slot]
        if slot == self._first_fetch_slot:
            return FIRST_FETCH
        return self._hooks.get(slot) or self._batch_hooks.get(slot) or SIGNAL_BROADCAST

    @property
    def last_ns(self) -> int:
        """When the last action began or ended, by the timeline's clock."""
        return self._last_ns

    def forget_host_work(self) -> None:
        """Keep the order of what the host does no longer: nobody will take it."""
        self._host_work = None

    def take_host_work(self) -> list[int]:
        """What the host has done since the last call, in its order: slot, when it ended, slot, when it ended ...

        It goes to :attr:`last_ns`. Empty unless the timeline is ``detailed``.
        """
        work = self._host_work
        if work is None:
            return []
        self._host_work = []
        return work

    def times(self) -> PhaseTimes:
        """Everything so far, in seconds."""
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
            first_fetch_s=ns[self._first_fetch_slot] / 1e9,
        )

    def _enter(self, slot: int) -> None:
        now = self._clock_ns()
        current = self._current
        self._ns[current] += now - self._last_ns
        if self._host_work is not None:
            self._host_work += (current, now)
        self._open.append(current)
        self._current = slot
        self._last_ns = now

    def _leave(self) -> None:
        if not self._open:  # opened before start(), or closed after stop()
            return
        now = self._clock_ns()
        current = self._current
        self._ns[current] += now - self._last_ns
        if self._host_work is not None:
            self._host_work += (current, now)
        self._current = self._open.pop()
        self._last_ns = now

    def _become(self, slot: int) -> None:
        """What is open now goes on as something else."""
        self._current = slot

    def _new_slot(self) -> int:
        self._ns.append(0)
        return len(self._ns) - 1

    def _make_span(self, action: str) -> AbstractContextManager[Any]:
        validating = self._spans is self._validation_spans
        phase = phase_of(action)
        if phase == "callbacks" and action.startswith("[Callback]"):
            key = action.partition("]")[2].rpartition(".")[0]
            phase = self._phase_of_callback.get(key, phase)
        span: AbstractContextManager[Any]
        if phase is None or self._silent(action):
            span = _NOTHING
        elif self._spans is self._copy_ahead_spans:
            span = _Span(self, _SLOTS[phase])
        elif phase == "callbacks":
            span = self._host_span(self._hook_slot(action))
        elif phase == "checkpoint":
            span = self._host_span(_SLOTS[phase])
        elif validating:
            span = _Span(self, _VALIDATION)
        elif action == COPY_AHEAD:
            span = _CopyAheadSpan(self, _TRANSFER)
        elif action == "run_training_epoch":
            span = _EpochSpan(self, _OTHER)
        elif phase == "data_wait":
            span = _FetchSpan(self, _SLOTS[phase])
        else:
            span = self._step_span(action, _SLOTS[phase])
        if phase is not None and len(self._spans) < _MOST_ACTIONS:
            self._spans[action] = span
        return span

    def _step_span(self, action: str, slot: int) -> _Span:
        """A part of the step; a GPU's clock needs to be called at some of them."""
        if self._host_work is None:
            return _Span(self, slot)
        if action == "run_training_batch":
            return _ObservedSpan(self, slot, "compute_begins", "compute_ends")
        if action.endswith(".batch_to_device"):
            return _BatchSpan(self, slot)
        if action == WAIT_FOR_COPY or action.endswith(".transfer_batch_to_device"):
            return _TransferSpan(self, slot)
        if action.endswith(_BATCH_HOOKS):
            return _BatchHookSpan(self, self._batch_hook_slot(action))
        if action.startswith("[Strategy]") and action.endswith(".training_step"):
            return _ObservedSpan(self, slot, "forward_begins", "forward_ends")
        return _Span(self, slot)

    def _host_span(self, slot: int) -> _Span:
        return _Span(self, slot) if self._host_work is None else _HostSpan(self, slot)

    def _batch_hook_slot(self, action: str) -> int:
        if len(self._ns) >= _MOST_ACTIONS:
            return _TRANSFER
        slot = self._new_slot()
        self._batch_hooks[slot] = action.partition("]")[2]
        return slot

    def _hook_slot(self, action: str) -> int:
        key, _, hook = action.partition("]")[2].rpartition(".")
        if len(self._ns) >= _MOST_ACTIONS:
            return _CALLBACKS
        slot = self._new_slot()
        self._hooks[slot] = f"{self._callback_names.get(key, key)}.{hook}"
        if hook not in STEP_HOOKS:
            self.slots_between_steps.append(slot)
        return slot
