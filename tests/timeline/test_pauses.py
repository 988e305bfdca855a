"""What stops the training thread: into which slots its time goes, and who is watched."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.callback

from lightning_gpuopt.measurements.host import Collections, Compilations
from lightning_gpuopt.timeline.pauses import PauseWatch
from lightning_gpuopt.timeline.phases import Timeline

FORWARD = "[Strategy]SingleDeviceStrategy.training_step"
HOOK = "[Callback]Slow.on_train_batch_end"
MS = 1_000_000


class Clock:
    """Goes where it is told."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, milliseconds: float) -> None:
        self.ns += round(milliseconds * MS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timeline(clock: Clock) -> Timeline:
    timeline = Timeline(clock_ns=clock, detailed=True)
    timeline.start()
    return timeline


@pytest.fixture
def watch(timeline: Timeline, clock: Clock) -> Iterator[PauseWatch]:
    gc.disable()
    watch = PauseWatch(timeline, clock)
    watch.start()
    yield watch
    watch.close()
    gc.enable()


@pytest.fixture
def stopped(clock: Clock) -> Callable[..., None]:
    """A collection that takes so many milliseconds."""

    def collect(milliseconds: float, generation: int = 2) -> None:
        def take(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                clock.pass_ms(milliseconds)

        gc.callbacks.append(take)
        try:
            gc.collect(generation)
        finally:
            gc.callbacks.remove(take)

    return collect


class TestSlots:
    def test_a_pause_is_part_of_its_phase_and_told_apart(self, timeline: Timeline, clock: Clock) -> None:
        with timeline.span(FORWARD):
            clock.pass_ms(10)
            timeline.pause("garbage_collection", 4 * MS, 7 * MS)
            timeline.pause("recompilation", 7 * MS, 9 * MS)
        timeline.step_done()
        timeline.stop()
        times = timeline.times()
        assert times.phases["forward"] == 0.01
        assert times.collecting == {"forward": 0.003}
        assert times.compiling == {"forward": 0.002}
        assert sum(times.phases.values()) == times.wall_s == 0.01

    def test_a_pause_in_a_hook_is_the_hooks(self, timeline: Timeline, clock: Clock) -> None:
        with timeline.span(HOOK):
            clock.pass_ms(8)
            timeline.pause("garbage_collection", 0, 8 * MS)
        times = timeline.times()
        assert times.callbacks == {"Slow.on_train_batch_end": 0.008}
        assert times.collecting == {"Slow.on_train_batch_end": 0.008}
        assert times.phases["callbacks"] == 0.008

    @pytest.mark.parametrize("action", ["save_checkpoint", "[Callback]Slow.on_train_epoch_end"])
    def test_a_pause_between_steps_stays_where_it_was(self, timeline: Timeline, clock: Clock, action: str) -> None:
        with timeline.span(action):
            clock.pass_ms(8)
            assert not timeline.pause("garbage_collection", 0, 8 * MS)
        assert timeline.times().collecting == {}
        assert timeline.inside_steps_ns == 0

    def test_a_gpus_clock_is_told_of_long_ones_in_their_place(self, timeline: Timeline, clock: Clock) -> None:
        with timeline.span(FORWARD):
            clock.pass_ms(5)
            timeline.pause("garbage_collection", 2 * MS, 3 * MS)
            timeline.pause("garbage_collection", 3 * MS, 3 * MS + 99_999)
            clock.pass_ms(5)
        work = timeline.take_host_work()
        named = [(timeline.name_of(slot), ended) for slot, ended in zip(work[::2], work[1::2], strict=True)]
        assert named == [
            ("epoch_setup", 0),
            ("forward", 2 * MS),
            ("garbage_collection", 3 * MS),
            ("forward", 10 * MS),
        ]

    def test_one_after_the_last_event_comes_with_the_next_work(self, timeline: Timeline, clock: Clock) -> None:
        with timeline.span(FORWARD):
            clock.pass_ms(1)
            timeline.take_host_work()
            timeline.pause("recompilation", 0, 1 * MS)
            assert timeline.take_host_work() == []
            clock.pass_ms(1)
        work = timeline.take_host_work()
        assert [timeline.name_of(slot) for slot in work[::2]] == ["forward", "recompilation", "forward"]
        assert work[1::2] == [0, 1 * MS, 2 * MS]


class TestCollections:
    def test_they_are_counted_and_timed(
        self, timeline: Timeline, watch: PauseWatch, stopped: Callable[..., None]
    ) -> None:
        with timeline.span(FORWARD):
            stopped(0.5, 0)
            stopped(0.25, 0)
            stopped(0.75, 1)
        seen = watch.collections()
        assert seen == Collections((2, 1, 0), 0.0015, 0.00075)
        assert timeline.times().collecting == {"forward": 0.0015}

    def test_the_line_that_asks_for_them_is_named_and_objects_are_counted(
        self, timeline: Timeline, watch: PauseWatch, stopped: Callable[..., None]
    ) -> None:
        with timeline.span(FORWARD):
            stopped(6)
        seen = watch.collections()
        assert seen.where.startswith("collect (test_pauses.py:")
        assert seen.tracked is not None
        assert seen.tracked > 100

    def test_those_on_other_threads_and_between_steps_do_not_count(
        self, timeline: Timeline, watch: PauseWatch, stopped: Callable[..., None]
    ) -> None:
        stopped(5)  # in the set-up of the epoch
        with timeline.span(FORWARD):
            other = threading.Thread(target=stopped, args=(5,))
            other.start()
            other.join()
        assert watch.collections() == Collections()

    def test_a_new_part_begins_anew(self, timeline: Timeline, watch: PauseWatch, stopped: Callable[..., None]) -> None:
        with timeline.span(FORWARD):
            stopped(6)
        watch.restart()
        assert watch.collections() == Collections()

    def test_nothing_of_it_stays_behind(self, timeline: Timeline) -> None:
        before = list(gc.callbacks)
        watch = PauseWatch(timeline)
        watch.start()
        assert len(gc.callbacks) == len(before) + 1
        watch.close()
        watch.close()
        assert gc.callbacks == before


class TestCompilations:
    def test_the_function_and_the_reason_are_named(self, timeline: Timeline, watch: PauseWatch) -> None:
        def tripled(values: torch.Tensor) -> torch.Tensor:
            return values * 3

        compiled = torch.compile(tripled, backend="eager", dynamic=False)
        for size in (3, 4, 5):
            with timeline.span(FORWARD):
                compiled(torch.ones(size))
            timeline.step_done()
        seen = watch.compilations()
        assert (seen.count, seen.steps, seen.given_up) == (3, 3, ())
        assert seen.function == f"tripled ({__file__}:{tripled.__code__.co_firstlineno})"
        assert seen.reason.startswith("tensor '")
        assert seen.reason.endswith("size mismatch at index 0. expected 3, actual 5")

    def test_a_function_that_torch_gives_up_is_named(self, timeline: Timeline, watch: PauseWatch) -> None:
        def quadrupled(values: torch.Tensor) -> torch.Tensor:
            return values * 4

        compiled = torch.compile(quadrupled, backend="eager", dynamic=False)
        for size in range(2, 12):
            with timeline.span(FORWARD):
                compiled(torch.ones(size))
        assert [each.partition(" ")[0] for each in watch.compilations().given_up] == ["quadrupled"]

    def test_a_collection_while_it_compiles_is_a_part_of_that(
        self, timeline: Timeline, watch: PauseWatch, clock: Clock, stopped: Callable[..., None]
    ) -> None:
        with timeline.span(FORWARD):
            watch._compiling_begins()
            clock.pass_ms(10)
            stopped(5)
            watch._compiling_ends()
        times = timeline.times()
        assert times.compiling == {"forward": 0.015}
        assert times.collecting == {}

    def test_a_compilation_that_never_ended_hides_no_later_collection(
        self, timeline: Timeline, watch: PauseWatch, stopped: Callable[..., None]
    ) -> None:
        with timeline.span(FORWARD):
            watch._compiling_begins()
        timeline.step_done()
        with timeline.span(FORWARD):
            stopped(5)
        assert timeline.times().collecting == {"forward": 0.005}

    def test_the_backwards_threads_count_and_others_do_not(
        self, timeline: Timeline, watch: PauseWatch, clock: Clock
    ) -> None:
        def compile_elsewhere() -> None:
            watch._compiling_begins()
            clock.pass_ms(5)
            watch._compiling_ends()

        for action in (FORWARD, "[Strategy]SingleDeviceStrategy.backward"):
            with timeline.span(action):
                other = threading.Thread(target=compile_elsewhere)
                other.start()
                other.join()
        assert timeline.times().compiling == {"backward": 0.005}

    def test_without_torchs_callbacks_a_note_says_so(self, timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch._dynamo.callback, "callback_handler", SimpleNamespace())
        watch = PauseWatch(timeline)
        watch.start()
        watch.look_for_compiler()
        watch.close()
        (note,) = watch.notes
        assert note.startswith("Compilations by torch.compile could not be detected: this torch has no torch._dynamo")
        assert watch.compilations() == Compilations()
