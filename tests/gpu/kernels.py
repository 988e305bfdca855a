"""Kernels of a known length."""

from __future__ import annotations

from collections.abc import Callable

import torch


def milliseconds() -> Callable[[float], None]:
    """What queues a kernel of so many milliseconds: ``torch.cuda._sleep``, whose cycles are those of this GPU now."""
    cycles = 10_000_000
    for _ in range(20):  # until the clocks are up
        torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    per_ms = cycles / (begin.elapsed_time(end) / 20)
    return lambda ms: torch.cuda._sleep(round(ms * per_ms))
