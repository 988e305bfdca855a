"""A machine that lets a process stand still for a moment, as one does that has more to do: a run in real time shows it.

What a test wants to know of such a run is asked again of another one. A run that is wrong without such a moment is not
repeated. Code that keeps the GIL for as long cannot be told from the machine: what is wrong in one run because of it is
seen only if it is so in each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic  # bound here: also real where a test simulates the time
from typing import Any, TypeVar

Result = TypeVar("Result")

_BEAT_S = 0.005
_LONG_S = 0.1
_TRIES = 3


class Standstill:
    """While it is entered, a thread that sleeps for 5 ms at a time says by how much it was woken too late.

    Attributes:
        longest_s: the longest of these delays, in seconds.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="standstill", daemon=True)

    def __enter__(self) -> Standstill:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _beat(self) -> None:
        slept = monotonic()
        while not self._ends.wait(_BEAT_S):
            woken = monotonic()
            self.longest_s = max(self.longest_s, woken - slept - _BEAT_S)
            slept = woken


def undisturbed(run: Callable[[], Result], longest_s: Callable[[Result], float] | None = None) -> Result:
    """The result of a run in which nothing stood still; of the third where that was so in each.

    Args:
        run: makes a run.
        longest_s: for a run in other processes: how long one of these stood still, by its result.
    """
    for _ in range(_TRIES):
        with Standstill() as here:
            result = run()
        if (here.longest_s if longest_s is None else longest_s(result)) < _LONG_S:
            break
    return result


def of_ranks(results: list[Any]) -> float:
    """How long one of some ranks stood still, by what they printed of it."""
    return max(float(each["stood_still_s"]) for each in results)
