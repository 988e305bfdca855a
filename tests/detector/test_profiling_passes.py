"""When the looks are asked whose turn it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_gpuopt.detector.profiling_passes import ProfilingPasses
from lightning_gpuopt.measurements.gpu import SyncSighting


def without_gpu() -> ProfilingPasses:
    nobody: Any = None
    return ProfilingPasses(nobody, nobody, threshold=0.1, profile="auto", device=None, stacks=None)


def test_nobody_is_called_between_the_steps_at_which_there_is_something_to_do() -> None:
    asked: list[int] = []
    looks = without_gpu()
    stacks: Any = SimpleNamespace(
        step_done=lambda: None, due=lambda steps: asked.append(steps) or False, due_at=lambda steps: 4
    )
    looks.stacks = stacks
    for number in range(1, 6):
        looks.step_done(number, None, lambda: None)
    assert asked == [1, 4, 5]


def test_a_trace_that_is_asked_for_has_every_step_from_then_on(tmp_path: Path) -> None:
    looks = without_gpu()
    looks.step_done(1, None, lambda: None)
    looks.record_trace(tmp_path / "trace.json")
    for number in range(2, 7):
        assert looks._trace.is_recording
        looks.step_done(number, None, lambda: None)
    assert not looks._trace.is_recording
    assert (tmp_path / "trace.json").exists()


def test_what_the_looks_say_is_known_on_cuda_only() -> None:
    looks = without_gpu()
    assert looks.known() == {}
    kernels: Any = SimpleNamespace(syncs=SyncSighting(3, 0), look=None, pending=True, missed=False)
    looks.kernels = kernels
    assert looks.known() == {"syncs": SyncSighting(3, 0), "look": None, "look_pending": True, "look_missed": False}
