"""Loaders of every kind over the same 48 samples, each of which calls one function of the user's: :class:`Prepare`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from lightning_gpuopt import LMDBDataModule
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.helpers import FEATURES

SAMPLES, BATCH = 48, 2


def sample(index: int) -> torch.Tensor:
    return torch.full((FEATURES,), float(index))


class Prepare:
    """What each sample passes; ``slow_s`` is the injected slowness."""

    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s

    def __call__(self, value: Any) -> torch.Tensor:
        if self.slow_s:
            time.sleep(self.slow_s)
        return sample(value) if isinstance(value, int) else torch.as_tensor(value)


class Collate:
    def __init__(self, slow_s: float = 0.0) -> None:
        self.slow_s = slow_s

    def __call__(self, samples: Any) -> Any:
        if self.slow_s:
            time.sleep(self.slow_s)
        return default_collate(samples)


class Mapped(Dataset[torch.Tensor]):
    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.prepare(index)


class Stream(IterableDataset[torch.Tensor]):
    """Divides its samples among the workers."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in islice(range(SAMPLES), first, None, step):
            yield self.prepare(index)


class Around:
    """A class of the user's own around a DataLoader; ``after`` is what it does with each batch."""

    def __init__(self, loader: DataLoader[Any], after: Prepare | None = None) -> None:
        self.loader, self.after = loader, after

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield self.after(batch) if self.after else batch

    def __len__(self) -> int:
        return len(self.loader)


class Own:
    """An iterable of the user's own, without a DataLoader."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare, self.index = prepare, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.index = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.index >= SAMPLES:
            raise StopIteration
        self.index += BATCH
        return torch.stack([self.prepare(self.index - BATCH + each) for each in range(BATCH)])


class Generates:
    """The same as a generator."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __iter__(self) -> Iterator[torch.Tensor]:
        for first in range(0, SAMPLES, BATCH):
            yield torch.stack([self.prepare(first + each) for each in range(BATCH)])


class Threaded:
    """A thread makes the batches, two ahead; it ends with the iterator."""

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    def __iter__(self) -> Iterator[torch.Tensor]:
        ready: queue.Queue[Any] = queue.Queue(2)
        over = threading.Event()

        def put(batch: Any) -> None:
            while not over.is_set():
                try:
                    return ready.put(batch, timeout=0.05)
                except queue.Full:
                    pass

        def produce() -> None:
            for first in range(0, SAMPLES, BATCH):
                if over.is_set():
                    return
                put(torch.stack([self.prepare(first + each) for each in range(BATCH)]))
            put(None)

        producer = threading.Thread(target=produce, name="producer", daemon=True)
        producer.start()
        try:
            while (batch := ready.get()) is not None:
                yield batch
        finally:
            over.set()
            producer.join()


def nodes(prepare: Prepare, *, workers: int = 0, method: Any = "thread", ahead: bool = True) -> Any:
    pytest.importorskip("torchdata.nodes", reason="this torchdata has no nodes")
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper, Prefetcher

    node: Any = IterableWrapper(range(SAMPLES))
    node = ParallelMapper(node, prepare, workers, method=method) if workers else Mapper(node, prepare)
    node = Mapper(Batcher(node, BATCH), default_collate)
    return Loader(Prefetcher(node, 2) if ahead else node)


def _stateful(prepare: Prepare, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Mapped(prepare), BATCH, num_workers=workers)


def _litdata(folder: Path, prepare: Prepare, workers: int) -> Any:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import Cache

    if not (folder / "litdata").is_dir():
        cache = Cache(str(folder / "litdata"), chunk_size=8)
        for index in range(SAMPLES):
            cache[index] = sample(index)
        cache.done()
        cache.merge()
    dataset = StreamingDataset(str(folder / "litdata"), transform=prepare)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)


def _mds(folder: Path, prepare: Prepare, workers: int) -> Any:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    if not (folder / "mds").is_dir():
        with MDSWriter(out=str(folder / "mds"), columns={"x": f"ndarray:float32:{FEATURES}"}, size_limit=512) as out:
            for index in range(SAMPLES):
                out.write({"x": sample(index).numpy()})

    class Prepared(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return prepare(super().__getitem__(at)["x"].copy())

    dataset = Prepared(local=str(folder / "mds"), batch_size=BATCH, shuffle=False)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers)


def _webdataset(folder: Path, prepare: Prepare, workers: int) -> Any:
    import webdataset

    (folder / "tar").mkdir(exist_ok=True)
    if not any((folder / "tar").iterdir()):
        with webdataset.ShardWriter(str(folder / "tar/%d.tar"), maxcount=12, verbose=0) as out:
            for index in range(SAMPLES):
                out.write({"__key__": f"{index:03d}", "x.npy": sample(index).numpy()})
    urls = [str(folder / f"tar/{shard}.tar") for shard in range(SAMPLES // 12)]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode().to_tuple("x.npy").map_tuple(prepare)
    return webdataset.WebLoader(dataset.batched(BATCH), batch_size=None, num_workers=workers)


def _lmdb(folder: Path, prepare: Prepare, workers: int) -> Any:
    if not (folder / "lmdb").is_dir():
        with LMDBWriter(folder / "lmdb") as out:
            for index in range(SAMPLES):
                out.write(sample(index).numpy())
    module = LMDBDataModule(
        folder / "lmdb", batch_size=BATCH, num_workers=workers, train_transform=prepare, persistent_workers=False
    )
    return module.train_dataloader()


def _rows(prepare: Prepare) -> Any:
    def prepared(rows: dict[str, Any]) -> dict[str, Any]:
        return {"x": [prepare(each) for each in rows["x"]]}

    return prepared


def _datasets(folder: Path, prepare: Prepare, workers: int) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"x": [sample(index).tolist() for index in range(SAMPLES)]})
    return DataLoader(rows.with_transform(_rows(prepare)), BATCH, num_workers=workers)


def _datasets_stream(folder: Path, prepare: Prepare, workers: int) -> Any:
    import datasets

    rows = datasets.Dataset.from_dict({"x": [sample(index).tolist() for index in range(SAMPLES)]})
    stream = rows.to_iterable_dataset(num_shards=4).map(lambda row: {"x": prepare(row["x"])})
    return DataLoader(stream.with_format("torch"), BATCH, num_workers=workers)


def _both(slow: Any) -> CombinedLoader:
    fast = DataLoader(Mapped(Prepare()), BATCH, num_workers=1)
    return CombinedLoader({"fast": fast, "slow": slow}, "min_size")


@dataclass(frozen=True)
class Kind:
    """One kind.

    Attributes:
        make: makes a loader, from a folder for its files and from what each sample passes.
        cause: what StallDetector says where that is slow.
        kind: what it is known as.
        key: of the slow loader in a CombinedLoader.
        loses: whether Lightning alone loses a batch in a run that goes on from the middle of an epoch: the loader has a
            state, and no length, so Lightning fetches a batch ahead, and saves the state after that.
    """

    make: Callable[[Path, Prepare], Any]
    cause: str = "slow_storage"
    kind: str = "torch"
    key: str = ""
    loses: bool = False


MAIN = "main_process_loading"

CORE = {
    "map-0": Kind(lambda folder, prepare: DataLoader(Mapped(prepare), BATCH), MAIN),
    "map-1": Kind(lambda folder, prepare: DataLoader(Mapped(prepare), BATCH, num_workers=1)),
    "stream-1": Kind(lambda folder, prepare: DataLoader(Stream(prepare), BATCH, num_workers=1)),
    "stateful-1": Kind(lambda folder, prepare: _stateful(prepare, 1), kind="stateful"),
    "nodes-inline": Kind(lambda folder, prepare: nodes(prepare, ahead=False), MAIN, "nodes", loses=True),
    "nodes-ahead": Kind(lambda folder, prepare: nodes(prepare), MAIN, "nodes", loses=True),
    "nodes-threads": Kind(lambda folder, prepare: nodes(prepare, workers=2), kind="nodes", loses=True),
    "around": Kind(lambda folder, prepare: Around(DataLoader(Mapped(prepare), BATCH, num_workers=1))),
    "around-after": Kind(
        lambda folder, prepare: Around(DataLoader(Mapped(Prepare()), BATCH, num_workers=1), prepare), MAIN
    ),
    "own": Kind(lambda folder, prepare: Own(prepare), MAIN, "iterable"),
    "generator": Kind(lambda folder, prepare: Generates(prepare), MAIN, "iterable"),
    "threaded": Kind(lambda folder, prepare: Threaded(prepare), MAIN, "iterable"),
    "lmdb-0": Kind(lambda folder, prepare: _lmdb(folder, prepare, 0), MAIN),
    "lmdb-1": Kind(lambda folder, prepare: _lmdb(folder, prepare, 1)),
    "combined-map-0": Kind(lambda folder, prepare: _both(DataLoader(Mapped(prepare), BATCH)), MAIN, key="slow"),
    "combined-map-1": Kind(
        lambda folder, prepare: _both(DataLoader(Mapped(prepare), BATCH, num_workers=1)), key="slow"
    ),
    "combined-own": Kind(lambda folder, prepare: _both(Own(prepare)), MAIN, key="slow"),
}

LIBRARIES = {
    "litdata-0": Kind(lambda folder, prepare: _litdata(folder, prepare, 0), MAIN, "litdata"),
    "litdata-2": Kind(lambda folder, prepare: _litdata(folder, prepare, 2), kind="litdata"),
    "mds-2": Kind(lambda folder, prepare: _mds(folder, prepare, 2), kind="mds"),
    "webdataset-0": Kind(lambda folder, prepare: _webdataset(folder, prepare, 0), MAIN, "webdataset"),
    "webdataset-2": Kind(lambda folder, prepare: _webdataset(folder, prepare, 2), kind="webdataset"),
    "datasets-map-1": Kind(lambda folder, prepare: _datasets(folder, prepare, 1)),
    "datasets-stream-2": Kind(lambda folder, prepare: _datasets_stream(folder, prepare, 2)),
    "combined-webdataset": Kind(lambda folder, prepare: _both(_webdataset(folder, prepare, 1)), key="slow"),
}
