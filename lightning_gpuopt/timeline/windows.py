"""Cuts a timeline into windows, sets warm-up aside, and keeps the whole run in a bounded number of stretches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from lightning_gpuopt.measurements.phases import PhaseTimes

_MAX_STRETCHES: Final = 512


T = TypeVar("T")


class BoundedSeries(Generic[T]):
    """Keeps at most so many ``items``; when there are more, each two neighbours become one from then on."""

    def __init__(self, most: int, joined: Callable[[T, T], T]) -> None:
        self.items: list[T] = []
        self.in_last = 0  # how many were joined in the last
        self._most = most
        self._joined = joined
        self._per_item = 1

    def add(self, item: T) -> None:
        if self.items and self.in_last < self._per_item:
            self.items[-1] = self._joined(self.items[-1], item)
            self.in_last += 1
            return
        self.items.append(item)
        self.in_last = 1
        if len(self.items) > self._most:
            pairs = [self.items[at : at + 2] for at in range(0, len(self.items), 2)]
            self.items = [self._joined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
            self._per_item *= 2


@dataclass(frozen=True, slots=True)
class Window:
    start_s: float  # since the timeline's start
    times: PhaseTimes
    gpu_utilization: float | None = None  # NVML's of this rank's GPU meanwhile, 0-100 %; None: none


class Windows:
    """Window by window through a run, in training batches; those of warm-up are in no window."""

    def __init__(self, window_size: int, warmup_steps: int) -> None:
        self._window_size = window_size
        self._warmup_steps = warmup_steps
        self._next = warmup_steps if warmup_steps else window_size
        self._warm: PhaseTimes | None = None
        self._needs_warmup = warmup_steps > 0
        self._began = 0
        self._last = PhaseTimes()
        self._stretches = BoundedSeries(_MAX_STRETCHES, _joined)

    @property
    def least_steps(self) -> int:
        """Steps that a measurement needs, since the last change: those of the warm-up, and one more."""
        warm = self._warm.steps if self._warm is not None else self._next
        return (warm - self._began if self._needs_warmup else 0) + 1

    def due(self, steps: int) -> bool:
        """Whether a window, or warm-up, ends with this many steps done."""
        return steps >= self._next

    def close(self, reading: PhaseTimes) -> Window | None:
        """End the window under way; None when it was warm-up that ended, or goes on."""
        window = Window(self._last.wall_s, reading - self._last)
        if reading.steps > self._last.steps:
            self._stretches.add(window)
        self._last = reading
        self._next = reading.steps + self._window_size
        if self._needs_warmup and self._warm is None:
            if reading.steps - self._began >= self._warmup_steps:
                self._warm = reading
            return None
        return window

    def annotate(self, gpu_utilization: float | None) -> None:
        """Add NVML's mean utilization over the window, 0-100 %, to the stretch that was closed last."""
        series = self._stretches
        if series.items and gpu_utilization is not None:
            seen, share = series.items[-1].gpu_utilization, 1 / series.in_last
            mean = gpu_utilization if seen is None else seen + (gpu_utilization - seen) * share
            series.items[-1] = replace(series.items[-1], gpu_utilization=mean)

    def restart(self, reading: PhaseTimes, *, in_step: bool = False) -> None:
        """Measure anew after a change, beginning with another warm-up.

        With ``in_step`` windows end at the same steps as before, as other ranks' do: the rest of this one is the
        warm-up.
        """
        due = self._next
        if reading.steps > self._last.steps:
            self.close(reading)
        self._warm = None
        self._needs_warmup = True
        self._began = reading.steps
        self._next = due if in_step else reading.steps + max(self._warmup_steps, 1)

    def steady(self, reading: PhaseTimes) -> PhaseTimes | None:
        """What came after warm-up; None while warm-up goes on."""
        if not self._needs_warmup:
            return reading
        return reading - self._warm if self._warm is not None else None

    def stretches(self, reading: PhaseTimes) -> list[Window]:
        """The whole run until now, oldest first, in at most 513 stretches."""
        rest = Window(self._last.wall_s, reading - self._last)
        return [*self._stretches.items, rest] if rest.times.wall_s > 0 else list(self._stretches.items)


def _joined(first: Window, second: Window) -> Window:
    known = [each for each in (first.gpu_utilization, second.gpu_utilization) if each is not None]
    return Window(first.start_s, first.times + second.times, sum(known) / len(known) if known else None)
