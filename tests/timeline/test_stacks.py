"""A sampler weighs each stack by the time since the sample before, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import pytest

from lightning_gpuopt.timeline import stacks
from lightning_gpuopt.timeline.frames import innermost_frames
from lightning_gpuopt.timeline.stacks import StackSampler, start_sampling
from tests.fork_server import run_code
from tests.helpers import wait_for


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Target:
    """A thread that does one thing, then another."""

    def __init__(self) -> None:
        self.frame: FrameType | None = None
        self.doing: str | None = "data_wait"

    def first(self) -> None:
        self.frame = sys._getframe()

    def second(self) -> None:
        self.frame = sys._getframe()

    def frames(self) -> Mapping[int, FrameType]:
        return {7: self.frame} if self.frame is not None else {}


def innermost(sampler: StackSampler, activity: str) -> list[tuple[str, float, int]]:
    return [
        (each.calls[0].name.rpartition(".")[2], round(each.seconds, 6), each.samples)
        for each in sampler.stacks(activity)
    ]


def test_each_sample_counts_as_long_as_it_came_after_the_one_before() -> None:
    clock, target = Clock(), Target()
    sampler = StackSampler(7, lambda: target.doing, frames=target.frames, clock=clock)
    for function, seconds in ((target.first, 0.005), (target.second, 0.1), (target.first, 0.005)):
        function()
        clock.now_s += seconds
        sampler.sample()
    # the call that held the lock for 100 ms was seen once
    assert innermost(sampler, "data_wait") == [("second", 0.1, 1), ("first", 0.01, 2)]
    assert sampler.samples("data_wait") == 3


def test_time_in_which_nothing_is_asked_for_counts_for_nobody() -> None:
    clock, target = Clock(), Target()
    sampler = StackSampler(7, lambda: target.doing, frames=target.frames, clock=clock)
    target.first()
    for doing, seconds in ((None, 5.0), ("logging", 0.01), (None, 3.0), ("data_wait", 0.02)):
        target.doing = doing
        clock.now_s += seconds
        sampler.sample()
    assert innermost(sampler, "logging") == [("first", 0.01, 1)]
    assert innermost(sampler, "data_wait") == [("first", 0.02, 1)]
    assert sampler.stacks("validation") == ()


def test_a_thread_that_is_gone_has_no_stacks() -> None:
    sampler = StackSampler(7, lambda: "data_wait", frames=dict, clock=Clock())
    sampler.sample()
    assert sampler.stacks("data_wait") == ()


@pytest.fixture
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


def test_the_switch_interval_is_short_while_it_samples(interval: float) -> None:
    sampler = start_sampling(threading.get_ident(), lambda: "data_wait")
    assert sampler is not None
    wait_for(lambda: sampler.samples("data_wait") > 0)
    assert sys.getswitchinterval() < interval
    sampler.stop()
    assert not sampler.running
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_switch_interval_that_the_program_has_set_meanwhile_stays(interval: float) -> None:
    sampler = start_sampling(threading.get_ident(), lambda: "data_wait")
    assert sampler is not None
    wait_for(lambda: sampler.samples("data_wait") > 0)
    sys.setswitchinterval(0.003)
    sampler.stop()
    assert sys.getswitchinterval() == pytest.approx(0.003)


def test_a_process_that_is_forked_meanwhile_has_the_usual_interval(interval: float) -> None:
    sampler = start_sampling(threading.get_ident(), lambda: "data_wait")
    assert sampler is not None
    wait_for(lambda: sys.getswitchinterval() < interval)
    process = os.fork()
    if not process:
        os._exit(0 if sys.getswitchinterval() == interval else 1)
    sampler.stop()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_while_there_is_nothing_to_sample_the_interval_is_the_usual_one(interval: float) -> None:
    doing: list[str | None] = ["data_wait"]
    sampler = start_sampling(threading.get_ident(), lambda: doing[0])
    assert sampler is not None
    wait_for(lambda: sys.getswitchinterval() < interval)
    doing[0] = None
    wait_for(lambda: sys.getswitchinterval() == pytest.approx(interval))
    doing[0] = "data_wait"
    wait_for(lambda: sys.getswitchinterval() < interval)
    sampler.stop()
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_it_ends_by_itself_when_it_is_over() -> None:
    sampler: StackSampler
    sampler = StackSampler(threading.get_ident(), lambda: "data_wait", lambda: sampler.samples("data_wait") >= 2)
    sampler.start()
    wait_for(lambda: not sampler.running)
    assert sampler.samples("data_wait") == 2


@pytest.mark.parametrize(
    ("costs_s", "interval_s"),
    [
        ([0.00001] * 15, stacks._INTERVAL_S),
        ([0.0005] * 15, 0.05),
        ([0.0005] * 14 + [2.0], 0.05),  # a garbage collection that fell into one
        ([2.0] * 2, stacks._INTERVAL_S),
        ([2.0] * 3, 1.0),
        ([2.0] * 3 + [0.0005] * 15, 0.05),
    ],
)
@pytest.mark.parametrize("idle", [0, 20])
def test_dear_samples_are_further_apart_by_what_they_usually_take(
    costs_s: list[float], interval_s: float, idle: int
) -> None:
    """However many there are between them in which there is nothing to sample, which cost next to nothing."""
    target, now_s, costs = Target(), 0.0, iter(costs_s)
    target.first()

    def activity() -> str | None:
        nonlocal now_s
        now_s += next(costs) if target.doing is not None else 0.000001
        return target.doing

    sampler = StackSampler(7, activity, frames=target.frames, cpu_clock=lambda: now_s)
    sampler._sampled = stacks._FIRST_SAMPLES
    for _ in costs_s:
        target.doing = "data_wait"
        sampler._look()
        target.doing = None
        for _ in range(idle):
            sampler._look()
    low, high = 0.6 * interval_s - 1e-9, 1.4 * interval_s + 1e-9
    assert all(low <= sampler._interval_s() <= high for _ in range(100))


def test_what_fails_on_its_thread_ends_it_and_nothing_else(interval: float) -> None:
    def fails() -> str:
        raise RuntimeError("not this one")

    sampler = start_sampling(threading.get_ident(), fails)
    assert sampler is not None
    wait_for(lambda: not sampler.running)
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_where_no_thread_can_be_started_there_is_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert start_sampling(threading.get_ident(), lambda: "data_wait") is None


def test_a_sample_keeps_nothing_alive() -> None:
    ready, go_on = threading.Event(), threading.Event()
    kept: list[weakref.ref[Any]] = []

    def work() -> None:
        held = Target()
        kept.append(weakref.ref(held))
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert thread.ident is not None
    thresholds = gc.get_threshold()
    gc.set_threshold(10**8)  # on, and yet nothing is collected
    try:
        StackSampler(thread.ident, lambda: "data_wait").sample()
        go_on.set()
        thread.join()
        assert kept[0]() is None
    finally:
        go_on.set()
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_it_was_after_a_sample_that_fails(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    seen = []

    def fail() -> Mapping[int, FrameType]:
        seen.append(gc.isenabled())
        raise MemoryError

    monkeypatch.setattr(sys, "_current_frames", fail)
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(MemoryError):
            innermost_frames()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
    assert seen == [is_on and sys.version_info[:2] != (3, 11)]


def test_where_frames_are_not_safe_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "FRAMES_ARE_SAFE", False)
    assert start_sampling(threading.get_ident(), lambda: "data_wait") is None


COLLECTED_MEANWHILE = """
import gc, sys, threading
from lightning_gpuopt.timeline.stacks import StackSampler

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):  # lets other threads run, until one has gone on, come and gone
        collected.set()
        done.wait(20)

def deep(levels, *others):
    if levels:
        return deep(levels - 1, *others)
    ready.set()
    collected.wait()

def sampled():
    deep(90)
    deep(60, *range(20))
    starting = threading.Thread(target=done.set)
    starting.start()
    starting.join()
    deep(30, *range(40))

for threshold in range(20, 150, 10):
    collected, done, ready, stop = (threading.Event() for _ in range(4))
    others = [threading.Thread(target=stop.wait) for _ in range(60)]
    target = threading.Thread(target=sampled)
    for each in (target, *others):
        each.start()
    ready.wait()
    gc.collect()
    gc.set_threshold(threshold)
    Garbage()
    StackSampler(target.ident, lambda: "data_wait").sample()
    gc.set_threshold(100_000)
    is_enabled = gc.isenabled()
    gc.collect()
    stop.set()
    for each in (target, *others):
        each.join()
print(is_enabled)
"""


def test_a_collection_of_garbage_while_it_samples_does_no_harm() -> None:
    ran = run_code(COLLECTED_MEANWHILE)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("True\n", "", 0)


def test_a_collector_that_is_switched_off_stays_so() -> None:
    ran = run_code("import gc; gc.disable()" + COLLECTED_MEANWHILE)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("False\n", "", 0)


class TestHelpers:
    """Threads that work for the sampled one."""

    @staticmethod
    def waits(ready: threading.Event) -> None:
        ready.wait()

    @pytest.fixture
    def threads(self) -> Iterator[dict[str, FrameType]]:
        """The frames of a thread that waits for an event, and of two that do something."""
        over, target = threading.Event(), Target()
        thread = threading.Thread(target=self.waits, args=(over,))
        thread.start()
        assert thread.ident is not None
        wait_for(lambda: sys._current_frames()[thread.ident or 0].f_code.co_filename == threading.__file__)
        frames = {"waits": sys._current_frames()[thread.ident]}
        for function in (target.first, target.second):
            function()
            assert target.frame is not None
            frames[function.__name__] = target.frame
        yield frames
        frames.clear()
        over.set()
        thread.join()

    def sampled(self, frames: dict[int, FrameType], helpers: list[int]) -> list[tuple[str, float, int]]:
        clock = Clock()
        sampler = StackSampler(7, lambda: "data_wait", frames=lambda: frames, clock=clock, helpers=lambda: helpers)
        clock.now_s += 1.0
        assert sampler.sample()
        return innermost(sampler, "data_wait")

    def test_while_it_waits_its_time_is_theirs(self, threads: dict[str, FrameType]) -> None:
        frames = {7: threads["waits"], 8: threads["first"], 9: threads["second"]}
        assert sorted(self.sampled(frames, [8, 9])) == [("first", 0.5, 1), ("second", 0.5, 1)]

    def test_those_that_wait_as_well_or_are_gone_have_none_of_it(self, threads: dict[str, FrameType]) -> None:
        frames = {7: threads["waits"], 8: threads["waits"], 9: threads["second"]}
        assert self.sampled(frames, [8, 9, 10]) == [("second", 1.0, 1)]
        assert [count for _, _, count in self.sampled(frames, [8])] == [1]  # then it is its own

    def test_while_it_works_its_time_is_its_own(self, threads: dict[str, FrameType]) -> None:
        assert self.sampled({7: threads["first"], 8: threads["second"]}, [8]) == [("first", 1.0, 1)]
