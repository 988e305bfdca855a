"""The event clock on a real GPU, whose kernels are of a known length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_gpuopt._measured import GpuTimes
from tests.gpu.clock_rig import HOOK, ClockRig
from tests.gpu.kernels import milliseconds

pytestmark = pytest.mark.gpu
STEPS = 40


@pytest.fixture
def kernel() -> Callable[[float], None]:
    return milliseconds()


@pytest.fixture
def strict(kernel: Callable[[float], None]) -> Iterator[None]:
    """CUDA refuses whatever waits for it."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def per_step_ms(times: GpuTimes, name: str) -> float:
    return times.idle.get(name, 0.0) / (times.steps - 1) * 1e3


def nearly(ms: float) -> object:
    """Within 5 %, or a millisecond."""
    return pytest.approx(ms, rel=0.05, abs=1.0)


@pytest.mark.usefixtures("strict")
def test_it_reads_every_step_without_a_synchronize() -> None:
    a = torch.randn(1024, 1024, device="cuda")
    rig = ClockRig(forward=True)
    for _ in range(100):
        rig.step(lambda: a @ a)
    times = rig.finish(100)
    assert times.steps == 100
    assert times.compute_s > 0
    assert 0 < times.forward_s <= times.compute_s
    assert times.idle_s >= 0


def test_a_sleep_behind_a_drained_gpu_is_idle_time_of_the_hook(kernel: Callable[[float], None]) -> None:
    def hook() -> None:
        torch.cuda.synchronize()
        time.sleep(0.02)

    rig = ClockRig()
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), hook=hook)
    times = rig.finish(STEPS)
    assert per_step_ms(times, HOOK) == nearly(20)
    assert times.idle_s / (STEPS - 1) * 1e3 == nearly(20)
    assert times.compute_s / STEPS * 1e3 == nearly(10)


@pytest.mark.usefixtures("strict")
def test_a_sleep_in_the_fetch_costs_what_the_gpu_does_not_hide(kernel: Callable[[float], None]) -> None:
    rig = ClockRig()
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), fetch=lambda: time.sleep(0.03))
    times = rig.finish(STEPS)
    assert per_step_ms(times, "data_wait") == nearly(20)
    assert per_step_ms(times, HOOK) < 1


@pytest.mark.usefixtures("strict")
def test_work_that_a_hook_queues_is_work(kernel: Callable[[float], None]) -> None:
    rig = ClockRig()
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), after_copy=lambda: kernel(4), hook=lambda: kernel(2))
    times = rig.finish(STEPS)
    assert times.queued_s / STEPS * 1e3 == nearly(6)
    assert times.idle_s / STEPS * 1e3 < 1


@pytest.mark.usefixtures("strict")
def test_a_host_that_runs_ahead_leaves_no_idle_time(kernel: Callable[[float], None]) -> None:
    rig = ClockRig()
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), fetch=lambda: time.sleep(0.003), hook=lambda: time.sleep(0.003))
    times = rig.finish(STEPS)
    assert times.idle_s / STEPS * 1e3 < 0.3
