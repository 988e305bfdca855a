"""The event clock on a real GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from lightning_gpuopt.timeline.gpu_clock import GpuClock

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_it_reads_every_step_without_a_synchronize() -> None:
    clock = GpuClock(lambda: torch.cuda.Event(enable_timing=True))
    a = torch.randn(1024, 1024, device="cuda")
    for _ in range(100):
        clock.batch_arrives()
        clock.batch_copied()
        clock.compute_begins()
        a = a @ a * 1e-3
        clock.compute_ends()
        clock.read()
    deadline = time.monotonic() + 60
    while clock.times().steps < 100 and time.monotonic() < deadline:
        clock.read()
    times = clock.times()
    assert (times.steps, times.gaps) == (100, 99)
    assert times.compute_s > 0
    assert times.idle_s >= 0
