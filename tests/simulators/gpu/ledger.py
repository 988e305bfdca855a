"""What the simulated device did, and when: the truth that measurements are held against."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

_MAX_RECORDS = 200_000
_MAX_SPANS = 400_000

Kind = Literal["kernel", "collective", "copy"]


class Activity(NamedTuple):
    """One piece of work of the device; times in the clock's seconds."""

    name: str
    stream: int
    start_s: float
    end_s: float
    kind: Kind
    correlation: int
    thread: int
    address: int = 0
    """Of a copy to the device: where it writes; 0: somewhere of its own."""
    nbytes: int = 0
    """Of a copy; 0: not told."""


class Wait(NamedTuple):
    """The host waited for the device."""

    reason: str
    start_s: float
    end_s: float
    thread: int


class Union:
    """The time covered by intervals that may overlap, as disjoint spans in order.

    Args:
        most: spans that are kept; the older half goes when there are more.
    """

    def __init__(self, most: int = _MAX_SPANS) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._most = most
        self.known_from_s = float("-inf")

    def add(self, start_s: float, end_s: float) -> None:
        """Cover one more interval."""
        starts, ends = self._starts, self._ends
        if end_s <= start_s:
            return
        if not ends or start_s > ends[-1]:
            starts.append(start_s)
            ends.append(end_s)
            if len(starts) > self._most:
                self._forget(len(starts) // 2)
        elif start_s >= starts[-1]:
            ends[-1] = max(ends[-1], end_s)
        else:
            first = bisect_left(ends, start_s)
            last = bisect_right(starts, end_s)
            if first < last:
                start_s, end_s = min(start_s, starts[first]), max(end_s, ends[last - 1])
            starts[first:last] = [start_s]
            ends[first:last] = [end_s]

    def spans(self, start_s: float = float("-inf"), end_s: float = float("inf")) -> list[tuple[float, float]]:
        """The covered spans between two moments, cut to them."""
        if start_s < self.known_from_s and start_s != float("-inf"):
            raise LookupError(f"the ledger begins at {self.known_from_s}, and was asked about {start_s}")
        first, last = bisect_right(self._ends, start_s), bisect_left(self._starts, end_s)
        return [
            (max(a, start_s), min(b, end_s))
            for a, b in zip(self._starts[first:last], self._ends[first:last], strict=True)
        ]

    def covered_s(self, start_s: float, end_s: float, more: Iterable[tuple[float, float]] = ()) -> float:
        """Seconds covered between two moments, with ``more`` intervals counted in."""
        spans = self.spans(start_s, end_s)
        extra = [(max(a, start_s), min(b, end_s)) for a, b in more]
        if extra:
            joined = Union()
            for a, b in sorted(spans + extra):
                joined.add(a, b)
            spans = joined.spans()
        return sum(b - a for a, b in spans)

    def _forget(self, count: int) -> None:
        self.known_from_s = self._ends[count - 1]
        del self._starts[:count], self._ends[:count]


class Ledger:
    """Everything the device and its waiting hosts did; the single records of the last minutes, sums for longer.

    Args:
        refresh: brings the device up to now.
        resident: when each collective joined that still waits for another rank.

    Attributes:
        activities: kernels, collectives and copies, in the order in which they began.
        waits: when the host waited for the device.
    """

    def __init__(self, refresh: Callable[[], float], resident: Callable[[], list[float]]) -> None:
        self.activities: deque[Activity] = deque(maxlen=_MAX_RECORDS)
        self.waits: deque[Wait] = deque(maxlen=_MAX_RECORDS)
        self._busy = Union()
        self._copying = Union()
        self._refresh = refresh
        self._resident = resident
        self._lock = threading.Lock()

    def add(self, activity: Activity) -> None:
        """Book what the device has begun."""
        with self._lock:
            self.activities.append(activity)
            (self._copying if activity.kind == "copy" else self._busy).add(activity.start_s, activity.end_s)

    def busy_s(self, start_s: float, end_s: float) -> float:
        """Seconds in which a kernel or a collective ran; a collective that waits for another rank runs."""
        now_s = self._refresh()
        waiting = [(joined_s, now_s) for joined_s in self._resident()]
        with self._lock:
            return self._busy.covered_s(start_s, end_s, [(a, b) for a, b in waiting if a < end_s and b > start_s])

    def idle_s(self, start_s: float, end_s: float) -> float:
        """Seconds in which no kernel and no collective ran; copies do not count as work."""
        return (end_s - start_s) - self.busy_s(start_s, end_s)

    def copy_s(self, start_s: float, end_s: float) -> float:
        """Seconds in which a copy ran."""
        self._refresh()
        with self._lock:
            return self._copying.covered_s(start_s, end_s)

    def waited_s(self, start_s: float, end_s: float, thread: int | None = None) -> float:
        """Seconds that the host waited for the device, on one thread or on all."""
        waits = [each for each in list(self.waits) if thread is None or each.thread == thread]
        return sum(max(0.0, min(each.end_s, end_s) - max(each.start_s, start_s)) for each in waits)

    def busy_spans(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """When kernels or collectives ran, merged; without collectives that still wait."""
        self._refresh()
        with self._lock:
            return self._busy.spans(start_s, end_s)
