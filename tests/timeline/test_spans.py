"""The spans of the training loop's actions: whose time is whose, and who is called when; by a clock of the test's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_gpuopt.measurements.phases import PHASES
from lightning_gpuopt.timeline.observer import StepObserver
from lightning_gpuopt.timeline.slot_clock import EPOCH_SETUP, SlotClock
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

FORWARD, WAIT, TRANSFER, CALLBACKS, VALIDATION = (
    PHASES.index(phase) for phase in ("forward", "data_wait", "transfer", "callbacks", "validation")
)
LONG_NS = 500_000


class Noted(StepObserver):
    """Notes which event has come, and its figure."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if name in vars(StepObserver) and not name.startswith("_"):
            return lambda *figures: self.events.append((name, *figures) if figures else name)
        return super().__getattribute__(name)


class Marks:
    """What is open, for a tool that looks from outside."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[str] = []

    def range_push(self, name: str) -> None:
        self.open.append(name)
        self.seen.append(name)

    def range_pop(self) -> None:
        self.open.pop()


class Rig:
    """A clock of slots in the loop's own time, as after an epoch has begun."""

    def __init__(self, *, detailed: bool = True) -> None:
        self.now_ns = 1_000
        self.observer, self.marks = Noted(), Marks()
        self.clock = SlotClock(self.observer, self.marks, lambda: self.now_ns, detailed=detailed)
        self.clock.last_ns, self.clock.thread = self.now_ns, threading.get_ident()
        self.clock._current = self.clock.loop_slot

    @property
    def events(self) -> list[Any]:
        events, self.observer.events = self.observer.events, []
        return events

    @contextmanager
    def of(self, span: Span, ns: int = 0) -> Iterator[None]:
        """What a span times takes so long, beside what is inside."""
        with span:
            self.now_ns += ns
            yield

    def spent(self, slot: int) -> int:
        return self.clock._ns[slot]


class TestTime:
    def test_goes_to_the_innermost(self) -> None:
        rig = Rig()
        rig.now_ns += 1
        with rig.of(Span(rig.clock, FORWARD), 10):
            with rig.of(Span(rig.clock, CALLBACKS), 100):
                pass
            rig.now_ns += 20
        assert (rig.spent(FORWARD), rig.spent(CALLBACKS), rig.spent(rig.clock.loop_slot)) == (30, 100, 1)

    def test_is_kept_in_its_order_where_that_is_asked_for(self) -> None:
        rig = Rig()
        with rig.of(Span(rig.clock, FORWARD), 10):
            pass
        assert rig.clock._host_work == [rig.clock.loop_slot, 1_000, FORWARD, 1_010]
        plain = Rig(detailed=False)
        with plain.of(Span(plain.clock, FORWARD), 10):
            pass
        assert plain.clock._host_work is None
        assert plain.spent(FORWARD) == 10

    def test_of_a_span_that_is_closed_after_the_end_counts_nowhere(self) -> None:
        rig = Rig()
        span = Span(rig.clock, FORWARD)
        span.__enter__()
        rig.clock._open.clear()
        rig.now_ns += 50
        span.__exit__()
        assert rig.spent(FORWARD) == 0

    def test_a_tool_sees_by_name_what_is_open(self) -> None:
        rig = Rig()
        with rig.of(Span(rig.clock, FORWARD)), rig.of(Span(rig.clock, rig.clock._first_fetch_slot)):
            assert rig.marks.open == ["forward", "first_fetch"]
        assert rig.marks.open == []


class TestNames:
    def test_each_slot_has_one(self) -> None:
        clock = Rig().clock
        clock._hooks[clock._new_slot()] = "Slow.on_train_batch_end"
        names = [clock.name_of(slot) for slot in range(len(clock._ns))]
        assert names[: len(PHASES)] == list(PHASES)
        assert names[-1] == "Slow.on_train_batch_end"
        assert {clock.name_of(clock._broadcast_slot), clock.name_of(clock.loop_slot)} == {"signal_broadcast", "other"}
        assert clock.name_of(clock._first_fetch_slot) == "first_fetch"

    def test_set_ups_are_between_steps(self) -> None:
        clock = Rig().clock
        assert EPOCH_SETUP in clock.slots_between_steps
        assert clock._first_fetch_slot in clock.slots_between_steps
        assert FORWARD not in clock.slots_between_steps


class TestHooksUnderAGpusClock:
    def take(self, rig: Rig, span: HostSpan, ns: int) -> list[Any]:
        with rig.of(span, ns):
            pass
        return rig.events

    def test_both_ends_are_told_where_it_was_long_the_last_time_or_is_now(self) -> None:
        rig = Rig()
        span = HostSpan(rig.clock, CALLBACKS)
        both, late = ["host_work_begins", "host_work_ends"], ["host_work_ends"]
        taken = [self.take(rig, span, ns) for ns in (LONG_NS - 1, LONG_NS - 1, LONG_NS, LONG_NS, 0, 0)]
        assert taken == [both, [], late, both, both, []]

    def test_a_hook_around_the_copy_is_noted_however_short(self) -> None:
        rig = Rig()
        assert not rig.clock._batch_hook_ran
        self.take(rig, BatchHookSpan(rig.clock, TRANSFER), 0)
        assert rig.clock._batch_hook_ran


class TestFetches:
    def test_the_first_of_an_epoch_is_set_up_and_no_wait(self) -> None:
        rig = Rig()
        rig.clock._current = EPOCH_SETUP
        fetch = FetchSpan(rig.clock, WAIT)
        with rig.of(EpochSpan(rig.clock, EPOCH_SETUP), 5):
            assert rig.events == ["epoch_begins"]
            with rig.of(fetch, 1_000):
                pass
            assert rig.events == ["host_work_begins"]
            rig.now_ns += 7
            with rig.of(fetch, 2_000_000):
                pass
            assert rig.events == ["host_work_begins", "fetch_begins", ("fetch_ends", 0.002)]
            with rig.of(fetch, 3_000):
                pass
            assert rig.events == ["host_work_begins", "fetch_begins", ("fetch_ends", 3e-6)]
            with rig.of(fetch, 3_000):  # it was short the last time
                pass
            assert rig.events == ["fetch_begins", ("fetch_ends", 3e-6)]
        first, loop = rig.clock._first_fetch_slot, rig.clock.loop_slot
        assert (rig.spent(EPOCH_SETUP), rig.spent(first), rig.spent(WAIT), rig.spent(loop)) == (5, 1_000, 2_006_000, 7)
        assert rig.clock.epochs == 1

    def test_of_an_epoch_that_fetches_inside_the_step_the_step_stays_the_step(self) -> None:
        rig = Rig()
        with rig.of(EpochSpan(rig.clock, EPOCH_SETUP)), rig.of(Span(rig.clock, FORWARD)):
            with rig.of(FetchSpan(rig.clock, WAIT), 10):
                pass
            rig.now_ns += 3
        assert rig.spent(FORWARD) == 3

    def test_without_a_gpu_nobody_is_told_of_the_host(self) -> None:
        rig = Rig(detailed=False)
        fetch = FetchSpan(rig.clock, WAIT)
        for _ in range(2):
            with rig.of(fetch, 2 * LONG_NS):
                pass
        assert rig.events == ["fetch_begins", ("fetch_ends", 0.001)] * 2

    def test_without_queues_nobody_is_told_of_it(self) -> None:
        rig = Rig(detailed=False)
        rig.clock.fetches_watched = False
        with rig.of(FetchSpan(rig.clock, WAIT), 2 * LONG_NS):
            pass
        assert (rig.events, rig.spent(WAIT)) == ([], 2 * LONG_NS)


class TestTheCopy:
    def test_where_its_hook_is_not_seen_the_whole_is_the_copy(self) -> None:
        rig = Rig()
        rig.clock._copied_by_hook = False
        span = BatchSpan(rig.clock, TRANSFER)
        with rig.of(span):
            assert rig.events == ["batch_arrives"]
        assert rig.events == ["batch_copied"]

    def test_where_it_is_from_the_second_batch_on_the_hook_alone(self) -> None:
        rig = Rig()
        span, hook = BatchSpan(rig.clock, TRANSFER), TransferSpan(rig.clock, TRANSFER)
        told = []
        for _ in range(2):
            with rig.of(span), rig.of(hook):
                pass
            told.append(rig.events)
        assert told == [["batch_arrives", "batch_arrives", "batch_copied"], ["batch_arrives", "batch_copied"]]

    def test_hooks_around_it_may_have_queued_work_after_it(self) -> None:
        rig = Rig()
        span, hook = BatchSpan(rig.clock, TRANSFER), TransferSpan(rig.clock, TRANSFER)
        after = BatchHookSpan(rig.clock, TRANSFER)
        with rig.of(span):
            with rig.of(hook):
                pass
            with rig.of(after):
                pass
        assert rig.events[-1] == "batch_ready"

    def test_a_copy_ahead_is_no_affair_of_the_stream_that_is_watched(self) -> None:
        rig = Rig()
        with rig.of(CopyAheadSpan(rig.clock, TRANSFER), 9):
            assert rig.clock._spans is rig.clock._copy_ahead_spans
        assert rig.clock._spans is rig.clock._training_spans
        assert (rig.events, rig.spent(TRANSFER)) == ([], 9)


class TestValidation:
    def test_has_spans_of_its_own_and_its_set_up_ends_with_its_first_batch(self) -> None:
        rig = Rig()
        fetch = ValidationFetchSpan(rig.clock, VALIDATION)
        with rig.of(ValidationSpan(rig.clock, VALIDATION), 10):
            assert rig.events == ["validation_begins"]
            assert rig.clock._spans is rig.clock._validation_spans
            for _ in range(2):
                with rig.of(fetch, 100):
                    pass
        assert rig.events == ["validation_ends"]
        assert rig.clock._spans is rig.clock._training_spans
        assert (rig.clock._validation_setup_ns, rig.spent(VALIDATION)) == (110, 210)

    def test_without_a_batch_has_no_set_up(self) -> None:
        rig = Rig()
        with rig.of(ValidationSpan(rig.clock, VALIDATION), 10):
            pass
        with rig.of(ValidationFetchSpan(rig.clock, VALIDATION), 100):
            pass
        assert rig.clock._validation_setup_ns == 0


def test_an_observer_that_is_connected_later_is_called() -> None:
    rig = Rig()
    span = ObservedSpan(rig.clock, FORWARD, "compute_begins", "compute_ends")
    rig.clock._observer = later = Noted()
    with rig.of(span):
        assert later.events == ["compute_begins"]
    assert later.events == ["compute_begins", "compute_ends"]
    assert rig.events == []


class TestAFunction:
    def test_is_timed_and_keeps_its_name(self) -> None:
        rig = Rig()

        def step(first: int, *, second: int) -> int:
            """Adds."""
            rig.now_ns += 5
            return first + second

        timed = Timed(step, Span(rig.clock, FORWARD))
        assert (timed(1, second=2), rig.spent(FORWARD)) == (3, 5)
        assert (timed.__name__, timed.__doc__) == ("step", "Adds.")  # type: ignore[attr-defined]
        assert copy.copy(timed) is step

    def test_on_another_thread_is_only_called(self) -> None:
        rig = Rig()
        rig.clock.thread = 0
        assert Timed(lambda: 7, Span(rig.clock, FORWARD))() == 7
        assert rig.marks.seen == []

    def test_that_fails_is_closed(self) -> None:
        rig = Rig()

        def fails() -> None:
            rig.now_ns += 5
            raise ValueError("theirs")

        with pytest.raises(ValueError, match="theirs"):
            Timed(fails, Span(rig.clock, FORWARD))()
        assert (rig.spent(FORWARD), rig.clock._open, rig.marks.open) == (5, [], [])
