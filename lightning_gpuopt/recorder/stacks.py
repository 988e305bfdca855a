"""The stacks of a process that hangs, and of one that dies by a fatal signal: written by itself, asked for by others.

Who asks touches a file beside the rings. The recorder's thread of the training process sees that, asks the workers'
through their rings, and each writes the stacks of all threads, under the interpreter's lock. If that thread does not
run any more, since a call holds the lock, ``faulthandler`` writes them, in C: it is asked for by a real-time signal
that the program leaves alone. While threads run it would read their frames as they change, which can crash a process;
and one without its handler would be ended by the signal. So it is sent by pidfd, and only to the very process whose
ring says that the handler is there and that its thread has stopped, after a look at what the kernel says that it
catches.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.timeline.frames import innermost_frames, outwards

ASK_SUFFIX: Final = ".ask"
_POLL_S: Final = 0.02
_ANSWER_S: Final = 3.0
# a process that runs has beaten within this time: its ring is written to its file once a second
_STOPPED_S: Final = 3.0
_AT_ONCE: Final = 16  # training processes that are asked by signal at a time; each may take three seconds
_BEGIN: Final = "Stacks of process "
_END: Final = "End of stacks\n"
_MAX_FRAMES: Final = 100
_QUIET_POLLS: Final = 4  # polls without growth after which stacks count as written
_MAX_BYTES: Final = 4 << 20
_FATAL: Final = "Fatal Python error: "


class StackWriter:
    """Writes this process's stacks to a file on request, and when a fatal signal ends it.

    Nothing of the program's is replaced: a signal that has a handler is not taken, and ``faulthandler`` that is on
    already stays as it is. The file is appended to; OSError if it cannot be made. ``signal`` asks for the stacks; 0:
    no signal was free.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._ask_file = str(Path(path).with_suffix(ASK_SUFFIX))
        self._asked_ns = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.signal = _free_signal()
        if self.signal:
            faulthandler.register(self.signal, file=self._file, all_threads=True, chain=False)
        self._fatal = not faulthandler.is_enabled()
        if self._fatal:
            faulthandler.enable(file=self._file, all_threads=True)

    def is_asked_for(self) -> bool:
        """Whether somebody has asked since the last call."""
        try:
            asked_ns = os.stat(self._ask_file).st_mtime_ns
        except OSError:
            return False
        new, self._asked_ns = asked_ns != self._asked_ns, asked_ns
        return new

    def write(self, main: int) -> None:
        """Write the stacks of all threads, the one with the identifier ``main`` last."""
        frames = innermost_frames()
        order = sorted(frames, key=lambda thread: thread == main)  # as faulthandler does
        lines = [f"{_BEGIN}{os.getpid()}\n"]
        for thread in order:
            lines.append(f"Thread 0x{thread:016x} (most recent call first):\n")
            lines += [
                f'  File "{each.f_code.co_filename}", line {each.f_lineno} in {each.f_code.co_name}\n'
                for each in islice(outwards(frames[thread]), _MAX_FRAMES)
            ]
            lines.append("\n")
        del frames
        os.write(self._file, ("".join(lines) + _END).encode(errors="replace"))  # at once: others append, too

    def in_worker(self, again: Callable[[], None]) -> None:
        """Called in a worker: torch has put its own handlers of fatal signals on top.

        ``again`` puts torch's handlers there; ours go on top, and call them.
        """
        if self._fatal:
            faulthandler.disable()
            again()
            faulthandler.enable(file=self._file, all_threads=True)

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
    """A real-time signal that nobody in this process uses; 0 if there is none."""
    caught = _caught("self")
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL and not caught >> (number - 1) & 1:
            return int(number)
    return 0


def _caught(pid: int | str) -> int:
    """The signals that a process has handlers for, as the kernel's mask; 0 if it cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    except (OSError, ValueError, IndexError):
        pass
    return 0


def start_ticks(pid: int | str = "self") -> int:
    """When a process began, in clock ticks since boot; 0 if there is none, or where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(record: FlightRecord) -> bool:
    """Whether the very process of a record runs, on this machine; not one that has got its number since."""
    return record.host == socket.gethostname() and 0 < record.start_ticks == start_ticks(record.pid)


def ask(records: Sequence[FlightRecord], timeout_s: float = _ANSWER_S) -> dict[int, str]:
    """Have processes of this machine write their stacks, and give them by process id, innermost call first.

    Those that cannot be asked are left out, one that does not answer within ``timeout_s`` is missing.
    """
    living = [each for each in records if each.stacks and is_alive(each)]
    sizes = {path: _size(path) for path in {each.stacks for each in living}}
    for path in sizes:
        with contextlib.suppress(OSError):
            Path(path).with_suffix(ASK_SUFFIX).touch()
    now_s = time.time()
    stopped = [each for each in living if now_s - each.written_s > _STOPPED_S]
    waited_for = {each.pid for each in living} - {each.pid for each in stopped}
    by_file: dict[str, list[FlightRecord]] = {}
    for each in stopped:
        by_file.setdefault(each.stacks, []).append(each)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        by_signal = [pool.submit(_ask_in_turn, each) for each in by_file.values()]
        found = answers_in(sizes, waited_for, timeout_s)
    for answers in by_signal:
        found |= answers.result()
    return found


def _ask_in_turn(records: Sequence[FlightRecord]) -> dict[int, str]:
    """Ask processes that write into the same file, one after the other."""
    return {each.pid: answer for each in records if (answer := _ask_by_signal(each))}


def answers_in(sizes: Mapping[str, int], pids: Collection[int], timeout_s: float = _ANSWER_S) -> dict[int, str]:
    """Wait for stacks that were asked for, into files of these sizes before, at most ``timeout_s``."""
    end_s = time.monotonic() + timeout_s
    while True:
        found: dict[int, str] = {}
        for path, before in sizes.items():
            for pid, text in _sections(_read_from(path, before)):
                if pid in pids:
                    found[pid] = text
        if len(found) == len(pids) or time.monotonic() >= end_s:
            return found
        time.sleep(_POLL_S)


def _sections(text: str) -> Iterator[tuple[int, str]]:
    """The processes that have written, each with what it wrote; one that is still at it is left out."""
    for part in text.split(_BEGIN)[1:]:
        pid, _, rest = part.partition("\n")
        stacks, end, _ = rest.partition(_END)
        if end and pid.isdigit():
            yield int(pid), stacks


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _read_from(path: str, at: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(at)
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _ask_by_signal(record: FlightRecord) -> str:
    if not record.stack_signal or not is_alive(record):
        return ""
    unless_gone = contextlib.suppress(OSError, AttributeError)  # also where the system has no pidfds
    with unless_gone, io.FileIO(os.pidfd_open(record.pid)) as process:
        # after the descriptor is there, the process that it names cannot be another one any more
        handles = _caught(record.pid) >> (record.stack_signal - 1) & 1
        if not handles or not is_alive(record):
            return ""
        before = os.path.getsize(record.stacks)
        signal.pidfd_send_signal(process.fileno(), record.stack_signal)
        size, quiet, end_s = before, 0, time.monotonic() + _ANSWER_S
        while quiet < _QUIET_POLLS and time.monotonic() < end_s:
            time.sleep(_POLL_S)
            now = os.path.getsize(record.stacks)
            quiet = quiet + 1 if now == size > before else 0
            size = now
        return _read_from(record.stacks, before)
    return ""


def wait_of(pid: int) -> str:
    """The kernel function that a process sleeps in; empty if it runs, or where that cannot be read."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        return ""


def crashes_in(path: str) -> list[str]:
    """What was written of fatal signals, by each process that one came to."""
    return [_FATAL + each for each in _read_from(path, 0).split(_FATAL)[1:]]
