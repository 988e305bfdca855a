"""The input of a diagnosis: plain numbers, from one rank after warm-up, and a few from the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from lightning_gpuopt.diagnosis.growth import Growth, growth_of
from lightning_gpuopt.diagnosis.waterfall import Waterfall, waterfall_of
from lightning_gpuopt.measurements import loading
from lightning_gpuopt.measurements.code_location import Sampled
from lightning_gpuopt.measurements.gpu import AheadCopies, DeviceState, GpuTimes, StepLook, SyncSighting
from lightning_gpuopt.measurements.host import Collections, Compilations, HostActivity
from lightning_gpuopt.measurements.kernels import StepKernels
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.phases import GPU_WORK, PhaseTimes, WindowRecord
from lightning_gpuopt.measurements.ranks import GradientSync, MetricSync, RankWork, ReducerTimes

_MOSTLY: Final = 0.5


@dataclass(frozen=True)
class Measurement:
    """One stretch of a run; what was not measured, or does not apply, is None, or a counter at its beginning."""

    times: PhaseTimes = field(default_factory=PhaseTimes)
    loader: loading.LoaderFacts = field(default_factory=loading.LoaderFacts)  # settings of the training loaders
    source: LoaderDescription = field(default_factory=lambda: LoaderDescription("torch"))  # that the loop waits for
    validation: loading.LoaderReading | None = None  # where its workers are started for each validation
    host: HostActivity | None = None
    gpu: GpuTimes | None = None
    # timed inside the workers, or the training process where it loads
    workers: loading.WorkerTimes = field(default_factory=loading.WorkerTimes)
    queues: loading.QueueTimes = field(default_factory=loading.QueueTimes)
    device: DeviceState | None = None  # what NVML reported
    syncs: SyncSighting | None = None
    look: StepLook | None = None  # a close look at the step's kernels
    look_pending: bool = False  # until a look has come nothing is said of the inside of the step
    look_missed: bool = False  # a look was needed, and not allowed
    ranks: tuple[RankWork, ...] = ()  # the work of all ranks; empty on one
    reducer: ReducerTimes = field(default_factory=ReducerTimes)  # what DDP's reducer did on the CPU
    gradients: GradientSync | None = None
    metrics: MetricSync = field(default_factory=MetricSync)  # reduced over the ranks in steps
    ahead: AheadCopies = field(default_factory=AheadCopies)  # that CudaPrefetcher made
    images: loading.ImageSamples | None = None  # the image files behind the training loader
    pipelines: loading.Pipelines | None = None  # the loaders that decode in pipelines of their own
    # whether checkpoints can be saved in the background as they are: Lightning 2.5.4 and later
    async_saves_copy: bool = True
    hyperparameters: tuple[str, ...] = ()  # data that ``save_hyperparameters`` took in: "dataset (Photos)"
    sampled: tuple[Sampled, ...] = ()  # what sampling threads saw of the workers and the training thread
    collections: Collections | None = None
    compilations: Compilations = field(default_factory=Compilations)
    history: tuple[WindowRecord, ...] = ()  # window by window
    grows: str = ""  # what was found to grow in the program, for people
    # seconds of waits due to a slowdown, by name, and no part of other causes; "gpu_work": idle time inside the steps
    growth_s: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def waterfall(self) -> Waterfall:
        """What the device waited for: the GPU if its clock was read, else the training process."""
        beside = bool(self.loader.num_workers) or self.source.work != "training process"
        waterfall = waterfall_of(self.times, self.gpu, self.device, self.look, self.syncs, loads_beside=beside)
        if not self.growth_s:
            return waterfall
        waits = {name: max(seconds - self.growth_s.get(name, 0.0), 0.0) for name, seconds in waterfall.waits.items()}
        grown_s = self.growth_s.get(GPU_WORK, 0.0)
        inside = {name: max(getattr(waterfall, name) - grown_s, 0.0) for name in ("launch_s", "sync_s", "copies_s")}
        return replace(waterfall, waits=waits, **inside)

    @property
    def kernels(self) -> StepKernels | None:
        return self.look.kernels if self.look is not None else None

    @cached_property
    def growth(self) -> Growth | None:
        return growth_of(self.history)

    @property
    def collectives_s(self) -> float | None:
        """Seconds of a mean step in which collectives ran exposed on this rank; None if that is not known.

        By the close look; without one by DDP's reducer: torch times its first ten reductions, then one in a hundred.
        """
        if self.waterfall.on_gpu and self.look is not None:
            return None if self.look_pending else self.look.communication_s
        exposed_s = self.reducer.all_exposed_s
        return None if exposed_s is None or not self.times.steps else exposed_s / self.times.steps

    @property
    def communication_s(self) -> float | None:
        """`collectives_s` of the rank that waits least, since others wait for a slower one; None if not known.

        Without a look the other ranks' figures are needed: every wait for another rank looks like a collective.
        """
        looked = self.waterfall.on_gpu and self.look is not None
        own_s = self.collectives_s
        others = [rank.communication_s for rank in self.ranks if rank.communication_s is not None]
        if own_s is None or (not looked and (len(others) < 2 or len(others) < len(self.ranks))):
            return None
        return min([own_s, *others])

    @property
    def metric_sync_s(self) -> float:
        """Seconds of waits for metric reductions on the CPU, of the rank that waits least; 0 until all are known."""
        if self.waterfall.on_gpu:
            return 0.0
        ranks_s = [rank.metric_sync_s for rank in self.ranks if rank.metric_sync_s is not None]
        if len(ranks_s) < 2 or len(ranks_s) < len(self.ranks):
            return 0.0
        return min(self.metrics.seconds, *(each * self.times.steps for each in ranks_s))

    @cached_property
    def late_pipelines(self) -> loading.Pipelines | None:
        """The pipelines, where the wait for data is the wait for them; None if it is for something else."""
        found = self.pipelines
        if found is None or not found.times.batches:
            return None
        if self.source.key:  # of several loaders
            return found if self.source.kind == "pipeline" else None
        waits_s = self.times.phases["data_wait"] + self.times.first_fetch_s
        return None if self.workers.batches and found.wait_s < _MOSTLY * waits_s else found
