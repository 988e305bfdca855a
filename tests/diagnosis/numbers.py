"""Measurements made of numbers, for the tests of the diagnosis."""

from __future__ import annotations

from typing import Any

from lightning_gpuopt.diagnosis.causes.loader import data_finding as finding_of_data
from lightning_gpuopt.diagnosis.causes.loader import data_shares
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.loading import LoaderFacts, Pipelines, PipelineTimes, WorkerTimes
from lightning_gpuopt.measurements.phases import PHASES, PhaseTimes

WALL_S = 10.0
STEPS = 100

TWO_WORKERS = LoaderFacts(num_workers=2, persistent_workers=True, prefetch_factor=2, pin_memory=False)
IN_PROCESS = LoaderFacts(num_workers=0, persistent_workers=False, prefetch_factor=None, pin_memory=False)


def times(
    steps: int = STEPS,
    epochs: int = 0,
    callbacks: dict[str, float] | None = None,
    broadcast_s: float = 0.0,
    **phases: float,
) -> PhaseTimes:
    """A run of 10 s, filled up with ``forward``."""
    if callbacks:
        phases["callbacks"] = sum(callbacks.values())
    filled = dict.fromkeys(PHASES, 0.0) | phases
    filled["forward"] += WALL_S - sum(filled.values())
    return PhaseTimes(WALL_S, steps, filled, callbacks or {}, epochs, broadcast_s)


def host(
    cpu: float | None = None, *, queued: float = 0.0, free: float | None = 1.5, usable: float = 8.0, **more: Any
) -> HostActivity:
    """The host's figures; ``cpu`` and ``queued`` are shares of a worker's time."""
    return HostActivity(usable, 20.0, cpu, queued, free, **more)


def workers(
    batches: int = STEPS,
    *,
    data_s: float,
    cpu: float = 0.0,
    collate_s: float = 0.0,
    unevenness: float = 0.0,
    batch_bytes: int = 1000,
) -> WorkerTimes:
    """Workers that need so many seconds for a batch, of which ``cpu`` (a share) is CPU time."""
    busy = data_s + collate_s
    squares = batches * busy**2 * (1 + unevenness)
    return WorkerTimes(
        batches,
        data_s * batches,
        data_s * cpu * batches,
        collate_s * batches,
        collate_s * cpu * batches,
        batch_bytes * 10,
        10,
        squares,
    )


def pipelines(
    batches: int = STEPS,
    *,
    wait_s: float = 0.05,
    read_wait_s: float = 0.0,
    read_s: float = 0.02,
    read_cpu: float = 0.9,
    decode_cpu_s: float = 0.0,
    threads: int = 2,
    on_gpu: bool = False,
    loaders: int = 1,
    batch_size: int | None = 32,
) -> Pipelines:
    """A pipeline that was waited for so many seconds a batch; ``read_cpu`` is a share of ``read_s``."""
    done = PipelineTimes(
        batches,
        wait_s * batches,
        read_wait_s * batches,
        read_s * batches,
        read_s * read_cpu * batches,
        decode_cpu_s * batches,
    )
    return Pipelines(done, threads, on_gpu, loaders, batch_size)


def measurement(measured: PhaseTimes, loader: LoaderFacts = TWO_WORKERS, **more: Any) -> Measurement:
    """A measurement; None is what was not measured."""
    return Measurement(measured, loader, **{name: value for name, value in more.items() if value is not None})


def gpu(steps: int = STEPS, *, compute_s: float = 8.0, idle: dict[str, float] | None = None, **more: Any) -> GpuTimes:
    """A GPU that has done these steps; nothing was idle inside of them unless ``compute_bound_s`` allows it."""
    return GpuTimes(steps=steps, compute_s=compute_s, idle=idle or {}, **more)


def data_finding(measured: Measurement) -> Finding:
    """The first finding about the wait for data, with all of the wait."""
    cause, share = next(iter(data_shares(measured, 1.0).items()))
    return finding_of_data(cause, share, measured)
