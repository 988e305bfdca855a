"""All that a diagnosis looks at: plain numbers, from one rank after warm-up, and a few from the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from lightning_gpuopt.diagnosis.growth import Growth, growth_of
from lightning_gpuopt.diagnosis.waterfall import Waterfall, waterfall_of
from lightning_gpuopt.measurements.code_location import Sampled
from lightning_gpuopt.measurements.gpu import AheadCopies, DeviceState, GpuTimes, StepLook, SyncSighting
from lightning_gpuopt.measurements.host import Collections, Compilations, HostActivity
from lightning_gpuopt.measurements.kernels import StepKernels
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.loading import (
    ImageSamples,
    LoaderFacts,
    LoaderReading,
    Pipelines,
    QueueTimes,
    WorkerTimes,
)
from lightning_gpuopt.measurements.phases import GPU_WORK, PhaseTimes, WindowRecord
from lightning_gpuopt.measurements.ranks import GradientSync, MetricSync, RankWork, ReducerTimes

_MOSTLY: Final = 0.5


@dataclass(frozen=True)
class Measurement:
    """One stretch of a run.

    Attributes:
        times: the phases.
        loader: settings of the training loaders.
        source: the training loader that the loop waits for; None where none is known.
        validation: the loader of the validation, where its workers are started for each; else None.
        host: what workers and CPUs did; None where not measured.
        gpu: what the GPU's event clock saw; None without a GPU.
        workers: what was timed inside the workers, or inside the training process where it loads by itself.
        queues: what was seen of the loader's queues.
        device: what NVML reported.
        syncs: what a close look for synchronizing calls saw; None where there was no look.
        look: what a close look at the step's kernels saw; None where there was no look.
        operators: what a CPU's steps consist of; None where that was not recorded.
        look_pending: whether such a look is still to come: until then nothing is said of the inside of the step.
        look_missed: whether such a look was needed, and not allowed.
        ranks: the work of all ranks; empty on one.
        reducer: what DDP's reducer did on the CPU; None on other devices, and without DDP.
        gradients: how gradients are reduced; None on one rank.
        metrics: metrics that were reduced over the ranks in steps; None on one rank.
        metric_names: their names.
        ahead: the copies that CudaPrefetcher made ahead; None without it.
        images: the image files behind the training loader; None where none are known.
        pipelines: the loaders that decode in pipelines of their own; None where there are none.
        async_saves_copy: whether checkpoints can be saved in the background as they are: Lightning 2.5.4 and later.
        hyperparameters: data that ``save_hyperparameters`` has taken in, each as ``"dataset (Photos)"``.
        sampled: what sampling threads have seen of the workers and of the training thread.
        collections: what Python's garbage collector did; None where not watched.
        compilations: what torch.compile did; None where not watched.
        history: the stretch window by window, for what changes over the run.
        grows: what was found to grow in the program, for people; empty where nothing was.
        growth_s: seconds of the device's waits that are due to a slowdown, by name: they are no part of other causes.
            ``"gpu_work"`` is idle time inside the steps.
    """

    times: PhaseTimes
    loader: LoaderFacts
    source: LoaderDescription | None = None
    validation: LoaderReading | None = None
    host: HostActivity | None = None
    gpu: GpuTimes | None = None
    workers: WorkerTimes | None = None
    queues: QueueTimes | None = None
    device: DeviceState | None = None
    syncs: SyncSighting | None = None
    look: StepLook | None = None
    operators: StepKernels | None = None
    look_pending: bool = False
    look_missed: bool = False
    ranks: tuple[RankWork, ...] = ()
    reducer: ReducerTimes | None = None
    gradients: GradientSync | None = None
    metrics: MetricSync | None = None
    metric_names: tuple[str, ...] = ()
    ahead: AheadCopies | None = None
    images: ImageSamples | None = None
    pipelines: Pipelines | None = None
    async_saves_copy: bool = True
    hyperparameters: tuple[str, ...] = ()
    sampled: tuple[Sampled, ...] = ()
    collections: Collections | None = None
    compilations: Compilations | None = None
    history: tuple[WindowRecord, ...] = ()
    grows: str = ""
    growth_s: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def waterfall(self) -> Waterfall:
        """What the device waited for: the GPU where its clock was read, else the training process."""
        beside = bool(self.loader.num_workers) or (self.source is not None and self.source.work != "training process")
        waterfall = waterfall_of(self.times, self.gpu, self.device, self.look, self.syncs, loads_beside=beside)
        if not self.growth_s:
            return waterfall
        waits = {name: max(seconds - self.growth_s.get(name, 0.0), 0.0) for name, seconds in waterfall.waits.items()}
        grown_s = self.growth_s.get(GPU_WORK, 0.0)
        inside = {name: max(getattr(waterfall, name) - grown_s, 0.0) for name in ("launch_s", "sync_s", "copies_s")}
        return replace(waterfall, waits=waits, **inside)

    @property
    def kernels(self) -> StepKernels | None:
        """What the steps' work consists of; None where nothing was looked at."""
        return self.look.kernels if self.look is not None else self.operators

    @cached_property
    def growth(self) -> Growth | None:
        """How the steps get slower; None where they do not, or there are too few windows to say."""
        return growth_of(self.history)

    @property
    def collectives_s(self) -> float | None:
        """Seconds of a mean step in which collectives ran exposed on this rank; None where that is not known.

        On the GPU by the close look, and without one, as on the CPU, by what DDP's reducer has timed: there torch times
        the first ten reductions, and then one in a hundred.
        """
        if self.waterfall.on_gpu and self.look is not None:
            return None if self.look_pending else self.look.communication_s
        exposed_s = self.reducer.all_exposed_s if self.reducer is not None else None
        return None if exposed_s is None or not self.times.steps else exposed_s / self.times.steps

    @property
    def communication_s(self) -> float | None:
        """`collectives_s` of the rank that waits least: the others wait in them for a slower one. None if not known.

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
        """Seconds in which the step waited for metrics to be reduced, on the CPU, by the rank that waits least.

        The others wait in it for a slower one. 0 until the other ranks' figures are there.
        """
        if self.metrics is None or self.waterfall.on_gpu:
            return 0.0
        ranks_s = [rank.metric_sync_s for rank in self.ranks if rank.metric_sync_s is not None]
        if len(ranks_s) < 2 or len(ranks_s) < len(self.ranks):
            return 0.0
        return min(self.metrics.seconds, *(each * self.times.steps for each in ranks_s))

    @cached_property
    def late_pipelines(self) -> Pipelines | None:
        """The pipelines, where the wait for data is the wait for them; None where it is for something else."""
        found = self.pipelines
        if found is None or not found.times.batches:
            return None
        if self.source is not None and self.source.key:  # of several loaders
            return found if self.source.kind == "pipeline" else None
        waits_s = self.times.phases["data_wait"] + self.times.first_fetch_s
        beside_others = self.workers is not None and self.workers.batches > 0
        return None if beside_others and found.wait_s < _MOSTLY * waits_s else found
