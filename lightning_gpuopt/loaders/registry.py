"""The one registry of a Trainer's loaders: who wants to know of them, or to make their iterators, subscribes.

``strategy.process_dataloader`` is shadowed once for as long as somebody subscribes, and so is ``_get_iterator`` of each
training loader: Lightning passes every loader there, with its sampler, before it is iterated. No loader is kept alive
by that, and none becomes part of a reference cycle.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import iterator_maker
from lightning_gpuopt.compat.lightning import Trainer, shadow, train_loaders
from lightning_gpuopt.compat.lightning_loops import is_begun_by_fetcher
from lightning_gpuopt.loaders.kinds import dataloader_in
from lightning_gpuopt.utils.replaced_method import Replacement, identity
from lightning_gpuopt.utils.weak_reference import weakly

log = logging.getLogger(__name__)


class SeenLoader:
    """A loader that a strategy has made ready, for training or for another loop; held weakly."""

    def __init__(self, loader: Any, *, is_training: bool) -> None:
        self.is_training = is_training
        self._loader, self._inner = weakly(loader), weakly(dataloader_in(loader))
        self._iterator: Callable[[], Any] = lambda: None
        self._undo: Callable[[], None] = lambda: None

    @property
    def loader(self) -> Any:
        """What the Trainer iterates; None once nobody holds it any more."""
        return self._loader()

    @property
    def inner(self) -> DataLoader[Any] | None:
        """The DataLoader that makes its batches: itself, or one inside it; None if there is none, or no more."""
        return self._inner()

    @property
    def iterator(self) -> Any:
        """The last iterator of ``inner``; None before there is one, and once nobody holds it any more."""
        return self._iterator()


class LoaderSubscriber(Protocol):
    """Hears of each loader."""

    def loader_seen(self, seen: SeenLoader) -> None:
        """A loader was made ready; it is not iterated yet."""


# makes an iterator: by the function that it is called with, or without one as the loader itself does
Create = Callable[..., Any]


@runtime_checkable
class IteratorMaker(Protocol):
    """Makes the iterators of training loaders as well."""

    def iterator_wanted(self, loader: DataLoader[Any]) -> Callable[[Create], Any] | None:
        """What makes the iterator that training wants, of a :data:`Create`; the loader's settings may be changed.

        Of several the first counts. None: the loader does so itself.
        """

    def unmodified(self, loader: DataLoader[Any]) -> AbstractContextManager[None]:
        """For as long as a callback, or validation, makes an iterator of the same loader: as the user has set it."""


@runtime_checkable
class StartWatcher(Protocol):
    """Is there when any loader's iterator starts its workers, for training or for validation."""

    def start_workers(self, seen: SeenLoader, create: Callable[[], Any]) -> Any:
        """Make the iterator."""


class LoaderRegistry:
    """The loaders of one Trainer. Use :meth:`of`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._thread = threading.get_ident()
        self._subscribers: list[LoaderSubscriber] = []
        self._seen: list[SeenLoader] = []
        self._others: list[SeenLoader] = []
        self._undo: Callable[[], None] | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> LoaderRegistry:
        registry = _registries.get(trainer)
        if registry is None:
            registry = _registries[trainer] = cls(trainer)
        return registry

    def subscribe(self, subscriber: LoaderSubscriber, trainer: Trainer) -> Callable[[], None]:
        """Hear of each loader from now on; call it in ``setup``, before the Trainer has asked for its loaders.

        A later subscriber's iterators are put around an earlier one's. The undo may be called more than once.
        """
        if not self._subscribers:
            strategy = trainer.strategy
            process = strategy.process_dataloader
            self._thread = threading.get_ident()
            self._undo = shadow(
                strategy, "process_dataloader", Replacement(process, lambda dataloader: self._pass(process, dataloader))
            )
        self._subscribers.append(subscriber)

        def undo() -> None:
            if not any(each is subscriber for each in self._subscribers):
                return
            self._subscribers = [each for each in self._subscribers if each is not subscriber]
            if not self._subscribers:
                self._end()

        return undo

    def find(self, loader: Any) -> SeenLoader | None:
        """What is known of a loader; None if it was made ready before anybody subscribed."""
        return next((each for each in self._seen if each.loader is loader or each.inner is loader), None)

    @property
    def training(self) -> list[SeenLoader]:
        """The training loaders that the Trainer has now, in its order; those that were not seen are left out."""
        trainer = self._trainer()
        found = [self.find(loader) for loader in (train_loaders(trainer) if trainer is not None else ())]
        return [each for each in found if each is not None]

    def forget_dropped(self) -> None:
        """Let go of training loaders that the Trainer has dropped; called as an epoch begins."""
        kept = self.training
        if not kept:
            return
        for each in [each for each in self._seen if each not in kept]:
            each._undo()
            self._seen.remove(each)

    def _pass(self, process: Callable[[object], object], loader: object) -> object:
        processed: object = process(loader)
        trainer = self._trainer()
        if trainer is not None and not (trainer.training and self.find(processed) is not None):
            self._add(processed, is_training=bool(trainer.training))
        return processed

    def _add(self, loader: Any, *, is_training: bool) -> None:
        seen = SeenLoader(loader, is_training=is_training)
        if is_training:
            self._seen.append(seen)
        elif any(isinstance(each, StartWatcher) for each in self._subscribers):
            self._watch_other(seen)
        if is_training and (name := iterator_maker(seen.inner)) is not None:
            seen._undo = shadow(seen.inner, name, _Maker(seen.inner, name, partial(self._iterate, seen)))
        for subscriber in self._subscribers:
            try:
                subscriber.loader_seen(seen)
            except Exception:  # whatever a loader of somebody's own does not like about it
                log.debug("%s failed on a loader", type(subscriber).__name__, exc_info=True)

    def _watch_other(self, seen: SeenLoader) -> None:
        """A loader of validation: nobody makes its iterators but itself."""
        name = iterator_maker(seen.inner)
        if name is None or any(each.inner is seen.inner for each in self._others):
            return
        seen._undo = shadow(seen.inner, name, _Maker(seen.inner, name, partial(self._start, seen)))
        self._others = [each for each in self._others if each.inner is not None] + [seen]

    def _start(
        self, seen: SeenLoader, method: Callable[[], Callable[[], Any]], make: Callable[[], Any] | None = None
    ) -> Any:
        create = make or method()
        for subscriber in self._subscribers:
            if isinstance(subscriber, StartWatcher):
                create = partial(subscriber.start_workers, seen, create)
        return create()

    def _iterate(self, seen: SeenLoader, method: Callable[[], Callable[[], Any]]) -> Any:
        trainer = self._trainer()
        here = threading.get_ident() == self._thread
        trains = trainer is not None and trainer.training and not (here and not is_begun_by_fetcher(trainer))
        if trains:
            self.forget_dropped()
        assert seen.inner is not None
        makers = [each for each in self._subscribers if isinstance(each, IteratorMaker)]
        start = partial(self._start, seen, method)
        if not trains:
            with ExitStack() as settings:
                for maker in makers:
                    settings.enter_context(maker.unmodified(seen.inner))
                return start()
        wanted = [each for each in [maker.iterator_wanted(seen.inner) for maker in makers] if each is not None]
        iterator = wanted[0](start) if wanted else start()
        seen._iterator = weakly(iterator)
        return iterator

    def _end(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        for loaders in (self._seen, self._others):
            while loaders:
                loaders.pop()._undo()


class _Maker:
    """In front of a loader's own way to make an iterator; pickled and copied as that.

    The loader holds this, which therefore holds the loader weakly. ``make`` is called with what gives the method: an
    iterator may hold that, and the loader the iterator.
    """

    def __init__(self, loader: Any, name: str, make: Callable[[Callable[[], Callable[[], Any]]], Any]) -> None:
        create = getattr(loader, name)
        is_its_own = getattr(create, "__self__", None) is loader
        self._create: Callable[[], Any] = weakref.WeakMethod(create) if is_its_own else lambda: create
        self._make = make

    def __call__(self) -> Any:
        return self._make(self._create)

    def __reduce__(self) -> tuple[Any, ...]:
        return identity, (self._create(),)


_registries: weakref.WeakKeyDictionary[Trainer, LoaderRegistry] = weakref.WeakKeyDictionary()
