"""The GPU clock, on events that are stamped as CUDA stamps them: when the stream gets there."""

from __future__ import annotations

import pytest

from lightning_gpuopt.timeline import gpu_clock
from lightning_gpuopt.timeline.gpu_clock import GpuClock, GpuTimes


class Stream:
    """A host and a GPU stream, in milliseconds: the host issues, the GPU works off in order."""

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.gpu_busy_until_ms = 0.0
        self.events_made = 0

    def host(self, ms: float) -> None:
        self.host_ms += ms

    def kernel(self, ms: float) -> None:
        self.gpu_busy_until_ms = max(self.gpu_busy_until_ms, self.host_ms) + ms

    def event(self) -> FakeEvent:
        self.events_made += 1
        return FakeEvent(self)


class FakeEvent:
    """Has record, query and elapsed_time, and no way to wait."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = max(self.stream.gpu_busy_until_ms, self.stream.host_ms)

    def query(self) -> bool:
        assert self.at_ms is not None
        return self.at_ms <= self.stream.host_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query(), "CUDA refuses the time of an event that has not passed"
        assert end.query(), "CUDA refuses the time of an event that has not passed"
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def clock(stream: Stream) -> GpuClock:
    return GpuClock(stream.event)


def step(stream: Stream, clock: GpuClock, *, wait: float, copy: float, compute: float, issue: float = 1.0) -> None:
    stream.host(wait)
    clock.batch_arrives()
    stream.kernel(copy)
    clock.batch_copied()
    clock.compute_begins()
    stream.host(issue)
    stream.kernel(compute)
    clock.compute_ends()
    clock.read()


def settle(stream: Stream, clock: GpuClock) -> GpuTimes:
    stream.host(1e6)
    clock.read(most_steps=10_000)
    return clock.times()


def test_a_gpu_that_waits_for_the_host_is_idle_that_long(stream: Stream, clock: GpuClock) -> None:
    for _ in range(10):
        step(stream, clock, wait=30, copy=0, compute=5)
    times = settle(stream, clock)
    # the GPU ends 5 ms after the host has issued the work, and the next batch comes 30 ms after that
    assert times == GpuTimes(steps=10, copy_s=0.0, compute_s=pytest.approx(0.06), gaps=9, idle_s=pytest.approx(0.225))


def test_a_host_that_runs_ahead_leaves_no_idle_gap(stream: Stream, clock: GpuClock) -> None:
    for _ in range(10):
        step(stream, clock, wait=10, copy=2, compute=50)
    times = settle(stream, clock)
    assert times.idle_s == 0.0
    assert times.gaps == 9
    assert times.copy_s == pytest.approx(10 * 0.002)
    assert times.compute_s == pytest.approx(10 * 0.05)


def test_nothing_is_read_before_the_gpu_is_there(stream: Stream, clock: GpuClock) -> None:
    step(stream, clock, wait=0, copy=0, compute=1000)
    step(stream, clock, wait=0, copy=0, compute=1000)
    assert clock.times() == GpuTimes()
    stream.host(1500)
    clock.read()
    assert clock.times().steps == 1


def test_what_interrupts_the_steps_is_no_gap(stream: Stream, clock: GpuClock) -> None:
    for _ in range(4):
        step(stream, clock, wait=1, copy=0, compute=1)
        clock.interrupt()
        stream.host(500)
    times = settle(stream, clock)
    assert (times.steps, times.gaps, times.idle_s) == (4, 0, 0.0)


def test_a_batch_whose_step_never_ran_is_forgotten(stream: Stream, clock: GpuClock) -> None:
    clock.compute_ends()
    clock.batch_arrives()
    stream.host(5)
    clock.batch_arrives()
    clock.compute_begins()
    clock.compute_ends()
    assert settle(stream, clock).steps == 1


def test_events_are_used_again(stream: Stream, clock: GpuClock) -> None:
    for _ in range(1000):
        step(stream, clock, wait=10, copy=1, compute=1)
    assert stream.events_made <= 13


def test_a_host_far_ahead_gets_no_more_events_for_a_while(
    stream: Stream, clock: GpuClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_clock, "_MOST_UNREAD_STEPS", 8)
    for _ in range(100):
        step(stream, clock, wait=0, copy=0, compute=1000, issue=0)
    assert stream.events_made == 32
    times = settle(stream, clock)
    assert (times.steps, times.gaps) == (8, 7)
    for _ in range(3):
        step(stream, clock, wait=10, copy=0, compute=1)
    later = settle(stream, clock) - times
    assert (later.steps, later.gaps) == (3, 2)
