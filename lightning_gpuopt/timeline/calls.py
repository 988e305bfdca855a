"""When a thread last called something, or something returned to it: before that, a call that is running did not begin.

Python tells a profile function (``sys.setprofile``) of both, also of calls of C functions; there may be one a thread,
and one that the program has is left alone.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, Final

log = logging.getLogger(__name__)

_EVENTS: Final = 500_000
"""Calls and returns after which nothing more is noted: each takes some 0.2 us."""

_LOOK: Final = 1024
"""Events between two looks whether this is a forked process, which notes nothing."""

_OF_WARNINGS: Final = warnings.WarningMessage.__init__.__code__.co_filename


class LastCall:
    """Notes the moment of the last call or return on one thread.

    Args:
        clock_ns: a monotonic clock, in nanoseconds.
        called: functions of which each call is told, before it does anything ...
        tell: ... to this, with the frame that made it.
        passed_over: files whose calls are not noted: what runs between the end of a wait and its warning. Python's own
            module of warnings is one of them.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int],
        called: Iterable[CodeType],
        tell: Callable[[FrameType], object],
        passed_over: Iterable[str],
    ) -> None:
        self._clock_ns = clock_ns
        self._called = frozenset(called)
        self._tell = tell
        self._passed_over = frozenset((*passed_over, _OF_WARNINGS, __file__))
        self._process = self._at_ns = self._left = 0

    def begin(self) -> bool:
        """Note calls of the thread that asks; False, and nothing is done, where it has a profile function already."""
        if sys.getprofile() is not None:
            return False
        self._process, self._at_ns, self._left = os.getpid(), self._clock_ns(), _EVENTS
        sys.setprofile(self._seen)
        return True

    def end(self) -> None:
        """Note nothing more. From another thread it takes effect with the first one's next call."""
        self._left = 0
        if sys.getprofile() == self._seen:
            sys.setprofile(None)

    @property
    def at_ns(self) -> int | None:
        """When this thread last called something, or something returned; None where that is not known."""
        return self._at_ns if self._left > 0 and sys.getprofile() == self._seen else None

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        self._left -= 1
        if self._left < 0 or (not self._left % _LOOK and os.getpid() != self._process):
            if sys.getprofile() == self._seen:  # else another's, which calls this one
                sys.setprofile(None)
            return
        code = frame.f_code
        if code.co_filename in self._passed_over:
            return
        self._at_ns = self._clock_ns()
        if event == "call" and code in self._called:
            caller = frame.f_back
            try:
                if caller is not None:
                    self._tell(caller)
            except Exception:  # it would come out of the program's own call
                log.debug("a call was not noted", exc_info=True)
