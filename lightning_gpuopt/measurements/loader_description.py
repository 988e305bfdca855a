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

# kinds that have no DataLoader, and so none of its settings
WITHOUT_SETTINGS: Final = ("nodes", "pipeline", "iterable")
Work = Literal["processes", "threads", "training process"]

NOW: Final = "now"
NEXT: Final = "with the next iterator"


@dataclass(frozen=True, slots=True)
class LoaderDescription:
    """A loader of a Trainer; None: not known."""

    kind: LoaderKind = "iterable"
    name: str = ""  # the class that the program uses: "WebLoader"
    key: str = ""  # where it is in a CombinedLoader, "images" or "0"; empty: it is the only one
    work: Work = "training process"  # where samples are read
    num_workers: int | None = None  # processes, or threads of a graph of nodes; 0: the training process reads
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    sample_parallel: bool = False  # each sample is a task of the workers, not each batch
    batch_size: int | None = None
    length: int | None = None  # batches of an epoch, on this rank
    is_iterable: bool = False  # read as a stream, so that workers decide who reads what
    keeps_state: bool = False  # it has a ``state_dict`` that holds for its number of workers only
    sharding: Literal["sampler", "dataset"] | None = None  # who divides samples among ranks and workers; None: nobody
    shards: int | None = None  # files or parts of a stream, divided among this rank's workers
    idle_workers: int = 0  # workers with no shard, or no batch, to read
    duplicates: bool | None = None  # more workers would bring samples twice: its stream is not divided
    caches: tuple[str, ...] = ()  # folders in which a stream keeps what it has downloaded
    unshared: str | None = None  # why more workers would read other samples: a shared open file, a generator
    may_be_sample_parallel: bool = False  # a SampleLoader would make its batches sample by sample, as far as is known
    # for each setting "now", "with the next iterator", or "refused because ..."
    changes: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # worth a line in the report, such as an unknown version
