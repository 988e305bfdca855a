"""A loader without workers: whether worker processes can do for it what the training process does.

With ``num_workers=0`` a dataset may hold what cannot be shared among processes, or not even used in another: an open
file, whose position all would move; a generator, of which each would have its own; tensors on a GPU. It may keep what
it has read, which a worker would keep for itself. So what the loader holds is gone through first, and then a worker
makes a few batches, in an order of ours.
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
from lightning_gpuopt.tuning.indices import own_sampling
from lightning_gpuopt.tuning.probe import OutOfTime, first_batches, own_collate
from lightning_gpuopt.tuning.sharing import forks, held_by, state_of, why_not_shared

_MAX_LOOK_S: Final = 30.0
"""Seconds without a batch after which a worker may be stuck for ever."""

_BATCHES: Final = 5
_AGAIN: Final = (2, 3)
"""The batches that are the second again: what was kept of that is read faster."""

_TRIES: Final = 3
"""Workers that are started to read a few samples, where one of these raises."""

_KEPT: Final = 1.5
"""A batch that is read so many times as fast when it is read again was kept."""


@dataclass(frozen=True, slots=True)
class WorkersCheck:
    """What a worker made of a loader.

    Attributes:
        problem: why the loader should go on without workers; None where it need not.
        shuffles: whether reading samples draws from the random state that the loader's sampler is seeded from: without
            workers that decides what the next shuffle is, with workers it does not.
        draws: whether it draws from any random state of the process: without workers that decides what training draws
            afterwards.
        making_s: seconds that a batch takes to be made.
    """

    problem: str | None = None
    shuffles: bool = False
    draws: bool = False
    making_s: float | None = None


def check_workers(
    loader: DataLoader[Any], *, longest_s: float = _MAX_LOOK_S, iterable: bool = False, exact: bool = False
) -> WorkersCheck:
    """See whether workers can make a loader's batches, and gain anything by it.

    The loader, its dataset, its sampler and the random states are as before; what was read is in the page cache.

    Args:
        loader: with ``num_workers=0``, not iterated yet.
        longest_s: seconds to wait for a batch; half a minute at most.
        iterable: an ``IterableDataset`` will do.
        exact: only where the worker was not seen to draw random numbers.
    """
    if (method := forks(loader)) is not None:
        return WorkersCheck(
            f"its workers would be started by {method!r}, which runs the program's script again: set num_workers there"
        )
    if not workers_can_run(loader):
        return WorkersCheck("worker processes cannot share memory here")
    if (held := why_not_shared(loader, held_by(loader), workers=0)) is not None:
        return WorkersCheck(held)
    longest_s = min(longest_s, _MAX_LOOK_S)
    try:
        sampling, again = _second_twice(own_sampling(loader, iterable))
        looking = _CheckingCollate(own_collate(loader), loader, again)
        batches = first_batches(loader, sampling, looking, _BATCHES, longest_s)
    except OutOfTime:
        return WorkersCheck(f"a worker process gave no batch within {longest_s:g} s")
    except Exception as error:  # such as CUDA in a forked process
        return WorkersCheck(f"a worker process fails: {_first_line(error)}")
    return _judged(loader, batches, exact=exact)


def why_not_other_workers(loader: DataLoader[Any], *, exact: bool) -> str | None:
    """Why the samples of a loader with workers would be others if it had more or fewer; None if no reason was seen.

    A worker reads a few of them. The loader, its sampler and the random states are as before.

    Args:
        loader: with workers.
        exact: its workers must be shown to draw nothing: whole batches are read, else single samples. A few batches
            without a draw are no proof.
    """
    if not exact:
        return None if isinstance(loader.dataset, IterableDataset) else _why_not_read_by_others(loader, exact=False)
    if isinstance(loader.dataset, IterableDataset):
        reason: str | None = "what an IterableDataset yields depends on its workers"
    elif (method := forks(loader)) is not None:
        reason = f"its workers are started by {method!r}: what they draw cannot be looked at"
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
            sampling, again = _second_twice(own_sampling(loader), None if exact else 1)
            looking = _CheckingCollate(own_collate(loader), loader, again)
            seen = [each for _, each in first_batches(loader, sampling, looking, _BATCHES, _MAX_LOOK_S)]
            break
        except OutOfTime:
            return f"a worker process gave no batch within {_MAX_LOOK_S:g} s to see what reading does"
        except Exception as error:  # such as one corrupt sample; the next try reads others
            failed = _first_line(error)
    if not seen:  # without exact=True no reason: such as samples that are not numbered
        return f"a worker process fails, and so does not show what reading does: {failed}" if exact else None
    if len(seen) > _AGAIN[0] and seen[_AGAIN[0]].change is not None:
        return "its dataset changes as it is read: what a sample is depends on what its worker has read before"
    return "its workers draw random numbers" if exact and any(each.drawn or each.holds for each in seen) else None


def _judged(loader: DataLoader[Any], batches: Sequence[tuple[Any, _Seen]], *, exact: bool) -> WorkersCheck:
    drawn = {seen.drawn for _, seen in batches if seen.drawn is not None}
    shuffles = _shuffles(loader, drawn)
    read_s = [seen.read_s for number, (_, seen) in enumerate(batches) if number not in (0, *_AGAIN)]
    making_s = fmean(read_s) if read_s else None
    problem = _why_kept([seen for _, seen in batches])
    taking_s = receive_cost(float(nbytes_of(batches[-1][0])))[1]
    if problem is None and making_s is not None and making_s < taking_s:
        problem = f"a batch is made in {making_s * 1e3:.2g} ms, sooner than a worker process can hand it over"
    if problem is None and exact and (drawn or isinstance(loader.dataset, IterableDataset)):
        problem = "with exact=True its workers must not draw random numbers, and one was seen to"
    elif problem is None and exact and any(seen.holds for _, seen in batches):
        problem = "its dataset makes a random generator in each worker (exact=True)"
    return WorkersCheck(problem, shuffles, bool(drawn), making_s)


def _second_twice(sampling: dict[str, Any], most: int | None = None) -> tuple[dict[str, Any], list[int]]:
    """Have the second batch come again, and again.

    Args:
        sampling: the arguments of a loader.
        most: samples of a batch; None: as many as it has.

    Returns:
        The arguments of a loader, and the numbers of the samples in that batch.
    """
    name = next((each for each in ("batch_sampler", "sampler") if each in sampling), None)
    if name is None:  # an IterableDataset
        return sampling, []
    if most is not None and isinstance(sampling[name], BatchSampler):
        sampling[name].batch_size = min(sampling[name].batch_size, most)
    first, second, *others = islice(sampling[name], _BATCHES - len(_AGAIN))
    numbers = [each for each in (second if isinstance(second, list) else [second]) if isinstance(each, int)]
    return {**sampling, name: [first, second, *[second] * len(_AGAIN), *others]}, numbers


def _why_kept(seen: Sequence[_Seen]) -> str | None:
    """Why workers would lose by what the dataset keeps of the samples; None where it keeps nothing to speak of."""
    changes = [each.change for each in seen[1:]]
    again = seen[_AGAIN[0]].change if len(seen) > _AGAIN[0] else changes[0] if changes else None
    if "entries" not in changes and again is None:
        return None  # such as the number of the sample that was read last
    once_s = [each.read_s for number, each in enumerate(seen) if number not in (0, *_AGAIN)]
    again_s = [each.read_s for number, each in enumerate(seen) if number in _AGAIN]
    if again is None and again_s and min(once_s) < _KEPT * min(again_s):
        return None  # such as the parts of a graph, which are quickly made again
    return "its dataset changes as it is read, as one that keeps its samples: each worker would keep its own"


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
    """What was seen in a worker beside a batch.

    Attributes:
        drawn: the global random state that was drawn from.
        change: how reading it has changed the dataset.
        read_s: seconds since the batch before.
        holds: whether the dataset holds a random generator in the worker, which it may have made there.
    """

    drawn: Literal["torch", "another"] | None
    change: str | None
    read_s: float
    holds: bool = False


class _CheckingCollate:
    """In place of a ``collate_fn``, in a worker: the batch, and what reading it has drawn, and has changed.

    Args:
        collate_fn: the loader's own.
        loader: what the worker has of it.
        numbers: of the samples in the second batch.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], loader: DataLoader[Any], numbers: Sequence[int]) -> None:
        self._collate_fn = collate_fn
        # Not the loader: one with an iterator of its own cannot be pickled.
        self._parts: Any = SimpleNamespace(
            dataset=loader.dataset, collate_fn=loader.collate_fn, worker_init_fn=loader.worker_init_fn
        )
        self._numbers = numbers
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
