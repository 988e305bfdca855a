"""The course of a run, window by window, from made-up measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_gpuopt.detector.window_history import WindowHistory
from lightning_gpuopt.measurements.gpu import DeviceState
from lightning_gpuopt.measurements.phases import WindowRecord
from tests.diagnosis.numbers import gpu, measurement, times

HELD = {"rss_mib": 100.0, "open_files": 20, "threads": 3}


def history(*windows: Any, process: dict[str, float] = HELD) -> tuple[WindowRecord, ...]:
    made = WindowHistory(None, lambda: process)
    for number, each in enumerate(windows):
        made.add(each, 100 * (number + 1))
    return made.records


def test_a_window_is_a_record_of_its_phases_without_what_lies_between_steps() -> None:
    hooks = {"Slow.on_train_batch_end": 1.0, "Slow.on_validation_end": 0.5}
    (record,) = history(measurement(times(data_wait=2.0, backward=1.0, optimizer=0.5, validation=1.0, callbacks=hooks)))
    assert (record.steps, record.end_step, record.seconds) == (100, 100, pytest.approx(8.5))
    assert record.parts == {
        "data_wait": 2.0,
        "transfer": 0.0,
        "logging": 0.0,
        "other": 0.0,
        "garbage_collection": 0,
        "recompilation": 0,
        "Slow.on_train_batch_end": 1.0,
        "forward": 4.0,
        "backward": 1.0,
        "optimizer": 0.5,
    }
    assert sum(record.parts.values()) == pytest.approx(record.seconds)
    assert record.host == {}


def test_what_stopped_a_phase_is_apart() -> None:
    stopped = replace(times(backward=2.0), collecting={"backward": 0.5}, compiling={"forward": 1.0})
    (record,) = history(measurement(stopped))
    assert (record.parts["backward"], record.parts["forward"]) == (1.5, 7.0)
    assert (record.parts["garbage_collection"], record.parts["recompilation"]) == (0.5, 1.0)


def test_a_broadcast_before_each_step_is_a_part_where_there_is_one() -> None:
    (record,) = history(measurement(times(other=3.0, broadcast_s=2.0)))
    assert (record.parts["signal_broadcast"], record.parts["other"]) == (2.0, 1.0)


def test_on_a_gpu_the_rest_is_its_work_and_the_hosts_is_apart() -> None:
    busy = gpu(compute_s=7.0, idle={"data_wait": 2.0, "checkpoint": 1.0})
    (record,) = history(measurement(times(backward=2.0, optimizer=1.0), gpu=busy))
    assert (record.seconds, record.parts["data_wait"], record.parts["gpu_work"]) == (9.0, 2.0, 7.0)
    assert "checkpoint" not in record.parts
    assert record.host == {"forward": 7.0, "backward": 2.0, "optimizer": 1.0}


@pytest.mark.parametrize("window", [measurement(times(steps=0)), measurement(times(), gpu=gpu(0))])
def test_a_window_without_steps_is_none(window: Any) -> None:
    assert history(window) == ()


def test_what_the_process_held_is_kept_as_far_as_it_is_known() -> None:
    assert history(measurement(times()))[0].held == {"rss_mib": 100.0, "open_files": 20, "threads": 3}
    assert history(measurement(times()), process={"threads": 3})[0].held == {"threads": 3}


def test_the_clock_of_each_window_is_taken_from_the_mean_of_the_whole_part() -> None:
    states = [
        DeviceState(sm_clock_mhz=2000.0, seconds=10.0),
        DeviceState(sm_clock_mhz=1500.0, seconds=20.0),
        DeviceState(sm_clock_mhz=1500.0, seconds=20.0),  # nothing new was read
        DeviceState(),
    ]
    records = history(*(measurement(times(), device=each) for each in states))
    assert [each.held.get("sm_clock_mhz") for each in records] == [2000.0, 1000.0, None, None]


def test_the_gpus_memory_is_in_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    stats: dict[str, int] = {"allocated_bytes.all.current": 3 << 20, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    made = WindowHistory(torch.device("cuda", 0), dict)
    made.add(measurement(times()), 100)
    assert made.records[0].held == {"gpu_allocated_mib": 3.0, "alloc_retries": 2.0}


def test_an_allocator_that_keeps_no_figures_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: Any) -> Any:
        raise RuntimeError("no such figures")

    monkeypatch.setattr(torch.cuda, "memory_stats", fails)
    made = WindowHistory(torch.device("cuda", 0), lambda: HELD)
    made.add(measurement(times()), 100)
    assert set(made.records[0].held) == {"rss_mib", "open_files", "threads"}


def test_of_more_than_64_each_two_neighbours_become_one() -> None:
    numbers = iter(range(68))
    made = WindowHistory(None, lambda: {"threads": next(numbers)})

    def add(number: int) -> None:
        made.add(measurement(times(data_wait=number / 100)), 100 * (number + 1))

    for number in range(64):
        add(number)
    assert [each.steps for each in made.records] == [100] * 64
    add(64)
    assert [each.steps for each in made.records] == [200] * 32 + [100]
    first = made.records[0]
    assert (first.end_step, first.seconds, first.held) == (200, pytest.approx(20.0), {"threads": 1})
    assert first.parts["data_wait"] == pytest.approx(0.01)
    add(65)
    assert [each.steps for each in made.records] == [200] * 33  # from here on two windows are a record
    add(66)
    add(67)
    assert [(each.steps, each.end_step) for each in made.records[-2:]] == [(200, 6600), (200, 6800)]
