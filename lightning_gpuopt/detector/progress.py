"""What has been finished in a ``fit``, shown to who watches for hangs and to the flight recorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import update_wrapper
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_gpuopt.compat.lightning import Trainer, shadow
from lightning_gpuopt.measurements.flight import SETS_UP, Doing
from lightning_gpuopt.recorder.flight import FlightRecorder
from lightning_gpuopt.timeline.hang import HangWatch, write_state
from lightning_gpuopt.utils.replacement import Replacement


class ProgressWatch:
    """Passes on what begins and is finished, to ``hang`` last: what it calls a hang is then one in the ring, too."""

    def __init__(self, trainer: Trainer, hang: HangWatch | None, recorder: FlightRecorder | None) -> None:
        self._hang = hang
        self._recorder = recorder
        self._show_progress: Callable[[], None] = lambda: None
        save = trainer.save_checkpoint
        self._undo = (
            shadow(trainer, "save_checkpoint", _Save(save, self)) if hang is not None or recorder is not None else None
        )
        if recorder is not None:
            recorder.progress(SETS_UP)
            recorder.hangs_after(hang.timeout_s if hang is not None else None)
        if hang is not None:
            self._show_progress = hang.progress
            hang.start()

    def step_done(self) -> None:
        """A training batch was finished."""
        if self._recorder is not None:
            self._recorder.step_done()
        self._show_progress()

    def done(self, then: Doing) -> None:
        """Something else was finished; ``then`` is done now."""
        if self._recorder is not None:
            self._recorder.progress(then)
        self._show_progress()

    def begins(self, doing: Doing) -> None:
        """Something begins that is timed from its own beginning."""
        if self._recorder is not None:
            self._recorder.begins(doing)
        self._show_progress()

    def save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint."""
        with ExitStack() as around:
            around.callback(self._show_progress)
            if self._recorder is not None:
                around.enter_context(self._recorder.saving())
            self._show_progress()
            return save(*args, **kwargs)

    def close(self) -> None:
        """Leave the Trainer as it was."""
        if self._undo is not None:
            self._undo()
        if self._hang is not None:
            self._hang.stop()
        if self._recorder is not None:
            self._recorder.hangs_after(None)


class _Save(Replacement):
    def __init__(self, function: Callable[..., Any], watch: ProgressWatch) -> None:
        super().__init__(function)
        self._watch = watch
        update_wrapper(self, function)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.save(self._original, *args, **kwargs)


def write_hang(
    folder: Path, rank: int, quiet_s: float, workers: list[tuple[int, str]], recorder: FlightRecorder | None
) -> Path:
    """Write the state of this process and its workers, and return the file.

    ``quiet_s`` are seconds since the last progress; ``workers`` are a process id and, in words, what it does. The
    recorder has workers write their own stacks, and its file say so.
    """
    if recorder is not None:
        recorder.hang_begins()
    number = 1 + len(list(folder.glob(f"hang-rank{rank}-*.txt")))
    path = folder / f"hang-rank{rank}-{number}.txt"
    write_state(path, quiet_s, workers, recorder.stacks_of_workers() if recorder is not None else {})
    return path
