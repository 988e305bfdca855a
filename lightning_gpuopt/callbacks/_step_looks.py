"""When to look closely inside a step, and what was seen: once in a run, and never at the run's cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from lightning_gpuopt._measured_gpu import GpuTimes, StepLook, SyncSighting
from lightning_gpuopt.callbacks._device_watch import DeviceWatch
from lightning_gpuopt.diagnosis.waterfall import in_steps, worth_a_look
from lightning_gpuopt.timeline.look import CannotLookError, ProfilerLook
from lightning_gpuopt.timeline.syncs import SyncLook

log = logging.getLogger(__name__)

_SETTLED_STEPS: Final = 5
"""After the warm-up, before the first look."""

_PROFILER_AFTER: Final = 10
"""Steps after the warm-up at which all ranks record the same steps."""

_PATIENCE_STEPS: Final = 100
"""For so long the GPU may take to reach the end of a recording."""


class StepLooks:
    """Looks for synchronizing calls, and at the step's kernels, each over three steps of their own.

    On one rank only where there is reason to: the first where the host does not run ahead of the GPU, the second where
    NVML's figures say that the GPU is idle inside the step. On several ranks both once, at the same steps on each: a
    collective that waits reads as busy.

    Args:
        device: the device's watch.
        threshold: share of idle time that is worth a look, 0-1.
        several_ranks: whether ranks look together.
        rhythm: batches after which steps repeat themselves.
    """

    def __init__(self, device: DeviceWatch, threshold: float, *, several_ranks: bool, rhythm: int = 1) -> None:
        self.syncs: SyncSighting | None = None
        self.look: StepLook | None = None
        self.notes: list[str] = []
        self._device = device
        self._threshold = threshold
        self._together = several_ranks
        self._rhythm = rhythm
        self._over = False
        self._sync_look: SyncLook | None = None
        self._profiler_look: ProfilerLook | None = None
        self._profiler_failed = False
        self._wanted = False
        self._reading = 0
        self._spent_s = 0.0
        self._step_s_before: float | None = None
        self._cost_due = 0

    @property
    def pending(self) -> bool:
        """Whether a look may still come: until then nothing is said of the inside of the step."""
        return not (self._over or ((self.look is not None or self._profiler_failed) and self.syncs is not None))

    @property
    def recording(self) -> bool:
        """Whether torch.profiler is at work for us."""
        return self._profiler_look is not None and not self._reading

    def step_done(self, steps: int, since_warm: Callable[[], GpuTimes] | None) -> None:
        """A step has ended.

        Args:
            steps: steps since the end of the warm-up; the same on every rank.
            since_warm: gives what the GPU did in them; None while a warm-up goes on, in which no look begins.
        """
        if self._sync_look is not None:
            if self._sync_look.step_done():
                self.syncs = self._sync_look.sighting()
                self._sync_look = None
        elif self._profiler_look is not None:
            self._advance_profiler()
        elif since_warm is None:
            return
        elif self.syncs is None and steps >= _SETTLED_STEPS:
            if self._together or (steps == _SETTLED_STEPS and self._may_idle(since_warm())):
                self._begin_sync_look()
        elif self.look is None and not self._profiler_failed and self._due(steps):
            self._step_s_before = _step_s(since_warm())
            self._begin_profiler()

    def window_done(self, since_warm: GpuTimes, step_s: float | None) -> None:
        """A window has ended: is there reason to look?

        Args:
            since_warm: what the GPU did since the end of the warm-up.
            step_s: mean seconds of a step in this window.
        """
        if self._cost_due and self._profiler_look is None:
            self._cost_due -= 1
            if not self._cost_due:
                self._tell_cost(step_s)
        if self._together or self._over:
            return
        if self.look is None and not self._wanted:
            self._wanted = worth_a_look(since_warm, self._device.state(), self._threshold)
        if self.syncs is None and self._sync_look is None and (self._wanted or self._may_idle(since_warm)):
            self._begin_sync_look()

    def finish(self) -> None:
        """The run ends: what was recorded is read, and no look comes any more."""
        if self._sync_look is not None:
            self._sync_look.end()
            self._sync_look = None
        if self._profiler_look is not None and self._reading:
            self._read()
        if self._profiler_look is not None:
            self._profiler_look.end()
            self._profiler_look = None
        self._device.clock.spans = None
        self._over = True

    def _may_idle(self, gpu: GpuTimes) -> bool:
        """Whether the GPU could be idle inside the steps for long enough: where the host runs ahead, it cannot."""
        return gpu.steps > 0 and gpu.compute_bound_s >= self._threshold * (gpu.compute_s + gpu.idle_s + gpu.copy_s)

    def _due(self, steps: int) -> bool:
        return steps >= _PROFILER_AFTER if self._together else self._wanted

    def _begin_sync_look(self) -> None:
        look = SyncLook(inside=lambda: self._device.clock.in_step)
        try:
            if look.is_taken:
                self.notes.append("Synchronizing calls were not looked for: the program uses torch's debug mode.")
                self.syncs = SyncSighting(0, 0)
                return
            look.begin()
        except Exception as error:  # a torch that does not know the mode
            log.debug("no look for synchronizing calls", exc_info=True)
            self.notes.append(f"Synchronizing calls could not be looked for: {error}")
            self.syncs = SyncSighting(0, 0)
            look.end()
            return
        self._sync_look = look

    def _begin_profiler(self) -> None:
        look, begin_s = ProfilerLook(self._rhythm), time.perf_counter()
        try:
            look.begin()
        except CannotLookError as error:
            self._fail(error)
            return
        finally:
            self._spent_s += time.perf_counter() - begin_s
        self._profiler_look = look
        self._device.clock.spans = []

    def _advance_profiler(self) -> None:
        look = self._profiler_look
        assert look is not None
        begin_s = time.perf_counter()
        try:
            if not self._reading:
                self._reading = int(look.step_done())
                return
            self._reading += 1
            if self._device.clock.read_to_s >= look.recorded_s[1] or self._reading > _PATIENCE_STEPS:
                self._read()
        except CannotLookError as error:
            self._fail(error)
        finally:
            self._spent_s += time.perf_counter() - begin_s

    def _read(self) -> None:
        look, self._profiler_look = self._profiler_look, None
        spans, self._device.clock.spans = self._device.clock.spans, None
        assert look is not None
        try:
            self.look = look.read(spans or [])
            self._cost_due = 2  # the window under way has steps of the look in it
        except CannotLookError as error:
            self._fail(error)

    def _fail(self, error: CannotLookError) -> None:
        self._profiler_look = None
        self._profiler_failed = True
        self._device.clock.spans = None
        seen = " NVML's utilization and a look for synchronizing calls stand in."
        if self._together:
            seen += " Exposed communication, and ranks that wait in it for one another, were not seen."
        self.notes.append(f"The step's kernels could not be looked at with torch.profiler: {error}.{seen}")

    def _tell_cost(self, after_s: float | None) -> None:
        before_s = self._step_s_before
        if before_s is None or after_s is None or before_s <= 0:
            return
        self.notes.append(
            f"torch.profiler looked at {self.look.steps if self.look is not None else 0} steps, which took "
            f"{self._spent_s:.2f} s: {before_s * 1e3:.1f} ms a step before it, {after_s * 1e3:.1f} ms after it "
            f"({(after_s / before_s - 1) * 100:+.1f} %)."
        )


def _step_s(gpu: GpuTimes) -> float | None:
    """Mean seconds of a step on the GPU."""
    if not gpu.steps:
        return None
    idle_s = sum(seconds for name, seconds in gpu.idle.items() if in_steps(name))
    return (gpu.compute_s + gpu.copy_s + gpu.queued_s + gpu.wait_s + idle_s) / gpu.steps
