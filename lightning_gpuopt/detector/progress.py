"""What has been finished in a ``fit``, shown to who watches for hangs and to the flight recorder."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_gpuopt.compat.lightning import Trainer, shadow
from lightning_gpuopt.measurements.flight import Doing
from lightning_gpuopt.recorder.flight import FlightRecorder
from lightning_gpuopt.timeline.hang import HangWatch, write_state
from lightning_gpuopt.utils.replacement import Replacement


class ProgressWatch:
    """Passes on what begins and what is finished.

    Args:
        trainer: the Trainer.
        hang: writes the state of a hang; None: nobody asked for that.
        recorder: the flight recorder; None: there is none.
    """

    def __init__(self, trainer: Trainer, hang: HangWatch | None, recorder: FlightRecorder | None) -> None:
        self._hang = hang
        self._recorder = recorder
        save = trainer.save_checkpoint
        self._undo = (
            shadow(trainer, "save_checkpoint", _Save(save, self)) if hang is not None or recorder is not None else None
        )
        if hang is not None:
            hang.start()

    def step_done(self) -> None:
        """A training batch was finished."""
        if self._hang is not None:
            self._hang.progress()
        if self._recorder is not None:
            self._recorder.step_done()

    def done(self, then: Doing) -> None:
        """Something else was finished.

        Args:
            then: what is done now.
        """
        if self._hang is not None:
            self._hang.progress()
        if self._recorder is not None:
            self._recorder.progress(then)

    def begins(self, doing: Doing) -> None:
        """Something begins that is timed from its own beginning.

        Args:
            doing: what.
        """
        if self._hang is not None:
            self._hang.progress()
        if self._recorder is not None:
            self._recorder.begins(doing)

    def save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint."""
        if self._hang is not None:
            self._hang.progress()
        try:
            if self._recorder is None:
                return save(*args, **kwargs)
            with self._recorder.saving():
                return save(*args, **kwargs)
        finally:
            if self._hang is not None:
                self._hang.progress()

    def close(self) -> None:
        """Leave the Trainer as it was."""
        if self._undo is not None:
            self._undo()
        if self._hang is not None:
            self._hang.stop()


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
    """Write the state of this process and its workers.

    Args:
        folder: where.
        rank: global rank of this process.
        quiet_s: seconds since the last progress.
        workers: process id and, in words, what it is doing, for each worker of the loader.
        recorder: has workers write their own stacks; None: they do not.

    Returns:
        The file.
    """
    number = 1 + len(list(folder.glob(f"hang-rank{rank}-*.txt")))
    path = folder / f"hang-rank{rank}-{number}.txt"
    write_state(path, quiet_s, workers, recorder.stacks_of_workers() if recorder is not None else {})
    return path
