from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import platform
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset, random_split

from lightning_gpuopt.storage import reader as reader_module
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError, DamagedSampleError
from lightning_gpuopt.storage.format import LMDBInfo
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.shard import ShardReader
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.fork_server import run_code
from tests.lanes import combinations
from tests.storage.parts import (
    assert_numbered,
    flip,
    mapped_shards,
    numbered,
    open_descriptors,
    run_python,
    write_numbered,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A dataset of 25 numbered samples in three shards."""
    return write_numbered(tmp_path / "dataset", 25, samples_per_shard=10)


def jpeg(color: tuple[int, int, int] = (250, 20, 30)) -> Image.Image:
    file = io.BytesIO()
    Image.new("RGB", (16, 8), color).save(file, "JPEG", quality=95)
    return Image.open(file)


def numbers(samples: Any) -> list[int]:
    return [int(number) for _, number in samples]


def test_indices_are_those_of_a_sequence(path: Path) -> None:
    dataset = LMDBDataset(path)
    assert len(dataset) == 25
    assert numbers(dataset) == list(range(25))
    assert [dataset[i][1] for i in (-1, -25, np.int32(3), torch.tensor(4))] == [24, 0, 3, 4]  # type: ignore[index]
    for index in (25, -26, np.int64(1000)):
        text = f"{path}: there is no sample {index}; the dataset has 25"
        with pytest.raises(IndexError, match=re.escape(text)):
            dataset[index]
        with pytest.raises(IndexError, match=re.escape(text)):
            dataset.__getitems__([0, index])
    with pytest.raises(TypeError, match=r"expected an integer as the index of a sample, got 1\.0"):
        dataset[1.0]  # type: ignore[index]


def test_a_batch_may_take_any_samples_in_any_order(path: Path) -> None:
    dataset = LMDBDataset(path)
    assert numbers(dataset.__getitems__([24, 0, 10, 10, 9, -1])) == [24, 0, 10, 10, 9, 24]
    assert numbers(dataset.__getitems__(np.array([20, 3]))) == [20, 3]  # type: ignore[arg-type]
    assert dataset.__getitems__([]) == []


def test_what_the_dataset_says_of_itself(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "d", samples_per_shard=2) as writer:
        for index in range(3):
            writer.write((b"x" * 10, index))
        writer.classes = ["cat", "dog"]
    dataset = LMDBDataset(tmp_path / "d", decode="raw")
    assert dataset.classes == ["cat", "dog"]
    assert dataset.info == LMDBInfo(3, dataset.manifest.num_bytes, 2, 0, ("cat", "dog"))
    assert repr(dataset) == f"LMDBDataset('{tmp_path / 'd'}', 3 samples, 2 classes, decode='raw')"
    assert LMDBDataset(os.path.relpath(tmp_path / "d")).path == tmp_path / "d"


def test_images_come_as_one_asks(tmp_path: Path) -> None:
    image = jpeg()
    file = image.fp.getvalue()  # type: ignore[union-attr, attr-defined]
    with LMDBWriter(tmp_path / "d") as writer:
        writer.write({"image": image, "label": 3})
    got = LMDBDataset(tmp_path / "d")[0]["image"]
    assert (got.mode, got.size) == ("RGB", (16, 8))
    assert LMDBDataset(tmp_path / "d", decode="raw")[0] == {"image": file, "label": 3}
    tensor = LMDBDataset(tmp_path / "d", decode="tensor")[0]["image"]
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (3, 8, 16))
    assert abs(int(tensor[0, 0, 0]) - 250) < 4
    with pytest.raises(ValueError, match="decode: expected one of 'pil', 'tensor', 'raw', got 'numpy'"):
        LMDBDataset(tmp_path / "d", decode="numpy")  # type: ignore[arg-type]


def test_transforms_are_applied_as_torchvision_does(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "d") as writer:
        for sample in ((1, 2), [3, 4], 5, (6, 7, 8), {"a": 9}):
            writer.write(sample)
    both = LMDBDataset(tmp_path / "d", transform=lambda x: ("t", x), target_transform=lambda y: -y)
    assert both.__getitems__([0, 1]) == [(("t", 1), -2), [("t", 3), -4]]
    assert LMDBDataset(tmp_path / "d", target_transform=lambda y: -y)[0] == (1, -2)
    one = LMDBDataset(tmp_path / "d", transform=lambda x: ("t", x))
    assert [one[i] for i in (2, 3, 4)] == [("t", 5), ("t", (6, 7, 8)), ("t", {"a": 9})]
    with pytest.raises(ValueError, match="target_transform needs samples of two parts"):
        both[2]
    with pytest.raises(ValueError, match="transform: expected a function of a sample, or None, got 3"):
        LMDBDataset(tmp_path / "d", transform=3)  # type: ignore[arg-type]


def test_a_users_error_in_a_transform_comes_through_as_it_is(path: Path) -> None:
    def broken(sample: Any) -> Any:
        raise OSError("mine")

    with pytest.raises(OSError, match=r"^mine") as caught:
        LMDBDataset(path, transform=broken)[0]
    assert caught.value.args == ("mine",)


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    file = io.BytesIO(jpeg().fp.getvalue()[:100])  # type: ignore[union-attr, attr-defined]

    with LMDBWriter(tmp_path / "d", samples_per_shard=1) as writer:
        writer.write((jpeg(), 0))
        writer.write((EncodedImage(file.getvalue()), 1))
    for decode in ("pil", "tensor"):
        dataset = LMDBDataset(tmp_path / "d", decode=decode)  # type: ignore[arg-type]
        text = f"{tmp_path / 'd'}: sample 1 (shard-00001): it cannot be decoded ("
        with pytest.raises(DamagedError, match=re.escape(text)):
            dataset.__getitems__([0, 1])


def test_subsets_and_splits_work(path: Path) -> None:
    dataset = LMDBDataset(path)
    assert numbers(Subset(dataset, [3, 21, 7])) == [3, 21, 7]
    first, second = random_split(dataset, [20, 5], torch.Generator().manual_seed(0))
    assert sorted(numbers(first) + numbers(second)) == list(range(25))
    assert sorted(numbers(s for batch in DataLoader(first, 6, collate_fn=list) for s in batch)) == sorted(
        numbers(first)
    )


def collate(samples: Any) -> list[tuple[int, int]]:
    return [(os.getpid(), int(number)) for data, number in samples if bytes(data) == bytes(numbered(number)[0])]


@combinations("fork", method=["fork", "spawn", "forkserver"])
def test_workers_read_after_their_parent_did(path: Path, method: str) -> None:
    dataset = LMDBDataset(path)
    assert numbers(dataset) == list(range(25))
    loader = DataLoader(dataset, 4, num_workers=2, collate_fn=collate, multiprocessing_context=method)
    pairs = [pair for batch in loader for pair in batch]
    assert [number for _, number in pairs] == list(range(25))
    assert len({pid for pid, _ in pairs} - {os.getpid()}) == 2
    assert numbers(dataset) == list(range(25))


def test_a_fork_while_another_thread_opens_a_shard_does_not_hang(path: Path) -> None:
    from lightning_gpuopt.storage import shard

    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with shard._lock:
            held.set()
            go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork with threads
        child = multiprocessing.get_context("fork").Process(target=assert_numbered, args=(path, 25))
        child.start()
    child.join(60)
    child.kill()  # if it hangs
    child.join()
    go.set()
    thread.join()
    assert child.exitcode == 0


def test_threads_share_a_dataset(path: Path) -> None:
    dataset = LMDBDataset(path)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: dataset[i % 25][1], range(2000)))
    assert got == [i % 25 for i in range(2000)]


def test_pickles_and_copies_open_their_files_again(path: Path) -> None:
    dataset = LMDBDataset(path, transform=len, verify_checksum=True)
    assert dataset[3][0] == 203
    data = pickle.dumps(dataset)
    assert len(data) < 4000
    assert [dataset[3], 25] == [pickle.loads(data)[3], len(pickle.loads(data))]
    assert copy.deepcopy(dataset)[24] == dataset[24]


def test_one_file_is_opened_once_a_process_and_nothing_leaks(path: Path) -> None:
    before = open_descriptors(), mapped_shards()
    datasets = [LMDBDataset(path) for _ in range(300)]
    assert all(numbers(dataset.__getitems__([0, 12, 24])) == [0, 12, 24] for dataset in datasets)
    assert mapped_shards() == before[1] + 3
    assert open_descriptors() <= before[0] + 6  # before Python 3.13 a map has one of its own
    del datasets
    for _ in range(500):
        assert LMDBDataset(path)[7][1] == 7
    assert (open_descriptors(), mapped_shards()) == before


def test_too_many_open_files_is_an_error_that_says_so(tmp_path: Path) -> None:
    write_numbered(tmp_path / "d", 60, samples_per_shard=1)
    code = """
import resource, sys
from lightning_gpuopt.storage.reader import LMDBDataset
dataset = LMDBDataset(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
list(dataset)
"""
    result = run_code(code, tmp_path / "d")
    assert result.returncode == 1
    assert "too many open files: raise `ulimit -n`" in result.stderr.splitlines()[-1]


def test_a_read_only_directory_is_enough(path: Path) -> None:
    for file in path.iterdir():
        file.chmod(0o444)
    path.chmod(0o555)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert_numbered(path, 25)
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    path.chmod(0o755)


def test_an_open_dataset_never_mixes_with_the_one_that_replaces_it(tmp_path: Path) -> None:
    def build(sign: int) -> Path:
        with LMDBWriter(tmp_path / "d", samples_per_shard=2, overwrite=True) as writer:
            for index in range(4):
                writer.write(sign * (index + 1))
        return tmp_path / "d"

    old = LMDBDataset(build(1))
    assert [old[0], old[1]] == [1, 2]
    build(-1)  # of the same sizes in every respect
    assert [old[0], old[1]] == [1, 2]
    with pytest.raises(
        DamagedError, match=r"sample 2 \(shard-00001\): .*if the dataset was built again meanwhile, open it"
    ):
        old[2]
    with pytest.raises(DamagedError, match="built again"):
        pickle.loads(pickle.dumps(old))[0]
    assert list(LMDBDataset(tmp_path / "d")) == [-1, -2, -3, -4]
    build(1)  # the same content again
    assert list(old) == [1, 2, 3, 4]


def test_a_flipped_bit_is_found_where_one_asked_for_it(path: Path) -> None:
    file = path / "shard-00001.mdb"
    data = bytearray(file.read_bytes())
    at = data.find(bytes([13]) * 200)
    data[at + 50] ^= 4
    file.write_bytes(data)
    assert LMDBDataset(path)[13][0][50] == 13 ^ 4
    checked = LMDBDataset(path, verify_checksum=True)
    assert numbers(checked.__getitems__([12, 14])) == [12, 14]
    with pytest.raises(
        DamagedError,
        match=re.escape(f"{path}: sample 13 (shard-00001): its checksum does not match its content; run `lightning-"),
    ):
        checked[13]


def test_the_disk_is_asked_ahead_only_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = iter([8, 16, 16])
    asked: list[int] = []
    monkeypatch.setattr(reader_module, "blocks_read", lambda: next(blocks))
    monkeypatch.setattr(ShardReader, "will_need", lambda self, index: asked.append(10 * self.number + index))
    dataset = LMDBDataset(path)
    for expected in ([24, 3], [24, 3], []):  # the first batch came from the disk, the second from memory
        asked.clear()
        assert numbers(dataset.__getitems__([24, 3])) == [24, 3]
        assert asked == expected


def test_samples_asked_ahead_are_the_samples(path: Path) -> None:
    dataset = LMDBDataset(path)
    dataset.read_ahead(range(25))
    assert numbers(dataset) == list(range(25))


@pytest.mark.matrix
def test_the_private_memory_of_a_reader_is_flat(tmp_path: Path) -> None:
    code = """
import random, re, sys
from lightning_gpuopt.storage.reader import LMDBDataset
dataset = LMDBDataset(sys.argv[1])
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
generator = random.Random(0)
def read(count):
    for _ in range(count // 100):
        dataset.__getitems__([generator.randrange(len(dataset)) for _ in range(100)])
read(10_000)
before = anonymous()
read(50_000)
print(anonymous() - before)
"""
    write_numbered(tmp_path / "d", 2000, samples_per_shard=500)
    result = run_python(code, tmp_path / "d")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 512  # KiB, over 50,000 samples: less than 11 bytes each


@pytest.mark.matrix
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc that gives batches back")
def test_the_memory_of_a_batch_is_kept_for_the_next(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "d") as writer:
        for index in range(64):
            writer.write(bytes([index]) * 47_000)
    code = """
import resource, sys
from lightning_gpuopt.storage.reader import LMDBDataset
dataset = LMDBDataset(sys.argv[1])
def read(count):
    for _ in range(count):
        dataset.__getitems__(range(64))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = read(5)
print(read(50) - before)
"""
    result = run_python(code, tmp_path / "d")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 2000  # else 50 batches of 735 pages


def test_a_column_is_read_without_the_images(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "d", samples_per_shard=3) as writer:
        for index in range(8):
            writer.write((EncodedImage(b"no image at all" * (index + 1)), index * 3, f"text {index}", [index, 1.5]))
        writer.classes = ["a", "b"]
    dataset = LMDBDataset(tmp_path / "d")
    assert dataset.targets == dataset.column(1) == [index * 3 for index in range(8)]
    assert dataset.column(2) == dataset.column(-2) == [f"text {index}" for index in range(8)]
    assert dataset.column(3) == [[index, 1.5] for index in range(8)]
    assert dataset.column(0) == [b"no image at all" * (index + 1) for index in range(8)]
    assert dataset.class_to_idx == {"a": 0, "b": 1}
    with pytest.raises(LookupError, match=r"sample 0: the sample has no part 4; it has 4 parts"):
        dataset.column(4)
    with pytest.raises(LookupError, match="no part 'label'"):
        dataset.column("label")


def test_targets_of_dicts_have_the_usual_names(tmp_path: Path) -> None:
    for name in ("label", "cls", "target"):
        with LMDBWriter(tmp_path / name) as writer:
            for index in range(3):
                writer.write({"image": EncodedImage(b"x"), name: index, "other": None})
        assert LMDBDataset(tmp_path / name).targets == [0, 1, 2]
    with LMDBWriter(tmp_path / "none") as writer:
        writer.write({"image": EncodedImage(b"x"), "text": "y"})
    with pytest.raises(AttributeError, match="column"):
        LMDBDataset(tmp_path / "none").targets  # noqa: B018
    with LMDBWriter(tmp_path / "alone") as writer:
        writer.write(5)
    with pytest.raises(AttributeError, match="not a tuple, list or dict"):
        LMDBDataset(tmp_path / "alone").targets  # noqa: B018


def test_a_damaged_sample_is_named_by_a_column_too(path: Path) -> None:
    dataset = LMDBDataset(path)
    flip(path / "shard-00001.mdb", 8 * (dataset.shard(1).place(3)[0] + 16))  # in its number
    with pytest.raises(DamagedError, match=r"sample 13 .*another sample lies in its place"):
        LMDBDataset(path).column(0)


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: (b"x" * i, i, 1.5),
        lambda i: [i / 3, "text" * i, i % 2 == 0],
        lambda i: {"a": b"x" * i, "b": np.int16(-i), "c": np.float32(i), "d": 7},
        lambda i: (i, b"x" * i, i),
        lambda i: (i, i) if i % 2 else (i, i, i),
        lambda i: tuple(range(i, i + 20)),
    ],
)
def test_columns_of_numbers_are_the_numbers(tmp_path: Path, sample: Any) -> None:
    with LMDBWriter(tmp_path / "d", samples_per_shard=7) as writer:
        for index in range(30):
            writer.write(sample(index))
    dataset = LMDBDataset(tmp_path / "d")
    for key in dataset[0] if isinstance(dataset[0], dict) else (0, 1, -1):
        expected = [sample(index)[key] for index in range(30)]
        assert dataset.column(key) == expected


@pytest.mark.parametrize(
    "error", [RuntimeError("can't allocate memory"), OSError(5, "x"), ValueError("y"), MemoryError()]
)
def test_only_what_is_wrong_with_an_image_is_its_samples_fault(tmp_path: Path, error: Exception) -> None:
    with LMDBWriter(tmp_path / "data") as writer:
        writer.write((EncodedImage(b"no image"), 0))

    def decoder(data: memoryview) -> Any:
        raise error

    dataset = LMDBDataset(tmp_path / "data")
    with pytest.raises(DamagedSampleError, match=r"sample 0 .*cannot be decoded"):
        dataset[0]
    with pytest.raises(type(error)) as found:
        dataset.with_decoder(decoder)[0]
    assert found.value is error
