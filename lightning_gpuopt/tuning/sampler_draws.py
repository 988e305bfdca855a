"""Whether a loader's sampler may be asked for indices earlier than it would have been: what it draws from, and when.

More workers have more batches under way, so their indices are drawn earlier. Where a sampler draws each of them from a
random state that training draws from as well, they would come out otherwise.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.tuning.dataset_state import DatasetState
from lightning_gpuopt.tuning.object_facts import length_of

_DRAW_AT_ONCE: Final = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    ElasticSampler,
)
"""Samplers that draw from a random state when they are iterated, and not again for each index."""

_WRAPS: Final = (BatchSampler, ElasticBatchSampler)
_MAX_S: Final = 1.0
"""So long an unknown sampler is iterated at most."""

_PATIENCE_S: Final = 3.0
"""So long the process in which it is iterated may take in all."""

_MANY: Final = 100_000
"""One that has drawn nothing for so many indices, and is not at its end by then, draws at once."""

_EPOCHS: Final = 2
"""A sampler that never ends has been seen whole when it gave so many times the dataset's length."""

_answers: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
"""What was seen of each sampler."""


def why_not_earlier(loader: DataLoader[Any], *, look: bool = True) -> str | None:
    """Why a map-style loader's sampler must be asked when it would have been; None where that is no matter.

    One that is not torch's is iterated once in a process of its own, forked for that: here nothing changes. It is not
    where it holds what processes share.

    Args:
        loader: the loader.
        look: iterate it there; else the answer is that nobody has looked.
    """
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while _iterates_as(sampler, _WRAPS) and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    name = type(sampler).__name__
    if getattr(sampler, "generator", None) is torch.default_generator:
        return f"its sampler ({name}) draws from the global generator: another order would come of it"
    if _iterates_as(sampler, _DRAW_AT_ONCE) or type(sampler) in (list, tuple, range):
        return None
    if not look:
        return f"its sampler ({name}) was not looked at"
    try:
        if sampler not in _answers:
            _answers[sampler] = _seen_in_a_fork(sampler, loader.dataset)
        seen = _answers[sampler]
    except TypeError:  # it has no place for weak references
        seen = _seen_in_a_fork(sampler, loader.dataset)
    return None if seen is None else f"its sampler ({name}) {seen}"


def _iterates_as(sampler: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a sampler is of these, or of a class that derives from one and has its ``__iter__``.

    Those of torchdata iterate as torch's, and count.
    """
    own = getattr(type(sampler), "__iter__", None)
    counts = type(sampler).__module__.startswith("torchdata.")
    return any(isinstance(sampler, kind) and (counts or own is vars(kind).get("__iter__")) for kind in kinds)


def _seen_in_a_fork(sampler: Any, dataset: Any) -> str | None:
    """What iterating a sampler does that depends on when; None for nothing. Seen in a process that ends with it."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "was not looked at"
    if (shared := _shared(sampler, dataset)) is not None:
        return f"holds {shared}, which a look at it would change"
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_seen, args=(sender, sampler, dataset), daemon=True)
    try:
        with sender:
            process.start()
        if not receiver.poll(_PATIENCE_S):
            return "gave no answer in a process of its own, where it is iterated to see whether it draws for each index"
        seen: str | None = receiver.recv()
        return seen
    except EOFError:
        return "ends the process in which it is iterated to see whether it draws random numbers for each index"
    except Exception as error:  # no more processes; a daemon, which may have none; a warning that is an error
        return f"cannot be looked at: {error}"
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        receiver.close()


def _shared(sampler: Any, dataset: Any) -> str | None:
    """Something that a sampler would change for this process as well if it were iterated in another."""
    own = {name: each for name, each in getattr(sampler, "__dict__", {}).items() if each is not dataset}
    own = {name: each for name, each in own.items() if not isinstance(each, Dataset)}
    state = DatasetState(sampler=own, its_class=type(sampler))
    return next((str(each) for each in (*state.held, *state.shared) if each.kind in ("file", "shared")), None)


def _send_seen(sender: Any, sampler: Any, dataset: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to this process as well
    torch.set_num_threads(1)  # the threads of a parallel region are not there after a fork
    sender.send(_seen(sampler, dataset))


def _seen(sampler: Any, dataset: Any) -> str | None:
    own = [each for each in getattr(sampler, "__dict__", {}).values() if isinstance(each, Dataset)]
    state = DatasetState(dataset=[dataset, *own])
    try:
        numbers = iter(sampler)
        next(numbers, None)
        first = RandomStates()
        whole = _exhaust(numbers, _EPOCHS * max(length_of(dataset) or 1, 1))
    except Exception as error:  # maybe of the fork: CUDA, a thread that is not there
        return f"cannot be looked at: {type(error).__name__}: {error}"
    if state.has_changed(but_on_demand=True):
        return "changes the dataset as it is iterated: earlier would be another dataset"
    if RandomStates() != first:
        return "draws random numbers for each index: another order would come of it"
    return None if whole else "is too slow to see whether it draws random numbers for each index"


def _exhaust(numbers: Iterable[Any], most: int) -> bool:
    """Iterate to the end, or so far; False where the time is up before."""
    until = time.perf_counter() + _MAX_S
    seen = 0
    for number in numbers:
        seen += len(number) if isinstance(number, (list, tuple)) else 1
        if seen >= most:
            break
        if time.perf_counter() > until:
            return seen >= _MANY
    return True
