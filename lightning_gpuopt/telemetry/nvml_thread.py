"""The one thread of this process that calls NVML while it trains, for all that want figures of the GPUs.

Every NVML call of a sampler is made here, opening and closing included: some take 20 ms as a rule, any may take forever
on a sick GPU, and the training thread must not wait for it. The thread starts with its first user, and shuts NVML down
and ends with its last.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from lightning_gpuopt.telemetry.nvml import NvmlSession, StopReading

# seconds from one reading to the next per second of CPU that a reading takes: together at most 0.5 % of a core
_WAIT_PER_CPU_S = 200.0
_COST_MEMORY = 8  # readings over which the mean of what one takes is formed: one dear reading does not make a long gap


class User(Protocol):
    """Who is read on the thread. All but ``is_over`` is called there only."""

    @property
    def due_s(self) -> float:
        """When it wants its next turn, on the clock ``time.monotonic``."""

    def is_over(self) -> bool:
        """Whether nothing more is to be read for it."""

    def turn(self, thread: NvmlThread) -> bool:
        """Do what is due; whether there is more to come."""

    def released(self) -> None:
        """Nothing is read for it any more. May be called more than once."""

    def close(self) -> None:
        """Give back what NVML has allocated for it."""


class NvmlThread(threading.Thread):
    """Reads its users in turn, each when it is due, from the first that joins until the last has ended."""

    def __init__(self) -> None:
        super().__init__(name="gpuopt-gpu-sampler", daemon=True)
        self._users: list[User] = []
        self._changed = threading.Condition(_lock)
        self._session: NvmlSession | None = None
        self._spent_s = 0.0

    def session(self) -> NvmlSession:
        """NVML, initialised at the first call, for a user's turn; NvmlUnavailableError if it does not start."""
        if self._session is None:
            self._session = NvmlSession()
        return self._session

    def spent_s(self) -> float:
        """Seconds of CPU that the thread has used since this was last called; for a user's turn."""
        before_s, self._spent_s = self._spent_s, time.thread_time()
        return self._spent_s - before_s

    def checking(self, user: User) -> Callable[[], None]:
        """What to call before each NVML call of a user's turn.

        It releases the users whose readings are over, so that none waits for another's slow calls. It raises
        ``StopReading`` where this user's readings are over.
        """

        def check() -> None:
            for each in self._users:
                if each is not user and each.is_over():
                    each.released()
            if user.is_over():
                raise StopReading

        return check

    def wake(self) -> None:
        """A user's readings are over: see to it now."""
        with self._changed:
            self._changed.notify()

    def is_last(self, user: User) -> bool:
        """Whether the thread ends with this user, as all others are over."""
        return all(each is user or each.is_over() for each in self._users)

    def run(self) -> None:
        """Take turns until nobody is left."""
        try:
            while (user := self._wait_for_turn()) is not None:
                if not user.turn(self):
                    user.released()
                    user.close()
                    self._leave(user)
        finally:
            if self._session is not None:
                self._session.close()

    def _wait_for_turn(self) -> User | None:
        with self._changed:
            while self._users:
                for user in self._users:
                    if user.is_over():
                        return user
                user = min(self._users, key=lambda each: each.due_s)
                wait_s = user.due_s - time.monotonic()
                if wait_s <= 0:
                    return user
                self._changed.wait(wait_s)
            _forget(self)
            return None

    def _leave(self, user: User) -> None:
        # A list of its own each time: others walk through it without the lock.
        with self._changed:
            self._users = [each for each in self._users if each is not user]

    def _join(self, user: User) -> None:
        self._users = [*self._users, user]
        self._changed.notify()

    def _has_room(self) -> bool:
        """Whether it accepts users. A thread whose users are all over may hang in a call, and ends by itself."""
        return not all(user.is_over() for user in self._users)


_lock = threading.Lock()
_current: NvmlThread | None = None


def join_thread(user: User) -> NvmlThread:
    """Have a user read from now on, on the running or a new thread; RuntimeError: no thread to spare."""
    global _current
    with _lock:
        if _current is None or not _current._has_room():
            thread = NvmlThread()
            thread._join(user)
            thread.start()
            _current = thread
        else:
            _current._join(user)
        return _current


def _forget(thread: NvmlThread) -> None:
    global _current
    if _current is thread:
        _current = None


def _after_fork() -> None:
    """The child has no thread but the one that forked, and perhaps a lock that another held."""
    global _lock, _current
    _lock = threading.Lock()
    _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class SamplePace:
    """When a user's next reading is due: once in each interval, at a random moment of it.

    On a fixed grid, readings of a load with the grid's own period would all fall into the same part of it. ``bounded``
    makes intervals longer where readings are dear.
    """

    def __init__(
        self, interval_s: float, now_s: float, *, bounded: bool = True, jitter: Callable[[], float] | None = None
    ) -> None:
        self.due_s = self._begins_s = now_s
        self._bounded = bounded
        self._jitter = jitter or random.Random().random
        self._interval_s = interval_s
        self._cost_s = 0.0
        self._readings = -1

    def read(self, now_s: float, cpu_s: float) -> None:
        """A reading of ``cpu_s`` has ended; where that is bounded, readings take 0.5 % of a core at most in the mean.

        The first one, which sets up what the others use, does not count.
        """
        self._readings += 1
        if self._readings:
            self._cost_s += (cpu_s - self._cost_s) / min(self._readings, _COST_MEMORY)
        interval_s = max(self._interval_s, _WAIT_PER_CPU_S * self._cost_s) if self._bounded else self._interval_s
        late_s = now_s - self.due_s
        self._begins_s = next_due(self._begins_s, self._begins_s + late_s, interval_s)
        self.due_s = self._begins_s + self._jitter() * interval_s


def next_due(due_s: float, now_s: float, interval_s: float) -> float:
    """When the next interval begins: on the grid of the first one, leaving out what a slow call has missed."""
    missed = max(0, int((now_s - due_s) / interval_s))
    return due_s + (missed + 1) * interval_s
