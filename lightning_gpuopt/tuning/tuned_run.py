"""Changes the number of workers of the training loaders of one ``fit`` to what training needs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import persistent_iterator
from lightning_gpuopt.compat.lightning import Trainer, say_once, silence_worker_hint, train_iterators, train_loaders
from lightning_gpuopt.loaders.registry import Create, LoaderRegistry, SeenLoader
from lightning_gpuopt.tuning.rules import CannotChange
from lightning_gpuopt.tuning.search_result import WorkersChoice
from lightning_gpuopt.tuning.tuned_loader import FinderOptions, TunedLoader, why_left

log = logging.getLogger(__name__)


class TunedFit:
    """Follows one ``fit`` from ``setup`` to its end.

    A loader is taken in when the training loop first iterates it: by then the loop knows which one of several it is,
    and those that it has dropped (for a reload, or after a search for a learning rate) are let go.
    """

    def __init__(
        self, trainer: Trainer, options: FinderOptions, restored: Callable[[], dict[int, WorkersChoice]]
    ) -> None:
        self.trainer = trainer
        self._options = options
        self._restored = restored
        self._under_way = False
        self._undo = ExitStack()
        self._tuned: dict[int, TunedLoader] = {}
        self._choices: dict[int, WorkersChoice] = {}
        self._left: set[int] = set()
        self._registry = LoaderRegistry.of(trainer)
        self._watched: list[weakref.ref[DataLoader[Any]]] = []
        self._undo.callback(self._registry.subscribe(self, trainer))

    @property
    def choices(self) -> dict[int, WorkersChoice]:
        """The choices so far, by the loaders' order; loaders that are left alone are missing."""
        return {**self._choices, **{index: self._tuned[index].choice for index in sorted(self._tuned)}}

    @property
    def first_num_workers(self) -> int | None:
        return next((getattr(loader, "num_workers", None) for loader in train_loaders(self.trainer)), None)

    def restore(self) -> None:
        """Use a checkpoint's choices, also if it is loaded after the first iteration; never in mid-fit."""
        if self._under_way:
            return
        for index, choice in self._restored().items():
            if index in self._tuned:
                self._tuned[index].restore(choice)

    def epoch_begins(self) -> None:
        loaders = train_loaders(self.trainer)
        self._let_go(loaders)
        for loader in [each for each in loaders if self._watches(each)]:
            if self._tuned_of(loader) is None and persistent_iterator(loader) is not None:
                self._take_in(loader, loaders)  # its workers run since an earlier fit
        for tuned in self._tuned.values():
            tuned.managed.epoch_begins()

    def step_done(self) -> None:
        """Act on what the workers have reported since the last call; cheap if they reported nothing."""
        self._under_way = True
        iterators = train_iterators(self.trainer)
        for index, tuned in list(self._tuned.items()):
            if index >= len(iterators):
                continue
            try:
                changed = tuned.step_done(iterators[index])
            except CannotChange as reason:
                self._leave(index, reason)
                continue
            for other in self._tuned.values() if changed else ():
                if other is not tuned:
                    other.wake()

    def undo(self, *, failed: bool = False) -> None:
        """Remove our hooks; may be called more than once."""
        self._undo.close()
        self._watched.clear()
        iterators = train_iterators(self.trainer) if failed else []
        self._choices = self.choices
        while self._tuned:
            index, tuned = self._tuned.popitem()
            with suppress(Exception):
                tuned.managed.end()
            if failed:
                with suppress(Exception):  # the workers of other loaders have to end as well
                    tuned.running.end(iterators[index : index + 1])

    # -- following the loaders, and their iterators

    def loader_seen(self, seen: SeenLoader) -> None:
        if not seen.is_training:
            return
        try:
            if (reason := why_left(seen.loader, self._options)) is not None:
                self._say(reason)
                return
            self._watched.append(weakref.ref(seen.loader))
            self._undo.callback(silence_worker_hint("train_dataloader"))
        except Exception as error:
            self._fail(error)

    def iterator_wanted(self, loader: DataLoader[Any]) -> Callable[[Create], Any] | None:
        if not self._watches(loader):
            return None
        tuned = self._tuned_of(loader) or self._take_in(loader, train_loaders(self.trainer))
        return None if tuned is None else tuned.iterator_wanted()

    def unmodified(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        tuned = self._tuned_of(loader)
        return nullcontext() if tuned is None else tuned.managed.unmodified()

    def _watches(self, loader: Any) -> bool:
        return any(each() is loader for each in self._watched)

    def _tuned_of(self, loader: DataLoader[Any]) -> TunedLoader | None:
        return next((tuned for tuned in self._tuned.values() if tuned.running.is_of(loader)), None)

    def _take_in(self, loader: DataLoader[Any], loaders: list[Any]) -> TunedLoader | None:
        """Start tuning a loader, or continue from the one it replaces; None if it is left alone."""
        if not loaders:
            self._fail(RuntimeError("this Lightning does not show which training loader it is"))
        index = next((index for index, each in enumerate(loaders) if each is loader), None)
        if index is None or index in self._left:
            return None
        self._let_go(loaders)
        try:
            if index in self._tuned and self._tuned[index].goes_on_with(loader):
                self._tuned[index].replace(loader)
            else:
                restored, alone = self._restored().get(index), len(loaders) == 1
                self._tuned[index] = TunedLoader(self.trainer, loader, index, self._options, restored, alone=alone)
                self._tuned[index].begin()
        except CannotChange as reason:
            self._leave(index, reason)
        except Exception as error:
            self._tuned.pop(index, None)
            self._left.add(index)
            self._fail(error)
        return self._tuned.get(index)

    def _let_go(self, loaders: list[Any]) -> None:
        """Forget the loaders that the training loop has dropped."""
        self._registry.forget_dropped()
        self._watched = [each for each in self._watched if any(each() is loader for loader in loaders)]
        left = [index for index, loader in enumerate(loaders) if self._watches(loader)]
        for index in [index for index in self._tuned if index not in left]:
            del self._tuned[index]

    def _leave(self, index: int, reason: CannotChange) -> None:
        self._left.add(index)
        if (tuned := self._tuned.pop(index, None)) is not None:
            tuned.managed.end()
        self._say(str(reason))

    def _say(self, reason: str) -> None:
        say_once(self.trainer, f"num-workers-{reason}", f"NumWorkersFinder leaves {reason}.", warn=False)

    def _fail(self, error: Exception) -> None:
        log.debug("a loader could not be tuned", exc_info=True)
        say_once(self.trainer, "num-workers-failed", f"NumWorkersFinder leaves a loader alone: {error}")
