"""What a change of the loader will bring: the throughput model of the loader, fed with what a run measured."""

from __future__ import annotations

import math

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.telemetry.host import HostActivity
from lightning_gpuopt.tuning.model import LEAST_SPREAD, Interval, LoaderModel, receive_cost


def loader_model(measurement: Measurement) -> LoaderModel | None:
    """Read the model off a measurement; None where workers or steps were not measured."""
    times, workers, host = measurement.times, measurement.workers, measurement.host
    if workers is None or not workers.batches or not times.steps or times.step_s is None:
        return None
    wait_s = times.phases["data_wait"] / times.steps
    service_s = workers.busy_s / workers.batches
    cpu_s = min(workers.cpu_s / workers.batches, service_s)
    consumer_cpu_s = 0.0
    cpus = (math.inf, math.inf, math.inf)
    if host is not None:
        cpus = _cpus(host, workers.cpu_s / times.wall_s if measurement.loader.num_workers else 0.0)
        if host.process_cpus is not None:
            own_s = cpu_s if not measurement.loader.num_workers else 0.0
            consumer_cpu_s = max(host.process_cpus * times.wall_s / times.steps - own_s, 0.0)
    return LoaderModel(
        service_s=service_s,
        cpu_s=cpu_s,
        receive_s=receive_cost(workers.batch_bytes or 0.0),
        consumer_s=max(times.step_s - wait_s, 1e-6),
        consumer_cpu_s=consumer_cpu_s,
        cpus=cpus,
        spread=_spread(measurement),
        unevenness=workers.unevenness or 0.0,
    )


def _cpus(host: HostActivity, worker_cpus: float) -> Interval:
    """CPUs that we can count on: at worst what we use now and what is free, at best all that we may use."""
    usable = max(host.usable_cpus, 0.1)
    if host.process_cpus is None or host.free_cpus is None:
        return usable, usable, usable
    sure = min(max(host.process_cpus + worker_cpus + host.free_cpus, 0.1), usable)
    return sure, (sure + usable) / 2, usable


def _spread(measurement: Measurement) -> float:
    workers = measurement.workers
    if workers is None or workers.unevenness is None:
        return LEAST_SPREAD
    # twice the standard error of the mean service time
    return min(max(2 * math.sqrt(workers.unevenness / workers.batches), LEAST_SPREAD), 0.5)


def speedup_of_workers(measurement: Measurement, workers: int) -> Interval | None:
    """Steady steps per second with so many workers, over now: (low, mid, high).

    Args:
        measurement: of the run as it is.
        workers: worker processes, at least 1.
    """
    model, now_s = loader_model(measurement), measurement.times.step_s
    if model is None or now_s is None:
        return None
    best_s, expected_s, worst_s = model.step_s(workers)
    return _ordered(now_s / worst_s, now_s / expected_s, now_s / best_s)


def speedup_without(measurement: Measurement, seconds: float) -> Interval | None:
    """Steady steps per second without these seconds, over now: (low, mid, high).

    Args:
        measurement: of the run as it is.
        seconds: exposed seconds of the stretch that the advice takes away. Taking away half of them is the low end.
    """
    times = measurement.times
    if times.step_s is None or not times.steps:
        return None
    per_step_s = seconds / times.steps
    left_s = max(times.step_s - per_step_s, 1e-6)
    return _ordered(
        times.step_s / (left_s + per_step_s / 2), times.step_s / left_s, (1 + LEAST_SPREAD) * times.step_s / left_s
    )


def headroom(measurement: Measurement) -> float | None:
    """Share of the steady step that is not the step's own work, 0-1: what could be gained at the very most."""
    times = measurement.times
    if times.step_s is None or times.step_s <= 0:
        return None
    waits_s = (times.phases["data_wait"] + times.phases["logging"] + times.step_hooks_s) * measurement.exposed
    waits_s += times.phases["transfer"] if measurement.gpu is None else measurement.copy_s
    return min(waits_s / (times.step_s * times.steps), 1.0)


def _ordered(low: float, mid: float, high: float) -> Interval:
    """A change for the better never predicts a loss, and the middle lies inside."""
    low, mid, high = max(low, 1.0), max(mid, 1.0), max(high, 1.0)
    return min(low, mid), mid, max(high, mid)
