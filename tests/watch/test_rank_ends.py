"""How processes end that others have started: real ones, whose parent has not asked yet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.recorder.stacks import start_ticks
from lightning_gpuopt.watch.rank_ends import RankEnds


@pytest.fixture
def ends():
    ends = RankEnds()
    yield ends
    ends.close()


@pytest.fixture
def start():
    """Starts a process that runs until its input is closed; nobody asks how it ended before the test is over."""
    started = []

    def start(code):
        script = f"import os, sys; sys.stdin.read(); {code}"
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
        started.append(process)
        return process, FlightRecord("run", socket.gethostname(), process.pid, start_ticks(process.pid), 0)

    yield start
    for process in started:
        process.stdin.close()
        process.wait()


@pytest.mark.parametrize(
    ("how", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("sys.exit()", 0)]
)
def test_how_a_process_ended(how, code, start, ends):
    process, record = start(how)
    _, other = start("")
    ends.watch([record, other])
    ends.watch([record, other])
    process.stdin.close()
    while not ends.ends:
        ends.wait(0.05)
    assert {of: end.code for of, end in ends.ends.items()} == {(record.host, process.pid): code}


def test_a_process_that_has_its_parents_answer_is_not_known(start, ends):
    process, record = start("")
    ends.watch([record])
    process.stdin.close()
    process.wait()
    ends.wait(0.0)
    ends.wait(0.05)
    assert ends.ends == {}


def test_another_process_of_that_number_is_not_waited_for(start, ends):
    _, record = start("")
    before = len(os.listdir("/proc/self/fd"))
    ends.watch([FlightRecord("run", record.host, record.pid, record.start_ticks - 1, 0)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_wait_ends_at_once_when_there_is_something_to_do():
    read, write = os.pipe()
    ends = RankEnds(read)
    os.write(write, b"!")
    ends.wait(1000.0)
    os.read(read, 1)
    waiting = threading.Thread(target=ends.wait, args=(1000.0,))
    waiting.start()
    ends.wake()
    waiting.join()
    ends.close()
    ends.close()
    ends.wake()
    os.close(read)
    os.close(write)
