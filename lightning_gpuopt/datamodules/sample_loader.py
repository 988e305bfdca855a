"""``SampleLoader``: a DataLoader whose processes share out single samples, in the order of its batches."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate
from typing_extensions import override

from lightning_gpuopt.compat.dataloader import copy_of
from lightning_gpuopt.compat.lightning import (
    Trainer,
    epoch_that_begins,
    is_cycled,
    leave_finished_epoch,
    processed_batches,
    rank_zero_info,
    rank_zero_warn,
    set_train_batches,
    train_loaders,
    trainer_that_asks,
)
from lightning_gpuopt.datamodules.auto_workers import settle_workers
from lightning_gpuopt.loading.elastic_loader import ElasticLoader, Reading, timed_as
from lightning_gpuopt.loading.engine.engine import MAX_AHEAD_BYTES
from lightning_gpuopt.loading.order import Order, why_other_order
from lightning_gpuopt.loading.sampler import ElasticBatchSampler, ElasticSampler, PlacedBatches, epoch_of_rank
from lightning_gpuopt.loading.samples import SkippedSamples
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.timeline.worker_clock import untimed
from lightning_gpuopt.utils.arguments import choice, flag, or_auto, refuse, whole_number

_OF_WORKERS: Final = ("prefetch_factor", "timeout", "multiprocessing_context")  # no arguments without workers


class SampleLoader(ElasticLoader):
    """A DataLoader in which each sample, not each batch, is a task of the worker processes.

    A worker writes a sample straight into its row of the batch, in memory that it shares with the training process.
    Batches come in order and are those that ``default_collate`` makes; a slow sample delays its own batch only, and
    nothing is needed of ``/dev/shm``. Samples that differ in shape or type, a `collate_fn` of your own, a dataset with
    ``__getitems__`` and a `batch_sampler` of your own class are loaded by torch's workers, with the same result.

    Without `sampler` and `batch_sampler` the order is a function of seed and epoch, each sample of an epoch goes to one
    rank, and a checkpoint resumes with the next sample on any number of ranks and workers. What a dataset draws from
    the global random states of torch, NumPy and Python depends on seed, epoch and position only.

    Args:
        dataset: A map-style dataset.
        batch_size: Samples per batch and rank.
        shuffle: Reshuffle in each epoch.
        sampler: Your own order of samples, as for ``DataLoader``.
        batch_sampler: Your own batches of indices, as for ``DataLoader``.
        num_workers: Worker processes. ``"auto"``: one for each CPU this rank can use; none if the samples are small
            records of an LMDB, which are gathered faster without workers.
        collate_fn: Makes a batch of a list of samples; None: torch's ``default_collate``.
        drop_last: Drop samples that do not fill a batch on every rank.
        pin_memory: Batches in page-locked memory. ``"auto"``: if CUDA is available.
        seed: Seed of the order, and of the random numbers drawn as a sample is read.
        on_corrupt: Action for a sample whose image cannot be decoded: ``"raise"`` an error, or ``"skip"``: its batch is
            smaller, and it is listed in ``gpuopt/skipped.csv``.
        max_ahead_mib: MiB that batches made ahead may take. At least two are made; a loader with slow samples makes as
            many as bridge them.
        others: Any other argument of ``DataLoader``, such as ``prefetch_factor``, ``worker_init_fn`` or ``timeout``.
            Workers persist between epochs unless ``persistent_workers=False``.

    Raises:
        ValueError: An argument is out of its range, or conflicts with another.

    Example::

        loader = SampleLoader(dataset, batch_size=64, shuffle=True)
        trainer.fit(model, loader)
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool | None = False,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[Sequence[Any]] | Iterable[Sequence[Any]] | None = None,
        num_workers: int | Literal["auto"] = "auto",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool | Literal["auto"] = "auto",
        seed: int = 0,
        on_corrupt: Literal["raise", "skip"] = "raise",
        *,
        max_ahead_mib: int = MAX_AHEAD_BYTES >> 20,
        **others: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            refuse("dataset", "a map-style dataset, which has __getitem__ and __len__", dataset, wrong_type=True)
        batch_size = whole_number("batch_size", batch_size, "samples per batch and rank", least=1)
        workers = or_auto(whole_number, "num_workers", num_workers, "processes", least=0)
        self.seed = whole_number("seed", seed, "a whole number", least=0)
        self.on_corrupt = choice("on_corrupt", on_corrupt, ("raise", "skip"))
        self.max_ahead_mib = whole_number("max_ahead_mib", max_ahead_mib, "MiB", least=1)
        self.max_ahead_bytes = self.max_ahead_mib << 20
        skipped = SkippedSamples(Path("gpuopt", "skipped.csv")) if on_corrupt == "skip" else None
        own = None if untimed(collate_fn) in (None, default_collate) else collate_fn
        self._reading = Reading.of(dataset, seed=self.seed, skipped=skipped, collate_fn=own, memory_format="contiguous")
        shuffle, is_ours = (
            bool(shuffle is not None and flag("shuffle", shuffle)),
            sampler is None and batch_sampler is None,
        )
        if is_ours:
            order = Order(len(dataset), self.seed, shuffle)  # type: ignore[arg-type]
            batches = ElasticBatchSampler(ElasticSampler(order, batch_size, drop_last=drop_last), batch_size, drop_last)
            given: dict[str, Any] = {"batch_sampler": batches}
        elif batch_sampler is not None:
            given = {"batch_sampler": batch_sampler, "batch_size": batch_size, "shuffle": shuffle, "sampler": sampler}
        else:
            given = {"sampler": sampler, "batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
        unasked = workers == "auto"
        number = max(1, int(usable_cpus() / _local_ranks())) if workers == "auto" else int(workers)
        if unasked and is_ours and self._reading.without_processes(batches):
            number = 0
            others = {name: value for name, value in others.items() if name not in _OF_WORKERS}
        if pin_memory == "auto":
            pin_memory = torch.cuda.is_available()
        super().__init__(
            dataset,
            **given,
            collate_fn=collate_fn,
            num_workers=number,
            pin_memory=flag("pin_memory", pin_memory),
            **{**others, "persistent_workers": number > 0 and others.get("persistent_workers", True)},
        )
        self.cpus = number if unasked else 0
        self._before = 0  # batches that a resumed epoch had before, in an order of the user's
        self._resumes = False  # whether the next epoch is that one
        self._running: weakref.ref[Any] | None = None  # the epoch's iterator
        self._yielded = 0  # batches that an iterator has given which is not there any more
        if (why := settle_workers(self, _local_ranks(), unasked=unasked)) is not None:
            rank_zero_warn(f"SampleLoader: {why}")

    @override
    def _reader(self) -> ElasticLoader:
        """A copy over the dataset as it is read; this one shows the user's own dataset and ``collate_fn``."""
        source, collate_fn = self._reading
        changed: dict[str, Any] = {"dataset": source, "collate_fn": timed_as(self.collate_fn, collate_fn)}
        if self._sampler is None:
            changed["batch_sampler"] = PlacedBatches(self.batch_sampler, partial(_place, weakref.ref(self)))
        return copy_of(self, **changed)  # type: ignore[return-value]

    @override
    def _say_that_workers_load(self, why: str) -> None:
        rank_zero_info(f"SampleLoader: DataLoader workers load whole batches here: {why}")

    @property
    def _sampler(self) -> ElasticSampler | None:
        """The sampler of this package's own order, with this rank's place; None: the order is the user's."""
        found = self.sampler
        if not isinstance(found, ElasticSampler) or not isinstance(self.batch_sampler, ElasticBatchSampler):
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            found.rank, found.num_replicas = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return found

    @override
    def __len__(self) -> int:
        """Batches of an epoch on this rank; of a resumed one with those done before."""
        return super().__len__() if self._sampler is None else len(self.batch_sampler)  # type: ignore[arg-type]

    @override
    def __iter__(self) -> Any:
        if (sampler := self._sampler) is not None and sampler.padding and not self.epochs + 1:
            rank_zero_warn(
                f"SampleLoader: {len(self.dataset)} samples on {sampler.num_replicas} ranks: "  # type: ignore[arg-type]
                f"{sampler.padding} go to more than one rank, so that all ranks have equally many batches"
            )
        if sampler is not None and (number := len(self.dataset)) != sampler.order.num_samples:  # type: ignore[arg-type]
            sampler.order, self._iterator = Order(number, self.seed, sampler.shuffle), None  # workers have the old one
        if sampler is not None and is_cycled():
            sampler.start_over()
        if sampler is not None and (begins := epoch_that_begins()) is not None:
            is_resumed = sampler.epoch_now is not None and sampler.epoch_now() is not None
            epoch, is_next = begins
            if is_next or not is_resumed:  # else it goes on in the epoch of its state
                sampler.epoch = epoch
        self._before, self._resumes = self._before if self._resumes else 0, False
        self._running, self._yielded = None, 0
        iterator = super().__iter__()
        self._running = weakref.ref(iterator, partial(_note_end, weakref.ref(self), vars(iterator)))
        return iterator

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_running": None, "_yielded": 0}

    # -- resuming

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position of the running epoch, as plain numbers.

        Returns:
            ``epoch``, ``batches`` (taken of this epoch on this rank), and what makes the order: ``num_samples``,
            ``seed``, ``shuffle``. With this package's order also ``consumed``: the samples that all ranks together have
            had.
        """
        sampler, trainer = self._sampler, trainer_that_asks()
        if trainer is not None and len(train_loaders(trainer)) > 1:  # each at a place of its own
            trainer = None
        epoch = max(self.epochs, 0) if sampler is None else sampler.iterated_epoch
        batches = self._taken(epoch) if trainer is None else processed_batches(trainer)
        consumed = {} if sampler is None else {"consumed": sampler.consumed_after(batches, epoch)}
        return {**self._order(), "epoch": epoch, "batches": batches, **consumed}

    def _taken(self, epoch: int) -> int:
        """Batches taken from the iterator of an epoch, with those before a resume."""
        before = self._before if self._sampler is None else self._sampler.steps_done(epoch)
        running = None if self._running is None else self._running()
        return before + (self._yielded if running is None else int(running._num_yielded))

    def _order(self) -> dict[str, Any]:
        shuffle = None if (sampler := self._sampler) is None else sampler.shuffle
        number = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        return {"num_samples": number, "seed": self.seed, "shuffle": shuffle}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position: the next iteration begins with the first sample that was not taken."""
        if (why := why_other_order(state_dict, self._order())) is not None:
            rank_zero_warn(f"SampleLoader: the state was saved {why}")
        self._running, self._yielded = None, 0
        epoch, batches = int(state_dict["epoch"]), int(state_dict["batches"])
        if (sampler := self._sampler) is None:
            try:
                is_over = batches >= len(self)
            except TypeError:  # a sampler without an end
                is_over = False
            self.epochs, self._before, self._resumes = (epoch, 0, False) if is_over else (epoch - 1, batches, True)
            return
        consumed = min(int(state_dict.get("consumed", 0)), sampler.order.num_samples)
        sampler.resume(epoch, consumed, batches)
        if (trainer := trainer_that_asks()) is not None:
            resumed = _ResumedRun(weakref.ref(trainer), weakref.ref(sampler), epoch)
            sampler.epoch_now, sampler.on_epoch = resumed.epoch_now, resumed.epoch_begins
            set_train_batches(trainer, sampler.num_batches())


@dataclass(frozen=True)
class _ResumedRun:
    """Tells a resumed Trainer how long its epochs are now, as ranks or batches may be others; and the sampler which."""

    trainer: weakref.ref[Trainer]
    sampler: weakref.ref[ElasticSampler]
    resumed: int

    @property
    def _running(self) -> Trainer | None:
        trainer = self.trainer()
        return trainer if trainer is not None and trainer.training else None

    def epoch_now(self) -> int | None:
        # Lightning counts an epoch that max_steps cut short as done, and yet goes on in it.
        return None if self._running is None else self._running.current_epoch

    def epoch_begins(self, num_batches: int) -> None:
        if (trainer := self._running) is not None and (sampler := self.sampler()) is not None:
            if sampler.epoch != self.resumed:
                leave_finished_epoch(trainer)
            set_train_batches(trainer, num_batches)


def _place(loader: weakref.ref[SampleLoader]) -> tuple[int, int]:
    """The epoch that a loader begins, as random numbers depend on it, and how many batches of it were taken before."""
    it = loader()
    return (0, 0) if it is None else (epoch_of_rank(max(it.epochs, 0)), it._before)


def _note_end(loader: weakref.ref[SampleLoader], attributes: dict[str, Any], _: Any) -> None:
    """Note how many batches an iterator has given that is not there any more, as after a ``break``."""
    if (it := loader()) is not None:
        it._running, it._yielded = None, int(attributes["_num_yielded"])


def _local_ranks() -> int:
    """Ranks on this machine, as far as the launcher or the process group says."""
    if (told := os.environ.get("LOCAL_WORLD_SIZE", "")).isdigit():
        return max(1, int(told))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return min(torch.distributed.get_world_size(), torch.cuda.device_count() or torch.distributed.get_world_size())
    return 1
