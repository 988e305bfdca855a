"""A throughput model of the loader against the step that consumes its batches.

A batch costs its worker a wall time and, in it, a CPU time; workers work side by side; CPUs are shared by the workers
and the training process; and the training process itself needs a moment to receive a batch. The slowest of these sets
the pace. All of it is measured, but the last, which where it was not is a constant with a range.

What is advised after a run and what is tried in a search for the number of workers both come from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.measurements.loader_costs import Interval

HEADROOM_LEFT: Final = 0.03  # share of the step below which waiting does not count
_MAX_PREFETCH: Final = 16
_MAX_USED: Final = 0.9  # highest planned utilization of the workers
_MAX_WORKERS: Final = 32
_MAX_WORKERS_PER_CPU: Final = 8

# spare share of the workers' time for even batches; uneven ones need more, as a queue builds up behind slow ones
_SPARE: Final = 0.1
_SPARE_FOR_UNEVEN: Final = 0.5
# what it costs the training process to take a batch from a worker: 0.6-1.2 ms were measured on a small machine
_RECEIVE_S: Final[Interval] = (0.0003, 0.0008, 0.002)
# a batch passes through shared memory once; touching fresh pages runs at about this rate
_COPY_BYTES_PER_S: Final = 2e9
STEP_SPREAD: Final = 0.04  # relative difference of the step time between runs of the same work
MIN_SPREAD: Final = 0.08  # least relative uncertainty, to either side, of a prediction for workers on a shared machine


@dataclass(frozen=True, slots=True)
class LoaderModel:
    """What a batch costs, and who consumes it; in seconds per batch."""

    service_s: float  # wall time that a worker needs
    cpu_s: float  # CPU time in it
    consumer_s: float  # the step without its wait for data
    consumer_cpu_s: float  # CPU time of the training process for a step, without loading
    cpus: Interval  # usable at once, more where others leave them: (pessimistic, expected, optimistic)
    # own cost of taking a batch from a worker: (low, mid, high); 0: it is in the consumer's time
    receive_s: Interval = (0.0, 0.0, 0.0)
    spread: float = MIN_SPREAD  # relative uncertainty of the times, for example 0.1
    unevenness: float = 0.0  # variance of a worker's time over the square of its mean

    def step_s(self, workers: int) -> Interval:
        """Seconds per step with so many workers: (optimistic, expected, pessimistic)."""
        low, mid, high = (
            max(
                (1 + side * STEP_SPREAD) * self.consumer_s + receive,
                (1 + side * self.spread) * self.service_s / workers,
                # fully used CPUs share caches, memory and often cores: twice the uncertainty
                (1 + 2 * side * self.spread) * (self.cpu_s + self.consumer_cpu_s) / cpus,
            )
            for side, receive, cpus in zip((-1, 0, 1), self.receive_s, reversed(self.cpus), strict=True)
        )
        return low, mid, high

    def workers_needed(self, most: int | None = None) -> int:
        """The smallest number of workers, at most ``most``, after which more would gain less than 3 %."""
        limit = most if most is not None else most_workers(self.cpus[2])
        best = self.step_s(limit)[1]
        # Some time to spare, so that one slow batch does not stall the step: the more, the slower it may be.
        service_s = (1 + _SPARE + _SPARE_FOR_UNEVEN * min(self.unevenness, 1.0)) * self.service_s
        for workers in range(1, limit):
            if max(self.step_s(workers)[1], service_s / workers) <= best * (1 + HEADROOM_LEFT):
                return workers
        return limit


def next_workers(model: LoaderModel, now: int, most: int) -> int:
    """The number of workers to have next where a consumer waits: the one rule for advice after and trials in a run."""
    needed = model.workers_needed(most)
    return needed if needed > now else min(now + max(now // 2, 1), most)  # uneven batches: more of them ahead


def most_workers(cpus: float) -> int:
    """Most workers that are ever advised."""
    return max(1, int(min(_MAX_WORKERS, _MAX_WORKERS_PER_CPU * cpus)))


def net_saving(
    workers: int, now: int, *, step_s: float, steps: int, set_up_s: float, cpus: float, speedup: float = math.inf
) -> float:
    """Seconds that more workers save, less those that starting them takes where they are not forked.

    They start side by side, as far as there are CPUs. ``step_s`` are seconds of a step that become fewer with more
    workers, ``set_up_s`` those in which the ``now`` running ones (at least 1) were started; ``speedup`` is the most
    that more workers can bring, as steps per second over now.
    """
    starting_s = set_up_s / max(now / cpus, 1.0) * max(workers / cpus, 1.0)
    return steps * step_s * (1 - 1 / min(workers / now, speedup)) - starting_s


def receive_cost(batch_bytes: float) -> Interval:
    """What it costs the training process to take a batch of so many bytes from a worker, where it was not measured."""
    low, mid, high = _RECEIVE_S
    copy_s = batch_bytes / _COPY_BYTES_PER_S
    return low, mid + copy_s, high + 2 * copy_s


def taking(ready_s: Sequence[float]) -> float:
    """Seconds that taking a batch costs the training process: the end of the quickest quarter of those that lay ready.

    A batch in the queue may be another than the one whose turn it is.
    """
    return sorted(ready_s)[len(ready_s) // 4]


def prefetch_needed(mean_s: float, unevenness: float, consumer_s: float, workers: int, now: int) -> int:
    """Batches that each worker should prepare ahead to bridge a slow one: at least twice ``now``.

    ``unevenness`` is the variance of a worker's time over the square of its mean, ``consumer_s`` the step without its
    wait for data.
    """
    consumer_s = max(consumer_s, mean_s / workers, 1e-6)
    slow_s = mean_s * (1 + 3 * math.sqrt(unevenness))
    # What piles up behind the slow ones in a queue that is used so far: Kingman's formula, even arrivals. That is a
    # mean, and the consumer takes batches in order: it waits for the worker that is the furthest behind.
    used = min(mean_s / workers / consumer_s, _MAX_USED)
    late_s = used / (1 - used) * unevenness / 2 * mean_s
    factor = math.ceil((slow_s + 6 * late_s) / consumer_s / workers) + 1
    return min(max(factor, 2 * now), _MAX_PREFETCH)
