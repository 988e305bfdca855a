"""Whether the steps of a run get slower: from records of numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.growth import growth_of
from lightning_gpuopt.measurements.phases import WindowRecord

PER_RECORD = 50


def records_of(step_ms: list[float], part: str = "forward", **held: float) -> list[WindowRecord]:
    """Records of 50 steps whose time lies in one part, but for 10 ms of a step; ``held`` grows by so much a record."""
    return [
        WindowRecord(
            PER_RECORD,
            PER_RECORD * (index + 1),
            PER_RECORD * each / 1e3,
            {part: PER_RECORD * (each - 10) / 1e3, "backward": PER_RECORD * 10 / 1e3},
            {name: value * index for name, value in held.items()},
        )
        for index, each in enumerate(step_ms)
    ]


def test_steps_that_get_slower_from_the_middle_on() -> None:
    growth = growth_of(records_of([80.0] * 8 + [120.0] * 8))
    assert growth is not None
    assert (growth.from_s, growth.to_s, growth.since_step) == (0.08, 0.12, 400)
    assert growth.lost_s == pytest.approx(8 * PER_RECORD * 0.04)
    assert (growth.part, growth.part_from_s, growth.part_to_s) == ("forward", pytest.approx(0.07), pytest.approx(0.11))
    assert growth.parts == {"forward": pytest.approx(8 * PER_RECORD * 0.04)}
    assert growth.waits_s == growth.parts


def test_steps_that_get_slower_little_by_little() -> None:
    growth = growth_of(records_of([50.0 + 5 * index for index in range(12)], rss_mib=100.0))
    assert growth is not None
    assert growth.from_s == pytest.approx(0.0575)
    assert growth.to_s == pytest.approx(0.0975)
    assert growth.since_step == 150
    assert growth.last.held["rss_mib"] - growth.first.held["rss_mib"] == 1100.0


def _noise(scale: float) -> list[float]:
    draw = random.Random(7)
    return [80.0 * (1 + draw.gauss(0, scale)) for _ in range(60)]


@pytest.mark.parametrize(
    "step_ms",
    [
        [80.0] * 5 + [120.0] * 0,
        [80.0] * 16,
        [80.0] * 8 + [400.0] + [80.0] * 8,
        [80.0] * 15 + [400.0],
        [80.0] * 4 + [120.0] * 2,
        ([80.0] * 4 + [160.0] * 4) * 4,
        [80.0 + 40 * math.sin(index / 3) for index in range(40)],
        [80.0 + 10 * (index % 8) for index in range(48)],
        [120.0] * 6 + [80.0] * 10,
        [80.0] * 6 + [160.0] * 4 + [80.0] * 6,
        [80.0 + 0.2 * index for index in range(16)],
        _noise(0.05),
        _noise(0.3),
    ],
    ids=[
        "too few records",
        "even",
        "one slow record",
        "a slow last record",
        "two slow last records",
        "a pattern",
        "waves",
        "a saw",
        "a slow beginning",
        "it recovers",
        "less than a tenth",
        "a little noise",
        "much noise",
    ],
)
def test_what_is_no_growth(step_ms: list[float]) -> None:
    assert growth_of(records_of(step_ms)) is None


@pytest.mark.parametrize(
    ("step_ms", "grows"),
    [
        ([12.0, 20.0, 28.0, 36.0, 50.0], True),
        ([12.0, 18.0, 25.0, 33.0, 31.0, 42.0, 50.0], True),
        # batches made ahead that are used up, another program that begins
        ([12.0] * 2 + [50.0, 50.5, 49.0, 50.2, 49.8, 50.4], False),
        ([12.0] * 4 + [50.0, 49.0, 50.5, 49.5], False),
        # caches and clocks that settle
        ([30.0, 32.0, 34.0, 36.0, 38.0, 40.0], False),
        ([12.0, 28.0, 44.0, 50.0], False),
        ([12.0, 12.1, 20.0, 20.1, 20.05], False),
    ],
)
def test_in_less_than_ten_seconds_a_growth_goes_on(step_ms: list[float], grows: bool) -> None:
    records = records_of(step_ms)
    assert sum(record.seconds for record in records) < 20
    shorter = [replace(each, seconds=each.seconds / 2, steps=each.steps // 2) for each in records]
    assert (growth_of(shorter) is not None) is grows


def test_noise_alone_is_hardly_ever_taken_for_growth() -> None:
    draw = random.Random(11)
    runs = ([20.0 * (1 + draw.gauss(0, 0.1)) for _ in range(draw.randint(5, 40))] for _ in range(500))
    assert sum(growth_of(records_of(run)) is not None for run in runs) <= 5


@pytest.mark.parametrize("more", [lambda index: 5.0 * index, lambda index: 60.0 * (index >= 10)], ids=["slope", "step"])
def test_growth_among_noise_is_seen(more: Callable[[int], float]) -> None:
    draw = random.Random(11)
    runs = ([80.0 * (1 + draw.gauss(0, 0.03)) + more(index) for index in range(20)] for _ in range(100))
    assert sum(growth_of(records_of(run)) is not None for run in runs) >= 98


def test_all_of_what_has_doubled_is_the_growths() -> None:
    growth = growth_of(records_of([20.0] * 6 + [50.0] * 6, part="Slow.on_train_batch_end"))
    assert growth is not None
    assert growth.part == "Slow.on_train_batch_end"
    assert growth.waits_s == {"Slow.on_train_batch_end": math.inf}


def test_a_host_that_is_slower_inside_the_step_is_named_for_a_gpu() -> None:
    records = records_of([80.0] * 6 + [120.0] * 6, part="gpu_work")
    slower = [
        WindowRecord(
            record.steps,
            record.end_step,
            record.seconds,
            record.parts,
            {},
            {"forward": record.seconds - 1.0, "backward": 0.5},
        )
        for record in records
    ]
    growth = growth_of(slower)
    assert growth is not None
    assert growth.part == "forward"
    assert growth.waits_s == {"gpu_work": pytest.approx(6 * PER_RECORD * 0.04)}


def test_a_gpu_that_has_more_to_do_is_not_idle() -> None:
    growth = growth_of(records_of([80.0] * 6 + [120.0] * 6, part="gpu_work"))
    assert growth is not None
    assert growth.part == "gpu_work"
    assert growth.waits_s == {}


def test_joined_records_are_one() -> None:
    first, second = records_of([80.0, 120.0], rss_mib=5.0)
    joined = first.joined(second)
    assert (joined.steps, joined.end_step, joined.seconds) == (100, 100, pytest.approx(10.0))
    assert joined.parts == {"forward": pytest.approx(9.0), "backward": 1.0}
    assert joined.held == {"rss_mib": 5.0}
