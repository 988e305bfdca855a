"""Stacks that a process writes of itself, when it is asked to and when it crashes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.postmortem.stacks import main_thread
from lightning_gpuopt.recorder.stacks import StackWriter, answers_in, ask, crashes_in, is_alive, start_ticks, wait_of

SCRIPT = """
import ctypes, faulthandler, signal, sys, threading
from lightning_gpuopt.recorder.stacks import StackWriter
faulthandler.disable()
if sys.argv[2] == "own":
    signal.signal(signal.SIGRTMAX - 1, lambda *_: None)
writer = StackWriter(sys.argv[1])

def waits_here():
    print(writer.signal, flush=True)
    for line in sys.stdin:
        if line == "crash\\n":
            ctypes.string_at(0)
        if line == "close\\n":
            writer.close()
            print(signal.getsignal(signal.SIGRTMAX - 1) == signal.SIG_DFL, flush=True)
waits_here()
"""


class Process:
    def __init__(self, path, mode="plain"):
        self.path = str(path)
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, self.path, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.signal = int(self.popen.stdout.readline())

    @property
    def record(self):
        pid = self.popen.pid
        return FlightRecord(
            "r",
            socket.gethostname(),
            pid,
            start_ticks(pid),
            0,
            stack_signal=self.signal,
            stacks=self.path,
        )

    def say(self, line):
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()


@pytest.fixture
def process(tmp_path, request):
    process = Process(tmp_path / "a.stacks", getattr(request, "param", "plain"))
    yield process
    process.popen.kill()
    process.popen.wait()
    process.popen.stdin.close()
    process.popen.stdout.close()


def test_a_process_writes_its_stacks_again_and_again(process):
    for _ in range(2):
        text = ask([process.record])[process.popen.pid]
        assert "in waits_here" in text
        assert text.count("most recent call first") == 1
    assert process.popen.poll() is None


@pytest.mark.parametrize("process", ["own"], indirect=True)
def test_a_signal_with_a_handler_is_not_taken(process):
    assert process.signal == signal.SIGRTMAX - 2
    assert "in waits_here" in ask([process.record])[process.popen.pid]


def test_nothing_is_sent_to_who_has_no_handler(process):
    process.say("close")
    assert process.popen.stdout.readline() == "True\n"
    assert ask([process.record]) == {}
    assert process.popen.poll() is None


def test_nothing_is_sent_to_another_process_of_that_number_or_machine(process):
    record = process.record
    for other in (
        replace(record, start_ticks=record.start_ticks + 1),
        replace(record, host="elsewhere"),
        replace(record, stack_signal=0),
        replace(record, stacks=""),
        replace(record, stacks="/nowhere/a.stacks"),
    ):
        assert ask([other]) == {}
    assert os.path.getsize(process.path) == 0


def test_a_process_that_has_gone_is_not_alive(process):
    record = process.record
    assert is_alive(record)
    process.popen.kill()
    process.popen.wait()
    assert not is_alive(record)
    assert ask([record]) == {}
    assert start_ticks(record.pid) == 0


def test_a_crash_is_written(process):
    assert crashes_in(process.path) == []
    process.say("crash")
    assert process.popen.wait() == -signal.SIGSEGV
    assert crashes_in(process.path)[0].startswith("Fatal Python error: Segmentation fault")
    assert "in waits_here" in crashes_in(process.path)[0]
    assert crashes_in("/nowhere") == []


def test_what_a_process_waits_in_is_empty_where_it_cannot_be_read():
    assert wait_of(2**22 + 1) == ""


def test_a_process_that_runs_writes_its_stacks_under_its_own_lock(tmp_path):
    writer = StackWriter(str(tmp_path / "a.stacks"))
    try:
        assert not writer.is_asked_for()
        (tmp_path / "a.ask").touch()
        assert writer.is_asked_for()
        assert not writer.is_asked_for()
        (tmp_path / "a.stacks").write_text("earlier ones")
        writer.write(threading.main_thread().ident)
        (pid, text), *others = answers_in({writer.path: 12}, {os.getpid()}).items()
    finally:
        writer.close()
    assert (pid, others) == (os.getpid(), [])
    assert "write" in [each.name for each in main_thread(text)]
    assert f"in {test_a_process_that_runs_writes_its_stacks_under_its_own_lock.__name__}" in text


def test_half_an_answer_is_none(tmp_path):
    path = tmp_path / "a.stacks"
    path.write_text("Stacks of process 5\nThread\nEnd of stacks\nStacks of process 6\nThr")
    assert answers_in({str(path): 0}, {5, 6}, timeout_s=0.0) == {5: "Thread\n"}
