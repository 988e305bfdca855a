import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate, random_split

from lightning_gpuopt.loading.elastic_loader import make_loader
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.storage import gather as gather_module
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.gather import Gather, plan
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.shard import ShardReader
from lightning_gpuopt.storage.writer import LMDBWriter


@pytest.fixture(autouse=True, params=["copied", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are copied out of maps, or read."""
    monkeypatch.setattr(gather_module, "LARGE", 1 << 40 if request.param == "copied" else 0)
    monkeypatch.setattr(gather_module, "_COPIED", 1 << 40)


def stored(path: Path, sample: Callable[[int], Any], num_samples: int = 50, shard: int = 20) -> LMDBDataset:
    with LMDBWriter(path, samples_per_shard=shard) as writer:
        for index in range(num_samples):
            writer.write(sample(index))
    return LMDBDataset(path)


def whole(dataset: LMDBDataset) -> Gather:
    return Gather([dataset])


def same(one: Any, other: Any) -> bool:
    """Whether two batches are of the same make, dtypes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same, one, other))


EQUAL_RECORDS: list[Callable[[int], Any]] = [
    lambda i: (np.full((3, 4, 5), i, np.uint8), i),
    lambda i: {"x": torch.full((2, 3), i, dtype=torch.bfloat16), 7: i / 3, "flag": i % 2 == 0},
    lambda i: [np.float32(i), (np.int16(i), [np.array(i, np.float64)])],
    lambda i: np.arange(i, i + 300, dtype=np.int64),  # a head of three bytes
    lambda i: torch.full((70_000,), i, dtype=torch.uint8),  # and of five
    lambda i: (torch.zeros(0, 3), i),
    lambda i: torch.tensor([complex(i, -i)]),
    lambda i: -i,
    lambda i: tuple(range(i, i + 20)),  # more buffers than a short array head counts
]


@pytest.mark.parametrize("sample", EQUAL_RECORDS)
def test_a_gathered_batch_is_what_default_collate_makes(tmp_path: Path, sample: Callable[[int], Any]) -> None:
    dataset = stored(tmp_path / "data", sample)
    wanted = [49, 0, 20, 19, 3, 3, 40]
    gathered = whole(dataset).__getitems__(wanted)
    assert same(gathered, default_collate([dataset[i] for i in wanted]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.int32, torch.float64])
def test_records_of_any_few_bytes_and_any_number_are_gathered_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(dtype.itemsize)
    for number in range(8):
        num_bytes, count = (int(draw.integers(65)), int(draw.integers(1, 301))) if number else (1, 8)
        shape = (num_bytes // dtype.itemsize,) if num_bytes >= 2 * dtype.itemsize or num_bytes == 0 else ()
        samples = torch.from_numpy(draw.integers(0, 2, (count, *shape))).to(dtype)
        dataset = stored(tmp_path / f"{number}", samples.__getitem__, count, shard=int(draw.integers(1, 301)))
        expected = default_collate([dataset[i] for i in range(count)])
        assert same(expected, samples)
        assert same(whole(dataset).__getitems__(range(count)), expected), (count, shape)


def test_gathered_tensors_may_be_written_to(tmp_path: Path) -> None:
    dataset = stored(tmp_path / "data", lambda i: np.full(3, i, np.float32))
    gather = whole(dataset)
    gather.__getitems__([1, 2]).add_(5)
    assert gather.__getitems__([1, 2]).tolist() == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (np.zeros(3), "text"),
        lambda i: b"bytes",
        lambda i: EncodedImage(b"image"),
        lambda i: np.zeros(i + 1),
        lambda i: (i, None),
        lambda i: np.zeros(3, ">f4"),
        lambda i: 2**70 + i,
        lambda i: [i] if i % 2 else (i,),
    ],
)
def test_other_records_are_not_gathered(tmp_path: Path, sample: Callable[[int], Any]) -> None:
    dataset = stored(tmp_path / "data", sample)
    assert plan(dataset) is None
    with pytest.raises(TypeError, match="not equal arrays and numbers"):
        whole(dataset)


def test_transforms_and_checksums_want_single_samples(tmp_path: Path) -> None:
    stored(tmp_path / "data", lambda i: (np.zeros(3), i))
    for options in ({"transform": np.negative}, {"target_transform": str}, {"verify_checksum": True}):
        assert plan(LMDBDataset(tmp_path / "data", **options)) is None  # type: ignore[arg-type]


def test_subsets_are_gathered_too(tmp_path: Path) -> None:
    dataset = stored(tmp_path / "data", lambda i: (np.full(2, i), i))
    nested = Subset(Subset(dataset, range(10, 40)), [29, 0, 7])
    loader = make_loader(nested, ElasticSampler(Order(3, shuffle=False), 2))
    assert isinstance(loader.dataset, Gather)
    assert [labels.tolist() for _, labels in loader] == [[39, 10], [17]]
    first, second = random_split(dataset, [30, 20], torch.Generator().manual_seed(0))
    seen = [
        label
        for part in (first, second)
        for _, labels in make_loader(part, ElasticSampler(Order(len(part)), 7))
        for label in labels.tolist()
    ]
    assert sorted(seen) == list(range(50))


def test_a_subsets_indices_count_from_the_end_too_and_must_be_there(tmp_path: Path) -> None:
    dataset = stored(tmp_path / "data", lambda i: (np.full(2, i), i))
    loader = make_loader(Subset(dataset, [-1, -50, 3]), ElasticSampler(Order(3, shuffle=False), 3))
    assert [labels.tolist() for _, labels in loader] == [[49, 0, 3]]
    with pytest.raises(IndexError, match="a dataset of 50 samples"):
        make_loader(Subset(dataset, [50]), ElasticSampler(Order(1), 1))
    with pytest.raises(TypeError, match="flatnonzero"):
        make_loader(Subset(dataset, np.ones(50, bool)), ElasticSampler(Order(50), 1))  # type: ignore[arg-type]


def test_small_records_need_no_workers_and_large_ones_do(tmp_path: Path) -> None:
    dataset = stored(tmp_path / "data", lambda i: np.zeros(70_000, np.uint8), num_samples=3)
    small = make_loader(dataset, ElasticSampler(Order(3), 14), workers_if_needed=2)
    large = make_loader(dataset, ElasticSampler(Order(3), 15), workers_if_needed=2)
    assert (small.num_workers, large.num_workers) == (0, 2)
    told = make_loader(dataset, ElasticSampler(Order(3), 2), num_workers=1)
    assert told.num_workers == 1
    assert [len(batch) for batch in told] == [2, 1]


@pytest.mark.parametrize(
    "context",
    ["fork", pytest.param("spawn", marks=pytest.mark.matrix), pytest.param("forkserver", marks=pytest.mark.matrix)],
)
def test_it_works_in_workers_of_every_kind(tmp_path: Path, context: str) -> None:
    dataset = stored(tmp_path / "data", lambda i: (np.full(2, i), i))
    gather = whole(dataset)
    gather.__getitems__([0])
    loader = DataLoader(gather, batch_size=20, num_workers=1, collate_fn=_same, multiprocessing_context=context)
    assert [labels.tolist() for _, labels in loader] == [list(range(20)), list(range(20, 40)), list(range(40, 50))]


def _same(batch: Any) -> Any:
    return batch


def test_a_pickle_leaves_the_files_out(tmp_path: Path) -> None:
    gather = whole(stored(tmp_path / "data", lambda i: i))
    gather.__getitems__([0])
    assert pickle.loads(pickle.dumps(gather)).__getitems__([7]).tolist() == [7]


@pytest.mark.parametrize("indices", [[0, 50], [-1]])
def test_indices_out_of_range_are_refused(tmp_path: Path, indices: list[int]) -> None:
    gather = whole(stored(tmp_path / "data", lambda i: i))
    with pytest.raises(IndexError, match="50"):
        gather.__getitems__(indices)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 0x10]))


def test_a_record_that_is_another_is_refused(tmp_path: Path) -> None:
    dataset = stored(tmp_path / "data", lambda i: (np.full(2000, i, np.uint8), i))
    start = dataset.shard(1).place(13)[0]
    flip(tmp_path / "data" / "shard-00001.mdb", start + 4 + 15)  # its number, behind array head, bytes head, checksum
    gather = whole(dataset)
    assert gather.__getitems__([32, 34])[1].tolist() == [32, 34]
    with pytest.raises(DamagedError, match="sample 33"):
        gather.__getitems__([32, 33, 34])


@pytest.mark.parametrize("byte", [0, 2, 5, 7])
def test_a_record_table_that_lies_gives_no_other_sample(tmp_path: Path, byte: int) -> None:
    dataset = stored(tmp_path / "data", lambda i: (np.full(2000, i, np.uint8), i))
    flip(tmp_path / "data" / "shard-00000.tab", 32 + 8 * 5 + byte)
    gather = whole(dataset)
    assert gather.__getitems__([4, 6])[1].tolist() == [4, 6]
    with pytest.raises(DamagedError, match="sample 5"):
        gather.__getitems__([4, 5, 6])


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    dataset = stored(tmp_path / "data", lambda i: i)
    gather = whole(dataset)
    table = tmp_path / "data" / "shard-00001.tab"
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"shard-00001\.tab: \d+ bytes long; expected"):
        gather.__getitems__([0])
    table.unlink()
    with pytest.raises(DamagedError, match=r"shard-00001\.tab: .*missing"):
        gather.__getitems__([0])


def test_a_dataset_that_was_built_anew_meanwhile_is_not_mixed_in(tmp_path: Path) -> None:
    gather = whole(stored(tmp_path / "data", lambda i: (np.full(20, i, np.uint8), i)))
    (tmp_path / "data").rename(tmp_path / "old")
    stored(tmp_path / "data", lambda i: (np.full(20, 255 - i, np.uint8), i))  # of the same sizes
    with pytest.raises(DamagedError, match=r"shard-00001\.tab: not the record table .* built again"):
        gather.__getitems__([0])


def test_batches_to_come_are_asked_for_only_while_they_come_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = whole(stored(tmp_path / "data", lambda i: np.full(3000, i, np.uint8)))
    blocks = iter([0, 8, 8, *[16] * 7])
    asked: list[int] = []
    monkeypatch.setattr(gather_module, "blocks_read", lambda: next(blocks))
    monkeypatch.setattr(ShardReader, "will_need", lambda self, index: asked.append(index))
    gather.announce([7])
    assert not asked  # nothing is known yet
    gather.__getitems__([0, 1])  # from the disk
    gather.announce([2, 3, 4])  # asks it for more
    assert asked == [2, 3, 4]
    gather.__getitems__([2, 3, 4])  # in memory, thanks to that
    gather.announce([5, 6])  # finds that nothing is left to ask for
    assert asked == [2, 3, 4, 5, 6]
    gather.__getitems__([5, 6])
    gather.announce([8])
    assert asked == [2, 3, 4, 5, 6]


def test_the_pages_of_batches_to_come_are_read(tmp_path: Path) -> None:
    gather = whole(stored(tmp_path / "data", lambda i: (np.full(5000, i % 251, np.uint8), i), num_samples=200))
    gather.__getitems__([0])
    gather._from_disk = True
    gather.announce(list(range(200)))
    assert gather.__getitems__([199, 3])[1].tolist() == [199, 3]


def test_another_whole_record_in_a_records_place_is_refused(tmp_path: Path) -> None:
    dataset = stored(tmp_path / "data", lambda i: (np.full(2000, i, np.uint8), i))
    table = tmp_path / "data" / "shard-00000.tab"
    content = bytearray(table.read_bytes())
    content[32 + 8 * 5 : 32 + 8 * 6] = content[32 + 8 * 6 : 32 + 8 * 7]  # sample 5 is said to lie where 6 does
    table.write_bytes(content)
    gather = whole(dataset)
    assert gather.__getitems__([4, 6])[1].tolist() == [4, 6]
    with pytest.raises(DamagedError, match=r"sample 5 .*another sample lies in its place"):
        gather.__getitems__([4, 5, 6])


@pytest.mark.timed
def test_a_busy_core_does_not_hold_up_a_batch(tmp_path: Path) -> None:
    gather = whole(stored(tmp_path / "data", lambda i: (np.full((3, 32, 32), i % 256, np.uint8), i), 5000, 5000))
    order = np.random.default_rng(0).integers(0, 5000, (300, 128))

    def median_s() -> float:
        took = []
        for wanted in order:
            began = time.perf_counter()
            gather.__getitems__(wanted)
            took.append(time.perf_counter() - began)
        return statistics.median(took)

    median_s()
    idle_s = median_s()
    spinning = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    with spinning:
        try:
            assert spinning.stdout is not None
            spinning.stdout.readline()
            busy_s = median_s()
        finally:
            spinning.kill()
    assert busy_s <= 2 * idle_s
