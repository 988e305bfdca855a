"""Map-style Datasets, and datasets that this package wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.format import Manifest
from lightning_gpuopt.storage.shard import ShardMap, locate, open_shard
from lightning_gpuopt.storage.sources.base import PerProcess, Source, digest


class DatasetSource(Source):
    """Anything with ``__len__`` and ``__getitem__``; its samples as they come."""

    kind = "dataset"

    def __init__(self, dataset: Any) -> None:
        self.path = type(dataset).__qualname__
        self._dataset = dataset
        try:
            self._length = len(dataset)
        except TypeError:
            raise TypeError(
                f"source: expected a path or a map-style Dataset with __len__ and __getitem__, got a {self.path} "
                "without a length"
            ) from None
        if not self._length:
            raise ValueError(f"source: the {self.path} has no samples")
        classes = getattr(dataset, "classes", None)
        if isinstance(classes, Sequence) and not isinstance(classes, str) and all(type(c) is str for c in classes):
            self.classes = tuple(classes)

    def __len__(self) -> int:
        return self._length

    def name(self, index: int) -> str:
        """The index."""
        return f"{self.path}[{index}]"

    def read(self, index: int) -> Any:
        """What the dataset gives."""
        try:
            return self._dataset[index]
        except Exception as error:
            raise RuntimeError(
                f"source: {self.name(index)} raised {type(error).__name__}: {error}; mend the Dataset, then go on with "
                "resume=True"
            ) from error

    def fingerprint(self) -> dict[str, Any]:
        """Type and length; nobody can look inside."""
        return {"kind": self.kind, "num_samples": len(self), "type": self.path}


class OwnSource(Source):
    """A dataset that this package wrote; images stay as they are, and every checksum is compared."""

    kind = "lightning-gpuopt"

    def __init__(self, path: str) -> None:
        self.path = path
        self._manifest = Manifest.load(Path(path))
        if not self._manifest.num_samples:
            raise ValueError(f"{path}: there is no sample in it")
        self._starts: list[int] = []
        total = 0
        for shard in self._manifest.shards:
            self._starts.append(total)
            total += shard.num_samples
        self._maps: PerProcess[dict[int, ShardMap]] = PerProcess(dict)
        self.classes = self._manifest.classes
        self.num_bytes = self._manifest.num_bytes

    def __len__(self) -> int:
        return self._manifest.num_samples

    def name(self, index: int) -> str:
        """The index."""
        return f"sample {index}"

    def read(self, index: int) -> Any:
        """The sample as it was written."""
        at, within = locate(self._starts, index)
        shard = self._manifest.shards[at]
        maps = self._maps.get()
        if at not in maps:
            maps.clear()  # read in order: the last one is done with
            maps[at] = open_shard(Path(self.path), shard)
        try:
            maps[at].check(within)
            return maps[at].read(within, codec.EncodedImage)
        except DamagedError as error:
            raise DamagedError(
                f"{self.path}: sample {index} ({shard.name}): {error}; copy it again, or build it from its own source"
            ) from None

    def fingerprint(self) -> dict[str, Any]:
        """Its manifest."""
        return {"kind": self.kind, "num_samples": len(self), "manifest": digest([self._manifest.to_json().encode()])}
