"""Runs one trial: a copy of the user's loader with a given number of workers and a consumer of a given pace."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psutil
import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import lies_ready, shut_down, wait_at_most, worker_pids, workers_of
from lightning_gpuopt.measurements.loader_model import receive_cost, taking
from lightning_gpuopt.telemetry.resources import worker_memory
from lightning_gpuopt.timeline.worker_clock import TimedCollate, WorkerClock
from lightning_gpuopt.tuning.main_script import check_guard
from lightning_gpuopt.tuning.search_result import Measured, Trial
from lightning_gpuopt.tuning.sharing import forks, own_collate
from lightning_gpuopt.tuning.worker_limits import files_of
from lightning_gpuopt.utils.interrupts import interrupt_held

_MIN_S: Final = 0.5
_MIN_BATCHES: Final = 8
_MIN_ROUNDS: Final = 2
_MAX_S: Final = 1.2  # seconds after which a trial ends with what it has measured: batches differ much, or are slow
_EVEN_ENOUGH: Final = 0.04  # relative standard error of a batch's mean time
_HARDLY_BUSY: Final = 0.5  # share of busy time below which workers are no bottleneck, and need no precise times
_MAX_PAUSE_S: Final = 0.25
_MORE_S: Final = 2.0
_GRACE_S: Final = 2.0
_MIN_GRACE_S: Final = 0.2  # seconds in which a healthy worker ends, beside the batch that it is making
_TIMED_OUT: Final = "DataLoader timed out after"


class OutOfTime(Exception):
    """The deadline passed before anything could be measured."""


def run_trial(
    loader: DataLoader[Any],
    sampling: dict[str, Any],
    num_workers: int,
    *,
    prefetch_factor: int,
    step_time_s: float,
    deadline_s: float,
) -> Measured:
    """Measure this many workers and end them; OutOfTime: nothing came by ``deadline_s`` (``perf_counter``)."""
    clock = WorkerClock()
    began_s, iterator = time.perf_counter(), None
    try:
        with interrupt_held():
            timed = TimedCollate(own_collate(loader), clock)
            iterator = _start(loader, sampling, num_workers, prefetch_factor, timed, deadline_s - began_s)
        return _TrialReading(iterator, clock, num_workers, step_time_s, deadline_s).run(began_s)
    finally:
        _stop(iterator, max(min(deadline_s - time.perf_counter(), _GRACE_S), _MIN_GRACE_S))


def first_batches(
    loader: DataLoader[Any], sampling: dict[str, Any], collate_fn: Callable[[Any], Any], most: int, seconds: float
) -> list[Any]:
    """At most this many batches from one worker, fewer two seconds after the first; the worker is shut down.

    Raises OutOfTime if the first takes longer than ``seconds``, and whatever the dataset raises.
    """
    iterator, batches = None, list[Any]()
    try:
        with interrupt_held():
            iterator = _start(loader, sampling, 1, 2, collate_fn, seconds)
        for batch in iterator:
            if not batches:
                deadline_s = time.perf_counter() + _MORE_S
            batches.append(batch)
            left_s = deadline_s - time.perf_counter()
            if len(batches) == most or left_s <= 0:
                break
            wait_at_most(iterator, left_s)
    except RuntimeError as error:
        if not str(error).startswith(_TIMED_OUT):
            raise
    finally:
        _stop(iterator, _MIN_GRACE_S)
    if not batches:
        raise OutOfTime
    return batches


def _start(
    loader: DataLoader[Any],
    sampling: dict[str, Any],
    num_workers: int,
    prefetch_factor: int,
    collate: Callable[[Any], Any],
    seconds: float,
) -> Any:
    """An iterator of a copy of the loader, with our own order of samples, number of workers and random state.

    ValueError if part of it cannot be sent to a worker process, or that would run a script without a guard.
    """
    method = forks(loader)
    if method is not None:
        check_guard(method)
    more: dict[str, Any] = {} if getattr(loader, "in_order", True) else {"in_order": False}
    kind = type(loader) if getattr(type(loader), "iterates_as_torch", False) else DataLoader
    with warnings.catch_warnings():
        # of more workers than CPUs, which a trial starts on purpose
        warnings.filterwarnings("ignore", message="This DataLoader will create|Got pickle error")
        twin = kind(
            loader.dataset,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
            timeout=max(min(loader.timeout or seconds, seconds), 1e-3),
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),  # the seed of the workers is drawn from here, not from the global state
            prefetch_factor=prefetch_factor,
            **sampling,
            **more,
        )
        twin.is_trial = True
        try:
            return iter(twin)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if method is None:
                raise
            raise ValueError(
                f"dataloader: expected a dataset, collate_fn and worker_init_fn that can be pickled, as worker "
                f"processes started by {method!r} need it, got {type(loader.dataset).__name__}: {error}; define its "
                "parts at the top level of a module, or open files and connections in the workers"
            ) from error


def _stop(iterator: Any, grace_s: float) -> None:
    """End the workers; stuck ones are killed after a grace period: torch would wait 5 s for each of them.

    Now, not when the iterator's last reference goes: an exception's traceback may hold one.
    """
    workers = workers_of(iterator)

    def by_force() -> None:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()

    timer = threading.Timer(grace_s, by_force)
    timer.daemon = True
    timer.start()
    try:
        shut_down(iterator)
    except BaseException:  # a second Ctrl-C: do not wait
        by_force()
        raise
    finally:
        timer.cancel()
        timer.join()


@dataclass
class _TrialReading:
    iterator: Any
    clock: WorkerClock
    workers: int
    step_s: float
    deadline_s: float
    waits_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    files: int = 0

    def run(self, began_s: float) -> Measured:
        """Read batches until the figures are precise enough, or until the deadline."""
        now = time.perf_counter
        while len(self.ends_s) < self.workers and self._fetch():
            pass  # a worker's first batch contains one-time work
        if not self.ends_s:
            raise OutOfTime
        startup_s = now() - began_s
        times_before, cpu_before, own_before = self.clock.times(self.workers), self._cpu_s(), time.process_time()
        start_s = now()
        while len(self.ends_s) >= self.workers and self._round() and not self._enough(now() - start_s):
            pass
        own_cpu_s, worker_cpu_s = time.process_time() - own_before, self._cpu_s() - cpu_before
        times = self.clock.times(self.workers) - times_before
        waits_s, ends_s = self.waits_s[self.workers :], self.ends_s[self.workers :]
        if waits_s:
            # Workers that were started together deliver in bursts: only whole rounds, if any, say how fast they are.
            whole = len(waits_s) // self.workers * self.workers or len(waits_s)
            waits_s, elapsed_s = waits_s[:whole], ends_s[whole - 1] - start_s
        else:  # nothing came after the first round: that one has to do
            waits_s, elapsed_s = self.waits_s, now() - began_s
        rate, wait_s = len(waits_s) / max(elapsed_s, 1e-9), sum(waits_s) / len(waits_s)
        seen = max(len(self.waits_s) - self.workers, 1)
        service_s = times.busy_s / times.batches if times.batches else self.workers / rate
        memory = [size for pid in worker_pids([self.iterator]) if (size := worker_memory(pid)) is not None]
        return Measured(
            Trial(self.workers, rate, wait_s),
            service_s=service_s,
            cpu_s=max(worker_cpu_s / seen, times.cpu_s / times.batches if times.batches else 0.0),
            consumer_s=max(1 / rate - wait_s, 0.0) + self._receive_s(service_s),
            consumer_cpu_s=own_cpu_s / seen,
            unevenness=times.unevenness or 0.0,
            batch_bytes=self.clock.times(self.workers).batch_bytes,
            batch_tensors=self.files,
            worker_bytes=max(memory, default=None),
            startup_s=startup_s,
            startup_cpu_s=cpu_before / self.workers,
        )

    def _round(self) -> bool:
        """Consume one batch of each worker; False if there are no more."""
        for _ in range(self.workers):
            if self.step_s:
                time.sleep(max(min(self.step_s, self.deadline_s - time.perf_counter()), 0.0))
            if not self._fetch():
                return False
        return True

    def _fetch(self) -> bool:
        """Take a batch; False when there is none: the deadline has come, or the data has ended."""
        before_s = time.perf_counter()
        left_s = self.deadline_s - before_s
        if left_s <= 0:
            return False
        with contextlib.suppress(AttributeError):
            wait_at_most(self.iterator, left_s)
        ready = lies_ready(self.iterator)
        try:
            batch = next(self.iterator)
        except StopIteration:
            return False
        except RuntimeError as error:
            if str(error).startswith(_TIMED_OUT) and self.deadline_s - time.perf_counter() <= 0.01:
                return False
            raise
        after_s = time.perf_counter()
        if not self.ends_s:
            self.files = files_of(batch)
        self.ends_s.append(after_s)
        self.waits_s.append(after_s - before_s)
        if ready:
            self.ready_s.append(after_s - before_s)
        return True

    def _cpu_s(self) -> float:
        """CPU seconds of the workers, all their threads: pickling is done on one of its own."""
        total = 0.0
        for pid in worker_pids([self.iterator]):
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total

    def _enough(self, elapsed_s: float) -> bool:
        batches = len(self.waits_s) - self.workers
        if elapsed_s >= _MAX_S:
            return True
        if elapsed_s < _MIN_S or batches < max(_MIN_BATCHES, _MIN_ROUNDS * self.workers):
            return False
        times = self.clock.times(self.workers)
        hardly_busy = times.busy_s < _HARDLY_BUSY * self.workers * elapsed_s
        return hardly_busy or (times.unevenness or 0.0) <= times.batches * _EVEN_ENOUGH**2

    def _receive_s(self, service_s: float) -> float:
        """Cost of taking a finished batch: of most batches, or of two after a pause."""
        if len(self.ready_s) >= max(len(self.waits_s) / 2, _MIN_BATCHES):
            return taking(self.ready_s)
        quickest_s, pause_s = min(self.waits_s), 2.5 * service_s
        if pause_s > _MAX_PAUSE_S or self.deadline_s - time.perf_counter() < 2 * pause_s:
            # not worth the time: beside a batch that takes this long, it is little
            return min(quickest_s, receive_cost(self.clock.times(self.workers).batch_bytes or 0.0)[1])
        time.sleep(pause_s)
        before = len(self.waits_s)
        if not (self._fetch() and self._fetch()):
            return quickest_s
        return min(min(self.waits_s[before:]), 2 * quickest_s)
