"""The stand-in profiler books time, and hides nothing from the profiler that was there."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

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


def test_an_exception_passes_through_both(timeline: Timeline) -> None:
    inner = SimpleProfiler()
    profiler = TimelineProfiler(timeline, inner)
    with pytest.raises(ValueError, match="broken"), profiler.profile("save_checkpoint"):
        raise ValueError("broken")
    assert inner.current_actions == {}
    assert timeline._open == []
