"""A look at something that may never answer, such as a file system whose server is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

_CLEAN_UP_S: Final = 2.0


class NoAnswerError(Exception):
    """The time was over before there was an answer."""


class _GivenUp(BaseException):
    """Ends a look that nobody waits for. No ``Exception``, so that a look's own handling of errors lets it through."""


def within(
    timeout_s: float,
    look: Callable[[Callable[[], float]], T],
    clock: Callable[[], float] = time.perf_counter,
    clean_up_s: float | None = None,
) -> T:
    """The result of a function that runs on a thread of its own. A thread that hangs is left: the process can end.

    ``look`` is given a clock, to be read often. Once nobody waits, by the time (NoAnswerError) or by Ctrl-C, the clock
    raises: the function ends, and removes what it has made, in ``clean_up_s`` seconds (None: 2).
    """
    given_up, done = threading.Event(), threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def read_clock() -> float:
        if given_up.is_set():
            raise _GivenUp
        return clock()

    def run() -> None:
        try:
            results.append(look(read_clock))
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="gpuopt-look", daemon=True).start()
        if not done.wait(timeout_s):
            raise NoAnswerError(f"no response within {timeout_s:g} s")
    except BaseException:
        given_up.set()
        done.wait(_CLEAN_UP_S if clean_up_s is None else clean_up_s)
        raise
    if errors:
        raise errors[0]
    return results[0]


def _start(run: Callable[[], None]) -> None:
    """Run a function on a thread; if none can be started (no memory or processes left), here."""
    try:
        threading.Thread(target=run, name="gpuopt-undisturbed", daemon=True).start()
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        run()


def undisturbed(timeout_s: float, function: Callable[[], object], passed_over: Callable[[Exception], bool]) -> None:
    """Run a function on a thread of its own, and wait for it, though handlers of signals raise in this one meanwhile.

    Its errors are lost; a handler's exception is raised unless ``passed_over`` says otherwise. ``Thread.join`` would
    count the thread as ended once it was left by an exception (Python 3.10 to 3.12).
    """
    begun, done = threading.Lock(), threading.Lock()
    ended: list[bool] = []
    done.acquire()

    def run() -> None:
        if not begun.acquire(blocking=False):  # a handler has raised as it was started, and it was started again
            return
        try:
            function()
        finally:
            ended.append(True)
            done.release()

    end_s = time.monotonic() + timeout_s
    while not ended and (left_s := end_s - time.monotonic()) > 0:
        try:
            if not begun.locked():
                _start(run)
            done.acquire(timeout=left_s)
        except Exception as error:
            if not passed_over(error):
                raise
