"""Owns all that looks at a run closely, for a few steps or seconds: kernels, synchronizing calls, a trace, stacks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from lightning_gpuopt.compat.dynamo import has_compiled
from lightning_gpuopt.compat.lightning import LightningModule, Trainer
from lightning_gpuopt.compat.lightning_loops import batches_left
from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.detector.kernel_profiling import KernelProfiling, Profile
from lightning_gpuopt.detector.stack_sampling import StackSampling
from lightning_gpuopt.detector.trace_recording import TraceRecording
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.code_location import Sampled
from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.timeline.module_calls import ModuleCalls
from lightning_gpuopt.timeline.probe import Probe

_NO_TABLE: Final = (
    'The steps\' kernels were not recorded: with StallDetector(profile="on") the report lists them by kind, kernel and '
    "module."
)


class ProfilingPasses(Probe):
    """Decides whose turn it is: torch.profiler records for one of them only, and no stacks are sampled meanwhile."""

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        threshold: float,
        profile: Profile,
        device: DeviceWatch | None,
        stacks: StackSampling | None,
    ) -> None:
        self.kernels: KernelProfiling | None = None  # on CUDA only
        self.stacks = stacks  # None on ranks that do not report
        self._trace = TraceRecording(lambda steps: self.kernels is None or self.kernels.leaves_time_for(steps))
        self._found: Sequence[Finding] = ()
        self._due_at = -sys.maxsize

        def modules() -> ModuleCalls | None:
            """None if hooks could have torch compile the modules anew."""
            return None if has_compiled() else ModuleCalls(pl_module, time.perf_counter)

        if device is not None:
            self.kernels = KernelProfiling(
                device,
                threshold,
                profile=profile,
                batches_left=lambda: batches_left(trainer),
                rank=trainer.global_rank,
                several_ranks=trainer.world_size > 1,
                rhythm=lambda: int(trainer.accumulate_grad_batches),
                is_taken=lambda: self._trace.is_recording,
                modules=modules,
            )

    @override
    def known(self) -> dict[str, Any]:
        kernels = self.kernels
        if kernels is None:
            return {}
        return {
            "syncs": kernels.syncs,
            "look": kernels.look,
            "look_pending": kernels.pending,
            "look_missed": kernels.missed,
        }

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        return self.stacks.sampled() if self.stacks is not None else ()

    def record_trace(self, path: Path) -> None:
        """Record the next five steps, as soon as torch.profiler is free; once."""
        self._due_at = -sys.maxsize
        self._trace.ask(path)

    def step_done(
        self, steps: int, gpu: Callable[[], GpuTimes] | None, findings: Callable[[], list[Finding] | None]
    ) -> None:
        """A step has ended, ``steps`` after warm-up on every rank; in it, ``gpu`` is None and ``findings`` gives it."""
        if steps < self._due_at:
            return
        self._due_at = -sys.maxsize  # what is found below may have more to do with the next step
        self._look(steps, gpu, findings)
        if self.kernels is None and not self._found and not self._trace.wants_steps:
            self._due_at = self.stacks.due_at(steps) if self.stacks is not None else sys.maxsize

    def _look(
        self, steps: int, gpu: Callable[[], GpuTimes] | None, findings: Callable[[], list[Finding] | None]
    ) -> None:
        if self.kernels is not None:
            self.kernels.step_done(steps, gpu)
        self._trace.step_done()
        if self.stacks is None:
            return
        self.stacks.step_done()
        if self._found and not self._records:
            self._sample()
        if self.stacks.due(steps) and (found := findings()) is not None:
            self.found(found)

    def window_done(self, gpu: GpuTimes, step_s: float | None) -> None:
        """A window has ended, with steps of ``step_s``; ``gpu`` is since the end of the warm-up."""
        if self.kernels is not None:
            self.kernels.window_done(gpu, step_s)

    def found(self, findings: Sequence[Finding]) -> None:
        """Begin to sample stacks for findings that have none; once no profiler records."""
        if self.stacks is not None:
            self._due_at = -sys.maxsize
            self._found = findings
            if not self._records:
                self._sample()

    def finish(self) -> None:
        for each in (self.kernels, self.stacks):
            if each is not None:
                each.finish()

    @override
    def close(self) -> None:
        """End all of them, however the run has ended."""
        with ExitStack() as ends:
            ends.callback(self._trace.end)
            ends.callback(self.finish)

    def notes_on(self, findings: Sequence[Finding] | None) -> list[str]:
        """What the looks cost, and what could not be seen; ``findings`` are None while a warm-up goes on."""
        kernels = self.kernels
        notes = [*(kernels.notes if kernels is not None else []), *self._trace.notes]
        if findings is not None and not findings and kernels is not None and kernels.left_out:
            notes.append(_NO_TABLE)
        return notes + (self.stacks.notes(findings) if self.stacks is not None and findings is not None else [])

    @property
    def _records(self) -> bool:
        """Whether torch.profiler records now: stacks that are sampled meanwhile would be in its record."""
        return self._trace.is_recording or (self.kernels is not None and self.kernels.recording)

    def _sample(self) -> None:
        assert self.stacks is not None
        found, self._found = self._found, ()
        self.stacks.found(found)
