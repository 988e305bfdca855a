"""The loaders that ``benchmarks/dali.py`` and ``benchmarks/gpu_dali.py`` measure: ours, NVIDIA's own iterator, PIL.

All give the same: random-resized crops of 224 of a folder of JPEG files, mirrored one time in two, normalised float32.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from gpu_parts import Skip
from PIL import Image
from storage_peers import CROP, MEAN, STD, normalized_crop
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import DALIDataModule, LMDBDataModule
from lightning_gpuopt.images.crop import draw_area

RESIZE = 256
HW_DECODER_LOAD = 0.65
PREFETCH = 2

Batch = tuple[torch.Tensor, torch.Tensor]


def need_dali() -> None:
    """Raise `Skip` where a package is missing that all of it needs."""
    for module, package in (("nvidia.dali", "nvidia-dali-cuda120 or -cuda130"), ("skimage", "scikit-image")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise Skip(f"{module} is not installed: pip install {package}")


@dataclass(frozen=True)
class Loaded:
    """A training loader, and what Lightning would run on each of its batches.

    Attributes:
        loader: gives one epoch each time it is iterated.
        after: what turns a batch into what the step gets.
        num_batches: of an epoch.
    """

    loader: Any
    after: Callable[[Any], Batch]
    num_batches: int

    def epoch(self) -> Iterator[Batch]:
        """The batches of one epoch."""
        for batch in self.loader:
            yield self.after(batch)


def as_it_is(batch: Any) -> Batch:
    return batch[0], batch[1]


# ---- NVIDIA's own ----


def nvidia(
    folder: Path,
    *,
    batch_size: int,
    num_threads: int,
    device_id: int | None = None,
    hw_decoder_load: float = HW_DECODER_LOAD,
) -> Loaded:
    """DALIClassificationIterator over DALI's file reader, with the operators that ours has.

    Args:
        folder: of images, with a subfolder for each class.
        batch_size: samples.
        num_threads: of the pipeline.
        device_id: the CUDA device's ordinal; None: the pipeline runs on the CPU.
        hw_decoder_load: share of the images that go to the hardware decoder.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

    decoder: dict[str, Any] = {"device": "cpu"}
    if device_id is not None:
        decoder = {"device": "mixed", "hw_decoder_load": hw_decoder_load}

    @pipeline_def(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device_id,
        seed=1,
        exec_dynamic=True,
        prefetch_queue_depth=PREFETCH,
    )
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            file_root=str(folder), random_shuffle=True, pad_last_batch=True, name="reader"
        )
        images = fn.decoders.image_random_crop(
            encoded,
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
            num_attempts=10,
            **decoder,
        )
        images = fn.resize(images, size=[CROP, CROP], interp_type=types.INTERP_LINEAR, antialias=True)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * each for each in MEAN],
            std=[255 * each for each in STD],
            mirror=fn.random.coin_flip(),
        )
        if device_id is not None:
            labels = labels.gpu()
        return images, labels

    iterator = DALIClassificationIterator(
        [pipeline()], reader_name="reader", auto_reset=True, last_batch_policy=LastBatchPolicy.PARTIAL
    )

    def unpacked(batch: Any) -> Batch:
        return batch[0]["data"], batch[0]["label"].squeeze(1).long()

    return Loaded(iterator, unpacked, -(-_count(folder) // batch_size))


# ---- ours ----


def ours(data: Any, *, batch_size: int, **options: Any) -> Loaded:
    """DALIDataModule over a folder, an LMDB, or a dataset."""
    datamodule = DALIDataModule(data, batch_size=batch_size, crop_size=CROP, mean=MEAN, std=STD, **options)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    return Loaded(loader, as_it_is, len(loader))


def lmdb_datamodule(data: Any, *, batch_size: int, num_workers: int) -> LMDBDataModule:
    """The fast path of LMDBDataModule, which DALI is beside."""
    return LMDBDataModule(
        data,
        batch_size=batch_size,
        num_workers=num_workers,
        decode="tensor",
        crop_size=CROP,
        normalize=(MEAN, STD),
        persistent_workers=True,
    )


def lmdb(path: Path, *, batch_size: int, num_workers: int) -> Loaded:
    """Its loader; what it gives is normalised in the training process."""
    datamodule = lmdb_datamodule(path, batch_size=batch_size, num_workers=num_workers)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()

    def normalized(batch: Any) -> Batch:
        return as_it_is(datamodule.on_after_batch_transfer(batch, 0))

    return Loaded(loader, normalized, len(loader))


# ---- PIL ----


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """Images in class folders through PIL, as torchvision's ImageFolder and its usual transforms treat them."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
        self.samples = [
            (str(file), label) for label, name in enumerate(classes) for file in sorted((folder / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.samples[index]
        return normalized_crop(Path(file).read_bytes()), label


def pil_loader(folder: Path, *, batch_size: int, num_workers: int) -> DataLoader[Any]:
    """A DataLoader over `Folder`, shuffled; torch seeds the workers, and keeps each to one thread."""
    return DataLoader(
        Folder(folder),
        batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )


def pil(folder: Path, *, batch_size: int, num_workers: int) -> Loaded:
    loader = pil_loader(folder, batch_size=batch_size, num_workers=num_workers)
    return Loaded(loader, as_it_is, len(loader))


def pil_center(file: Path) -> torch.Tensor:
    """What PIL and torchvision make of an image in evaluation: resized, its middle cut out, normalised."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    width, height = image.size
    short = min(width, height)
    image = image.resize((RESIZE * width // short, RESIZE * height // short), Image.Resampling.BILINEAR)
    left, top = round((image.width - CROP) / 2), round((image.height - CROP) / 2)
    pixels = np.array(image.crop((left, top, left + CROP, top + CROP)))
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std


# ---- JPEG decoders that give CUDA tensors, beside DALI ----

Decoder = Callable[[list[torch.Tensor], str], list[torch.Tensor]]
"""Takes JPEG files (uint8 ``[N]`` each) and a device, gives uint8 ``[3, H, W]`` each."""


def cuda_decoder() -> tuple[str, Decoder]:
    """What decodes a batch of JPEG files on the GPU: torchcodec's ``decode_jpeg``, or else torchvision's.

    Returns:
        The package with its version, and the decoder.

    Raises:
        Skip: neither has one.
    """
    reasons = []
    for package, module in (("torchcodec", "torchcodec.decoders"), ("torchvision", "torchvision.io")):
        try:
            decode: Any = importlib.import_module(module).decode_jpeg
            if "device" not in inspect.signature(decode).parameters:
                raise AttributeError(f"decode_jpeg of {module} has no device")
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # RuntimeError: no FFmpeg
            reasons.append(str(error).strip().splitlines()[0])
            continue
        return f"{package} {version(package)}", lambda files, device, decode=decode: list(
            decode(files, mode="RGB", device=device)
        )
    raise Skip("; ".join(reasons))


class DecodedByTorch:
    """Batches of files that `cuda_decoder` decodes; cropped, resized and normalised by torch on the GPU.

    Files are read by threads, one batch ahead.

    Args:
        folder: of images, with a subfolder for each class.
        batch_size: samples.
        decode: of `cuda_decoder`.
        device: where.
    """

    def __init__(self, folder: Path, batch_size: int, decode: Decoder, device: str) -> None:
        self.samples = Folder(folder).samples
        self.batch_size, self.decode, self.device = batch_size, decode, device
        self.generator = np.random.default_rng(0)
        self.mean, self.std = (255 * torch.tensor(each, device=device).view(3, 1, 1) for each in (MEAN, STD))

    def __len__(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = self.generator.permutation(len(self.samples)).tolist()
        batches = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        with ThreadPoolExecutor(4) as pool:
            ahead = [pool.submit(self._read, index) for index in batches[0]]
            for number, indices in enumerate(batches):
                files = [each.result() for each in ahead]
                ahead = [pool.submit(self._read, index) for index in (batches[number + 1 : number + 2] or [[]])[0]]
                images = torch.stack([self._crop(image) for image in self.decode(files, self.device)])
                labels = torch.tensor([self.samples[index][1] for index in indices], device=self.device)
                yield (images - self.mean) / self.std, labels

    def _read(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Path(self.samples[index][0]).read_bytes()), dtype=torch.uint8)

    def _crop(self, image: torch.Tensor) -> torch.Tensor:
        area = draw_area(*image.shape[1:], self.generator, flip=True)
        cut = image[None, :, area.top : area.top + area.height, area.left : area.left + area.width].float()
        found = torch.nn.functional.interpolate(cut, (CROP, CROP), mode="bilinear", antialias=True)[0]
        return found.flip(-1) if area.mirrored else found


# ---- the machine ----


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def cpu_s() -> float:
    """CPU seconds so far: of this process's threads, and of its children that live."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _count(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))
