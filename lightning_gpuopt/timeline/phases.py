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
from functools import wraps
from typing import Any, Final

PHASES: Final = (
    "data_wait",
    "transfer",
    "forward",
    "backward",
    "optimizer",
    "callbacks",
    "logging",
    "validation",
    "checkpoint",
    "epoch_setup",
    "other",
)

_STRATEGY_HOOKS: Final = {
    "batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "validation_step": "validation",
    "on_train_batch_start": "other",
}

_MODULE_HOOKS: Final = {
    "on_before_batch_transfer": "transfer",
    "transfer_batch_to_device": "transfer",
    "on_after_batch_transfer": "transfer",
    "backward": "backward",
    "on_before_backward": "backward",
    "on_after_backward": "backward",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "on_before_zero_grad": "optimizer",
    "on_before_optimizer_step": "optimizer",
    "configure_gradient_clipping": "optimizer",
    "lr_scheduler_step": "optimizer",
    "on_save_checkpoint": "checkpoint",
    "train_dataloader": "epoch_setup",
    "on_train_epoch_start": "epoch_setup",
}

_PLAIN_ACTIONS: Final = {
    "run_training_epoch": "other",
    "run_training_batch": "other",
    "optimizer_step": "optimizer",
    "save_checkpoint": "checkpoint",
}

_MOST_ACTIONS: Final = 4096
"""Action names remembered; a program that makes up a new name at every step must not fill the memory."""

_NOTHING: Final[AbstractContextManager[Any]] = nullcontext()


def phase_of(action: str) -> str | None:
    """The phase that an action of Lightning's profiler belongs to.

    Args:
        action: the name given to ``Profiler.profile``, read in Lightning 2.5.0 to 2.6.6.

    Returns:
        One of :data:`PHASES`, or None for an action that we do not know, for example the user's own: its time stays
        with the action around it.
    """
    if action in _PLAIN_ACTIONS:
        return _PLAIN_ACTIONS[action]
    owner, _, hook = action.rpartition(".")
    if hook == "train_dataloader_next":
        return "data_wait"
    if owner.startswith("[Callback]"):
        return "callbacks"
    if owner.startswith("[Strategy]"):
        return _STRATEGY_HOOKS.get(hook, "other")
    if owner.startswith(("[LightningModule]", "[LightningDataModule]")):
        if hook.startswith(("on_validation", "val_dataloader", "validation_step")):
            return "validation"
        return _MODULE_HOOKS.get(hook, "other")
    if hook in ("val_next", "validate_next"):
        return "validation"
    return None


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Where the time of a stretch of training went.

    Attributes:
        wall_s: length of the stretch, in seconds.
        steps: training batches finished in it.
        phases: exclusive seconds by phase; every phase is there, and they sum to ``wall_s``.
        callbacks: exclusive seconds by callback hook, ``"MyCallback.on_train_batch_end"``; part of
            ``phases["callbacks"]``.
        epochs: epochs begun in it.
    """

    wall_s: float
    steps: int
    phases: dict[str, float]
    callbacks: dict[str, float]
    epochs: int

    @property
    def step_s(self) -> float | None:
        """Mean seconds per training batch, without validation, checkpoints and the set-up of epochs."""
        if not self.steps:
            return None
        aside = self.phases["validation"] + self.phases["checkpoint"] + self.phases["epoch_setup"]
        return max(self.wall_s - aside, 0.0) / self.steps

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        """Both stretches together."""
        names = self.callbacks.keys() | other.callbacks.keys()
        return PhaseTimes(
            wall_s=self.wall_s + other.wall_s,
            steps=self.steps + other.steps,
            phases={name: value + other.phases[name] for name, value in self.phases.items()},
            callbacks={name: self.callbacks.get(name, 0.0) + other.callbacks.get(name, 0.0) for name in names},
            epochs=self.epochs + other.epochs,
        )

    def __sub__(self, earlier: PhaseTimes) -> PhaseTimes:
        """What came after ``earlier``, which is an earlier reading of the same timeline."""
        return PhaseTimes(
            wall_s=self.wall_s - earlier.wall_s,
            steps=self.steps - earlier.steps,
            phases={name: value - earlier.phases[name] for name, value in self.phases.items()},
            callbacks={name: value - earlier.callbacks.get(name, 0.0) for name, value in self.callbacks.items()},
            epochs=self.epochs - earlier.epochs,
        )


class _Account:
    """Nanoseconds booked to one action."""

    __slots__ = ("name", "ns", "phase")

    def __init__(self, name: str, phase: str) -> None:
        self.name = name
        self.phase = phase
        self.ns = 0


class _Span:
    """Reusable context manager: while it is open, and nothing opened inside it is, time goes to its account."""

    __slots__ = ("account", "timeline")

    def __init__(self, timeline: Timeline, account: _Account) -> None:
        self.timeline = timeline
        self.account = account

    def __enter__(self) -> None:
        self.timeline._enter(self.account)

    def __exit__(self, *exception: object) -> None:
        self.timeline._leave()


class _FetchSpan(_Span):
    """The fetch of a batch; the first of an epoch also waits for workers to start, so it counts as set-up."""

    __slots__ = ()

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(timeline._epoch_setup if timeline._epoch_begins else self.account)

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        timeline._leave()
        if timeline._epoch_begins:
            timeline._epoch_begins = False
            if timeline._current is timeline._epoch_setup:  # else fetched inside the step (`dataloader_iter`)
                timeline._current = timeline._loop


class _EpochSpan(_Span):
    """The run of an epoch; until its first batch has come, its own time is set-up."""

    __slots__ = ()

    def __enter__(self) -> None:
        timeline = self.timeline
        timeline._enter(timeline._epoch_setup)
        timeline._epoch_begins = True
        timeline._epochs += 1


class _MarkingSpan(_Span):
    """A span that also tells the GPU clock where the host is."""

    __slots__ = ("on_enter", "on_leave")

    def __init__(
        self,
        timeline: Timeline,
        account: _Account,
        on_enter: Callable[[], None] | None,
        on_leave: Callable[[], None] | None,
    ) -> None:
        super().__init__(timeline, account)
        self.on_enter = on_enter
        self.on_leave = on_leave

    def __enter__(self) -> None:
        self.timeline._enter(self.account)
        if self.on_enter is not None:
            self.on_enter()

    def __exit__(self, *exception: object) -> None:
        if self.on_leave is not None:
            self.on_leave()
        self.timeline._leave()


class Timeline:
    """Books the training thread's time to phases, from :meth:`start` to :meth:`stop`.

    Outside of that, and on any other thread than the one that called :meth:`start`, nothing is booked.

    Args:
        checkpoint_callbacks: state keys of callbacks whose hooks are checkpointing.
        callback_names: state key to the name shown to people.
        on_batch_arrives: called when a fetched batch is about to go to the device, outside of validation.
        on_compute_begins: called when the step's own work begins.
        on_compute_ends: called when it has been issued.
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
        on_batch_arrives: Callable[[], None] | None = None,
        on_compute_begins: Callable[[], None] | None = None,
        on_compute_ends: Callable[[], None] | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._checkpoint_callbacks = frozenset(checkpoint_callbacks)
        self._callback_names = callback_names or {}
        self._marks = {
            "transfer": (on_batch_arrives, None),
            "run_training_batch": (on_compute_begins, on_compute_ends),
        }
        self._loop = _Account("loop", "other")
        self._epoch_setup = _Account("epoch_setup", "epoch_setup")
        self._validation = _Account("validation", "validation")
        self._accounts = [self._loop, self._epoch_setup, self._validation]
        self._training_spans: dict[str, AbstractContextManager[Any]] = {}
        self._validation_spans: dict[str, AbstractContextManager[Any]] = {}
        self._spans = self._training_spans
        self._current = self._epoch_setup
        self._open: list[_Account] = []
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

    @property
    def active(self) -> bool:
        """Whether time is being booked."""
        return self._thread != 0

    def start(self) -> None:
        """Begin to book this thread's time. What is open around this call is not seen."""
        self._started_ns = self._last_ns = self._clock_ns()
        self._thread = threading.get_ident()

    def stop(self) -> None:
        """Close the books. What is still open gets its time until now; calling it again changes nothing."""
        if self._thread:
            self._stopped_ns = self._clock_ns()
            self._current.ns += self._stopped_ns - self._last_ns
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

    def timed(self, function: Callable[..., Any], phase: str, *, name: str | None = None) -> Callable[..., Any]:
        """Wrap a function so that its time is booked to a phase, for what Lightning's profiler does not see.

        Args:
            function: what to call.
            phase: one of :data:`PHASES`.
            name: of the account; the phase's by default.
        """
        span = _Span(self, self._account(name or phase, phase))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._thread != threading.get_ident():
                return function(*args, **kwargs)
            with span:
                return function(*args, **kwargs)

        return call

    def validating(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a validation loop's ``run``: what is no callback, logger or checkpoint inside it is validation."""
        span = _Span(self, self._validation)

        @wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._thread != threading.get_ident():
                return run(*args, **kwargs)
            outer, self._spans = self._spans, self._validation_spans
            try:
                with span:
                    return run(*args, **kwargs)
            finally:
                self._spans = outer

        return call

    def times(self) -> PhaseTimes:
        """Everything booked so far, in seconds."""
        now = self._last_ns
        phases = dict.fromkeys(PHASES, 0)
        callbacks: dict[str, int] = {}
        if self._thread:
            now = self._clock_ns()
            phases[self._current.phase] += now - self._last_ns
        for account in self._accounts:
            phases[account.phase] += account.ns
            if account.phase == "callbacks" and account.ns:
                callbacks[account.name] = callbacks.get(account.name, 0) + account.ns
        end = self._stopped_ns if self._stopped_ns is not None else now
        return PhaseTimes(
            wall_s=(end - self._started_ns) / 1e9,
            steps=self._steps,
            phases={name: ns / 1e9 for name, ns in phases.items()},
            callbacks={name: ns / 1e9 for name, ns in callbacks.items()},
            epochs=self._epochs,
        )

    def _enter(self, account: _Account) -> None:
        now = self._clock_ns()
        current = self._current
        current.ns += now - self._last_ns
        self._open.append(current)
        self._current = account
        self._last_ns = now

    def _leave(self) -> None:
        if not self._open:  # opened before start(), or closed after stop()
            return
        now = self._clock_ns()
        self._current.ns += now - self._last_ns
        self._current = self._open.pop()
        self._last_ns = now

    def _account(self, name: str, phase: str) -> _Account:
        account = _Account(name, phase)
        self._accounts.append(account)
        return account

    def _make_span(self, action: str) -> AbstractContextManager[Any]:
        validating = self._spans is self._validation_spans
        name, phase = self._describe(action, validating)
        if phase is None:
            span = _NOTHING
        elif action == "run_training_epoch":
            span = _EpochSpan(self, self._loop)
        elif phase == "data_wait":
            span = _FetchSpan(self, self._account(name, phase))
        elif action == "run_training_batch" or (action.endswith(".batch_to_device") and not validating):
            marks = self._marks["run_training_batch" if action == "run_training_batch" else "transfer"]
            span = _MarkingSpan(self, self._account(name, phase), *marks)
        else:
            span = _Span(self, self._account(name, phase))
        if len(self._spans) < _MOST_ACTIONS:
            self._spans[action] = span
        return span

    def _describe(self, action: str, validating: bool) -> tuple[str, str | None]:
        phase = phase_of(action)
        name = action
        if phase == "callbacks":
            key, _, hook = action.removeprefix("[Callback]").rpartition(".")
            name = f"{self._callback_names.get(key, key)}.{hook}"
            if key in self._checkpoint_callbacks:
                phase = "checkpoint"
        elif validating and phase not in (None, "checkpoint"):
            phase = "validation"
        return name, phase
