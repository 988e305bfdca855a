"""A small discrete-event run of a loader and the step that consumes its batches.

As in torch's DataLoader: each worker works through its own queue of batches, given out in turn; ``prefetch_factor``
batches for each worker are under way at most; batches are taken in order. Workers and the training process share the
CPUs: where they want more than there are, whatever computes takes longer by the same factor (processor sharing).

Pure: no clock, and the same answer for the same question.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_BATCHES: Final = 4000
_BEGINNING: Final = 0.2
"""Share of the batches in which the queues fill, and which is not counted."""

_BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A loader and its consumer; seconds per batch, on CPUs that nobody else wants."""

    workers: int  # 0: the training process loads by itself
    prefetch_factor: int  # batches under way for each worker
    service_s: float  # mean time that a worker needs
    cpu_s: float  # CPU time in it, of all of the worker's threads
    receive_s: float  # the training process's time to take a batch from a worker
    receive_cpu_s: float
    consumer_s: float  # the step without its wait for data
    consumer_cpu_s: float
    cpus: float  # CPUs that may be used at once
    shape: tuple[float, ...] = ()  # quantiles of a batch's time over the mean; empty: all are alike


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a pipeline ran."""

    step_s: float  # mean, from one step to the next
    workers_busy: float  # share of the workers' time spent on batches, 0-1; 0 without workers
    cpus_busy: float  # share of the CPUs' time that was used, 0-1


def simulate(pipeline: Pipeline, batches: int = _BATCHES) -> Pace:
    """Run a pipeline for so many batches, of which the first fifth is not counted."""
    if not pipeline.workers:
        return _without_workers(pipeline)
    return _Run(pipeline, _services(pipeline, batches)).pace()


def shape_of(edges_s: Sequence[float], counts: Sequence[int], parts: int = 1000) -> tuple[float, ...]:
    """So many quantiles of a histogram, over its mean; ``edges_s`` has one more than ``counts``.

    Times are spread evenly within a bin. Rare slow batches keep their part of the whole, since what a bin holds beyond
    whole quantiles is carried on.
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


def _services(pipeline: Pipeline, batches: int) -> list[float]:
    """Seconds of each batch: every quantile equally often, in an order that is always the same."""
    shape = pipeline.shape or (1.0,)
    order = [shape[number % len(shape)] * pipeline.service_s for number in range(batches)]
    random.Random(0).shuffle(order)
    return order


def _without_workers(pipeline: Pipeline) -> Pace:
    loading_s = pipeline.service_s * _slowdown(_share(pipeline.cpu_s, pipeline.service_s), 1, 0.0, pipeline.cpus)[0]
    own_share = _share(pipeline.consumer_cpu_s, pipeline.consumer_s)
    step_s = loading_s + pipeline.consumer_s * _slowdown(0.0, 0, own_share, pipeline.cpus)[1]
    used_s = pipeline.cpu_s + pipeline.consumer_cpu_s
    return Pace(step_s, 0.0, min(used_s / (pipeline.cpus * step_s), 1.0) if step_s > 0 else 0.0)


class _Run:
    """One run: two clocks, one of seconds and one of the workers' progress, which is slower where CPUs are short."""

    def __init__(self, pipeline: Pipeline, services: list[float]) -> None:
        self._pipeline = pipeline
        self._services = services
        self._now_s = self._progress_s = self._busy_s = 0.0
        used = min(pipeline.workers, len(services))  # the others never get a batch
        self._pending: list[list[int]] = [[] for _ in range(used)]
        self._working: list[tuple[float, int, int]] = []  # by the progress at which a worker is done: batch, worker
        self._idle = set(range(used))
        self._done = [False] * len(services)
        self._given = 0
        self._slowdowns: dict[tuple[int, float], tuple[float, float]] = {}

    def pace(self) -> Pace:
        pipeline = self._pipeline
        own_share = _share(pipeline.consumer_cpu_s, pipeline.consumer_s)
        receive_share = _share(pipeline.receive_cpu_s, pipeline.receive_s)
        skipped = int(_BEGINNING * len(self._services))
        began_s = busy_s = 0.0
        for _ in range(min(pipeline.workers * pipeline.prefetch_factor, len(self._services))):
            self._give_out()
        for batch in range(len(self._services)):
            if batch == skipped:
                began_s, busy_s = self._now_s, self._busy_s
            while not self._done[batch]:
                self._pass(None, 0.0)
            self._consume(pipeline.receive_s, receive_share)
            self._give_out()
            self._consume(pipeline.consumer_s, own_share)
        counted = len(self._services) - skipped
        wall_s = max(self._now_s - began_s, 1e-12)
        used_s = counted * (pipeline.cpu_s + pipeline.receive_cpu_s + pipeline.consumer_cpu_s)
        return Pace(
            wall_s / counted,
            min((self._busy_s - busy_s) / (pipeline.workers * wall_s), 1.0),
            min(used_s / (pipeline.cpus * wall_s), 1.0),
        )

    def _give_out(self) -> None:
        if self._given == len(self._services):
            return
        worker = self._given % self._pipeline.workers
        self._pending[worker].append(self._given)
        self._given += 1
        if worker in self._idle:
            self._idle.discard(worker)
            self._begin(worker)

    def _begin(self, worker: int) -> None:
        batch = self._pending[worker].pop(0)
        heapq.heappush(self._working, (self._progress_s + self._services[batch], batch, worker))

    def _consume(self, seconds: float, share: float) -> None:
        """The training process is at work for so long, or longer where CPUs are short."""
        left_s = seconds
        while left_s > 0:
            left_s -= self._pass(left_s, share)

    def _pass(self, left_s: float | None, share: float) -> float:
        """Go on to the next event; returns the seconds done of what the training process has left (None: it waits)."""
        of_workers, of_consumer = self._slowdown(len(self._working), share)
        next_s = (self._working[0][0] - self._progress_s) * of_workers if self._working else float("inf")
        step_s = next_s if left_s is None else min(next_s, left_s * of_consumer)
        self._now_s += step_s
        self._busy_s += step_s * len(self._working)
        self._progress_s += step_s / of_workers
        if self._working and step_s == next_s:
            self._progress_s, batch, worker = heapq.heappop(self._working)
            self._done[batch] = True
            if self._pending[worker]:
                self._begin(worker)
            else:
                self._idle.add(worker)
        if left_s is None:
            return 0.0
        return left_s if step_s == left_s * of_consumer else step_s / of_consumer

    def _slowdown(self, working: int, share: float) -> tuple[float, float]:
        known = self._slowdowns.get((working, share))
        if known is None:
            pipeline = self._pipeline
            worker_share = _share(pipeline.cpu_s, pipeline.service_s)
            known = self._slowdowns[working, share] = _slowdown(worker_share, working, share, pipeline.cpus)
        return known


def _share(cpu_s: float, seconds: float) -> float:
    return cpu_s / seconds if seconds > 0 else 0.0


def _slowdown(worker: float, working: int, consumer: float, cpus: float) -> tuple[float, float]:
    """By which factors workers and the training process, which ask for so many CPUs each, take longer than alone.

    All that computes gets the same part ``rate`` of the CPU time that it asks for: the largest with which no more CPUs
    are used than there are. Who is slower asks for less: ``share / (1 - share + share / rate)``.
    """
    if working * worker + consumer <= cpus:
        return 1.0, 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        used = sum(n * s / (1 + s * (1 / rate - 1)) for n, s in ((working, worker), (1, consumer)))
        low, high = (rate, high) if used <= cpus else (low, rate)
    rate = (low + high) / 2
    return 1 + worker * (1 / rate - 1), 1 + consumer * (1 / rate - 1)
