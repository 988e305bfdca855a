"""The training loader under AutoFix: its settings are changed while it runs, or with its next iterator."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import (
    as_persistent,
    is_like,
    is_plain,
    may_pin,
    persistent_iterator,
    reset_persistent,
    running_workers,
    set_prefetch,
    shut_down,
    why_not_reset,
)
from lightning_gpuopt.compat.lightning import Trainer, train_iterators, train_loaders
from lightning_gpuopt.loaders.registry import LoaderRegistry, SeenLoader
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.live import LivePolicy
from lightning_gpuopt.tuning.loader import FinderOptions, has_own_state, why_left_alone
from lightning_gpuopt.tuning.running import RunningLoader, assign, depth_of
from lightning_gpuopt.tuning.sampler_draws import why_not_earlier
from lightning_gpuopt.tuning.sharing import WorkersStart, forks, own_workers, state_of
from lightning_gpuopt.tuning.without_workers import check_workers

log = logging.getLogger(__name__)

_MAX_LOOK_S: Final = 30.0
_OPTIONS: Final = FinderOptions("live", None, None, 10.0, 0.05, iterable=False)


class CannotChange(Exception):
    """A setting cannot be changed; the message gives the reason."""


class AdjustableLoader:
    """The one training loader of a ``fit``, whose settings can be changed.

    Args:
        trainer: the Trainer, in ``setup``: before it has asked for its loaders.

    Attributes:
        refused: reasons, by setting, why a change that waited for an iterator could not be made.
        looked_s: seconds of the epochs' set-ups spent to check whether workers can make the batches.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._seen: list[tuple[Any, str | None]] = []
        self._running: RunningLoader | None = None
        self._next: dict[str, Any] = {}
        self._kept: Any = None
        self._keeps_workers = False
        self._start: WorkersStart | None = None
        self._own_workers: int | None = None
        self._changes = False
        self._returns: set[str] = set()
        self._undo = ExitStack()
        self.refused: dict[str, str] = {}
        self.looked_s = 0.0
        self._thread = threading.get_ident()
        self._registry = LoaderRegistry.of(trainer)
        self._undo.callback(self._registry.subscribe(self, trainer))

    # -- finding the loader, and following its iterators

    def loader_seen(self, seen: SeenLoader) -> None:
        """Take in a loader; the registry calls it."""
        if not seen.is_training:
            return
        loader = seen.loader
        reason = why_left_alone(loader, _OPTIONS)
        if reason is None and not is_plain(loader):
            reason = f"a {type(loader).__name__} alone: it makes its iterators itself"
        self._seen.append((loader, reason))

    @property
    def _loader(self) -> DataLoader[Any] | None:
        """The only training loader, if it can be changed."""
        loaders = train_loaders(self._trainer)
        return loaders[0] if len(loaders) == 1 and self._why_not(loaders[0]) is None else None

    def _why_not(self, loader: Any) -> str | None:
        known = [reason for each, reason in self._seen if each is loader]
        if not known:
            return "the training loader was made before"
        return None if known[0] is None else f"AutoFix leaves {known[0]}"

    def make_iterator(self, loader: DataLoader[Any], create: Callable[[], Any]) -> Any:
        """Make an iterator with the settings that were asked for; the registry calls it."""
        if loader is not self._loader or threading.get_ident() != self._thread:
            return create()
        self._note_dataset(loader)
        for setting in list(self._next):
            value = self._next.pop(setting)
            self._returns.discard(setting)
            try:
                self._set(loader, setting, value)
            except Exception as error:
                log.debug("a setting could not be changed", exc_info=not isinstance(error, CannotChange))
                self.refused[setting] = str(error)
        return self._iterator(loader, create)

    def _iterator(self, loader: DataLoader[Any], create: Callable[[], Any]) -> Any:
        kept, self._kept = self._kept, None
        if kept is not None:
            if self._keeps_workers and is_like(kept, loader) and not self._changes and why_not_reset() is None:
                reset_persistent(kept, loader)
                self._kept = kept
                return kept
            shut_down(kept)
        make = create if self._running is None else lambda: self._running_iterator(create)
        if not (self._keeps_workers and loader.num_workers):
            return make()
        self._kept = as_persistent(loader, make)
        return self._kept

    def _running_iterator(self, create: Callable[[], Any]) -> Any:
        assert self._running is not None
        return self._running.new_iterator(create)

    def epoch_begins(self) -> None:
        """An epoch begins. With the user's own ``persistent_workers``, no new iterator is made."""
        loader = self._loader
        if loader is None:
            return
        iterator = persistent_iterator(loader)
        if iterator is not None and "prefetch_factor" in self._next:
            loader.prefetch_factor = self._next.pop("prefetch_factor")
            set_prefetch(iterator, loader.prefetch_factor)
        if self._running is not None:
            self._running.before_epoch()

    # -- changes

    def now(self, setting: str) -> Any:
        """The loader's value of a setting; a change that waits for the next iterator does not count.

        Args:
            setting: ``"num_workers"``, ``"prefetch_factor"``, ``"pin_memory"`` or ``"persistent_workers"``.
        """
        if setting == "persistent_workers" and self._keeps_workers:
            return True
        return getattr(self._loader, setting, None)

    def change(self, setting: str, value: Any) -> bool:
        """Change a setting.

        Args:
            setting: its name, a DataLoader's argument.
            value: its new value.

        Returns:
            Whether it is in effect; else it will be with the next iterator.

        Raises:
            CannotChange: it has to stay as it is.
        """
        loaders, loader = train_loaders(self._trainer), self._loader
        if len(loaders) > 1:
            raise CannotChange("there are several training loaders")
        if loader is None:
            raise CannotChange((self._why_not(loaders[0]) if loaders else None) or "there is no training loader")
        if self._trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            raise CannotChange("the loaders are made anew while training runs")
        if has_own_state(loader):
            raise CannotChange(f"the state of a {type(loader).__name__} holds for the settings that it began with")
        if self.now(setting) == value:
            raise CannotChange("it is so already")
        if setting == "num_workers" and loader.num_workers and value:
            return self._resize(loader, value)
        self._check(loader, setting, value)
        if not self._has_next_epoch():
            raise CannotChange("it takes a new iterator of the loader, and this epoch is the last")
        self._next[setting] = value
        return False

    @property
    def starts_slowly(self) -> bool:
        """Whether workers are started by another method than fork, which takes seconds."""
        return self._loader is not None and forks(self._loader) is not None

    @property
    def draws(self) -> bool:
        """Whether an added worker drew random numbers."""
        return self._running is not None and self._running.draws

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits for the next iterator."""
        return not self._next

    def is_waiting(self, setting: str) -> bool:
        """Whether a change waits for the next iterator."""
        loader, iterators = self._loader, train_iterators(self._trainer)
        if setting == "num_workers" and loader is not None and iterators:
            return setting in self._next or running_workers(loader, iterators[0]) != loader.num_workers
        return setting in self._next

    def take_back(self, setting: str, value: Any) -> None:
        """Restore a setting, now or with the next iterator.

        Args:
            setting: its name.
            value: its value before.
        """
        if self._next.pop(setting, None) is not None or self._loader is None:
            return
        if setting == "num_workers" and value and self._running is not None:
            self._running.apply(value)
        elif setting == "persistent_workers":
            self._keeps_workers = False
        else:
            self._next[setting] = value
            self._returns.add(setting)

    def step_done(self) -> str | None:
        """Check the workers that were started while training runs. Called once a window.

        Returns:
            Why there are fewer workers than were asked for; None if there are as many.
        """
        if self._running is None:
            return None
        self._follow()
        if self._running.fetches_here:
            return "the dataset was changed while training ran, and workers would have kept the old one"
        if self._running.gives_up_growing():
            return "a worker that was started in mid-epoch never gave a batch"
        cap = self._running.no_longer_fits()
        if cap is None:
            return None
        self._running.apply(cap.num_workers)
        return f"for more workers there is no room any longer, limited by {cap.limited_by}"

    def _resize(self, loader: DataLoader[Any], workers: int) -> bool:
        self._check_sampler(loader)
        running = self._run(loader, depth_of(loader))
        if workers > loader.num_workers:
            self._check_shareable()
        self._follow()
        if running.unknown is not None:
            raise CannotChange(f"training fetches from its {running.unknown}")
        cap = running.cap()
        if cap.num_workers <= loader.num_workers < workers:
            raise CannotChange(f"there is no room for more workers, limited by {cap.limited_by}")
        before = loader.num_workers
        running.apply(min(workers, cap.num_workers))
        if running.no_more is not None:
            raise CannotChange(running.no_more)
        iterators = train_iterators(self._trainer)
        there = bool(iterators) and running_workers(loader, iterators[0]) == loader.num_workers
        if not there and not self._has_next_epoch():
            running.apply(before)
            why = running.problem or "all batches of the epoch are on their way"
            raise CannotChange(f"running workers cannot be changed ({why}), and this epoch is the last")
        return there

    def _run(self, loader: DataLoader[Any], depth: int) -> RunningLoader:
        if self._running is None:
            ranks = max(min(self._trainer.num_devices, self._trainer.world_size), 1)
            policy = LivePolicy(
                loader.num_workers, cpus=usable_cpus() / ranks, prefetch_factor=loader.prefetch_factor or 2
            )
            self._running = RunningLoader(loader, policy, None, ranks, depth, own_workers=self._own_workers)
            self._running.start = self._start
            self._running.freeze()
        return self._running

    def _follow(self) -> None:
        iterators = train_iterators(self._trainer)
        if self._running is not None and iterators:
            self._running.follow(iterators[0])

    def _check(self, loader: DataLoader[Any], setting: str, value: Any) -> None:
        """Raise :class:`CannotChange` if a change with the next iterator is not safe."""
        if setting == "num_workers" and not value:
            raise CannotChange(
                "without workers the training process draws what its workers draw now: training would be another"
            )
        if setting == "pin_memory":
            if persistent_iterator(loader) is not None:
                raise CannotChange("its workers persist: pinning takes new ones")
            if not may_pin(loader):
                raise CannotChange("its batches would come as other types, or no worker makes them")
        if setting in ("num_workers", "prefetch_factor", "persistent_workers"):
            self._check_sampler(loader)
        if setting == "persistent_workers":
            self._check_persistent(loader)

    def _check_sampler(self, loader: DataLoader[Any]) -> None:
        """Raise if the sampler draws from a random state of training: more prefetching would make it draw earlier."""
        if (reason := why_not_earlier(loader)) is not None:
            raise CannotChange(reason)

    def _check_shareable(self) -> None:
        """Raise if new workers would read other samples than the running ones: open files, a dataset changed since."""
        if self._start is None:
            return
        if (reason := self._start.why_no_more()) is not None:
            raise CannotChange(reason)
        if self._start.has_changed:
            raise CannotChange("the dataset has changed since its workers were started: new ones would see another")

    def _check_persistent(self, loader: DataLoader[Any]) -> None:
        kind = type(loader.dataset).__name__
        if (reason := why_not_reset()) is not None:
            raise CannotChange(reason)
        state = state_of(loader)
        if state.has_epochs:
            raise CannotChange(f"{kind} has set_epoch(), which workers that live on would not hear of")
        if not state.is_whole:
            raise CannotChange(f"{kind} holds too much to see whether it changes between epochs")
        if self._changes:
            raise CannotChange(f"{kind} changes between epochs, and workers that live on would keep the old one")

    def _set(self, loader: DataLoader[Any], setting: str, value: Any) -> None:
        """Change a setting right before an iterator is made."""
        if setting == "num_workers":
            self._set_workers(loader, value)
        elif setting == "persistent_workers":
            self._check_persistent(loader)
            self._keeps_workers = bool(value)
        else:
            setattr(loader, setting, value)

    def _set_workers(self, loader: DataLoader[Any], workers: int) -> None:
        """Change from no workers to some, or back."""
        if not workers:
            loader.num_workers, loader.prefetch_factor, self._running = 0, None, None
            return
        if self._changes:
            raise CannotChange("the dataset changes while training runs, and workers would keep the old one")
        began = time.perf_counter()
        seen = check_workers(loader, longest_s=_MAX_LOOK_S)
        self.looked_s += time.perf_counter() - began
        if seen.draws:
            raise CannotChange(
                "reading the dataset draws from the process's random state, which training's own draws follow: with "
                "workers training would be another"
            )
        if seen.problem is not None:
            raise CannotChange(seen.problem)
        assign(loader, 1)
        running = self._run(loader, 0)
        assign(loader, min(workers, running.cap().num_workers))
        running.policy.set(loader.num_workers)

    def _has_next_epoch(self) -> bool:
        trainer = self._trainer
        last = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
        return not last

    # -- a dataset that changes between epochs

    def _note_dataset(self, loader: DataLoader[Any]) -> None:
        if self._own_workers is None:
            self._own_workers = own_workers(loader)
            if not self._own_workers and loader.num_workers:  # set by an earlier fit; the user's own number was 0
                self._run(loader, 0)
        self._changes = self._start is not None and self._start.has_changed
        self._start = WorkersStart(loader, self._own_workers)

    # -- the end

    def undo(self, back: dict[str, Any]) -> None:
        """Restore the loader, remove our hooks and end the workers that were kept; may be called more than once.

        Args:
            back: the settings to restore, by name.
        """
        self._undo.close()
        if self._running is not None:
            self._running.done()
        kept, self._kept = self._kept, None
        if kept is not None:
            shut_down(kept)
        loader = self._loader
        back = {**{setting: self._next[setting] for setting in self._returns if setting in self._next}, **back}
        self._running, self._next, self._returns, self._start, self._seen = None, {}, set(), None, []
        if loader is None:
            return
        for setting, value in back.items():
            if setting != "persistent_workers":  # an attribute that we never set on the loader
                setattr(loader, setting, value)
        if not loader.num_workers:
            loader.prefetch_factor = None
