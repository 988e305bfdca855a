"""Accumulates the figures of a fit since the warm-up, or since the last change of its loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_gpuopt.detector.device_watch import DeviceWatch
from lightning_gpuopt.detector.loader_watch import LoaderWatch
from lightning_gpuopt.detector.looks import Looks
from lightning_gpuopt.detector.rank_watch import RankWatch
from lightning_gpuopt.detector.window_history import WindowHistory
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.gpu import AheadCopies, GpuTimes
from lightning_gpuopt.measurements.loading import ImageSamples, LoaderReading, Pipelines, QueueTimes
from lightning_gpuopt.measurements.phases import PhaseTimes, WindowRecord
from lightning_gpuopt.measurements.ranks import GradientSync, MetricSync, RankWork, ReducerTimes
from lightning_gpuopt.objects.growing import Growing
from lightning_gpuopt.timeline.pauses import PauseWatch

_MIN_RECORD_S: Final = 0.1  # seconds: shorter windows are joined before they are compared
# if nothing that grows was found: search again after so many times the steps. A search takes milliseconds.
_LOOK_AGAIN: Final = 1.5


@dataclass(frozen=True)
class CounterReading:
    """The counters of loaders, pipelines, queues, the GPU, CudaPrefetcher and DDP at one moment."""

    loaders: dict[int, LoaderReading] = field(default_factory=dict)
    validation: LoaderReading | None = None
    pipelines: dict[int, Pipelines] = field(default_factory=dict)
    queues: QueueTimes = QueueTimes()  # noqa: RUF009 - frozen
    gpu: GpuTimes = GpuTimes()  # noqa: RUF009 - frozen
    ahead: AheadCopies | None = None
    reducer: ReducerTimes | None = None
    gradients: GradientSync | None = None
    metrics: MetricSync | None = None
    metric_names: tuple[str, ...] = ()


class SteadyStateAccumulator:
    """Measures from its construction on; resets the host's and NVML's figures.

    ``steps`` are those that the host has done: the GPU may have some of them before it, which are no part of this.
    After a change of the loader, later windows prove ``findings``. ``diagnose_after_s`` are seconds of the run, since
    its last change, before which findings are not looked for again.
    """

    def __init__(
        self,
        loader: LoaderWatch,
        device: DeviceWatch | None,
        looks: Looks,
        steps: int,
        ahead: Callable[[], AheadCopies | None],
        images: Callable[[], ImageSamples | None],
        pauses: PauseWatch,
        owners: Mapping[str, object],
        rank_watch: RankWatch | None,
    ) -> None:
        self.findings: list[Finding] = []
        self.diagnose_after_s = 0.0
        self._gpu_is_here = device is None
        self._loader = loader
        self._device = device
        self._looks = looks
        self._ahead = ahead
        self._images = images
        self._pauses = pauses
        self._rank_watch = rank_watch
        pauses.restart()
        self._history = WindowHistory(device.device if device is not None else None)
        self._growing = Growing(owners)
        self._grows = ""
        self._look_after = 0.0
        self._steps = steps
        self._start = CounterReading()
        self._start = self._last = self._recorded_reading = self._read()
        self._recorded_times: PhaseTimes | None = None
        loader.reset_host()
        if device is not None:
            device.restart()
            device.clock.take_snapshot(steps)
            self.step_done()

    def step_done(self) -> None:
        """Count a step. GPU times count once the GPU has finished the steps before this run."""
        if self._gpu_is_here or self._device is None:
            return
        snapshot = self._device.clock.snapshot
        if snapshot is not None:
            self._gpu_is_here = True
            self._start = replace(self._start, gpu=snapshot)
            self._last = replace(self._last, gpu=snapshot)
            self._recorded_reading = replace(self._recorded_reading, gpu=snapshot)

    def measure(self, times: PhaseTimes, ranks: tuple[RankWork, ...] = ()) -> Measurement:
        """What was measured since the beginning; ``times`` are the phases since then."""
        return self._since(self._start, self._read(), times, ranks, self._history.records)

    def window(self, times: PhaseTimes, ranks: tuple[RankWork, ...] = ()) -> Measurement:
        """What was measured since the last window; ``times`` are the phases since then."""
        before = self._last
        self.end_window()
        return self._since(before, self._last, times, ranks)

    def end_window(self) -> None:
        """A window ends now, of which nobody wants to know what was measured in it."""
        self._last = self._read()

    def until_window(self, times: PhaseTimes, ranks: tuple[RankWork, ...] = ()) -> Measurement:
        """What was measured from the beginning to the end of the last window; cheaper than :meth:`measure` there."""
        record_s = times.wall_s - (self._recorded_times.wall_s if self._recorded_times is not None else 0.0)
        if record_s >= _MIN_RECORD_S:
            self._keep_record(times)
        return self._since(self._start, self._last, times, ranks, self._history.records)

    def _keep_record(self, times: PhaseTimes) -> None:
        """Keep what was measured since the last record, for what changes over the run."""
        since = times - self._recorded_times if self._recorded_times is not None else times
        measured = self._since(self._recorded_reading, self._last, since, ())
        self._recorded_reading, self._recorded_times = self._last, times
        self._steps += since.steps
        self._history.add(measured, self._steps, self._loader.process())

    def look_for_growth(self, finding: Finding) -> bool:
        """Search for what grows in a program whose steps get slower; True if it is found now."""
        if self._grows or self._steps < self._look_after:
            return False
        self._look_after = _LOOK_AGAIN * self._steps
        self._grows = self._growing.look(str(finding.evidence["phase"]))
        return bool(self._grows)

    def gpu(self) -> GpuTimes:
        """What the GPU did since the beginning."""
        return self._read().gpu - self._start.gpu

    def _read(self) -> CounterReading:
        gpu = self._device.clock.times() if self._device is not None and self._gpu_is_here else self._start.gpu
        loader = self._loader
        reading = CounterReading(
            loader.readings(), loader.validation(), loader.pipelines(), loader.queues.times(), gpu, self._ahead()
        )
        if self._rank_watch is None:
            return reading
        (reducer, gradients), (metrics, names) = self._rank_watch.read(), self._rank_watch.metrics()
        return replace(reading, reducer=reducer, gradients=gradients, metrics=metrics, metric_names=names)

    def _since(
        self,
        start: CounterReading,
        now: CounterReading,
        times: PhaseTimes,
        ranks: tuple[RankWork, ...],
        history: tuple[WindowRecord, ...] = (),
    ) -> Measurement:
        slowest = _slowest_loader(start, now, times.phases["data_wait"] + times.first_fetch_s)
        measured = Measurement(
            times=times,
            loader=slowest.facts if slowest is not None else self._loader.facts,
            source=slowest.loader if slowest is not None else None,
            validation=now.validation.since(start.validation) if now.validation is not None else None,
            host=self._loader.host(),
            workers=slowest.workers if slowest is not None else None,
            queues=None if slowest is not None and not slowest.facts.num_workers else now.queues - start.queues,
            ranks=ranks,
            reducer=now.reducer - (start.reducer or ReducerTimes()) if now.reducer is not None else None,
            gradients=now.gradients,
            metrics=now.metrics - (start.metrics or MetricSync()) if now.metrics is not None else None,
            metric_names=now.metric_names,
            ahead=now.ahead - start.ahead if now.ahead is not None and start.ahead is not None else now.ahead,
            images=self._images(),
            pipelines=_all_pipelines(start, now),
            collections=self._pauses.collections(),
            compilations=self._pauses.compilations(),
            history=history,
            grows=self._grows,
        )
        if self._device is None or self._looks.kernels is None:
            return measured
        kernels = self._looks.kernels
        return replace(
            measured,
            gpu=now.gpu - start.gpu,
            device=self._device.state(),
            syncs=kernels.syncs,
            look=kernels.look,
            look_pending=kernels.pending,
            look_missed=kernels.missed,
        )


def _slowest_loader(start: CounterReading, now: CounterReading, wait_s: float) -> LoaderReading | None:
    """Of several loaders the one that the loop waits for; None where there is none."""
    since = [each.since(start.loaders.get(number)) for number, each in now.loaders.items()]
    if not since:
        return None
    return max(since, key=lambda each: (each.wait_s or 0.0, each.busy_s)).waited_for(wait_s)


def _all_pipelines(start: CounterReading, now: CounterReading) -> Pipelines | None:
    """What all pipelines did in between; None where there are none."""
    since = [
        replace(each, times=each.times - start.pipelines[key].times) if key in start.pipelines else each
        for key, each in now.pipelines.items()
    ]
    return since[0].with_others(since[1:]) if since else None


def work_of(rank: int, measurement: Measurement | None, *, forward: bool) -> RankWork | None:
    """A mean step of this rank, for rank 0 to compare; ``forward``: its forward's GPU time is this rank's own."""
    if measurement is None or not measurement.times.steps:
        return None
    times, workers, gpu = measurement.times, measurement.workers, measurement.gpu
    loader_s = None
    if workers is not None and workers.batches:
        loader_s = workers.busy_s / workers.batches / max(measurement.loader.num_workers or 1, 1)
    elif measurement.late_pipelines is not None:
        done, threads = measurement.late_pipelines.times, measurement.late_pipelines.num_threads
        loader_s = (done.read_wall_s + done.decode_cpu_s) / done.batches / max(threads, 1)
    if gpu is None:
        own_s = sum(times.phases[phase] for phase in ("transfer", "forward", "logging")) + times.step_hooks_s
        sync_s = measurement.metrics.seconds if measurement.metrics is not None else 0.0  # in which ranks wait
        return RankWork(
            rank,
            times.phases["data_wait"] / times.steps,
            (own_s - sync_s) / times.steps,
            loader_s,
            communication_s=measurement.collectives_s,
            metric_sync_s=sync_s / times.steps,
            batch_bytes=workers.batch_bytes if workers is not None else None,
        )
    waterfall = measurement.waterfall
    if not gpu.steps or not waterfall.steps:
        return None
    data_s = waterfall.wait("data_wait")
    forward = forward and not (measurement.look is not None and measurement.look.forward_collectives)
    other_s = waterfall.step_waits_s - waterfall.inside_s - data_s
    return RankWork(
        rank,
        data_s / gpu.steps,
        other_s / gpu.steps,
        loader_s,
        gpu.forward_s / gpu.steps if forward else None,
        measurement.collectives_s,
        batch_bytes=workers.batch_bytes if workers is not None else None,
    )
