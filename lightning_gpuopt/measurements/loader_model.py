"""A throughput model of the loader against the step that consumes its batches.

A batch costs its worker a wall time and, in it, a CPU time; workers work side by side; CPUs are shared by the workers
and the training process; and the training process itself needs a moment to receive a batch. The slowest of these sets
the pace. All of it is measured, but the last, which where it was not is a constant with a range.

What is advised after a run, what is forecast of one that has not been made, and what is tried in a search for the
number of workers come from here. If the times of batches are known to differ, each waits for its turn as in torch's
DataLoader: a few slow ones hold up the others. No clock, no chance: the same question has the same answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from typing import Final

from lightning_gpuopt.measurements.loader_costs import Interval, LoaderCosts

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
IN_USE: Final = 0.9  # workers, or CPUs, of whose time this share is used are the limit
_MIN_CPUS: Final = 0.1  # that a run gets at worst, where others were measured to use all
_BATCHES: Final = 2000  # batches that are reckoned with where their times differ
_FIRST: Final = 1000  # of those, in which the queues fill
MIN_SPREAD: Final = 0.08  # least relative uncertainty, to either side, of a prediction for workers on a shared machine
MAX_SPREAD: Final = 0.5  # from which on the best case would take no time


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
    edges_s: tuple[float, ...] = ()  # of a histogram of batch times, with ``counts``; empty: all alike
    counts: tuple[int, ...] = ()

    def step_s(self, workers: int, prefetch_factor: int = 2) -> Interval:
        """Seconds per step with so many workers: (optimistic, expected, pessimistic)."""
        low, mid, high = (self.pace(workers, prefetch_factor, side) for side in range(3))
        return low, mid, high

    def pace(self, workers: int, prefetch_factor: int = 2, side: int = 1) -> float:
        """Seconds per step at best (``side`` 0), as expected (1) or at worst (2); 0 workers: without any."""
        sign = side - 1
        service_s, consumer_s = (1 + sign * self.spread) * self.service_s, (1 + sign * STEP_SPREAD) * self.consumer_s
        # fully used CPUs share caches, memory and often cores: twice the uncertainty
        cpu_s = (1 + 2 * sign * self.spread) * (self.cpu_s + self.consumer_cpu_s) / self.cpus[2 - side]
        if not workers:
            return max(service_s + consumer_s, cpu_s)
        even_s = max(consumer_s + self.receive_s[side], service_s / workers)
        return max(even_s * self._order(workers, prefetch_factor), cpu_s)

    def _order(self, workers: int, prefetch_factor: int) -> float:
        """How many times as long as with batches that are all alike a step is expected to take."""
        shape, receive_s = _shape_of(self.edges_s, self.counts), self.receive_s[1]
        even_s = max(self.consumer_s + receive_s, self.service_s / workers)
        if (not shape and prefetch_factor > 1) or not even_s:
            return 1.0
        times = shape or (1.0,)
        return max(_in_order(times, self.service_s, receive_s, self.consumer_s, workers, prefetch_factor) / even_s, 1.0)

    def in_use(self, workers: int, step_s: float) -> tuple[float, float]:
        """Shares of the workers' time and of the CPUs, 0-1, that are used at this pace."""
        busy, cpus = self.service_s / max(workers, 1), (self.cpu_s + self.consumer_cpu_s) / self.cpus[1]
        return min(busy / max(step_s, 1e-12), 1.0), min(cpus / max(step_s, 1e-12), 1.0)

    def explaining(self, measured_s: float, workers: int, prefetch_factor: int = 2) -> LoaderModel:
        """The model with what it does not explain of a measured step counted as the cost of taking a batch.

        Nothing is added without workers, or where they or the CPUs are the limit. The best case stays as it is: that
        time may lie in the workers, and go away with more of them.
        """
        expected_s = self.pace(workers, prefetch_factor)
        if not workers or max(self.in_use(workers, expected_s)) >= IN_USE:
            return self
        low, mid, high = self.receive_s
        mid = max(mid + measured_s - expected_s, low)
        return replace(self, receive_s=(low, mid, max(mid, high)))

    def workers_needed(self, most: int | None = None) -> int:
        """The smallest number of workers, at most ``most``, after which more would gain less than 3 %."""
        limit = most if most is not None else most_workers(self.cpus[2])
        floor_s = max(self.consumer_s + self.receive_s[1], (self.cpu_s + self.consumer_cpu_s) / self.cpus[1])
        enough_s = max(floor_s, self.service_s / limit) * (1 + HEADROOM_LEFT)
        # Some time to spare, so that one slow batch does not stall the step: the more, the slower it may be.
        service_s = (1 + _SPARE + _SPARE_FOR_UNEVEN * min(self.unevenness, 1.0)) * self.service_s
        return next((workers for workers in range(1, limit) if service_s / workers <= enough_s), limit)


def model_from(costs: LoaderCosts, cpus: float | None = None) -> LoaderModel:
    """The model of what a run's loader costs; ``cpus``: that it may use, in place of those that it might."""
    return LoaderModel(
        service_s=costs.batch_s,
        cpu_s=costs.worker_cpu_s,
        consumer_s=costs.consumer_s,
        consumer_cpu_s=costs.consumer_cpu_s or 0.0,
        cpus=_cpus(costs, cpus),
        receive_s=costs.receive_s,
        spread=min(costs.spread, MAX_SPREAD),
        edges_s=costs.edges_s,
        counts=costs.counts,
    )


def _cpus(costs: LoaderCosts, cpus: float | None) -> Interval:
    """CPUs that the run gets; fewer than now are first taken from other processes, additional ones count as free."""
    usable, free = costs.usable_cpus, costs.free_cpus
    if usable is None or free is None:
        most = cpus if cpus is not None else math.inf
        return most, most, most
    most = cpus if cpus is not None else usable
    return cpus_between(free + max(most - usable, 0.0), most)


def cpus_between(least: float, most: float) -> Interval:
    """CPUs to count on; expected is the worst case, but at least half of all: a scheduler gives to those who ask."""
    least = min(most, max(least, _MIN_CPUS))
    return least, max(least, most / 2), most


@lru_cache(maxsize=16)  # findings of one diagnosis ask the same
def _in_order(
    shape: tuple[float, ...], service_s: float, receive_s: float, consumer_s: float, workers: int, prefetch_factor: int
) -> float:
    """Seconds a step where workers get batches in turn, ``prefetch_factor`` each at most, and each waits its turn."""
    workers = min(workers, _BATCHES)  # others never get a batch
    received_s = [0.0] * min(workers * prefetch_factor, _BATCHES)  # of the batches before those that are asked for
    free_s, now_s, began_s = [0.0] * workers, 0.0, 0.0
    for batch, relative in zip(range(_BATCHES), cycle(shape), strict=False):
        if batch == _FIRST:
            began_s = now_s
        worker = batch % workers
        asked_s, done_s = received_s[batch], free_s[worker]
        done_s = free_s[worker] = (asked_s if asked_s > done_s else done_s) + relative * service_s
        now_s = (done_s if done_s > now_s else now_s) + receive_s
        received_s.append(now_s)
        now_s += consumer_s
    return (now_s - began_s) / (_BATCHES - _FIRST)


@lru_cache(maxsize=8)
def _shape_of(edges_s: tuple[float, ...], counts: tuple[int, ...], parts: int = 1000) -> tuple[float, ...]:
    """Times relative to their mean, distributed as a histogram is: so many quantiles of it, in one order of many.

    Within a bin, times are spread evenly. Rare slow batches keep their part of the whole: what a bin holds beyond whole
    quantiles is carried on.
    """
    total = sum(counts)
    times: list[float] = []
    below, number = 0, 0
    for low, high, count in zip(edges_s, edges_s[1:], counts, strict=False):
        while number < parts and (number + 0.5) * total / parts < below + count:
            times.append(low + (high - low) * ((number + 0.5) * total / parts - below) / count)
            number += 1
        below += count
    mean = sum(times) / max(len(times), 1)
    random.Random(0).shuffle(times)
    return tuple(each / mean for each in times) if mean > 0 else ()


def next_workers(model: LoaderModel, now: int, most: int) -> int:
    """The number of workers to have next where a consumer waits: the one rule for advice after and trials in a run."""
    needed = model.workers_needed(most)
    return needed if needed > now else min(now + max(now // 2, 1), most)  # uneven batches: more of them ahead


def most_workers(cpus: float) -> int:
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
    """What it costs the training process to take a batch of so many bytes from a worker, if it was not measured."""
    low, mid, high = _RECEIVE_S
    copy_s = batch_bytes / _COPY_BYTES_PER_S
    return low, mid + copy_s, high + 2 * copy_s


def taking(ready_s: Sequence[float]) -> float:
    """Seconds that taking a batch costs: the end of the quickest quarter, since one out of turn may be finished."""
    return sorted(ready_s)[len(ready_s) // 4]


def prefetch_needed(mean_s: float, unevenness: float, consumer_s: float, workers: int, now: int) -> int:
    """Batches that each worker should prepare ahead to bridge a slow one: at least twice ``now``.

    ``unevenness`` is the variance of a worker's time over its squared mean, ``consumer_s`` the step without its wait.
    """
    consumer_s = max(consumer_s, mean_s / workers, 1e-6)
    slow_s = mean_s * (1 + 3 * math.sqrt(unevenness))
    # What piles up behind the slow ones in a queue that is used so far: Kingman's formula, even arrivals. That is a
    # mean, and the consumer takes batches in order: it waits for the worker that is the furthest behind.
    used = min(mean_s / workers / consumer_s, _MAX_USED)
    late_s = used / (1 - used) * unevenness / 2 * mean_s
    factor = math.ceil((slow_s + 6 * late_s) / consumer_s / workers) + 1
    return min(max(factor, 2 * now), _MAX_PREFETCH)
