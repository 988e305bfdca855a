"""The Trainer's training loader under AutoFix's management."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_gpuopt.compat.lightning import (
    Trainer,
    local_ranks_of,
    say_once,
    train_iterators,
    train_loader_keys,
    train_loaders,
)
from lightning_gpuopt.loaders.registry import Create, LoaderRegistry, SeenLoader
from lightning_gpuopt.tuning.managed import ManagedLoader
from lightning_gpuopt.tuning.rules import CannotChange, why_left_alone
from lightning_gpuopt.tuning.running import LostWorkers

_WORKERS = ("num_workers", "persistent_workers", "sample_parallel")


class DevicePrefetch(Protocol):
    """Copies batches to the device ahead of the step, once switched on."""

    is_awake: bool

    def wake(self) -> None:
        """Copy batches ahead from now on; raises CannotChange if that cannot be."""

    def sleep(self) -> None:
        """Stop copying ahead."""


class AdjustableLoader:
    """The training loader of a ``fit`` whose settings can be changed; of several, the one that :meth:`aim` names."""

    def __init__(self, trainer: Trainer, prefetch: DevicePrefetch | None = None, *, exact: bool = False) -> None:
        self._trainer = trainer
        self._prefetch = prefetch
        self._exact = exact
        self._thread = threading.get_ident()
        self._managed: list[ManagedLoader] = []
        self._registry = LoaderRegistry.of(trainer)
        self._leave = self._registry.subscribe(self, trainer)
        self.key: str | None = None
        self.refused: dict[str, str] = {}

    # -- finding the loader, and its iterators

    def loader_seen(self, seen: SeenLoader) -> None:
        if not seen.is_training or seen.inner is None:
            return
        ranks = local_ranks_of(self._trainer)
        managed = ManagedLoader(seen.inner, local_ranks=ranks, exact=self._exact, wrapped=seen.inner is not seen.loader)
        managed.running.freeze()
        managed.refused = self.refused
        self._managed.append(managed)

    def iterator_wanted(self, loader: DataLoader[Any]) -> Callable[[Create], Any] | None:
        managed = self._managed_of(loader)
        if managed is None:
            return None
        if threading.get_ident() != self._thread:
            managed.leave("the program iterates it on its own thread")
            return None
        return managed.iterator_wanted()

    def unmodified(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        managed = self._managed_of(loader)
        return nullcontext() if managed is None else managed.unmodified()

    def _managed_of(self, loader: Any) -> ManagedLoader | None:
        return next((each for each in self._managed if each.running.is_of(loader)), None)

    def aim(self, key: str) -> bool:
        """Select the loader with this key for changes; only the first call selects one, and returns True."""
        if self.key is not None or len(train_loaders(self._trainer)) < 2:
            return False
        self.key = key
        return True

    @property
    def _index(self) -> int:
        """The loader's index among the training loaders; -1 if it is unknown which of several it is."""
        keys = train_loader_keys(self._trainer)
        return 0 if len(keys) == 1 else keys.index(self.key) if self.key in keys else -1

    @property
    def _only(self) -> ManagedLoader | None:
        loaders, index = train_loaders(self._trainer), self._index
        seen = self._registry.find(loaders[index]) if 0 <= index < len(loaders) else None
        return None if seen is None else self._managed_of(seen.inner)

    @property
    def _iterator(self) -> Any:
        iterators, index = train_iterators(self._trainer), self._index
        return iterators[index] if 0 <= index < len(iterators) else None

    def epoch_begins(self) -> None:
        self._registry.forget_dropped()
        there = [each for each in self._managed if not each.running.is_of(None)]
        self._managed = [each for each in there if self._registry.find(each.loader) is not None]
        for managed in self._managed:
            managed.epoch_begins()

    # -- changes

    def now(self, setting: str) -> Any:
        if setting == "device_prefetch":
            return self._prefetch is not None and self._prefetch.is_awake
        return None if (managed := self._only) is None else managed.now(setting)

    def change(self, setting: str, value: Any) -> bool:
        """Change a setting: True if that is in effect, False if the next iterator brings it; or CannotChange."""
        if setting == "device_prefetch":
            if self._prefetch is None:
                raise CannotChange("there is no CudaPrefetcher to switch on")
            self._prefetch.wake()
            return True
        trainer, managed = self._trainer, self._only
        if managed is None:
            raise CannotChange(self._why_none())
        if sum(1 for each in self._registry.training if each.inner is managed.loader) > 1:
            raise CannotChange("it is used twice among the training loaders")
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            raise CannotChange("the loaders are recreated while training runs")
        if setting in _WORKERS and (reason := why_left_alone(managed.loader)) is not None:
            raise CannotChange(f"AutoFix leaves {reason}")
        last = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        return managed.change(setting, value, self._iterator, last_epoch=last)

    def _why_none(self) -> str:
        loaders, index = train_loaders(self._trainer), self._index
        if not loaders:
            return "there is no training loader"
        if index < 0:
            return "there are several training loaders, and the finding names none"
        if self._registry.find(loaders[index]) is None:
            return "the training loader already existed"
        return f"AutoFix leaves {why_left_alone(loaders[index])}"

    def take_back(self, setting: str, value: Any) -> None:
        if setting == "device_prefetch" and self._prefetch is not None:
            self._prefetch.sleep()
        elif (managed := self._only) is not None:
            managed.take_back(setting, value)

    def is_waiting(self, setting: str) -> bool:
        managed = self._only
        return managed is not None and managed.is_waiting(setting, self._iterator)

    @property
    def is_settled(self) -> bool:
        return all(each.is_settled for each in self._managed)

    @property
    def starts_slowly(self) -> bool:
        return (managed := self._only) is not None and managed.starts_slowly

    @property
    def draws(self) -> bool:
        return (managed := self._only) is not None and managed.draws

    @property
    def looked_s(self) -> float:
        """Seconds of the epochs' set-ups spent to check whether workers can make the batches."""
        return sum(each.looked_s for each in self._managed)

    def step_done(self) -> LostWorkers | None:
        """Check the workers that were started while training runs. Called once a window."""
        managed = self._only
        lost = None if managed is None else managed.step_done(self._iterator)
        if lost is not None and lost.kind == "order":
            text = f"AutoFix: {lost.why}. From the next epoch on, it is read no further ahead than you set."
            say_once(self._trainer, "autofix-order", text)
        return lost

    # -- the end

    def undo(self, back: dict[str, Any]) -> None:
        """Restore the loader, remove our hooks and end the workers that were kept; may be called more than once."""
        only = self._only
        self._leave()
        managed, self._managed = self._managed, []
        for each in managed:
            each.end(back if each is only else None)
