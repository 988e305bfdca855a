"""Detects on what the samples of workers depend: on random numbers that they draw, or on which worker reads them."""

from __future__ import annotations

import contextlib
import copy
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch.utils.data import get_worker_info

from lightning_gpuopt.compat.fetchers import when_worker_is_asked_for
from lightning_gpuopt.prefetch.randomness import RandomStates, drawn_since_seeded
from lightning_gpuopt.timeline.worker_clock import TimedCollate
from lightning_gpuopt.utils.replaced_method import hide_us

_DRAWN, _ASKED = range(2)
_BATCHES: Final = 50  # batches without a draw after which a worker is no longer checked


class DrawWatch:
    """Detects whether forked workers draw from the global random states of torch, NumPy and Python.

    And whether they ask which of the workers they are.
    """

    def __init__(self) -> None:
        self._flag: mmap.mmap | None = None

    @property
    def seen(self) -> bool:
        return self._flag is not None and self._flag[_DRAWN] != 0

    @property
    def workers_were_asked_for(self) -> bool:
        return self._flag is not None and self._flag[_ASKED] != 0

    def around(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self._flag is None:
            self._flag = mmap.mmap(-1, 2)  # shared with forked workers
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
            if before is None and get_worker_info() is not None:
                with contextlib.suppress(Exception):  # of another torch
                    when_worker_is_asked_for(partial(self._flag.__setitem__, _ASKED, 1))
            if before != self._before if before is not None else drawn_since_seeded() is not None:
                self._flag[_DRAWN] = 1
                self._left = 0
        return batch
