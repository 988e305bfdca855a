"""What a rank did in a mean step, and how rank 0 gets to know it: once a window."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from typing_extensions import override

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.measurements.ranks import RankWork
from lightning_gpuopt.timeline.probe import Probe
from lightning_gpuopt.utils.rank_channel import Gathered, RankGather


class RankExchange(Probe):
    """Sends this rank's work to rank 0, which collects that of all ranks; without a collective."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._works: dict[int, Any] = {}
        self._gather = RankGather("stall-detector", rank, world_size, self._collect)

    @property
    @override
    def notes(self) -> list[str]:
        problem = self._gather.problem
        return [f"Stragglers could not be detected: {problem}."] if problem is not None else []

    @override
    def known(self) -> dict[str, Any]:
        return {"ranks": tuple(RankWork(**work) for _, work in sorted(self._works.items()) if work is not None)}

    def send(self, step: int, work: RankWork | None) -> None:
        """Once a window on each rank: send this rank's work since warm-up (None: none yet)."""
        self._gather.post(step, asdict(work) if work is not None else None)

    @override
    def close(self, patience_s: float = 1.0) -> None:
        """Wait so long for the other ranks' last figures, then send and receive no more."""
        self._gather.close(patience_s)

    def _collect(self, gathered: Gathered) -> None:
        self._works = {**self._works, **gathered.by_rank}  # anew: another thread may go through it


def work_of(rank: int, measurement: Measurement, *, forward: bool) -> RankWork | None:
    """A mean step of this rank, for rank 0 to compare; ``forward``: its forward's GPU time is this rank's own."""
    if not measurement.times.steps:
        return None
    times, workers, gpu = measurement.times, measurement.workers, measurement.gpu
    loader_s = None
    if workers.batches:
        loader_s = workers.busy_s / workers.batches / max(measurement.loader.num_workers or 1, 1)
    elif measurement.late_pipelines is not None:
        done, threads = measurement.late_pipelines.times, measurement.late_pipelines.num_threads
        loader_s = (done.read_wall_s + done.decode_cpu_s) / done.batches / max(threads, 1)
    if gpu is None:
        own_s = sum(times.phases[phase] for phase in ("transfer", "forward", "logging")) + times.step_hooks_s
        sync_s = measurement.metrics.seconds  # in which ranks wait
        return RankWork(
            rank,
            times.phases["data_wait"] / times.steps,
            (own_s - sync_s) / times.steps,
            loader_s,
            communication_s=measurement.collectives_s,
            metric_sync_s=sync_s / times.steps,
            batch_bytes=workers.batch_bytes,
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
        batch_bytes=workers.batch_bytes,
    )
