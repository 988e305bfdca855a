"""Defers Ctrl-C while it must not interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interrupt_held() -> Iterator[None]:
    """Let Ctrl-C come at the end of a block instead of inside it.

    Starting a loader's workers is such a block: ``multiprocessing.Queue.put`` keeps its lock where an exception comes
    just after it was taken, and whoever then ends the workers waits for that lock for ever. Signals are not blocked,
    as another thread would get them, and forked workers would have them blocked as well.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
