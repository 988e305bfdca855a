"""DALIDataModule: image folders, LMDB datasets and file lists, decoded and transformed by NVIDIA DALI."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils.data import Subset
from typing_extensions import override

from lightning_gpuopt.compat.lightning import MisconfigurationException
from lightning_gpuopt.dali import pipelines
from lightning_gpuopt.dali.dali_loader import DALILoader
from lightning_gpuopt.dali.encoded_images import EncodedImages, FileList
from lightning_gpuopt.dali.library import load_dali
from lightning_gpuopt.dali.running_pipeline import RunningPipeline
from lightning_gpuopt.dali.source import Area, BatchSource, center_area, random_area
from lightning_gpuopt.datamodules.resumable import Data, ResumableDataModule, is_path
from lightning_gpuopt.images.checks import BadImage
from lightning_gpuopt.images.file_checks import bad_images
from lightning_gpuopt.images.normalize import IMAGENET_MEAN, IMAGENET_STD
from lightning_gpuopt.loading.image_folder import ImageFolder
from lightning_gpuopt.loading.order import Order, mix
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.loading.samples import SkippedSamples
from lightning_gpuopt.storage.format import MANIFEST
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.utils.arguments import choice, or_auto, real_number, refuse, whole_number

_GPU_THREADS: Final = 4  # CPU threads for a GPU pipeline: they parse and hand over, the GPU decodes
_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}


class DALIDataModule(ResumableDataModule):
    """Loaders whose images NVIDIA DALI decodes, crops, resizes, mirrors and normalises, on the GPU or on the CPU.

    Batches are ``(images, labels)`` on the Trainer's device: images ``[B, 3, crop_size, crop_size]`` (``[B, H, W, 3]``
    with ``layout="HWC"``), labels int64 ``[B]``. Each sample comes exactly once an epoch over all ranks, with equally
    many batches on each rank. A checkpoint from the middle of an epoch continues with the next sample, on any number of
    ranks.

    DALI is an extra: ``pip install "lightning-gpuopt[dali]"`` for CUDA 12, ``[dali-cuda13]`` for CUDA 13.

    Args:
        train: A folder of images with a subfolder for each class; the directory of an LMDB dataset; a text file of
            lines ``PATH LABEL``; or an `LMDBDataset`, or Subsets and ConcatDatasets of such.
        val: As `train`, or a list of them, one loader each.
        test: As `val`.
        predict: As `val`; images without class subfolders or labels have the label -1.
        batch_size: Samples per batch and rank.
        crop_size: Side of the images in pixels.
        resize_size: Evaluation: length of the shorter side in pixels before the crop.
        device: Device that decodes images: ``"gpu"``, ``"cpu"``, or ``"auto"``: the Trainer's.
        num_threads: CPU threads for each loader. ``"auto"``: 4 if the GPU decodes, else one for each CPU this rank can
            use.
        mean: Per channel, on the 0-1 scale.
        std: Per channel, on the 0-1 scale.
        dtype: Of the images: ``"float32"``, ``"float16"``, or ``"uint8"``: 0-255, not normalised.
        layout: Of an image: ``"CHW"`` or ``"HWC"``.
        shuffle: Reshuffle `train` in each epoch.
        seed: Seed of the orders and crops.
        train_pipeline: Instead of the training pipeline: a function decorated with ``@pipeline_def`` that takes the
            nodes ``(encoded, labels)`` and returns ``(images, labels)``; or operators of
            ``nvidia.dali.experimental.torchvision`` (a list, or ``Compose``), applied to the decoded image.
        eval_pipeline: The same for the other stages.
        hw_decoder_load: Share of the JPEG images that go to the GPU's hardware decoder, 0-1.
        on_corrupt: Action for an image that cannot be decoded: ``"raise"`` an error that names its file, or ``"skip"``:
            files are checked when a folder is opened; bad ones are skipped, counted (`num_skipped`) and listed in
            ``gpuopt/skipped.csv`` below the Trainer's log directory. A batch without any decodable image is still an
            error, and so is a file that cannot be read.

    Raises:
        ImportError: DALI is not installed; the message says what to install.
        ValueError: An argument is out of its range.
        MisconfigurationException: Arguments conflict with each other or with the machine.

    Example::

        datamodule = DALIDataModule("imagenet/train", "imagenet/val", batch_size=256)
        trainer.fit(model, datamodule)
    """

    def __init__(
        self,
        train: Data | None = None,
        val: list[Data] | Data | None = None,
        test: list[Data] | Data | None = None,
        predict: list[Data] | Data | None = None,
        batch_size: int = 32,
        crop_size: int = 224,
        resize_size: int = 256,
        device: Literal["auto", "gpu", "cpu"] = "auto",
        num_threads: int | Literal["auto"] = "auto",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        dtype: Literal["float32", "float16", "uint8"] = "float32",
        layout: Literal["CHW", "HWC"] = "CHW",
        shuffle: bool = True,
        seed: int = 0,
        train_pipeline: Any = None,
        eval_pipeline: Any = None,
        hw_decoder_load: float = 0.65,
        on_corrupt: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__({"train": train, "val": val, "test": test, "predict": predict}, batch_size, seed, shuffle)
        load_dali()  # so that it is missed here
        self.crop_size = whole_number("crop_size", crop_size, "pixels", least=1)
        self.resize_size = whole_number("resize_size", resize_size, "pixels", least=1)
        if resize_size < crop_size and eval_pipeline is None:
            refuse("resize_size", f"at least crop_size={crop_size}, since the crop is taken from it", resize_size)
        self.device = choice("device", device, ("auto", "gpu", "cpu"))
        self.num_threads = or_auto(whole_number, "num_threads", num_threads, "CPU threads", least=1)
        self.mean = _channels("mean", mean)
        self.std = _channels("std", std)
        if min(self.std) <= 0:
            refuse("std", "numbers above 0", std)
        self.dtype = choice("dtype", dtype, tuple(_DTYPES))
        self.layout = choice("layout", layout, ("CHW", "HWC"))
        self.hw_decoder_load = real_number("hw_decoder_load", hw_decoder_load, "a share", least=0, at_most=1)
        self.on_corrupt = choice("on_corrupt", on_corrupt, ("raise", "skip"))
        self.train_pipeline = train_pipeline
        self.eval_pipeline = eval_pipeline
        for name in ("train_pipeline", "eval_pipeline"):
            pipelines.definition_of(name, getattr(self, name))  # refuses what it does not know
        self._loaders: dict[tuple[str, int], DALILoader] = {}
        self._bad: dict[str, dict[str, str]] = {}  # what was found when the files were looked through, by stage

    @override
    def _open_source(self, source: Any, name: str) -> Any:
        need_labels = name != "predict"
        dataset = source
        if is_path(source):
            if Path(source, MANIFEST).exists():
                dataset = LMDBDataset(source, decode="raw")
            elif Path(source).is_file():
                dataset = FileList(source, need_labels)
            else:
                dataset = ImageFolder(source, decode="raw", need_classes=need_labels)
        try:
            images = EncodedImages(dataset, need_labels)
            if self.on_corrupt == "skip" and not isinstance(dataset, LMDBDataset):  # that was checked when built
                images = self._without_bad(images, dataset, name)
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(f"{name}: {error}") from None
        return images

    @override
    def prepare_data(self) -> None:
        """With ``on_corrupt="skip"``, check the stage's files once per node."""
        if self.on_corrupt == "skip":
            for name in self._names(None if self.trainer is None else self.trainer.state.fn):
                self._open(name)

    def _without_bad(self, images: EncodedImages, dataset: Any, name: str) -> EncodedImages:
        """The images without the files that cannot be decoded; the same ones on every rank."""
        first = self.trainer is None or self.trainer.local_rank == 0
        bad = bad_images(
            lambda index: bytes(images.read(index)), len(images), images.key(), trust=not first, progress=True
        )
        self._bad[name] = {**self._bad.get(name, {}), **{images.name(index): why for index, why in bad.items()}}
        if len(bad) == len(images):
            index, why = next(iter(bad.items()))
            raise ValueError(f"none of the {len(images)} images can be decoded; {images.name(index)}: {why}")
        kept = np.delete(np.arange(len(images)), list(bad))
        return images if not bad else EncodedImages(Subset(dataset, kept.tolist()), name != "predict")

    @override
    def train_dataloader(self) -> DALILoader:
        """The training loader: shuffled, this rank's share."""
        images = self._needed("train")[0]
        # Lightning cannot take the shuffle out of a loader that is no DataLoader.
        shuffle = self.shuffle and not getattr(self.trainer, "overfit_batches", 0)
        sampler = self._train_sampler(Order(len(images), self.seed, shuffle))
        before = self._loaders.get(("train", 0))
        loader = self._loader("train", 0, images, sampler)
        if before is not None:  # reloaded: random operators go on where they were
            loader.resume_from(before.random_state())
        elif self._resume is not None:
            loader.resume_from(self._resume.get("random_state"))
        return loader

    @override
    def _eval_loader(self, name: str, at: int, dataset: Any) -> DALILoader:
        return self._loader(name, at, dataset, self._make_sampler(Order(len(dataset), shuffle=False)))

    @override
    def _make_sampler(self, order: Order, drop_last: bool = False) -> ElasticSampler:
        rank, world_size = self._ranks
        if order.num_samples < world_size:
            raise MisconfigurationException(
                f"expected at least one sample for each of {world_size} ranks, got {order.num_samples} samples: use "
                "fewer ranks or more data"
            )
        return ElasticSampler(order, self.batch_size, rank=rank, world_size=world_size, larger_last=True)

    def _loader(self, name: str, at: int, images: EncodedImages, sampler: ElasticSampler) -> DALILoader:
        before = self._loaders.pop((name, at), None)
        if before is not None:
            before.close()
        train = name == "train"
        argument = "train_pipeline" if train else "eval_pipeline"
        given = pipelines.definition_of(argument, getattr(self, argument))
        area: Area | None = None
        if given is None:
            area = random_area if train else partial(center_area, self.resize_size, self.crop_size)
        define = given or (pipelines.random_crops if train else pipelines.center_crops)
        settings = self._settings(sampler, argument)
        source = BatchSource(
            images, area, seed=self.seed, skipped=self._skipped_samples(name) if self.on_corrupt == "skip" else None
        )
        keeps_state = given is not None and train and sampler.num_replicas == 1
        make = partial(_build, define, settings, area is not None, keeps_state)
        device = torch.device("cpu") if settings.device_id is None else torch.device("cuda", settings.device_id)
        loader = DALILoader(
            source,
            sampler,
            RunningPipeline(make, device, keeps_state, settings.name),
            partial(pipelines.undecodable, settings),
            partial(_check, settings.name),
            settings.num_threads,
            looks_ahead=train,  # several batches of validation would take memory while training needs it
        )
        self._loaders[name, at] = loader
        return loader

    def _settings(self, sampler: ElasticSampler, argument: str) -> pipelines.PipelineSettings:
        device_id = self._device_id()
        auto = self._local_cpus if device_id is None else min(_GPU_THREADS, self._local_cpus)
        return pipelines.PipelineSettings(
            batch_size=max(2, self.batch_size),  # with batches of one, a rank's last may have two
            num_threads=auto if self.num_threads == "auto" else self.num_threads,
            device_id=device_id,
            crop_size=self.crop_size,
            mean=self.mean,
            std=self.std,
            dtype=self.dtype,
            layout=self.layout,
            hw_decoder_load=self.hw_decoder_load,
            name=argument,
            seed=mix(self.seed, *sampler.randomness) & 0x7FFFFFFF,
        )

    def _device_id(self) -> int | None:
        """The CUDA device's ordinal; None: the CPU."""
        if self.device == "cpu" or (self.device == "auto" and not self._on_cuda):
            return None
        if not torch.cuda.is_available():
            raise MisconfigurationException(
                'device="gpu": expected a CUDA device, but torch sees none; use device="auto" or "cpu"'
            )
        if self.trainer is None:
            return torch.cuda.current_device()
        root = self.trainer.strategy.root_device
        if root.type != "cuda":
            raise MisconfigurationException(
                f'device="gpu": expected a Trainer on CUDA, but its device is {root}; use device="auto" or "cpu", or '
                'Trainer(accelerator="gpu")'
            )
        return root.index or 0

    def _skipped_samples(self, name: str) -> SkippedSamples:
        """One list for all stages, including samples skipped before."""
        skipped = self._skip_list("")
        if self.trainer is None or self.trainer.is_global_zero:
            for sample, reason in self._bad.get(name, {}).items():
                skipped.add(sample, BadImage(reason))
        return skipped

    @override
    def state_dict(self) -> dict[str, Any]:
        """As `ResumableDataModule.state_dict`; with a `train_pipeline` on one rank, also its ``random_state``."""
        state = super().state_dict()
        loader = self._loaders.get(("train", 0))
        if loader is not None and "batches" in state:
            random_state = loader.random_state_after(state["batches"])
            if random_state is not None:
                state["random_state"] = random_state
        return state

    @override
    def teardown(self, stage: str | None = None) -> None:
        """Free the stage's pipelines: their threads and their memory."""
        super().teardown(stage)
        self._close()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Free the pipelines; Lightning calls no ``teardown`` after an exception."""
        self._report_skipped()
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_loaders": {}}

    def _close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()


def _build(
    define: pipelines.Definition, settings: pipelines.PipelineSettings, areas: bool, keeps: bool, state: bytes | None
) -> Any:
    checkpoint = (state or b"") if keeps else None
    return pipelines.build(load_dali(), define, settings, has_areas=areas, checkpoint=checkpoint)


def _check(name: str, tensors: tuple[torch.Tensor, ...], size: int) -> None:
    images, labels = tensors
    if images.ndim != 4 or len(images) != size or labels.shape != (size,) or labels.is_floating_point():
        raise MisconfigurationException(
            f"{name}: expected images of four dimensions and whole numbers as labels [B] with B = {size}, got "
            f"images {list(images.shape)} and {str(labels.dtype).removeprefix('torch.')} labels {list(labels.shape)}"
        )


def _channels(name: str, values: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(values, (tuple, list)) or len(values) != 3:
        refuse(name, "three numbers, one for each of red, green and blue", values)
    return tuple(real_number(name, each, "numbers") for each in values)
