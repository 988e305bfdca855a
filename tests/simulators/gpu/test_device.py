"""The simulated device alone, on a clock that the tests turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulators.gpu import Device, ManualClock, Memory, Union

BEGIN_S = 100.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(BEGIN_S)


@pytest.fixture
def device(clock: ManualClock) -> Device:
    return Device(clock)


def seconds(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


def activities(device: Device) -> list[tuple[str, float, float]]:
    device.refresh()
    return [
        (each.name, seconds(each.start_s - BEGIN_S), seconds(each.end_s - BEGIN_S)) for each in device.ledger.activities
    ]


def kernels(device: Device) -> list[tuple[str, float, float]]:
    return [each for each in activities(device) if not each[0].startswith("Memcpy")]


def test_a_launch_returns_at_once_and_kernels_run_one_after_the_other(device, clock):
    device.launch(0.1, name="first")
    device.launch(0.1, name="second")
    assert clock() == BEGIN_S
    device.drain()
    assert clock() == seconds(BEGIN_S + 0.2)
    assert activities(device) == [("first", 0.0, 0.1), ("second", 0.1, 0.2)]


def test_a_drained_device_stands_idle_until_the_next_launch(device, clock):
    device.launch(0.1)
    clock.advance(0.3)
    device.launch(0.1)
    clock.advance(0.05)
    assert device.ledger.busy_s(BEGIN_S, clock()) == seconds(0.15)
    assert device.ledger.idle_s(BEGIN_S, clock()) == seconds(0.2)
    assert device.ledger.busy_spans(BEGIN_S, clock()) == [(BEGIN_S, BEGIN_S + 0.1), (BEGIN_S + 0.3, clock())]


def test_launches_that_take_the_host_longer_than_the_device_leave_gaps(device, clock):
    device.issue(10, host_s_each=0.01, gpu_s_each=0.004)
    assert clock() == seconds(BEGIN_S + 0.1)
    clock.advance(0.01)
    assert device.ledger.busy_s(BEGIN_S, clock()) == seconds(0.04)


def test_copies_have_engines_of_their_own_and_are_no_work(device, clock):
    side = device.new_queue()
    device.launch(0.1)
    device.copy(0.05, "h2d", side)
    device.copy(0.05, "d2h", device.new_queue())
    device.copy(0.1, "h2d", side)
    clock.advance(0.2)
    assert device.ledger.busy_s(BEGIN_S, clock()) == seconds(0.1)
    assert device.ledger.copy_s(BEGIN_S, clock()) == seconds(0.15)
    assert device.ledger.idle_s(BEGIN_S, clock()) == seconds(0.1)


def test_a_pageable_copy_blocks_the_host_until_the_stream_has_drained(device, clock):
    device.launch(0.1)
    device.copy(0.02)
    assert clock() == BEGIN_S
    device.copy(0.02, pinned=False)
    assert clock() == seconds(BEGIN_S + 0.14)
    assert activities(device)[2][0] == "Memcpy HtoD (Pageable -> Device)"
    assert device.ledger.waited_s(BEGIN_S, clock()) == seconds(0.14)


def test_a_stream_waits_for_another_only_where_it_is_told_to(device, clock):
    side = device.new_queue()
    device.copy(0.1, "h2d", side)
    copied = device.record(side)
    device.launch(0.03, name="independent")
    device.wait(copied)
    device.launch(0.03, name="dependent")
    device.drain()
    assert kernels(device) == [("independent", 0.0, 0.03), ("dependent", 0.1, 0.13)]


def test_a_kernel_that_waits_for_its_copy_does_not_hold_the_engine(device):
    side = device.new_queue()
    device.copy(0.1, "h2d", side)
    device.launch(0.05, side, "late")
    device.launch(0.05, name="early")
    device.drain()
    assert kernels(device) == [("early", 0.0, 0.05), ("late", 0.1, 0.15)]


def test_a_full_launch_queue_blocks_the_host(clock):
    device = Device(clock, launch_queue=2)
    for _ in range(4):
        device.launch(0.1)
    assert clock() == seconds(BEGIN_S + 0.2)
    assert {each.reason for each in device.ledger.waits} == {"launch queue"}


def test_the_ledger_joins_intervals_in_any_order_and_forgets_the_oldest():
    union = Union(most=3)
    for interval in [(5, 6), (1, 2), (1.5, 5.5), (8, 9)]:
        union.add(*interval)
    assert union.spans() == [(1, 6), (8, 9)]
    assert union.covered_s(0, 10, [(5, 7)]) == 7
    union.add(10, 11)
    union.add(12, 13)
    assert union.spans(9) == [(10, 11), (12, 13)]
    with pytest.raises(LookupError, match="begins at 9"):
        union.covered_s(0, 13)


# ---- collectives ----


def two_ranks(clock: ManualClock) -> list[Device]:
    board: dict[tuple[int, int], float] = {}
    return [Device(clock, Memory(rank, board, world_size=2)) for rank in range(2)]


def test_a_collective_ends_when_the_last_rank_has_joined(clock):
    ranks = two_ranks(clock)
    ends = []
    for device, compute_s in zip(ranks, (0.1, 0.3), strict=True):
        device.launch(compute_s)
        end = device.collective(0.05, "AllReduce")
        device.wait(end)
        device.launch(0.1, name="optimizer")
        ends.append(device.record())
    clock.advance(0.2)
    assert not ranks[0].passed(ends[0])
    for device, end in zip(ranks, ends, strict=True):
        device.wait_for(end, "test")
    assert activities(ranks[0])[1:] == [("AllReduce", 0.1, 0.35), ("optimizer", 0.35, 0.45)]
    assert activities(ranks[1])[1:] == [("AllReduce", 0.3, 0.35), ("optimizer", 0.35, 0.45)]


def test_a_collective_that_waits_counts_as_busy(clock):
    device = two_ranks(clock)[0]
    device.launch(0.1)
    device.wait(device.collective(0.05, "AllReduce"))
    clock.advance(0.5)
    assert device.ledger.busy_s(BEGIN_S, clock()) == seconds(0.5)
    with pytest.raises(RuntimeError, match="another rank has not joined"):
        device.drain()


def test_a_broadcast_waits_for_its_source_only(clock):
    source, other = two_ranks(clock)
    source.launch(0.2)
    mark = source.collective(0.01, "Broadcast", [0])
    source.wait_for(mark, "test")
    other.wait_for(other.collective(0.01, "Broadcast", [0]), "test")
    assert activities(source)[1] == ("Broadcast", 0.2, 0.21)
    assert activities(other) == [("Broadcast", seconds(0.21), seconds(0.22))]
