"""A loader without workers: whether worker processes can do for it what the training process does.

With ``num_workers=0`` a dataset may hold what cannot be shared among processes, or not even used in another: an open
file, whose position all would move; a generator, of which each would have its own; tensors on a GPU. So what the loader
holds is gone through first, and then a worker makes a few batches, in an order of ours.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.timeline.worker_clock import TimedCollate, nbytes_of
from lightning_gpuopt.tuning.find import check, workers_can_run
from lightning_gpuopt.tuning.model import receive_cost
from lightning_gpuopt.tuning.probe import OutOfTime, first_batches, own_collate

_BATCHES: Final = 4


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a worker made of a loader.

    Attributes:
        problem: why the loader should go on without workers; None where it need not.
        shuffles: whether reading samples draws from the random state that the loader's sampler is seeded from: without
            workers that decides what the next shuffle is, with workers it does not.
        draws: whether it draws from any random state of the process: without workers that decides what training draws
            afterwards.
    """

    problem: str | None = None
    shuffles: bool = False
    draws: bool = False


def look(loader: DataLoader[Any], *, longest_s: float, iterable: bool = False) -> FirstLook:
    """See whether workers can make a loader's batches, and gain anything by it.

    The loader, its dataset, its sampler and the random states are as before; what was read is in the page cache.

    Args:
        loader: with ``num_workers=0``, not iterated yet.
        iterable: an ``IterableDataset`` will do.
        longest_s: seconds to wait for a batch.
    """
    if not workers_can_run(loader):
        return FirstLook("worker processes cannot share memory here")
    if (held := why_not_shared(loader)) is not None:
        return FirstLook(held)
    timed = TimedCollate(_Looking(own_collate(loader)))
    try:
        batches = first_batches(loader, check(loader, iterable), timed, _BATCHES, longest_s)
    except OutOfTime:
        return FirstLook(f"a worker process gave no batch within {longest_s:g} s")
    except Exception as error:  # such as CUDA in a forked process
        return FirstLook(f"a worker process fails: {_first_line(error)}")
    drawn = {state for _, each in batches for state in each}
    shuffles, times = _shuffles(loader, drawn), timed.times(1)
    taking_s = receive_cost(float(nbytes_of(batches[-1][0])))[1]
    if times.batches and times.busy_s < taking_s * times.batches:
        making_ms = times.busy_s / times.batches * 1e3
        return FirstLook(
            f"a batch is made in {making_ms:.2g} ms, sooner than a worker process can hand it over",
            shuffles,
            bool(drawn),
        )
    return FirstLook(None, shuffles, bool(drawn))


def _shuffles(loader: DataLoader[Any], drawn: set[str]) -> bool:
    """Whether what is drawn from these random states decides in which order the loader's next epoch comes."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.batch_sampler) or loader.sampler
    if isinstance(sampler, (SequentialSampler, DistributedSampler, ElasticSampler)):
        return False
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        return sampler.generator is None and "torch" in drawn
    return bool(drawn)


def why_not_shared(loader: DataLoader[Any]) -> str | None:
    """Why other processes should not have what a loader holds; None where nothing speaks against it.

    What cannot be pickled is more than a matter of starting processes by ``spawn``: files, connections, locks and
    generators are such. Functions and classes are let through, and the contents of arrays and tensors not looked at.
    """
    try:
        _Dry(_Nowhere()).dump((loader.dataset, own_collate(loader), loader.worker_init_fn))
    except RecursionError:  # a long chain of objects is no reason
        return None
    except Exception as error:
        if str(error).startswith("fast mode: can't pickle cyclic objects"):
            return None
        return f"its dataset holds what other processes cannot have: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    # An error from a worker is its traceback as text; the last line says what it was.
    return lines[-1] if lines and lines[0].startswith("Caught ") else f"{type(error).__name__}: {''.join(lines[:1])}"


_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))
"""Each process has its own."""


class _Nowhere:
    """A file that forgets what is written."""

    def write(self, data: Any) -> int:
        return len(data)


class _Dry(pickle.Pickler):
    """Goes through what an object holds."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # else it would remember each of a million paths
        self._functions: list[FunctionType] = []

    def reducer_override(self, held: Any) -> Any:
        if held is bool or held is tuple:
            return NotImplemented
        if isinstance(held, torch.Tensor) and held.is_cuda:
            raise TypeError("cannot share a tensor on a GPU")
        if isinstance(held, FunctionType) and not any(held is each for each in self._functions):
            self._functions.append(held)  # it may hold itself
            return tuple, ([cell.cell_contents for cell in held.__closure__ or ()],)
        if isinstance(held, np.ndarray) and held.dtype.hasobject:
            return NotImplemented
        if isinstance(held, (torch.Tensor, np.ndarray, FunctionType, type, ModuleType, torch.Generator, *_LOCKS)):
            return bool, ()
        if type(held).__module__.startswith("multiprocessing."):  # made to be shared
            return bool, ()
        return NotImplemented


class _Looking:
    """In place of a ``collate_fn``, in a worker: the batch, and from which global random state was drawn for it."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn
        self._states: tuple[torch.Tensor, RandomStates] | None = None

    def __call__(self, samples: Any) -> tuple[Any, set[str]]:
        batch = self._collate_fn(samples)
        before, self._states = self._states, (torch.get_rng_state(), RandomStates())
        if before is None:  # before its first batch a worker is seeded
            return batch, set()
        if not torch.equal(before[0], self._states[0]):
            return batch, {"torch"}
        return batch, {"another"} if before[1] != self._states[1] else set()
