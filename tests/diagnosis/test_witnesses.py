"""What several sources say of the GPU's idle time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import confidence_of, noise
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.witnesses import disagreement, idle_shares, witness_note
from lightning_gpuopt.measurements.gpu import DeviceState, GpuTimes, StepLook
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.measurements.phases import WindowRecord
from tests.diagnosis.numbers import times

GPU = GpuTimes(steps=100, compute_s=8.0, compute_bound_s=4.0, idle={"data_wait": 2.0})
LOOK = StepLook(3, busy_s=0.05, launch_idle_s=0.03, sync_idle_s=0.0, calls=40)


def measured(percent: float | None = None, look: StepLook | None = None, **device: Any) -> Measurement:
    state = DeviceState(utilization=percent, seconds=10.0, **device)
    return Measurement(times(data_wait=2.0), LoaderFacts(), gpu=GPU, device=state, look=look)


def test_each_source_gives_its_share() -> None:
    assert idle_shares(measured(70.0, LOOK)) == pytest.approx({"events": 0.2, "host": 0.6, "records": 0.5, "nvml": 0.3})
    assert idle_shares(measured()) == pytest.approx({"events": 0.2, "host": 0.6})
    assert idle_shares(replace(measured(), gpu=None)) == {}


@pytest.mark.parametrize(
    ("shares", "apart"),
    [
        ({"events": 0.2, "host": 0.6}, 0.0),
        ({"events": 0.2, "host": 0.6, "nvml": 0.4}, 0.0),
        ({"events": 0.2, "host": 0.6, "nvml": 0.05}, -0.15),
        ({"events": 0.2, "host": 0.6, "nvml": 0.9}, 0.3),
        ({"events": 0.2, "host": 0.6, "records": 0.5, "nvml": 0.4}, -0.1),
        ({"events": 0.2, "host": 0.6, "records": 0.5, "nvml": 0.55}, 0.05),
    ],
)
def test_nvml_disagrees_as_far_as_it_is_outside_of_what_the_others_allow(
    shares: dict[str, float], apart: float
) -> None:
    assert disagreement(shares) == pytest.approx(apart)


def test_within_ten_points_there_is_nothing_to_say() -> None:
    assert witness_note(measured(58.0, LOOK)) is None
    assert witness_note(measured()) is None


def test_a_neighbour_is_named() -> None:
    note = witness_note(measured(100.0, LOOK, neighbours=("python (pid 7)",)))
    assert note == (
        "NVML has the GPU idle for 0% of the time, torch.profiler's records and CUDA events for 50%: another process "
        "computes on it, which NVML counts: python (pid 7). This report uses the latter."
    )


def test_without_one_streams_and_short_gaps_may_be_why() -> None:
    note = str(witness_note(measured(90.0, LOOK)))
    assert "other streams, and of other processes (MPS) or gaps between kernels are too short" in note


def test_more_idle_time_by_nvml_may_be_copies_or_gaps_that_nobody_looked_at() -> None:
    assert "were not profiled" in str(witness_note(measured(20.0)))
    assert "were not profiled" not in str(witness_note(measured(20.0, LOOK)))


def windows(*seconds: float) -> tuple[WindowRecord, ...]:
    return tuple(WindowRecord(10, 10 * index, each, {}) for index, each in enumerate(seconds, 1))


def test_noise_is_the_standard_error_of_a_mean_step() -> None:
    assert noise(replace(measured(), history=windows(1.0, 1.0))) == 0.0
    assert noise(replace(measured(), history=windows(1.0, 2.0, 3.0))) == pytest.approx(1 / 3**0.5 / 2)


@pytest.mark.parametrize(
    ("cause", "share", "changes", "confidence"),
    [
        ("slow_storage", 0.2, {}, "high"),
        ("slow_storage", 0.105, {}, "medium"),
        ("launch_bound", 0.2, {}, "medium"),  # nobody has looked
        ("launch_bound", 0.2, {"look": LOOK}, "high"),
        ("launch_bound", 0.105, {}, "low"),
        ("slow_storage", 0.2, {"history": windows(1.0, 2.0, 3.0)}, "medium"),
        ("slow_storage", 0.2, {"device": DeviceState(utilization=100.0, seconds=10.0)}, "medium"),
    ],
)
def test_confidence_is_lost_level_by_level(cause: str, share: float, changes: dict[str, Any], confidence: str) -> None:
    assert confidence_of(cause, share, replace(measured(), **changes), 0.1) == confidence


@pytest.mark.parametrize(("steps", "confidence"), [(100, "high"), (29, "medium"), (9, "low")])
def test_short_runs_say_less(steps: int, confidence: str) -> None:
    short = replace(measured(), times=replace(times(data_wait=2.0), steps=steps))
    assert confidence_of("slow_storage", 0.2, short, 0.1) == confidence
