"""The base of the DataModules: any map-style dataset, shuffled, sharded, cropped and resumed to the sample."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
import torch
from typing_extensions import override

from lightning_gpuopt.compat import lightning
from lightning_gpuopt.compat.lightning import MisconfigurationException, rank_zero_warn
from lightning_gpuopt.compat.lightning_loops import why_copied_elsewhere
from lightning_gpuopt.datamodules.auto_workers import settle_workers
from lightning_gpuopt.datamodules.resumable import Data, ResumableDataModule, is_path
from lightning_gpuopt.images.crop import RATIO, SCALE, CenterCrops, RandomCrops
from lightning_gpuopt.images.normalize import Normalize
from lightning_gpuopt.loading.collate import make_of
from lightning_gpuopt.loading.datasets import as_written, balanced_weights, mean_bytes, targets_of
from lightning_gpuopt.loading.elastic_loader import ElasticLoader, make_loader
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.utils.arguments import (
    choice,
    flag,
    function,
    number_range,
    or_auto,
    or_none,
    refuse,
    whole_number,
)

# with `shuffle_window`, so much of a dataset is read in one go: enough for a disk to be near its best
RUN_BYTES: Final = 1 << 20
_READ_BY: Final = {"train": "train", "sanity_check": "val", "validate": "val", "test": "test", "predict": "predict"}


class ElasticDataModule(ResumableDataModule):
    """Loaders over any map-style datasets; a subclass defines what a path means.

    Every sample of an epoch goes to exactly one rank, in an order that is a function of the seed and the epoch. A
    checkpoint from the middle of an epoch stores how many samples the steps have consumed, so a resumed run continues
    with the next one, on any number of ranks and workers.

    Args:
        train: A path, or any map-style dataset.
        val: As `train`, or a list of them, one loader each.
        test: As `val`.
        predict: As `val`.
        batch_size: Samples per batch and rank.
        num_workers: Worker processes per loader. ``"auto"``: one for each CPU this rank can use, as far as their
            batches fit into ``/dev/shm``; none if the records are small arrays, which are gathered faster without
            workers.
        train_transform: Applied to the samples of `train`, if that is a path: to the image of (image, label), and to
            the whole sample if it has more parts, such as (image, mask) or (image, {"boxes": ...}).
        eval_transform: As `train_transform`, for the other stages.
        decode: Type of the images, if a path is given: ``"pil"``, ``"tensor"`` (uint8 ``[3, H, W]``) or ``"raw"``.
        shuffle: Reshuffle `train` in each epoch.
        shuffle_window: Shuffle within windows of this many samples, made of runs of neighbours of about 1 MiB, so that
            reads become sequential. For datasets larger than RAM. Not together with `weights`.
        seed: Seed of the orders and crops.
        drop_last: In training, drop samples that do not fill a batch on every rank.
        pin_memory: Batches in page-locked memory. ``"auto"``: if the Trainer's device is CUDA. ``"in_place"``: the same
            without a copy: the memory that loader processes fill is itself page-locked. If a hook or the step may copy
            batches itself, it works like True; it cannot be combined with your own ``transfer_batch_to_device``. Not
            measured on a GPU yet.
        persistent_workers: Keep workers between epochs. ``"auto"``: if there are workers, except for several evaluation
            loaders of one stage, whose workers would all stay.
        prefetch_factor: Batches that each worker prepares ahead.
        normalize: ``(mean, std)`` per channel on the 0-1 scale. Photographs, ``[B, C, H, W]``, are copied to the device
            as uint8; there they become floating point in the Trainer's precision, scaled to 0-1 and normalised. The
            same applies to a uint8 array or tensor, ``[H, W, 3]`` or ``[3, H, W]``, that is the sample's first part or
            named image, img, x or pixel_values. All other arrays, tensors, masks and depth maps of an LMDB stay as they
            were written. Output of a transform, a `collate_fn` or your own dataset is a photograph if it is uint8, has
            as many channels as the mean, and is not named mask, seg, label, target or depth: use another dtype for
            other targets. The LightningModule's ``on_after_batch_transfer`` runs afterwards.
        crop_size: With ``decode="tensor"``: square crops of this side, random-resized in training, from the middle
            in evaluation, as uint8. Masks and depth maps of a sample get the same area, by nearest neighbour.
        collate_fn: Makes a batch of a list of samples; None: torch's ``default_collate``.
        target_transform: Applied to the second of a sample's two parts in all stages, if paths are given.
        memory_format: Of the image batches of ``decode="tensor"``: ``"channels_last"`` takes a third of the time and
            suits convolutions on tensor cores; or ``"contiguous"``. Images of datasets that decode them themselves are
            batched unchanged.
        flip: Mirror one random crop in two, left to right.
        scale: Smallest and largest share of an image's area for a random crop.
        ratio: Smallest and largest width over height of a random crop before it is resized.
        interpolation: How photographs are resized; with antialiasing except for ``"nearest"``.
        weights: Relative weight of each sample of `train`, the path of a ``.npy`` file of them, or ``"balanced"``
            (every class equally often, by the dataset's targets): an epoch is then as many draws with replacement.
        on_corrupt: Action for a sample whose image cannot be decoded, or whose stored bytes are damaged: ``"raise"`` an
            error that names it, or ``"skip"``: its batch is smaller, and it is counted (`num_skipped`) and listed in
            ``gpuopt/skipped-*.csv`` below the Trainer's log directory. A batch without any readable sample is still an
            error, and so is any other failure: a missing file, failing storage.

    Raises:
        ValueError: An argument is out of its range.
        MisconfigurationException: Arguments conflict with each other.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a subclass the arguments and errors of this class in its own docstring."""
        super().__init_subclass__(**kwargs)
        # Cleaned: from Python 3.13 on they are not indented.
        inherited = inspect.cleandoc(ElasticDataModule.__doc__ or "").partition("\nArgs:\n")
        own = inspect.cleandoc(cls.__doc__ or "").partition("\nExample::")
        if own[1] and inherited[1] and "\nArgs:\n" not in own[0]:
            cls.__doc__ = f"{own[0]}{inherited[1]}{inherited[2].rstrip()}\n{own[1]}{own[2]}"

    def __init__(
        self,
        train: Data | None = None,
        val: list[Data] | Data | None = None,
        test: list[Data] | Data | None = None,
        predict: list[Data] | Data | None = None,
        batch_size: int = 32,
        num_workers: int | Literal["auto"] = "auto",
        train_transform: Callable[[Any], Any] | None = None,
        eval_transform: Callable[[Any], Any] | None = None,
        decode: Literal["pil", "tensor", "raw"] = "pil",
        shuffle: bool = True,
        shuffle_window: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pin_memory: bool | Literal["auto", "in_place"] = "auto",
        persistent_workers: bool | Literal["auto"] = "auto",
        prefetch_factor: int = 2,
        normalize: tuple[Sequence[float], Sequence[float]] | None = None,
        crop_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        memory_format: Literal["channels_last", "contiguous"] = "channels_last",
        flip: bool = True,
        scale: tuple[float, float] = SCALE,
        ratio: tuple[float, float] = RATIO,
        interpolation: Literal["bilinear", "bicubic", "nearest"] = "bilinear",
        weights: Sequence[float] | str | os.PathLike[str] | None = None,
        on_corrupt: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__({"train": train, "val": val, "test": test, "predict": predict}, batch_size, seed, shuffle)
        self.num_workers = or_auto(whole_number, "num_workers", num_workers, "processes", least=0)
        self.train_transform = function("train_transform", train_transform)
        self.eval_transform = function("eval_transform", eval_transform)
        self.target_transform = function("target_transform", target_transform)
        self.collate_fn = function("collate_fn", collate_fn)
        self.decode = choice("decode", decode, ("pil", "tensor", "raw"))
        self.shuffle_window = or_none(whole_number, "shuffle_window", shuffle_window, "samples", least=1)
        self.drop_last = flag("drop_last", drop_last)
        if not isinstance(pin_memory, (bool, np.bool_)) and pin_memory not in ("auto", "in_place"):
            refuse("pin_memory", "True, False, 'auto' or 'in_place'", pin_memory)
        self.pin_memory = pin_memory
        self.persistent_workers = or_auto(flag, "persistent_workers", persistent_workers)
        self.prefetch_factor = whole_number("prefetch_factor", prefetch_factor, "batches", least=1)
        self.normalize = None if normalize is None else Normalize.of(normalize)
        self.crop_size = or_none(whole_number, "crop_size", crop_size, "pixels", least=1)
        self.memory_format = choice("memory_format", memory_format, ("channels_last", "contiguous"))
        self.flip = flag("flip", flip)
        self.scale = number_range("scale", scale, "shares of an image's area", at_most=1.0)
        self.ratio = number_range("ratio", ratio, "widths over heights")
        self.interpolation = choice("interpolation", interpolation, ("bilinear", "bicubic", "nearest"))
        self.weights = weights
        self.on_corrupt = choice("on_corrupt", on_corrupt, ("raise", "skip"))
        self._check_together()
        self._dtype: tuple[Any, torch.dtype] | None = None
        self._said: set[str] = set()

    def _check_together(self) -> None:
        if self.crop_size is not None and self.decode != "tensor":
            raise MisconfigurationException(
                f"crop_size={self.crop_size} needs tensors: pass decode='tensor' too (got decode={self.decode!r})"
            )
        if self.weights is not None and self.shuffle_window is not None:
            raise MisconfigurationException(
                f"weights= draws from all samples with replacement, and shuffle_window={self.shuffle_window} shuffles "
                "within windows: expected one of them, got both: remove one"
            )
        for name in self._sources:
            argument = "train_transform" if name == "train" else "eval_transform"
            if getattr(self, argument) is not None and any(not is_path(each) for each in self._given(name)):
                raise MisconfigurationException(
                    f"{name} is a dataset and brings its own transform; pass the dataset's path, or remove {argument}"
                )
        given = [each for name in self._sources for each in self._given(name)]
        if self.target_transform is not None and given and not any(map(is_path, given)):
            raise MisconfigurationException(
                "target_transform is for paths, but only datasets were given, which have their own: pass paths, or "
                "remove target_transform"
            )

    def _open_path(self, path: str | os.PathLike[str], name: str, transform: Callable[[Any], Any] | None) -> Any:
        """The dataset at a path, by ``train``, ``val``, ``test`` or ``predict``."""
        raise NotImplementedError

    @override
    def setup(self, stage: str | None = None) -> None:
        """Open the stage's datasets; see `ResumableDataModule.setup`."""
        super().setup(stage)
        if type(self).on_after_batch_transfer is ElasticDataModule.on_after_batch_transfer:
            lightning.silence_both_hooks("on_after_batch_transfer")  # ours calls the LightningModule's

    @override
    def _open_source(self, source: Any, name: str) -> Any:
        if not is_path(source):
            return source
        return self._open_path(source, name, self.train_transform if name == "train" else self.eval_transform)

    @override
    def train_dataloader(self) -> ElasticLoader:
        """The training loader: shuffled, this rank's share."""
        dataset = self._needed("train")[0]
        mean = mean_bytes(dataset) if self.shuffle_window is not None else None
        run = None if mean is None else max(1, RUN_BYTES // mean)
        order = Order(len(dataset), self.seed, self.shuffle, self.shuffle_window, self._weights(dataset), run)
        return self._loader("train", dataset, self._train_sampler(order, drop_last=self.drop_last))

    @override
    def _eval_loader(self, name: str, at: int, dataset: Any) -> ElasticLoader:
        return self._loader(name, dataset, self._make_sampler(Order(len(dataset), shuffle=False)))

    def _loader(self, name: str, dataset: Any, sampler: ElasticSampler) -> ElasticLoader:
        if sampler.padding:
            rank_zero_warn(
                f"{len(dataset)} samples in batches of {self.batch_size} on {sampler.num_replicas} ranks: "
                f"{sampler.padding} of them go to more than one rank, so that all ranks have equally many batches"
            )
        persistent: bool | None = None
        if self.persistent_workers != "auto":
            persistent = self.persistent_workers
        elif name != "train" and len(self._datasets[name]) > 1:
            persistent = False
        try:
            loader = make_loader(
                dataset,
                sampler,
                num_workers=None if self.num_workers == "auto" else self.num_workers,
                workers_if_needed=self._local_cpus,
                pin_memory=self._on_cuda if isinstance(self.pin_memory, str) else bool(self.pin_memory),
                persistent_workers=persistent,
                prefetch_factor=self.prefetch_factor,
                crops=self._crops(name),
                skipped=self._skip_list(name) if self.on_corrupt == "skip" else None,
                collate_fn=self.collate_fn,
                memory_format=self.memory_format,
            )
        except TypeError as error:
            if self.crop_size is None or "with_decoder" not in str(error):
                raise
            raise MisconfigurationException(
                f"crop_size={self.crop_size} is for paths, and datasets whose images can be decoded outside "
                "(LMDBDatasets, Subsets and ConcatDatasets of them, a dataset with a method with_decoder); got a "
                f"{type(dataset).__name__}: crop in its transform"
            ) from None
        why = settle_workers(loader, self._loaders_on_this_node, unasked=self.num_workers == "auto")
        if why is not None and (cause := re.sub("[0-9.]+", "", why)) not in self._said:  # free memory varies
            self._said.add(cause)
            rank_zero_warn(f"{type(self).__name__}: {why}")
        if self.num_workers == "auto" and not loader.num_workers:
            lightning.silence_worker_hint()
        loader.pins_in_place = self.pin_memory == "in_place" and self._copies_are_known()
        return loader

    def _copies_are_known(self) -> bool:
        """Whether only Lightning and this package copy batches to the device, as far as is known.

        MisconfigurationException if a ``transfer_batch_to_device`` of the user's does.
        """
        trainer = self.trainer
        module = None if trainer is None else trainer.lightning_module
        for owner in (self, module):
            if owner is not None and not lightning.is_plain_hook(owner, "transfer_batch_to_device"):
                raise MisconfigurationException(
                    "pin_memory='in_place' reuses a batch's memory once its copy to the device has finished, but "
                    f"{type(owner).__name__}.transfer_batch_to_device may copy on unknown streams: expected "
                    "Lightning's own hook. Use pin_memory=True, or remove that hook"
                )
        if trainer is None or module is None:
            return False
        why = why_copied_elsewhere(trainer, module)
        if why is not None:
            lightning.say_once(trainer, "not-in-place", f"pin_memory='in_place' works like True here: {why}")
        return why is None

    @property
    def _loaders_on_this_node(self) -> int:
        """Loaders of a stage: while one validates, batches for training lie there. Of all ranks."""
        stage = "fit" if self.trainer is None else self.trainer.state.fn
        return self._local_ranks * sum(self._sources[name] is not None for name in self._names(stage))

    def _crops(self, name: str) -> RandomCrops | CenterCrops | None:
        if self.crop_size is None:
            return None
        if name == "train":
            return RandomCrops(self.crop_size, self.scale, self.ratio, self.interpolation, self.flip)
        return CenterCrops(self.crop_size, interpolation=self.interpolation)

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise if `normalize` is set; then the LightningModule's hook of the same name runs."""
        trainer = self.trainer
        if self.normalize is not None:
            batch, found = self.normalize(batch, self._float_dtype(), self._as_written(dataloader_idx))
            if not found and trainer is not None:
                lightning.say_once(
                    trainer,
                    "nothing-to-normalize",
                    f"normalize= found nothing to normalise: expected uint8 images [B, {len(self.normalize.mean)}, H, "
                    f"W], got {make_of(batch)}. Use decode='tensor' or crop_size=, return uint8 from the transform, or "
                    "remove normalize (of stored arrays and tensors it applies to the first part, or to one named "
                    "image, img, x or pixel_values, but never to images written in another mode than RGB)",
                )
        module = None if trainer is None else trainer.lightning_module
        return batch if module is None else module.on_after_batch_transfer(batch, dataloader_idx)

    def _as_written(self, dataloader_idx: int) -> set[tuple[int | str, ...]]:
        """Where in a batch of this stage what is never normalised lies, if it has its samples' structure."""
        trainer = self.trainer
        stage = None if trainer is None else trainer.state.stage
        name = _READ_BY.get(getattr(stage, "value", None) or "train", "train")
        datasets = self._datasets.get(name, [])
        changed = self.train_transform if name == "train" else self.eval_transform
        if changed is not None or self.collate_fn is not None or dataloader_idx >= len(datasets):
            return set()
        return as_written(datasets[dataloader_idx])

    def _float_dtype(self) -> torch.dtype:
        """What the Trainer's precision makes of float32 inputs."""
        if self.trainer is None:
            return torch.float32
        plugin = self.trainer.precision_plugin
        if self._dtype is None or self._dtype[0] is not plugin:
            self._dtype = plugin, plugin.convert_input(torch.empty(0)).dtype
        return self._dtype[1]

    @override
    def _what_makes(self, order: Order) -> dict[str, Any]:
        made_by = super()._what_makes(order) | {"shuffle_window": self.shuffle_window, "weighted": order.weighted}
        return made_by if self.shuffle_window is None else {**made_by, "run": order.run}

    def _weights(self, dataset: Any) -> Any:
        if isinstance(self.weights, str) and self.weights == "balanced":
            return balanced_weights(targets_of(dataset))
        if not isinstance(self.weights, (str, os.PathLike)):
            return self.weights
        try:
            return np.load(self.weights, allow_pickle=False)
        except FileNotFoundError:
            refuse("weights", "numbers, the path of a .npy file, or 'balanced'", self.weights)
