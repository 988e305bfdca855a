"""The base of all DataModules: the order of samples, their ranks, and the position after a resume."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_gpuopt.compat import lightning
from lightning_gpuopt.compat.lightning import LightningDataModule, MisconfigurationException, Trainer, rank_zero_warn
from lightning_gpuopt.loading.order import Order, why_other_order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.loading.samples import SkippedSamples
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.utils.arguments import flag, whole_number

Data: TypeAlias = str | os.PathLike[str] | Dataset[Any]

STAGES: Final = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class ResumableDataModule(LightningDataModule):
    """Defines the order of samples; a subclass makes the loaders.

    Args:
        sources: What each of ``train``, ``val``, ``test`` and ``predict`` reads; None: nothing.
        batch_size: Samples per batch and rank.
        seed: Seed of the orders.
        shuffle: Reshuffle `train` in each epoch.
    """

    def __init__(self, sources: dict[str, Any], batch_size: int, seed: int, shuffle: bool) -> None:
        super().__init__()
        self._sources = sources
        self.batch_size = whole_number("batch_size", batch_size, "samples per batch and rank", least=1)
        self.seed = whole_number("seed", seed, "a whole number", least=0)
        self.shuffle = flag("shuffle", shuffle)
        self._attached()
        if isinstance(sources["train"], (list, tuple)):
            raise MisconfigurationException(
                "train is one dataset, got a list: combine them with torch.utils.data.ConcatDataset"
            )
        self._datasets: dict[str, list[Any]] = {}
        self._skipped: dict[str, SkippedSamples] = {}
        self._skipped_of: Trainer | None = None
        self._sampler: ElasticSampler | None = None
        self._sampler_of: Trainer | None = None
        self._resume: dict[str, Any] | None = None
        self._resume_of: Trainer | None = None
        self.allow_zero_length_dataloader_with_multiple_devices = False

    @override
    def _attached(self) -> None:
        """Without data for it: as if there were no hook for validation, which Lightning then leaves out."""
        if self._sources["val"] is None and type(self).val_dataloader is ResumableDataModule.val_dataloader:
            self.val_dataloader = partial(LightningDataModule.val_dataloader, self)  # type: ignore[method-assign]

    def _open_source(self, source: Any, name: str) -> Any:
        """The dataset of a path or dataset that came as ``train``, ``val``, ``test`` or ``predict``."""
        raise NotImplementedError

    def _eval_loader(self, name: str, at: int, dataset: Any) -> Any:
        """A loader for ``val``, ``test`` or ``predict``; ``at`` is the position among that stage's datasets."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a run: its sampler knows its Trainer."""
        return {**vars(self), "_sampler": None, "_sampler_of": None}

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open the stage's datasets.

        Raises:
            FileNotFoundError: A path does not exist.
            StorageError: It is not a lightning-gpuopt dataset, or it is damaged.
            ValueError: It is empty.
        """
        for name in self._names(stage):
            self._open(name)

    def _given(self, name: str) -> list[Any]:
        source = self._sources[name]
        if source is None:
            return []
        return list(source) if isinstance(source, (list, tuple)) else [source]

    def _names(self, stage: Any) -> tuple[str, ...]:
        """What a stage reads; Lightning gives it as a ``TrainerFn``, users as a text."""
        return STAGES.get(getattr(stage, "value", stage), tuple(self._sources))

    def _open(self, name: str) -> list[Any]:
        if name not in self._datasets:
            self._datasets[name] = [self._open_source(source, name) for source in self._given(name)]
        return self._datasets[name]

    def _needed(self, name: str) -> list[Any]:
        if self._sources[name] is None:
            raise MisconfigurationException(
                f"{type(self).__name__} was created without {name}=: pass the path of a dataset, or a dataset"
            )
        return self._open(name)

    @override
    def val_dataloader(self) -> Any:
        """The validation loader, or a list of them; in the order stored."""
        return self._eval_loaders("val")

    @override
    def test_dataloader(self) -> Any:
        """As `val_dataloader`."""
        return self._eval_loaders("test")

    @override
    def predict_dataloader(self) -> Any:
        """As `val_dataloader`."""
        return self._eval_loaders("predict")

    def _eval_loaders(self, name: str) -> Any:
        loaders = [self._eval_loader(name, at, dataset) for at, dataset in enumerate(self._needed(name))]
        return loaders if isinstance(self._sources[name], (list, tuple)) else loaders[0]

    def _train_sampler(self, order: Order, *, drop_last: bool = False) -> ElasticSampler:
        """The training sampler, which continues from a checkpoint."""
        sampler = self._make_sampler(order, drop_last)
        trainer, before = self.trainer, self._sampler
        if trainer is not None or before is None or not sampler.follow(before):
            self._continue(sampler)
        if trainer is not None:
            if trainer.current_epoch > sampler.epoch:
                sampler.set_epoch(trainer.current_epoch)
            epoch, is_next = lightning.epoch_that_begins() or (0, False)
            if is_next and epoch > sampler.epoch:  # limit_train_batches had ended the epoch of the checkpoint
                sampler.epoch = epoch
            if before is not None and self._sampler_of is trainer:  # reloaded: until the next batch, this counts
                sampler.iterated_epoch = before.iterated_epoch
            sampler.epoch_now = partial(_current_epoch, trainer)
            sampler.on_epoch = self._epoch_begins
        self._sampler, self._sampler_of = sampler, trainer
        return sampler

    def _make_sampler(self, order: Order, drop_last: bool = False) -> ElasticSampler:
        rank, world_size = self._ranks
        return ElasticSampler(order, self.batch_size, rank=rank, world_size=world_size, drop_last=drop_last)

    @property
    def _ranks(self) -> tuple[int, int]:
        if self.trainer is not None:
            # Not the world's rank and size: under tensor parallelism several ranks read the same.
            given = self.trainer.distributed_sampler_kwargs
            return (0, 1) if given is None else (int(given["rank"]), int(given["num_replicas"]))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @property
    def _local_ranks(self) -> int:
        """Ranks of this node, which share it alike."""
        return 1 if self.trainer is None else max(1, self.trainer.num_devices)

    @property
    def _local_cpus(self) -> int:
        """CPUs that this rank may use; at least 1."""
        return max(1, int(usable_cpus() / self._local_ranks))

    @property
    def _on_cuda(self) -> bool:
        if self.trainer is None:
            return torch.cuda.is_available()
        return self.trainer.strategy.root_device.type == "cuda"

    @property
    def num_skipped(self) -> int:
        """Samples skipped because they could not be read, in all processes, with ``on_corrupt="skip"``."""
        return sum(len(each.read()) for each in self._skipped.values())

    def _skip_list(self, name: str) -> SkippedSamples:
        if self._skipped_of is not self.trainer:  # each run has lists of its own
            self._skipped, self._skipped_of = {}, self.trainer
        if name not in self._skipped:
            root = "." if self.trainer is None else self.trainer.log_dir or self.trainer.default_root_dir
            file = f"skipped-{name}.csv" if name else "skipped.csv"
            self._skipped[name] = SkippedSamples(Path(root, "gpuopt", file))
            if self.trainer is None or self.trainer.is_global_zero:
                self._skipped[name].clear()
        return self._skipped[name]

    def _report_skipped(self) -> None:
        for each in self._skipped.values():
            if (text := each.new_skips()) is not None:
                rank_zero_warn(text)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position of training, as plain numbers.

        Returns:
            ``seed``, ``epoch``, ``consumed`` (samples of this epoch consumed by the steps of all ranks), ``batches``
            (the number of those steps); and the settings of the order: ``num_samples``, ``shuffle``,
            ``shuffle_window``, ``weighted``.
        """
        sampler, trainer = self._sampler, self.trainer
        if sampler is None or trainer is None:
            return dict(self._resume or {})
        done = lightning.processed_batches(trainer)
        return {
            "epoch": sampler.iterated_epoch,
            "consumed": sampler.consumed_after(done, sampler.iterated_epoch),
            "batches": done,
            **self._what_makes(sampler.order),
        }

    def _what_makes(self, order: Order) -> dict[str, Any]:
        return {"num_samples": order.num_samples, "seed": self.seed, "shuffle": self.shuffle}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint; the next training loader begins there."""
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return  # test, validate and predict read checkpoints, too
        self._resume, self._resume_of = dict(state_dict), self.trainer
        if self.trainer is None:
            self._sampler = None

    @override
    def teardown(self, stage: str | None = None) -> None:
        """Forget a checkpoint's position; the next fit starts at the beginning."""
        self._report_skipped()
        if stage == "fit":
            self._resume = None

    def _continue(self, sampler: ElasticSampler) -> None:
        state = self._resume
        if not state or self._resume_of not in (None, self.trainer):  # of a fit that came to nothing
            self._resume = None
            return
        self._resume_of = self.trainer
        if (why := why_other_order(state, self._what_makes(sampler.order))) is not None:
            rank_zero_warn(f"{type(self).__name__}: the checkpoint was saved {why}")
        consumed = min(int(state["consumed"]), sampler.order.num_samples)
        sampler.resume(int(state["epoch"]), consumed, int(state["batches"]))

    def _epoch_begins(self, num_batches: int) -> None:
        self._report_skipped()
        if self.trainer is not None:
            if self._resume and self._sampler is not None and self._sampler.epoch != self._resume["epoch"]:
                lightning.leave_finished_epoch(self.trainer)
            lightning.set_train_batches(self.trainer, num_batches)


def _current_epoch(trainer: Trainer) -> int:
    return trainer.current_epoch


def is_path(source: Any) -> bool:
    return isinstance(source, (str, os.PathLike))
