"""Stacks as text: frames, the user's own line, crashes, collectives."""

from __future__ import annotations

import pytest

from lightning_gpuopt.postmortem.stacks import (
    Frame,
    c_frames,
    collective_of,
    crash_signal,
    crashed_thread,
    fetches,
    main_thread,
    own_frame,
    traceback_frame,
)
from tests.postmortem.records import crash

SITE = "/venv/lib/python3.12/site-packages"


def test_the_crashed_thread_and_the_main_thread():
    text = crash() + '\nThread 0x01 (most recent call first):\n  File "/home/me/train.py", line 3 in <module>\n'
    assert [each.line for each in crashed_thread(text)] == [519, 44, 52]
    assert main_thread(text) == [Frame("<module>", "/home/me/train.py", 3)]
    assert (crashed_thread(""), main_thread("no stacks")) == ([], [])
    assert [each.line for each in crashed_thread(text.replace("Current thread", "Thread"))] == [355]


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("Segmentation fault", 11),
        ("Bus error", 7),
        ("Aborted", 6),
        ("Floating point exception", 8),
        ("Floating-point exception", 8),
        ("Illegal instruction", 4),
        ("_enter_buffered_busy: could not acquire lock", 6),
    ],
)
def test_the_signal_of_a_crash(what, number):
    assert crash_signal(crash(what)) == number


def test_no_crash():
    assert crash_signal("") is None
    assert crash_signal("Thread 0x01 (most recent call first):\n") is None


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/me/data.py", True),
        (f"{SITE}/torch/x.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/usr/lib/python3.12/threading.py", False),
        ("<frozen runpy>", False),
        ("<string>", True),
        ("<stdin>", True),
        ("<ipython-input-3-ab>", True),
    ],
)
def test_whose_frame_it_is(file, own):
    assert Frame("f", file, 1).own is own


def test_the_own_frame_is_the_innermost_of_the_users():
    library, outer, inner = Frame("f", f"{SITE}/a.py", 1), Frame("g", "/me/a.py", 2), Frame("h", "/me/b.py", 3)
    assert own_frame([library, inner, outer]) == inner
    assert own_frame([library]) == library
    assert own_frame([]) is None


def test_a_frame_takes_its_class_from_where_it_was_seen_before():
    frame = Frame("__getitem__", "/home/me/data.py", 44)
    assert frame.at("Photos.__getitem__ (data.py:41)") == "Photos.__getitem__ (data.py:44)"
    for other in ("Photos.__getitem__ (other.py:41)", "Photos.load (data.py:41)", "", "broken"):
        assert frame.at(other) == "__getitem__ (data.py:44)"


def test_the_frame_of_a_traceback():
    text = f'  File "{SITE}/torch/w.py", line 9, in loop\n  File "/me/a.py", line 2, in g\nValueError: x\n'
    assert traceback_frame(text) == Frame("g", "/me/a.py", 2)
    assert traceback_frame("ValueError: x") is None


def test_c_frames():
    text = 'C stack trace (most recent call first):\n  Binary file "/lib/libc.so.6", at raise+0x10 [0x7]\n'
    assert c_frames(text) == ["libc.so.6 raise+0x10"]
    assert c_frames(crash()) == []


@pytest.mark.parametrize(
    ("frames", "several", "found"),
    [
        ([Frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 1)], True, "all_reduce"),
        ([Frame("barrier", f"{SITE}/torch/distributed/distributed_c10d.py", 1)], False, "barrier"),
        ([Frame("wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 1)], True, ""),
        ([Frame("all_reduce", "/home/me/net.py", 1)], True, ""),
        ([Frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 1)], True, "backward's all_reduce"),
        ([Frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 1)], False, ""),
        ([], True, ""),
    ],
)
def test_the_collective_that_a_thread_waits_in(frames, several, found):
    assert collective_of(frames, several) == found


def test_whether_a_thread_waits_for_a_batch():
    file = f"{SITE}/torch/utils/data/dataloader.py"
    assert fetches([Frame("get", "/usr/lib/python3.12/queue.py", 1), Frame("_try_get_data", file, 2)])
    assert not fetches([Frame("__init__", file, 2)])
