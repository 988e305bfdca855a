"""Run a command beside busy processes, as on a machine that has more to do: ``python -m tests.loaded 4 make test``.

The busy processes end with the command, and with this one, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """That many processes take what CPU time they can get."""
    started = []
    try:
        for _ in range(processes):
            command = [sys.executable, "-c", BUSY, str(os.getpid())]
            started.append(subprocess.Popen(command, start_new_session=True))  # Ctrl-C is for the command
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def run(command: list[str]) -> int:
    """Run a command to its end, and hand Ctrl-C and SIGTERM on to it; its exit code."""
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is somebody to hand them on to
    process = subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
    )

    def hand_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    for number in signals:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.wait()


def main() -> None:
    number, *command = sys.argv[1:]
    with busy(int(number)):
        code = run(command)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
