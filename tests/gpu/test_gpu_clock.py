"""The event clock on a real GPU, whose kernels are of a known length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

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


class Sleep:
    """Sleeps, and notes for how long it really was."""

    def __init__(self, seconds: float, first: Callable[[], object] = lambda: None) -> None:
        self.seconds, self.first = seconds, first
        self.slept_s = 0.0

    def __call__(self) -> None:
        self.first()
        begin_s = time.perf_counter()
        time.sleep(self.seconds)
        self.slept_s += time.perf_counter() - begin_s


def nearly(seconds: float) -> object:
    """Within 5 %, or a millisecond a step."""
    return pytest.approx(seconds, rel=0.05, abs=1e-3 * STEPS)


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
    rig, hook = ClockRig(), Sleep(0.02, torch.cuda.synchronize)
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), hook=hook)
    times = rig.finish(STEPS)
    assert times.idle[HOOK] == nearly(hook.slept_s)
    assert times.idle_s == nearly(hook.slept_s)
    assert times.compute_s == nearly(0.01 * STEPS)


@pytest.mark.usefixtures("strict")
def test_a_sleep_in_the_fetch_costs_what_the_gpu_does_not_hide(kernel: Callable[[float], None]) -> None:
    rig, fetch = ClockRig(), Sleep(0.03)
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), fetch=fetch)
    times = rig.finish(STEPS)
    assert times.idle["data_wait"] == nearly(fetch.slept_s - 0.01 * (STEPS - 1))
    assert times.idle.get(HOOK, 0.0) < 1e-3 * STEPS


@pytest.mark.usefixtures("strict")
def test_work_that_a_hook_queues_is_work(kernel: Callable[[float], None]) -> None:
    rig = ClockRig()
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), after_copy=lambda: kernel(4), hook=lambda: kernel(2))
    times = rig.finish(STEPS)
    assert times.queued_s == nearly(0.006 * STEPS)
    assert times.idle_s < 1e-3 * STEPS


@pytest.mark.usefixtures("strict")
def test_a_host_that_runs_ahead_leaves_no_idle_time(kernel: Callable[[float], None]) -> None:
    rig, sleep = ClockRig(), Sleep(0.003)
    for _ in range(STEPS):
        rig.step(lambda: kernel(10), fetch=sleep, hook=sleep)
    times = rig.finish(STEPS)
    assert times.idle_s < 0.3e-3 * STEPS
