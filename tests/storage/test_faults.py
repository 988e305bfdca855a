"""Files that change or fail under an open dataset are errors; memory that somebody holds is not written to."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.loading.collate import as_it_is
from lightning_gpuopt.loading.elastic_loader import make_loader
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.loading.samples import EpochSamples, SkippedSamples
from lightning_gpuopt.storage import gather as gather_module
from lightning_gpuopt.storage import shard as shard_module
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError, DamagedFileError
from lightning_gpuopt.storage.gather import Gather
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.fork_server import run_code
from tests.storage.parts import mapped_shards, open_descriptors, write_numbered


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Forty records of 5 kB in two shards; number and content tell the index."""
    return write(tmp_path / "data")


def write(path: Path, sign: int = 1, size: int = 5000, **options: Any) -> Path:
    with LMDBWriter(path, samples_per_shard=20, **options) as writer:
        for index in range(40):
            writer.write((np.full(size, sign * index, np.int8), index))
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of batches are read, as large ones are."""
    monkeypatch.setattr(gather_module, "LARGE", 0)


def cut(path: Path) -> None:
    """Leave one page of the second shard."""
    os.truncate(path / "shard-00001.mdb", 4096)


CUT = r"shard-00001\.mdb: truncated while it was read: it ends before byte \d+"


@pytest.mark.parametrize(
    "read",
    [
        lambda dataset: dataset[39],
        lambda dataset: dataset.__getitems__([0, 39]),
        lambda dataset: dataset.for_loader()[39],
        lambda dataset: dataset.value(39),
        lambda dataset: dataset.encoded_image(39),
        lambda dataset: dataset.column(0),
    ],
)
def test_a_file_that_is_cut_off_under_its_reader_is_an_error(path: Path, read: Callable[[LMDBDataset], Any]) -> None:
    dataset = LMDBDataset(path)
    assert [dataset[0][1], dataset[20][1]] == [0, 20]
    cut(path)
    with pytest.raises(DamagedError, match=CUT) as caught:
        read(dataset)
    assert not isinstance(caught.value, CorruptSampleError)
    assert dataset[19][1] == 19


@pytest.mark.parametrize("record", [0, 1 << 20])
def test_a_batch_whose_file_is_cut_off_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch, record: int) -> None:
    monkeypatch.setattr(gather_module, "LARGE", record)
    gather = Gather([LMDBDataset(path)])
    assert gather.__getitems__([20, 1])[1].tolist() == [20, 1]
    cut(path)
    with pytest.raises(DamagedFileError, match=CUT):
        gather.__getitems__([39, 1])
    assert gather.__getitems__([2, 1])[1].tolist() == [2, 1]


@pytest.mark.parametrize("gathers", [True, False])
def test_a_worker_reports_a_file_that_is_cut_off(path: Path, gathers: bool) -> None:
    dataset: Any = Gather([LMDBDataset(path)]) if gathers else LMDBDataset(path)
    assert len(dataset.__getitems__([0, 39])) == 2
    loader: Any = DataLoader(dataset, 10, num_workers=1, collate_fn=as_it_is, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    cut(path)
    with pytest.raises(DamagedFileError, match=CUT):
        list(batches)


def test_samples_of_a_file_that_is_cut_off_are_not_skipped(path: Path, tmp_path: Path) -> None:
    samples = EpochSamples(LMDBDataset(path), skipped=SkippedSamples(tmp_path / "skipped.csv"))
    assert len(samples.__getitems__([0, 20])) == 2
    cut(path)
    with pytest.raises(DamagedFileError, match=CUT):
        samples.__getitems__([0, 39])


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.EIO, OSError, r"Input/output error \(at byte \d+\): '{path}'"),
        (
            errno.ESTALE,
            DamagedFileError,
            r"{path}: gone while it was read, at byte \d+: if the dataset was built again",
        ),
    ],
)
def test_what_the_system_refuses_names_file_and_offset(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], text: str
) -> None:
    dataset, checked = LMDBDataset(path), LMDBDataset(path, verify_checksum=True)
    gather, large = Gather([dataset]), Gather([LMDBDataset(write(path.with_name("large"), size=100_000))])
    for each in (gather, large):
        assert each.__getitems__([0, 39])[1].tolist() == [0, 39]

    def fails(*arguments: Any) -> bytes:
        raise OSError(number, os.strerror(number))

    for call in ("pread", "preadv", "lseek"):
        monkeypatch.setattr(os, call, fails)
    for read in (
        lambda: dataset[39],
        lambda: checked[39],
        lambda: dataset.column(0),
        lambda: gather.__getitems__([38, 39]),
        lambda: large.__getitems__([38, 39]),
    ):
        with pytest.raises(kind, match=text.format(path=r".*shard-0000\d\.mdb")) as caught:
            read()
        assert not isinstance(caught.value, CorruptSampleError)


@pytest.mark.usefixtures("read")
def test_short_reads_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, preadv = os.pread, os.preadv
    dataset = LMDBDataset(path, verify_checksum=True)
    gather = Gather([LMDBDataset(path)])
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 1000), at))
    monkeypatch.setattr(os, "preadv", lambda fd, pieces, at: preadv(fd, pieces[:1], at))
    assert [dataset[index][1] for index in range(40)] == list(range(40))
    data, labels = gather.__getitems__([3, 33])
    assert labels.tolist() == [3, 33]
    assert data.tolist() == [[3] * 5000, [33] * 5000]


@pytest.mark.usefixtures("read")
def test_a_batch_that_somebody_holds_is_not_written_to(path: Path) -> None:
    """Whole, as an array, a view of a view, or as a saved tensor of a graph; and the memory of others is used again."""
    gather = Gather([LMDBDataset(path)])
    weight = torch.ones(5000, requires_grad=True)
    held: list[tuple[int, Any]] = []
    for index in range(12):
        data = gather.__getitems__([index, index + 20])[0]
        if index % 4 == 0:
            held.append((index, data))
        elif index % 4 == 1:
            held.append((index, data.numpy()[:, 7:]))
        elif index % 4 == 2:
            held.append((index, data[0].view(50, 100)[3:].T))
        else:
            (data.float().mul(weight)).sum().backward()
        del data
    for _ in range(9):
        gather.__getitems__([39, 38])
    for index, data in held:
        rows = np.asarray(data)
        expected = {index, index + 20} if index % 4 < 2 else {index}
        assert set(rows.ravel().tolist()) == expected


@pytest.mark.usefixtures("read")
def test_all_batches_of_a_loader_may_be_kept(path: Path) -> None:
    loader = make_loader(LMDBDataset(path), ElasticSampler(Order(40, shuffle=False), 3))
    assert isinstance(loader.dataset, Gather)
    batches = list(loader)
    assert [labels.tolist() for _, labels in batches] == [data[:, 0].tolist() for data, _ in batches]
    assert [label for _, labels in batches for label in labels.tolist()] == list(range(40))


@pytest.mark.usefixtures("read")
def test_memory_is_used_again_when_nobody_holds_it(path: Path) -> None:
    gather = Gather([LMDBDataset(path)])
    places = {gather.__getitems__([index, 39])[0].data_ptr() for index in range(20)}
    assert len(places) == 1
    first, second = gather.__getitems__([0, 1])[0], gather.__getitems__([2, 3])[0]
    assert first.data_ptr() != second.data_ptr()
    assert {gather.__getitems__([5])[0].shape[0]} == {1}


@pytest.mark.usefixtures("read")
@pytest.mark.parametrize("sharing", ["file_descriptor", "file_system"])
def test_batches_of_a_worker_stay_as_they_were(path: Path, sharing: str) -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(sharing)
    try:
        loader: Any = DataLoader(Gather([LMDBDataset(path)]), 2, num_workers=1, collate_fn=as_it_is)
        batches = list(loader)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert [data[:, -1].tolist() for data, _ in batches] == [[at, at + 1] for at in range(0, 40, 2)]


def test_an_image_file_stays_what_it_was(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "d") as writer:
        for index in range(50):
            writer.write((EncodedImage(bytes([index]) * 3000), index))
    dataset = LMDBDataset(tmp_path / "d")
    files = [dataset.encoded_image(index) for index in range(50)]
    assert [bytes(file or b"") for file in files] == [bytes([index]) * 3000 for index in range(50)]
    assert mapped_shards() == 0


def test_more_shards_than_descriptors_are_read(tmp_path: Path) -> None:
    write_numbered(tmp_path / "d", 120, samples_per_shard=1)
    code = """
import os, resource, sys
from lightning_gpuopt.storage.gather import Gather
from lightning_gpuopt.storage.reader import LMDBDataset
dataset = LMDBDataset(sys.argv[1])
dataset[0]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for _ in range(2):
    assert [number for _, number in dataset] == list(range(120))
    assert len(os.listdir("/proc/self/fd")) < 32
# Others hold all that are left but two: what is open is closed for the next.
others = []
try:
    while True:
        others.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    os.close(others.pop()), os.close(others.pop())
assert [number for _, number in dataset.__getitems__(range(119, -1, -1))] == list(range(119, -1, -1))
"""
    result = run_code(code, tmp_path / "d")
    assert result.returncode == 0, result.stderr


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_numbered(tmp_path / "d", 30, samples_per_shard=1)
    monkeypatch.setattr(shard_module, "MAX_OPEN", 4)
    before = open_descriptors()
    dataset = LMDBDataset(tmp_path / "d")
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda index: dataset[index * 7 % 30][1], range(3000)))
    assert got == [index * 7 % 30 for index in range(3000)]
    assert open_descriptors() <= before + 8  # before Python 3.13 a map has one of its own


def test_a_dataset_built_anew_is_noticed_when_a_file_is_opened_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = LMDBDataset(path)
    assert dataset[0][0][0] == 0
    write(path, overwrite=True)  # the same content
    monkeypatch.setattr(shard_module, "MAX_OPEN", 1)
    assert [dataset[index][1] for index in (20, 1, 21)] == [20, 1, 21]
    write(path, -1, overwrite=True)  # of the same sizes
    assert dataset[22][0][0] == 22  # is still open
    with pytest.raises(DamagedFileError, match="built again"):
        dataset[1]


@pytest.mark.usefixtures("read")
def test_forked_children_and_their_parent_read_side_by_side(path: Path) -> None:
    dataset = LMDBDataset(path)
    gather = Gather([dataset])
    gather.__getitems__(range(40))

    def read() -> None:
        for _ in range(200):
            data, labels = gather.__getitems__(list(range(39, -1, -1)))
            assert data[:, 9].tolist() == labels.tolist() == list(range(39, -1, -1))
            assert dataset[7][1] == 7

    children = [multiprocessing.get_context("fork").Process(target=read) for _ in range(2)]
    for child in children:
        child.start()
    read()
    for child in children:
        child.join(60)
        child.kill()
    assert [child.exitcode for child in children] == [0, 0]


@pytest.mark.parametrize("record", [0, 1 << 20])
def test_threads_gather_from_one_dataset(path: Path, monkeypatch: pytest.MonkeyPatch, record: int) -> None:
    monkeypatch.setattr(gather_module, "LARGE", record)
    gather = Gather([LMDBDataset(path)])

    def read(seed: int) -> bool:
        wanted = np.random.default_rng(seed).integers(0, 40, 16)
        data, labels = gather.__getitems__(wanted)
        return bool((data[:, ::99] == labels[:, None]).all()) and labels.tolist() == wanted.tolist()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(2000)))


def test_a_large_record_table_is_mapped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LMDBDataset(path)
    expected = [whole[index][1] for index in range(40)], whole.column(1), whole.column(0)
    del whole
    monkeypatch.setattr(shard_module, "TABLE_IN_MEMORY", 0)
    monkeypatch.setattr(gather_module, "_PLACES", 0)
    dataset, gather = LMDBDataset(path), Gather([LMDBDataset(path)])
    got = [dataset[index][1] for index in range(40)], dataset.column(1), dataset.column(0)
    assert got[:2] == expected[:2]
    assert np.array_equal(got[2], expected[2])
    assert gather.__getitems__([39, 0, 20])[1].tolist() == [39, 0, 20]
    os.truncate(path / "shard-00000.tab", 40)
    for read in (lambda: dataset[19], lambda: gather.__getitems__([20, 19]), lambda: dataset.column(0)):
        with pytest.raises(DamagedFileError, match=r"shard-00000\.tab: truncated"):
            read()


@pytest.mark.parametrize("place", [1 << 40, (1 << 63) + 5])
def test_a_table_that_points_elsewhere_is_an_error_that_names_the_sample(path: Path, place: int) -> None:
    with LMDBWriter(path.with_name("floats")) as writer:  # which have no label columns
        for index in range(40):
            writer.write((np.full(50, index, np.int8), float(index)))
    table = path.with_name("floats") / "shard-00000.tab"
    with table.open("r+b") as stream:
        stream.seek(32 + 8 * 5)
        stream.write(place.to_bytes(8, "little"))
    dataset = LMDBDataset(path.with_name("floats"))
    dataset.shard(0).will_need(5)  # whoever reads it is told
    for read in (lambda: dataset.column(1), lambda: dataset[5], lambda: Gather([dataset]).__getitems__([4, 5])):
        with pytest.raises(DamagedError, match=r"sample 5 \(shard-00000\)"):
            read()
    assert dataset[6][1] == 6


def test_a_first_record_that_is_damaged_is_named_by_who_reads_it(path: Path) -> None:
    place = LMDBDataset(path).shard(0).place(0)[0]
    with (path / "shard-00000.mdb").open("r+b") as stream:
        stream.seek(place)
        stream.write(bytes(40))
    loader = make_loader(LMDBDataset(path), ElasticSampler(Order(40, shuffle=False), 4))
    with pytest.raises(DamagedError, match=r"sample 0 \(shard-00000\)"):
        next(iter(loader))


def test_a_dataset_that_was_renamed_is_opened_by_its_new_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "MAX_OPEN", 1)
    before = LMDBDataset(path)
    assert [before[index][1] for index in (0, 20)] == [0, 20]
    path.rename(path.with_name("renamed"))
    after = LMDBDataset(path.with_name("renamed"))
    assert [after[index][1] for index in (0, 20, 1, 21)] == [0, 20, 1, 21]


def test_large_values_are_read_and_not_copied_out_of_a_map(path: Path) -> None:
    dataset = LMDBDataset(write(path.with_name("large"), size=100_000))
    before = mapped_shards()
    assert dataset[39][1] == 39
    assert Gather([dataset]).__getitems__([39, 2])[1].tolist() == [39, 2]
    assert mapped_shards() == before


def test_large_batches_and_those_from_the_disk_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = Gather([LMDBDataset(path)])
    read, calls = os.preadv, [0]

    def counted(fd: int, pieces: Any, at: int) -> int:
        calls[0] += 1
        return read(fd, pieces, at)

    monkeypatch.setattr(os, "preadv", counted)
    blocks = iter([0, 8, 8, 8, 8, 8, 8, 8])  # what this thread has read from the disk, before and after each batch
    monkeypatch.setattr(gather_module, "blocks_read", lambda: next(blocks))
    counts = []
    for _ in range(3):
        assert gather.__getitems__([1, 39])[1].tolist() == [1, 39]
        counts.append(calls[0])
    monkeypatch.setattr(gather_module, "_COPIED", 2 * gather.record_bytes - 1)
    gather.__getitems__([1, 39])
    assert (counts, calls[0]) == ([0, 2, 2], 4)
