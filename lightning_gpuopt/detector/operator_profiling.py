"""Decides when to record the operators of a few steps on a CPU, once in a run and only where that is allowed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from lightning_gpuopt.detector.kernel_profiling import Profile
from lightning_gpuopt.measurements.kernels import StepKernels
from lightning_gpuopt.timeline.look import CannotLookError, OperatorLook
from lightning_gpuopt.timeline.module_calls import ModuleCalls
from lightning_gpuopt.timeline.phases import Timeline

_AFTER: Final = 10
"""Steps after the warm-up at which rank 0 records with ``profile="on"``."""

_SPARE_STEPS: Final = 2
_UNFORESEEN: Final = 16
"""Steps after which to ask again for an end that could not be foreseen."""

_LEAST_S: Final = 10.0
"""With ``profile="auto"``, shorter runs are not worth the time that a profiler takes to start."""


class OperatorProfiling:
    """Records the operators of three steps: with ``profile="on"`` early, with ``"auto"`` late, where nothing was found.

    Args:
        timeline: says which operators belong to a step.
        profile: whether torch.profiler may record.
        batches_left: batches after the current one up to the end of training; None where no end can be foreseen.
        several_ranks: whether there are others; then ``"auto"`` records nothing.
        is_taken: whether torch.profiler is at work for a trace.
        modules: makes what notes the user's modules while a look records; None where that may not be.
        found: whether the run has a finding by now.
        clock: seconds, monotonic.

    Attributes:
        due_at: steps since the end of the warm-up before which :meth:`step_done` has nothing to do.
        kernels: what was recorded.
        notes: why nothing was.
    """

    def __init__(
        self,
        timeline: Timeline,
        profile: Profile,
        *,
        batches_left: Callable[[], int | None],
        several_ranks: bool,
        is_taken: Callable[[], bool],
        modules: Callable[[], ModuleCalls | None],
        found: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due_at = 1
        self.kernels: StepKernels | None = None
        self.notes: list[str] = []
        self._timeline = timeline
        self._profile = profile
        self._batches_left = batches_left
        self._is_taken = is_taken
        self._modules = modules
        self._found = found
        self._clock = clock
        self._began_s = clock()
        self._look: OperatorLook | None = None
        self._over = False
        if profile == "off" or (several_ranks and profile == "auto"):
            self._end()

    @property
    def recording(self) -> bool:
        """Whether our own torch.profiler is running."""
        return self._look is not None

    @property
    def left_out(self) -> bool:
        """Whether nothing was looked at in a run that is long enough, and could have been."""
        long = self._clock() - self._began_s >= _LEAST_S
        return self._profile == "auto" and long and self.kernels is None and not self.notes

    def leaves_time_for(self, steps: int) -> bool:
        """Whether torch.profiler is free for so many steps."""
        return self._look is None

    def step_done(self, steps: int) -> None:
        """A step has ended.

        Args:
            steps: steps since the end of the warm-up.
        """
        if self._over or steps < self.due_at:
            return
        try:
            if self._look is not None:
                if self._look.step_done():
                    self._read()
            elif self._due(steps) and not self._is_taken():
                self._begin()
        except CannotLookError as error:
            self.notes.append(f"The step's operators could not be recorded with torch.profiler: {error}.")
            self.finish()

    def finish(self) -> None:
        """End with the run; what is not recorded by then is dropped."""
        self._end()
        look, self._look = self._look, None
        if look is not None:
            look.end()
            self._timeline.forget_host_work()

    def _end(self) -> None:
        self._over, self.due_at = True, sys.maxsize

    def _due(self, steps: int) -> bool:
        if self._profile == "on":
            self.due_at = max(_AFTER, steps)
            return steps >= _AFTER
        left = self._batches_left()
        early = _UNFORESEEN if left is None else left - OperatorLook().lasts - _SPARE_STEPS
        if early > 0:  # half of them: the end may come nearer than it was
            self.due_at = steps + (early + 1) // 2
            return False
        return self._clock() - self._began_s >= _LEAST_S and not self._found()

    def _begin(self) -> None:
        look = OperatorLook(modules=self._modules())
        look.begin()
        self._look = look
        self._timeline.keep_host_work()

    def _read(self) -> None:
        look, self._look = self._look, None
        assert look is not None
        self._end()
        timeline = self._timeline
        work = timeline.take_host_work()
        timeline.forget_host_work()
        phases = [(timeline.name_of(work[index]), work[index + 1] / 1e9) for index in range(0, len(work), 2)]
        self.kernels = look.operators(phases)
