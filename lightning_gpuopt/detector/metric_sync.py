"""Times how long a step waits for the reduction of metrics over ranks: ``self.log(..., sync_dist=True)``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Final

from typing_extensions import override

from lightning_gpuopt.measurements.phases import STEP_HOOKS
from lightning_gpuopt.measurements.ranks import MetricSync
from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.utils.replaced_method import Replacement

_IN_STEP: Final = frozenset(("forward", "backward", "optimizer"))


class TimedReduce(Replacement):
    """A strategy's ``reduce`` whose time inside a step is logging; equal to the method that it replaces.

    Lightning keeps it with a metric from one ``self.log``, and one ``fit``, to the next, and expects the same function
    each time.
    """

    def __init__(self, reduce: Callable[..., Any], timeline: Timeline) -> None:
        super().__init__(reduce)
        self._timed = timeline.timed(reduce, "logging")
        self._timeline = timeline
        self._calls = 0
        self._ns = 0
        update_wrapper(self, reduce)

    @property
    def times(self) -> MetricSync:
        return MetricSync(self._calls, self._ns / 1e9)

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        activity = self._timeline.activity or ""
        in_step = activity in _IN_STEP or activity.rpartition(".")[2] in STEP_HOOKS
        if self._timeline.thread != threading.get_ident() or not in_step:
            return self._original(*args, **kwargs)  # of an epoch, a validation, or a decision to stop
        begun_ns = time.perf_counter_ns()
        try:
            return self._timed(*args, **kwargs)
        finally:
            self._calls += 1
            self._ns += time.perf_counter_ns() - begun_ns

    def __eq__(self, other: object) -> bool:
        return self._original == (other._original if isinstance(other, TimedReduce) else other)

    def __hash__(self) -> int:
        return hash(self._original)
