"""A training loader under management: the only code that changes a loader, or its iterator.

Each setting is changed *now*, *with the next iterator*, or the change is *refused because* of a rule
(:mod:`~lightning_gpuopt.tuning.rules`). NumWorkersFinder, AutoFix and the trials before training use it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt.compat.dataloader import persistent_iterator, running_workers
from lightning_gpuopt.loaders.registry import Create
from lightning_gpuopt.loading.elastic_loader import ElasticLoader
from lightning_gpuopt.loading.engine.engine import CannotServe
from lightning_gpuopt.measurements.loader_description import NEXT, NOW
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.rules import AHEAD, ASKS_FOR_WORKER, BY_TRIAL, AskedChange, CannotChange, why_not
from lightning_gpuopt.tuning.running import LostWorkers, RunningLoader, assign
from lightning_gpuopt.tuning.running_search import LivePolicy
from lightning_gpuopt.tuning.sharing import forks, held_by, own_workers, why_not_shared
from lightning_gpuopt.tuning.without_workers import check_workers, why_not_other_workers

log = logging.getLogger(__name__)

# reported with a change of the number of workers if a worker has drawn random numbers
DRAWS: Final = (
    "random numbers are drawn in the workers: as always in PyTorch, they depend on the number of workers; the samples "
    "and their order do not"
)
DRAWS_BY_SAMPLE: Final = (
    "random numbers are drawn as samples are read: they now depend on the epoch and the position in it, not on the "
    "worker; the samples and their order stay the same"
)
_LAST_EPOCH: Final = "it needs a new iterator of the loader, and this epoch is the last"


class ManagedLoader:
    """A training loader whose settings can be changed."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        local_ranks: int,
        max_num_workers: int | None = None,
        tolerance: float = 0.05,
        exact: bool = False,
        own: int | None = None,  # workers that the user has given it; None: as far as is known of it
        num_workers: int | None = None,
        measures: bool = False,  # time its fetches from the first one on; else once its number of workers is changed
        wrapped: bool = False,  # iterated inside a loader of the program's, maybe on a thread: nothing changes at once
    ) -> None:
        self._wrapped = wrapped
        self.own_workers = own_workers(loader) if own is None else own
        self._exact = exact
        self._seen: tuple[str | None] | None = None
        self._drawn: str | None = None
        self._left: str | None = None
        self._note_given(loader)
        self._keeps = False
        self._next: dict[str, Any] = {}
        self._returns: set[str] = set()
        self._follows = measures or (not self.own_workers and loader.num_workers > 0)  # set by an earlier fit
        self.refused: dict[str, str] = {}  # reasons, by setting, against changes that waited for an iterator
        self.looked_s = 0.0  # seconds spent on trials in workers
        if num_workers is not None:
            assign(loader, num_workers)
        cpus, factor = usable_cpus() / local_ranks, loader.prefetch_factor or 2
        policy = LivePolicy(loader.num_workers, cpus=cpus, tolerance=tolerance, prefetch_factor=factor)
        self.running = RunningLoader(loader, policy, max_num_workers, local_ranks, own_workers=self.own_workers)

    def _note_given(self, loader: DataLoader[Any]) -> None:
        factor = (loader.prefetch_factor or 2) if self.own_workers else None
        self._given = {"num_workers": self.own_workers, "prefetch_factor": factor, "pin_memory": loader.pin_memory}

    def go_on_with(self, loader: DataLoader[Any]) -> None:
        self._note_given(loader)
        self.running.go_on_with(loader)

    @property
    def loader(self) -> DataLoader[Any]:
        return self.running.loader

    # -- what may be changed, and when

    def now(self, setting: str) -> Any:
        """The value of a setting; a change that waits for the next iterator does not count."""
        if setting == "persistent_workers" and self.running.shared.keeps:
            return True
        if setting == "sample_parallel":
            return self.running.shared.by_sample or isinstance(self.loader, ElasticLoader)
        return getattr(self.loader, setting, None)

    def when(self, setting: str, value: Any) -> str:
        """When a change would take effect: ``"now"``, ``"with the next iterator"`` or ``"refused because ..."``."""
        try:
            reason = self._why_not(setting, value)
        except Exception as error:  # of the dataset's or the sampler's: what cannot be looked at is left alone
            reason = f"it cannot be inspected: {type(error).__name__}: {error}"
        if reason is None and self._comes_now(setting):
            return NOW
        return NEXT if reason is None else f"refused because {reason}"

    def _is_by_trial(self, setting: str) -> bool:
        """Whether a trial in a worker decides as well; that of first workers is another."""
        return setting in BY_TRIAL["changes as it is read"] and self.own_workers > 0

    def _comes_now(self, setting: str) -> bool:
        return setting in ("num_workers", "sample_parallel") and self.loader.num_workers > 0 and not self._wrapped

    def _why_not(self, setting: str, value: Any, *, tried: bool = False) -> str | None:
        if self.now(setting) == value:
            return "it is already set"
        if self._left is not None:
            return self._left
        if setting in BY_TRIAL["random numbers"] and self._drawn is not None:
            return self._drawn
        if setting == "sample_parallel" and self.running.shared.draws.workers_were_asked_for:
            return ASKS_FOR_WORKER
        if setting in AHEAD and (bound := self.running.order.why_bound(self.loader)) is not None:
            return bound
        if self._wrapped and setting in ("persistent_workers", "sample_parallel"):
            return "the program iterates it inside its own loader, possibly several times at once"
        if self._is_by_trial(setting):
            if self._exact and self.running.draws:
                return "its workers draw random numbers (exact=True)"
            if self._seen is None and self._exact and not tried:
                return "it is not known yet whether its workers draw random numbers"
            if self._seen is not None and self._seen[0] is not None:
                return self._seen[0]
        running = self.running
        changes = running.dataset_changes
        return why_not(AskedChange(self.loader, setting, value, self.own_workers, running.start, changes))

    def change(self, setting: str, value: Any, iterator: Any = None, *, last_epoch: bool = False) -> bool:
        """Change a setting: True if that is in effect, False if the next iterator brings it; or CannotChange."""
        if self._is_by_trial(setting) and self._seen is None and self._why_not(setting, value, tried=True) is None:
            self._seen = (why_not_other_workers(self.loader, exact=self._exact),)
        if (reason := self._why_not(setting, value)) is not None:
            raise CannotChange(reason)
        if setting == "sample_parallel":
            return self._read_by_sample(iterator, last_epoch=last_epoch)
        if self._comes_now(setting):
            return self._resize(value, iterator, last_epoch=last_epoch)
        if last_epoch:
            raise CannotChange(_LAST_EPOCH)
        self._next[setting] = value
        return False

    def take_back(self, setting: str, value: Any) -> None:
        """Restore a setting, now or with the next iterator."""
        if setting not in self._returns and self._next.pop(setting, None) is not None:
            return
        if setting == "num_workers" and value and self._follows:
            self.running.apply(value)
        elif setting == "persistent_workers":
            self.running.shared.keeps = False
        elif setting == "sample_parallel":
            self.running.read_by_sample(value)
        else:
            self._next[setting] = value
            self._returns.add(setting)

    def is_waiting(self, setting: str, iterator: Any) -> bool:
        if setting == "num_workers" and iterator is not None:
            return setting in self._next or running_workers(self.loader, iterator) != self.loader.num_workers
        if setting == "sample_parallel":
            return self.running.reads_by_sample != self.running.shared.by_sample
        return setting in self._next

    @property
    def is_settled(self) -> bool:
        return not self._next

    @property
    def starts_slowly(self) -> bool:
        """Whether workers are started by another method than fork, which takes seconds."""
        return forks(self.loader) is not None

    @property
    def draws(self) -> bool:
        """Whether an added worker drew random numbers, or the dataset holds a generator to draw from."""
        start = self.running.start
        return self.running.draws or (start is not None and any(each.kind == "generator" for each in start.state.held))

    def leave(self, reason: str) -> None:
        """Refuse all changes from now on, and those that wait for an iterator."""
        self._left = reason
        self.refused.update(dict.fromkeys(self._next, reason))
        self._next.clear()

    # -- the number of workers

    def _resize(self, workers: int, iterator: Any, *, last_epoch: bool) -> bool:
        loader, running, self._follows = self.loader, self.running, True
        self.follow(iterator)
        if running.unknown is not None:
            raise CannotChange(f"training fetches from its {running.unknown}")
        cap = running.cap()
        if cap.num_workers <= loader.num_workers < workers:
            raise CannotChange(f"there is no room for more workers, {cap}")
        before = loader.num_workers
        running.apply(min(workers, cap.num_workers))
        if running.no_more is not None:
            raise CannotChange(running.no_more)
        there = iterator is not None and running_workers(loader, iterator) == loader.num_workers
        if not there and last_epoch:
            running.apply(before)
            why = running.problem or "all batches of the epoch are in flight"
            raise CannotChange(f"running workers cannot be changed ({why}), and this epoch is the last")
        return there

    def _read_by_sample(self, iterator: Any, *, last_epoch: bool) -> bool:
        running, self._follows = self.running, True
        self.follow(iterator)
        try:
            there = running.read_by_sample(True)
        except CannotServe as reason:
            raise CannotChange(str(reason)) from None
        if not there and last_epoch:
            running.read_by_sample(False)
            raise CannotChange(_LAST_EPOCH)
        return there

    def raise_prefetch(self, factor: int | None) -> bool:
        """Raise ``prefetch_factor`` for later iterators, if its value is lower; True if it was."""
        if factor is None or factor <= (self.loader.prefetch_factor or 0):
            return False
        if self.running.order.why_not_ahead(self.loader) is not None:
            return False
        self.loader.prefetch_factor = factor
        return True

    def follow(self, iterator: Any) -> None:
        """Time the consumer's iterators, and make them resizable if possible; None is skipped."""
        if iterator is not None and self._follows:
            self.running.follow(iterator)

    def step_done(self, iterator: Any) -> LostWorkers | None:
        """Check the workers started while training runs; returns why some are gone."""
        if self.running.order.bound is not None and self._left is None and (lost := self._ask_unmodified()) is not None:
            return lost
        if not self._follows:
            return None
        running = self.running
        self.follow(iterator)
        if (lost := running.lost()) is not None:
            return lost
        if self._exact and running.draws and self._drawn is None and self.loader.num_workers > self.own_workers:
            self._drawn = "its workers draw random numbers after all (exact=True)"
            self._to_fewer()
            return LostWorkers("draws", self._drawn)
        if (cap := running.no_longer_fits()) is None:
            return None
        running.policy.limited_by = cap.limited_by
        running.apply(cap.num_workers)
        return LostWorkers("room", f"there is no longer room for more workers, {cap}")

    def _ask_unmodified(self) -> LostWorkers | None:
        """Read the sampler no further ahead than the user set, since it reads what training changes."""
        loader, running = self.loader, self.running
        given = self._given["prefetch_factor"] or 0
        waits = any(setting in self._next for setting in AHEAD)
        if not waits and loader.num_workers <= self.own_workers and (loader.prefetch_factor or 0) <= given:
            return None
        why = running.order.why_bound(loader) or ""
        self.leave(why)
        if loader.num_workers > self.own_workers:
            self._to_fewer()
        if self.own_workers:
            loader.prefetch_factor = given
        return LostWorkers("order", why)

    def _to_fewer(self) -> None:
        """Go back to the user's own number of workers; first workers continue to the end of the epoch."""
        self.running.apply(max(self.own_workers, 1))
        if not self.own_workers:
            self.take_back("num_workers", 0)

    # -- iterators

    def iterator_wanted(self) -> Callable[[Create], Any]:
        """Apply the pending changes: the loop is about to iterate the loader. Returns the iterator's factory."""
        running = self.running
        running.compare_dataset()
        self._make_waiting_changes()
        if running.dataset_changes:
            running.shared.end_kept()
        return running.iterator_wanted()

    @contextmanager
    def unmodified(self) -> Iterator[None]:
        """For iterators outside of training: restore the user's settings."""
        changed = {setting: self.now(setting) for setting, given in self._given.items()}
        vars(self.loader).update(self._given)
        try:
            yield
        finally:
            vars(self.loader).update(changed)

    def _make_waiting_changes(self) -> None:
        for setting in list(self._next):
            self._returns.discard(setting)
            try:
                self._set(setting, self._next.pop(setting))
            except Exception as error:
                log.debug("a setting could not be changed", exc_info=not isinstance(error, CannotChange))
                self.refused[setting] = str(error)

    def _set(self, setting: str, value: Any) -> None:
        """Change a setting right before an iterator is made."""
        loader = self.loader
        grows = setting in AHEAD and (value or 0) > (self.now(setting) or 0)
        if grows and (reason := self.running.order.why_not_ahead(loader)) is not None:
            raise CannotChange(reason)
        if setting == "num_workers" and value and self.own_workers:
            assign(loader, min(value, self.running.cap().num_workers))
        elif setting == "num_workers" and value:
            self._first_workers(value)
        elif setting == "num_workers":
            loader.num_workers, loader.prefetch_factor = 0, None
        elif setting == "persistent_workers":
            if value and (reason := self._why_not(setting, value)) is not None:
                raise CannotChange(reason)
            self._keeps = self.running.shared.keeps = bool(value)
        else:
            setattr(loader, setting, value)

    def _first_workers(self, workers: int) -> None:
        loader, running = self.loader, self.running
        if (reason := self._why_not("num_workers", workers)) is not None:
            raise CannotChange(reason)
        began = time.perf_counter()
        seen = check_workers(loader, exact=self._exact)
        self.looked_s += time.perf_counter() - began
        if seen.draws:
            raise CannotChange(
                "reading the dataset draws from the process's random state, which training also uses: with workers, "
                "training would change"
            )
        if seen.problem is not None:
            raise CannotChange(seen.problem)
        assign(loader, 1)
        assign(loader, min(workers, running.cap().num_workers))
        self._follows = True
        running.policy.set(loader.num_workers)

    def epoch_begins(self) -> None:
        """An epoch begins. With the user's own ``persistent_workers``, no new iterator is made."""
        persists = persistent_iterator(self.loader) is not None
        factor = self._next.pop("prefetch_factor", None) if persists else None
        if not self._follows and factor is None:
            return
        if not self.running.before_epoch(factor) and factor is not None:
            why = "its dataset may have changed since its persistent workers started"
            self.refused["prefetch_factor"] = why

    # -- the end

    def end(self, back: dict[str, Any] | None = None) -> None:
        """End with the fit, and restore these settings; may be called more than once."""
        self.running.done()
        self.running.shared.by_sample = False
        if self._keeps:
            self._keeps = self.running.shared.keeps = False
            self.running.shared.end_kept()
        if self.running.is_of(None):
            return
        loader = self.loader
        back = {**{setting: self._next[setting] for setting in self._returns if setting in self._next}, **(back or {})}
        self._next, self._returns = {}, set()
        for setting, value in back.items():
            if setting != "persistent_workers":  # an attribute that we never set on the loader
                setattr(loader, setting, value)
        if not loader.num_workers and loader.prefetch_factor is not None:
            loader.prefetch_factor = None


def changes_of(loader: DataLoader[Any]) -> tuple[dict[str, str], str | None]:
    """When each setting of a loader can be changed, and why more workers would read other samples, if they would."""
    managed = ManagedLoader(loader, local_ranks=1)
    wanted = {
        "num_workers": loader.num_workers + 1,
        "prefetch_factor": 2 * (loader.prefetch_factor or 2),
        "pin_memory": not loader.pin_memory,
        "persistent_workers": not loader.persistent_workers,
    }
    changes = {setting: managed.when(setting, value) for setting, value in wanted.items()}
    if isinstance(loader.dataset, IterableDataset):
        return changes, None
    return changes, why_not_shared(loader, held_by(loader), workers=managed.own_workers)
