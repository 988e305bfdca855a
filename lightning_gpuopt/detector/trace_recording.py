"""Records a trace of a few steps, once, when torch.profiler is free."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from lightning_gpuopt.timeline.trace import TraceCapture

log = logging.getLogger(__name__)


class TraceRecording:
    """Records the next steps once it is asked to, as soon as no look inside the step is under way.

    Args:
        is_free: whether torch.profiler is free for so many steps.

    Attributes:
        notes: why there is no trace.
    """

    def __init__(self, is_free: Callable[[int], bool]) -> None:
        self._is_free = is_free
        self._capture: TraceCapture | None = None
        self.notes: list[str] = []

    @property
    def is_recording(self) -> bool:
        """Whether torch.profiler records now."""
        return self._capture is not None and self._capture.recording

    def ask(self, path: Path) -> None:
        """Record the next steps; once.

        Args:
            path: of the file.
        """
        if self._capture is None:
            self._capture = TraceCapture(path)
            self.step_done()

    def step_done(self) -> None:
        """A step has ended: begin to record, or count it."""
        capture = self._capture
        if capture is None or capture.over:
            return
        if capture.recording:
            capture.step_done()
        elif self._is_free(capture.steps_left):
            try:
                capture.begin()
            except RuntimeError as error:
                capture.end()
                self.notes.append(f"No trace was recorded: {error}")

    def end(self) -> None:
        """Write what there is."""
        try:
            if self._capture is not None:
                self._capture.end()
        except Exception:
            log.warning("StallDetector could not write its trace", exc_info=True)
