"""Decides whether more workers would read the same samples, by what they share and copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gpuopt.objects.classes import NOTED
from lightning_gpuopt.objects.dataset_state import DatasetState, UnshareableObject
from lightning_gpuopt.timeline.worker_clock import TimedCollate
from lightning_gpuopt.utils.replaced_method import identity

# for each changed loader: the user's number of workers, and the number set here; by identity: it need not be hashable
_own: WeakIdKeyDictionary = WeakIdKeyDictionary()


def own_workers(loader: DataLoader[Any]) -> int:
    """The user's own number of workers, also if an earlier fit has changed it."""
    own, ours = _own.get(loader, (loader.num_workers,) * 2)  # type: ignore[no-untyped-call]
    return own if loader.num_workers == ours else loader.num_workers


def note_own_workers(loader: DataLoader[Any], own: int) -> None:
    _own[loader] = own, loader.num_workers


def forks(loader: DataLoader[Any]) -> str | None:
    """The start method of a loader's workers; None for fork."""
    context: Any = loader.multiprocessing_context or torch.multiprocessing.get_context()
    method: str = context.get_start_method()
    return None if method == "fork" else method


def own_collate(loader: DataLoader[Any]) -> Callable[[Any], Any]:
    collate: Any = loader.collate_fn
    return collate.collate_fn if isinstance(collate, TimedCollate) else collate


def state_of(loader: DataLoader[Any], also: Sequence[int] = (), *, by_sample: bool = False) -> DatasetState:
    """The state of everything that workers copy."""
    return DatasetState(
        also=also,
        by_sample=by_sample,
        dataset=loader.dataset,
        collate_fn=own_collate(loader),
        worker_init_fn=loader.worker_init_fn,
    )


def held_by(loader: DataLoader[Any]) -> list[UnshareableObject]:
    return state_of(loader).held


def why_not_shared(loader: DataLoader[Any], held: Sequence[UnshareableObject], *, workers: int) -> str | None:
    """Why a loader must not get more ``workers`` than the user's, by what it holds: what two share, more can share."""
    for each in held:
        if each.kind == "trained" and not workers:
            return (
                f"its samples can depend on {each}, which training changes: with num_workers=0 they follow each "
                "change, but workers would have a copy"
            )
        if each.kind == "device" and not workers:
            return f"its dataset holds a tensor on a GPU, {each}: other processes cannot use it"
        if each.kind == "file" and workers < 2 and forks(loader) is None:
            return (
                f"its dataset holds {each}, which forked processes would share, so they would read at each other's "
                "position. Open it in the worker, when the first sample is read"
            )
        if each.kind == "generator" and workers < 2 and not has_init_fn(loader):
            return (
                f"its dataset holds a random generator, {each}: workers would have copies that draw the same numbers. "
                "Draw from torch's, numpy's or Python's global state, or seed it in worker_init_fn"
            )
    return None


def has_init_fn(loader: DataLoader[Any]) -> bool:
    """Whether there is a ``worker_init_fn`` of the user's, which may change the dataset; Lightning's does not."""
    function: Any = loader.worker_init_fn
    function = getattr(function, "func", function)
    return function is not None and getattr(function, "__name__", "") != "pl_worker_init_function"


class ForkSnapshot:
    """The state that a loader's workers copy; held by the loader, so that the dataset does not outlive it."""

    def __init__(self, loader: DataLoader[Any], own_workers: int) -> None:
        self._loader_ref = weakref.ref(loader)
        self._own_workers = own_workers
        self.state = state_of(loader, by_sample=not own_workers and loader.num_workers > 0)

    @staticmethod
    def of(loader: DataLoader[Any]) -> ForkSnapshot | None:
        start: ForkSnapshot | None = vars(loader).get(NOTED)
        return start

    @staticmethod
    def forget(loader: DataLoader[Any]) -> None:
        vars(loader).pop(NOTED, None)

    def note(self, loader: DataLoader[Any]) -> None:
        """Have the loader hold this, until it starts others."""
        vars(loader)[NOTED] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return identity, (None,)  # a copy of the loader has started no workers

    @property
    def _loader(self) -> DataLoader[Any]:
        loader = self._loader_ref()
        assert loader is not None  # whoever asks has it
        return loader

    @property
    def has_changed(self) -> bool:
        """Whether workers started now could get another dataset than the running ones."""
        return bool(self._own_workers and not self.state.is_comparable) or self.state.has_changed()

    def has_changed_for(self, samples: Iterable[Any] | None) -> bool:
        """The same, for these samples alone; None: for all."""
        return self.has_changed if samples is None else self.state.has_changed_for(samples)

    def why_no_more(self) -> str | None:
        """Why no worker can be added, now or later, by what the loader holds now; None if one can."""
        if self.state.has_failed:
            return "its dataset holds objects that cannot be inspected, so changes may go unnoticed"
        loader = self._loader
        before = {id(each.value) for each in self.state.held}
        held = held_by(loader)
        new = [each for each in held if id(each.value) not in before]
        return why_not_shared(loader, held, workers=self._own_workers) or why_not_shared(loader, new, workers=0)

    @property
    def shared_file(self) -> UnshareableObject | None:
        """A file that the user's workers share already."""
        files = (each for each in self.state.held if each.kind == "file")
        return next(files, None) if self._own_workers >= 2 and forks(self._loader) is None else None
