"""How long single steps take: their distribution in bounded memory, and the outliers and where they lost their time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Final

from lightning_gpuopt.measurements.phases import BETWEEN_STEPS, PHASES, Outlier, StepTimes
from lightning_gpuopt.timeline.phases import Timeline

_PER_DECADE: Final = 40
_MIN_S: Final = 1e-5
_BINS: Final = 9 * _PER_DECADE  # from 10 µs to about three hours, each bin 6 % wider than the one before
_MAX_PENDING: Final = 100
_MAX_OUTLIERS: Final = 100
_OUTLIER_FACTOR: Final = 2.0
_MIN_OUTLIER_S: Final = 0.002  # a step is an outlier when it takes twice the median, and at least 2 ms more
_ASIDE: Final = [index for index, phase in enumerate(PHASES) if phase in BETWEEN_STEPS]


class StepClock:
    """Takes the time of each step of a timeline, without so many steps of warm-up."""

    def __init__(self, timeline: Timeline, warmup_steps: int) -> None:
        self._timeline = timeline
        self._warmup_steps = warmup_steps
        self._kinds = {False: _Kind(), True: _Kind()}
        self._before: list[int] = timeline.snapshot()
        self._inside = 0
        self._slowest_s = 0.0
        self._outliers: list[tuple[float, int, Outlier]] = []
        self._outlier_count = 0
        self._outlier_s = 0.0

    def step_done(self, accumulating: bool = False) -> None:
        """A step has ended; costs a few µs. One that only accumulated gradients is compared with others that did."""
        timeline = self._timeline
        inside, self._inside = self._inside, timeline.inside_steps_ns
        before, self._before = self._before, timeline.snapshot()
        if timeline.steps <= self._warmup_steps:
            return
        seconds = (self._inside - inside) / 1e9
        kind = self._kinds[accumulating]
        kind.pending.append(seconds)
        if len(kind.pending) == _MAX_PENDING:
            kind.count()
        if seconds > self._slowest_s:
            self._slowest_s = seconds
        if seconds > kind.threshold_s:
            self._note_outlier(before, self._before, seconds, kind.median_s)

    def window_done(self) -> None:
        """Take the median of each kind of step so far as the measure of what an outlier is."""
        for kind in self._kinds.values():
            kind.count()
            median_s = _quantile(kind.bins, 0.5)
            if median_s is not None:
                kind.median_s = median_s
                kind.threshold_s = max(_OUTLIER_FACTOR * median_s, median_s + _MIN_OUTLIER_S)

    def times(self) -> StepTimes:
        for kind in self._kinds.values():
            kind.count()
        bins_of = [sum(counts) for counts in zip(*(kind.bins for kind in self._kinds.values()), strict=True)]
        filled = [index for index, count in enumerate(bins_of) if count]
        if not filled:
            return StepTimes()
        bins = range(filled[0], filled[-1] + 1)
        return StepTimes(
            edges_s=tuple(_edge_of(index) for index in range(bins.start, bins.stop + 1)),
            counts=tuple(bins_of[index] for index in bins),
            median_s=_quantile(bins_of, 0.5),
            p90_s=_quantile(bins_of, 0.9),
            p99_s=_quantile(bins_of, 0.99),
            slowest_s=self._slowest_s,
            outliers=tuple(sorted((each for _, _, each in self._outliers), key=lambda each: each.step)),
            outlier_count=self._outlier_count,
            outlier_s=self._outlier_s,
        )

    def _note_outlier(self, before: list[int], after: list[int], seconds: float, median_s: float) -> None:
        self._outlier_count += 1
        self._outlier_s += seconds - median_s
        if len(self._outliers) == _MAX_OUTLIERS and seconds <= self._outliers[0][0]:
            return  # slower ones are kept
        timeline = self._timeline
        phases = timeline.phases_between(before, after)
        means = [ns / timeline.steps for ns in timeline.phases_between([], after)]
        within = [index for index in range(len(PHASES)) if index not in _ASIDE]
        worst = max(within, key=lambda index: phases[index] - means[index])
        step = timeline.steps - 1
        outlier = Outlier(step, sum(after) / 1e9, seconds, PHASES[worst], phases[worst] / 1e9)
        entry = (seconds, step, outlier)
        if len(self._outliers) < _MAX_OUTLIERS:
            heapq.heappush(self._outliers, entry)
        else:
            heapq.heappushpop(self._outliers, entry)


class _Kind:
    """Steps of one kind: how many in each bin, seconds of those in none yet, and what an outlier among them is."""

    def __init__(self) -> None:
        self.bins = [0] * _BINS
        self.pending: list[float] = []
        self.median_s = 0.0
        self.threshold_s = math.inf

    def count(self) -> None:
        """Put the pending steps into their bins: of many at a time each takes a tenth as long as by itself."""
        for seconds in self.pending:
            self.bins[_bin_of(seconds)] += 1
        self.pending.clear()


def _quantile(bins: Sequence[int], share: float) -> float | None:
    """The step time below which this share of the steps lies, from the bins: true within 3 %; None without steps."""
    left = share * sum(bins)
    if not left:
        return None
    for index, count in enumerate(bins):
        left -= count
        if left <= 0:
            return math.sqrt(_edge_of(index) * _edge_of(index + 1))
    raise AssertionError("the bins hold every step")


def _bin_of(seconds: float) -> int:
    if seconds <= _MIN_S:
        return 0
    return min(int(math.log10(seconds / _MIN_S) * _PER_DECADE), _BINS - 1)


def _edge_of(index: int) -> float:
    return float(_MIN_S * 10 ** (index / _PER_DECADE))
