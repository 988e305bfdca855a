"""Reading a dataset: `LMDBDataset`."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import index as as_index
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgpack
import numpy as np
from torch.utils.data import Dataset

from lightning_gpuopt.images.decode import decode_pil, decode_tensor
from lightning_gpuopt.images.errors import is_bad_image, raised_in, reason_of
from lightning_gpuopt.loading.datasets import duplicate
from lightning_gpuopt.loading.labels import Labels
from lightning_gpuopt.loading.samples import keep_heap
from lightning_gpuopt.loading.transforms import name_sample, transformed
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError, DamagedFileError, DamagedSampleError
from lightning_gpuopt.storage.format import LMDBInfo, Manifest, Shard
from lightning_gpuopt.storage.gather import Gather, gather
from lightning_gpuopt.storage.labels import TARGETS, read_labels
from lightning_gpuopt.storage.shard import ShardReader, blocks_read, open_shard
from lightning_gpuopt.utils.arguments import choice, flag, refuse

_DECODERS: Final[dict[str, codec.ImageDecoder | None]] = {"pil": decode_pil, "tensor": decode_tensor, "raw": None}
_AHEAD: Final = 4096  # samples asked for at once, at most: they must stay in memory until they are read

_FEW_SHARDS: Final = 8  # up to so many a batch's samples share looks at their files, which it then holds open
_Part = list[Any] | np.ndarray[Any, Any]  # a shard's part of a column


class LMDBDataset(Dataset[Any]):
    """A map-style dataset written by `build_lmdb` or `LMDBWriter`.

    Safe in worker processes with any start method, from threads, and when the same dataset is opened twice. Each
    process opens a file when it first reads one of its samples.

    Args:
        path: The dataset's directory.
        transform: Applied to the image of (image, label), and to the whole of any other sample: (image, mask),
            (image, {"boxes": ...}), dicts.
        target_transform: Applied to the second of a sample's two parts.
        decode: Type of the images: ``"pil"`` RGB images, ``"tensor"`` uint8 tensors ``[3, H, W]``, both upright, or
            ``"raw"`` the bytes of the image file. Images written in another mode than RGB (masks, depth) keep it: as
            PIL images, or ``[C, H, W]`` in their own dtype. Other values come back as written.
        verify_checksum: Check every sample that is read against its checksum.

    Raises:
        FileNotFoundError: `path` does not exist.
        StorageError: It cannot be read.

    Example::

        >>> dataset = LMDBDataset("train.lmdb", transform=augment)  # doctest: +SKIP
        >>> image, label = dataset[0]  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: Literal["pil", "tensor", "raw"] = "pil",
        verify_checksum: bool = False,
    ) -> None:
        choice("decode", decode, tuple(_DECODERS))
        for name, function in (("transform", transform), ("target_transform", target_transform)):
            if function is not None and not callable(function):
                refuse(name, "a function of a sample, or None", function, wrong_type=True)
        self.path = Path(os.path.abspath(path))
        self.transform = transform
        self.target_transform = target_transform
        self.decode = decode
        self.verify_checksum = flag("verify_checksum", verify_checksum)
        self.manifest = Manifest.load(self.path)
        self.starts = [0, *accumulate(shard.num_samples for shard in self.manifest.shards)][:-1]
        self._num_samples = self.manifest.num_samples
        self._shards: list[ShardReader | None] = [None] * len(self.manifest.shards)
        self._decoder = _DECODERS[decode]
        self._blocks = 0  # that had been read from the disk before the last batch

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "targets"}
        return {**kept, "_shards": [None] * len(self._shards), "_blocks": 0}

    def __len__(self) -> int:
        return self._num_samples

    def __repr__(self) -> str:
        classes = "" if self.manifest.classes is None else f", {len(self.manifest.classes)} classes"
        return f"LMDBDataset({str(self.path)!r}, {len(self)} samples{classes}, decode={self.decode!r})"

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, index by label; None if there are none."""
        return None if self.manifest.classes is None else list(self.manifest.classes)

    @property
    def info(self) -> LMDBInfo:
        """The dataset's counts and classes."""
        return self.manifest.info

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class; empty if there are no classes."""
        return {name: label for label, name in enumerate(self.manifest.classes or ())}

    @cached_property
    def targets(self) -> Sequence[Any]:
        """The label of each sample: the second part, or the entry called label, cls or target.

        Whole numbers come from the label columns, which are stored next to the samples, and are kept as a numpy array.
        Without such columns, the samples are read, except for their images.

        Raises:
            AttributeError: The samples have neither.
            DamagedError: The label columns, or a sample, are not what was written.
        """
        try:
            parts = self._column(self._target_key())
            numbers = [part for part in parts if isinstance(part, np.ndarray)]
            kinds = {"i" if part.dtype.kind == "u" else part.dtype.kind for part in numbers}
            whole = kinds == {"b"} or (kinds == {"i"} and np.result_type(*numbers).kind in "iu")
            if whole and len(numbers) == len(parts):
                return Labels(np.concatenate(numbers))
            return _joined(parts)
        except (LookupError, TypeError) as err:
            raise AttributeError(f"{self.path}: it has no targets: {err}") from None

    def _target_key(self) -> int | str:
        structure = self._structure
        if structure[0] in ("tuple", "list") and len(structure[1]) > 1 and structure[1][1][0] == "image":
            raise LookupError("the second part is an image")
        if structure[0] != "dict":
            return 1
        found = [name for name in TARGETS if name in structure[1]]
        if not found:
            raise LookupError(f"no key is one of {', '.join(TARGETS)}; column(key) gives any of {structure[1]}")
        return found[0]

    @cached_property
    def as_written(self) -> set[tuple[int | str, ...]]:
        """The positions of arrays, tensors and images in other modes in a sample, as indices and keys, outermost first.

        Taken from the first sample of each shard; empty if a transform or a subclass makes other samples.
        """
        if not self._own or self.transform is not None or not self._num_samples:
            return set()
        with contextlib.suppress(DamagedError):  # which whoever reads the sample is told
            trees = [self._structure, *(shard.structure for shard in self.manifest.shards if shard.structure)]
            return {path for tree in trees for path in codec.as_written(tree)}
        return set()

    @cached_property
    def _structure(self) -> Any:
        """The first sample's structure, as a tree."""
        shard = next(each for each in self.manifest.shards if each.num_samples)
        if shard.structure is not None:
            return shard.structure
        try:
            return codec.structure_of(self.value(0))
        except (ValueError, TypeError, msgpack.UnpackException) as err:
            raise DamagedError(f"{self.path}: sample 0: its structure cannot be read ({err})") from None

    def column(self, key: int | str) -> list[Any]:
        """One part of every sample, without reading the others.

        Args:
            key: Index of the part in tuples and lists, or its key in dicts. Images are given as their files' bytes.

        Returns:
            As many values as there are samples, in their order.

        Raises:
            LookupError: A sample has no such part.
            TypeError: A sample has no parts.
            DamagedError: A sample is not what was written.
        """
        return _joined(self._column(key))

    def _column(self, key: int | str) -> list[_Part]:
        shards = enumerate(self.manifest.shards)
        return [self._column_of(at, shard, key) for at, shard in shards if shard.num_samples]

    def _column_of(self, at: int, shard: Shard, key: int | str) -> _Part:
        if key in dict(shard.labels):
            return read_labels(self.path, shard)[key]
        opened = self.shard(at)
        numbers = opened.numbers(key)
        if numbers is not None:
            return numbers
        values: list[Any] = []
        for within in range(shard.num_samples):
            try:
                values.append(opened.part(within, key))
            except DamagedError as err:
                self._refuse(at, within, err)
            except (LookupError, TypeError) as err:
                raise type(err)(f"{self.path}: sample {self.starts[at] + within}: {err}") from None
        return values

    def __getitem__(self, index: int) -> Any:
        sample = self.read(index, self._decoder)
        if self.transform is None and self.target_transform is None:
            return sample
        try:
            return self.transformed(sample)
        except Exception as err:
            name_sample(err, self.sample_name(index))
            raise

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch.

        Raises:
            IndexError: An index is out of range.
            DamagedError: A sample is not what was written.
        """
        self.read_ahead(indices)
        if not self.is_pure:
            return [self[index] for index in indices]
        if len(self._shards) > _FEW_SHARDS:
            return [self.read(index, self._decoder) for index in indices]
        readers: dict[int, Callable[[int], Any]] = {}
        places = [self._locate(index) for index in indices]
        samples: list[Any] = []
        try:
            for at, within in places:
                reader = readers.get(at)
                if reader is None:
                    reader = readers[at] = self.shard(at).reader(self._decoder, verify=self.verify_checksum)
                samples.append(reader(within))
        except (MemoryError, RecursionError):
            raise
        except Exception as err:
            self._refuse(*places[len(samples)], err)
        return samples

    def with_decoder(self, decoder: codec.ImageDecoder) -> LMDBDataset:
        """A copy whose images go through `decoder`, and whose checksums are compared."""
        copied = self.for_loader()
        copied._decoder = decoder
        return copied

    def for_loader(self) -> LMDBDataset:
        """A copy whose checksums are compared."""
        copied: LMDBDataset = duplicate(self)
        copied._shards = list(self._shards)
        copied.verify_checksum = True
        return copied

    def gather(self, datasets: Sequence[LMDBDataset], indices: Any) -> Gather | None:
        """What takes whole batches from datasets of this kind, where their records are equal arrays and numbers."""
        if not self._own or type(self).__len__ is not LMDBDataset.__len__:
            return None
        return gather(datasets, indices)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Have the kernel start reading a batch's samples, if the last batch was not in memory.

        That keeps the disk's queue full. It is not done if the samples are in memory: it would cost a third of the time
        of reading small ones.
        """
        blocks = blocks_read()
        from_disk, self._blocks = blocks != self._blocks, blocks
        if not from_disk:
            return
        for index in indices[:_AHEAD]:
            at, within = self._locate(index)
            self.shard(at).will_need(within)

    def sample_name(self, index: int) -> str:
        """The dataset and the index."""
        return f"{self.path}: sample {index}"

    def image_file(self, index: int) -> bytes | None:
        """The first image file of a sample; None if there is none."""
        data = self.encoded_image(index)
        return None if data is None else bytes(data)

    def encoded_image(self, index: int) -> memoryview | None:
        """The same without a copy: a part of the sample's stored value, which lives as long as it does."""
        found: list[memoryview] = []

        def keep(data: memoryview, mode: str | None = None) -> None:
            found.append(data)

        self.read(index, keep)
        return found[0] if found else None

    def read(self, index: int, image: codec.ImageDecoder | None) -> Any:
        """A sample before the transforms.

        Args:
            index: Which.
            image: What makes an image of an image file (its bytes come in a memoryview that must not outlive the
                call); None: the bytes of the file.

        Raises:
            IndexError: The index is out of range.
            DamagedError: The sample is not what was written, or its image cannot be decoded.
            Exception: What else `image` raises.
        """
        if type(index) is int and 0 <= index < self._num_samples:  # as _locate does, without the call
            at = bisect_right(self.starts, index) - 1
            within = index - self.starts[at]
        else:
            at, within = self._locate(index)
        try:
            shard = self._shards[at] or self._open(at)
            return shard.read(within, image, verify=self.verify_checksum)
        except (MemoryError, RecursionError):
            raise
        except Exception as err:
            self._refuse(at, within, err)

    def value(self, index: int) -> bytes:
        """A sample's stored value.

        Raises:
            IndexError: The index is out of range.
            DamagedError: The dataset's files are not those that were written.
        """
        at, within = self._locate(index)
        try:
            return self.shard(at).value(within)
        except DamagedError as err:
            self._refuse(at, within, err)

    def shard(self, at: int) -> ShardReader:
        """The dataset's shard at a position.

        Raises:
            DamagedError: A file is missing, or is not the one that was written.
        """
        return self._shards[at] or self._open(at)

    def _open(self, at: int) -> ShardReader:
        keep_heap()
        shard = self._shards[at] = open_shard(self.path, self.manifest.shards[at])
        return shard

    def _locate(self, index: int) -> tuple[int, int]:
        """Position of the sample's shard and its index within that."""
        size = self._num_samples
        if type(index) is not int:
            try:
                index = as_index(index)
            except TypeError:
                raise TypeError(f"expected an integer as the index of a sample, got {index!r}") from None
        number = index + size if index < 0 else index
        if not 0 <= number < size:
            raise IndexError(f"{self.path}: there is no sample {index}; the dataset has {size}")
        at = bisect_right(self.starts, number) - 1
        return at, number - self.starts[at]

    def transformed(self, sample: Any) -> Any:
        """A sample after the transforms.

        Raises:
            ValueError: There is a `target_transform`, but no second part to apply it to.
        """
        if self.transform is None and self.target_transform is None:
            return sample
        return transformed(sample, self.transform, self.target_transform, str(self.path), rich=self._rich)

    @property
    def _own(self) -> bool:
        """Whether no subclass makes something else of the samples."""
        own = ("__getitem__", "__getitems__", "read", "transformed")
        return all(getattr(type(self), name) is getattr(LMDBDataset, name) for name in own)

    @property
    def is_pure(self) -> bool:
        """Whether a sample is what was stored: no subclass, and no transform, makes something else of it."""
        return self._own and self.transform is None and self.target_transform is None

    @cached_property
    def _rich(self) -> bool:
        """Whether the second of two parts is an image, which bytes do not show."""
        if self.decode != "raw":
            return False
        kind, *rest = self._structure
        return kind in ("tuple", "list") and len(rest[0]) == 2 and rest[0][1][0] == "image"

    def _refuse(self, at: int, within: int, err: Exception) -> NoReturn:
        """Raise what went wrong with a sample: DamagedSampleError or DamagedError if it or its shard is bad."""
        shard = self.manifest.shards[at]
        name = f"{self.path}: sample {self.starts[at] + within}"
        if isinstance(err, OSError) and Path(str(err.filename)).stem == shard.name:  # its file cannot be read
            raise err
        if isinstance(err, DamagedFileError):
            raise DamagedFileError(f"{name} ({shard.name}): {err}") from err
        if isinstance(err, DamagedError):
            what = f"{err}; run `lightning-gpuopt lmdb verify` on it, and copy or build the dataset again"
        elif not (is_bad_image(err) or raised_in(err)[0] == codec.__name__):
            name_sample(err, name, "the decoding")
            raise err
        else:
            what = (
                f"it cannot be decoded ({type(err).__name__}: {reason_of(err)}); `lightning-gpuopt lmdb verify "
                "--decode` lists all such samples"
            )
        raise DamagedSampleError(f"{name} ({shard.name}): {what}") from err


def _joined(parts: list[_Part]) -> list[Any]:
    values: list[Any] = []
    for part in parts:
        values += part if isinstance(part, list) else part.tolist()
    return values
