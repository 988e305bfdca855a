"""What a profiler's records say of the inside of a few steps: was the GPU idle, and why. Pure: no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.measurements.gpu import StepCopies, StepLook
from lightning_gpuopt.timeline.kernel_kinds import kind_of_kernel
from lightning_gpuopt.timeline.kernel_table import StepWork, table_of
from lightning_gpuopt.timeline.records import Record

_Interval = tuple[float, float]

_BLOCKING: Final = ("cudaMemcpy", "hipMemcpy")
_WAITS: Final = "Synchronize"  # part of the names of the runtime's calls in which the host waits for the GPU
_KINDS: Final = {"collective": "communication", "copy": "copy"}

_SKEW_S: Final = 20e-6  # the profiler's clocks of host and device agree to within so much


@dataclass(frozen=True, slots=True)
class ActivitySpan:
    """One step's own work, in seconds of one clock."""

    begun_s: float  # the GPU began it
    ended_s: float  # the GPU ended it
    issue_begun_s: float  # the host began to issue it
    issue_ended_s: float  # the host had issued all of it
    forward_s: _Interval | None = None  # when the GPU began and ended the forward's work; None: not timed
    optimizer_s: tuple[_Interval, ...] = ()  # when the host issued work of the optimizer


def look_of(
    records: Iterable[Record], steps: Sequence[ActivitySpan], module_at: Callable[[float], str] | None = None
) -> StepLook | None:
    """Account for the inside of steps; the mean step, or None if no record lies in them.

    Records are in any order; steps, and the argument of ``module_at``, are seconds of the records' clock. While a copy
    that the step itself has issued runs, and nothing else, the GPU is idle for that copy if the next kernel was issued
    already or the host waits. Without its waits, the host needs a certain time to issue a step. As far as that exceeds
    what the GPU needs, the GPU is idle because kernels are launched too slowly. The rest of its idle time follows from
    the waits: after each, the host has to issue everything anew.
    """
    trace = _Trace(records)
    count = len(steps)
    busy_s = sum(trace.busy.covered_s(each.begun_s, each.ended_s) for each in steps)
    if not busy_s:
        return None
    idle_s = sum(each.ended_s - each.begun_s for each in steps) - busy_s
    copied = [trace.exposed_copies(each) for each in steps]
    copy_s = sum(seconds for seconds, _ in copied)
    waited_s = sum(trace.waits.covered_s(each.issue_begun_s, each.issue_ended_s) for each in steps)
    issue_s = sum(each.issue_ended_s - each.issue_begun_s for each in steps) - waited_s
    rest_s = max(idle_s - copy_s, 0.0)
    launch_s = min(max(issue_s - busy_s - copy_s, 0.0), rest_s) if waited_s else rest_s
    compute_s = sum(trace.compute.covered_s(each.begun_s, each.ended_s) for each in steps)
    return StepLook(
        steps=count,
        busy_s=busy_s / count,
        launch_idle_s=launch_s / count,
        sync_idle_s=(rest_s - launch_s) / count,
        copy_idle_s=copy_s / count,
        copies=_copies_of([each for _, copies in copied for each in copies], count),
        communication_s=(busy_s - compute_s) / count,
        calls=sum(trace.calls_in(each) for each in steps) / count,
        forward_collectives=any(
            each.forward_s is not None and trace.collectives.covered_s(*each.forward_s) > 0 for each in steps
        ),
        correlated=trace.correlated,
        kernels=table_of(
            (work for each in steps for work in trace.works(each, module_at)),
            count,
            modules_watched=module_at is not None and trace.correlated,
        ),
    )


class _Trace:
    def __init__(self, records: Iterable[Record]) -> None:
        by_kind: dict[str, list[Record]] = {"kernel": [], "collective": [], "copy": [], "call": []}
        for each in records:
            by_kind[each.kind].append(each)
        working = sorted([*by_kind["kernel"], *by_kind["collective"]], key=lambda each: each.start_s)
        self._call_of = {each.correlation: each for each in by_kind["call"] if each.correlation}
        self._stream = Counter(each.stream for each in working).most_common(1)[0][0] if working else 0
        # other threads of the program (a decoder's, a logger's) wait and copy as well, and hold up no step
        main = [each for each in working if each.stream == self._stream and each.correlation in self._call_of]
        threads = {self._call_of[each.correlation].thread for each in main}
        by_kind["call"] = [each for each in by_kind["call"] if each.thread in threads or not threads]
        foreign = {number for number, each in self._call_of.items() if each.thread not in threads and threads}
        by_kind["copy"] = [each for each in by_kind["copy"] if each.correlation not in foreign]
        self._working = working
        self._starts = [each.start_s for each in working]
        self._copies = sorted(by_kind["copy"], key=lambda each: each.start_s)
        self._call_starts = sorted(each.start_s for each in by_kind["call"])
        self.compute = _union(by_kind["kernel"])
        self.collectives = _union(by_kind["collective"])
        self.busy = _union(working)
        self.waits = _union([*filter(_is_a_wait, by_kind["call"]), *filter(None, map(self._blocked, self._copies))])
        self.correlated = any(each.correlation in self._call_of for each in [*working, *self._copies])

    def calls_in(self, step: ActivitySpan) -> int:
        starts = self._call_starts
        return bisect_right(starts, step.issue_ended_s) - bisect_left(starts, step.issue_begun_s)

    def exposed_copies(self, step: ActivitySpan) -> tuple[float, list[Record]]:
        """Seconds of a step in which the GPU was idle for copies that the step has issued, and those copies."""
        own = [each for each in self._copies if self._issued_in(each, step)]
        union = _Union((each.start_s, each.end_s) for each in own)
        idle_s = 0.0
        for begin_s, end_s in self.busy.gaps(step.begun_s, step.ended_s):
            issued_s = step.issue_ended_s if end_s == step.ended_s else self._issued_s(end_s)
            for start_s, stop_s in union.within(begin_s, end_s):
                # with what comes next issued, or with a host that waits, the copy is what is left to wait for
                idle_s += stop_s - start_s if issued_s <= stop_s else self.waits.covered_s(start_s, stop_s)
        return idle_s, own

    def works(self, step: ActivitySpan, module_at: Callable[[float], str] | None) -> Iterator[StepWork]:
        for each in [*self._working, *self._copies]:
            call = self._call_of.get(each.correlation)
            if not self._issued_in(each, step):
                continue
            kind = kind_of_kernel(each.name) if each.kind == "kernel" else _KINDS[each.kind]
            module = ""
            if call is not None and any(begin <= call.start_s < end for begin, end in step.optimizer_s):
                kind = "optimizer" if each.kind == "kernel" else kind
            elif call is not None and module_at is not None:
                module = module_at(call.start_s)
            yield StepWork(each.name, kind, each.seconds, module)

    def _issued_s(self, start_s: float) -> float:
        """When the kernel that starts then was issued: before all that was recorded, if its call is not there."""
        call = self._call_of.get(self._working[bisect_left(self._starts, start_s)].correlation)
        if call is not None:
            return call.start_s
        return float("-inf") if self.correlated else start_s

    def _issued_in(self, work: Record, step: ActivitySpan) -> bool:
        """Whether a step has issued something: by its call, or by its place among its kernels on their stream."""
        call = self._call_of.get(work.correlation)
        if call is not None:
            return step.issue_begun_s <= call.start_s <= step.issue_ended_s
        return work.stream == self._stream and step.begun_s <= work.start_s < step.ended_s

    def _blocked(self, copy: Record) -> Record | None:
        """The call of a copy that came back only when the copy was done: one of pageable memory."""
        call = self._call_of.get(copy.correlation)
        blocked = call is not None and call.seconds > _SKEW_S and call.end_s >= copy.end_s - _SKEW_S
        return call if blocked else None


def _is_a_wait(call: Record) -> bool:
    return _WAITS in call.name or call.name in _BLOCKING


def _copies_of(copies: Sequence[Record], steps: int) -> StepCopies | None:
    if not copies:
        return None
    seconds = {name: sum(each.seconds for each in copies if name in each.name) for name in ("HtoD", "DtoH")}
    moved = sum(each.bytes for each in copies)
    busy_s = sum(seconds.values())
    both = min(seconds.values()) >= busy_s / 4
    direction = "both" if both else "host to device" if seconds["HtoD"] >= seconds["DtoH"] else "device to host"
    return StepCopies(
        direction=direction,
        seconds=busy_s / steps,
        bytes=moved / steps if moved else None,
        pageable=sum(each.seconds for each in copies if "Pageable" in each.name) >= busy_s / 2,
    )


def _union(records: Iterable[Record]) -> _Union:
    return _Union((each.start_s, each.end_s) for each in records)


class _Union:
    def __init__(self, intervals: Iterable[_Interval]) -> None:
        self._parts: list[_Interval] = []
        for start, end in sorted(intervals):
            if self._parts and start <= self._parts[-1][1]:
                self._parts[-1] = (self._parts[-1][0], max(end, self._parts[-1][1]))
            else:
                self._parts.append((start, end))
        self._ends = [end for _, end in self._parts]

    def within(self, begin: float, end: float) -> list[_Interval]:
        found = []
        for index in range(bisect_right(self._ends, begin), len(self._parts)):
            start, stop = self._parts[index]
            if start >= end:
                break
            found.append((max(start, begin), min(stop, end)))
        return found

    def gaps(self, begin: float, end: float) -> list[_Interval]:
        found = []
        for start, stop in self.within(begin, end):
            if start > begin:
                found.append((begin, start))
            begin = stop
        return [*found, (begin, end)] if end > begin else found

    def covered_s(self, begin: float, end: float) -> float:
        return sum(stop - start for start, stop in self.within(begin, end))
