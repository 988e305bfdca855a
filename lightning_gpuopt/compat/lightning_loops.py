"""The door to Lightning's loops: how they fetch batches and bring them to the device.

Like ``lightning.py``, it names each private attribute that it touches, as read in Lightning 2.5.0 to 2.6.6, and what
happens when it is gone. What looking ahead needs is checked once, by :func:`missing_names`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, Final

from lightning_gpuopt.compat.lightning import BASE_STRATEGY, LightningModule, Trainer, is_plain_hook

_FETCHER: Final = ("_PrefetchDataFetcher", "_DataFetcher")
_MAX_FRAMES: Final = 40
_FETCHER_ATTRIBUTES: Final = ("batches", "done", "fetched", "iterator", "length", "prefetch_batches")
_FETCHER_METHODS: Final = ("_start_profiler", "_stop_profiler")


def loops(trainer: Trainer) -> dict[str, Any]:
    """The loops that fetch batches, by what they do; reads ``fit_loop.epoch_loop.val_loop``."""
    return {
        "fit": trainer.fit_loop,
        "fit-validate": trainer.fit_loop.epoch_loop.val_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }


def missing_names(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """A private name that looking ahead needs, and that this Lightning does not have; None: all are there."""
    for name, loop in loops(trainer).items():
        for attribute in ("_data_fetcher", "_combined_loader"):
            if not hasattr(loop, attribute):
                return f"{attribute} of the {name} loop"
    if not callable(getattr(pl_module, "_call_batch_hook", None)):
        return "LightningModule._call_batch_hook"
    return None


def fetcher_of(loop: Any) -> Any:
    return loop._data_fetcher


def is_begun_by_fetcher(trainer: Trainer) -> bool:
    """Whether the iterator that is being made is the training loop's: its fetcher is among the callers.

    False if somebody else iterates the loader, as a callback that looks at a batch. Looks for ``__iter__`` or
    ``__next__`` of ``fit_loop._data_fetcher`` on the stack; were they others, nobody's iterator is the loop's.
    """
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    behind = {id(each) for each in (fetcher, getattr(fetcher, "stock", None)) if each is not None}
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_code.co_name in ("__iter__", "__next__") and id(frame.f_locals.get("self")) in behind:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def set_fetcher(loop: Any, fetcher: Any) -> None:
    """Have a loop take its batches from another fetcher; only before it begins to."""
    loop._data_fetcher = fetcher


def take_through(trainer: Trainer, kind: type[Any], make: Callable[[Any], Any]) -> None:
    """Have the training loop take its batches through an iterator of ours; does nothing if it does so already.

    Each epoch has a new iterator, of class ``kind``, which ``make`` makes of the epoch's. Reads
    ``fit_loop._data_fetcher``, and writes its ``iterator``, which gives ``(batch, batch_idx, dataloader_idx)``.
    """
    fetcher = _stock_fetcher(trainer)
    if not isinstance(fetcher.iterator, kind):
        fetcher.iterator = make(fetcher.iterator)


def replay(trainer: Trainer, batches: Iterator[Any]) -> None:
    """Have the training loop take other batches from now on, in one epoch without end, and end the loaders' workers.

    No validation comes any more. Called in ``on_train_batch_end``; ``batches`` gives ``(batch, batch_idx,
    dataloader_idx)`` for ever. Writes ``iterator``, ``length``, ``done`` and ``batches`` of the fetcher,
    ``_FitLoop.max_batches`` and ``_TrainingEpochLoop.batch_progress.is_last_batch``, and resets
    ``_FitLoop._combined_loader``, but for its ``_iterator``.
    """
    loop = trainer.fit_loop
    fetcher, placed = _stock_fetcher(trainer), fetcher_of(loop)
    if placed is not fetcher:
        placed.replay()
    fetcher.iterator, fetcher.length, fetcher.done = batches, None, False
    if hasattr(fetcher, "batches"):
        fetcher.batches = []
    loop.max_batches = float("inf")
    loop.epoch_loop.batch_progress.is_last_batch = False
    trainer.limit_val_batches = 0
    combined: Any = loop._combined_loader
    running = combined._iterator
    combined.reset()
    combined._iterator = running  # which still knows its length: the loop asks for it at its end


def _stock_fetcher(trainer: Trainer) -> Any:
    """Lightning's own fetcher of the training loop, also if one of ours stands in front of it."""
    fetcher = fetcher_of(trainer.fit_loop)
    return getattr(fetcher, "stock", fetcher)


def reset_loaders(trainer: Trainer) -> None:
    """End the workers of all loaders, by ``_combined_loader`` of each loop; their iterators are of no use any more."""
    for loop in loops(trainer).values():
        if (combined := getattr(loop, "_combined_loader", None)) is not None:
            combined.reset()


def why_not_replaceable(fetcher: Any) -> str | None:
    names = [cls.__name__ for cls in type(fetcher).__mro__]
    if "_DataLoaderIterDataFetcher" in names:
        return "the step fetches batches from dataloader_iter itself"
    methods = (getattr(fetcher, name, None) for name in _FETCHER_METHODS)
    is_known = names[:2] == list(_FETCHER) and all(hasattr(fetcher, name) for name in _FETCHER_ATTRIBUTES)
    if is_known and all(map(callable, methods)):
        return None
    return f"its data fetcher {names[0]} is not the one of Lightning 2.5 and 2.6"


class StockFetcher:
    """Lightning's own ``_PrefetchDataFetcher``, batch by batch.

    Reads its ``batches``, ``done``, ``fetched``, ``iterator``, ``length``, ``prefetch_batches``, ``_start_profiler``
    and ``_stop_profiler``, and the iterator of its CombinedLoader.
    """

    def __init__(self, fetcher: Any) -> None:
        self.fetcher = fetcher

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, and fetch nothing ahead: of an unsized loader Lightning would take one batch."""
        ahead, self.fetcher.prefetch_batches = self.fetcher.prefetch_batches, 0
        try:
            iter(self.fetcher)
        finally:
            self.fetcher.prefetch_batches = ahead
        return self

    def __next__(self) -> Any:
        """The next batch, its index and that of its loader."""
        return next(self.fetcher.iterator)

    def take_batches(self) -> list[Any]:
        """What Lightning has fetched ahead of an unsized loader; it is the caller's now."""
        batches, self.fetcher.batches = self.fetcher.batches, []
        return list(batches)

    @property
    def length(self) -> int | None:
        return None if self.fetcher.length is None else int(self.fetcher.length)

    @property
    def loaders(self) -> list[Any]:
        """The loaders behind the running iterators, in their order."""
        combined = self.fetcher.combined_loader
        running = combined._iterator
        at = getattr(running, "_iterator_idx", None)
        return list(combined.flattened) if at is None else list(combined.flattened[at : at + 1])

    @property
    def iterators(self) -> list[Any]:
        """The running iterators, in a list that is Lightning's."""
        return getattr(self.fetcher.combined_loader._iterator, "iterators", [])

    @property
    def has_one_loader(self) -> bool:
        """Whether no fetch makes a new iterator."""
        return len(self.fetcher.combined_loader.flattened) == 1

    @property
    def next_restarts_a_loader(self) -> bool:
        """Whether the next fetch makes a new iterator, which draws from the random state; True if nobody knows."""
        combined = self.fetcher.combined_loader
        running = combined._iterator
        if combined._mode in ("min_size", "max_size") or len(combined.flattened) == 1:
            return False
        if combined._mode == "sequential":
            at = running._iterator_idx
            if at + 1 >= len(combined.flattened):
                return False
            limit = float("inf") if running.limits is None else running.limits[at]
            length = length_of(combined.flattened[at])
            return length is None or running._idx >= min(length, limit)
        lengths = [length_of(loader) for loader in combined.flattened]
        if any(length is None for length in lengths):
            return True
        if len(set(lengths)) == 1:
            return False
        # Loaders that went on in the middle of their epoch end earlier than their length says.
        in_the_middle = self.is_stateful
        return in_the_middle or any(running._idx and length and running._idx % length == 0 for length in lengths)

    @property
    def is_stateful(self) -> bool:
        """Whether a loader has a position that belongs into a checkpoint."""
        loaders = self.fetcher.combined_loader.flattened
        return any(hasattr(each, "state_dict") and hasattr(each, "load_state_dict") for each in loaders)

    def states(self) -> Any:
        """The positions of the loaders, as Lightning writes them into a checkpoint; ``CombinedLoader._state_dicts``."""
        return self.fetcher.combined_loader._state_dicts()

    def teardown(self) -> None:
        self.fetcher.teardown()


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def put_loader_states(checkpoint: dict[str, Any], states: Any) -> None:
    """Write the training loaders' positions into a checkpoint's ``fit_loop``, over Lightning's, if it wrote some."""
    state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if "combined_loader" in state:
        state["combined_loader"] = states


def is_before_max_steps(trainer: Trainer, further: int, optimizer_steps: float | None, *, step_done: bool) -> bool:
    """Whether ``max_steps`` lets the batch that comes ``further`` after the current one be trained on.

    ``optimizer_steps`` are those that a batch takes in manual optimization (None: not known); ``step_done`` is whether
    the current batch's own is over. Reads ``_TrainingEpochLoop.batch_progress.current.ready``.
    """
    if trainer.max_steps is None or trainer.max_steps < 0:
        return True
    before = further - 1 + (not step_done)
    if trainer.lightning_module.automatic_optimization:
        rhythm = max(trainer.accumulate_grad_batches, 1)
        first = trainer.fit_loop.epoch_loop.batch_progress.current.ready + step_done
        steps: float = (first + before - 1) // rhythm - (first - 1) // rhythm
    elif not before:
        steps = 0
    elif optimizer_steps is None:
        return False
    else:
        steps = before * optimizer_steps
    return bool(trainer.global_step + steps < trainer.max_steps)


def batches_left(trainer: Trainer) -> int | None:
    """Training batches after the current one, up to the end of ``fit``; None if no end can be foreseen.

    By ``max_steps`` and ``max_epochs``; ``limit_train_batches`` is in the number of an epoch's batches. If the last
    batches of an epoch make a step of their own, or a module optimizes by itself, it is an estimate. Called in
    ``on_train_batch_end``. Reads ``_TrainingEpochLoop.batch_progress``.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    of_an_epoch, left = trainer.num_training_batches, []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and of_an_epoch != float("inf"):
        epochs = max(trainer.max_epochs - trainer.current_epoch - 1, 0)
        left.append(epochs * int(of_an_epoch) + int(of_an_epoch) - progress.current.ready)
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        steps = trainer.max_steps - trainer.global_step
        if trainer.lightning_module.automatic_optimization:
            rhythm = min(max(trainer.accumulate_grad_batches, 1), of_an_epoch)
            left.append(int(steps * rhythm - progress.current.ready % rhythm))
        elif trainer.global_step:
            left.append(int(steps * progress.total.ready / trainer.global_step))
    return max(min(left), 0) if left else None


def more_than_a_step_follows(trainer: Trainer, batch_idx: int) -> bool:
    """Whether in ``on_train_batch_end`` the epoch ends, or a validation may come; False also if that is unknown."""
    every = trainer.val_check_batch
    validates = every not in (None, float("inf")) and every > 0 and (batch_idx + 1) % every == 0
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or validates)


def why_batches_move_otherwise(trainer: Trainer, pl_module: LightningModule) -> str | None:
    for owner in (pl_module, trainer.datamodule):  # type: ignore[attr-defined]
        if owner is not None and not is_plain_hook(owner, "on_before_batch_transfer"):
            return f"{type(owner).__name__}.on_before_batch_transfer processes each batch before its copy"
    strategy = trainer.strategy
    owner = next(cls for cls in type(strategy).__mro__ if "batch_to_device" in vars(cls))
    if not owner.__module__.startswith(BASE_STRATEGY):
        return f"{owner.__name__} moves batches to the device in its own way"
    return None


def why_copied_elsewhere(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Why batches may be copied to a device by others than Lightning and this package; None if they are not."""
    steps = (getattr(pl_module, name) for name in ("training_step", "validation_step", "test_step", "predict_step"))
    if any("dataloader_iter" in signature(step).parameters for step in steps):
        return f"a step of {type(pl_module).__name__} fetches batches from dataloader_iter itself"
    return why_batches_move_otherwise(trainer, pl_module)


def own_transfer(trainer: Trainer, pl_module: LightningModule) -> Callable[[Any, Any, int], Any] | None:
    """The hook ``transfer_batch_to_device`` where the module or the data module has overridden it; called as usual."""
    owners = (pl_module, trainer.datamodule)  # type: ignore[attr-defined]
    if all(owner is None or is_plain_hook(owner, "transfer_batch_to_device") for owner in owners):
        return None
    return lambda batch, device, dataloader_idx: pl_module._call_batch_hook(
        "transfer_batch_to_device", batch, device, dataloader_idx
    )


def after_transfer(pl_module: LightningModule, batch: Any, dataloader_idx: int) -> Any:
    return pl_module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)


def place_in_epoch(trainer: Trainer) -> tuple[int, int, int | None]:
    """The epoch, how many of its training batches are finished, and how many it has (None: unknown); any thread."""
    batches = trainer.num_training_batches
    done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    return trainer.current_epoch, int(done), int(batches) if 0 < batches < float("inf") else None
