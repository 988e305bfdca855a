"""The state that spans share: which slot the training thread's time goes to, and how much each has."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from contextlib import AbstractContextManager
from typing import Any, Final

from lightning_gpuopt.measurements.phases import BETWEEN_STEPS, FIRST_FETCH, PHASES, SIGNAL_BROADCAST
from lightning_gpuopt.timeline.observer import StepObserver
from lightning_gpuopt.timeline.pause_slots import PauseSlots

EPOCH_SETUP: Final = PHASES.index("epoch_setup")


class SlotClock:
    """Nanoseconds by slot: one slot a phase, then one for each callback's hook and for the signal broadcast.

    Spans (:mod:`~lightning_gpuopt.timeline.spans`) read and write its attributes themselves: all of the training loop
    comes through them, and a call costs more than what it would do. ``slots_between_steps`` are no part of a training
    step, ``pauses`` stop one from outside, ``loop_slot`` has the loop's own work. ``last_ns`` is when the last action
    began or ended; ``thread`` is 0 outside of a measurement. The only item of ``shown`` is the open slot, for a reader
    that outlives this process; it is replaced by whoever has one.
    """

    # With as many attributes as these an instance's dict is slow.
    __slots__ = (
        *("_batch_hook_ran", "_batch_hooks", "_broadcast_slot", "_copied_by_hook", "_copy_ahead_spans", "_current"),
        *("_epoch_begins", "_first_fetch_slot", "_hooks", "_host_work", "_loops", "_ns", "_observer", "_open"),
        *("_ranges", "_spans", "_training_spans", "_validation_began_ns", "_validation_setup_ns", "_validation_spans"),
        *("_validations", "_watched", "clock_ns", "epochs", "fetches_watched", "last_ns", "loop_slot", "pauses"),
        *("shown", "slots_between_steps", "thread"),
    )

    def __init__(self, observer: StepObserver, ranges: Any, clock_ns: Callable[[], int], *, detailed: bool) -> None:
        self.clock_ns = clock_ns
        self._observer = observer
        self._host_work: list[int] | None = [] if detailed else None
        self._ranges = ranges
        self._watched = detailed or ranges is not None
        self._ns = [0] * len(PHASES)
        self._hooks: dict[int, str] = {}
        self._batch_hooks: dict[int, str] = {}
        self._copied_by_hook = self._batch_hook_ran = False
        self.slots_between_steps = [PHASES.index(phase) for phase in BETWEEN_STEPS]
        self.pauses = PauseSlots(self._ns, keep_long=detailed)
        for slot in range(len(PHASES)):
            if slot not in self.slots_between_steps:
                self.pauses.watch(slot)
        self._broadcast_slot = self._new_slot()
        self.pauses.watch(self._broadcast_slot)
        self._first_fetch_slot = self._new_slot()
        self._loops = {self._new_slot(): "training loop"}
        self.loop_slot = next(iter(self._loops))
        self.pauses.watch(self.loop_slot)
        self.slots_between_steps.append(self._first_fetch_slot)
        self._training_spans: dict[str, AbstractContextManager[Any]] = {}
        self._validation_spans: dict[str, AbstractContextManager[Any]] = {}
        self._copy_ahead_spans: dict[str, AbstractContextManager[Any]] = {}
        self._spans = self._training_spans
        self._current = EPOCH_SETUP
        self._open: list[int] = []
        self.last_ns = 0
        self.thread = 0
        self._epoch_begins = False
        self._validation_began_ns = self._validation_setup_ns = 0
        self._validations = 0
        self.fetches_watched = True
        self.epochs = 0
        self.shown: MutableSequence[int] | memoryview[int] = [EPOCH_SETUP]

    @property
    def slots(self) -> int:
        return len(self._ns)

    def name_of(self, slot: int) -> str:
        """What a slot of the clock holds, for people: a phase, a callback's hook, or what stops a step."""
        if slot in self.pauses.kinds:
            return self.pauses.kinds[slot]
        if slot < len(PHASES):
            return PHASES[slot]
        if slot == self._first_fetch_slot:
            return FIRST_FETCH
        if slot in self._loops:
            return "other"
        return self._hooks.get(slot) or self._batch_hooks.get(slot) or SIGNAL_BROADCAST

    def cut(self, at_ns: int) -> None:
        """Keep the order of what the host does to this moment, in the middle of the open span."""
        if self._host_work is not None:
            now = max(at_ns, self.last_ns)
            self._ns[self._current] += now - self.last_ns
            self._host_work += (self._current, now)
            self.last_ns = now

    def _span_begins(self, before: int, now: int) -> None:
        """A span has begun: what is not needed on the CPU, unless ranges are marked."""
        if self._host_work is not None:
            self._host_work += (before, now)
        if self._ranges is not None:
            self._ranges.range_push(self.name_of(self._current))

    def _span_ends(self, slot: int, now: int) -> None:
        if self._ranges is not None:
            self._ranges.range_pop()
        if self._host_work is not None:
            self._host_work += (slot, now)

    def _become(self, slot: int) -> None:
        """Let the open span go on in another slot."""
        self._current = self.shown[0] = slot
        if self._ranges is not None:
            self._ranges.range_pop()
            self._ranges.range_push(self.name_of(slot))

    def _new_slot(self) -> int:
        self._ns.append(0)
        return len(self._ns) - 1
