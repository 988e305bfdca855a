"""Rings are handed to the watching command, and outlive their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from lightning_gpuopt.recorder.handover import VARIABLE, Taker, Watcher
from lightning_gpuopt.recorder.ring_reader import records_of

GIVE = """
import os, signal
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.handover import Watcher
board = Board()
board.rank.begin({"host": "h"}, pid=os.getpid(), rank=5)
assert Watcher.of_this_process().give(board.file)
board.rank.log("signal", signal=9)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_ring_outlives_a_process_that_is_killed():
    taker = Taker()
    environment = Watcher("/nowhere", taker.address).environment(os.environ)
    process = subprocess.run([sys.executable, "-c", GIVE], env=environment, check=False)
    assert process.returncode == -signal.SIGKILL
    (file,) = taker.take()
    (record,) = records_of(file)
    assert (record.rank, [each["event"] for each in record.events]) == (5, ["signal"])
    os.close(file)
    taker.close()
    assert taker.take() == []


def test_a_watcher_that_has_gone_takes_nothing(monkeypatch):
    taker = Taker()
    taker.close()
    assert not Watcher("/nowhere", taker.address).give(0)
    assert not Watcher("/nowhere").give(0)
    for word in ("", "no json", "[1]", '{"x": 1}'):
        monkeypatch.setenv(VARIABLE, word)
        assert Watcher.of_this_process() is None
    monkeypatch.delenv(VARIABLE)
    assert Watcher.of_this_process() is None


def test_whoever_gives_nothing_is_passed_over():
    import socket

    taker = Taker()
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(f"\0{taker.address}")
    assert taker.take() == []
    taker.close()
