"""What a profiler's activity records say of the inside of a few steps: was the GPU idle, and why. Pure: no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_gpuopt.measurements.gpu import StepLook

KERNEL, COLLECTIVE, COPY, CALL, WAIT = "kernel", "collective", "copy", "call", "wait"

_Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ActivitySpan:
    """One step's own work, in seconds of one clock.

    Attributes:
        begun_s: the GPU began it.
        ended_s: the GPU ended it.
        issue_begun_s: the host began to issue it.
        issue_ended_s: the host had issued all of it.
        forward_s: when the GPU began and ended the forward's work; None where that was not timed.
    """

    begun_s: float
    ended_s: float
    issue_begun_s: float
    issue_ended_s: float
    forward_s: _Interval | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """One record.

    Attributes:
        kind: ``"kernel"``, ``"collective"`` and ``"copy"`` ran on the GPU; ``"call"`` is a call of the CUDA runtime,
            and ``"wait"`` one in which the host waits for the GPU.
        start_s: its beginning, in seconds.
        end_s: its end, in seconds of the same clock.
    """

    kind: str
    start_s: float
    end_s: float


def kind_of(name: str, *, on_device: bool) -> str | None:
    """What a record is, by the name that CUPTI gives it; None for what is neither work nor a call.

    Args:
        name: of a kernel, a copy or a runtime call, for example ``"cudaStreamSynchronize"``.
        on_device: whether it ran on the GPU.
    """
    if on_device:
        if name.startswith("ProfilerStep"):
            return None
        if "nccl" in name.lower():
            return COLLECTIVE
        return COPY if name.startswith(("Memcpy HtoD", "Memcpy DtoH")) else KERNEL  # a copy on the device is its work
    if not name.startswith(("cuda", "hip", "cu")):
        return None
    # A copy from the device to pageable memory is asynchronous by its name only, and is followed by a wait of its own.
    return WAIT if "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpy") else CALL


def look_of(activities: Iterable[Activity], steps: Sequence[ActivitySpan]) -> StepLook | None:
    """Account for the inside of steps.

    Without its waits, the host needs a certain time to issue a step. As far as that exceeds the GPU's busy time, the
    GPU is idle because kernels are launched too slowly. The rest of its idle time follows from the waits: after each,
    the host has to issue everything anew.

    Args:
        activities: the records, in any order.
        steps: the steps, in seconds of the records' clock.

    Returns:
        The means over the steps; None where no record lies in them.
    """
    by_kind: dict[str, list[_Interval]] = {}
    for each in activities:
        by_kind.setdefault(each.kind, []).append((each.start_s, each.end_s))
    compute = _Union(by_kind.get(KERNEL, []))
    busy = _Union([*by_kind.get(KERNEL, []), *by_kind.get(COLLECTIVE, [])])
    collectives = _Union(by_kind.get(COLLECTIVE, []))
    waits = _Union(by_kind.get(WAIT, []))
    calls = sorted(start for kind in (CALL, WAIT) for start, _ in by_kind.get(kind, []))
    count = len(steps)
    busy_s = sum(busy.covered_s(each.begun_s, each.ended_s) for each in steps)
    if not busy_s:
        return None
    idle_s = sum(each.ended_s - each.begun_s for each in steps) - busy_s
    waited_s = sum(waits.covered_s(each.issue_begun_s, each.issue_ended_s) for each in steps)
    issue_s = sum(each.issue_ended_s - each.issue_begun_s for each in steps) - waited_s
    launch_s = min(max(issue_s - busy_s, 0.0), idle_s) if waited_s else idle_s
    return StepLook(
        steps=count,
        busy_s=busy_s / count,
        launch_idle_s=launch_s / count,
        sync_idle_s=(idle_s - launch_s) / count,
        communication_s=(busy_s - sum(compute.covered_s(each.begun_s, each.ended_s) for each in steps)) / count,
        calls=sum(bisect_right(calls, each.issue_ended_s) - bisect_left(calls, each.issue_begun_s) for each in steps)
        / count,
        forward_collectives=any(each.forward_s and collectives.covered_s(*each.forward_s) > 0 for each in steps),
    )


class _Union:
    """Intervals laid over each other."""

    def __init__(self, intervals: Iterable[_Interval]) -> None:
        self._parts: list[_Interval] = []
        for start, end in sorted(intervals):
            if self._parts and start <= self._parts[-1][1]:
                self._parts[-1] = (self._parts[-1][0], max(end, self._parts[-1][1]))
            else:
                self._parts.append((start, end))
        self._ends = [end for _, end in self._parts]

    def within(self, begin: float, end: float) -> list[_Interval]:
        """The parts between two times, cut there."""
        found = []
        for index in range(bisect_right(self._ends, begin), len(self._parts)):
            start, stop = self._parts[index]
            if start >= end:
                break
            found.append((max(start, begin), min(stop, end)))
        return found

    def covered_s(self, begin: float, end: float) -> float:
        """How much between two times is covered."""
        return sum(stop - start for start, stop in self.within(begin, end))
