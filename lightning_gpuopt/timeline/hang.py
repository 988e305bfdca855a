"""Notices when training makes no progress for too long, and writes down what every thread and worker is doing."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

log = logging.getLogger(__name__)


class HangWatch:
    """Writes one file for each time that training hangs, and goes on waiting; nothing is ever ended.

    ``write`` is called on the watch's thread when a hang begins, with the seconds since the last progress.
    ``timeout_s`` is cut to the longest that a thread can wait for.
    """

    def __init__(
        self, timeout_s: float, write: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)  # what a thread can wait for: some 292 years
        self._write = write
        self._clock = clock
        self._last_s = clock()
        self._reported_stall_s: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self.progress()
        self._thread = threading.Thread(target=self._run, name="gpuopt-hang", daemon=True)
        self._thread.start()

    def progress(self) -> None:
        """A step was finished, or something else has begun or was finished."""
        self._last_s = self._clock()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=3.0)
            self._thread = None

    def look(self) -> float:
        """Write if a hang has begun; returns the seconds until the next look is worth while."""
        last_s = self._last_s
        quiet_s = self._clock() - last_s
        if quiet_s < self.timeout_s:
            return self.timeout_s - quiet_s
        if self._reported_stall_s != last_s:
            self._reported_stall_s = last_s
            try:
                self._write(quiet_s)
            except Exception:
                log.warning("the state of the hang could not be written", exc_info=True)
        return self.timeout_s

    def _run(self) -> None:
        wait_s = self.timeout_s
        while not self._stop.wait(wait_s):
            wait_s = self.look()


def write_state(
    path: Path, quiet_s: float, workers: Sequence[tuple[int, str]], stacks: Mapping[int, str] | None = None
) -> None:
    """Write the stacks of all threads of this process and the state of its workers: (process id, what it does).

    The file appears when all of it is written: who waits for it reads no half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    under_way = path.with_name(f"{path.name}.part")
    with under_way.open("w", encoding="utf-8") as file:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        file.write(f"{now}: process {os.getpid()} has made no progress for {quiet_s:.1f} s\n\n")
        file.write(f"Workers of the training loader: {len(workers) or 'none'}\n")
        for pid, doing in workers:
            file.write(f"  {pid}: {_process_state(pid)}; {doing}\n")
        file.write("\nStacks of this process, innermost call first:\n\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        for pid, text in (stacks or {}).items():
            file.write(f"\nStacks of process {pid}, innermost call first:\n\n{text}")
    under_way.replace(path)


_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or network, and cannot be interrupted",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has died",
    "X": "has died",
}


def _process_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone"
    try:
        place = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        place = ""
    return _STATES.get(letter, f"is in state {letter}") + (f" in {place}" if place else "")
