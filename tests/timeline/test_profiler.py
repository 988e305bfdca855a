"""The stand-in profiler books time, and hides nothing from the profiler that was there."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from lightning.pytorch.profilers import PassThroughProfiler, Profiler, SimpleProfiler

from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.profiler import TimelineProfiler


class Witness(Profiler):
    def __init__(self) -> None:
        super().__init__(dirpath="somewhere", filename="witness")
        self.seen: list[str] = []
        self.extra = 1

    def start(self, action_name: str) -> None:
        self.seen.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.seen.append(f"stop {action_name}")

    @contextmanager
    def profile(self, action_name: str) -> Generator[str, None, None]:
        self.seen.append(f"enter {action_name}")
        yield action_name
        self.seen.append(f"exit {action_name}")

    def summary(self) -> str:
        return "summary of the witness"

    def teardown(self, stage: str | None) -> None:
        self.seen.append(f"teardown {stage}")


@pytest.fixture
def timeline() -> Timeline:
    timeline = Timeline()
    timeline.start()
    return timeline


def test_the_inner_profiler_sees_every_call(timeline: Timeline) -> None:
    witness = Witness()
    profiler = TimelineProfiler(timeline, witness)
    with profiler.profile("save_checkpoint"):
        profiler.start("[_TrainingEpochLoop].train_dataloader_next")
        profiler.stop("[_TrainingEpochLoop].train_dataloader_next")
    profiler.teardown("fit")
    assert witness.seen == [
        "enter save_checkpoint",
        "start [_TrainingEpochLoop].train_dataloader_next",
        "stop [_TrainingEpochLoop].train_dataloader_next",
        "exit save_checkpoint",
        "teardown fit",
    ]
    phases = timeline.times().phases
    assert phases["checkpoint"] > 0
    assert phases["data_wait"] > 0
    assert profiler.summary() == "summary of the witness"


def test_the_inner_profilers_attributes_show_through(timeline: Timeline) -> None:
    profiler = TimelineProfiler(timeline, Witness())
    assert (profiler.dirpath, profiler.filename, profiler.extra, profiler.local_rank) == ("somewhere", "witness", 1, 0)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = profiler.nothing_of_the_kind


def test_its_end_does_not_tear_the_inner_profiler_down(timeline: Timeline) -> None:
    witness = Witness()
    profiler = TimelineProfiler(timeline, witness)
    del profiler
    gc.collect()
    assert witness.seen == []


def test_lightnings_default_profiler_costs_no_extra_context(timeline: Timeline) -> None:
    profiler = TimelineProfiler(timeline, PassThroughProfiler())
    assert profiler.profile("save_checkpoint") is timeline.span("save_checkpoint")


def test_a_real_profiler_keeps_its_own_account(timeline: Timeline) -> None:
    inner = SimpleProfiler()
    profiler = TimelineProfiler(timeline, inner)
    for _ in range(3):
        with profiler.profile("save_checkpoint"):
            pass
    assert len(inner.recorded_durations["save_checkpoint"]) == 3


class Inner(Profiler):
    """A profiler whose context does what a test wants."""

    def __init__(self, context: AbstractContextManager[Any] | Exception) -> None:
        super().__init__()
        self.context = context

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        if isinstance(self.context, Exception):
            raise self.context
        return self.context

    def start(self, action_name: str) -> None:
        raise ValueError("started already")

    def stop(self, action_name: str) -> None: ...


class Context:
    def __init__(self, timeline: Timeline, failing: str = "", suppress: bool = False) -> None:
        self.timeline = timeline
        self.failing = failing
        self.suppress = suppress
        self.open_inside: list[int] = []
        self.left_with: list[object] = []

    def __enter__(self) -> Context:
        self.open_inside.append(len(self.timeline._open))
        if self.failing == "enter":
            raise OSError("no enter")
        return self

    def __exit__(self, *exception: object) -> bool:
        self.open_inside.append(len(self.timeline._open))
        self.left_with.append(exception[1])
        if self.failing == "exit":
            raise OSError("no exit")
        return self.suppress


def test_the_inner_context_lies_inside_ours_and_gives_what_it_gives(timeline: Timeline) -> None:
    context = Context(timeline)
    profiler = TimelineProfiler(timeline, Inner(context))
    made = profiler.profile("save_checkpoint")
    assert (context.open_inside, timeline._open) == ([], []), "nothing is entered before the with"
    with made as given:
        assert given is context
    assert context.open_inside == [1, 1]
    assert context.left_with == [None]
    assert timeline._open == []


def test_the_inner_context_may_suppress_an_exception(timeline: Timeline) -> None:
    context = Context(timeline, suppress=True)
    error = ValueError("broken")
    with TimelineProfiler(timeline, Inner(context)).profile("save_checkpoint"):
        raise error
    assert context.left_with == [error]
    assert timeline._open == []


@pytest.mark.parametrize("failing", ["enter", "exit"])
def test_an_inner_context_that_fails_leaves_no_action_open(timeline: Timeline, failing: str) -> None:
    profiler = TimelineProfiler(timeline, Inner(Context(timeline, failing)))
    with pytest.raises(OSError, match=f"no {failing}"), profiler.profile("save_checkpoint"):
        pass
    assert timeline._open == []


def test_an_inner_profiler_that_gives_no_context_leaves_no_action_open(timeline: Timeline) -> None:
    profiler = TimelineProfiler(timeline, Inner(OSError("no context")))
    with pytest.raises(OSError, match="no context"):
        profiler.profile("save_checkpoint")
    assert timeline._open == []


def test_an_inner_profiler_that_does_not_start_leaves_no_action_open(timeline: Timeline) -> None:
    profiler = TimelineProfiler(timeline, Inner(OSError()))
    with pytest.raises(ValueError, match="started already"):
        profiler.start("save_checkpoint")
    assert timeline._open == []


def test_an_exception_passes_through_both(timeline: Timeline) -> None:
    inner = SimpleProfiler()
    profiler = TimelineProfiler(timeline, inner)
    with pytest.raises(ValueError, match="broken"), profiler.profile("save_checkpoint"):
        raise ValueError("broken")
    assert inner.current_actions == {}
    assert timeline._open == []
