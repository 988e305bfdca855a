"""What a training loader is, whatever its kind: who does the work, what it has, and what may be changed when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

LoaderKind = Literal["torch", "stateful", "litdata", "mds", "webdataset", "nodes", "pipeline", "iterable"]
"""- ``torch``: torch's ``DataLoader``, or a class derived from it, or one behind an attribute of a user's own class.
- ``stateful``: torchdata's ``StatefulDataLoader``: its state holds for the ``num_workers`` that it began with.
- ``litdata``, ``mds``: a ``StreamingDataLoader`` of LitData, of MosaicML Streaming.
- ``webdataset``: a ``WebLoader``, whose first stage is a ``DataLoader``.
- ``nodes``: ``torchdata.nodes.Loader``, a graph of nodes with threads or processes of its own.
- ``pipeline``: decodes in threads of its own, or on the GPU, as ``DALIDataModule``'s.
- ``iterable``: any other object that can be iterated.
"""

WITHOUT_SETTINGS: Final = ("nodes", "pipeline", "iterable")
"""Kinds that have no DataLoader, and so none of its settings."""

Work = Literal["processes", "threads", "training process"]

SETTINGS: Final = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "device_prefetch")
"""What this package can change for a loader; the last is CudaPrefetcher's."""

NOW: Final = "now"
NEXT: Final = "with the next iterator"


@dataclass(frozen=True, slots=True)
class LoaderDescription:
    """A loader of a Trainer. What is not known is None.

    Attributes:
        kind: the kind.
        name: the class that the program uses, such as ``"WebLoader"``.
        key: where it is in a CombinedLoader, such as ``"images"`` or ``"0"``; empty where it is the only one.
        work: where samples are read.
        num_workers: worker processes, or threads of a graph of nodes; 0 where the training process reads.
        persistent_workers: whether workers live on from epoch to epoch.
        prefetch_factor: batches that each worker prepares ahead.
        pin_memory: whether batches come in page-locked memory.
        batch_size: samples of a batch.
        length: batches of an epoch, on this rank.
        is_iterable: whether its dataset is read as a stream, so that workers decide who reads what.
        keeps_state: whether it has a ``state_dict`` that holds for its number of workers only.
        sharding: who divides the samples among ranks and workers: ``"sampler"``, ``"dataset"``, or None for nobody.
        shards: files, or parts, of a stream that are divided among the workers of this rank.
        idle_workers: workers that have no shard, or no batch, to read.
        duplicates: whether more workers would bring samples twice: its stream is not divided among them.
        caches: folders in which a stream keeps what it has downloaded.
        unshared: why more workers would read other samples: an open file that they would share, a generator.
        datamodule: which of our DataModules would read its dataset sample by sample, so that a slow sample delays its
            own batch only; None where none would, or one does.
        changes: for each setting ``"now"``, ``"with the next iterator"``, or ``"refused because ..."``.
        notes: what is worth a line in the report, such as an unknown version.
    """

    kind: LoaderKind = "iterable"
    name: str = ""
    key: str = ""
    work: Work = "training process"
    num_workers: int | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    batch_size: int | None = None
    length: int | None = None
    is_iterable: bool = False
    keeps_state: bool = False
    sharding: Literal["sampler", "dataset"] | None = None
    shards: int | None = None
    idle_workers: int = 0
    duplicates: bool | None = None
    caches: tuple[str, ...] = ()
    unshared: str | None = None
    datamodule: str | None = None
    changes: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
