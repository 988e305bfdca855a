"""Decides when to look inside a step, once in a run and only if that is allowed, and keeps what was seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Literal

from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.diagnosis.waterfall import hooks_s, in_steps, may_idle, worth_a_look
from lightning_gpuopt.measurements.gpu import GpuTimes, StepLook, SyncSighting
from lightning_gpuopt.timeline.kernel_trace import CannotLookError, ProfilerLook
from lightning_gpuopt.timeline.module_calls import ModuleCalls
from lightning_gpuopt.timeline.sync_calls import SyncLook

log = logging.getLogger(__name__)

_SETTLED_STEPS: Final = 5  # steps between the warm-up and the first look
# steps after the warm-up at which rank 0 of several records its steps, if no end comes before
_PROFILER_AFTER: Final = 10
_SYNC_STEPS: Final = 4  # steps that a look for synchronizing calls lasts, and one to end it
# with ``profile="on"``, steps after which one rank records without a reason where no end can be foreseen
_WITHOUT_REASON_AFTER: Final = 100
_SPARE_STEPS: Final = 2  # training may end so many steps before its foreseen end
_PATIENCE_STEPS: Final = 10  # steps after which a recording is read although the GPU has not passed its end


_NO_MOMENTS: Final = (
    "The program has its own profile function (sys.setprofile): torch.cuda.synchronize() in the steps was not "
    "detected, nor when waits for the GPU began. A hook that waits for GPU work it queued itself may therefore be "
    "reported as the cause of idle time."
)


Profile = Literal["auto", "on", "off"]


class KernelProfiling:
    """Looks for synchronizing calls, and at the step's kernels, each over three steps of their own.

    On one rank the first only if there is reason to: the host does not run ahead of the GPU, or hooks seem to leave
    it idle. On several ranks once, at the same steps on each. The second with ``profile="on"`` in any case: on one rank
    as soon as there is reason, else late; of several ranks on rank 0, since a collective that waits reads as busy. With
    ``"auto"`` on one rank, where the GPU may be idle inside the steps, in the last steps before an end that can be
    foreseen (``batches_left`` gives a number). ``rhythm`` returns after how many batches steps repeat themselves, when
    a look begins. A look waits while ``is_taken``: torch.profiler is at work for a trace. ``modules`` is None if the
    user's modules may not be noted.
    """

    def __init__(
        self,
        device: DeviceWatch,
        threshold: float,
        *,
        profile: Profile,
        batches_left: Callable[[], int | None],
        rank: int,
        several_ranks: bool,
        rhythm: Callable[[], int] = lambda: 1,
        is_taken: Callable[[], bool] = lambda: False,
        modules: Callable[[], ModuleCalls | None] = lambda: None,
    ) -> None:
        self.syncs: SyncSighting | None = None
        self.look: StepLook | None = None
        self._notes: list[str] = []
        self._device = device
        self._threshold = threshold
        self._profile = profile
        self._batches_left = batches_left
        self._rank = rank
        self._several_ranks = several_ranks
        self._rhythm = rhythm
        self._is_taken = is_taken
        self._modules = modules
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
        """Whether a look may still come; until then no finding concerns the inside of the step."""
        no_more = self.look is not None or self._profiler_failed or not self._may_come
        return not (self._over or (no_more and self.syncs is not None))

    @property
    def left_out(self) -> bool:
        """Whether nothing was recorded because there was no reason, although it was possible."""
        return self._profile == "auto" and self.look is None and not self._wanted and not self._profiler_failed

    @property
    def missed(self) -> bool:
        """Whether there was reason to look at the step's kernels, and that was not allowed."""
        never = self._over or not self._may_come
        return self._wanted and never and self.look is None and not self._profiler_failed and self._profile != "on"

    @property
    def notes(self) -> list[str]:
        things = ["idle time inside the steps, which NVML's readings suggest"] if self.missed else []
        if self._several_ranks and self._profile != "on":
            things.append("exposed communication")
        if not things:
            return self._notes
        where = "the end of training could not be foreseen"
        if self._profile == "off":
            where = 'profile="off"'
        elif self._several_ranks:
            where = 'with several ranks profile="auto" records nothing'
        return [
            *self._notes,
            f"torch.profiler was not allowed to record {' and '.join(things)}: {where}. "
            f'StallDetector(profile="on") records three steps{" on rank 0" if self._several_ranks else ""}.',
        ]

    @property
    def _may_come(self) -> bool:
        """Whether a recording with torch.profiler is allowed at some time of this run."""
        if self._several_ranks or self._profile != "auto":
            return self._profile == "on" and self._rank == 0
        return self._batches_left() is not None

    @property
    def recording(self) -> bool:
        """Whether our own torch.profiler is running."""
        return self._profiler_look is not None and not self._reading

    def leaves_time_for(self, steps: int) -> bool:
        """Whether torch.profiler is free for so many steps, with enough steps left for a look after them."""
        if self.recording:
            return False
        left = self._batches_left() if self._profile == "auto" and self._wanted and self.pending else None
        return left is None or left - steps > self._last_steps

    def step_done(self, steps: int, since_warm: Callable[[], GpuTimes] | None) -> None:
        """A step has ended; ``steps`` since warm-up are the same on all ranks, ``since_warm`` is None in a warm-up."""
        if self._sync_look is not None:
            if self._sync_look.step_done():
                self.syncs = self._sync_look.sighting()
                if not self._sync_look.sees_calls:
                    self._notes.append(_NO_MOMENTS)
                self._sync_look = None
        elif self._profiler_look is not None:
            self._advance_profiler()
        elif since_warm is None:
            return
        elif self._sync_look_due(steps, since_warm) and not (
            self._several_ranks and self._may_begin(steps, since_warm)
        ):
            self._begin_sync_look()
        elif self._may_begin(steps, since_warm):
            self._step_s_before = _step_s(since_warm())
            self._begin_profiler()

    def window_done(self, since_warm: GpuTimes, step_s: float | None) -> None:
        """Decide after a window whether there is reason to look; ``since_warm`` is since the end of the warm-up."""
        if self._cost_due and self._profiler_look is None:
            self._cost_due -= 1
            if not self._cost_due:
                self._tell_cost(step_s)
        if self._over:
            return
        if self.look is None:
            self._suspect(since_warm)
        if self._several_ranks or self._profiler_look is not None:
            return
        if self.syncs is None and self._sync_look is None and (self._wanted or self._waits_may_count(since_warm)):
            self._begin_sync_look()

    def finish(self) -> None:
        """End with the run: read what was recorded, and begin no other look."""
        if self._sync_look is not None:
            self._sync_look.end()
            self._sync_look = None
        if self._profiler_look is not None and self._reading:
            self._read()
        if self._profiler_look is not None:
            self._end_profiler()
        self._device.clock.spans = None
        self._over = True
        if self._cost_due:
            self._cost_due = 0
            self._tell_cost(None)

    def _suspect(self, since_warm: GpuTimes) -> None:
        self._wanted = self._wanted or worth_a_look(since_warm, self._device.state(), self._threshold)

    def _waits_may_count(self, gpu: GpuTimes) -> bool:
        """Whether waits of the host for the GPU may explain what the GPU is idle for: in the steps, or in hooks."""
        return may_idle(gpu, self._threshold) or hooks_s(gpu) >= self._threshold * gpu.seconds > 0

    def _sync_look_due(self, steps: int, since_warm: Callable[[], GpuTimes]) -> bool:
        if self.syncs is not None or steps < _SETTLED_STEPS:
            return False
        return self._several_ranks or (steps == _SETTLED_STEPS and self._waits_may_count(since_warm()))

    @property
    def _last_steps(self) -> int:
        """Batches before the foreseen end at which a look begins."""
        return ProfilerLook(self._rhythm()).lasts + _SPARE_STEPS

    def _may_begin(self, steps: int, since_warm: Callable[[], GpuTimes]) -> bool:
        return self.look is None and not self._profiler_failed and not self._is_taken() and self._due(steps, since_warm)

    def _due(self, steps: int, since_warm: Callable[[], GpuTimes]) -> bool:
        if self._several_ranks and (self._profile != "on" or self._rank):
            return False
        left = self._batches_left() if self._profile != "off" else None
        if self._several_ranks:
            before = _SYNC_STEPS if self.syncs is None else 0
            return steps >= _PROFILER_AFTER or (left is not None and left <= self._last_steps + before)
        if self._profile == "on" and self._wanted:
            return True
        if left is None:
            return self._profile == "on" and steps >= _WITHOUT_REASON_AFTER
        if left > self._last_steps:
            return False
        if self._profile == "on":
            return True
        gpu = since_warm()
        self._suspect(gpu)
        return self._wanted or may_idle(gpu, self._threshold)

    def _begin_sync_look(self) -> None:
        clock = self._device.clock
        look = None
        try:
            look = SyncLook(inside=lambda: clock.in_step, outside=clock.host_waits, clock_ns=clock.clock_ns)
            if look.is_taken:
                self._notes.append("Synchronizing calls were not detected: the program uses torch's debug mode.")
                self.syncs = SyncSighting(0, 0)
                return
            look.begin()
        except Exception as error:  # a torch that does not know the mode
            log.debug("no look for synchronizing calls", exc_info=True)
            self._notes.append(f"Synchronizing calls could not be detected: {error}")
            self.syncs = SyncSighting(0, 0)
            if look is not None:
                look.end()
            return
        self._sync_look = look

    def _begin_profiler(self) -> None:
        look, begin_s = ProfilerLook(self._rhythm(), self._modules()), time.perf_counter()
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
            if look.is_part:
                self._notes.append(
                    f"Gradients are accumulated over more batches than torch.profiler recorded ({self.look.steps}): "
                    "the optimizer's step may be missing from them, or overrepresented."
                )
            if not self.look.correlated:
                self._notes.append(
                    "torch.profiler's records do not show which call issued what: copies inside the step were not "
                    "separated."
                )
        except CannotLookError as error:
            self._fail(error)

    def _end_profiler(self) -> None:
        """Stop a recording that the run's end cuts short, unless that would wait for a GPU that never gets there."""
        look, self._profiler_look = self._profiler_look, None
        assert look is not None
        if self._device.drained():
            look.end()
        else:
            look.abandon()
            self._notes.append(
                "The GPU did not finish its work, so torch.profiler, which waits for it, was not stopped."
            )

    def _fail(self, error: CannotLookError) -> None:
        self._profiler_look = None
        self._profiler_failed = True
        self._device.clock.spans = None
        seen = " NVML's utilization and detected synchronizing calls are used instead."
        if self._several_ranks:
            seen += " Exposed communication, and ranks that wait in it for each other, were not detected."
        self._notes.append(f"The step's kernels could not be recorded with torch.profiler: {error}.{seen}")

    def _tell_cost(self, after_s: float | None) -> None:
        before_s, steps = self._step_s_before, self.look.steps if self.look is not None else 0
        cost = f"torch.profiler recorded {steps} steps, which took {self._spent_s:.2f} s"
        if before_s and after_s is not None:
            cost += (
                f": {before_s * 1e3:.1f} ms a step before it, {after_s * 1e3:.1f} ms after it "
                f"({(after_s / before_s - 1) * 100:+.1f} %)"
            )
        self._notes.append(f"{cost}.")


def _step_s(gpu: GpuTimes) -> float | None:
    if not gpu.steps:
        return None
    idle_s = sum(seconds for name, seconds in gpu.idle.items() if in_steps(name))
    queued_s = sum(seconds for name, seconds in gpu.queued.items() if in_steps(name))
    return (gpu.compute_s + gpu.copy_s + queued_s + gpu.wait_s + idle_s) / gpu.steps
