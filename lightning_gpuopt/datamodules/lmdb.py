"""LMDBDataModule: stored datasets for the four stages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_gpuopt.datamodules.elastic import ElasticDataModule
from lightning_gpuopt.storage.reader import LMDBDataset


class LMDBDataModule(ElasticDataModule):
    """Loaders over LMDB datasets: shuffled, sharded over the ranks, and resumable to the sample.

    Paths are those of datasets made by `build_lmdb` or `LMDBWriter`; any map-style dataset is accepted too (``Subset``,
    ``ConcatDataset`` and ``random_split`` of `LMDBDataset` keep its fast paths). Samples are checked against their
    checksums, except if small records are gathered in batches.

    Example::

        datamodule = LMDBDataModule("train.lmdb", "val.lmdb", batch_size=256, decode="tensor", crop_size=224,
                                    normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        trainer.fit(model, datamodule)
    """

    @override
    def _open_path(self, path: str | os.PathLike[str], name: str, transform: Callable[[Any], Any] | None) -> Any:
        return LMDBDataset(path, transform, self.target_transform, decode=self.decode)
