"""What other processes hold of memory, such as a loader's workers, read beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

_READ_EVERY_S: Final = 5.0

_COST: Final = 20  # a reading takes at most one part in so many of the time: of a worker of 2 GiB it takes some 55 ms
_FIRST_S: Final = 1.0  # so long the first reading is waited for, by who has to decide with it


class MemoryWatch:
    """Reads the memory of processes in bytes (None: not readable), each time on a thread that ends with the reading."""

    def __init__(self, read: Callable[[int], int | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._due_s = float("-inf")
        self._reading: threading.Thread | None = None
        self.largest: int | None = None

    def look(self, pids: Sequence[int]) -> None:
        """Begin a reading, where the last one is long enough ago."""
        if not pids or self._reading is not None or self._clock() < self._due_s:
            return
        reading = threading.Thread(target=self._run, args=(tuple(pids),), name="gpuopt-worker-memory", daemon=True)
        self._reading = reading
        reading.start()

    def await_first(self) -> None:
        """Wait for a reading under way, if there was none before; a second at most."""
        reading = self._reading
        if self.largest is None and reading is not None:
            reading.join(_FIRST_S)

    def _run(self, pids: Sequence[int]) -> None:
        began_s = self._clock()
        sizes = [size for pid in pids if (size := self._read(pid)) is not None]
        ended_s = self._clock()
        self.largest = max(sizes, default=self.largest)
        self._due_s = ended_s + max(_READ_EVERY_S, _COST * (ended_s - began_s))
        self._reading = None
