"""The context managers that time an action of the training loop, and call the observer at its events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Final

from typing_extensions import override

from lightning_gpuopt.timeline.slot_clock import EPOCH_SETUP, SlotClock
from lightning_gpuopt.utils.replaced_method import Replacement

# a hook that takes longer than this gets two events of a GPU's clock, which cost less than a hundredth of it
_LONG_NS: Final = 500_000


class Span:
    """Reusable context manager: while it is open, and nothing opened inside it is, time goes to its slot."""

    __slots__ = ("slot", "timeline")

    def __init__(self, timeline: SlotClock, slot: int) -> None:
        self.timeline = timeline
        self.slot = slot

    # Each action of the training loop comes through here: no call more than it takes, and none of super(), which is
    # slow before Python 3.12. Between any two instructions the slots are as PauseSlots wants them.
    def __enter__(self) -> None:
        timeline = self.timeline
        now = timeline.clock_ns()
        current = timeline._current
        timeline._ns[current] += now - timeline.last_ns
        timeline._open.append(current)
        timeline._current = timeline.shown[0] = self.slot
        timeline.last_ns = now
        if timeline._watched:
            timeline._span_begins(current, now)

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        if not timeline._open:  # opened before start(), or closed after stop()
            return
        now = timeline.clock_ns()
        current = timeline._current
        timeline._ns[current] += now - timeline.last_ns
        timeline._current = timeline.shown[0] = timeline._open.pop()
        timeline.last_ns = now
        if timeline._watched:
            timeline._span_ends(current, now)


class HostSpan(Span):
    """A hook, a logger call or a fetch under a GPU's clock: where it is long, the observer is called at both ends.

    What is ``rare`` is no part of a step: then the observer is always called, since it may queue much work at once.
    """

    __slots__ = ("began_ns", "long", "rare")

    def __init__(self, timeline: SlotClock, slot: int, *, rare: bool = False) -> None:
        super().__init__(timeline, slot)
        self.rare = rare
        self.long = True  # until it was seen to be short

    def __enter__(self) -> None:
        timeline = self.timeline
        Span.__enter__(self)
        self.began_ns = timeline.last_ns
        if self.long:
            timeline._observer.host_work_begins()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        Span.__exit__(self)
        long = self.rare or timeline.last_ns - self.began_ns >= _LONG_NS
        if long or self.long:
            timeline._observer.host_work_ends()
        self.long = long


class BatchHookSpan(HostSpan):
    """A hook around the copy of a batch, which may queue work however short it is."""

    __slots__ = ()

    def __exit__(self, *exception: object) -> None:
        HostSpan.__exit__(self, *exception)
        self.timeline._batch_hook_ran = True


class FetchSpan(Span):
    """The fetch of a batch; the first of an epoch also waits for workers to start, so it counts as set-up."""

    __slots__ = ("began_ns", "later_slot", "long")

    def __init__(self, timeline: SlotClock, slot: int) -> None:
        super().__init__(timeline, slot)
        self.later_slot = slot
        self.long = timeline._host_work is not None

    def __enter__(self) -> None:
        timeline = self.timeline
        self.slot = timeline._first_fetch_slot if timeline._epoch_begins else self.later_slot
        Span.__enter__(self)
        self.began_ns = timeline.last_ns
        if self.long:
            timeline._observer.host_work_begins()
        if timeline.fetches_watched and not timeline._epoch_begins:
            timeline._observer.fetch_begins()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        Span.__exit__(self)
        if not timeline._epoch_begins:
            if not timeline.fetches_watched:
                return
            fetch_ns = timeline.last_ns - self.began_ns
            self.long = fetch_ns >= _LONG_NS and timeline._host_work is not None
            timeline._observer.fetch_ends(fetch_ns / 1e9)
            return
        timeline._epoch_begins = False
        if timeline._current == EPOCH_SETUP:  # else fetched inside the step (`dataloader_iter`)
            timeline._become(timeline.loop_slot)


class EpochSpan(Span):
    """The run of an epoch; until its first batch has come, its own time is set-up."""

    __slots__ = ()

    def __enter__(self) -> None:
        timeline = self.timeline
        Span.__enter__(self)
        timeline._epoch_begins = True
        timeline.epochs += 1
        timeline._observer.epoch_begins()


class ObservedSpan(Span):
    __slots__ = ("begins", "ends")

    def __init__(self, timeline: SlotClock, slot: int, begins: str, ends: str) -> None:
        super().__init__(timeline, slot)
        # by name: what is connected to the observer later counts, too
        self.begins = begins
        self.ends = ends

    def __enter__(self) -> None:
        Span.__enter__(self)
        getattr(self.timeline._observer, self.begins)()

    def __exit__(self, *exception: object) -> None:
        Span.__exit__(self)
        getattr(self.timeline._observer, self.ends)()


class BatchSpan(Span):
    """All that brings a batch to the device. If the hook that copies was not seen, the whole counts as the copy."""

    __slots__ = ("copies",)

    def __enter__(self) -> None:
        timeline = self.timeline
        Span.__enter__(self)
        self.copies = not timeline._copied_by_hook
        timeline._copied_by_hook = timeline._batch_hook_ran = False
        if self.copies:
            timeline._observer.batch_arrives()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        Span.__exit__(self)
        if not timeline._copied_by_hook:
            if self.copies:
                timeline._observer.batch_copied()
        elif timeline._batch_hook_ran:
            timeline._observer.batch_ready()


class CopyAheadSpan(Span):
    """A copy on a stream of its own: inside it nothing concerns the stream that the observer watches."""

    __slots__ = ("outer",)

    def __enter__(self) -> None:
        timeline = self.timeline
        Span.__enter__(self)
        self.outer = timeline._spans
        timeline._spans = timeline._copy_ahead_spans

    def __exit__(self, *exception: object) -> None:
        self.timeline._spans = self.outer
        Span.__exit__(self)


class TransferSpan(Span):
    """What the device's own stream waits for while a batch is copied to it."""

    __slots__ = ()

    def __enter__(self) -> None:
        Span.__enter__(self)
        self.timeline._copied_by_hook = True
        self.timeline._observer.batch_arrives()

    def __exit__(self, *exception: object) -> None:
        Span.__exit__(self)
        self.timeline._observer.batch_copied()


class ValidationSpan(Span):
    """A whole validation: inside it nearly everything is validation."""

    __slots__ = ("outer",)

    def __enter__(self) -> None:
        timeline = self.timeline
        Span.__enter__(self)
        timeline._validation_began_ns = timeline.last_ns
        timeline._observer.validation_begins()
        self.outer = timeline._spans
        timeline._spans = timeline._validation_spans

    def __exit__(self, *exception: object) -> None:
        self.timeline._spans = self.outer
        Span.__exit__(self)
        self.timeline._validation_began_ns = 0
        self.timeline._observer.validation_ends()


class ValidationFetchSpan(Span):
    """The fetch of a batch in a validation; with the first its set-up is over."""

    __slots__ = ()

    def __exit__(self, *exception: object) -> None:
        timeline = self.timeline
        Span.__exit__(self)
        if timeline._validation_began_ns:
            timeline._validation_setup_ns += timeline.last_ns - timeline._validation_began_ns
            timeline._validation_began_ns = 0
            timeline._validations += 1


class Timed(Replacement):
    def __init__(self, function: Callable[..., Any], span: Span) -> None:
        super().__init__(function)
        self._span = span
        update_wrapper(self, function)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._span.timeline.thread != threading.get_ident():
            return self._original(*args, **kwargs)
        with self._span:
            return self._original(*args, **kwargs)
