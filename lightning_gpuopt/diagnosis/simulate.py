"""How fast a loader and the step that consumes its batches run, batch by batch.

As in torch's DataLoader: batches are given out to the workers in turn, and taken in order; ``prefetch_factor`` batches
for each worker are under way at most. No faster than the CPUs allow. The same question has the same answer: no clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_BATCHES: Final = 4000
_BEGINNING: Final = 0.2  # share of the batches in which the queues fill, and which is not counted


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A loader and its consumer. Seconds per batch, on CPUs that nobody else wants."""

    workers: int  # worker processes; 0: the training process loads by itself
    prefetch_factor: int
    service_s: float  # mean time that a worker needs
    cpu_s: float  # CPU time in it, of all of the worker's threads
    receive_s: float  # the training process's time to take a batch from a worker
    receive_cpu_s: float
    consumer_s: float  # the step without its wait for data
    consumer_cpu_s: float
    cpus: float  # that may be used at once
    shape: tuple[float, ...] = ()  # times of batches relative to their mean, as distributed; empty: all alike


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a pipeline runs; shares of time are 0-1."""

    step_s: float  # mean seconds from one step to the next
    workers_busy: float  # of the workers' time; 0 without workers
    cpus_busy: float


def simulate(pipeline: Pipeline, batches: int = _BATCHES) -> Pace:
    """Run so many batches, the first fifth of which is not counted."""
    own_cpu_s = pipeline.cpu_s + pipeline.consumer_cpu_s
    if not pipeline.workers:
        loading_s = max(pipeline.service_s, pipeline.cpu_s / pipeline.cpus)
        step_s = loading_s + max(pipeline.consumer_s, pipeline.consumer_cpu_s / pipeline.cpus)
        return Pace(step_s, 0.0, min(own_cpu_s / max(pipeline.cpus * step_s, 1e-12), 1.0))
    cpu_s = own_cpu_s + pipeline.receive_cpu_s
    in_order_s, of_cpus_s = max(_in_order(pipeline, batches), 1e-12), cpu_s / pipeline.cpus
    if of_cpus_s > in_order_s:  # the workers share what there is, and are never done
        return Pace(of_cpus_s, 1.0, 1.0)
    busy = pipeline.service_s / (pipeline.workers * in_order_s)
    return Pace(in_order_s, min(busy, 1.0), of_cpus_s / in_order_s)


def _in_order(pipeline: Pipeline, batches: int) -> float:
    """Seconds a step where each batch waits for its worker, and its turn."""
    ahead = min(pipeline.workers * pipeline.prefetch_factor, batches)
    free_s = [0.0] * min(pipeline.workers, batches)  # the others never get a batch
    received_s: list[float] = []
    now_s, began_s, skipped = 0.0, 0.0, int(_BEGINNING * batches)
    for batch, service_s in enumerate(_services(pipeline, batches)):
        if batch == skipped:
            began_s = now_s
        worker = batch % len(free_s)
        asked_s = received_s[batch - ahead] if batch >= ahead else 0.0
        free_s[worker] = max(free_s[worker], asked_s) + service_s
        received_s.append(max(now_s, free_s[worker]) + pipeline.receive_s)
        now_s = received_s[-1] + pipeline.consumer_s
    return (now_s - began_s) / (batches - skipped)


def _services(pipeline: Pipeline, batches: int) -> list[float]:
    """Seconds of each batch: every quantile equally often, in an order that is always the same."""
    shape = pipeline.shape or (1.0,)
    order = [shape[number % len(shape)] * pipeline.service_s for number in range(batches)]
    random.Random(0).shuffle(order)
    return order


def shape_of(edges_s: Sequence[float], counts: Sequence[int], parts: int = 1000) -> tuple[float, ...]:
    """Times relative to their mean, distributed as a histogram is: so many quantiles of it.

    ``edges_s`` are the lower edges of its bins, and the upper edge of the last; within one, times are spread evenly.
    Rare slow batches keep their part of the whole: what a bin holds beyond whole quantiles is carried on.
    """
    total = sum(counts)
    if not total:
        return ()
    times: list[float] = []
    below, number = 0, 0
    for low, high, count in zip(edges_s, edges_s[1:], counts, strict=False):
        while number < parts and (number + 0.5) * total / parts < below + count:
            times.append(low + (high - low) * ((number + 0.5) * total / parts - below) / count)
            number += 1
        below += count
    mean = sum(times) / len(times)
    return tuple(each / mean for each in times) if mean > 0 else ()
