"""Records a trace of a few steps for Perfetto, once, when torch.profiler is free."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from lightning_gpuopt.timeline.kernel_trace import OURS, refuse_beside_another

log = logging.getLogger(__name__)

_STEPS: Final = 5  # training batches that are recorded


class TraceRecording:
    """Records the next steps on request, as soon as no profiler recording is in progress."""

    def __init__(self, is_free: Callable[[int], bool]) -> None:
        self._is_free = is_free
        self._path: Path | None = None
        self._left = _STEPS
        self._profiler: torch.profiler.profile | None = None
        self.notes: list[str] = []

    @property
    def is_recording(self) -> bool:
        return self._profiler is not None

    @property
    def wants_steps(self) -> bool:
        return self._path is not None and bool(self._left)

    def ask(self, path: Path) -> None:
        """Record the next steps, once; the file is ``.json`` or ``.json.gz``."""
        if self._path is None:
            self._path = path
            self.step_done()

    def step_done(self) -> None:
        """A step has ended: begin to record, or count it; after the last, write the file."""
        if not self.wants_steps:
            return
        if self._profiler is not None:
            self._left -= 1
            if not self._left:
                self._write()
        elif self._is_free(self._left):
            try:
                self._begin()
            except RuntimeError as error:
                self._left = 0
                self.notes.append(f"No trace was recorded: {error}")

    def _begin(self) -> None:
        refuse_beside_another()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, with_stack=True)
        OURS.add(profiler)
        profiler.start()
        self._profiler = profiler

    def _write(self) -> None:
        profiler, self._profiler, self._left = self._profiler, None, 0
        if profiler is not None and self._path is not None:
            profiler.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))

    def end(self) -> None:
        try:
            self._write()
        except Exception:
            log.warning("StallDetector could not write its trace", exc_info=True)
