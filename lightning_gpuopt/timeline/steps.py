"""How long single steps take: their distribution in bounded memory, and the outliers and where they lost their time."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.timeline.actions import BETWEEN_STEPS, PHASES
from lightning_gpuopt.timeline.phases import Timeline

_PER_DECADE: Final = 40
_SMALLEST_S: Final = 1e-5
_BINS: Final = 9 * _PER_DECADE
"""From 10 µs to about three hours, each bin 6 % wider than the one before."""

_MOST_OUTLIERS: Final = 100
_OUTLIER_FACTOR: Final = 2.0
_OUTLIER_LEAST_S: Final = 0.002
"""A step is an outlier when it takes twice the median, and at least 2 ms more."""

_ASIDE: Final = [index for index, phase in enumerate(PHASES) if phase in BETWEEN_STEPS]


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took much longer than the others.

    Attributes:
        step: number of the training batch in this run, from 0.
        at_s: when it ended, in seconds since the timeline's start.
        seconds: how long it took, without validation, checkpoints and the set-up of epochs.
        phase: the phase in which it lost most, against the mean of the run.
        phase_s: seconds that it spent in that phase.
    """

    step: int
    at_s: float
    seconds: float
    phase: str
    phase_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Distribution of step times after warm-up.

    Attributes:
        edges_s: lower edges of the bins that are not empty, in seconds, and the upper edge of the last.
        counts: steps in each bin.
        median_s: half of the steps took less.
        p90_s: nine tenths took less.
        p99_s: 99 of 100 took less.
        slowest_s: the slowest.
        outliers: the slowest outliers, in order of time; at most 100.
        outlier_count: how many there were in all.
        outlier_s: seconds that all of them took more than the median.
    """

    edges_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    median_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    slowest_s: float | None = None
    outliers: tuple[Outlier, ...] = ()
    outlier_count: int = 0
    outlier_s: float = 0.0


class StepClock:
    """Takes the time of each step of a timeline.

    Args:
        timeline: the timeline whose steps they are.
        warmup_steps: steps at the beginning that are left out.

    Example::

        clock = StepClock(timeline, warmup_steps=5)
        clock.step_done()          # after each timeline.step_done()
        clock.times().median_s
    """

    def __init__(self, timeline: Timeline, warmup_steps: int) -> None:
        self._timeline = timeline
        self._warmup_steps = warmup_steps
        self._bins = [0] * _BINS
        self._count = 0
        self._before: list[int] = timeline.snapshot()
        self._inside = 0
        self._slowest_s = 0.0
        self._threshold_s = math.inf
        self._median_s = 0.0
        self._outliers: list[tuple[float, int, Outlier]] = []
        self._outlier_count = 0
        self._outlier_s = 0.0

    def step_done(self) -> None:
        """A step has ended; costs a few µs."""
        timeline = self._timeline
        after = timeline.snapshot()
        before, self._before = self._before, after
        # what is no part of a step, and all of it, since the timeline's start
        aside, total = sum(map(after.__getitem__, timeline.slots_between_steps)), sum(after)
        inside, self._inside = self._inside, total - aside
        if timeline.steps <= self._warmup_steps:
            return
        seconds = (self._inside - inside) / 1e9
        self._bins[_bin_of(seconds)] += 1
        self._count += 1
        if seconds > self._slowest_s:
            self._slowest_s = seconds
        if seconds > self._threshold_s:
            self._note_outlier(before, after, seconds)

    def window_done(self) -> None:
        """Take the median of the steps so far as the measure of what an outlier is."""
        median_s = self._quantile(0.5)
        if median_s is not None:
            self._median_s = median_s
            self._threshold_s = max(_OUTLIER_FACTOR * median_s, median_s + _OUTLIER_LEAST_S)

    def times(self) -> StepTimes:
        """The distribution so far."""
        filled = [index for index, count in enumerate(self._bins) if count]
        if not filled:
            return StepTimes()
        bins = range(filled[0], filled[-1] + 1)
        return StepTimes(
            edges_s=tuple(_edge_of(index) for index in range(bins.start, bins.stop + 1)),
            counts=tuple(self._bins[index] for index in bins),
            median_s=self._quantile(0.5),
            p90_s=self._quantile(0.9),
            p99_s=self._quantile(0.99),
            slowest_s=self._slowest_s,
            outliers=tuple(sorted((each for _, _, each in self._outliers), key=lambda each: each.step)),
            outlier_count=self._outlier_count,
            outlier_s=self._outlier_s,
        )

    def _note_outlier(self, before: list[int], after: list[int], seconds: float) -> None:
        timeline = self._timeline
        phases = timeline.phases_between(before, after)
        means = [ns / timeline.steps for ns in timeline.phases_between([], after)]
        within = [index for index in range(len(PHASES)) if index not in _ASIDE]
        worst = max(within, key=lambda index: phases[index] - means[index])
        step = timeline.steps - 1
        outlier = Outlier(step, sum(after) / 1e9, seconds, PHASES[worst], phases[worst] / 1e9)
        self._outlier_count += 1
        self._outlier_s += seconds - self._median_s
        entry = (seconds, step, outlier)
        if len(self._outliers) < _MOST_OUTLIERS:
            heapq.heappush(self._outliers, entry)
        else:
            heapq.heappushpop(self._outliers, entry)

    def _quantile(self, share: float) -> float | None:
        """The step time below which this share of the steps lies, from the bins: true within 3 %."""
        if not self._count:
            return None
        left = share * self._count
        for index, count in enumerate(self._bins):
            left -= count
            if left <= 0:
                return math.sqrt(_edge_of(index) * _edge_of(index + 1))
        raise AssertionError("the bins hold every step")


def _bin_of(seconds: float) -> int:
    if seconds <= _SMALLEST_S:
        return 0
    return min(int(math.log10(seconds / _SMALLEST_S) * _PER_DECADE), _BINS - 1)


def _edge_of(index: int) -> float:
    return float(_SMALLEST_S * 10 ** (index / _PER_DECADE))
