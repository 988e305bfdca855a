"""How long the GPU really works and waits, from pooled CUDA events that are read later, without a synchronize.

An event recorded on a stream with work still queued is stamped when that work is done; on a drained stream it is
stamped when it is submitted. So the time from the last event of one step to the first event of the next is the time in
which the GPU had nothing to do, however far the host ran ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_gpuopt.timeline.phases import Marks

_MOST_UNREAD_STEPS = 1024
"""Steps whose events the GPU has not reached yet; a host further ahead than this gets no new ones for a while."""

_READS_PER_STEP = 2
"""Finished steps read at one call, so that a backlog is worked off little by little."""


class Event(Protocol):
    """What we use of ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> None:
        """Put the event on the current stream."""

    def query(self) -> bool:
        """Whether the GPU has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to ``end``."""


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """What the GPU did in the steps that have been read.

    Attributes:
        steps: training batches read.
        copy_s: seconds of the batches' copies to the device; no other work runs meanwhile.
        compute_s: the step's own work.
        gaps: times between consecutive steps that were measured.
        idle_s: seconds in those gaps, in which the GPU had nothing to do.
    """

    steps: int = 0
    copy_s: float = 0.0
    compute_s: float = 0.0
    gaps: int = 0
    idle_s: float = 0.0

    def __sub__(self, earlier: GpuTimes) -> GpuTimes:
        return GpuTimes(
            self.steps - earlier.steps,
            self.copy_s - earlier.copy_s,
            self.compute_s - earlier.compute_s,
            self.gaps - earlier.gaps,
            self.idle_s - earlier.idle_s,
        )


class _Step:
    __slots__ = ("arrived", "begun", "copied", "ended", "follows")

    def __init__(self, arrived: Event, follows: bool) -> None:
        self.arrived = arrived
        self.copied: Event | None = None
        self.begun: Event | None = None
        self.ended: Event | None = None
        self.follows = follows


class GpuClock(Marks):
    """Four events a step: the batch arrives, its copy is issued, the step's work begins, all of it is issued.

    Nothing here waits for the GPU: events are asked later whether it has passed them, and used again.

    Args:
        new_event: makes an event, for example ``lambda: torch.cuda.Event(enable_timing=True)``.

    Example::

        clock = GpuClock(lambda: torch.cuda.Event(enable_timing=True))
        clock.batch_arrives(); clock.batch_copied(); clock.compute_begins(); clock.compute_ends()   # at each step
        clock.read()
        clock.times().idle_s
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._free: list[Event] = []
        self._unread: deque[_Step] = deque()
        self._step: _Step | None = None
        self._follows = False
        self._last_ended: Event | None = None
        self._steps = 0
        self._copy_ms = 0.0
        self._compute_ms = 0.0
        self._gaps = 0
        self._idle_ms = 0.0

    def batch_arrives(self) -> None:
        """The host has a batch and is about to send it to the device."""
        if self._step is not None:  # the last one never ran
            self._give_back(self._step)
        if len(self._unread) >= _MOST_UNREAD_STEPS:
            self._step = None
            self._follows = False
            return
        self._step = _Step(self._record(), self._follows)

    def batch_copied(self) -> None:
        """The host has issued the copy."""
        if self._step is not None:
            self._step.copied = self._record()

    def compute_begins(self) -> None:
        """The host is about to issue the step's own work."""
        if self._step is not None:
            self._step.begun = self._record()

    def compute_ends(self) -> None:
        """The host has issued all of the step's work."""
        step = self._step
        if step is None or step.begun is None:
            return
        step.ended = self._record()
        self._unread.append(step)
        self._step = None
        self._follows = True

    def epoch_begins(self) -> None:
        """No gap is measured from one epoch to the next."""
        self._follows = False

    def interrupt(self) -> None:
        """No gap is measured over what lies between two steps."""
        self._follows = False

    def read(self, most_steps: int = _READS_PER_STEP) -> None:
        """Take the oldest steps that the GPU has finished.

        Args:
            most_steps: at most so many.
        """
        for _ in range(most_steps):
            if not self._unread:
                return
            step = self._unread[0]
            if step.ended is None or step.begun is None or not step.ended.query():
                return
            self._unread.popleft()
            if self._last_ended is not None:
                if step.follows:
                    self._idle_ms += self._last_ended.elapsed_time(step.arrived)
                    self._gaps += 1
                self._free.append(self._last_ended)
            if step.copied is not None:
                self._copy_ms += step.arrived.elapsed_time(step.copied)
                self._free.append(step.copied)
            self._compute_ms += step.begun.elapsed_time(step.ended)
            self._steps += 1
            self._last_ended = step.ended
            self._free += (step.arrived, step.begun)

    def times(self) -> GpuTimes:
        """What has been read so far."""
        return GpuTimes(self._steps, self._copy_ms / 1e3, self._compute_ms / 1e3, self._gaps, self._idle_ms / 1e3)

    def _record(self) -> Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def _give_back(self, step: _Step) -> None:
        self._free += [event for event in (step.arrived, step.copied, step.begun) if event is not None]
        self._step = None
