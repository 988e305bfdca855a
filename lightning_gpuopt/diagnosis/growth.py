"""Whether the steps of a run get slower, since when, and which part of them grows. Pure: records in, numbers out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Final

from lightning_gpuopt.measurements.phases import GPU_WORK, WindowRecord

_MIN_RECORDS: Final = 6
_MIN_SLOW_RECORDS: Final = 3
_MIN_GROWTH: Final = 0.1  # the last third takes longer than the first by this share
# so many times the usual scatter, from record to record, lies between the first third and the last
_OVER_NOISE: Final = 4.0
_BACK: Final = 0.25  # a record that has come back to this share of the growth, or less, ends what was slow before it
_BEGUN: Final = 0.1
# where more of the records before the growth were slow as well, the steps come and go: a pattern, no growth
_SLOW_BEFORE: Final = 0.2
_LONG_S: Final = 10.0
_RISES: Final = 0.9
_FEW_RECORDS: Final = 5
_ONE_CHANGE: Final = 0.5
_MUCH: Final = 0.5
"""In fewer seconds other programs, caches, clocks and batches that were made ahead make steps slower as well, once.

There a growth has to go on: in nine of ten pairs of records the later is the slower, and the last third takes half as
long again as the first.
"""

_DOUBLED: Final = 2.0
_MOSTLY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Growth:
    """Steps that take longer and longer; first and last thirds of the records are compared."""

    from_s: float  # seconds of a step in the first third, the median
    to_s: float  # the same of the last third
    since_step: int
    lost_s: float  # what all steps since then took more than ``from_s``
    part: str  # the one that grew most; for GPU work, a phase of host time that grew as well
    part_from_s: float  # per step
    part_to_s: float  # per step
    first: WindowRecord
    last: WindowRecord
    parts: Mapping[str, float] = field(default_factory=dict)  # lost seconds by part of the step that grew

    @property
    def waits_s(self) -> dict[str, float]:
        """Seconds of the device's waits due to the growth, by name; no other cause counts them.

        A part that has at least doubled counts with all of its time (infinity), also that of the beginning. Where the
        host became slower inside the step, ``"gpu_work"`` is the GPU's idle time there.
        """
        waits = {name: seconds for name, seconds in self.parts.items() if name != GPU_WORK}
        inside = self.part not in waits
        if inside and self.part != GPU_WORK:
            waits[GPU_WORK] = self.parts.get(GPU_WORK, 0.0)
        if self.part_to_s >= _DOUBLED * self.part_from_s and self.part != GPU_WORK:
            waits[GPU_WORK if inside else self.part] = math.inf
        return waits


def growth_of(records: Sequence[WindowRecord]) -> Growth | None:
    """What grows over these records (oldest first); None if steps do not get slower, or not for good.

    A single slow record is smoothed away. Many slow records before the growth are a repeating pattern, and no growth.
    The growth has to exceed the usual difference between neighbouring records.
    """
    records = [record for record in records if record.steps]
    is_long = sum(record.seconds for record in records) >= _LONG_S
    if len(records) < (_MIN_RECORDS if is_long else _FEW_RECORDS):
        return None
    record_s = [record.seconds / record.steps for record in records]
    third = len(records) // 3
    least = _MIN_GROWTH if is_long else _MUCH
    if sum(record_s[-third:]) < (1 + least) * third * min(record_s[:third]):  # the usual case, at little cost
        return None
    if not is_long and not _goes_on(record_s):
        return None
    step_s = _smooth(record_s)
    from_s, to_s = statistics.median(step_s[:third]), statistics.median(step_s[-third:])
    changes = [after - before for before, after in pairwise(record_s)]
    usual_s = statistics.median(changes)
    noise_s = statistics.median(abs(each - usual_s) for each in changes)
    grown_s = to_s - from_s
    if grown_s < least * from_s or grown_s < _OVER_NOISE * noise_s:
        return None
    begin = _after_last(step_s, from_s + _BACK * grown_s)
    slow_before = sum(each > from_s + grown_s / 2 for each in step_s[:begin])
    if len(records) - begin < _MIN_SLOW_RECORDS or slow_before > _SLOW_BEFORE * begin:
        return None
    since = min(_after_last(step_s[:begin], from_s + _BEGUN * grown_s), begin)
    lost_s = sum(max(record.seconds - from_s * record.steps, 0.0) for record in records[since:])
    spans = _spans([record.parts for record in records], [record.steps for record in records])
    parts = {
        name: sum(max(record.parts.get(name, 0.0) - before_s * record.steps, 0.0) for record in records)
        for name, (before_s, after_s) in spans.items()
        if after_s > before_s
    }
    part = max(spans, key=lambda name: spans[name][1] - spans[name][0])
    if part == GPU_WORK:
        spans |= (host := _spans([record.host for record in records], [record.steps for record in records]))
        weight = {GPU_WORK: _MOSTLY}
        part = max((GPU_WORK, *host), key=lambda name: (spans[name][1] - spans[name][0]) * weight.get(name, 1.0))
    since_step = records[since].end_step - records[since].steps
    return Growth(from_s, to_s, since_step, lost_s, part, *spans[part], records[0], records[-1], parts)


def _spans(parts: Sequence[Mapping[str, float]], steps: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Seconds of a step in the first third and in the last, the medians, by name."""
    third = len(steps) // 3
    spans = {}
    for name in sorted({name for each in parts for name in each}):
        per_step = [each.get(name, 0.0) / count for each, count in zip(parts, steps, strict=True)]
        spans[name] = statistics.median(per_step[:third]), statistics.median(per_step[-third:])
    return spans


def _goes_on(values: Sequence[float]) -> bool:
    """Whether nearly each value is higher than nearly all before it, and no single change is most of the growth."""
    higher = [after > before for before, after in combinations(values, 2)]
    largest = max(after - before for before, after in pairwise(values))
    return sum(higher) >= _RISES * len(higher) and largest <= _ONE_CHANGE * (max(values) - min(values))


def _smooth(values: Sequence[float]) -> list[float]:
    inner = [statistics.median(values[index - 1 : index + 2]) for index in range(1, len(values) - 1)]
    return [statistics.median(values[:3]), *inner, statistics.median(values[-3:])]


def _after_last(values: Sequence[float], level: float) -> int:
    """The index after the last value that is no higher than a level."""
    return 1 + max((index for index, each in enumerate(values) if each <= level), default=-1)
