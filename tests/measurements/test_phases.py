"""Plain measured data: one way to add and to subtract."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_gpuopt.measurements.counters import Summed
from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.measurements.loading import QueueTimes, WorkerTimes
from lightning_gpuopt.measurements.phases import PHASES, PhaseTimes, WindowRecord


def phases(wall_s: float, steps: int, callbacks: dict[str, float]) -> PhaseTimes:
    return PhaseTimes(wall_s, steps, dict.fromkeys(PHASES, wall_s / len(PHASES)), callbacks, 1, 0.5, 0.25)


def test_what_came_after_an_earlier_reading() -> None:
    after = phases(11.0, 10, {"A.hook": 3.0, "B.hook": 1.0}) - phases(5.5, 4, {"A.hook": 2.0})
    assert (after.wall_s, after.steps, after.epochs, after.first_fetch_s) == (5.5, 6, 0, 0.0)
    assert after.callbacks == {"A.hook": 1.0, "B.hook": 1.0}
    assert after.phases == pytest.approx(dict.fromkeys(PHASES, 0.5))


def test_stretches_together() -> None:
    both = GpuTimes(steps=2, copy_s=0.5, idle={"data_wait": 1.0}) + GpuTimes(steps=1, idle={"logging": 2.0})
    assert both == GpuTimes(steps=3, copy_s=0.5, idle={"data_wait": 1.0, "logging": 2.0})
    assert both.idle_s == 3.0


@pytest.mark.parametrize("kind", [QueueTimes, WorkerTimes, GpuTimes])
def test_every_field_takes_part(kind: type[Summed]) -> None:
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    mappings = {"idle", "exposed_by"}
    full = kind(**{name: {"x": number + 1.0} if name in mappings else number + 1 for number, name in enumerate(names)})
    assert full + full - full == full
    assert full - full == kind(**{name: {"x": 0.0} if name in mappings else 0 for name in names})


def test_windows_that_follow_each_other_are_one() -> None:
    first = WindowRecord(10, 40, 2.0, {"data_wait": 0.5, "gpu_work": 1.5}, {"rss_mib": 100.0}, {"forward": 0.25})
    second = WindowRecord(5, 45, 1.0, {"gpu_work": 1.0}, {"rss_mib": 110.0}, {"forward": 0.5, "backward": 0.125})
    assert first.joined(second) == WindowRecord(
        15, 45, 3.0, {"data_wait": 0.5, "gpu_work": 2.5}, {"rss_mib": 110.0}, {"forward": 0.75, "backward": 0.125}
    )
