"""What is known of a loader, by its kind; and that nothing is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_gpuopt.loaders import describe as module
from lightning_gpuopt.loaders.describe import describe
from lightning_gpuopt.loading.elastic_loader import make_loader
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.measurements import libraries
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.timeline.worker_clock import watch_workers
from tests.loaders.kinds import BATCH, CORE, LIBRARIES, SAMPLES, Around, Kind, Mapped, Own, Prepare, Stream


def of(kind: str, folder: Path) -> LoaderDescription:
    return describe((CORE | LIBRARIES)[kind].make(folder, Prepare()))


@pytest.mark.parametrize("kind", [name for name in CORE if not CORE[name].key])
def test_the_kind_of_each(tmp_path: Path, kind: str) -> None:
    assert (of(kind, tmp_path).kind, of(kind, tmp_path).notes) == (CORE[kind].kind, ())


def test_a_dataloader_and_one_inside_of_a_class_of_the_users_own() -> None:
    loader = DataLoader(
        Mapped(Prepare()), BATCH, num_workers=2, persistent_workers=True, prefetch_factor=3, pin_memory=True
    )
    plain = describe(loader, key="images")
    assert plain == LoaderDescription(
        "torch",
        "DataLoader",
        "images",
        "processes",
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=3,
        pin_memory=True,
        batch_size=BATCH,
        length=SAMPLES // BATCH,
        sharding="sampler",
        may_be_sample_parallel=True,
    )
    around = describe(Around(loader))
    assert (around.name, around.key) == ("Around", "")
    assert (around.num_workers, around.work, around.length) == (2, "processes", SAMPLES // BATCH)


def test_the_workers_of_its_iterator_count() -> None:
    class Iterates:
        _num_workers, _persistent_workers = 3, True

    found = describe(DataLoader(Mapped(Prepare()), BATCH), Iterates())
    assert (found.num_workers, found.persistent_workers, found.work) == (3, True, "processes")


class Alike(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_streams_are_divided_by_their_dataset_or_by_nobody() -> None:
    divided, alike = describe(DataLoader(Stream(Prepare()))), describe(DataLoader(Alike()))
    assert (divided.is_iterable, divided.sharding, divided.duplicates) == (True, "dataset", False)
    assert (alike.is_iterable, alike.sharding, alike.duplicates) == (True, None, True)


def test_workers_without_a_batch_are_named() -> None:
    found = describe(DataLoader(Mapped(Prepare()), SAMPLES // 2, num_workers=3))
    assert found.idle_workers == 1
    assert found.notes == (
        "An epoch has 2 batches, fewer than the 3 workers of its loader: 1 of them are not needed. "
        "num_workers=2 is enough.",
    )


@pytest.mark.parametrize(
    ("kind", "work", "workers", "ahead"),
    [
        ("nodes-inline", "training process", 0, None),
        ("nodes-ahead", "threads", 0, 2),
        ("nodes-threads", "threads", 2, 2),
    ],
)
def test_a_graph_of_nodes_is_walked(tmp_path: Path, kind: str, work: str, workers: int, ahead: int | None) -> None:
    found = of(kind, tmp_path)
    assert (found.work, found.num_workers, found.prefetch_factor, found.batch_size) == (work, workers, ahead, BATCH)


def test_processes_of_a_graph() -> None:
    pytest.importorskip("torchdata.nodes", reason="this torchdata has no nodes")
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    found = describe(Loader(ParallelMapper(IterableWrapper(range(4)), int, 3, method="process")))
    assert (found.work, found.num_workers) == ("processes", 3)


def test_an_unknown_version_gives_fewer_facts_and_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torchdata"], "__version__", "7.0")
    found = of("nodes-threads", tmp_path)
    assert (found.kind, found.num_workers, found.work) == ("nodes", None, "training process")
    assert found.notes == ("Details of torchdata 7.0 were not read: this version is unknown.",)


def test_an_attribute_that_is_not_as_expected_gives_fewer_facts_and_one_note(tmp_path: Path) -> None:
    loader = CORE["nodes-threads"].make(tmp_path, Prepare())
    del loader.root
    found = describe(loader)
    assert (found.kind, found.num_workers) == ("nodes", None)
    assert found.notes == (
        f"Part of torchdata {sys.modules['torchdata'].__version__} could not be read: it is not as expected.",
    )


def test_a_loader_that_fails_when_it_is_asked_is_described_all_the_same() -> None:
    class Fails(Own):
        def __len__(self) -> int:
            raise RuntimeError("no length today")

    found = describe(Fails(Prepare()))
    assert (found.kind, found.length) == ("iterable", None)
    assert found.notes == ("Part of a loader's length could not be read: it is not as expected.",)


class Sharded(Alike):
    num_shards = 3


def test_shards_that_do_not_divide_over_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", known := ModuleType("datasets"))
    known.__version__ = "5.0.1"  # type: ignore[attr-defined]
    monkeypatch.setattr(Sharded, "__module__", "datasets.iterable_dataset")

    def of_workers(workers: int) -> tuple[int | None, int, tuple[str, ...]]:
        found = describe(DataLoader(Sharded(), num_workers=workers))
        return found.shards, found.idle_workers, found.notes

    assert of_workers(1) == of_workers(3) == (3, 0, ())
    assert of_workers(2)[1:] == (
        0,
        (
            "The 3 shards of the stream do not divide evenly among the 2 workers of its loader: workers with one shard "
            "fewer are idle at the end of an epoch.",
        ),
    )
    assert of_workers(5)[1:] == (
        2,
        (
            "The stream has 3 shards for this rank, and its loader 5 workers: 2 of them have nothing to read. "
            "num_workers=3 is enough, or divide the data into more shards.",
        ),
    )


def test_nothing_is_imported_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaders: list[Any] = [each.make(tmp_path, Prepare()) for name, each in CORE.items() if not each.key]
    before = set(sys.modules)
    for each in loaders:
        describe(each)
    assert set(sys.modules) == before


@pytest.mark.loaders
@pytest.mark.parametrize("name", [name for name in LIBRARIES if not LIBRARIES[name].key])
def test_the_kinds_of_libraries(tmp_path: Path, name: str) -> None:
    kind: Kind = LIBRARIES[name]
    found = of(name, tmp_path)
    workers = int(name.rpartition("-")[2])
    assert (found.kind, found.num_workers, found.notes) == (kind.kind, workers, ())
    assert found.work == ("processes" if workers else "training process")
    assert found.duplicates is (None if name == "datasets-map-1" else False)
    assert found.keeps_state is (kind.kind in ("litdata", "mds"))
    assert found.shards == {"webdataset": 4, "torch": 4 if "stream" in name else None}.get(found.kind)


@pytest.mark.loaders
def test_the_caches_of_libraries(tmp_path: Path) -> None:
    import webdataset
    from streaming import StreamingDataset

    LIBRARIES["mds-2"].make(tmp_path, Prepare())
    dataset = StreamingDataset(remote=str(tmp_path / "mds"), local=str(tmp_path / "cache"), batch_size=BATCH)
    assert describe(DataLoader(dataset, BATCH)).caches == (str(tmp_path / "cache"),)
    LIBRARIES["webdataset-0"].make(tmp_path, Prepare())
    (tmp_path / "tars").mkdir()
    stream = webdataset.WebDataset(str(tmp_path / "tar/0.tar"), cache_dir=str(tmp_path / "tars"), shardshuffle=False)
    assert describe(webdataset.WebLoader(stream, batch_size=None)).caches == (str(tmp_path / "tars"),)


def test_what_is_read_of_datasets_has_a_row_for_its_library() -> None:
    assert set(module._DATASETS) <= {each.package for each in libraries.LIBRARIES}


def test_part_of_a_namespace_package_is_told_from_its_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    row = libraries.LibraryFacts("spaced.loaders", "1.", "webdataset", keeps_state=True)
    monkeypatch.setattr(libraries, "LIBRARIES", (*libraries.LIBRARIES, row))
    inside, beside = (
        type("Made", (DataLoader,), {"__module__": f"spaced.{each}"}) for each in ("loaders.fast", "data")
    )
    assert (describe(inside(range(4))).kind, describe(inside(range(4))).keeps_state) == ("webdataset", True)
    assert (describe(beside(range(4))).kind, describe(beside(range(4))).keeps_state) == ("torch", False)


class Numbered(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index


class AtOnce(Numbered):
    def __getitems__(self, indices):
        return indices


@pytest.mark.parametrize(
    ("loader", "may_be"),
    [
        (lambda: DataLoader(Numbered(), batch_size=2), True),
        (lambda: DataLoader(Subset(Numbered(), [1, 2]), batch_size=2, num_workers=1), True),
        (lambda: DataLoader(AtOnce(), batch_size=2), False),
        (lambda: DataLoader(Numbered(), batch_size=2, collate_fn=list), False),
        (lambda: DataLoader(Numbered(), batch_size=None), False),
        (lambda: make_loader(Numbered(), ElasticSampler(Order(4), 2)), False),
    ],
)
def test_what_a_sample_loader_would_read_sample_by_sample(loader, may_be):
    made = loader()
    assert describe(made).may_be_sample_parallel == may_be
    watched = watch_workers(made)
    assert watched is not None
    assert describe(made).may_be_sample_parallel == may_be
