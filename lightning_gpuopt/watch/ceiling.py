"""How ``watch --ceiling`` measures: its steps, its clock, and what comes out. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.predict import without_data_s
from lightning_gpuopt.diagnosis.record import Change

CEILING_FILE: Final = "ceiling.json"

_WARM_UP: Final = 10
_MAX_WARM_UP: Final = 100
_LOADER: Final = 100
_FREE: Final = 60
_LEAST: Final = 20  # steps of a rate, at least: one window


@dataclass(frozen=True)
class Plan:
    """Which steps of a ``fit`` are measured; a step is a training batch."""

    warm_up: int  # steps before the first measured one
    loader: int  # measured steps with the loader as it is
    settle: int  # steps with batches from memory before those that are measured
    free: int  # measured steps with batches from memory

    @property
    def switch_at(self) -> int:
        """After so many steps batches come from memory."""
        return self.warm_up + self.loader

    @property
    def free_from(self) -> int:
        """After so many steps their rate is measured."""
        return self.switch_at + self.settle

    @property
    def steps(self) -> int:
        return self.free_from + self.free


def plan_of(steps: int | None, queued: int = 0, rhythm: int = 1) -> Plan | None:
    """What to measure in so many steps (None: no end can be foreseen); None if the run is too short.

    ``queued`` batches may be finished when training begins: they say nothing of the loader's rate. ``rhythm`` is the
    batches of an optimizer step: each rate is that of whole ones.
    """
    warm_up = min(max(_WARM_UP, queued), _MAX_WARM_UP)
    loader, free = max(_LOADER, rhythm), max(_FREE, rhythm)
    if steps is not None:
        room = steps - warm_up - _WARM_UP
        free = min(free, room // 2)
        loader = min(loader, room - free)
    loader, free = loader - loader % rhythm, free - free % rhythm
    return Plan(warm_up, loader, _WARM_UP, free) if min(loader, free) >= _LEAST else None


class Meter:
    """The rate of steps that follow one another."""

    def __init__(self) -> None:
        self.steps = 0  # those that count
        self.counts = True  # whether the step under way is to count
        self._seconds = 0.0
        self._last_s: float | None = None

    def leave_out(self, drain_s: float = 0.0) -> None:
        """The step under way does not count; the device still needed ``drain_s`` seconds for the steps before."""
        if self._last_s is not None and self.counts:
            self._seconds += drain_s
        self.counts = False

    def step_ends(self, now_s: float) -> None:
        """A step has ended, or what came before the first one; by the clock, in seconds."""
        if self._last_s is not None and self.counts:
            self.steps += 1
            self._seconds += now_s - self._last_s
        self._last_s, self.counts = now_s, True

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second; None if none counts."""
        return self.steps / self._seconds if self.steps and self._seconds > 0 else None


class Prediction:
    """Upper bound of a faster loader's gain, from a StallDetector's windows, and the rate of the loader alone."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self._now_s = self._without_s = 0.0
        self._alone_s, self._alone = 0.0, 0

    def window_closed(self, window: Measurement, *_: Any) -> bool:
        """Add a window; nothing has to be measured anew."""
        if window.waterfall.step_s is not None:
            self._now_s += window.waterfall.step_s * window.times.steps
            self._without_s += without_data_s(window) * window.times.steps
        batch_s = _batch_s(window)
        if batch_s is not None:
            self._alone_s += batch_s * window.times.steps
            self._alone += window.times.steps
        return False

    def training_ended(self) -> None:
        """There is nothing to conclude."""

    @property
    def at_most(self) -> float | None:
        """Steps per second over now, at least 1; None before the first window."""
        return max(self._now_s / self._without_s, 1.0) if self._without_s else None

    @property
    def loader_steps_per_s(self) -> float | None:
        """Steps per second of the loader alone; None if its batches were not timed."""
        return self._alone / self._alone_s if self._alone_s else None


def _batch_s(window: Measurement) -> float | None:
    """Seconds that the loader needs for a batch, its workers side by side; None if nothing was timed in it."""
    workers, number = window.workers, window.loader.num_workers
    if workers.batches:
        return workers.busy_s / workers.batches / (number or 1)
    later = window.times.steps - window.times.epochs  # the others' batches are a part of the epoch's set-up
    return window.times.phases["data_wait"] / later if number == 0 and later > 0 else None


@dataclass(frozen=True)
class Ceiling:
    steps_per_s: float  # of the run as it is
    free_steps_per_s: float  # with batches from memory
    steps: int  # of which the first is the rate
    free_steps: int  # of which the second is the rate
    batches: int  # that were handed out again and again
    predicted: float | None = None  # at most, by the report of the steps with the loader; None if none was made
    loader_steps_per_s: float | None = None  # by the time that its batches take; None: not timed

    @property
    def at_most(self) -> float:
        """Upper bound of a faster loader's gain: steps per second relative to the unchanged run; at least 1."""
        return max(self.free_steps_per_s / self.steps_per_s, 1.0)

    def __str__(self) -> str:
        alone = f", your loader alone {_figure(self.loader_steps_per_s)}" if self.loader_steps_per_s else ""
        return (
            f"with free data: {_figure(self.free_steps_per_s)} steps/s; your run {_figure(self.steps_per_s)}{alone}: a "
            f"faster loader gains {self.at_most:.1f}x at most"
        )


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
