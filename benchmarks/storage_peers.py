"""The peers of benchmarks/storage.py: how each stores the same samples, and loads them as its documentation says.

A peer whose package is missing, or does not load, is left out, and the result says why.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import random
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gpuopt.images.crop import RandomCrops, cut, draw_area, keyed_generator

BATCH = 128
WORKERS = 2
CROP = 224

Loader = Iterable[Any]


@dataclass(frozen=True)
class Peer:
    """One way to store and load.

    Attributes:
        name: What it is called in the tables.
        package: The distribution whose version is printed.
        store: Writes arrays (or JPEG files) into a folder.
        load: A loader over that folder, whose second and later epochs are timed.
    """

    name: str
    package: str
    store: Callable[[Any, Path], None]
    load: Callable[[Path], Loader]

    @property
    def version(self) -> str:
        return version(self.package)


def importable(module: str) -> str | None:
    """Why a peer's module cannot be used; None if it can."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            importlib.import_module(module)
    except (ImportError, PackageNotFoundError, OSError, AttributeError, ValueError) as err:
        return f"{type(err).__name__}: {err}"
    return None


def stand_in_for_torchvision(folder: Path) -> None:
    """Some peers import torchvision without needing it here; it would bring a CUDA torch along.

    Args:
        folder: Where to put an empty one; worker processes find it there too.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return
    text = """
def __getattr__(name):
    if name.startswith('__'):
        raise AttributeError(name)
    return type(name, (), {})
"""
    for name in ("", "transforms", "transforms/functional", "datasets", "datasets/folder", "io", "models", "ops"):
        (folder / "torchvision" / name).mkdir(parents=True, exist_ok=True)
        (folder / "torchvision" / name / "__init__.py").write_text(text)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def loader(dataset: Any, *, shuffle: bool | None = None, collate_fn: Any = None) -> DataLoader[Any]:
    """The DataLoader that every peer without one of its own gets."""
    return DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=shuffle,
        num_workers=WORKERS,
        persistent_workers=True,
        collate_fn=collate_fn,
    )


# --- the transform of all peers that give PIL images -------------------------------------------------------------


def random_crop(image: Image.Image) -> torch.Tensor:
    """Random-resized crop as torchvision draws it, by PIL; uint8, which is less work than the usual float32."""
    width, height = image.size
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if w <= width and h <= height:
            break
    else:
        w, h = width, height
    left, top = random.randint(0, width - w), random.randint(0, height - h)
    crop = image.resize((CROP, CROP), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
    return torch.from_numpy(np.array(crop)).permute(2, 0, 1)


def crop_bytes(data: bytes) -> torch.Tensor:
    """As `random_crop`, from a JPEG file."""
    return random_crop(Image.open(io.BytesIO(data)).convert("RGB"))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalized_crop(data: bytes) -> torch.Tensor:
    """As `crop_bytes`, mirrored one time in two, scaled and normalised: torchvision's usual chain."""
    crop = crop_bytes(data)
    if random.random() < 0.5:
        crop = crop.flip(-1)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return crop.to(torch.float32).div(255).sub_(mean).div_(std)


# --- small arrays: (uint8 [3, 32, 32], label) --------------------------------------------------------------------


class NpyFiles(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.files = sorted(map(str, folder.glob("*.npy")))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.load(self.files[index])), index % 10


class H5Rows(Dataset[Any]):
    def __init__(self, file: Path) -> None:
        self.file = str(file)
        self.opened: Any = None
        import h5py

        with h5py.File(self.file) as f:
            self.size = len(f["x"])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.opened is None:
            import h5py

            self.opened = h5py.File(self.file)
        return torch.from_numpy(self.opened["x"][index]), int(self.opened["y"][index])


def store_npy(arrays: np.ndarray[Any, Any], folder: Path) -> None:
    for index, array in enumerate(arrays):
        np.save(folder / f"{index:06d}.npy", array)


def store_h5(arrays: np.ndarray[Any, Any], folder: Path) -> None:
    import h5py

    with h5py.File(folder / "data.h5", "w") as f:
        f["x"], f["y"] = arrays, np.arange(len(arrays)) % 10


def store_wds_arrays(arrays: np.ndarray[Any, Any], folder: Path) -> None:
    import webdataset

    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxcount=len(arrays) // 8, verbose=0) as writer:
        for index, array in enumerate(arrays):
            writer.write({"__key__": f"{index:06d}", "npy": array, "cls": index % 10})


def load_wds_arrays(folder: Path) -> Loader:
    import webdataset

    dataset = (
        webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=100, empty_check=False)
        .shuffle(1000)
        .decode()
        .to_tuple("npy", "cls")
    )
    return loader(dataset)


def store_mds_arrays(arrays: np.ndarray[Any, Any], folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"x": "ndarray:uint8:3,32,32", "y": "int"}) as writer:
        for index, array in enumerate(arrays):
            writer.write({"x": array, "y": index % 10})


class MDSArrays:
    def __call__(self, folder: Path) -> Loader:
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        return loader(StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH), collate_fn=_first_two)


def _first_two(samples: list[dict[str, Any]]) -> Any:
    return torch.from_numpy(np.stack([s["x"] for s in samples])), torch.tensor([s["y"] for s in samples])


def store_hf_arrays(arrays: np.ndarray[Any, Any], folder: Path) -> None:
    import datasets

    features = datasets.Features({"x": datasets.Array3D((3, 32, 32), "uint8"), "y": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"x": arrays, "y": np.arange(len(arrays)) % 10}, features=features)
    table.save_to_disk(str(folder))


def load_hf_arrays(folder: Path) -> Loader:
    import datasets

    return loader(datasets.load_from_disk(str(folder)).with_format("torch"), shuffle=True)


def store_litdata_arrays(arrays: np.ndarray[Any, Any], folder: Path) -> None:
    _litdata_optimize(_LitArrays(arrays), list(range(len(arrays))), folder)


@dataclass
class _LitArrays:
    arrays: np.ndarray[Any, Any]

    def __call__(self, index: int) -> Any:
        return {"x": self.arrays[index], "y": index % 10}


def _litdata_optimize(function: Any, inputs: list[Any], folder: Path) -> None:
    import litdata

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        litdata.optimize(
            fn=function, inputs=inputs, output_dir=str(folder), num_workers=WORKERS, chunk_bytes="64MB", verbose=False
        )


def load_litdata_arrays(folder: Path) -> Loader:
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    return litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)


class InMemory:
    """The arrays as one tensor; nothing is read at all."""

    def store(self, arrays: np.ndarray[Any, Any], folder: Path) -> None:
        np.save(folder / "all.npy", arrays)

    def load(self, folder: Path) -> Loader:
        arrays = torch.from_numpy(np.load(folder / "all.npy"))
        return loader(TensorDataset(arrays, torch.arange(len(arrays)) % 10), shuffle=True)


class FfcvRows:
    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> Any:
        return self.arrays[index], index % 10


def store_ffcv_arrays(arrays: np.ndarray[Any, Any], folder: Path) -> None:
    from ffcv.fields import IntField, NDArrayField
    from ffcv.writer import DatasetWriter

    fields = {"x": NDArrayField(arrays.dtype, arrays.shape[1:]), "y": IntField()}
    with contextlib.redirect_stderr(io.StringIO()):
        DatasetWriter(str(folder / "data.beton"), fields, num_workers=1).from_indexed_dataset(FfcvRows(arrays))


def load_ffcv_arrays(folder: Path) -> Loader:
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
    from ffcv.loader import Loader as FfcvLoader
    from ffcv.loader import OrderOption
    from ffcv.transforms import ToTensor

    return FfcvLoader(
        str(folder / "data.beton"),
        batch_size=BATCH,
        num_workers=WORKERS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"x": [NDArrayDecoder(), ToTensor()], "y": [IntDecoder(), ToTensor()]},
    )


ARRAY_PEERS = {
    "h5py": Peer("h5py", "h5py", store_h5, lambda folder: loader(H5Rows(folder / "data.h5"), shuffle=True)),
    "webdataset": Peer("webdataset", "webdataset", store_wds_arrays, load_wds_arrays),
    "litdata": Peer("litdata", "litdata", store_litdata_arrays, load_litdata_arrays),
    "streaming": Peer("MDS (streaming)", "mosaicml-streaming", store_mds_arrays, MDSArrays()),
    "datasets": Peer("HF datasets", "datasets", store_hf_arrays, load_hf_arrays),
    "numpy": Peer("npy files", "numpy", store_npy, lambda folder: loader(NpyFiles(folder), shuffle=True)),
    "torch": Peer("TensorDataset in memory", "torch", InMemory().store, InMemory().load),
    "ffcv": Peer("ffcv", "ffcv", store_ffcv_arrays, load_ffcv_arrays),
}


# --- JPEG files in class folders ---------------------------------------------------------------------------------


class Folder(Dataset[Any]):
    """Files in class folders, decoded by a function of their bytes."""

    def __init__(self, files: list[Path], decode: Callable[[bytes], Any] = crop_bytes) -> None:
        self.files, self.decode = list(map(str, files)), decode
        classes = sorted({os.path.basename(os.path.dirname(f)) for f in self.files})
        self.labels = [classes.index(os.path.basename(os.path.dirname(f))) for f in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        with open(self.files[index], "rb") as stream:
            return self.decode(stream.read()), self.labels[index]


def store_list(files: list[Path], folder: Path) -> None:
    (folder / "files.txt").write_text("\n".join(map(str, files)))


def load_folder(folder: Path, decode: Callable[[bytes], Any] = crop_bytes) -> Loader:
    return loader(Folder([Path(f) for f in (folder / "files.txt").read_text().split("\n")], decode), shuffle=True)


class BareThreads:
    """As many threads as others have workers, which do nothing but decode, crop and keep the pixels.

    Args:
        files: JPEG files.
        decode: a function of a file's bytes and of a position, which gives uint8 ``[3, CROP, CROP]``.
    """

    def __init__(self, files: list[Path], decode: Callable[[bytes, int], torch.Tensor]) -> None:
        self.files, self.decode = list(map(str, files)), decode
        self.kept = np.zeros((WORKERS, BATCH, CROP, CROP, 3), np.uint8)

    def __iter__(self) -> Iterator[Any]:
        """One batch of nothing but labels, when all is done."""
        others = torch.get_num_threads()
        torch.set_num_threads(1)  # of each, as in a worker
        with ThreadPoolExecutor(WORKERS) as threads:
            list(threads.map(self._read, range(WORKERS)))
        torch.set_num_threads(others)
        yield None, range(len(self.files))

    def _read(self, thread: int) -> None:
        for at, position in enumerate(range(thread, len(self.files), WORKERS)):
            with open(self.files[position], "rb") as stream:
                crop = self.decode(stream.read(), position)
            self.kept[thread, at % BATCH] = crop.permute(1, 2, 0).numpy()


def decoded_in_full(data: bytes, position: int) -> torch.Tensor:
    """A random crop of a photograph that is decoded as a whole."""
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    area = draw_area(height, width, keyed_generator(position))
    return cut(simplejpeg.decode_jpeg(data), area, CROP, "bilinear")


def decoded_as_ours(data: bytes, position: int) -> torch.Tensor:
    """As this package decodes: at half the size where the crop allows it, and no rows below the crop."""
    _OURS.begin(position)
    return _OURS(data)


_OURS = RandomCrops(CROP)


def _bytes_of(value: bytes) -> bytes:
    return value


def store_wds_images(files: list[Path], folder: Path) -> None:
    import webdataset

    images = Folder(files, _bytes_of)
    with webdataset.ShardWriter(str(folder / "%04d.tar"), maxcount=max(1, len(files) // 8), verbose=0) as writer:
        for index in range(len(images)):
            data, label = images[index]
            writer.write({"__key__": f"{index:06d}", "jpg": data, "cls": label})


def load_wds_images(folder: Path) -> Loader:
    import webdataset

    dataset = (
        webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=100, empty_check=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(random_crop, _same)
    )
    return loader(dataset)


def _same(value: Any) -> Any:
    return value


def store_mds_images(files: list[Path], folder: Path) -> None:
    from streaming import MDSWriter

    images = Folder(files, _bytes_of)
    with MDSWriter(out=str(folder), columns={"x": "bytes", "y": "int"}) as writer:
        for index in range(len(images)):
            data, label = images[index]
            writer.write({"x": data, "y": label})


class _Mapped(Dataset[Any]):
    """A dataset of dicts of bytes and labels, decoded."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        return crop_bytes(sample["x"]), sample["y"]


def _collate_crops(samples: list[dict[str, Any]]) -> Any:
    return torch.stack([crop_bytes(s["x"]) for s in samples]), torch.tensor([s["y"] for s in samples])


def load_mds_images(folder: Path) -> Loader:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    return loader(StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH), collate_fn=_collate_crops)


def store_litdata_images(files: list[Path], folder: Path) -> None:
    _litdata_optimize(_LitImages(Folder(files, _bytes_of)), list(range(len(files))), folder)


@dataclass
class _LitImages:
    images: Folder

    def __call__(self, index: int) -> Any:
        data, label = self.images[index]
        return {"x": data, "y": label}


def load_litdata_images(folder: Path) -> Loader:
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    return litdata.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, collate_fn=_collate_crops
    )


def store_hf_images(files: list[Path], folder: Path) -> None:
    import datasets

    images = Folder(files, _bytes_of)
    rows = [images[index] for index in range(len(images))]
    table = datasets.Dataset.from_dict({"x": [r[0] for r in rows], "y": [r[1] for r in rows]})
    table.save_to_disk(str(folder))


def load_hf_images(folder: Path) -> Loader:
    import datasets

    return loader(_Mapped(datasets.load_from_disk(str(folder))), shuffle=True)


class FfcvImages:
    def __init__(self, files: list[Path]) -> None:
        self.images = Folder(files)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return Image.open(self.images.files[index]).convert("RGB"), self.images.labels[index]


def store_ffcv_images(files: list[Path], folder: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"x": RGBImageField(write_mode="jpg", jpeg_quality=90), "y": IntField()}
    with contextlib.redirect_stderr(io.StringIO()):
        DatasetWriter(str(folder / "data.beton"), fields, num_workers=WORKERS).from_indexed_dataset(FfcvImages(files))


def load_ffcv_images(folder: Path, recipe: bool = False) -> Loader:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader as FfcvLoader
    from ffcv.loader import OrderOption
    from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage

    scaled = [255 * np.array(each) for each in (MEAN, STD)]
    more = [RandomHorizontalFlip(), NormalizeImage(*scaled, np.float32)] if recipe else []
    return FfcvLoader(
        str(folder / "data.beton"),
        batch_size=BATCH,
        num_workers=WORKERS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "x": [RandomResizedCropRGBImageDecoder((CROP, CROP)), *more, ToTensor(), ToTorchImage()],
            "y": [IntDecoder(), ToTensor()],
        },
    )


IMAGE_PEERS = {
    "PIL": Peer("folder, PIL", "pillow", store_list, load_folder),
    "webdataset": Peer("webdataset", "webdataset", store_wds_images, load_wds_images),
    "litdata": Peer("litdata", "litdata", store_litdata_images, load_litdata_images),
    "streaming": Peer("MDS (streaming)", "mosaicml-streaming", store_mds_images, load_mds_images),
    "datasets": Peer("HF datasets", "datasets", store_hf_images, load_hf_images),
    "ffcv": Peer("ffcv", "ffcv", store_ffcv_images, load_ffcv_images),
}


RECIPE_PEERS = {
    "PIL": Peer("folder, PIL", "pillow", store_list, partial(load_folder, decode=normalized_crop)),
    "ffcv": Peer("ffcv", "ffcv", store_ffcv_images, partial(load_ffcv_images, recipe=True)),
}


# --- a bare loop over py-lmdb ------------------------------------------------------------------------------------


def bare_lmdb(values: Iterator[bytes], file: Path) -> None:
    """What somebody would write by hand: sequential keys, a checksum, a transaction per 1,000 records."""
    import lmdb

    env = lmdb.open(str(file), subdir=False, map_size=1 << 40, lock=False, lib_version=0)
    txn = env.begin(write=True)
    for index, value in enumerate(values):
        txn.put(struct.pack(">Q", index), zlib.crc32(value).to_bytes(4, "big") + value, append=True)
        if index % 1000 == 999:
            txn.commit()
            txn = env.begin(write=True)
    txn.commit()
    env.sync(True)
    env.close()
