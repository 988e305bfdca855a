"""How the ranks under a watch have ended, whoever their parent is."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.postmortem.process_end import ProcessEnd
from lightning_gpuopt.recorder.stacks import is_alive


class RankEnds:
    """Waits for the end of processes that are not our children, and reads how they ended.

    The kernel keeps that until the parent asks, which a launcher does now and then: whoever waits is first. A parent
    that waits as well may be faster. The descriptor ``besides`` ends the wait once it can be read.
    """

    def __init__(self, besides: int | None = None) -> None:
        self.ends: dict[tuple[str, int], ProcessEnd] = {}  # by machine and process id
        self._processes: dict[int, int] = {}
        self._poll = select.poll()
        self._woken, self._wake = self._files = list(os.pipe2(os.O_CLOEXEC))
        for file in (self._woken, besides):
            if file is not None:
                self._poll.register(file, select.POLLIN)

    def watch(self, records: Iterable[FlightRecord]) -> None:
        """Wait for the end of these living ranks as well; those that are waited for already are left out."""
        for record in records:
            if record.pid in self._processes.values():
                continue
            with contextlib.suppress(OSError, AttributeError):  # it has gone, or this system has no pidfds
                process = os.pidfd_open(record.pid)
                if not is_alive(record):  # another one has its number
                    os.close(process)
                    continue
                self._processes[process] = record.pid
                self._poll.register(process, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Wait for so many seconds, or until :meth:`wake`, or until the other descriptor can be read."""
        end_s = time.monotonic() + timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            for file, _ in self._poll.poll(left_s * 1000):
                if file not in self._processes:
                    return
                self._ended(file)

    def _ended(self, process: int) -> None:
        at_s, pid = time.time(), self._processes.pop(process)
        self._poll.unregister(process)
        os.close(process)
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                self.ends[socket.gethostname(), pid] = ProcessEnd(os.waitstatus_to_exitcode(int(fields[-1])), at_s)

    def wake(self) -> None:
        if self._files:
            os.write(self._wake, b"!")

    def close(self) -> None:
        """Let go of everything; may be called more than once."""
        files, self._files = self._files, []
        for file in (*self._processes, *files):
            os.close(file)
        self._processes.clear()
