"""A look that may never end: it hangs on an event, and Ctrl-C is a real signal."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from lightning_gpuopt.utils.time_limit import NoAnswerError, undisturbed, within


def test_what_a_look_finds_and_what_it_raises():
    assert within(60.0, lambda clock: clock(), lambda: 7.0) == 7.0
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda clock: 1 / 0)


def test_one_that_hangs_is_left():
    answers = threading.Event()
    try:
        with pytest.raises(NoAnswerError, match=r"no response within 0\.01 s"):
            within(0.01, lambda clock: answers.wait(), clean_up_s=0.01)
    finally:
        answers.set()


class Endless:
    """A look that goes on as long as its clock does, and then cleans up."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._then = then
        self.clean = False

    def __call__(self, clock: Callable[[], float]) -> None:
        self._then()
        try:
            while True:
                clock()
        finally:
            self.clean = True


def test_one_that_takes_too_long_cleans_up():
    look = Endless()
    with pytest.raises(NoAnswerError):
        within(0.01, look, clean_up_s=60.0)
    assert look.clean


def test_ctrl_c_ends_it_and_it_cleans_up():
    look = Endless(then=lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        within(60.0, look, clean_up_s=60.0)
    assert look.clean


@pytest.fixture
def raising_handler():
    def handle(*_):
        raise RuntimeError("a worker died")

    before = signal.signal(signal.SIGUSR1, handle), signal.signal(signal.SIGUSR2, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR1, before[0])
    signal.signal(signal.SIGUSR2, before[1])


def waits_in_undisturbed(ident: int) -> bool:
    """Whether a thread is at the line at which ``undisturbed`` waits, so that what a handler raises comes there."""
    lines, first = inspect.getsourcelines(undisturbed)
    waits = first + next(number for number, line in enumerate(lines) if "done.acquire(timeout" in line)
    frame = sys._current_frames()[ident]
    return frame.f_code is undisturbed.__code__ and frame.f_lineno == waits


def test_what_handlers_raise_does_not_end_the_wait(raising_handler):
    raised, done = [], []
    over, left, main = threading.Event(), threading.Event(), threading.get_ident()

    def disturb():
        for number in range(20):
            while not waits_in_undisturbed(main):
                if over.is_set():
                    return
            signal.pthread_kill(main, signal.SIGUSR1)  # one that another thread got would not end a wait here
            while len(raised) <= number:
                if over.is_set():
                    return
                # A signal that comes just before the wait does not end it; the next one does.
                signal.pthread_kill(main, signal.SIGUSR2)
        done.append(True)

    try:
        undisturbed(60.0, lambda: disturb() or left.set(), lambda error: raised.append(str(error)) or True)
    finally:
        over.set()
        left.wait(60)
    assert done == [True]
    assert raised == ["a worker died"] * 20


def test_what_others_handlers_raise_is_raised(raising_handler):
    over, main = threading.Event(), threading.get_ident()
    try:
        with pytest.raises(RuntimeError, match="a worker died"):
            undisturbed(60.0, lambda: signal.pthread_kill(main, signal.SIGUSR1) or over.wait(), lambda _: False)
    finally:
        over.set()


def test_it_is_waited_for_no_longer_than_that():
    go_on, done = threading.Event(), threading.Event()
    undisturbed(0.01, lambda: go_on.wait() and done.set(), lambda _: True)
    assert not done.is_set()
    go_on.set()
    assert done.wait(60)
