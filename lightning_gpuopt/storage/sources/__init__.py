"""What a dataset is built from, one file for each kind of source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_gpuopt.images.files import class_names
from lightning_gpuopt.storage.format import MANIFEST, foreign_lmdb
from lightning_gpuopt.storage.sources.arrays import NumpySource
from lightning_gpuopt.storage.sources.base import Source, expand
from lightning_gpuopt.storage.sources.datasets import OwnSource, from_dataset
from lightning_gpuopt.storage.sources.folder import FolderSource
from lightning_gpuopt.storage.sources.hdf5 import HDF5Source
from lightning_gpuopt.storage.sources.parquet import ParquetSource
from lightning_gpuopt.storage.sources.pickled import ForeignSource
from lightning_gpuopt.storage.sources.tar_index import Indexing
from lightning_gpuopt.storage.sources.tars import TarSource
from lightning_gpuopt.storage.sources.tensors import SafetensorsSource, SavedSource

__all__ = ["Source", "open_source"]


def open_source(source: Any, *, allow_pickle: bool = False, indexing: Indexing | None = None) -> Source:
    """Recognise a source (a path, a pattern, a list of paths, a Dataset), and look through it without reading samples.

    `allow_pickle` runs whatever code an LMDB's author wished. Without `indexing` tars are looked through here, with
    their indexes in memory. Raises FileNotFoundError, ValueError (empty, or of no known kind) and StorageError.
    """
    if isinstance(source, (str, os.PathLike)):
        return _from_path(os.fspath(source), allow_pickle, indexing)
    if isinstance(source, (list, tuple)) and source and all(isinstance(s, (str, os.PathLike)) for s in source):
        return _from_files([path for s in source for path in expand(os.fspath(s))], repr(source), indexing)
    return from_dataset(source)


def _from_path(path: str, allow_pickle: bool, indexing: Indexing | None) -> Source:
    if not os.path.lexists(path):
        return _from_files(expand(path), path, indexing)
    if foreign_lmdb(Path(path)) is not None:
        return ForeignSource(path, allow_pickle)
    if not os.path.isdir(path):
        return _from_files([path], path, indexing)
    names = sorted(os.listdir(path))
    if MANIFEST in names:
        return OwnSource(path)
    for extension in (".tar", ".parquet"):
        files = [os.path.join(path, n) for n in names if n.lower().endswith(extension) and not n.startswith(".")]
        if files and extension == ".tar" and class_names(path)[0]:
            raise ValueError(
                f"{path}: it holds both folders and *.tar files; pass {os.path.join(path, '*.tar')} for the tars, or "
                "move them away for the folders"
            )
        if files:
            return _from_files(files, path, indexing)
    return FolderSource(path)


def _from_files(paths: list[str], given: str, indexing: Indexing | None) -> Source:
    if not paths:
        raise FileNotFoundError(f"{given}: no file is matched by this pattern")
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path}: there is no such file or folder; pass the path of a source")
    kinds = {os.path.splitext(path)[1].lower() for path in paths}
    kind = kinds.pop()
    if kinds:
        raise ValueError(f"{given}: files of several kinds ({', '.join(sorted({kind, *kinds}))}); give one kind")
    if kind == ".tar":
        return TarSource(paths, indexing)
    if kind == ".parquet":
        return ParquetSource(paths)
    if len(paths) > 1:
        raise ValueError(f"{given}: {len(paths)} files; only *.tar and *.parquet are read several at a time")
    return _from_file(paths[0], kind)


def _from_file(path: str, kind: str) -> Source:
    if kind in (".h5", ".hdf5"):
        return HDF5Source(path)
    if kind in (".npy", ".npz"):
        return NumpySource(path)
    if kind in (".pt", ".pth"):
        return SavedSource(path)
    if kind == ".safetensors":
        return SafetensorsSource(path)
    if kind == ".tgz" or (kind in (".gz", ".bz2", ".xz", ".zst") and ".tar" in os.path.basename(path).lower()):
        raise ValueError(f"{path}: a compressed tar, whose samples cannot be read one by one; decompress it first")
    raise ValueError(
        f"{path}: not a known source; expected a folder of images with class subfolders, .tar, .h5, .hdf5, .npy, .npz, "
        ".pt, .pth, .safetensors, .parquet, an LMDB, or a map-style Dataset"
    )
