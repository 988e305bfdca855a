"""What a change of the loader will bring: a throughput model of the loader against the step that consumes its batches.

A batch costs its worker a wall time and, in it, a CPU time; workers work side by side; CPUs are shared by the workers
and the training process; and the training process itself needs a moment to receive a batch. The slowest of these sets
the pace. All of it is measured, but the last, which is a constant with a range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.telemetry.host import HostActivity

Interval = tuple[float, float, float]

HEADROOM_LEFT: Final = 0.03
"""Below this share of the step there is nothing left to gain."""

_MOST_WORKERS: Final = 32
_MOST_WORKERS_PER_CPU: Final = 8

_RECEIVE_S: Final[Interval] = (0.0003, 0.0008, 0.002)
"""What it costs the training process to take a batch from a worker: 0.6-1.2 ms were measured on a small machine."""

_COPY_BYTES_PER_S: Final = 2e9
"""A batch passes through shared memory once; touching fresh pages runs at about this rate."""

_STEP_SPREAD: Final = 0.04
"""A step of the same work takes so much more or less from run to run."""

_LEAST_SPREAD: Final = 0.08
"""Workers on a shared machine are never surer than this, to either side."""


@dataclass(frozen=True, slots=True)
class LoaderModel:
    """What a batch costs, and who consumes it. All in seconds per batch.

    Attributes:
        service_s: wall time that a worker needs.
        cpu_s: CPU time in it.
        receive_s: the training process's own cost of taking a batch from a worker: (low, mid, high).
        consumer_s: the step without its wait for data.
        consumer_cpu_s: CPU time of the training process for a step, without loading.
        cpus: CPUs that may be used at once, more where others leave them: (pessimistic, expected, optimistic).
        spread: relative uncertainty of the times, for example 0.1.
    """

    service_s: float
    cpu_s: float
    receive_s: Interval
    consumer_s: float
    consumer_cpu_s: float
    cpus: Interval
    spread: float = _LEAST_SPREAD

    def step_s(self, workers: int) -> Interval:
        """Seconds per step with so many workers: (optimistic, expected, pessimistic)."""
        low, mid, high = (
            max(
                (1 + side * _STEP_SPREAD) * self.consumer_s + receive,
                (1 + side * self.spread) * self.service_s / workers,
                # CPUs that are all in use share caches, memory and often cores: twice as unsure
                (1 + 2 * side * self.spread) * (self.cpu_s + self.consumer_cpu_s) / cpus,
            )
            for side, receive, cpus in zip((-1, 0, 1), self.receive_s, reversed(self.cpus), strict=True)
        )
        return low, mid, high

    def workers_needed(self, most: int | None = None) -> int:
        """The smallest number of workers after which more would gain less than 3 %.

        Args:
            most: not more than so many.
        """
        limit = most if most is not None else most_workers(self.cpus[2])
        best = self.step_s(limit)[1]
        for workers in range(1, limit):
            # a tenth to spare, so that one slow batch does not stall the step
            if max(self.step_s(workers)[1], 1.1 * self.service_s / workers) <= best * (1 + HEADROOM_LEFT):
                return workers
        return limit


def most_workers(cpus: float) -> int:
    """More workers than this are never advised, whatever they wait for."""
    return max(1, int(min(_MOST_WORKERS, _MOST_WORKERS_PER_CPU * cpus)))


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
    copy_s = (workers.batch_bytes or 0.0) / _COPY_BYTES_PER_S
    low, mid, high = _RECEIVE_S
    return LoaderModel(
        service_s=service_s,
        cpu_s=cpu_s,
        receive_s=(low, mid + copy_s, high + 2 * copy_s),
        consumer_s=max(times.step_s - wait_s, 1e-6),
        consumer_cpu_s=consumer_cpu_s,
        cpus=cpus,
        spread=_spread(measurement),
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
        return _LEAST_SPREAD
    # twice the standard error of the mean service time
    return min(max(2 * math.sqrt(workers.unevenness / workers.batches), _LEAST_SPREAD), 0.5)


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
        times.step_s / (left_s + per_step_s / 2), times.step_s / left_s, (1 + _LEAST_SPREAD) * times.step_s / left_s
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
