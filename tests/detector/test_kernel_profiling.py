"""When a close look at the steps begins, and what is said of it: in made-up GPU times, without torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from lightning_gpuopt.detector import kernel_profiling
from lightning_gpuopt.detector.kernel_profiling import KernelProfiling, Profile
from lightning_gpuopt.measurements.gpu import DeviceState, GpuTimes, StepLook, SyncSighting
from lightning_gpuopt.timeline.kernel_trace import CannotLookError, ProfilerLook

# A step of 0.1 s. Either the host runs ahead of the GPU, or the GPU could be idle for as long as a step takes.
AHEAD = GpuTimes(steps=100, compute_s=10.0, compute_bound_s=0.2)
BEHIND = GpuTimes(steps=100, compute_s=10.0, compute_bound_s=10.0)
IDLE = DeviceState(utilization=40.0, seconds=10.0)
BUSY = DeviceState(utilization=99.0, seconds=10.0)
SEEN = SyncSighting(3, 6, (("training_step (model.py:12)", 6),))
LOOKED = StepLook(3, 0.06, 0.04, 0.0)

SYNC_STEPS, WARMUP, RECORDED, SPARE = 3, 1, 3, 2
SETTLED, RANKS_AFTER = 5, 10


class FakeSyncLook:
    """Three steps long; notes in ``events`` when it begins and ends."""

    events: ClassVar[list[str]] = []
    is_taken = False
    error: Exception | None = None
    sees_calls = True

    def __init__(self, inside: Callable[[], bool], outside: Callable[[int], None], clock_ns: Callable[[], int]) -> None:
        self.left = SYNC_STEPS
        self.inside, self.outside = inside, outside

    def begin(self) -> None:
        if self.error is not None:
            raise self.error
        self.events.append("syncs")

    def step_done(self) -> bool:
        self.left -= 1
        return not self.left

    def sighting(self) -> SyncSighting:
        return SEEN

    def end(self) -> None:
        self.events.append("syncs ended")


class FakeProfilerLook(ProfilerLook):
    """As long as the real one, and records nothing; ``errors`` has what a method of it raises."""

    events: ClassVar[list[str]] = []
    errors: ClassVar[dict[str, CannotLookError]] = {}

    def _may_fail(self, name: str) -> None:
        if name in self.errors:
            raise self.errors[name]

    def begin(self) -> None:
        self._may_fail("begin")
        self.events.append(f"profiler {self.lasts}")

    def step_done(self) -> bool:
        self._may_fail("step_done")
        self._left -= 1
        self.recorded_s = (1.0, 2.0)
        return self._left == 0

    def read(self, spans: Any) -> StepLook:
        self._may_fail("read")
        self.events.append(f"read {list(spans)}")
        return LOOKED

    def end(self) -> None:
        self.events.append("profiler ended")


class Clock:
    """What a look reads of the GPU's clock."""

    def __init__(self) -> None:
        self.in_step = True
        self.spans: list[Any] | None = None
        self.read_to_s = 0.0
        self.clock_ns = time.perf_counter_ns
        self.waits: list[int] = []

    def host_waits(self, began_ns: int) -> None:
        self.waits.append(began_ns)


class Device:
    def __init__(self) -> None:
        self.clock = Clock()
        self.said = IDLE
        self.is_drained = True

    def state(self) -> DeviceState:
        return self.said

    def drained(self) -> bool:
        return self.is_drained


class Run:
    """Steps, in windows of ten, under a KernelProfiling; one second of ``time.perf_counter`` passes with each reading.

    Attributes:
        begun: what has begun, each with the number of steps done by then.
    """

    def __init__(
        self, profile: Profile = "auto", *, left: int | None = None, rank: int = 0, ranks: int = 1, rhythm: int = 1
    ) -> None:
        self.device = Device()
        self.steps_left = left
        self.taken = False
        self.gpu = BEHIND
        self.steps = 0
        self.begun: list[tuple[int, str]] = []
        self.looks = KernelProfiling(
            self.device,  # type: ignore[arg-type]
            0.1,
            profile=profile,
            batches_left=lambda: self.steps_left,
            rank=rank,
            several_ranks=ranks > 1,
            rhythm=lambda: rhythm,
            is_taken=lambda: self.taken,
        )

    def step(self, number: int = 1, *, warm: bool = True) -> Run:
        for _ in range(number):
            self.steps += 1
            if self.steps_left is not None:
                self.steps_left -= 1
            self.looks.step_done(self.steps, (lambda: self.gpu) if warm else None)
            if warm and self.steps % 10 == 0:
                self.looks.window_done(self.gpu, 0.1)
            for events in (FakeSyncLook.events, FakeProfilerLook.events):
                self.begun += [(self.steps, event) for event in events]
                events.clear()
        return self

    @property
    def what(self) -> list[str]:
        return [event for _, event in self.begun]


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    seconds = iter(range(1_000_000))
    monkeypatch.setattr(kernel_profiling, "SyncLook", FakeSyncLook)
    monkeypatch.setattr(kernel_profiling, "ProfilerLook", FakeProfilerLook)
    monkeypatch.setattr(kernel_profiling.time, "perf_counter", lambda: float(next(seconds)))
    yield
    FakeSyncLook.events.clear()
    FakeSyncLook.is_taken, FakeSyncLook.error = False, None
    FakeProfilerLook.events.clear()
    FakeProfilerLook.errors.clear()


class TestSynchronizingCalls:
    def test_are_looked_for_once_the_run_has_settled_where_the_gpu_may_be_idle(self) -> None:
        run = Run()
        run.step(SETTLED - 1)
        assert run.begun == []
        run.step()
        assert (run.begun, run.looks.syncs) == ([(SETTLED, "syncs")], None)
        run.step(SYNC_STEPS - 1)
        assert run.looks.syncs is None
        run.step()
        assert run.looks.syncs == SEEN
        assert run.step(100).begun == [(SETTLED, "syncs")]

    def test_not_during_the_warm_up(self) -> None:
        assert Run().step(50, warm=False).begun == []

    def test_not_where_the_host_runs_ahead(self) -> None:
        run = Run()
        run.gpu, run.device.said = AHEAD, BUSY
        assert run.step(100).begun == []

    def test_nor_before_a_step_was_read(self) -> None:
        run = Run()
        run.gpu = GpuTimes()
        assert run.step(100).begun == []

    def test_where_it_runs_ahead_no_longer_after_the_next_window(self) -> None:
        run = Run()
        run.gpu, run.device.said = AHEAD, BUSY
        run.step(15)
        run.gpu = BEHIND
        assert run.step(15).begun == [(20, "syncs")]

    @pytest.mark.parametrize(("bound_s", "begins"), [(0.99, False), (1.0, True)])
    def test_from_the_threshold_on(self, bound_s: float, begins: bool) -> None:
        run = Run()
        run.gpu = GpuTimes(steps=100, compute_s=9.0, copy_s=0.5, compute_bound_s=bound_s, idle={"data_wait": 0.5})
        run.device.said = BUSY
        assert bool(run.step(SETTLED).begun) is begins

    @pytest.mark.parametrize(("hook", "begins"), [("Metric.on_train_batch_end", True), ("data_wait", False)])
    def test_where_hooks_seem_to_leave_the_gpu_idle(self, hook: str, begins: bool) -> None:
        run = Run()
        run.gpu = GpuTimes(steps=100, compute_s=9.0, compute_bound_s=0.2, idle={hook: 1.0})
        run.device.said = BUSY
        assert bool(run.step(SETTLED).begun) is begins

    @pytest.mark.parametrize("rank", [0, 1])
    def test_on_several_ranks_at_the_same_step_whatever_was_seen(self, rank: int) -> None:
        run = Run(rank=rank, ranks=2)
        run.gpu, run.device.said = AHEAD, BUSY
        assert run.step(50).begun == [(SETTLED, "syncs")]

    @pytest.mark.parametrize("left", range(SETTLED + WARMUP + RECORDED + SPARE, SETTLED + WARMUP + RECORDED + 20))
    def test_of_several_ranks_the_first_records_before_an_end_that_is_near(self, left: int) -> None:
        run = Run("on", ranks=2, left=left)
        assert any(what.startswith("profiler") for _, what in run.step(left).begun)
        other = Run("on", ranks=2, rank=1, left=left)
        assert other.step(left).begun == [(SETTLED, "syncs")]

    def test_ranks_whose_warm_up_ended_late_look_later_and_not_between_windows(self) -> None:
        run = Run(ranks=2)
        run.step(7, warm=False)
        assert run.step(3).begun == [(8, "syncs")]

    def test_ranks_look_at_no_window_of_their_own(self) -> None:
        run = Run(ranks=2)
        run.step(2)
        run.looks.window_done(BEHIND, 0.1)
        assert run.step(2).begun == []

    def test_inside_a_step_is_what_the_gpus_clock_says(self) -> None:
        run = Run()
        run.step(SETTLED)
        look: Any = run.looks._sync_look
        assert look.inside() is True
        run.device.clock.in_step = False
        assert look.inside() is False
        look.outside(17)
        assert run.device.clock.waits == [17]

    def test_where_the_program_has_a_profile_function_a_note_says_what_is_not_known(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(FakeSyncLook, "sees_calls", False)
        run = Run(profile="off")
        assert any("sys.setprofile" in note for note in run.step(SETTLED + SYNC_STEPS).looks.notes)

    def test_the_programs_own_debug_mode_is_left(self) -> None:
        FakeSyncLook.is_taken = True
        run = Run()
        run.device.said = BUSY
        assert run.step(50).begun == []
        assert run.looks.syncs == SyncSighting(0, 0)
        assert run.looks.notes == ["Synchronizing calls were not detected: the program uses torch's debug mode."]

    def test_a_torch_that_cannot_is_a_note(self) -> None:
        FakeSyncLook.error = RuntimeError("no such mode")
        run = Run()
        run.device.said = BUSY
        assert run.step(50).what == ["syncs ended"]
        assert run.looks.syncs == SyncSighting(0, 0)
        assert run.looks.notes == ["Synchronizing calls could not be detected: no such mode"]

    def test_the_end_of_the_run_ends_it(self) -> None:
        run = Run()
        run.step(SETTLED + 1)
        run.looks.finish()
        assert FakeSyncLook.events == ["syncs ended"]
        assert run.looks.syncs is None


class TestKernelsOnOneRank:
    LASTS = WARMUP + RECORDED

    def test_in_the_last_steps_before_an_end_that_is_foreseen(self) -> None:
        run = Run(left=60)
        run.step(60)
        assert run.begun == [(SETTLED, "syncs"), (60 - self.LASTS - SPARE, "profiler 4")]

    def test_after_the_look_for_synchronizing_calls_where_the_end_is_near(self) -> None:
        run = Run(left=12)
        assert run.step(12).begun == [(SETTLED, "syncs"), (SETTLED + SYNC_STEPS + 1, "profiler 4")]

    def test_no_look_for_synchronizing_calls_begins_while_it_records(self) -> None:
        run = Run(left=62)
        run.gpu, run.device.said = AHEAD, BUSY
        run.step(52)
        run.gpu, run.device.said = BEHIND, IDLE
        assert run.step(10).begun == [(62 - self.LASTS - SPARE, "profiler 4")]
        run.looks.finish()
        assert run.looks.look == LOOKED

    def test_with_accumulated_gradients_a_whole_rhythm(self) -> None:
        run = Run(left=60, rhythm=8)
        assert run.step(60).begun[1:] == [(60 - (WARMUP + 8) - SPARE, "profiler 9")]

    def test_where_it_is_on_without_a_reason_in_the_last_steps(self) -> None:
        run = Run("on", left=60)
        run.gpu, run.device.said = AHEAD, BUSY
        assert run.step(60).begun == [(60 - self.LASTS - SPARE, "profiler 4")]

    def test_or_after_a_hundred_steps_where_no_end_is_foreseen(self) -> None:
        run = Run("on")
        run.gpu, run.device.said = AHEAD, BUSY
        assert run.step(150).begun[:1] == [(100, "profiler 4")]

    def test_never_where_no_end_is_foreseen(self) -> None:
        run = Run(left=None)
        assert run.step(200).what == ["syncs"]
        assert run.looks.pending is False
        assert run.looks.missed
        assert run.looks.notes == [
            "torch.profiler was not allowed to record idle time inside the steps, which NVML's readings suggest: the "
            'end of training could not be foreseen. StallDetector(profile="on") records three steps.'
        ]

    def test_never_where_it_is_off(self) -> None:
        run = Run("off", left=60)
        assert run.step(60).what == ["syncs"]
        assert run.looks.missed
        assert run.looks.notes[0].endswith(
            'NVML\'s readings suggest: profile="off". StallDetector(profile="on") records three steps.'
        )

    def test_where_it_is_on_as_soon_as_there_is_reason(self) -> None:
        run = Run("on")
        assert run.step(30).begun[:2] == [(SETTLED, "syncs"), (11, "profiler 4")]  # the first window has ended
        assert not run.looks.missed

    def test_not_where_the_host_is_ahead_of_a_gpu_that_is_busy(self) -> None:
        run = Run(left=60)
        run.gpu, run.device.said = AHEAD, BUSY
        assert run.step(60).what == []
        assert (run.looks.missed, run.looks.notes) == (False, [])

    @pytest.mark.parametrize(("profile", "recorded"), [("auto", 1), ("off", 0)])
    def test_where_the_events_leave_it_open_what_nvml_says_is_no_reason_not_to(
        self, profile: Profile, recorded: int
    ) -> None:
        run = Run(profile, left=60)
        run.device.said = BUSY
        run.step(60)
        assert run.what.count("profiler 4") == recorded
        assert (run.looks.missed, run.looks.notes) == (False, [])

    def test_reason_that_was_there_once_is_enough(self) -> None:
        run = Run(left=60)
        run.step(20)
        run.device.said = BUSY
        assert run.step(40).what == ["syncs", "profiler 4"]

    def test_reason_is_also_looked_for_when_the_last_steps_come(self) -> None:
        run = Run(left=18)
        run.gpu, run.device.said = AHEAD, BUSY
        run.step(10)
        run.gpu, run.device.said = BEHIND, IDLE
        assert (12, "profiler 4") in run.step(8).begun

    def test_a_trace_is_waited_for(self) -> None:
        run = Run("on")
        run.taken = True
        run.step(30)
        assert run.what == ["syncs"]
        run.taken = False
        assert run.step().begun[1:] == [(31, "profiler 4")]


class TestRecording:
    def recorded(self) -> Run:
        run = Run("on").step(10)
        assert not run.looks.recording
        run.step()
        return run

    def test_spans_are_kept_meanwhile_and_read_when_the_gpu_has_come_so_far(self) -> None:
        run = self.recorded()
        assert run.looks.recording
        assert run.device.clock.spans == []
        run.device.clock.spans = ["step"]
        run.step(4)
        assert not run.looks.recording
        assert run.looks.pending
        run.step(5)
        assert run.looks.look is None
        run.device.clock.read_to_s = 2.0
        run.step()
        assert (run.looks.look, run.looks.pending) == (LOOKED, False)
        assert (run.what[-1], run.device.clock.spans) == ("read ['step']", None)
        assert run.step(100).what.count("profiler 4") == 1

    def test_a_gpu_that_does_not_come_so_far_is_not_waited_for_longer_than_ten_steps(self) -> None:
        run = self.recorded()
        run.step(4 + 9)
        assert run.looks.look is None
        run.step()
        assert run.looks.look == LOOKED

    def test_what_it_cost_is_told_by_the_window_after_the_next(self) -> None:
        run = self.recorded()
        run.device.clock.read_to_s = 9.0
        run.step(5)
        assert run.looks.look == LOOKED
        run.step(4)  # the window under way has steps of the look in it
        assert run.looks.notes == []
        run.looks.window_done(run.gpu, 0.15)
        # six calls, of a second each: one to begin, one for each step, one to read
        (note,) = run.looks.notes
        assert note == (
            "torch.profiler recorded 3 steps, which took 6.00 s: 100.0 ms a step before it, 150.0 ms after it "
            "(+50.0 %)."
        )
        run.step(50)
        assert run.looks.notes == [note]

    def test_and_without_a_window_after_it_at_the_end(self) -> None:
        run = self.recorded()
        run.device.clock.read_to_s = 9.0
        run.step(5)
        run.looks.finish()
        assert run.looks.notes == ["torch.profiler recorded 3 steps, which took 6.00 s."]

    def test_what_was_recorded_is_read_at_the_end(self) -> None:
        run = self.recorded().step(4)
        run.looks.finish()
        assert (run.looks.look, run.looks.pending, run.looks.missed) == (LOOKED, False, False)

    def test_a_recording_that_the_end_cuts_short_is_dropped(self) -> None:
        run = self.recorded().step(2)
        run.looks.finish()
        assert FakeProfilerLook.events == ["profiler ended"]
        assert (run.looks.look, run.looks.recording, run.device.clock.spans) == (None, False, None)
        assert run.looks.pending is False

    def test_a_gpu_that_never_finishes_is_not_waited_for(self) -> None:
        run = self.recorded().step(2)
        run.device.is_drained = False
        run.looks.finish()
        assert FakeProfilerLook.events == []
        assert run.looks.notes == [
            "The GPU did not finish its work, so torch.profiler, which waits for it, was not stopped."
        ]

    def test_a_rhythm_that_is_longer_than_the_look_is_a_note(self) -> None:
        run = Run("on", rhythm=32).step(11)
        run.device.clock.read_to_s = 9.0
        run.step(20)
        assert run.looks.look == LOOKED
        assert run.looks.notes[0].startswith("Gradients are accumulated over more batches than torch.profiler recorded")

    def test_records_that_tie_nothing_together_are_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeProfilerLook, "read", lambda self, spans: replace(LOOKED, correlated=False))
        run = self.recorded().step(4)
        run.looks.finish()
        assert run.looks.notes[0] == (
            "torch.profiler's records do not show which call issued what: copies inside the step were not separated."
        )

    @pytest.mark.parametrize("where", ["begin", "step_done", "read"])
    def test_a_profiler_that_fails_is_a_note_and_not_tried_again(self, where: str) -> None:
        FakeProfilerLook.errors[where] = CannotLookError("another tool holds CUPTI")
        run = Run("on")
        run.device.clock.read_to_s = 9.0
        run.step(60)
        assert run.looks.notes == [
            "The step's kernels could not be recorded with torch.profiler: another tool holds CUPTI. NVML's "
            "utilization and detected synchronizing calls are used instead."
        ]
        assert (run.looks.look, run.looks.pending, run.looks.missed) == (None, False, False)
        assert run.device.clock.spans is None
        assert run.what.count("profiler 4") == (where != "begin")


class TestKernelsOnSeveralRanks:
    def test_auto_records_nothing_and_says_so(self) -> None:
        run = Run(left=60, ranks=2)
        assert run.step(60).what == ["syncs"]
        assert run.looks.notes == [
            "torch.profiler was not allowed to record idle time inside the steps, which NVML's readings suggest and "
            'exposed communication: with several ranks profile="auto" records nothing. StallDetector(profile="on") '
            "records three steps on rank 0."
        ]

    def test_exposed_communication_was_not_looked_for_even_where_the_gpu_is_busy(self) -> None:
        run = Run("off", ranks=2)
        run.device.said = BUSY
        run.step(30)
        assert not run.looks.missed
        assert run.looks.notes[0].startswith("torch.profiler was not allowed to record exposed communication: ")

    def test_on_records_on_rank_0_at_its_step_whatever_was_seen(self) -> None:
        run = Run("on", ranks=2)
        run.gpu, run.device.said = AHEAD, BUSY
        assert run.step(30).begun[:2] == [(SETTLED, "syncs"), (RANKS_AFTER, "profiler 4")]
        other = Run("on", ranks=2, rank=1)
        assert other.step(30).what == ["syncs"]
        assert other.looks.pending is False
        assert (other.looks.missed, other.looks.notes) == (False, [])

    def test_a_profiler_that_fails_leaves_communication_unseen(self) -> None:
        FakeProfilerLook.errors["begin"] = CannotLookError("no CUPTI")
        assert (
            Run("on", ranks=2)
            .step(30)
            .looks.notes[0]
            .endswith("Exposed communication, and ranks that wait in it for each other, were not detected.")
        )


class TestWhatIsStillToCome:
    def test_until_both_looks_are_done_nothing_is_said_of_the_inside_of_a_step(self) -> None:
        run = Run("on")
        assert run.looks.pending
        run.device.clock.read_to_s = 9.0
        run.step(15)
        assert run.looks.pending
        run.step()
        assert not run.looks.pending

    def test_without_a_recording_to_come_the_look_for_synchronizing_calls_is_waited_for(self) -> None:
        run = Run("off")
        assert run.looks.pending
        run.step(SETTLED + SYNC_STEPS)
        assert not run.looks.pending

    def test_at_the_end_nothing_is(self) -> None:
        run = Run("on")
        run.looks.finish()
        assert not run.looks.pending


class TestTimeForATrace:
    def test_there_is_as_long_as_no_look_is_wanted(self) -> None:
        run = Run(left=8)
        run.device.said = BUSY
        assert run.looks.leaves_time_for(5)

    def test_before_a_foreseen_end_what_the_look_needs_is_left(self) -> None:
        run = Run(left=30)
        run.step(10)
        assert (run.looks.leaves_time_for(13), run.looks.leaves_time_for(14)) == (True, False)

    def test_there_is_none_while_a_look_records(self) -> None:
        run = Run("on").step(11)
        assert not run.looks.leaves_time_for(1)
        assert run.step(4).looks.leaves_time_for(1)

    def test_where_a_look_may_come_at_any_time_it_waits(self) -> None:
        assert Run("on").step(5).looks.leaves_time_for(100)

    def test_after_the_look_there_is_to_the_end(self) -> None:
        run = Run(left=60)
        run.device.clock.read_to_s = 9.0
        run.step(59)
        assert run.looks.look == LOOKED
        assert run.looks.leaves_time_for(1)
