"""The stacks of a process that hangs, and of one that dies by a fatal signal: written by itself, asked for by others.

``faulthandler`` writes them, in C and without the interpreter's lock. To ask for them is a real-time signal that the
program leaves alone; a process without its handler would be ended by it, so it is sent by pidfd, and only to the very
process whose ring says that the handler is there, after a look at what the kernel says that it catches.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lightning_gpuopt.measurements.flight import FlightRecord

_POLL_S: Final = 0.02
_QUIET_POLLS: Final = 4
"""Polls without growth after which stacks count as written."""

_MAX_BYTES: Final = 4 << 20
_FATAL: Final = b"Fatal Python error: "


class StackWriter:
    """Has this process write its stacks to a file, when it is asked to, and when a fatal signal ends it.

    A copy that another process gets does the same there.

    Nothing of the program's is replaced: a signal that has a handler is not taken, and ``faulthandler`` that is on
    already stays as it is.

    Args:
        path: the file, which is appended to; it is made.

    Raises:
        OSError: the file cannot be made.

    Attributes:
        path: the file.
        signal: asks for the stacks; 0: no signal was free.
        process: which process this object was made in.
    """

    def __init__(self, path: str) -> None:
        self._open(path)

    def _open(self, path: str) -> None:
        self.path, self.process = path, os.getpid()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.signal = _free_signal()
        if self.signal:
            faulthandler.register(self.signal, file=self._file, all_threads=True, chain=False)
        self._fatal = not faulthandler.is_enabled()
        if self._fatal:
            faulthandler.enable(file=self._file, all_threads=True)

    def in_worker(self, again: Callable[[], None]) -> None:
        """Called in a worker: torch has put its own handlers of fatal signals on top.

        Args:
            again: puts torch's handlers there; ours go on top, and call them.
        """
        if self._fatal:
            faulthandler.disable()
            again()
            faulthandler.enable(file=self._file, all_threads=True)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, str]) -> None:
        self._open(state["path"])

    def close(self) -> None:
        """Leave the signals as they were; may be called more than once."""
        if self._file < 0:
            return
        if self.signal:
            faulthandler.unregister(self.signal)
        if self._fatal:
            faulthandler.disable()
        os.close(self._file)
        self._file = -1


def _free_signal() -> int:
    """A real-time signal that nobody in this process uses; 0 where there is none."""
    caught = _caught("self")
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL and not caught >> (number - 1) & 1:
            return int(number)
    return 0


def _caught(pid: int | str) -> int:
    """The signals that a process has handlers for, as the kernel's mask; 0 where it cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    except (OSError, ValueError, IndexError):
        pass
    return 0


def start_ticks(pid: int | str = "self") -> int:
    """When a process began, in clock ticks since boot; 0 where there is none, or where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(record: FlightRecord) -> bool:
    """Whether the very process of a record runs, on this machine; not one that has got its number since."""
    return record.host == socket.gethostname() and 0 < record.start_ticks == start_ticks(record.pid)


def ask(records: Sequence[FlightRecord], timeout_s: float = 2.0) -> dict[int, str]:
    """Have processes of this machine write their stacks.

    Args:
        records: of the processes; those that cannot be asked are left out.
        timeout_s: how long to wait for each.

    Returns:
        What each has written, by process id, innermost call first; one that does not answer is missing.
    """
    answers = {}
    for each in records:
        with contextlib.suppress(OSError, AttributeError):
            if answer := _ask(each, timeout_s):
                answers[each.pid] = answer
    return answers


def _ask(record: FlightRecord, timeout_s: float) -> str:
    if not record.stack_signal or not record.stacks or not is_alive(record):
        return ""
    with contextlib.closing(_Pidfd(record.pid)) as process:
        # after the descriptor is there, the process that it names cannot be another one any more
        handles = _caught(record.pid) >> (record.stack_signal - 1) & 1
        if not handles or not is_alive(record):
            return ""
        before = os.path.getsize(record.stacks)
        signal.pidfd_send_signal(process.number, record.stack_signal)
        size, quiet, end_s = before, 0, time.monotonic() + timeout_s
        while quiet < _QUIET_POLLS and time.monotonic() < end_s:
            time.sleep(_POLL_S)
            now = os.path.getsize(record.stacks)
            quiet = quiet + 1 if now == size > before else 0
            size = now
    with open(record.stacks, "rb") as file:
        file.seek(before)
        return file.read(_MAX_BYTES).decode(errors="replace")


class _Pidfd:
    def __init__(self, pid: int) -> None:
        self.number = os.pidfd_open(pid)

    def close(self) -> None:
        os.close(self.number)


def wait_of(pid: int) -> str:
    """The kernel function that a process sleeps in; empty where it runs, or where that cannot be read."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        return ""


def crash_in(path: str) -> str:
    """What was written of a fatal signal; empty where there was none."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES)
    except OSError:
        return ""
    at = text.find(_FATAL)
    return text[at:].decode(errors="replace") if at >= 0 else ""
