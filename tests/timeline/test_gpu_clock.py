"""The GPU clock under a real timeline, on events that are stamped as CUDA stamps them: when the stream gets there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.timeline import gpu_clock
from lightning_gpuopt.timeline.gpu_clock import GpuClock
from lightning_gpuopt.timeline.observer import StepObserver
from lightning_gpuopt.timeline.phases import Timeline


class FakeEvent:
    """Has record, query and elapsed_time, and no way to wait."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = max(self.rig.busy_until_ms, self.rig.host_ms)

    def query(self) -> bool:
        assert self.at_ms is not None
        return self.at_ms <= self.rig.host_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query(), "CUDA refuses the time of an event that has not passed"
        assert end.query(), "CUDA refuses the time of an event that has not passed"
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


class Rig:
    """A host and a GPU stream, in milliseconds: the host issues, the GPU works off in order."""

    def __init__(self, *, forward: bool = False) -> None:
        self.host_ms = 0.0
        self.busy_until_ms = 0.0
        self.events_made = 0
        self.observer = StepObserver()
        self.timeline = Timeline(
            callback_names={"Bar": "Bar", "Ema": "Ema"},
            observer=self.observer,
            detailed=True,
            clock_ns=lambda: round(self.host_ms * 1e6),
        )
        self.clock = GpuClock(self.event, self.timeline, forward=forward)
        for name in (each for each in vars(StepObserver) if not each.startswith("_")):
            if getattr(type(self.clock), name) is not getattr(StepObserver, name):
                setattr(self.observer, name, getattr(self.clock, name))
        self.timeline.start()

    def event(self) -> FakeEvent:
        self.events_made += 1
        return FakeEvent(self)

    def host(self, ms: float) -> None:
        self.host_ms += ms

    def kernel(self, ms: float) -> None:
        self.busy_until_ms = max(self.busy_until_ms, self.host_ms) + ms

    def sync(self) -> None:
        self.host_ms = max(self.host_ms, self.busy_until_ms)

    def does(self, action: str, *work: Callable[[], None]) -> None:
        with self.timeline.span(action):
            for each in work:
                each()

    def step(
        self,
        *,
        fetch: float = 0.0,
        copy: float = 0.0,
        compute: float = 0.0,
        issue: float = 0.0,
        before: Callable[[], None] | None = None,
        after_copy: Callable[[], None] | None = None,
        hook: Callable[[], None] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.does("[_TrainingEpochLoop].train_dataloader_next", lambda: self.host(fetch))
        if before is not None:
            self.does("[LightningModule]Net.on_before_batch_transfer", before)
        with self.timeline.span("[Strategy]S.batch_to_device"):
            self.does("[LightningModule]Net.transfer_batch_to_device", lambda: self.kernel(copy))
            if after_copy is not None:
                self.does("[LightningModule]Net.on_after_batch_transfer", after_copy)
        if begin is not None:
            self.does("[Callback]Bar.on_train_batch_start", begin)
        with self.timeline.span("run_training_batch"):
            with self.timeline.span("[Strategy]S.training_step"):
                self.host(issue / 2)
                self.kernel(compute / 2)
            self.host(issue / 2)
            self.kernel(compute / 2)
        if hook is not None:
            self.does("[Callback]Bar.on_train_batch_end", hook)
        self.clock.read()

    def finish(self) -> GpuTimes:
        self.host(1e6)
        for _ in range(1000):
            self.clock.read()
        return self.clock.times()


def some(idle: dict[str, float]) -> dict[str, float]:
    """What is more than nothing, in milliseconds."""
    return {name: round(seconds * 1e3, 6) for name, seconds in idle.items() if seconds > 1e-9}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_pause_counts_as_far_as_the_gpu_may_have_been_idle(rig: Rig) -> None:
    """A host that is stopped for 20 ms in every second step, after it has begun to issue 10 ms of work."""

    def stop() -> None:
        begun_ns = round(rig.host_ms * 1e6)
        rig.host(20)
        rig.timeline.pause("garbage_collection", begun_ns, round(rig.host_ms * 1e6))

    for index in range(10):
        rig.does("[_TrainingEpochLoop].train_dataloader_next", rig.sync)
        with rig.timeline.span("run_training_batch"):
            rig.kernel(5)
            if index % 2:
                stop()
            rig.kernel(5)
        rig.clock.read()
    times = rig.finish()
    assert times.paused == {"garbage_collection": pytest.approx(5 * 0.02)}
    assert (times.paused_steps, times.paused_compute_s) == (5, pytest.approx(5 * 0.025))
    assert times.compute_s == pytest.approx(5 * 0.025 + 5 * 0.01)


def test_a_pause_between_steps_has_the_idle_time_in_it(rig: Rig) -> None:
    def stop() -> None:
        begun_ns = round(rig.host_ms * 1e6)
        rig.host(30)
        rig.timeline.pause("garbage_collection", begun_ns, round(rig.host_ms * 1e6))

    for _ in range(10):
        rig.step(compute=10, hook=stop)
    assert some(rig.finish().idle) == {"garbage_collection": pytest.approx(200.0)}


def test_a_gpu_that_waits_for_the_loader_is_idle_at_the_end_of_the_fetch(rig: Rig) -> None:
    for _ in range(10):
        rig.step(fetch=30, compute=10)
    times = rig.finish()
    # the GPU works for 10 ms of the 30 that a fetch takes; the first fetch is not known to be in an epoch
    assert (times.steps, times.compute_s, times.idle_s) == (10, pytest.approx(0.1), pytest.approx(0.21))
    assert some(times.idle) == {"data_wait": 210.0}


def test_a_host_that_runs_ahead_leaves_no_idle_time(rig: Rig) -> None:
    for _ in range(10):
        rig.step(fetch=10, copy=2, compute=50, issue=1)
    times = rig.finish()
    assert some(times.idle) == {"data_wait": 10.0} or some(times.idle) == {}  # before the first step
    assert times.copy_s == pytest.approx(10 * 0.002)
    assert times.compute_s == pytest.approx(10 * 0.05, abs=0.001)
    assert times.compute_bound_s == pytest.approx(0.0, abs=0.0011)


def test_idle_time_is_the_end_of_what_the_host_did(rig: Rig) -> None:
    for _ in range(10):
        rig.step(fetch=20, compute=30, before=lambda: rig.host(4), hook=lambda: rig.host(16))
    # 40 ms of host work behind 30 ms on the GPU: the last 10 ms of it are the hook before the copy, and 6 of the fetch
    assert some(rig.finish().idle) == {"Net.on_before_batch_transfer": 40.0, "data_wait": pytest.approx(54.0 + 20.0)}


def test_a_wait_for_the_gpu_costs_nothing_and_is_named_as_what_exposed_the_rest(rig: Rig) -> None:
    for _ in range(10):
        rig.step(fetch=10, compute=50, hook=rig.sync)
    times = rig.finish()
    assert some(times.idle) == {"data_wait": 100.0}
    assert some(times.exposed_by) == {"Bar.on_train_batch_end": 90.0}  # the first fetch follows nothing


def test_a_slow_hook_is_idle_time_and_no_wait(rig: Rig) -> None:
    for _ in range(10):
        rig.step(compute=20, hook=lambda: rig.host(50))
    times = rig.finish()
    assert some(times.idle) == {"Bar.on_train_batch_end": 300.0}
    assert times.exposed_by == {}


def test_what_hooks_queue_is_work(rig: Rig) -> None:
    def ema() -> None:
        rig.host(0.1)
        rig.kernel(10)

    for _ in range(10):
        rig.step(compute=20, hook=lambda: (rig.sync(), ema()))  # type: ignore[func-returns-value]
    times = rig.finish()
    assert times.queued_s == pytest.approx(0.1, rel=0.01)
    assert times.idle_s == pytest.approx(0.001, abs=0.001)  # until the hook's kernel is issued


def test_work_queued_before_a_slow_fetch_is_not_taken_for_idle_time(rig: Rig) -> None:
    for _ in range(10):
        rig.step(fetch=5, compute=20, hook=lambda: (rig.sync(), rig.kernel(10)))  # type: ignore[func-returns-value]
    times = rig.finish()
    # the fetch lies behind the 10 ms of the hook's kernel, except for the first
    assert times.idle["data_wait"] == pytest.approx(0.005)
    assert times.idle_s == pytest.approx(0.005, abs=0.001)
    assert times.queued_s == pytest.approx(0.1, rel=0.01)


def test_augmentation_on_the_gpu_is_work_and_no_copy(rig: Rig) -> None:
    for _ in range(10):
        rig.step(copy=1, compute=20, after_copy=lambda: rig.kernel(5), hook=rig.sync)
    times = rig.finish()
    assert times.copy_s == pytest.approx(0.01)
    assert times.queued_s == pytest.approx(0.05)
    assert times.idle_s == 0.0


def test_a_slow_hook_after_the_copy_and_one_before_the_step_have_their_names(rig: Rig) -> None:
    for _ in range(10):
        rig.step(compute=5, after_copy=lambda: rig.host(8), begin=lambda: rig.host(40))
    idle = some(rig.finish().idle)
    # behind the 5 ms of the step before
    assert idle == {"Net.on_after_batch_transfer": pytest.approx(8 + 9 * 3), "Bar.on_train_batch_start": 400.0}


def test_the_inside_of_a_step_can_be_idle_only_until_all_is_issued(rig: Rig) -> None:
    for _ in range(10):
        rig.step(compute=4, issue=20, hook=rig.sync)
    times = rig.finish()
    assert times.compute_bound_s == pytest.approx(0.2)
    assert times.compute_s == pytest.approx(0.22)  # the last two ms of each step are left when the host is done


def test_lightnings_broadcast_is_a_wait_and_exposes_what_comes_after_it(rig: Rig) -> None:
    broadcast = rig.timeline.timed(rig.sync, "signal_broadcast")
    for _ in range(10):
        broadcast()
        rig.step(fetch=10, compute=50)
    times = rig.finish()
    assert some(times.idle) == {"data_wait": 100.0}
    assert some(times.exposed_by) == {"signal_broadcast": pytest.approx(100.0)}
    assert times.wait_s == pytest.approx(0.0)


def test_validation_is_taken_out_and_a_slow_hook_in_it_is_not(rig: Rig) -> None:
    def validate() -> None:
        rig.kernel(100)
        rig.sync()
        rig.does("[Callback]Bar.on_validation_end", lambda: rig.host(30))

    validation = rig.timeline.validating(validate)
    for _ in range(4):
        rig.step(compute=10, hook=rig.sync)
        validation()
    times = rig.finish()
    assert times.validation_s == pytest.approx(0.4)
    assert some(times.idle) == {"Bar.on_validation_end": 120.0}


def test_a_checkpoint_and_the_beginning_of_an_epoch_are_measured(rig: Rig) -> None:
    for _ in range(3):
        with rig.timeline.span("run_training_epoch"):
            rig.host(7)
            rig.step(fetch=50, compute=10)
            rig.step(compute=10, hook=rig.sync)
            rig.does("save_checkpoint", lambda: rig.host(40))
    idle = some(rig.finish().idle)
    assert idle["first_fetch"] == 150.0
    assert idle["checkpoint"] == pytest.approx(80.0, abs=41)
    assert idle["epoch_setup"] == pytest.approx(21.0, abs=7)


def test_a_strategy_that_copies_without_the_hook_has_its_copy_all_the_same(rig: Rig) -> None:
    for _ in range(10):
        rig.does("[_TrainingEpochLoop].train_dataloader_next")
        rig.does("[Strategy]S.batch_to_device", lambda: rig.kernel(5))
        rig.does("run_training_batch", lambda: rig.kernel(20))
        rig.clock.read()
    times = rig.finish()
    assert (times.copy_s, times.compute_s) == (pytest.approx(0.05), pytest.approx(0.2))
    assert times.queued_s == pytest.approx(0.0)


def test_the_forward_is_timed_where_it_is_asked_for() -> None:
    rig = Rig(forward=True)
    for _ in range(10):
        rig.step(compute=20, hook=rig.sync)
    times = rig.finish()
    assert (times.steps, times.forward_s, times.compute_s) == (10, pytest.approx(0.1), pytest.approx(0.2))
    assert Rig().clock.times().forward_s == 0.0


def test_the_spans_of_steps_are_given_on_the_hosts_clock(rig: Rig) -> None:
    rig.clock.spans = []
    rig.step(compute=20, issue=2)
    rig.step(compute=20, issue=2)
    rig.finish()
    first, second = rig.clock.spans
    assert (first.begun_s, first.ended_s) == (pytest.approx(0.0), pytest.approx(0.021, abs=5e-5))
    assert (second.issue_begun_s, second.issue_ended_s) == (pytest.approx(0.002), pytest.approx(0.004))
    assert (second.begun_s, second.ended_s) == (pytest.approx(0.021, abs=5e-5), pytest.approx(0.041, abs=5e-5))


def test_nothing_is_read_before_the_gpu_is_there(rig: Rig) -> None:
    rig.step(compute=1000)
    rig.step(compute=1000)
    assert rig.clock.times().steps == 0
    rig.host(1500)
    rig.clock.read()
    assert rig.clock.times().steps == 1


def test_a_snapshot_is_of_the_end_of_a_step_however_late_it_is_read(rig: Rig) -> None:
    rig.clock.take_snapshot(2)
    for _ in range(4):
        rig.step(fetch=10, compute=30)
    assert rig.clock.snapshot is None
    rig.finish()
    assert rig.clock.snapshot is not None
    assert (rig.clock.snapshot.steps, rig.clock.snapshot.compute_s) == (2, pytest.approx(0.06))
    rig.clock.take_snapshot(3)
    assert rig.clock.snapshot.steps == 4  # it has done them already


def test_events_are_used_again(rig: Rig) -> None:
    for _ in range(1000):
        rig.step(fetch=10, copy=1, compute=1)
    assert rig.events_made <= 24


def test_a_host_far_ahead_gets_no_more_events_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clock, "_MAX_UNREAD", 32)
    for _ in range(100):
        rig.step(compute=1000)
    assert rig.events_made <= 33
    times = rig.finish()
    assert 3 <= times.steps <= 8
    for _ in range(4):
        rig.step(fetch=10, compute=1)
    later = rig.finish() - times
    assert later.steps == 4
    assert later.idle["data_wait"] == pytest.approx(0.028, abs=0.011)


def test_a_snapshot_stays_as_it_is_where_some_steps_were_not_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clock, "_MAX_UNREAD", 32)
    for _ in range(20):
        rig.step(compute=1000)
    rig.clock.take_snapshot(20)
    rig.finish()
    snapshot = rig.clock.snapshot
    assert snapshot is not None
    assert snapshot.steps < 20
    for _ in range(20):  # it comes to 20 steps later
        rig.step(fetch=10, compute=1)
        rig.finish()
    assert rig.clock.times().steps > 20
    assert rig.clock.snapshot is snapshot


@pytest.mark.parametrize("ppm", [30, -30, 300, -300])
def test_clocks_that_drift_apart_are_aligned_again(rig: Rig, ppm: int) -> None:
    # over 1000 s 300 ppm are 300 ms, far more than the idle time of a step
    class Fast(FakeEvent):
        def elapsed_time(self, end: FakeEvent) -> float:
            return super().elapsed_time(end) * (1 + ppm * 1e-6)

    rig.event = lambda: Fast(rig)  # type: ignore[method-assign]
    rig.clock._new_event = rig.event
    for _ in range(1000):
        rig.step(fetch=10, compute=990, hook=rig.sync)
    times = rig.finish()
    assert times.idle["data_wait"] == pytest.approx(10.0, rel=0.02)


def test_a_hook_that_waits_for_its_own_kernels_is_work_where_its_wait_was_seen(rig: Rig) -> None:
    def metric(*, seen: bool) -> None:
        rig.kernel(8)
        rig.host(0.1)
        if seen:
            rig.clock.host_waits(rig.clock.clock_ns())
        rig.sync()
        rig.host(2)

    for index in range(20):
        rig.step(compute=10, issue=1, hook=lambda seen=index in (5, 6): metric(seen=seen))  # type: ignore[misc]
        rig.sync()
    times = rig.finish()
    name = "Bar.on_train_batch_end"
    # the GPU still has the step's work to do when the hook begins: without the wait seen it is idle from then on
    assert times.looked_at[name] == pytest.approx(2 * 0.010, rel=0.01)
    assert times.looked_idle[name] == pytest.approx(2 * 0.002, rel=0.01)
    assert times.idle[name] == pytest.approx(18 * 0.010 + 2 * 0.002, rel=0.01)


@pytest.mark.parametrize("kernels", [0, 8], ids=["of the step", "of its own"])
def test_a_wait_that_is_heard_of_when_it_is_over_counts_from_its_beginning(rig: Rig, kernels: float) -> None:
    def metric() -> None:
        if kernels:
            rig.kernel(kernels)
        rig.host(0.1)
        began_ns = rig.clock.clock_ns()
        rig.sync()
        rig.clock.host_waits(began_ns)
        rig.host(2)

    for _ in range(20):
        rig.step(compute=10, issue=1, hook=metric)
        rig.sync()
    times = rig.finish()
    assert times.idle["Bar.on_train_batch_end"] == pytest.approx(20 * 0.002, rel=0.01)


def test_what_follows_a_hook_that_waits_is_exposed_by_it(rig: Rig) -> None:
    def metric() -> None:
        rig.kernel(1)
        rig.clock.host_waits(rig.clock.clock_ns())
        rig.sync()

    for _ in range(10):
        rig.step(fetch=5, compute=10, issue=1, hook=metric)
    assert rig.finish().exposed_by["Bar.on_train_batch_end"] == pytest.approx(9 * 0.005, rel=0.2)


def test_a_wait_inside_a_step_is_no_part_of_a_hook(rig: Rig) -> None:
    with rig.timeline.span("run_training_batch"):
        rig.kernel(5)
        rig.clock.host_waits(rig.clock.clock_ns())
        rig.sync()
    assert rig.finish().looked_at == {}


def test_work_that_a_rare_hook_queues_is_its_own_however_short_it_is(rig: Rig) -> None:
    for _ in range(4):
        for _ in range(5):
            rig.step(compute=10, issue=1)
        rig.does("[Callback]Ema.on_train_epoch_end", lambda: rig.kernel(100))
    queued = rig.finish().queued
    assert queued["Ema.on_train_epoch_end"] == pytest.approx(0.4, rel=0.01)


def test_a_hook_that_waits_a_thousand_times_does_not_fill_the_memory(rig: Rig) -> None:
    def reads() -> None:
        for _ in range(1000):
            rig.clock.host_waits(rig.clock.clock_ns())

    rig.step(compute=10, issue=1, hook=reads)
    assert rig.clock.unread < 40
    rig.step(compute=10, issue=1, hook=reads)
    rig.finish()
    assert rig.events_made < 80
