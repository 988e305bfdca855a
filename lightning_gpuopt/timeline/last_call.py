"""What a thread calls, and when it last did: before that, a call that is running did not begin.

Python tells a profile function (``sys.setprofile``) of calls and returns, also of C functions. There may be one a
thread, and one that the program has is left alone.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from types import CodeType, FrameType
from typing import Any, Final

log = logging.getLogger(__name__)

_EVENTS: Final = 10_000_000  # calls and returns after which nothing more is noted: each takes 0.3 to 0.9 us
_LOOK: Final = 1024  # events between two looks whether this is a forked process, which notes nothing
_OF_WARNINGS: Final = warnings.WarningMessage.__init__.__code__.co_filename


class LastCall:
    """Notes the moment of the last call or return on one thread.

    ``tell`` is told of each call of ``called``, with its frame, and ``tell_method`` of each of C's ``methods``, with
    the object and the moment, before they do anything. Calls in ``passed_over`` files are not noted: what runs between
    the end of a wait and its warning, such as Python's module of warnings.
    """

    def __init__(
        self,
        clock_ns: Callable[[], int],
        called: Iterable[CodeType],
        tell: Callable[[FrameType], object],
        passed_over: Iterable[str],
        methods: Collection[str] = (),
        tell_method: Callable[[Any, int], object] = lambda owner, at_ns: None,
    ) -> None:
        self._clock_ns = clock_ns
        self._called = frozenset(called)
        self._tell = tell
        self._passed_over = frozenset((*passed_over, _OF_WARNINGS, __file__))
        self._methods = frozenset(methods)
        self._tell_method = tell_method
        self._process = self._at_ns = self._left = 0

    def begin(self) -> bool:
        """Note calls of the thread that asks; False, and nothing is done, if it has a profile function already."""
        yappi = sys.modules.get("yappi")  # sets one that Python does not know of
        if sys.getprofile() is not None or (yappi is not None and yappi.is_running()):
            return False
        self._process, self._at_ns, self._left = os.getpid(), self._clock_ns(), _EVENTS
        sys.setprofile(self._seen)
        return True

    def end(self) -> bool:
        """Note nothing more, from another thread with its next call; returns whether all calls were seen."""
        was_on = self.at_ns is not None
        self._left = 0
        if sys.getprofile() == self._seen:
            sys.setprofile(None)
        return was_on

    @property
    def at_ns(self) -> int | None:
        """When this thread last called something, or something returned; None if that is not known."""
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
        self._at_ns = at_ns = self._clock_ns()
        try:
            if event == "call":
                if code in self._called and frame.f_back is not None:
                    self._tell(frame.f_back)
            elif event == "c_call" and argument.__name__ in self._methods:
                self._tell_method(argument.__self__, at_ns)
                self._at_ns = at_ns  # whatever that has called
        except Exception:  # it would come out of the program's own call
            log.debug("a call was not noted", exc_info=True)
