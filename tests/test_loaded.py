"""The busy processes of ``make test-loaded``: there while the command runs, and gone with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers import wait_for
from tests.loaded import BUSY

ROOT = Path(__file__).parents[1]
COMMAND = """
import signal, sys
signals = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("up", flush=True)
signal.sigwait(signals)
sys.exit(7)
"""


def start(*command: str) -> subprocess.Popen[str]:
    command = (sys.executable, "-m", "tests.loaded", "2", *command)
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_the_exit_code_is_the_commands() -> None:
    process = start(sys.executable, "-c", "raise SystemExit(3)")
    process.communicate(timeout=60)
    assert process.returncode == 3


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 7), pytest.param(signal.SIGTERM, 7, marks=pytest.mark.matrix), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_however_it_ends_no_busy_process_is_left(number: signal.Signals, code: int) -> None:
    process = start(sys.executable, "-c", COMMAND)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    children = psutil.Process(process.pid).children()
    busy = [each for each in children if each.cmdline()[2] == BUSY]
    assert (len(busy), len(children)) == (2, 3)
    process.send_signal(number)
    try:
        assert process.wait(30) == code
        wait_for(lambda: not any(each.is_running() for each in busy), timeout_s=60)
    finally:
        for each in children:  # the command outlives a kill
            if each.is_running():
                each.kill()
        process.communicate()
