"""What has been finished in a ``fit``: shown to the flight recorder, and watched for hangs."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.compat.lightning import Trainer, shadow
from lightning_gpuopt.measurements.flight import SETS_UP, Doing
from lightning_gpuopt.recorder.flight import FlightRecorder
from lightning_gpuopt.recorder.stacks import wait_of
from lightning_gpuopt.utils.replaced_method import Replacement

log = logging.getLogger(__name__)

_STATES: Final = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or network, and cannot be interrupted",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has died",
    "X": "has died",
}


class ProgressWatch:
    """Passes on to the recorder what begins and ends; ``write`` is called on another thread once a hang begins."""

    def __init__(
        self,
        trainer: Trainer,
        recorder: FlightRecorder | None = None,
        timeout_s: float | None = None,
        write: Callable[[float], None] = lambda quiet_s: None,  # called when a hang begins, with seconds since progress
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder = recorder
        self._write = write
        self._clock = clock
        self._reported_stall_s: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._undo: Callable[[], None] = lambda: None
        if recorder is not None or timeout_s is not None:
            save = trainer.save_checkpoint
            saved = update_wrapper(Replacement(save, partial(self._save, save)), save)
            self._undo = shadow(trainer, "save_checkpoint", saved)
        # cut to what a thread can wait for: some 292 years
        self.timeout_s = threading.TIMEOUT_MAX if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
        if recorder is not None:
            recorder.progress(SETS_UP)
            recorder.hangs_after(self.timeout_s if timeout_s is not None else None)
        self._last_s = clock()  # here and below the last of all: what is a hang by it is then one in the ring, too
        if timeout_s is not None:
            self._thread = threading.Thread(target=self._run, name="gpuopt-hang", daemon=True)
            self._thread.start()

    def step_done(self) -> None:
        if self._recorder is not None:
            self._recorder.step_done()
        self._last_s = self._clock()

    def done(self, then: Doing) -> None:
        """Something else was finished; ``then`` is done now."""
        if self._recorder is not None:
            self._recorder.progress(then)
        self._last_s = self._clock()

    def begins(self, doing: Doing) -> None:
        """Something begins that is timed from its own beginning."""
        if self._recorder is not None:
            self._recorder.begins(doing)
        self._last_s = self._clock()

    def _save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with self._recorder.saving() if self._recorder is not None else nullcontext():
                self._last_s = self._clock()
                return save(*args, **kwargs)
        finally:
            self._last_s = self._clock()

    def close(self) -> None:
        self._undo()
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=3.0)
            self._thread = None
        if self._recorder is not None:
            self._recorder.hangs_after(None)

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


def write_hang(
    folder: Path, rank: int, quiet_s: float, workers: Sequence[tuple[int, str]], recorder: FlightRecorder | None
) -> Path:
    """Write the stacks of this process's threads and the state of its workers, and return the file.

    ``quiet_s`` are seconds since the last progress; ``workers`` are a process id and, in words, what it does. The
    recorder has workers write their own stacks, and its file say so. The file appears when all of it is written: who
    waits for it reads no half of it.
    """
    if recorder is not None:
        recorder.hang_begins()
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + len(list(folder.glob(f"hang-rank{rank}-*.txt")))
    path = folder / f"hang-rank{rank}-{number}.txt"
    under_way = path.with_name(f"{path.name}.part")
    stacks = recorder.stacks_of_workers() if recorder is not None else {}
    with under_way.open("w", encoding="utf-8") as file:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        file.write(f"{now}: process {os.getpid()} has made no progress for {quiet_s:.1f} s\n\n")
        file.write(f"Workers of the training loader: {len(workers) or 'none'}\n")
        for pid, doing in workers:
            file.write(f"  {pid}: {_state(pid)}; {doing}\n")
        file.write("\nStacks of this process, innermost call first:\n\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
        for pid, text in stacks.items():
            file.write(f"\nStacks of process {pid}, innermost call first:\n\n{text}")
    under_way.replace(path)
    return path


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone"
    place = wait_of(pid)
    return _STATES.get(letter, f"is in state {letter}") + (f" in {place}" if place else "")
