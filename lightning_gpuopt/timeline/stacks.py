"""Samples what one thread does, from a thread of its own: which stacks, and for how long.

Each sample stands for the time since the one before. A call into C that holds the interpreter's lock keeps the sampling
thread waiting, and is what the sampled thread has just come out of when that gets its turn: so its whole time is
attributed to it; samples of equal weight would miss it.

While it samples, the interpreter's switch interval is short. With the usual 5 ms a thread that waits for the lock
begins to wait anew whenever the lock is let go of for a moment, as torch does in every operation: samples would come
5 ms after such a moment, and always find the same lines.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, ClassVar, Final

from lightning_gpuopt.measurements.code_location import Stack
from lightning_gpuopt.timeline.frames import RawFrame, calls_of, innermost_frames, is_waiting, raw_frames

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 0.02
_FIRST_INTERVAL_S: Final = 0.01
_FIRST_SAMPLES: Final = 60  # samples that come twice as often, for runs that are over soon
_SWITCH_S: Final = 0.0002
_MAX_COST: Final = 0.01  # samples that take up to 10 ms take at most this share of the time of the thread that does it
_COSTS_KEPT: Final = 15
_MIN_COSTS: Final = 3
# however much the last samples took: a garbage collection that falls into one is not a cost of sampling
_MAX_INTERVAL_S: Final = 1.0
# Python 3.11.0 shows frames that are being taken down, and without the GIL a thread runs on while it is looked at
FRAMES_ARE_SAFE: Final = sys.version_info[:3] != (3, 11, 0) and getattr(sys, "_is_gil_enabled", lambda: True)()
# after so many samples of nothing that is asked for, the switch interval is the program's again
_IDLE_SAMPLES: Final = 25
_MAX_STACKS: Final = 2_000  # different stacks that are kept of an activity


class _ShortInterval:
    """The interpreter's switch interval, short while a sampler needs it; a forked process gets the usual one."""

    _before_s: ClassVar[list[float]] = []
    """What to go back to, of each sampler that has shortened it."""

    def __init__(self) -> None:
        self._ours_s: float | None = None
        self._was_s = 0.0

    def set(self, short: bool) -> None:
        """Shorten it, or put it back where the program has not set it meanwhile."""
        if short == (self._ours_s is not None):
            return
        if short:
            self._was_s = sys.getswitchinterval()
            self._before_s.append(self._was_s)
            sys.setswitchinterval(min(self._was_s, _SWITCH_S))
            self._ours_s = sys.getswitchinterval()
            return
        if sys.getswitchinterval() == self._ours_s:
            sys.setswitchinterval(self._was_s)
        self._ours_s = None
        self._before_s.remove(self._was_s)

    @classmethod
    def forked(cls) -> None:
        """In a new process no sampler runs."""
        if cls._before_s:
            sys.setswitchinterval(max(cls._before_s))
            cls._before_s.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ShortInterval.forked)


class StackSampler:
    """Samples one thread of this process until it is stopped.

    ``activity`` (None: nothing that is asked for) and ``is_over`` are called on the sampling thread. ``cpu_clock`` is
    seconds of CPU of the thread that asks. ``helpers`` work for the sampled one: while it waits, its time is that of
    those that do not.
    """

    def __init__(
        self,
        thread: int,
        activity: Callable[[], str | None],
        is_over: Callable[[], bool] = lambda: False,
        frames: Callable[[], Mapping[int, FrameType]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
        helpers: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self._target = thread
        self._activity = activity
        self._is_over = is_over
        self._frames = frames or innermost_frames
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._helpers = helpers
        self._last = clock()
        self._seen: dict[str, dict[tuple[RawFrame, ...], list[float]]] = {}
        self._costs_s: deque[float] = deque(maxlen=_COSTS_KEPT)
        self._idle = self._sampled = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._random = random.Random(0)  # the global one is the program's

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._last = self._clock()
        self._thread = threading.Thread(target=self._run, name="gpuopt-stacks", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def sample(self) -> bool:
        """Take one sample; False if the thread did nothing that is asked for."""
        now = self._clock()
        since, self._last = now - self._last, now
        activity = self._activity()
        if activity is None:
            return False
        stacks = self._stacks()
        seen = self._seen.setdefault(activity, {})
        for stack in stacks:
            entry = seen.get(stack)
            if entry is None:
                if len(seen) >= _MAX_STACKS:
                    return True
                entry = seen[stack] = [0.0, 0]
            entry[0] += since / len(stacks)
            entry[1] += 1
        return True

    def _stacks(self) -> list[tuple[RawFrame, ...]]:
        """What the sampled thread does, and, if that waits, what its helpers do instead."""
        own = self._stack_of(self._target)
        helpers = self._helpers() if own and is_waiting(own) else ()
        at_work = [stack for each in helpers if (stack := self._stack_of(each)) and not is_waiting(stack)]
        return at_work or ([own] if own else [])

    def _stack_of(self, thread: int) -> tuple[RawFrame, ...]:
        frame = self._frames().get(thread)
        try:
            return raw_frames(frame)
        finally:
            del frame

    def samples(self, activity: str) -> int:
        return sum(int(count) for _, count in list(self._seen.get(activity, {}).values()))

    def stacks(self, activity: str) -> tuple[Stack, ...]:
        seen = list(self._seen.get(activity, {}).items())
        stacks = [Stack(calls_of(raw), seconds, int(count)) for raw, (seconds, count) in seen]
        return tuple(sorted(stacks, key=lambda stack: -stack.seconds))

    def _run(self) -> None:
        short = _ShortInterval()
        try:
            while not self._stop.wait(self._interval_s()):
                over = self._look()
                short.set(self._idle <= _IDLE_SAMPLES)
                if over:
                    return
        except Exception:  # the sampled program has to go on
            log.debug("sampling stacks failed", exc_info=True)
        finally:
            short.set(False)

    def _look(self) -> bool:
        """Take a sample, and remember what it took where there was one to take; whether it was the last."""
        began = self._cpu_clock()
        seen = self.sample()
        self._sampled += seen
        self._idle = 0 if seen else self._idle + 1
        over = self._is_over()
        if seen:
            self._costs_s.append(self._cpu_clock() - began)
        return over

    def _interval_s(self) -> float:
        """Seconds until the next sample, at random, so that no rhythm of the program falls in with ours."""
        interval_s = _FIRST_INTERVAL_S if self._sampled < _FIRST_SAMPLES else _INTERVAL_S
        if len(self._costs_s) >= _MIN_COSTS:
            usual_s = statistics.median_low(self._costs_s)
            interval_s = max(interval_s, min(usual_s / _MAX_COST, _MAX_INTERVAL_S))
        return interval_s * self._random.uniform(0.6, 1.4)


def start_sampling(*args: Any, **kwargs: Any) -> StackSampler | None:
    """A sampler that runs; None if no thread can be started, or this Python lets none look at another's frames."""
    if not FRAMES_ARE_SAFE:
        return None
    sampler = StackSampler(*args, **kwargs)
    try:
        sampler.start()
    except RuntimeError:  # can't start new thread
        log.debug("no thread for sampling stacks", exc_info=True)
        return None
    return sampler
