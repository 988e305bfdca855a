"""How long the GPU really works and waits, from pooled CUDA events that are read later, without a synchronize.

An event that is recorded while work is still queued is stamped when that work is done; on a drained stream it is
stamped when it is recorded. Two things follow. The GPU was idle for at most the time from the first event's stamp until
the host recorded the second one: whatever the interval is longer than that is work that was queued in between. And that
idle time lies at the end of what the host did in between, so it is attributed backwards over what the host did.

To compare the two clocks, the smallest lag of a stamp behind its recording is taken as none: that of an event on a
drained stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch.cuda import Event

from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.measurements.phases import PHASES, SIGNAL_BROADCAST
from lightning_gpuopt.timeline.activity import ActivitySpan
from lightning_gpuopt.timeline.observer import StepObserver
from lightning_gpuopt.timeline.phases import Timeline

_MAX_UNREAD: Final = 8192  # events that the GPU has not reached yet; while there are so many, no new ones are recorded
_READS: Final = 24  # events read at one call: more than a step has, so that a backlog is worked off little by little
# the host's clock and the GPU's part by no more than this, in seconds per second: NTP slews a clock by so much
_DRIFT: Final = 500e-6
_LAG_NS: Final = 50_000  # a stamp that lags behind its recording by no more is that of an event on a drained stream
# a host that was in a hook for at least this long until the GPU was done has waited for it ..
_WAITED_NS: Final = 1_000_000
_RETURN_NS: Final = 300_000  # ... if it returned so soon after that ...
_RETURN_SHARE: Final = 0.05  # ... or within this share of its wait.
_PAUSED_NS: Final = 1_000_000  # a host that was stopped for so long in a step may have made that step longer on the GPU
_HOST, _COPY, _STEP, _STEP_PART, _FORWARD, _BROADCAST, _VALIDATION, _CUT = range(8)
"""What lies between two events: what hooks have queued, if anything; the batch's copy; the step's own work (to its end,
or a part of it); Lightning's broadcast; validation; the part of a hook before it waits for the GPU."""


_CUTS: Final = 16  # waits between two steps at which an event is recorded: a hook may read a thousand values
_OPTIMIZER: Final = PHASES.index("optimizer")


@dataclass
class _Cut:
    """A hook in which the host waits for the GPU, from its beginning to where it was read so far."""

    slot: int
    drained_ns: float
    length_ns: float = 0.0
    idle_ns: float = 0.0
    alone: bool = True


def _turn_to(doing: int) -> Callable[[GpuClock], None]:
    """The method for an event after which the GPU does something else, whatever it did before."""
    return lambda clock: clock._turn(doing)


class GpuClock(StepObserver):
    """Records an event at each turn of a training step, and later reads what the GPU did between them.

    Nothing here waits for the GPU: events are asked later whether it has passed them, and used again. ``host`` keeps
    the order of what the host does. ``spans``, while it is a list, takes each step's own work, in seconds of the host's
    clock. ``snapshot`` is None until the GPU has done the steps that :meth:`take_snapshot` was given.
    """

    def __init__(self, new_event: Callable[[], Event], host: Timeline, *, forward: bool = False) -> None:
        self.spans: list[ActivitySpan] | None = None
        self.snapshot: GpuTimes | None = None
        self._snapshot_after: int | None = None
        self._new_event = new_event
        self._host = host
        self._with_forward = forward
        self._free: list[Event] = []
        self._unread: deque[tuple[int, Event, int, list[int]]] = deque()
        self._doing = _HOST
        self._validating = False
        self._paused = False
        # The event read last, when the host recorded it, and how long after the first one the GPU passed it.
        self._last: Event | None = None
        self._recorded_ns = 0
        self._passed_ns = 0.0
        self._offset_ns = 0.0
        self._step_began_ns = (0.0, 0)
        self._forward_s: tuple[float, float] | None = None
        self._optimizer_s: list[tuple[float, float]] = []
        self._drained_by: int | str | None = None
        self._steps = 0
        self._lengths_ns = [0.0] * 8
        self._compute_bound_ns = 0.0
        self._queued: dict[int | str, float] = {}
        self._idle: dict[int | str, float] = {}
        # Hooks in which the host was seen to wait for the GPU, and their idle time with that seen and without.
        self._waiting: set[int] = set()
        self._cut: _Cut | None = None
        self._cuts_left = _CUTS
        self._looked_at: dict[int | str, float] = {}
        self._looked_idle: dict[int | str, float] = {}
        self._exposed_by: dict[int | str, float] = {}
        self._pauses = host.pauses.kinds
        self._paused_ns: dict[str, float] = {}
        self._step_ns = self._step_paused_ns = 0.0
        self._paused_steps = 0
        self._paused_compute_ns = 0.0

    batch_arrives = _turn_to(_COPY)
    compute_begins = _turn_to(_STEP)
    broadcast_begins = _turn_to(_BROADCAST)
    batch_copied = batch_ready = compute_ends = broadcast_ends = _turn_to(_HOST)

    def forward_begins(self) -> None:
        if self._with_forward and self._doing == _STEP:
            self._doing = _STEP_PART
            self._turn(_FORWARD)

    def forward_ends(self) -> None:
        if self._doing == _FORWARD:
            self._turn(_STEP)

    def validation_begins(self) -> None:
        self._validating = True
        self._turn(_VALIDATION)

    def validation_ends(self) -> None:
        self._validating = False
        self._turn(_HOST)

    def host_work_begins(self) -> None:
        if self._doing in (_HOST, _VALIDATION):
            self._turn(_HOST)

    def host_work_ends(self) -> None:
        if self._doing == _HOST:
            self._turn(_VALIDATION if self._validating else _HOST)
            if self._validating:  # a long one must not fill the memory
                self.read()

    def host_waits(self, began_ns: int) -> None:
        """The host waits for the GPU outside of a step's own work, since ``began_ns``: what it queued before ends then.

        An event that is recorded after the wait is stamped a moment later than one that was recorded at its beginning.
        """
        if self._doing == _HOST and not self._validating and self._cuts_left:
            self._cuts_left -= 1
            self._host.cut(began_ns)
            self._turn(_CUT)
            self._doing = _HOST

    def _turn(self, doing: int) -> None:
        """Record an event: from here on the GPU does something else."""
        before, self._doing = self._doing, doing
        if doing == _STEP:
            self._cuts_left = _CUTS
        if doing == _CUT:
            before = _CUT
        work = self._host.take_host_work()
        if self._paused:
            return
        if len(self._unread) >= _MAX_UNREAD:
            self._paused = True
            return
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._unread.append((before, event, work[-1] if work else self._host.last_ns, work))

    def read(self, most: int = _READS) -> None:
        """Take the oldest events that the GPU has passed."""
        unread = self._unread
        for _ in range(min(most, len(unread))):
            if not unread[0][1].query():  # type: ignore[no-untyped-call]  # each one: the program may have changed streams
                return
            self._take(*unread.popleft())
        if self._paused and not unread:  # what came after the last one is not known
            self._paused = False
            self._last = None
            if self._snapshot_after is not None and self.snapshot is None:
                self.snapshot = self.times()

    def _take(self, kind: int, event: Event, recorded_ns: int, work: list[int]) -> None:
        """Add what lies between the event before and this one, which the host recorded at ``recorded_ns``."""
        last, self._last = self._last, event
        began_ns, self._recorded_ns = self._recorded_ns, recorded_ns
        if last is None:
            self._offset_ns = self._passed_ns - recorded_ns
            return
        length_ns = last.elapsed_time(event) * 1e6
        self._free.append(last)
        passed_ns, offset_ns = self._passed_ns, self._offset_ns
        drained_ns = passed_ns - offset_ns  # when the GPU passed the event before, by the host's clock
        self._passed_ns = passed_ns = passed_ns + length_ns
        lag_ns, offset_ns = passed_ns - recorded_ns, offset_ns + _DRIFT * length_ns
        self._offset_ns = lag_ns if lag_ns < offset_ns else offset_ns
        self._lengths_ns[kind] += length_ns
        idle_ns = recorded_ns - drained_ns
        if idle_ns > length_ns:
            idle_ns = length_ns
        elif idle_ns < 0:
            idle_ns = 0.0
        if kind in (_HOST, _CUT):
            self._add_queued(length_ns - idle_ns, work)
            if began_ns + _LAG_NS < drained_ns:  # it still had work: where did the host stand when that was done?
                self._drained_by = self._waited_for(drained_ns, began_ns, work)
            if self._waiting or kind == _CUT:
                self._follow_waits(kind, length_ns, drained_ns, idle_ns, work)
            if idle_ns:
                self._attribute(idle_ns, began_ns, work)
        elif kind == _BROADCAST:
            self._drained_by = SIGNAL_BROADCAST
        elif kind == _STEP or kind in (_STEP_PART, _FORWARD):
            self._compute_bound_ns += idle_ns
            self._drained_by = None
            self._step_ns += length_ns
            self._note_pauses(idle_ns, began_ns, work)
            if self.spans is not None:
                self._note_optimizer(began_ns, work)
            if kind == _FORWARD:
                self._forward_s = (drained_ns / 1e9, self.read_to_s)
            if kind == _STEP:
                self._steps += 1
                if self._step_paused_ns >= _PAUSED_NS:
                    self._paused_steps += 1
                    self._paused_compute_ns += self._step_ns
                self._step_ns = self._step_paused_ns = 0.0
                if self._steps == self._snapshot_after and self.snapshot is None:  # else it was taken at a pause
                    self.snapshot = self.times()
                if self.spans is not None:
                    begun_ns, issue_begun_ns = self._step_began_ns
                    host_s = (issue_begun_ns / 1e9, recorded_ns / 1e9)
                    optimizer_s, self._optimizer_s = tuple(self._optimizer_s), []
                    self.spans.append(
                        ActivitySpan(begun_ns / 1e9, self.read_to_s, *host_s, self._forward_s, optimizer_s)
                    )
            return
        self._step_began_ns = (passed_ns - self._offset_ns, recorded_ns)

    def _note_optimizer(self, began_ns: int, work: Sequence[int]) -> None:
        for index in range(0, len(work), 2):
            if work[index] == _OPTIMIZER:
                begun_ns = work[index - 1] if index else began_ns
                self._optimizer_s.append((begun_ns / 1e9, work[index + 1] / 1e9))

    def _add_queued(self, queued_ns: float, work: Sequence[int]) -> None:
        """Attribute work that was queued outside of a step to the first hook of those that ran, if one did."""
        if queued_ns > 0 and work:
            named = queued_ns >= _LAG_NS
            slot = next((slot for slot in work[::2] if named and "." in self._host.name_of(slot)), work[0])
            self._queued[slot] = self._queued.get(slot, 0.0) + queued_ns

    def _follow_waits(
        self, kind: int, length_ns: float, drained_ns: float, idle_ns: float, work: Sequence[int]
    ) -> None:
        """Compare the idle time of a hook that waits for the GPU with what it would be had that not been seen."""
        cut, slots = self._cut, set(work[::2])
        if kind == _CUT and cut is None:
            self._cut = cut = _Cut(work[-2], drained_ns)
            if "." in self._host.name_of(cut.slot):
                self._waiting.add(cut.slot)
        if cut is not None:
            cut.length_ns += length_ns
            cut.idle_ns += idle_ns
            cut.alone = cut.alone and slots == {cut.slot}
        if kind == _HOST:
            self._cut = None
            if cut is not None and cut.alone:
                unseen_ns = min(max(self._recorded_ns - cut.drained_ns, 0.0), cut.length_ns)
                for given, value in ((self._looked_at, unseen_ns), (self._looked_idle, cut.idle_ns)):
                    given[cut.slot] = given.get(cut.slot, 0.0) + value
            waited = self._waiting & slots
            if waited:
                self._drained_by = waited.pop()

    def _attribute(self, idle_ns: float, began_ns: int, work: Sequence[int]) -> None:
        """Hand idle time out backwards over what the host did, each at most as long as it took."""
        left_ns = idle_ns
        idle, drained_by = self._idle, self._drained_by
        for index in range(len(work) - 2, -1, -2):
            slot = work[index]
            taken_ns = work[index + 1] - (work[index - 1] if index else began_ns)
            if taken_ns > left_ns:
                taken_ns = left_ns  # type: ignore[assignment]
            left_ns -= taken_ns
            idle[slot] = idle.get(slot, 0.0) + taken_ns
            if drained_by is not None and slot != drained_by:
                self._exposed_by[drained_by] = self._exposed_by.get(drained_by, 0.0) + taken_ns
            if left_ns <= 0:
                return

    def _note_pauses(self, idle_ns: float, began_ns: int, work: Sequence[int]) -> None:
        """Add what stopped the host in the step, as far as the GPU may have been idle for it."""
        kinds = self._pauses
        for index in range(0, len(work), 2):
            kind = kinds.get(work[index])
            if kind is not None:
                taken_ns = work[index + 1] - (work[index - 1] if index else began_ns)
                self._step_paused_ns += taken_ns
                taken_ns = min(taken_ns, idle_ns)  # type: ignore[assignment]
                idle_ns -= taken_ns
                self._paused_ns[kind] = self._paused_ns.get(kind, 0.0) + taken_ns

    def _waited_for(self, drained_ns: float, began_ns: int, work: Sequence[int]) -> int | None:
        """The hook that waited for the GPU: the host returned from it as soon as the GPU was done."""
        for index in range(0, len(work), 2):
            slot, ended_ns = work[index], work[index + 1]
            if ended_ns + _LAG_NS >= drained_ns:
                waited_ns = drained_ns - began_ns
                at_once = ended_ns - drained_ns <= max(_RETURN_NS, _RETURN_SHARE * waited_ns)
                return slot if at_once and waited_ns >= _WAITED_NS and "." in self._host.name_of(slot) else None
            began_ns = ended_ns
        return None

    @property
    def clock_ns(self) -> Callable[[], int]:
        return self._host.clock_ns

    @property
    def in_step(self) -> bool:
        return self._doing in (_STEP, _FORWARD)

    def take_snapshot(self, steps: int) -> None:
        """Keep the times of the moment at which the GPU has finished so many steps; now, if it already has."""
        self._snapshot_after = steps
        self.snapshot = self.times() if self._steps >= steps else None

    @property
    def unread(self) -> int:
        return len(self._unread)

    @property
    def read_to_s(self) -> float:
        """When the GPU passed the event that was read last, in seconds of the host's clock."""
        return (self._passed_ns - self._offset_ns) / 1e9

    def times(self) -> GpuTimes:
        lengths_s = [length / 1e9 for length in self._lengths_ns]
        return GpuTimes(
            steps=self._steps,
            compute_s=lengths_s[_STEP] + lengths_s[_STEP_PART] + lengths_s[_FORWARD],
            compute_bound_s=self._compute_bound_ns / 1e9,
            copy_s=lengths_s[_COPY],
            forward_s=lengths_s[_FORWARD],
            wait_s=lengths_s[_BROADCAST],
            validation_s=lengths_s[_VALIDATION],
            queued=self._named(self._queued),
            looked_at=self._named(self._looked_at),
            looked_idle=self._named(self._looked_idle),
            idle=self._named(self._idle),
            exposed_by=self._named(self._exposed_by),
            paused={kind: ns / 1e9 for kind, ns in self._paused_ns.items()},
            paused_steps=self._paused_steps,
            paused_compute_s=self._paused_compute_ns / 1e9,
        )

    def _named(self, nanoseconds: dict[int | str, float]) -> dict[str, float]:
        named: dict[str, float] = {}
        for slot, value in nanoseconds.items():
            name = slot if isinstance(slot, str) else self._host.name_of(slot)
            named[name] = named.get(name, 0.0) + value / 1e9
        return named


# the events of a step at which it is called
GPU_EVENTS: Final = tuple(vars(StepObserver).keys() & vars(GpuClock).keys() - vars(object).keys() - {"__module__"})
