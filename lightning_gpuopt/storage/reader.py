"""Reading a dataset: `LMDBDataset`."""

from __future__ import annotations

import os
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import index as as_index
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from torch.utils.data import Dataset

from lightning_gpuopt._arguments import choice, flag, refuse
from lightning_gpuopt.images.decode import decode_pil, decode_tensor
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.format import LMDBInfo, Manifest
from lightning_gpuopt.storage.shard import ShardMap, open_shard

_DECODERS: Final[dict[str, codec.ImageDecoder | None]] = {"pil": decode_pil, "tensor": decode_tensor, "raw": None}
_AHEAD: Final = 256  # samples asked for at once: enough for any disk's queue, little enough to stay in memory


class LMDBDataset(Dataset[Any]):
    """A dataset that `build_lmdb` or `LMDBWriter` made, by index.

    Safe in worker processes however they are started, from threads, and when the same dataset is opened again. Files
    are mapped when the first sample is read, once a process.

    Args:
        path: The dataset's directory.
        transform: Applied to the first of a sample's two parts, or to the whole sample where it is no tuple or list of
            two.
        target_transform: Applied to the second of a sample's two parts.
        decode: What becomes of images: ``"pil"`` RGB images, ``"tensor"`` uint8 tensors ``[3, H, W]``, both upright,
            or ``"raw"`` the bytes of the image file. Other values come back as they were written.
        verify_checksum: Compare every sample that is read with its checksum.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        StorageError: What is there cannot be read.

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
        self._shards: list[ShardMap | None] = [None] * len(self.manifest.shards)
        self._from_disk = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": [None] * len(self._shards), "_from_disk": False}

    def __len__(self) -> int:
        return self._num_samples

    def __repr__(self) -> str:
        classes = "" if self.manifest.classes is None else f", {len(self.manifest.classes)} classes"
        return f"LMDBDataset({str(self.path)!r}, {len(self)} samples{classes}, decode={self.decode!r})"

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, index by label; None where there are none."""
        return None if self.manifest.classes is None else list(self.manifest.classes)

    @property
    def info(self) -> LMDBInfo:
        """What the dataset holds."""
        return self.manifest.info

    def __getitem__(self, index: int) -> Any:
        return self.transformed(self.read(index, _DECODERS[self.decode]))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of a batch.

        Raises:
            IndexError: An index is out of range.
            DamagedError: A sample is not what was written.
        """
        image, read = _DECODERS[self.decode], self.read
        if self.transform is None and self.target_transform is None:
            return [read(index, image) for index in self.ahead(indices)]
        return [self.transformed(read(index, image)) for index in self.ahead(indices)]

    def ahead(self, indices: Sequence[int]) -> Iterator[int]:
        """The indices of a batch, whose samples the disk is asked for all at once where they are not in memory.

        That keeps the disk's queue full. It is not done where the last batch was in memory: it would cost a third of
        what reading small samples costs.
        """
        before = _blocks_read()
        for start in range(0, len(indices), _AHEAD):
            some = indices[start : start + _AHEAD]
            if self._from_disk:
                self.prefetch(some)
            yield from some
        self._from_disk = _blocks_read() != before

    def read(self, index: int, image: codec.ImageDecoder | None) -> Any:
        """A sample before the transforms.

        Args:
            index: Which.
            image: What makes an image of an image file (its bytes come in a memoryview that must not outlive the
                call); None: the bytes of the file.

        Raises:
            IndexError: The index is out of range.
            DamagedError: The sample is not what was written.
        """
        at, within = self._locate(index)
        try:
            shard = self._shards[at] or self._open(at)
            if self.verify_checksum:
                shard.check(within)
            return shard.read(within, image)
        except (MemoryError, RecursionError):
            raise
        except Exception as err:
            self._refuse(at, within, err)

    def value(self, index: int) -> memoryview:
        """A sample's stored value, without a copy.

        Raises:
            IndexError: The index is out of range.
            DamagedError: The dataset's files are not those that were written.
        """
        at, within = self._locate(index)
        try:
            return self.shard(at).value(within)
        except DamagedError as err:
            self._refuse(at, within, err)

    def shard(self, at: int) -> ShardMap:
        """The dataset's shard at a position, mapped.

        Raises:
            DamagedError: A file is missing, or is not the one that was written.
        """
        return self._shards[at] or self._open(at)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Have the kernel begin to read samples from the disk, without waiting for them."""
        for index in indices:
            at, within = self._locate(index)
            self.shard(at).will_need(within)

    def _open(self, at: int) -> ShardMap:
        _keep_heap()
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
            ValueError: There is a `target_transform`, but no second part that it could be applied to.
        """
        transform, target_transform = self.transform, self.target_transform
        if type(sample) in (tuple, list) and len(sample) == 2:
            first, second = sample
            if transform is not None:
                first = transform(first)
            if target_transform is not None:
                second = target_transform(second)
            return (first, second) if type(sample) is tuple else [first, second]
        if target_transform is not None:
            raise ValueError(
                f"{self.path}: target_transform wants samples of two parts, but they are "
                f"{type(sample).__name__}s; do it in transform, which gets the whole sample"
            )
        return sample if transform is None else transform(sample)

    def _refuse(self, at: int, within: int, err: Exception) -> NoReturn:
        """Raise what went wrong with a sample, with its name.

        Raises:
            DamagedError: Always, but for an OSError of the shard's own files.
        """
        shard = self.manifest.shards[at]
        if isinstance(err, OSError) and self._shards[at] is None:
            raise err
        if self._shards[at] is None:
            what = str(err)  # the shard could not be opened, and the error names its file
        elif isinstance(err, DamagedError):
            what = f"{err}; run `lightning-gpuopt lmdb verify` on it, and copy or build the dataset again"
        else:
            what = (
                f"it cannot be decoded ({type(err).__name__}: {err}); `lightning-gpuopt lmdb verify --decode` lists "
                "all such samples"
            )
        raise DamagedError(f"{self.path}: sample {self.starts[at] + within} ({shard.name}): {what}") from err


def _blocks_read() -> int:
    """Blocks and pages that this thread has had to wait for, or has asked for, from a disk."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


def _keep_heap() -> None:
    """Have glibc keep the memory of a batch for the next one.

    Else it gives the end of the heap back to the kernel whenever a batch is freed, and every page of the next batch
    is a fault: half the time of reading. It stops doing so after a large block was freed (mallopt(3), M_TRIM_THRESHOLD
    and the dynamic mmap threshold); such a block costs nothing, as it is never touched.
    """
    bytes(16 << 20)
