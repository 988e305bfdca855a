"""A batch's way to the device, on the CPU, where its parts can be seen: what is issued in which order, and how."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from lightning_gpuopt.prefetch.stream import Streams
from lightning_gpuopt.prefetch.transfer import FasterOfTwo, TransferPipeline, UserCodeError

CPU = torch.device("cpu")


class Event:
    """A point in a stream, by its number among all that were made."""

    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 2.0


class Noted(Streams):
    """Notes what each stream is given: ``"side: record 1"``, ``"compute waits for 1"``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events = 0
        self.current = "compute"
        self.kept: list[torch.Tensor] = []

    def on_side(self) -> AbstractContextManager[Any]:
        @contextmanager
        def side() -> Any:
            before, self.current = self.current, "side"
            try:
                yield
            finally:
                self.current = before

        return side()

    def new_event(self, *, timing: bool = False) -> Any:
        self.events += 1
        return Event(self.events)

    def record(self, event: Any) -> None:
        self.calls.append(f"{self.current}: record {event.number}")

    def side_waits(self, event: Any) -> None:
        self.calls.append(f"side waits for {event.number}")

    def compute_waits(self, event: Any) -> None:
        self.calls.append(f"compute waits for {event.number}")

    def keep_for_compute(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)

    def taken(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def pipeline(own: Any = None, depth: int = 1) -> tuple[TransferPipeline, Noted]:
    streams = Noted()
    made = TransferPipeline(streams, CPU, depth, own)
    # 1 is the pipeline's own; a batch has 2 to 5 (begins, ends, wait begins, wait ends)
    assert streams.events == 1
    return made, streams


class Point(NamedTuple):
    x: torch.Tensor
    name: str


class Movable:
    """Moves itself."""

    def __init__(self, value: torch.Tensor, error: Exception | None = None) -> None:
        self.value, self.error, self.moved = value, error, False

    def to(self, device: torch.device) -> Any:
        if self.error is not None:
            raise self.error
        self.moved = True
        return self


class TestAPlainBatch:
    @pytest.mark.parametrize(
        "batch",
        [
            torch.arange(4.0),
            {"x": torch.arange(4.0), "y": torch.arange(3)},
            [torch.arange(4.0), torch.arange(3)],
            (torch.arange(4.0), torch.arange(3)),
            {"x": [torch.arange(4.0), {"y": torch.arange(3)}], "name": "a"},
            Point(torch.arange(4.0), "a"),
        ],
    )
    def test_comes_as_it_was_in_memory_of_its_own(self, batch: Any) -> None:
        made, _ = pipeline()
        moved = made.deliver(made.stage(batch, 0))
        assert type(moved) is type(batch)
        assert str(moved) == str(batch)
        first = batch if isinstance(batch, torch.Tensor) else next(iter(getattr(batch, "values", lambda: batch)()))
        ours = moved if isinstance(moved, torch.Tensor) else next(iter(getattr(moved, "values", lambda: moved)()))
        if isinstance(first, torch.Tensor):
            assert first.data_ptr() != ours.data_ptr()

    def test_is_copied_on_the_side_and_waited_for_when_its_turn_comes(self) -> None:
        made, streams = pipeline()
        staged = made.stage([torch.ones(4)], 0)
        begins, ends = staged.events.begins.number, staged.events.ends.number
        calls = streams.taken()
        assert [each for each in calls if each.startswith("side: record")] == [
            f"side: record {begins}",
            f"side: record {ends}",
        ]
        assert not any(each.startswith("compute waits") for each in calls)
        made.deliver(staged)
        wait_begins, wait_ends = staged.events.wait_begins.number, staged.events.wait_ends.number
        assert streams.taken() == [
            f"compute: record {wait_begins}",
            f"compute waits for {ends}",
            f"compute: record {wait_ends}",
        ]

    def test_its_bytes_and_times_are_counted(self) -> None:
        made, _ = pipeline()
        for training in (True, True, False):
            staged = made.stage([torch.ones(4), torch.ones(2, dtype=torch.uint8)], 0)
            assert (staged.nbytes, staged.pageable_bytes) == (18, 0)
            made.deliver(staged, training=training)
            made.release()
        done = made.times.sums(training=True)
        assert (done.copies, done.copy_s, done.exposed_s) == (2, 0.004, 0.004)
        assert made.times.sums(training=False).copies == 1

    def test_memory_is_used_again_once_its_steps_are_issued(self) -> None:
        made, _ = pipeline(depth=1)
        places = []
        for _ in range(4):
            moved = made.deliver(made.stage([torch.ones(4)], 0))
            places.append(moved[0].data_ptr())
            del moved
            made.release()
        assert len(set(places)) == 2

    def test_before_that_it_is_not(self) -> None:
        made, _ = pipeline(depth=1)
        places = set()
        for _ in range(3):
            moved = made.deliver(made.stage([torch.ones(4)], 0))
            places.add(moved[0].data_ptr())
            del moved
        assert len(places) == 3

    def test_a_batch_whose_turn_does_not_come_gives_its_memory_back_when_it_is_copied(self) -> None:
        made, streams = pipeline(depth=0)
        staged = made.stage([torch.ones(4)], 0)
        place = staged.moved[0].data_ptr()
        streams.taken()
        made.drop(staged)
        assert streams.taken() == [f"compute waits for {staged.events.ends.number}"]
        del staged
        made.release()
        assert made.stage([torch.ones(4)], 0).moved[0].data_ptr() == place


class TestABatchsOwnWay:
    def test_what_moves_itself_does_so_on_the_side_and_outlives_its_use(self) -> None:
        made, streams = pipeline()
        batch = [torch.ones(4), Movable(torch.ones(3))]
        assert not made.has_own_ways
        staged = made.stage(batch, 0)
        assert (staged.moved[1] is batch[1], batch[1].moved, made.has_own_ways) == (True, True, True)
        assert streams.kept == [batch[1].value]
        assert staged.nbytes == 28
        calls = streams.taken()
        begins, ends = (f"side: record {each.number}" for each in staged.events[:2])
        assert (calls.count(begins), calls.count(ends), calls.index(begins) < calls.index(ends)) == (1, 1, True)

    def test_a_to_that_gives_nothing_has_moved_it_in_place(self) -> None:
        class InPlace(Movable):
            def to(self, device: torch.device) -> Any:
                super().to(device)

        made, _ = pipeline()
        batch = [InPlace(torch.ones(3))]
        assert made.stage(batch, 0).moved == batch

    def test_after_what_cannot_be_looked_into_the_next_copy_waits_for_all_before_it(self) -> None:
        class Hides:
            def to(self, device: torch.device) -> Any:
                return self

        made, streams = pipeline()
        made.stage([Hides()], 0)
        streams.taken()
        made.stage([torch.ones(4)], 0)
        assert streams.taken()[:2] == ["compute: record 1", "side waits for 1"]

    def test_its_error_is_the_users(self) -> None:
        made, streams = pipeline()
        fault = ValueError("theirs")
        with pytest.raises(UserCodeError, match="theirs") as raised:
            made.stage([torch.ones(4), Movable(torch.ones(3), fault)], 0)
        assert raised.value.cause is fault
        assert streams.current == "compute"
        assert [each.partition(" ")[0] for each in streams.taken()[-2:]] == ["side:", "compute"]


class TestTheUsersTransfer:
    def test_is_called_as_it_is(self) -> None:
        asked: list[Any] = []

        def own(batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            asked.append((batch, device, dataloader_idx, streams.current))
            return [batch[0] + 1]

        made, streams = pipeline(own)
        batch = [torch.zeros(4)]
        staged = made.stage(batch, 3)
        assert asked == [(batch, CPU, 3, "side")]
        assert made.deliver(staged)[0].tolist() == [1.0] * 4
        assert (made.has_own_ways, staged.nbytes, len(streams.kept)) == (True, 16, 1)

    def test_its_error_ends_training_as_it_would_have(self) -> None:
        def own(*args: Any) -> Any:
            raise KeyError("gone")

        made, streams = pipeline(own)
        with pytest.raises(UserCodeError) as raised:
            made.stage([torch.zeros(4)], 0)
        assert isinstance(raised.value.cause, KeyError)
        assert streams.current == "compute"


class TestPinningOnAThread:
    """Simulated: the thread's work is a Future of the test's."""

    def test_the_copy_is_issued_when_it_is_done(self) -> None:
        made, streams = pipeline()
        staged = made.stage([torch.ones(4)], 0)
        streams.taken()
        staged.pinning = pinning = Future[None]()
        assert not made.advance(staged)
        assert streams.taken() == []
        pinning.set_result(None)
        assert made.advance(staged)
        assert streams.taken() == [
            f"side: record {staged.events.begins.number}",
            f"side: record {staged.events.ends.number}",
        ]
        assert made.advance(staged)  # once
        assert streams.taken() == []

    def test_a_batch_whose_turn_has_come_waits_for_it(self) -> None:
        made, _ = pipeline()
        staged = made.stage([torch.ones(4)], 0)
        staged.pinning = pinning = Future[None]()
        pinning.set_exception(MemoryError("no room"))
        with pytest.raises(MemoryError, match="no room"):
            made.deliver(staged)

    def test_one_that_is_dropped_is_not_pinned_any_more(self) -> None:
        made, streams = pipeline()
        staged = made.stage([torch.ones(4)], 0)
        streams.taken()
        staged.pinning = pinning = Future[None]()
        made.drop(staged)
        assert pinning.cancelled()
        assert streams.taken() == []


def test_a_pageable_batch_is_timed_by_the_way_that_it_has_gone() -> None:
    made, _ = pipeline()
    for _ in range(10):
        staged = made.stage([torch.ones(4)], 0)
        staged.way = made._pinning.way
        staged.host_s = {"plain": 2.0, "thread": 1.0}[staged.way]
        made.deliver(staged)
    assert made._pinning.way == "thread"


def test_two_ways_are_timed_without_their_first_batch() -> None:
    faster = FasterOfTwo("plain", "other")
    for number in range(4):
        faster.took("plain", 2.0)
        faster.took("other", 9.0 if not number else 1.0)
    assert faster.way == "other"
    faster.took("plain", 0.0)
    assert faster.way == "other"


def test_the_faster_of_two_ways_stays() -> None:
    faster = FasterOfTwo("plain", "other")
    ways = []
    for _ in range(10):
        ways.append(faster.way)
        faster.took(faster.way, {"plain": 2.0, "other": 1.0}[faster.way])
    assert ways == ["plain", "other"] * 4 + ["other"] * 2
