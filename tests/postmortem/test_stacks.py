"""What faulthandler writes, read."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

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
)
from tests.postmortem.records import ALL_REDUCE, BACKWARD, GETITEM, LOADER, STEP, WORKER_LOOP, crash, stack


def test_the_main_thread_of_this_process() -> None:
    started, over = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            frames = main_thread(file.read())
    finally:
        over.set()
        thread.join()
    frame = own_frame(frames)
    assert frame is not None
    assert (frame.name, frame.at().startswith("test_the_main_thread_of_this_process (test_stacks.py:")) == (
        *("test_the_main_thread_of_this_process", True),
    )


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("Segmentation fault", 11),
        ("Bus error", 7),
        ("Aborted", 6),
        ("Floating-point exception", 8),
        ("Floating point exception", 8),
        ("Illegal instruction", 4),
        ("Py_EndInterpreter: not the last thread", 6),
    ],
)
def test_the_signal_of_a_crash(what: str, number: int) -> None:
    assert crash_signal(crash(what, STEP)) == number


def test_no_crash() -> None:
    assert (crash_signal(""), crashed_thread(""), main_thread("nothing of the kind")) == (None, [], [])


def test_a_class_that_is_known_is_named() -> None:
    frame = own_frame(crashed_thread(crash("Aborted", GETITEM, WORKER_LOOP)))
    assert frame is not None
    assert frame.at("Photos.__getitem__ (data.py:41)") == "Photos.__getitem__ (data.py:43)"
    assert frame.at("Photos.read (data.py:41)") == "__getitem__ (data.py:43)"


def test_c_frames_of_python_3_14() -> None:
    text = crash("Segmentation fault", STEP) + (
        "\nCurrent thread's C stack trace (most recent call first):\n"
        '  Binary file "/usr/lib/libcv.so.4", at cv_imread+0x10 [0x7f]\n  Binary file "python", at +0x2 [0x55]\n'
    )
    assert c_frames(text) == ["libcv.so.4 cv_imread+0x10", "python +0x2"]
    assert c_frames(crash("Segmentation fault", STEP)) == []


def test_what_a_rank_waits_in() -> None:
    assert collective_of(main_thread(stack(ALL_REDUCE, STEP)), several=True) == "all_reduce"
    assert collective_of(main_thread(stack(BACKWARD, STEP)), several=True) == "backward's all_reduce"
    assert collective_of(main_thread(stack(BACKWARD, STEP)), several=False) == ""
    assert collective_of(main_thread(stack(("all_reduce", "/home/me/net.py", 3))), several=True) == ""
    assert fetches(main_thread(stack(LOADER)))
    assert not fetches(main_thread(stack(STEP)))


@pytest.mark.parametrize(("line", "name"), [(74, "FullShm.read"), (63, "Samples.read"), (9, "FullShm.read")])
def test_of_methods_of_one_name_it_is_the_one_above(line: int, name: str) -> None:
    places = ("Samples.read (train.py:61)", "FullShm.read (train.py:68)", "Other.read (other.py:70)", "")
    assert Frame("read", "/home/me/train.py", line).at(*places) == f"{name} (train.py:{line})"
