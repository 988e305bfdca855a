"""All that a diagnosis looks at: plain numbers, from one rank after warm-up, and a few from the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from lightning_gpuopt._measured import (
    AheadCopies,
    DeviceState,
    GpuTimes,
    HostActivity,
    ImageSamples,
    LoaderFacts,
    PhaseTimes,
    Pipelines,
    QueueTimes,
    RankWork,
    StepLook,
    SyncSighting,
    WorkerTimes,
)
from lightning_gpuopt.diagnosis.waterfall import Waterfall, waterfall_of

_MOSTLY: Final = 0.5


@dataclass(frozen=True)
class Measurement:
    """One stretch of a run.

    Attributes:
        times: the phases.
        loader: settings of the training loaders.
        host: what workers and CPUs did; None where not measured.
        gpu: what the GPU's event clock saw; None without a GPU.
        workers: what was timed inside the workers, or inside the training process where it loads by itself.
        queues: what was seen of the loader's queues.
        device: what NVML said.
        syncs: what a close look for synchronizing calls saw; None where there was no look.
        look: what a close look at the step's kernels saw; None where there was no look.
        look_pending: whether such a look is still to come: until then nothing is said of the inside of the step.
        ranks: the work of all ranks; empty on one.
        ahead: the copies that CudaPrefetcher made ahead; None without it.
        images: the image files behind the training loader; None where none are known.
        pipelines: the loaders that decode in pipelines of their own; None where there are none.
    """

    times: PhaseTimes
    loader: LoaderFacts
    host: HostActivity | None = None
    gpu: GpuTimes | None = None
    workers: WorkerTimes | None = None
    queues: QueueTimes | None = None
    device: DeviceState | None = None
    syncs: SyncSighting | None = None
    look: StepLook | None = None
    look_pending: bool = False
    ranks: tuple[RankWork, ...] = ()
    ahead: AheadCopies | None = None
    images: ImageSamples | None = None
    pipelines: Pipelines | None = None

    @cached_property
    def waterfall(self) -> Waterfall:
        """What the device waited for: the GPU where its clock was read, else the training process."""
        return waterfall_of(self.times, self.gpu, self.device, self.look, self.syncs)

    @cached_property
    def late_pipelines(self) -> Pipelines | None:
        """The pipelines, where the wait for data is the wait for them; None where it is for something else."""
        found = self.pipelines
        if found is None or not found.times.batches:
            return None
        waits_s = self.times.phases["data_wait"] + self.times.first_fetch_s
        beside_others = self.workers is not None and self.workers.batches > 0
        return None if beside_others and found.wait_s < _MOSTLY * waits_s else found
