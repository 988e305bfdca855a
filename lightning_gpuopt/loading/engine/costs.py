"""What reading samples takes: in Python, one thread at a time, waiting for storage, and for the slowest ones."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import deque
from typing import Any, Final

MOST_THREADS: Final = 32  # of a process, at most
# up to so many processes are used before threads: they need memory of their own, and never wait for one another
_FEW_PROCESSES: Final = 4
_SLEEP_S: Final = 20e-6
_ALONE_S: Final = 5e-3  # for so long nobody holds the lock, which shows how long asking for it takes then
_JITTER: Final = 1.25  # delays up to so many times the usual one say nothing
_TRIMMED: Final = 100  # one in so many delays, the longest ones, may be another program's
# of the time, threads of a process may hold its interpreter lock without waiting much for one another
_FULL: Final = 0.8

_BATCHES: Final = 256  # so many batches, the last ones, say how long slow samples take
_RECURRING: Final = 3  # what so many samples take is usual: one or two may be files that were opened for the first time
# of the times between two batches, the longest ones: waits for slow samples, validation, the end of an epoch
_WAITS: Final = 1 / 16


class LookAhead:
    """How many batches have to be on their way, so that others can be taken while a slow sample is read."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, int, int]] = deque(maxlen=_BATCHES)
        self._noted_ns = 0

    def note(self, work_ns: float, longest_ns: int, now_ns: int) -> None:
        """Another batch is whole: ns in which all threads make one, ns of its slowest sample, and the clock in ns."""
        self._last.append((work_ns, longest_ns, now_ns - self._noted_ns))
        self._noted_ns = now_ns

    def batches(self) -> int:
        work, longest, since = ([each[of] for each in self._last] for of in range(3))
        slow_ns = heapq.nlargest(_RECURRING, longest)[-1] if len(longest) >= _RECURRING else 0
        made_ns = sum(work) / len(work)
        usual = sorted(since)[: -math.ceil(_WAITS * len(since))]
        taken_ns = sum(usual) / max(len(usual), 1)
        return math.ceil(slow_ns / max(made_ns, taken_ns, 1.0)) + 1


class Costs:
    """Measures what this thread does from `begin` to `end`."""

    def __init__(self) -> None:
        self.held = self.blocked = 0.0  # shares of the time, 0-1: it holds the GIL; it waits for other than a CPU

        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._delays_ns: list[int] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._ask_for_lock, daemon=True)
        self._thread.start()
        time.sleep(_ALONE_S)
        self._usual_ns = sorted(self._delays_ns)[len(self._delays_ns) // 2] if self._delays_ns else 0
        self._delays_ns.clear()
        self._ran_ns, self._began_ns = _ran_ns(), time.perf_counter_ns()

    def end(self) -> None:
        if self._thread is None:
            return
        took_ns, ran_ns, self._is_over = time.perf_counter_ns() - self._began_ns, _ran_ns(), True
        self._thread.join()
        if self._ran_ns is not None and ran_ns is not None:
            self.blocked = min(1.0, max(0.0, 1 - (ran_ns - self._ran_ns) / took_ns))
        delays = sorted(self._delays_ns)[: len(self._delays_ns) - len(self._delays_ns) // _TRIMMED]
        if delays:
            late_ns = sum(max(0.0, each - _JITTER * self._usual_ns) for each in delays)
            self.held = min(1.0, late_ns / sum(delays))

    def __getstate__(self) -> dict[str, Any]:
        return {"held": self.held, "blocked": self.blocked}

    def _ask_for_lock(self) -> None:
        """Ask for the lock again and again: how long that takes says how long others have held it."""
        while not self._is_over:
            began_ns = time.perf_counter_ns()
            time.sleep(_SLEEP_S)
            self._delays_ns.append(time.perf_counter_ns() - began_ns)

    def threads(self) -> int:
        """Threads of a process that keep a CPU busy: as many more as samples wait, as far as the lock allows."""
        waiting = math.ceil(1 / max(1 - self.blocked, 1 / MOST_THREADS) - 0.5)
        return max(1, min(waiting, self._most))

    def share(self, cpus: int) -> tuple[int, int]:
        """Processes for so many CPUs, and threads of each."""
        threads = self.threads()
        processes = min(cpus, max(_FEW_PROCESSES, math.ceil(cpus * threads / self._most)))
        return processes, min(self._most, math.ceil(cpus * threads / processes))

    @property
    def _most(self) -> int:
        return max(1, min(MOST_THREADS, int(_FULL / max(self.held, 1e-3))))


def _ran_ns() -> int | None:
    """Nanoseconds that this thread has run, or has waited for a CPU; None if the kernel does not say."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return None
    return int(ran) + int(waited)
