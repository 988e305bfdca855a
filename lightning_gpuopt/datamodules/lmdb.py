"""LMDBDataModule: stored datasets for the four stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_gpuopt import _lightning
from lightning_gpuopt._arguments import choice, flag, real_number, refuse, whole_number
from lightning_gpuopt._lightning import LightningDataModule, MisconfigurationException, Trainer, rank_zero_warn
from lightning_gpuopt.images.normalize import Normalize
from lightning_gpuopt.loading.loader import ElasticLoader, make_loader, unwrap
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.storage.gather import plan
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.telemetry.host import usable_cpus

Source: TypeAlias = str | os.PathLike[str] | Dataset[Any]

_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


class LMDBDataModule(LightningDataModule):
    """Loaders over LMDB datasets: shuffled, sharded over the ranks, and resumable to the sample.

    Every sample of an epoch goes to exactly one rank, in an order that is a function of the seed and the epoch. A
    checkpoint taken in the middle of an epoch holds how many samples the step has had, so that a resumed run goes on
    with the next one, on any number of ranks and workers. Samples are compared with their checksums, except where small
    records are gathered in batches.

    Args:
        train: Path of a dataset made by `build_lmdb` or `LMDBWriter`, or any map-style dataset (``Subset`` and
            ``random_split`` of an `LMDBDataset` keep its fast paths).
        val: As `train`, or a list of them, one loader each.
        test: As `val`.
        predict: As `val`.
        batch_size: Samples per batch and rank.
        num_workers: Worker processes per loader. ``"auto"``: one for each CPU that this rank may use; none where the
            records are small arrays, which are gathered faster without.
        train_transform: Applied to the samples of `train`, where that is a path; see `LMDBDataset`.
        eval_transform: As `train_transform`, for the other stages.
        decode: What images become, where a path is given: ``"pil"``, ``"tensor"`` (uint8 ``[3, H, W]``) or ``"raw"``.
        shuffle: Shuffle `train` anew each epoch.
        shuffle_window: Shuffle among so many samples at a time, which are made of runs of neighbours: reads become
            sequential. For datasets larger than RAM.
        seed: Seed of the orders and crops.
        drop_last: Leave out what does not make a full batch on every rank, in training.
        pin_memory: Batches in page-locked memory. ``"auto"``: where the Trainer's device is CUDA.
        persistent_workers: Keep workers between epochs. ``"auto"``: where there are workers.
        prefetch_factor: Batches that each worker makes ahead.
        normalize: ``(mean, std)`` per channel on the 0-1 scale. uint8 images ``[B, C, H, W]`` of a batch travel as they
            are, and become float32, scaled to 0-1 and normalised, on the device.
        crop_size: With ``decode="tensor"``: square crops of this side, random-resized in training, from the middle
            in evaluation, as uint8.
        weights: Relative weight of each sample of `train`, or the path of a ``.npy`` file of them: an epoch is then as
            many draws with replacement.

    Raises:
        ValueError: An argument is out of its range.
        MisconfigurationException: Arguments that do not go together.

    Example::

        datamodule = LMDBDataModule("train.lmdb", "val.lmdb", batch_size=256, decode="tensor", crop_size=224,
                                    normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        trainer.fit(model, datamodule)
    """

    def __init__(
        self,
        train: Source | None = None,
        val: Source | list[Source] | None = None,
        test: Source | list[Source] | None = None,
        predict: Source | list[Source] | None = None,
        batch_size: int = 32,
        num_workers: int | Literal["auto"] = "auto",
        train_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        decode: Literal["pil", "tensor", "raw"] = "pil",
        shuffle: bool = True,
        shuffle_window: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pin_memory: bool | Literal["auto"] = "auto",
        persistent_workers: bool | Literal["auto"] = "auto",
        prefetch_factor: int = 2,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        crop_size: int | None = None,
        weights: Sequence[float] | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._sources: dict[str, Any] = {"train": train, "val": val, "test": test, "predict": predict}
        self.batch_size = whole_number("batch_size", batch_size, "samples per batch and rank", least=1)
        self.num_workers = (
            num_workers if num_workers == "auto" else whole_number("num_workers", num_workers, "processes", least=0)
        )
        self.train_transform = train_transform
        self.eval_transform = eval_transform
        self.decode = choice("decode", decode, ("pil", "tensor", "raw"))
        self.shuffle = flag("shuffle", shuffle)
        self.shuffle_window = (
            None
            if shuffle_window is None
            else whole_number("shuffle_window", shuffle_window, "samples", least=1, or_none=True)
        )
        self.seed = whole_number("seed", seed, "a whole number", least=0)
        self.drop_last = flag("drop_last", drop_last)
        self.pin_memory = pin_memory if pin_memory == "auto" else flag("pin_memory", pin_memory)
        self.persistent_workers = (
            persistent_workers if persistent_workers == "auto" else flag("persistent_workers", persistent_workers)
        )
        self.prefetch_factor = whole_number("prefetch_factor", prefetch_factor, "batches", least=1)
        self.normalize = None if normalize is None else _normalize(normalize)
        self.crop_size = (
            None if crop_size is None else whole_number("crop_size", crop_size, "pixels", least=1, or_none=True)
        )
        if self.normalize is not None and _inherits(self, "on_after_batch_transfer", LightningDataModule):
            # Only then: a DataModule that has the hook takes it from the LightningModule.
            self.on_after_batch_transfer = self._normalize_batch  # type: ignore[method-assign]
        if val is None and _inherits(self, "val_dataloader", LMDBDataModule):
            # As if there were no such hook: Lightning then leaves validation out.
            self.val_dataloader = partial(LightningDataModule.val_dataloader, self)  # type: ignore[method-assign]
        self.weights = weights
        if self.crop_size is not None and self.decode != "tensor":
            raise MisconfigurationException(
                f"crop_size={crop_size} works on tensors: give decode='tensor' with it (got decode={decode!r})"
            )
        if isinstance(train, (list, tuple)):
            raise MisconfigurationException(
                "train is one dataset, got a list: put them together with torch.utils.data.ConcatDataset"
            )
        for name in ("train", "val", "test", "predict"):
            transform = train_transform if name == "train" else eval_transform
            if transform is not None and not all(
                isinstance(s, (str, os.PathLike)) for s in _as_list(self._sources[name])
            ):
                raise MisconfigurationException(
                    f"{name} is a dataset and brings its own transform; give the dataset's path, or leave out "
                    f"{'train' if name == 'train' else 'eval'}_transform"
                )
        self._datasets: dict[str, list[Any]] = {}
        self._sampler: ElasticSampler | None = None
        self._sampler_of: Trainer | None = None
        self._resume: dict[str, Any] | None = None
        self._resume_of: Trainer | None = None
        self.allow_zero_length_dataloader_with_multiple_devices = False

    # --- datasets ------------------------------------------------------------------------------------------------

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open the stage's datasets.

        Raises:
            FileNotFoundError: A path is not there.
            StorageError: It is not a dataset of ours, or damaged.
        """
        for name in _STAGES.get(str(stage), ("train", "val", "test", "predict")):
            self._open(name)

    def _open(self, name: str) -> list[Any]:
        if name not in self._datasets:
            transform = self.train_transform if name == "train" else self.eval_transform
            self._datasets[name] = [
                _opened(source, transform, self.decode) if isinstance(source, (str, os.PathLike)) else source
                for source in _as_list(self._sources[name])
            ]
        return self._datasets[name]

    # --- loaders -------------------------------------------------------------------------------------------------

    @override
    def train_dataloader(self) -> ElasticLoader:
        """The training loader: shuffled, this rank's share."""
        dataset = self._needed("train")[0]
        order = Order(len(dataset), self.seed, self.shuffle, self.shuffle_window, self._weights())
        sampler = self._make_sampler(order, drop_last=self.drop_last)
        trainer, before = self.trainer, self._sampler
        self._continue(sampler)
        if trainer is not None:
            if trainer.current_epoch > sampler.epoch:
                sampler.set_epoch(trainer.current_epoch)
            if before is not None and self._sampler_of is trainer:  # reloaded: until the next batch, this counts
                sampler.iterated_epoch = before.iterated_epoch
            sampler.epoch_now = lambda: trainer.current_epoch
        sampler.on_epoch = self._epoch_begins
        self._sampler, self._sampler_of = sampler, trainer
        return self._loader(dataset, sampler, train=True)

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
        loaders = [
            self._loader(dataset, self._make_sampler(Order(len(dataset), shuffle=False)), train=False)
            for dataset in self._needed(name)
        ]
        return loaders if isinstance(self._sources[name], (list, tuple)) else loaders[0]

    def _needed(self, name: str) -> list[Any]:
        if self._sources[name] is None:
            raise MisconfigurationException(
                f"LMDBDataModule was made without {name}=: give it the path of a dataset, or a dataset"
            )
        return self._open(name)

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

    def _loader(self, dataset: Any, sampler: ElasticSampler, *, train: bool) -> ElasticLoader:
        if sampler.padding:
            rank_zero_warn(
                f"{len(dataset)} samples in batches of {self.batch_size} on {sampler.num_replicas} ranks: "
                f"{sampler.padding} of them go to more than one rank, so that all have as many batches"
            )
        if self.crop_size is not None and unwrap(dataset)[0] is None:
            raise MisconfigurationException(
                f"crop_size={self.crop_size} is for paths, LMDBDatasets and Subsets of them, got a "
                f"{type(dataset).__name__}: crop in its transform"
            )
        loader = make_loader(
            dataset,
            sampler,
            crop_size=self.crop_size,
            train=train,
            num_workers=None if self.num_workers == "auto" else self.num_workers,
            workers_if_needed=self._auto_workers,
            pin_memory=self._on_cuda if self.pin_memory == "auto" else self.pin_memory,
            persistent_workers=None if self.persistent_workers == "auto" else self.persistent_workers,
            prefetch_factor=self.prefetch_factor,
        )
        if self.num_workers == "auto" and loader.num_workers == 0:
            _lightning.silence_worker_hint()
        return loader

    @property
    def _auto_workers(self) -> int:
        trainer = self.trainer
        local_ranks = 1 if trainer is None else max(1, trainer.num_devices)
        return max(1, int(usable_cpus() / local_ranks))

    @property
    def _on_cuda(self) -> bool:
        if self.trainer is None:
            return torch.cuda.is_available()
        return self.trainer.strategy.root_device.type == "cuda"

    # --- batches -------------------------------------------------------------------------------------------------

    def _normalize_batch(self, batch: Any, dataloader_idx: int) -> Any:
        """The hook ``on_after_batch_transfer``, where `normalize` asks for it."""
        assert self.normalize is not None
        return self.normalize(batch)

    # --- resume --------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Where training is: plain numbers.

        Returns:
            ``seed``, ``epoch``, ``consumed`` (samples of this epoch that the steps of all ranks have had), ``batches``
            (the steps that took them); and what makes the order: ``num_samples``, ``shuffle``, ``shuffle_window``,
            ``weighted``.
        """
        sampler, trainer = self._sampler, self.trainer
        if sampler is None or trainer is None:
            return dict(self._resume or {})
        done = _lightning.processed_batches(trainer)
        return {
            "seed": self.seed,
            "epoch": sampler.iterated_epoch,
            "consumed": sampler.consumed_after(done, sampler.iterated_epoch),
            "batches": done,
            "num_samples": sampler.order.num_samples,
            "shuffle": self.shuffle,
            "shuffle_window": self.shuffle_window,
            "weighted": sampler.order.weighted,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off; the next training loader begins there."""
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return  # test, validate and predict read checkpoints, too
        self._resume, self._resume_of = dict(state_dict), self.trainer

    @override
    def teardown(self, stage: str | None = None) -> None:
        """Forget where a checkpoint left off; another fit begins at the beginning."""
        if stage == "fit":
            self._resume = None

    def _continue(self, sampler: ElasticSampler) -> None:
        state = self._resume
        if not state or self._resume_of not in (None, self.trainer):  # of a fit that came to nothing
            self._resume = None
            return
        self._resume_of = self.trainer
        changed = [
            f"{name} was {state.get(name)!r} and is {now!r}"
            for name, now in (
                ("num_samples", sampler.order.num_samples),
                ("seed", self.seed),
                ("shuffle", self.shuffle),
                ("shuffle_window", self.shuffle_window),
                ("weighted", sampler.order.weighted),
            )
            if state.get(name) != now
        ]
        if changed:
            rank_zero_warn(
                f"LMDBDataModule: the checkpoint was made with other data or another order ({'; '.join(changed)}): the "
                "epoch goes on after as many samples, but some may come twice and others not at all"
            )
        consumed = min(int(state["consumed"]), sampler.order.num_samples)
        sampler.resume(int(state["epoch"]), consumed, int(state["batches"]))

    def _weights(self) -> Any:
        if isinstance(self.weights, (str, os.PathLike)):
            return np.load(self.weights, allow_pickle=False)
        return self.weights

    def _epoch_begins(self, num_batches: int) -> None:
        if self.trainer is not None:
            if self._resume and self._sampler is not None and self._sampler.epoch != self._resume["epoch"]:
                _lightning.leave_finished_epoch(self.trainer)
            _lightning.set_train_batches(self.trainer, num_batches)


def _inherits(datamodule: LightningDataModule, hook: str, origin: type) -> bool:
    return getattr(type(datamodule), hook) is getattr(origin, hook)


def _opened(path: str | os.PathLike[str], transform: Any, decode: Any) -> LMDBDataset:
    dataset = LMDBDataset(path, transform=transform, decode=decode)
    # A checksum is a hundredth of decoding an image; where batches are gathered, it would be most of the time.
    dataset.verify_checksum = plan(dataset) is None
    return dataset


def _as_list(source: Any) -> list[Any]:
    if source is None:
        return []
    return list(source) if isinstance(source, (list, tuple)) else [source]


def _normalize(given: Any) -> Normalize:
    try:
        mean, std = given
        mean, std = [float(m) for m in mean], [float(s) for s in std]
    except (TypeError, ValueError):
        refuse("normalize", "(mean, std), each a number per channel", given)
    for value in std:
        real_number("normalize", value, "standard deviations", above=0)
    if len(mean) != len(std) or not mean:
        refuse("normalize", "a mean and a standard deviation for each channel", given)
    return Normalize(mean, std)
