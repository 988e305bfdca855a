"""``find_num_workers``: finds the number of workers in a few short trials, before training."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt.measurements.loader_model import most_workers, prefetch_needed
from lightning_gpuopt.telemetry.resources import files_left
from lightning_gpuopt.tuning.search import UNEVEN, Search, model_of
from lightning_gpuopt.tuning.search_result import NumWorkersResult
from lightning_gpuopt.tuning.sharing import forks, held_by, why_not_shared
from lightning_gpuopt.tuning.trial import OutOfTime, run_trial
from lightning_gpuopt.tuning.trial_samples import own_sampling
from lightning_gpuopt.tuning.worker_limits import Cap, files_wanted, prefetch_that_fits, room, worker_cap
from lightning_gpuopt.utils.arguments import flag, or_none, real_number, whole_number

_USUAL_PREFETCH: Final = 2
_REFINE: Final = 0.6  # share of the budget after which no trial is repeated just for certainty
_RESERVE: Final = 0.25  # share of the budget, and seconds at most, that are kept for ending the last trial's workers
_MAX_RESERVE_S: Final = 0.75


def find_num_workers(
    dataloader: DataLoader[Any],
    step_time_s: float = 0.0,
    max_num_workers: int | None = None,
    max_seconds: float = 10.0,
    tolerance: float = 0.05,
    local_world_size: int = 1,
    iterable: bool = False,
) -> NumWorkersResult:
    """Find the smallest number of workers with which a loader is as fast as possible, or as fast as its consumer.

    The dataset is read in separate worker processes and in a separate order: the loader, its sampler, its dataset and
    the global random state stay unchanged. Samples that were read are warmer in the page cache than before.

    Args:
        dataloader: any ``torch.utils.data.DataLoader`` over a map-style dataset, whose samples are numbered from 0.
        step_time_s: seconds of training per batch, without waiting for it; 0: as many batches as possible.
        max_num_workers: upper limit; None: min(32, 8 × usable CPUs). Fewer if this node's memory or ``/dev/shm`` do not
            allow as many.
        max_seconds: budget for the whole search.
        tolerance: a gain below this share is not worth another worker.
        local_world_size: ranks on this node that load at the same time, and share its CPUs and memory.
        iterable: also for an ``IterableDataset``, whose samples depend on the number of workers.

    Returns:
        The choice, the trials, and what limits it.

    Raises:
        ValueError: an argument is wrong, or the loader cannot be tried (not a DataLoader, an IterableDataset, a dataset
            without a length, one that cannot be sent to worker processes, or one that holds an open file or connection
            if the loader has fewer than two workers, so that no workers share it yet). Or its workers are started by
            spawn or forkserver, and so run the program's script again, but it has no ``if __name__ == "__main__":``.
        Exception: whatever the dataset raises in a worker, as it would be raised in training.

    Example::

        result = find_num_workers(loader, step_time_s=0.05)
        loader = DataLoader(dataset, batch_size=64, shuffle=True, **result.settings)
    """
    step_time_s = real_number("step_time_s", step_time_s, "seconds", least=0)
    max_seconds = real_number("max_seconds", max_seconds, "seconds", above=0)
    tolerance = real_number("tolerance", tolerance, "a share", above=0, at_most=0.5)
    local_world_size = whole_number("local_world_size", local_world_size, "a number of ranks", least=1)
    max_num_workers = or_none(whole_number, "max_num_workers", max_num_workers, "a number of workers", least=1)
    sampling = own_sampling(dataloader, flag("iterable", iterable))
    for sentence in check_shared(dataloader):
        warnings.warn(f"find_num_workers: {sentence}.", stacklevel=2)
    result = NumWorkersResult(0, (), "shared_memory")
    if workers_can_run(dataloader):
        result = _Finder(
            dataloader, sampling, step_time_s, max_num_workers, max_seconds, tolerance, local_world_size
        ).run()
    # Copies to a GPU run beside its work only from page-locked memory. Not asked for before workers are forked.
    return replace(result, pin_memory=bool(dataloader.pin_memory) or torch.cuda.is_available())


def workers_can_run(dataloader: DataLoader[Any]) -> bool:
    """Whether processes can share locks and tensors here; they cannot without ``/dev/shm``."""
    context: Any = dataloader.multiprocessing_context or torch.multiprocessing.get_context()
    try:
        context.Lock()
        torch.empty(1).share_memory_()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError):
        return False
    return True


def check_shared(dataloader: DataLoader[Any]) -> list[str]:
    """The warnings about state that workers would share; ValueError if more workers would read samples wrongly."""
    held = [] if isinstance(dataloader.dataset, IterableDataset) else held_by(dataloader)
    files = [each for each in held if each.kind == "file"]
    if (reason := why_not_shared(dataloader, files, workers=dataloader.num_workers)) is not None:
        raise ValueError(f"dataloader: expected a dataset that workers can share, but {reason}")
    sentences = []
    if files and forks(dataloader) is None:
        sentences.append(
            f"the workers share {files[0]}: if they move its position, each reads what another one requested. Open it "
            "in the worker, when the first sample is read"
        )
    if (reason := why_not_shared(dataloader, held, workers=dataloader.num_workers)) is not None:
        sentences.append(reason)
    return sentences


@dataclass
class _Finder:
    """One search: the arguments of :func:`find_num_workers`, and of a DataLoader a sampler for the trials."""

    loader: DataLoader[Any]
    sampling: dict[str, Any]
    step_time_s: float
    max_num_workers: int | None
    max_seconds: float
    tolerance: float
    local_world_size: int

    def __post_init__(self) -> None:
        began_s = time.perf_counter()
        self._refine_until_s = began_s + _REFINE * self.max_seconds
        self._deadline_s = began_s + self.max_seconds - min(_RESERVE * self.max_seconds, _MAX_RESERVE_S)
        self._room = room()
        self._cpus = self._room.cpus / self.local_world_size
        self._search = Search(self._cpus, self.tolerance)
        self._seen = self._search.seen
        self._prefetch = self.loader.prefetch_factor or _USUAL_PREFETCH

    def run(self) -> NumWorkersResult:
        """Run trials until no further one would change the choice, or the time is up."""
        with suppress(OutOfTime):
            while (count := self._next_count()) is not None:
                measured = run_trial(
                    self.loader,
                    self.sampling,
                    count,
                    prefetch_factor=self._prefetch,
                    step_time_s=self.step_time_s,
                    deadline_s=self._deadline_s,
                )
                self._seen.append(measured)
                if len(self._seen) <= 2:  # repeated: a hiccup in the first trial will not be in the second
                    self._prefetch = self._prefetch_for(min(each.unevenness for each in self._seen))
        if self._seen:
            result = self._search.choose(self._cap())
        else:  # not one batch came in time
            result = NumWorkersResult(max(min(self.loader.num_workers, self._cap().num_workers), 1), (), "time")
        return replace(result, prefetch_factor=self._prefetch, persistent_workers=True)

    def _cap(self) -> Cap:
        tensors = max((each.batch_tensors for each in self._seen), default=0)
        files = files_left(files_wanted(most_workers(self._cpus), self._prefetch, tensors))
        return worker_cap(
            replace(self._room, files=files),
            max_num_workers=self.max_num_workers,
            local_world_size=self.local_world_size,
            worker_bytes=max((each.worker_bytes or 0 for each in self._seen), default=None),
            batch_bytes=max((each.batch_bytes or 0.0 for each in self._seen), default=None),
            batch_tensors=tensors,
            prefetch_factor=self._prefetch,
        )

    def _prefetch_for(self, unevenness: float) -> int:
        """Batches ahead that bridge the slow ones, and fit."""
        first = self._seen[0]
        factor = self.loader.prefetch_factor or _USUAL_PREFETCH
        workers = model_of(first, self._cpus).workers_needed(self._cap().num_workers)
        if unevenness >= UNEVEN:
            factor = max(factor, prefetch_needed(first.service_s, unevenness, first.consumer_s, workers, now=1))
        fits = prefetch_that_fits(
            self._room, workers=workers, batch_bytes=first.batch_bytes or 0.0, local_world_size=self.local_world_size
        )
        return factor if fits is None else min(factor, fits)

    def _next_count(self) -> int | None:
        """The workers of the next trial: no more than the time left allows, and then none that were tried already."""
        count = self._search.next_count(self._cap(), in_haste=time.perf_counter() > self._refine_until_s)
        while count is not None and self._seen and not self._time_for(count):
            count = count - 1 if count - 1 > max(each.trial.num_workers for each in self._seen) else None
        return count

    def _time_for(self, count: int) -> bool:
        """Whether a trial of so many workers would see enough before the deadline."""
        first, cpus = self._seen[0], max(self._cpus, 0.1)
        startup_s = max(first.startup_s, count * first.startup_cpu_s / cpus)
        round_s = max(first.service_s, count * first.consumer_s, count * first.cpu_s / cpus)
        return time.perf_counter() + startup_s + round_s <= self._deadline_s
