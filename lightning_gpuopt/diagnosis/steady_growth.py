"""Whether a figure of a process grows for good, and how fast. Pure: readings in, numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Final

_MOST_POINTS: Final = 60  # points that are looked at, evenly spread: the slopes between all pairs are compared
# the last third grows at least by this share of what the one before it grew by; less is coming to rest
_STILL: Final = 0.25
_ONE_STEP: Final = 0.4  # a step that makes up more of the whole growth was a single event
_OFTEN: Final = 0.3  # share of the readings that must have grown


@dataclass(frozen=True)
class SteadyGrowth:
    rate: float  # growth per unit, in the later half
    grown: float  # for good, after the beginning
    evenness: float  # 0-1; 1 if it grows as fast at the end as at the beginning


def steady_growth(points: Sequence[tuple[float, float]], least: int = 6) -> SteadyGrowth | None:
    """How a figure grows, of (unit, figure) in order; None if it does not, came to rest, or grew in a few steps.

    The first tenth, at least one reading, is left out: imports, the first batch. What falls again has not grown: each
    reading counts as the least of those from it on, so that a garbage collector's saw-teeth count for nothing.
    """
    later = points[max(1, len(points) // 10) :]
    if len(later) < least:
        return None
    every = -(-len(later) // _MOST_POINTS)
    later = later[::-1][::every][::-1]
    kept = list(accumulate((value for _, value in reversed(later)), min))[::-1]
    grown = kept[-1] - kept[0]
    steps = [after - before for before, after in pairwise(kept)]
    if grown <= 0 or max(steps) > _ONE_STEP * grown or sum(step > 0 for step in steps) < _OFTEN * len(steps):
        return None
    third = len(kept) // 3
    first, middle, last = (statistics.median(part) for part in (kept[:third], kept[third:-third], kept[-third:]))
    before, after = middle - first, last - middle
    if before <= 0 or after < _STILL * before:
        return None
    half = list(zip([unit for unit, _ in later], kept, strict=True))[len(kept) // 2 :]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(half, 2) if b[0] > a[0]]
    rate = statistics.median(slopes) if slopes else 0.0  # Theil and Sen: outliers do not move it
    return SteadyGrowth(rate, grown, min(before, after) / max(before, after)) if rate > 0 else None
