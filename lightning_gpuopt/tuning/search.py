"""Chooses the number of workers to try next, and the final one: numbers in, a number out.

One worker first. What its batches cost says, by the model, how many are needed; that is tried. Then more, where they
may gain, or fewer, where as many batches could come from them, until neither is worth a trial. At last those again that
may have been disturbed, if that could change the choice. ``benchmarks/workers_rules.py`` says what each of these
gains, on cases that none was fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from lightning_gpuopt.measurements.loader_model import LoaderModel
from lightning_gpuopt.tuning.search_result import LimitedBy, Measured, NumWorkersResult
from lightning_gpuopt.tuning.worker_limits import Cap

_MAX_TRIALS: Final = 12
_BUSY: Final = 0.85  # from this share on, a processor, or this process's one thread, counts as in use all the time
_ALL_BUSY: Final = 1.0  # share of the processors, measured in ticks of 10 ms, from which on no more workers are tried
_OWN: Final = 0.5  # below this share in its own step, a consumer mostly takes batches: quicker when more lie ready
UNEVEN: Final = 0.25  # variance of a batch's time over its squared mean, from which on single batches hold up others
_TOO_MANY: Final = 1.4  # so many times the number that could do are worth a trial of fewer
_DISTURBED: Final = 0.65  # a trial beside which something else ran may have shown as little as this share
_SCATTER: Final = 0.05  # two trials of the same number that differ by more: one of them was disturbed
_MEASURED_TWICE: Final = 1.05  # what a consumer counts and what workers time agree to this factor


def model_of(first: Measured, cpus: float) -> LoaderModel:
    """The throughput model, from a trial of one worker."""
    cpu_s = min(first.cpu_s, first.service_s)
    return LoaderModel(
        first.service_s, cpu_s, first.consumer_s, first.consumer_cpu_s, (cpus,) * 3, unevenness=first.unevenness
    )


class Search:
    """The trials so far, and what follows from them; ``cpus`` are for the loader and its consumer."""

    def __init__(self, cpus: float, tolerance: float = 0.05) -> None:
        self.seen: list[Measured] = []
        self._cpus, self._tolerance = cpus, tolerance
        self._as_good = 1 - 0.8 * tolerance  # a fifth of it is left for what trials this short get wrong

    def next_count(self, cap: Cap, *, in_haste: bool = False) -> int | None:
        """How many workers to try; None when nothing is left to find out. In haste, nothing is tried a second time."""
        if not self.seen:
            return 1
        if len(self.seen) >= _MAX_TRIALS:
            return None
        if len(self._within(cap)) == 1:
            return self._second(cap.num_workers)
        untried = self._untried(cap)
        return self._again(cap) if untried is None and not in_haste else untried

    def choose(self, cap: Cap) -> NumWorkersResult:
        """The smallest number that is as fast as the best; if only one worker was tried, the model's number."""
        trials = tuple(each.trial for each in self.seen)
        if len(self._within(cap)) == 1 and self._second(cap.num_workers) is not None:
            model = model_of(self.seen[0], self._cpus)
            needed = model.workers_needed(cap.num_workers)
            return NumWorkersResult(needed, trials, "time", 1 / model.step_s(needed)[1])
        chosen = self._enough(self._within(cap))
        top = self._within(cap)[-1]
        if self._is_fed(chosen) or _is_busy(chosen):
            limited_by: LimitedBy = "consumer"
        elif self._cpu_share(chosen) >= _BUSY:
            limited_by = "cpu"
        elif _count(top) > _count(chosen) and _busy(top) < min(_BUSY, _busy(chosen)):  # more had less to do
            limited_by = "consumer"
        elif 1 < len(self.seen) < _MAX_TRIALS and self._untried(cap) is not None:
            limited_by = "time"
        else:
            limited_by = cap.limited_by if _count(chosen) >= cap.num_workers else "cpu"
        return NumWorkersResult(_count(chosen), trials, limited_by, chosen.trial.batches_per_s)

    def _untried(self, cap: Cap) -> int | None:
        more = self._more(cap)
        return self._fewer(cap) if more is None else more

    def _second(self, most: int) -> int | None:
        first = self.seen[0]
        needed = model_of(first, self._cpus).workers_needed(most)
        if needed == 1 and most > 1 and not self._is_fed(first):
            needed = 2
        return needed if needed > 1 else None

    def _more(self, cap: Cap) -> int | None:
        """If the largest number tried is the best, and nothing shows that it is the maximum: larger ones."""
        within = self._within(cap)
        top, count = within[-1], _count(within[-1])
        if _count(self._enough(within)) != count or count >= cap.num_workers:
            return None
        if self._is_fed(top) or _is_busy(top) or self._cpu_share(top) >= _ALL_BUSY:
            return None
        missing = 1.1 / max(top.consumer_s * _rate(top), 1e-9)
        return min(cap.num_workers, max(count + 1, math.ceil(count * min(max(missing, 1.25), 2.0))))

    def _fewer(self, cap: Cap) -> int | None:
        """If far fewer could have made as many batches: a number in between."""
        within = self._within(cap)
        enough = self._enough(within)
        count = _count(enough)
        least = max([self._least(enough), *(_count(each) + 1 for each in within if _count(each) < count)])
        return math.isqrt(least * count) if count >= _TOO_MANY * least else None

    def _again(self, cap: Cap) -> int | None:
        """A rival of the chosen number that may have been disturbed: of those with the fewest trials the best."""
        within = self._within(cap)
        enough = self._enough(within)
        as_good, number, least = self._as_good * _rate(enough), _count(enough), self._least(enough)
        rivals = [each for each in within if least <= _count(each) < number]
        rivals += sorted((each for each in within if _count(each) > number), key=_rate, reverse=True)[:1]
        doubtful = [
            each
            for each in rivals
            if _rate(each) >= _DISTURBED * as_good
            # two trials that agree are sure; after three it is as sure as it gets
            and len(trials := self._trials(_count(each))) < 3
            and len(_agreeing(trials)) < 2
        ]
        first = min(doubtful, key=lambda each: (len(self._trials(_count(each))), -_rate(each)), default=None)
        return None if first is None else _count(first)

    def _trials(self, count: int) -> list[Measured]:
        return [each for each in self.seen if _count(each) == count]

    def _within(self, cap: Cap) -> Sequence[Measured]:
        """One measurement for each number that still fits, smallest first: the mean of its trials that agree.

        What else runs on a machine makes a trial slower, hardly ever faster, but the best of several is the luckiest.
        """
        counts = sorted({count for count in map(_count, self.seen) if count <= cap.num_workers})
        return [_mean(_agreeing(self._trials(count))) for count in counts]

    def _enough(self, trials: Sequence[Measured]) -> Measured:
        best = max(map(_rate, trials))
        return min((each for each in trials if _rate(each) >= self._as_good * best), key=_count)

    def _least(self, enough: Measured) -> int:
        """A batch takes a worker so long that fewer than these cannot give as many."""
        return math.ceil((1 - self._tolerance) * _rate(enough) * min(each.service_s for each in self.seen))

    def _is_fed(self, measured: Measured) -> bool:
        """Whether the consumer gets all the batches that it can take, by its own time."""
        own = 1 - measured.trial.data_wait_s * measured.trial.batches_per_s
        if _count(measured) == 1 and own < _OWN:  # it and its consumer wait for one another
            return False
        return _rate(measured) * measured.consumer_s >= self._as_good

    def _cpu_share(self, measured: Measured) -> float:
        return (measured.cpu_s + measured.consumer_cpu_s) * measured.trial.batches_per_s / self._cpus


def _agreeing(trials: Sequence[Measured]) -> list[Measured]:
    """The trials that agree, up to their scatter: most of them; in a tie, the faster ones."""
    groups = [[each for each in trials if (1 - _SCATTER) * _rate(top) <= _rate(each) <= _rate(top)] for top in trials]
    return max(groups, key=lambda group: (len(group), max(map(_rate, group))))


def _mean(trials: Sequence[Measured]) -> Measured:
    """The best of several trials of a number, with the mean throughput of all."""
    best = max(trials, key=_rate)
    rate = fmean(each.trial.batches_per_s for each in trials)
    wait_s = fmean(each.trial.data_wait_s for each in trials)
    return replace(best, trial=replace(best.trial, batches_per_s=rate, data_wait_s=wait_s))


def _count(measured: Measured) -> int:
    return measured.trial.num_workers


def _rate(measured: Measured) -> float:
    """Batches per second that can be kept up: a trial may have lived on what was prepared before it began."""
    possible = _count(measured) / measured.service_s if measured.service_s > 0 else math.inf
    return min(measured.trial.batches_per_s, _MEASURED_TWICE * possible)


def _busy(measured: Measured) -> float:
    """Share of their time in which the workers work, 0-1."""
    return measured.trial.batches_per_s * measured.service_s / _count(measured)


def _is_busy(measured: Measured) -> bool:
    """Whether taking the batches keeps this process busy all the time."""
    return measured.consumer_cpu_s * measured.trial.batches_per_s >= _BUSY
