"""What stops the training thread from outside: Python's garbage collector, and torch.compile."""

from __future__ import annotations

import gc
import linecache
import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, Final

from typing_extensions import override

from lightning_gpuopt.compat import dynamo
from lightning_gpuopt.measurements.host import Collections, Compilations
from lightning_gpuopt.measurements.phases import GARBAGE_COLLECTION, RECOMPILATION
from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.probe import Probe
from lightning_gpuopt.timeline.sync_calls import place_of

log = logging.getLogger(__name__)

_FULL: Final = 2
_LONG_NS: Final = 1_000_000  # from this length on it is looked for who asked for a full collection
# after a full collection that took so long the objects are counted, once: that takes about a tenth as long
_COUNT_NS: Final = 5_000_000
_VERSION: Final = re.compile(r"^\d+/\d+: ")
_COMMENT: Final = re.compile(r"\s+#.*", re.DOTALL)


class PauseWatch(Probe):
    """Times garbage collections and compilations that stop a timeline's thread; ``notes`` say what is unwatched."""

    def __init__(self, timeline: Timeline, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._notes: list[str] = []
        self._timeline = timeline
        self._clock_ns = clock_ns
        self._undo_compiler: Callable[[], None] | None = None
        self._compiler_failed = False
        self._collecting_since_ns: int | None = None
        self._compiling_since_ns: int | None = None
        self._compiling_in_step = -1
        self.restart()

    def start(self) -> None:
        gc.callbacks.append(self._collects)
        self.look_for_compiler()

    @override
    def close(self) -> None:
        """Take away what was placed; what was seen stays. May be called more than once."""
        with suppress(ValueError):
            gc.callbacks.remove(self._collects)
        undo, self._undo_compiler = self._undo_compiler, None
        if undo is not None:
            undo()

    def look_for_compiler(self) -> None:
        """Watch torch.compile as well, if the program has loaded it meanwhile. Cheap enough for every window."""
        if self._undo_compiler is not None or self._compiler_failed or not dynamo.is_imported():
            return
        try:
            self._undo_compiler = dynamo.watch_compilations(self._compiling_begins, self._compiling_ends)
        except Exception as error:
            log.debug("torch.compile cannot be watched", exc_info=True)
            self._compiler_failed = True
            self._notes.append(f"Compilations by torch.compile could not be detected: {error}.")

    @override
    def restart(self) -> None:
        self._counts = [0, 0, 0]
        self._collected_ns = 0
        self._longest_ns = 0
        self._tracked: int | None = None
        self._asked_for_ns: Counter[str] = Counter()
        self._compilations = 0
        self._compiling_steps = 0
        self._compiled_in_step = -1
        self._known_failures = {code: len(reasons) for code, reasons in dynamo.guard_failures().items()}

    @override
    def known(self) -> dict[str, Any]:
        return {"collections": self.collections(), "compilations": self.compilations()}

    def collections(self) -> Collections:
        young, middle, old = self._counts
        where, share = "", 0.0
        if self._asked_for_ns:
            place, ns = self._asked_for_ns.most_common(1)[0]
            if ns >= self._collected_ns / 2:
                where, share = place, ns / self._collected_ns
        seconds, longest_s = self._collected_ns / 1e9, self._longest_ns / 1e9
        return Collections((young, middle, old), seconds, longest_s, self._tracked, where, share)

    def compilations(self) -> Compilations:
        if not self._compilations:
            return Compilations()
        failures = dynamo.guard_failures()
        new = {code: reasons[self._known_failures.get(code, 0) :] for code, reasons in failures.items()}
        code = max(new, key=lambda each: len(new[each]), default=None)
        function = reason = ""
        if code is not None and new[code]:
            function, reason = _name_of(code), _plain(new[code][-1])
        most = dynamo.compilations_at_most() or sys.maxsize
        all_refused = most * (most + 1) // 2  # each time every version gives a reason
        given_up = tuple(_name_of(each) for each in new if new[each] and len(failures[each]) >= all_refused)
        return Compilations(self._compilations, self._compiling_steps, function, reason, given_up)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        """Called by Python at the beginning and the end of a collection, on the thread that it stops."""
        if self._timeline.thread != threading.get_ident():
            return
        now_ns = self._clock_ns()
        if phase == "start":
            self._collecting_since_ns = now_ns
            return
        begun_ns, self._collecting_since_ns = self._collecting_since_ns, None
        if self._compiling_since_ns is not None and self._compiling_in_step == self._timeline.steps:
            return  # a part of that
        if begun_ns is None or not self._timeline.pause(GARBAGE_COLLECTION, begun_ns, now_ns):
            return
        taken_ns, generation = now_ns - begun_ns, info["generation"]
        self._counts[generation] += 1
        self._collected_ns += taken_ns
        if taken_ns > self._longest_ns:
            self._longest_ns = taken_ns
        if generation == _FULL and taken_ns >= _LONG_NS:
            self._full_collection(taken_ns, sys._getframe(1))

    def _full_collection(self, taken_ns: int, frame: FrameType | None) -> None:
        if frame is not None and "collect(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            place = place_of(frame, frame.f_code.co_filename, frame.f_lineno)
            if place is not None:
                self._asked_for_ns[place.at] += taken_ns
        if self._tracked is None and taken_ns >= _COUNT_NS:
            self._tracked = len(gc.get_objects())

    def _compiling_begins(self, *of_torch: Any) -> None:
        timeline = self._timeline
        if timeline.thread == threading.get_ident() or (timeline.thread and timeline.in_backward):
            self._compiling_since_ns, self._compiling_in_step = self._clock_ns(), timeline.steps

    def _compiling_ends(self, *of_torch: Any) -> None:
        begun_ns, self._compiling_since_ns = self._compiling_since_ns, None
        timeline = self._timeline
        if begun_ns is None or not timeline.thread:
            return
        if not timeline.pause(RECOMPILATION, begun_ns, self._clock_ns()):
            return
        self._compilations += 1
        if timeline.steps != self._compiled_in_step:
            self._compiled_in_step = timeline.steps
            self._compiling_steps += 1


def _name_of(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _plain(reason: str) -> str:
    """A reason without the number of the version that it is about, and the source that torch adds."""
    return _COMMENT.sub("", _VERSION.sub("", reason)).strip()
