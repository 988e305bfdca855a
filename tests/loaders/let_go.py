"""Programs whose loaders are dropped while they run, and what is left of their iterators and workers then.

``python -m tests.loaders.let_go PROGRAM`` prints, for each event of the run, how many iterators with workers,
worker processes and datasets there are, with the garbage collector off: a reference cycle keeps them for ever.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning
import torch
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

Event = tuple[str, int, int, int]
"""What happens; iterators, worker processes and datasets that there are."""

_datasets: weakref.WeakSet[TensorDataset] = weakref.WeakSet()


class Census:
    """The iterators that live, as each event finds them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._iterators: list[weakref.ref[Any]] = []
        self._before = {each.pid for each in multiprocessing.active_children()}
        gc.collect()
        _datasets.clear()

    @contextmanager
    def taken(self) -> Iterator[None]:
        made = _MultiProcessingDataLoaderIter.__init__

        def noting(iterator: Any, *args: Any, **options: Any) -> None:
            self._iterators.append(weakref.ref(iterator))
            made(iterator, *args, **options)

        _MultiProcessingDataLoaderIter.__init__ = noting  # type: ignore[method-assign]
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            _MultiProcessingDataLoaderIter.__init__ = made  # type: ignore[method-assign]

    def note(self, event: str) -> None:
        alive = [each() for each in self._iterators if each() is not None]
        workers = sum(1 for each in multiprocessing.active_children() if each.pid not in self._before)
        self.events.append((event, len(alive), workers, len(_datasets)))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.lr, self.batch_size = 0.01, 4
        self.fails_at: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails_at is not None and self.global_step == self.fails_at:
            raise RuntimeError("in mid-epoch")
        batch = batch if isinstance(batch, (list, tuple)) else list(batch.values())
        tensors = [each for item in batch for each in (item if isinstance(item, (list, tuple)) else [item])]
        return sum(self.layer(each).mean() for each in tensors)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader_of(batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    samples = TensorDataset(torch.zeros(24, 2))
    _datasets.add(samples)
    return DataLoader(samples, batch_size, num_workers=1, persistent_workers=True, **options)


class Data(lightning.LightningDataModule):
    """Gives what these functions make."""

    def __init__(self, census: Census, train: Callable[[], Any], val: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._census, self._train, self._val = census, train, val

    def train_dataloader(self) -> Any:
        self._census.note("asked for training")
        return self._train()

    def val_dataloader(self) -> Any:
        if self._val is None:
            return []
        self._census.note("asked for validation")
        return self._val()


class _Notes(lightning.Callback):
    def __init__(self, census: Census) -> None:
        self._census = census

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._census.note("training")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._census.note("validation")


def trainer_of(census: Census, monitors: list[Any], **options: Any) -> lightning.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(callbacks=[_Notes(census), *monitors], **{"max_epochs": 3, **quiet, **options})


def reloads_several(census: Census, monitors: list[Any]) -> None:
    def several() -> Any:
        return CombinedLoader({"a": loader_of(), "b": loader_of()}, "min_size")

    trainer = trainer_of(census, monitors, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Module(), datamodule=Data(census, several, lambda: [loader_of(), loader_of()]))


def reloads_pinned(census: Census, monitors: list[Any]) -> None:
    """Loaders with a ``collate_fn`` and a ``worker_init_fn`` that lead back to whoever holds them."""

    class Holder:
        def __init__(self) -> None:
            self.loaders: list[Any] = []

        def start(self, worker: int) -> None: ...

        def collate(self, samples: list[Any]) -> Any:
            return torch.utils.data.default_collate(samples)

    def made() -> Any:
        holder = Holder()
        return loader_of(collate_fn=holder.collate, worker_init_fn=holder.start)

    trainer = trainer_of(census, monitors, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Module(), datamodule=Data(census, made, made))


def folds(census: Census, monitors: list[Any]) -> None:
    for _ in range(2):
        trainer = trainer_of(census, monitors, max_epochs=2)
        loader, validation = loader_of(), loader_of()
        trainer.fit(Module(), loader, validation)
        trainer.fit_loop._combined_loader = trainer.fit_loop._data_fetcher = None
        del loader
        census.note("fitted")
        for each in trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop:
            each._combined_loader = each._data_fetcher = None
        del validation
        census.note("validated")


def fits_again(census: Census, monitors: list[Any]) -> None:
    """One Trainer, and new loaders for each of its fits."""
    trainer, module = trainer_of(census, monitors, max_epochs=1), Module()
    for _ in range(2):
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader_of(), loader_of())
        census.note("fitted")


def deleted(census: Census, monitors: list[Any]) -> None:
    """A Trainer is in cycles of its own: one collection takes it, and its loaders go with it."""
    for _ in range(2):
        trainer = trainer_of(census, monitors, max_epochs=2)
        trainer.fit(Module(), loader_of(), loader_of())
        del trainer
        for each in monitors:  # Lightning gives each callback methods of the module, which holds its Trainer
            del each.log, each.log_dict
        gc.collect()
        census.note("deleted")


def fails(census: Census, monitors: list[Any]) -> None:
    for _ in range(2):
        module = Module()
        module.fails_at = 8
        trainer = trainer_of(census, monitors)
        with suppress(RuntimeError):
            trainer.fit(module, datamodule=Data(census, loader_of, loader_of))
        census.note("failed")
        trainer.fit_loop._combined_loader = trainer.fit_loop._data_fetcher = None
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop._combined_loader = loop._data_fetcher = None
        census.note("dropped")


def tuned(census: Census, monitors: list[Any]) -> None:
    module = Module()
    trainer = trainer_of(census, monitors, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    data = Data(census, lambda: loader_of(data.batch_size))
    data.batch_size = 4
    tuner = Tuner(trainer)
    tuner.lr_find(module, datamodule=data, num_training=15, early_stop_threshold=None, update_attr=False)
    census.note("learning rate")
    tuner.scale_batch_size(module, datamodule=data, max_trials=2, steps_per_trial=2)
    census.note("batch size")
    trainer.fit(module, datamodule=data)


PROGRAMS: dict[str, Callable[[Census, list[Any]], None]] = {
    each.__name__: each
    for each in (
        reloads_several,
        reloads_pinned,
        folds,
        fits_again,
        deleted,
        fails,
        tuned,
    )
}


def events_of(program: str, *monitors: Any) -> list[Event]:
    census = Census()
    with census.taken():
        PROGRAMS[program](census, list(monitors))
        census.note("end")
    gc.collect()
    return census.events


if __name__ == "__main__":
    print(json.dumps(events_of(sys.argv[1])))
