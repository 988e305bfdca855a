"""Detects whether workers draw random numbers; if so, the samples depend on the number of workers."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from typing import Any, Final

from lightning_gpuopt.prefetch.randomness import RandomStates, drawn_since_seeded
from lightning_gpuopt.timeline.worker_clock import TimedCollate
from lightning_gpuopt.utils.replaced_method import hide_us

_BATCHES: Final = 50  # batches without a draw after which a worker is no longer checked


class DrawWatch:
    """Detects whether forked workers draw from the global random states of torch, NumPy and Python."""

    def __init__(self) -> None:
        self._flag: mmap.mmap | None = None

    @property
    def seen(self) -> bool:
        return self._flag is not None and self._flag[0] != 0

    def around(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self._flag is None:
            self._flag = mmap.mmap(-1, 1)  # shared with forked workers
        if not isinstance(collate_fn, TimedCollate):
            return _Looks(collate_fn, self._flag)
        timed = copy.copy(collate_fn)  # which is to stay what the worker's fetcher calls
        vars(timed).update(vars(collate_fn), collate_fn=_Looks(collate_fn.collate_fn, self._flag))
        return timed


class _Looks:
    def __init__(self, collate_fn: Callable[[Any], Any], flag: mmap.mmap) -> None:
        self._collate_fn = collate_fn
        self._flag = flag
        self._left = _BATCHES
        self._before: RandomStates | None = None

    def __call__(self, samples: Any) -> Any:
        try:
            batch = self._collate_fn(samples)
        except BaseException as error:
            hide_us(error)
            raise
        if self._left:
            self._left -= 1
            before, self._before = self._before, RandomStates()
            if before != self._before if before is not None else drawn_since_seeded() is not None:
                self._flag[0] = 1
                self._left = 0
        return batch
