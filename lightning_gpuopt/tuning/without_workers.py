"""Checks whether worker processes can replace the training process for a loader without workers.

Its dataset may hold what processes cannot share, such as a generator or an open file, or keep what it has read. So the
loader's contents are inspected first, and then a worker makes a few batches in a separate order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.measurements.loader_model import receive_cost
from lightning_gpuopt.objects.contents import restore_generator, state_of_generator
from lightning_gpuopt.objects.dataset_state import DatasetState
from lightning_gpuopt.prefetch.randomness import RandomStates, drawn_since_seeded
from lightning_gpuopt.timeline.worker_clock import nbytes_of
from lightning_gpuopt.tuning.find import workers_can_run
from lightning_gpuopt.tuning.sharing import forks, held_by, own_collate, state_of, why_not_shared
from lightning_gpuopt.tuning.trial import OutOfTime, first_batches
from lightning_gpuopt.tuning.trial_samples import own_sampling

_MAX_LOOK_S: Final = 30.0  # seconds without a batch after which a worker may be stuck for ever
_BATCHES: Final = 5
_AGAIN: Final = (2, 3)  # the batches that are the second again: what was kept of that is read faster
_TRIES: Final = 3  # workers that are started to read a few samples, if one of these raises
_KEPT: Final = 1.5  # a batch that is read so many times as fast when it is read again was kept


@dataclass(frozen=True, slots=True)
class WorkersCheck:
    """The result of a worker's check of a loader."""

    problem: str | None = None  # why the loader should go on without workers
    shuffles: bool = False  # reading draws from what the sampler is seeded from, and so decides on the next shuffle
    draws: bool = False  # reading samples draws from a random state of the process
    making_s: float | None = None  # seconds that a batch takes to be made


def check_workers(
    loader: DataLoader[Any], *, longest_s: float = _MAX_LOOK_S, iterable: bool = False, exact: bool = False
) -> WorkersCheck:
    """Check whether workers can make the batches of a loader that was not iterated yet, and whether that gains time.

    The loader and the random states stay unchanged; samples that were read are in the page cache. A batch is waited for
    at most half a minute. ``exact``: random numbers drawn by the worker are a problem.
    """
    if (method := forks(loader)) is not None:
        return WorkersCheck(
            f"its workers would be started by {method!r}, which runs the program's script again: set num_workers in "
            "the DataLoader"
        )
    if not workers_can_run(loader):
        return WorkersCheck("worker processes cannot share memory here")
    if (held := why_not_shared(loader, held_by(loader), workers=0)) is not None:
        return WorkersCheck(held)
    longest_s = min(longest_s, _MAX_LOOK_S)
    try:
        batches = _read(loader, longest_s, iterable=iterable)
    except OutOfTime:
        return WorkersCheck(f"a worker process gave no batch within {longest_s:g} s")
    except Exception as error:  # such as CUDA in a forked process
        return WorkersCheck(f"a worker process fails: {_first_line(error)}")
    return _judged(loader, batches, exact=exact)


def why_not_other_workers(loader: DataLoader[Any], *, exact: bool) -> str | None:
    """Why another number of workers would change a loader's samples, as observed in a worker.

    ``exact``: its workers must provably draw nothing: whole batches are read, else single samples.
    """
    if not exact:
        return None if isinstance(loader.dataset, IterableDataset) else _why_not_read_by_others(loader, exact=False)
    if isinstance(loader.dataset, IterableDataset):
        reason: str | None = "the samples of an IterableDataset depend on its workers"
    elif (method := forks(loader)) is not None:
        reason = f"its workers are started by {method!r}: their random draws cannot be inspected"
    elif (generator := next((each for each in held_by(loader) if each.kind == "generator"), None)) is not None:
        reason = f"its dataset holds a random generator, {generator}"
    else:
        reason = _why_not_read_by_others(loader, exact=True)
    return None if reason is None else f"{reason} (exact=True)"


def _why_not_read_by_others(loader: DataLoader[Any], *, exact: bool) -> str | None:
    seen: list[_Seen] = []
    failed = ""
    for _ in range(_TRIES):
        try:
            seen = [each for _, each in _read(loader, _MAX_LOOK_S, most=None if exact else 1)]
            break
        except OutOfTime:
            return f"a worker process gave no batch within {_MAX_LOOK_S:g} s, so reading could not be checked"
        except Exception as error:  # such as one corrupt sample; the next try reads others
            failed = _first_line(error)
    if not seen:  # without exact=True no reason: such as samples that are not numbered
        return f"a worker process fails, so reading could not be checked: {failed}" if exact else None
    if len(seen) > _AGAIN[0] and seen[_AGAIN[0]].change is not None:
        return "its dataset changes as it is read: a sample depends on what its worker has read before"
    return "its workers draw random numbers" if exact and any(each.drawn or each.holds for each in seen) else None


def _read(
    loader: DataLoader[Any], longest_s: float, *, iterable: bool = False, most: int | None = None
) -> list[tuple[Any, _Seen]]:
    """A few batches of at most this many samples, with the observations on each; the second comes three times."""
    sampling = own_sampling(loader, iterable)
    name = next((each for each in ("batch_sampler", "sampler") if each in sampling), None)
    numbers: list[int] = []
    if name is not None:  # no IterableDataset
        if most is not None and isinstance(sampling[name], BatchSampler):
            sampling[name].batch_size = min(sampling[name].batch_size, most)
        first, second, *others = islice(sampling[name], _BATCHES - len(_AGAIN))
        numbers = [each for each in (second if isinstance(second, list) else [second]) if isinstance(each, int)]
        sampling[name] = [first, second, *[second] * len(_AGAIN), *others]
    looking = _CheckingCollate(own_collate(loader), loader, numbers)
    return first_batches(loader, sampling, looking, _BATCHES, longest_s)


def _judged(loader: DataLoader[Any], batches: Sequence[tuple[Any, _Seen]], *, exact: bool) -> WorkersCheck:
    drawn = {seen.drawn for _, seen in batches if seen.drawn is not None}
    shuffles = _shuffles(loader, drawn)
    read_s = [seen.read_s for number, (_, seen) in enumerate(batches) if number not in (0, *_AGAIN)]
    making_s = fmean(read_s) if read_s else None
    problem = _why_kept([seen for _, seen in batches])
    taking_s = receive_cost(float(nbytes_of(batches[-1][0])))[1]
    if problem is None and making_s is not None and making_s < taking_s:
        problem = f"a batch is made in {making_s * 1e3:.2g} ms, sooner than a worker process can transfer it"
    if problem is None and exact and (drawn or isinstance(loader.dataset, IterableDataset)):
        problem = "with exact=True its workers must not draw random numbers, and one did"
    elif problem is None and exact and any(seen.holds for _, seen in batches):
        problem = "its dataset creates a random generator in each worker (exact=True)"
    return WorkersCheck(problem, shuffles, bool(drawn), making_s)


def _why_kept(seen: Sequence[_Seen]) -> str | None:
    """Why workers would lose what the dataset keeps of the samples, if it keeps a relevant amount."""
    changes = [each.change for each in seen[1:]]
    again = seen[_AGAIN[0]].change if len(seen) > _AGAIN[0] else changes[0] if changes else None
    if "entries" not in changes and again is None:
        return None  # such as the number of the sample that was read last
    once_s = [each.read_s for number, each in enumerate(seen) if number not in (0, *_AGAIN)]
    again_s = [each.read_s for number, each in enumerate(seen) if number in _AGAIN]
    if again is None and again_s and min(once_s) < _KEPT * min(again_s):
        return None  # such as the parts of a graph, which are quickly made again
    return "its dataset changes as it is read, as a sample cache does: each worker would keep its own"


def _shuffles(loader: DataLoader[Any], drawn: Collection[str]) -> bool:
    """Whether what is drawn from these random states decides in which order the loader's next epoch comes."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.batch_sampler) or loader.sampler
    if isinstance(sampler, (SequentialSampler, DistributedSampler, ElasticSampler)):
        return False
    if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)):
        return sampler.generator is None and "torch" in drawn
    return bool(drawn)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    # An error from a worker is its traceback as text; the last line says what it was.
    return lines[-1] if lines and lines[0].startswith("Caught ") else f"{type(error).__name__}: {''.join(lines[:1])}"


class _Seen(NamedTuple):
    """The observations in a worker on one batch."""

    drawn: Literal["torch", "another"] | None  # the random state that it drew from
    change: str | None  # of the dataset
    read_s: float  # seconds since the batch before
    holds: bool = False  # the dataset holds a random generator, perhaps made there


class _CheckingCollate:
    """Replaces a ``collate_fn`` in a worker: returns the batch, and what reading it drew and changed."""

    def __init__(self, collate_fn: Callable[[Any], Any], loader: DataLoader[Any], numbers: Sequence[int]) -> None:
        self._collate_fn = collate_fn
        # Not the loader: one with an iterator of its own cannot be pickled.
        self._parts: Any = SimpleNamespace(
            dataset=loader.dataset, collate_fn=loader.collate_fn, worker_init_fn=loader.worker_init_fn
        )
        self._numbers = numbers  # of the samples in the second batch
        self._random: tuple[torch.Tensor, RandomStates] | None = None
        self._generators: list[tuple[Any, Any]] | None = None
        self._held: DatasetState | None = None
        self._number = 0
        self._ended = time.perf_counter()

    def __call__(self, samples: Any) -> tuple[Any, _Seen]:
        batch = self._collate_fn(samples)
        read_s = time.perf_counter() - self._ended
        before, now = self._random, (torch.get_rng_state(), RandomStates())
        change = None if self._held is None else self._held.change_by_reading()
        if self._number <= _AGAIN[0]:  # what is opened once is open by now
            self._held = state_of(self._parts, also=self._numbers)
        self._number += 1
        drawn = drawn_since_seeded() if before is None else None
        if before is not None and not torch.equal(before[0], now[0]):
            drawn = "torch"
        elif before is not None and before[1] != now[1]:
            drawn = "another"
        self._draw_alike(now)
        holds = self._held is not None and any(each.kind == "generator" for each in self._held.held)
        self._ended = time.perf_counter()
        return batch, _Seen(drawn, change, read_s, holds)

    def _draw_alike(self, now: tuple[torch.Tensor, RandomStates]) -> None:
        """Have each batch drawn from the states after the first: what is drawn and kept is then the same again."""
        if self._random is None or self._generators is None:
            held = self._held.held if self._held is not None else []
            generators = [each.value for each in held if each.kind == "generator"]
            self._random, self._generators = now, [(each, state_of_generator(each)) for each in generators]
            return
        self._random[1].restore()
        for generator, state in self._generators:
            restore_generator(generator, state)
