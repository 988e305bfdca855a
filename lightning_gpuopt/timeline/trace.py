"""A trace of a few steps, recorded with torch.profiler for Perfetto; and the phases as NVTX ranges, for Nsight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_gpuopt.timeline.look import OURS, refuse_beside_another


class TraceCapture:
    """Records the next few steps, once.

    Args:
        path: the file, ``.json`` or ``.json.gz``.
        steps: training batches to record.

    Attributes:
        over: whether it has recorded, or never will.
    """

    def __init__(self, path: Path, steps: int = 5) -> None:
        self.path = path
        self.over = False
        self._left = steps
        self._profiler: torch.profiler.profile | None = None

    @property
    def recording(self) -> bool:
        """Whether torch.profiler is at work for it."""
        return self._profiler is not None

    @property
    def steps_left(self) -> int:
        """Training batches that it has still to record."""
        return self._left

    def begin(self) -> None:
        """Record from now on.

        Raises:
            RuntimeError: the program has a profiler of its own.
        """
        refuse_beside_another()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, with_stack=True)
        OURS.add(profiler)
        profiler.start()
        self._profiler = profiler

    def step_done(self) -> bool:
        """Count a step; after the last, write the file. True when nothing is left to do."""
        if self._profiler is None:
            return True
        self._left -= 1
        if self._left > 0:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Stop recording, and write what there is."""
        profiler, self._profiler = self._profiler, None
        self.over = True
        if profiler is not None:
            profiler.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.path))


class NvtxRanges:
    """What the training thread does, as NVTX ranges.

    Raises:
        RuntimeError: this torch is built without CUDA.
    """

    def __init__(self) -> None:
        self.push: Callable[[str], Any] = torch.cuda.nvtx.range_push
        self.pop: Callable[[], Any] = torch.cuda.nvtx.range_pop
        self.push("lightning_gpuopt")  # type: ignore[no-untyped-call]  # without NVTX it fails here, and not in training
        self.pop()  # type: ignore[no-untyped-call]
