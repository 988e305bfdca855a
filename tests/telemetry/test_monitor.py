"""GpuMonitor: what the sampler, the ranks and the fleet make together, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lightning_gpuopt.telemetry.keys import select_metrics
from lightning_gpuopt.telemetry.monitor import GpuMonitor
from lightning_gpuopt.telemetry.visible import DeviceNotFoundError
from tests.helpers import wait_for
from tests.simulators.nvml import Gpu, Simulator, error, slow


@pytest.fixture
def start(simulator: Simulator) -> Iterator[Callable[..., GpuMonitor]]:
    started: list[GpuMonitor] = []

    def start_one(devices="all", **kwargs) -> GpuMonitor:
        monitor = GpuMonitor(select_metrics(["utilization"]), devices, interval_s=0.001, **kwargs)
        started.append(monitor)
        return monitor

    yield start_one
    for monitor in started:
        monitor.close(step=0, timeout_s=10, gather_timeout_s=0)


def test_a_cut_window_comes_back_under_its_step(simulator, start):
    simulator.machine(Gpu(utilization=70))
    monitor = start()
    wait_for(lambda: monitor.summary() != {})
    monitor.cut(step=49)
    assert monitor.has_pending
    assert monitor.ready() == [(49, {"gpu/0/utilization": 70.0})]
    assert not monitor.has_pending


def test_several_nodes_have_their_own_keys(simulator, start):
    simulator.machine(Gpu(utilization=70))
    monitor = start(node=1, num_nodes=2)
    wait_for(lambda: monitor.summary() != {})
    assert monitor.summary() == {"node1/gpu/0/utilization": 70.0}


def test_a_missing_device_is_given_to_who_waits(simulator, start):
    simulator.machine(Gpu())
    assert start().wait_until_open(10) is None
    missing = start([3]).wait_until_open(10)
    assert isinstance(missing, DeviceNotFoundError)


def test_a_failure_that_comes_late_is_news_and_told_once(simulator, start):
    simulator.machine(slow("nvmlInitWithFlags", 50), error("nvmlInitWithFlags", 9))
    monitor = start()
    wait_for(lambda: monitor.has_pending)
    assert [notice.cause for notice in monitor.notices()] == ["nvml-unavailable"]
    assert monitor.notices() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_way_to_the_other_ranks_each_keeps_to_itself_and_says_so_once(simulator, start, rank):
    simulator.machine(Gpu(utilization=70))
    monitor = start(rank=rank, world_size=2)
    wait_for(lambda: monitor.summary() != {})
    monitor.cut(step=0)
    assert monitor.ready() == [(0, {"gpu/0/utilization": 70.0})]
    assert [notice.cause for notice in monitor.notices()] == ["gather"]
    assert monitor.notices() == []


def test_a_channel_that_fails_is_pending_until_it_was_reported(simulator, start):
    simulator.machine(Gpu())
    monitor = start(rank=1, world_size=2)  # without a process group there is no store
    assert monitor.has_pending
    assert [notice.cause for notice in monitor.notices()] == ["gather"]
    assert not monitor.has_pending
