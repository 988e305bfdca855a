"""Times the fetches of a running loader: its consumer's wait, and its workers' batches in flight.

The iterator stays the same object, with a ``__next__`` of ours around its own, which mostly only counts down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import fmean, median
from typing import Any, Final

from lightning_gpuopt.compat.dataloader import in_the_making, lies_ready, workers_of
from lightning_gpuopt.measurements.loader_model import receive_cost, taking
from lightning_gpuopt.telemetry.host import times_of
from lightning_gpuopt.timeline.worker_clock import nbytes_of
from lightning_gpuopt.tuning.running_search import LoaderStats
from lightning_gpuopt.tuning.worker_limits import files_of

_PAUSE: Final = 4.0  # a step that takes so many times the median contains a validation, a checkpoint or the like
_USUAL: Final = 0.75  # share of usual steps below which pauses are training's own pace, as where gradients accumulate
_NEVER: Final = 1 << 60


class FetchMeter:
    """Times the fetches of one loader, whichever iterator they come from; ``seen`` is the last complete window."""

    def __init__(self, skip: int, window: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.begin(skip, window)

    def begin(self, skip: int, window: int) -> None:
        """Ignore ``skip`` fetches, then measure ``window`` steps."""
        self.asleep = skip
        self.seen: LoaderStats | None = None
        self._window = window
        self._last: float | None = None
        self._waits: list[float] = []
        self._owns: list[float] = []
        self._ready: list[float] = []
        self._busy: list[int] = []
        self._cpu_began: tuple[float | None, float] = None, 0.0
        self._bytes, self._tensors = 0.0, 0

    def sleep(self) -> None:
        self.begin(_NEVER, self._window)

    def epoch_begins(self, skip: int) -> None:
        """Ignore a new iterator's first fetches, and the time between epochs."""
        if self.seen is None:
            self.asleep = max(self.asleep, skip)
            self._last = None

    def fetch(self, iterator: Any, take: Callable[[], Any]) -> Any:
        workers = workers_of(iterator)
        ready, busy = lies_ready(iterator), in_the_making(iterator)
        began = self._clock()
        batch = take()
        ended = self._clock()
        last, self._last = self._last, ended
        if last is None:
            self._bytes, self._tensors = float(nbytes_of(batch)), files_of(batch)
            self._cpu_began = _cpu_s(workers), time.process_time()
            return batch
        self._waits.append(ended - began)
        self._owns.append(began - last)
        if ready:
            self._ready.append(ended - began)
        if busy is not None:
            self._busy.append(busy)
        if len(self._waits) >= self._window:
            seen = self._close(workers)
            self.sleep()
            self.seen = seen
        return batch

    def _close(self, workers: Any) -> LoaderStats:
        steps = len(self._waits)
        taking_s = taking(self._ready) if self._ready else receive_cost(self._bytes)[1] if workers else 0.0
        wait_s = fmean(max(wait - taking_s, 0.0) for wait in self._waits)  # without taking finished batches
        usual_s = median(self._owns)
        usual = [own for own in self._owns if own <= _PAUSE * usual_s]
        own_s = fmean(usual if len(usual) > _USUAL * steps else self._owns)
        cpu_before, process_before = self._cpu_began
        cpu_after, process_s = _cpu_s(workers), time.process_time() - process_before
        worker_cpu_s = None if cpu_before is None or cpu_after is None else max(cpu_after - cpu_before, 0.0) / steps
        busy, step_s = fmean(self._busy) if self._busy else None, own_s + fmean(self._waits)
        return LoaderStats(step_s, wait_s, busy, worker_cpu_s, process_s / steps, self._bytes, self._tensors)


class _Timed:
    """Base class put before an iterator's own class: times its fetches."""

    _gpuopt_meter: FetchMeter

    def __next__(self) -> Any:
        meter = self._gpuopt_meter
        if meter.asleep > 0:
            meter.asleep -= 1
            return super().__next__()  # type: ignore[misc]
        return meter.fetch(self, super().__next__)  # type: ignore[misc]


@cache
def _timed(kind: type) -> type:
    return type(f"Timed{kind.__name__}", (_Timed, kind), {})


def place(meter: FetchMeter, iterator: Any) -> bool:
    """Have a meter time an iterator's fetches; False if it cannot, as with a generator."""
    kind: Any = type(iterator)
    try:
        iterator._gpuopt_meter = meter
        if not issubclass(kind, _Timed):
            iterator.__class__ = _timed(kind)
    except (AttributeError, TypeError):
        return False
    return True


def _cpu_s(workers: Any) -> float | None:
    """CPU seconds of these processes' main threads; None if that cannot be read."""
    times = times_of([f"/proc/{each.pid}/schedstat" for each in workers])
    return None if times is None else sum(ran for ran, _ in times.values()) / 1e9
