"""Real sources for the tests of the build: images, folders and tars."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from PIL import Image

from lightning_gpuopt.storage.format import Manifest
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.sources import Source


def image_file(seed: int, kind: str = "JPEG", size: tuple[int, int] = (24, 16), **options: Any) -> bytes:
    """An image file whose bytes depend on the seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def write_folder(root: Path, counts: Mapping[str, int]) -> dict[str, bytes]:
    """A folder of JPEGs, so many for each class; the content by relative path, in the order of the dataset."""
    files: dict[str, bytes] = {}
    for name in sorted(counts):
        (root / name).mkdir(parents=True)
        for number in range(counts[name]):
            path = f"{name}/{number:05d}.jpg"
            files[path] = image_file(len(files))
            (root / path).write_bytes(files[path])
    return files


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    """A tar of these members, in this order."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def npy(array: Any) -> bytes:
    """The bytes of a .npy file."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def stored(path: Path) -> list[Any]:
    """All samples of a dataset, images as bytes, checksums compared."""
    dataset = LMDBDataset(path, decode="raw", verify_checksum=True)
    return [dataset[index] for index in range(len(dataset))]


def kept(path: Path) -> dict[str, bytes]:
    """Everything that makes up a dataset, file by file; the LMDB files' pages may differ, their samples may not."""
    files = {name: (path / name).read_bytes() for name in sorted(os.listdir(path)) if not name.endswith(".mdb")}
    return {**files, "samples": repr(stored(path)).encode(), "manifest": repr(Manifest.load(path)).encode()}


def beside(path: Path) -> list[str]:
    """What lies in the directory of a dataset."""
    return sorted(os.listdir(path.parent))


def samples(source: Source) -> list[Any]:
    return [source.read(index) for index in range(len(source))]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def write_pickled(path: Path, values: dict[bytes, Any], *, subdir: bool = True, **options: Any) -> None:
    with (
        lmdb.open(str(path), subdir=subdir, map_size=1 << 24, lock=False, **options) as env,
        env.begin(write=True) as t,
    ):
        for key, value in values.items():
            t.put(key, value if isinstance(value, bytes) else pickle.dumps(value))
