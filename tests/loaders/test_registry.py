"""LoaderRegistry: one shadow each of process_dataloader and _get_iterator, however many subscribe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt.loaders.kinds import dataloader_in
from lightning_gpuopt.loaders.registry import Create, LoaderRegistry, SeenLoader
from tests.helpers import FEATURES, TinyModel, tiny_trainer


class Subscriber:
    """Notes what it hears of, and wraps iterators where it is told to."""

    def __init__(self, name: str, log: list[Any], *, fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails
        self.seen: list[SeenLoader] = []

    def loader_seen(self, seen: SeenLoader) -> None:
        self.seen.append(seen)
        if self.fails:
            raise RuntimeError("not a loader for me")


class Maker(Subscriber):
    """Makes iterators of its own, or leaves them to others."""

    def __init__(self, name: str, log: list[Any], *, makes: bool = True) -> None:
        super().__init__(name, log)
        self.makes = makes

    def iterator_wanted(self, loader: DataLoader[Any]) -> Callable[[Create], Any] | None:
        self.log.append(f"{self.name} is asked")
        return self._make if self.makes else None

    def _make(self, create: Create) -> Any:
        self.log.append(f"{self.name} makes")
        return create()

    @contextmanager
    def unmodified(self, loader: DataLoader[Any]) -> Iterator[None]:
        self.log.append(f"{self.name} as given")
        yield


class Subscribes(Callback):
    """Subscribes in setup; at the end of the fit the registry has undone everything."""

    def __init__(self, *subscribers: Subscriber, peeks: bool = False) -> None:
        self.subscribers, self.peeks = subscribers, peeks
        self.undo: list[Callable[[], None]] = []
        self.current: list[SeenLoader] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        registry = LoaderRegistry.of(trainer)
        self.undo += [registry.subscribe(each, trainer) for each in self.subscribers]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.peeks:
            next(iter(self.subscribers[0].seen[0].inner))  # type: ignore[arg-type]

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.current = LoaderRegistry.of(trainer).training
        self.iterator = self.current[0].iterator if self.current else None
        self.shadowed = list(vars(trainer.strategy)).count("process_dataloader")


def train(tmp_path: Path, *callbacks: Callback, loader: Any = None, **kwargs: Any) -> Any:
    trainer = tiny_trainer(tmp_path, callbacks=list(callbacks), **{"max_epochs": 1, "max_steps": -1, **kwargs})
    trainer.fit(TinyModel(num_batches=3), *([] if loader is None else [loader]))
    return trainer


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(4, FEATURES))


class Wraps:
    """A loader of somebody's own, around a DataLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


def tensors(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader([[torch.ones(FEATURES)]] * 6, batch_size=2, **kwargs)  # type: ignore[arg-type]


def test_all_hear_of_the_training_loader_and_of_the_others_and_one_that_fails_hinders_nobody(tmp_path: Path) -> None:
    log: list[Any] = []
    first, fails, last = Subscriber("a", log), Subscriber("b", log, fails=True), Subscriber("c", log)
    callback = Subscribes(first, fails, last)
    trainer = train(tmp_path, callback, limit_val_batches=1, num_sanity_val_steps=0)
    for each in (first, fails, last):
        assert [seen.is_training for seen in each.seen].count(True) == 1
        assert not all(seen.is_training for seen in each.seen)
    assert callback.current[0].loader is first.seen[0].loader is trainer.train_dataloader
    assert callback.shadowed == 1


def test_a_later_subscriber_makes_iterators_around_an_earlier_one_s(tmp_path: Path) -> None:
    log: list[Any] = []
    makers = Maker("leaves", log, makes=False), Subscriber("none", log), Maker("first", log), Maker("second", log)
    train(tmp_path, Subscribes(*makers), max_epochs=2)
    assert log == ["leaves is asked", "first is asked", "second is asked", "first makes"] * 2


def test_a_callback_that_looks_at_a_batch_is_not_the_training_loop(tmp_path: Path) -> None:
    log: list[Any] = []
    train(tmp_path, Subscribes(Maker("maker", log), peeks=True))
    assert sorted(log) == ["maker as given", "maker is asked", "maker makes"]


def test_the_iterator_of_a_wrapped_dataloader_is_known(tmp_path: Path) -> None:
    wrapped = Wraps(tensors(num_workers=1))
    callback = Subscribes(Subscriber("a", []))
    train(tmp_path, callback, loader=wrapped)
    assert callback.current[0].loader is wrapped
    assert callback.current[0].inner is wrapped.loader
    assert callback.iterator._num_workers == 1


def test_nothing_is_left_once_all_have_left(tmp_path: Path) -> None:
    loader = tensors()
    callback = Subscribes(Subscriber("a", []), Maker("b", []))
    trainer = train(tmp_path, callback, loader=loader)
    callback.undo[0]()
    callback.undo[0]()  # may be called more than once
    assert "process_dataloader" in vars(trainer.strategy)
    assert "_get_iterator" in vars(loader)
    callback.undo[1]()
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "_get_iterator" not in vars(loader)
    assert LoaderRegistry.of(trainer).find(loader) is None


class Watches(Subscriber):
    """Is there when workers start."""

    def start_workers(self, seen: SeenLoader, create: Callable[[], Any]) -> Any:
        self.log.append("trains" if seen.is_training else "validates")
        return create()


def test_who_is_there_when_workers_start_is_so_for_validation_too_and_leaves_its_loader_as_it_was(
    tmp_path: Path,
) -> None:
    log: list[Any] = []
    callback, validation = Subscribes(Watches("a", log)), tensors()
    trainer = tiny_trainer(tmp_path, callbacks=[callback], max_steps=-1, max_epochs=2, limit_val_batches=1)
    trainer.fit(TinyModel(num_batches=3), tensors(), validation)
    assert log == ["validates", "trains", "validates", "trains", "validates"]  # the first to see whether it can
    assert "_get_iterator" in vars(validation)
    callback.undo[0]()
    assert "_get_iterator" not in vars(validation)


def test_reloaded_loaders_are_let_go(tmp_path: Path) -> None:
    subscriber = Subscriber("a", [])

    class Forgets(Subscribes):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            LoaderRegistry.of(trainer).forget_dropped()

    callback = Forgets(subscriber)
    trainer = train(tmp_path, callback, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    first, second, third = (seen.inner for seen in subscriber.seen if seen.is_training)
    assert (first, second) == (None, None)
    assert "_get_iterator" in vars(third)
    assert LoaderRegistry.of(trainer).find(third) is not None


class Deeper:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Any:
        return iter(())


def test_no_property_of_a_loader_is_asked_for() -> None:
    class Fails:
        @property
        def pipeline(self) -> Any:
            raise RuntimeError("call build() first")

    assert dataloader_in(Fails()) is None
    assert dataloader_in(Deeper(inner=Fails(), loader=(one := tensors()))) is one


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        (lambda one, two: one, True),
        (lambda one, two: Wraps(one), True),
        (lambda one, two: Deeper(pipeline=[one, str]), True),  # as WebLoader's
        (lambda one, two: Deeper(name="x", inner=Wraps(one)), True),
        (lambda one, two: Deeper(a=one, b=one), True),
        (lambda one, two: Deeper(train=one, val=two), False),
        (lambda one, two: [one], False),
        (lambda one, two: (each for each in (one,)), False),
        (lambda one, two: "text", False),
    ],
    ids=["itself", "attribute", "first-stage", "two-deep", "twice", "two", "list", "generator", "text"],
)
def test_the_dataloader_in_a_loader(loader: Callable[..., Any], found: bool) -> None:
    one, two = tensors(), DataLoader(Stream())
    assert dataloader_in(loader(one, two)) is (one if found else None)
