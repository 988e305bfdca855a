from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, Subset

from lightning_gpuopt.dali.encoded_images import EncodedImages
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.loading.datasets import targets_of
from lightning_gpuopt.loading.labels import Labels
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import Manifest
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.verify import verify, wrong_files
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing.build import build_lmdb
from lightning_gpuopt.storage.writing.staging import Staging
from tests.storage.parts import Interrupted, as_of_an_earlier_release, flip, write_and_fail, write_numbered

IMAGE = EncodedImage(b"no image at all")


def write(path: Path, samples: list[Any], **kwargs: Any) -> Path:
    with LMDBWriter(path, **kwargs) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def without_samples(path: Path) -> Path:
    """Leave nothing of a dataset from which a sample could be read."""
    for file in (*path.glob("*.mdb"), *path.glob("*.tab")):
        file.unlink()
    return path


def columns(path: Path) -> list[list[list[Any]]]:
    return [shard.labels for shard in Manifest.load(path).shards]


@pytest.mark.parametrize("build", [False, True])
def test_targets_are_read_where_there_are_no_samples(tmp_path: Path, build: bool) -> None:
    labels = [index * 7 % 300 for index in range(40)]
    image = Image.new("RGB", (8, 8))
    samples = [(image, label, index) for index, label in enumerate(labels)]
    path = write(tmp_path / "d", samples, samples_per_shard=15)
    if build:
        build_lmdb(path, tmp_path / "built", progress=False)
        path = tmp_path / "built"
    without_samples(path)
    dataset = LMDBDataset(path)
    assert isinstance(dataset.targets, Labels)
    assert dataset.targets == dataset.column(1) == labels
    assert dataset.column(2) == list(range(40))
    nest = ConcatDataset([Subset(dataset, [3, 39]), dataset])
    assert targets_of(nest).tolist() == [labels[3], labels[39], *labels]
    assert EncodedImages(LMDBDataset(path, decode="raw")).labels.tolist() == labels  # what DALI is given
    datamodule = LMDBDataModule(
        path, batch_size=4, num_workers=0, decode="tensor", crop_size=8, weights="balanced", pin_memory=False
    )
    assert len(datamodule.train_dataloader()) == 10
    with pytest.raises(DamagedError, match="missing"):
        dataset[0]


def test_samples_of_different_structures_cost_the_head_of_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "d", [{"x": np.zeros(n), "cls": n} for n in range(9)], samples_per_shard=3)
    for file in sorted(path.glob("*.mdb"))[1:]:
        file.unlink()
    dataset = LMDBDataset(path)
    assert dataset.manifest.structure is None
    assert dataset.targets == list(range(9))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(IMAGE, 7), (IMAGE, 255)], [[1, "|u1"]]),
        ([[IMAGE, -1], [IMAGE, 255]], [[1, "<i2"]]),
        ([(IMAGE, 256), (1.5, 2)], [[1, "<u2"]]),
        ([(IMAGE, -(2**31)), (IMAGE, 0)], [[1, "<i4"]]),
        ([(IMAGE, 2**32 - 1), (IMAGE, 0)], [[1, "<u4"]]),
        ([(IMAGE, -(2**63)), (IMAGE, 2**63 - 1)], [[1, "<i8"]]),
        ([(IMAGE, True), (IMAGE, False)], [[1, "|b1"]]),
        ([(IMAGE, 1), (IMAGE, True)], []),  # not the same in all of them
        ([(b"", 1), (b"",)], []),
        ([(IMAGE, 1), (IMAGE, 2**63)], []),
        ([(IMAGE, 1), (IMAGE, 1.0)], []),
        ([IMAGE, 5], []),
        ([(IMAGE, np.uint16(3)), (IMAGE, np.uint16(4))], [[1, "|u1"]]),
        ([(IMAGE, np.int32(-3)), (IMAGE, 4)], [[1, "|i1"]]),
        ([(IMAGE, np.uint64(2**63 - 1))], [[1, "<i8"]]),
        ([(IMAGE, np.uint64(2**63))], []),
        ([(IMAGE, np.bool_(True))], [[1, "|b1"]]),
        ([(IMAGE, np.datetime64(3, "s"))], []),
        ([(5, (1, None, [2.0]), 3, None, {"a": 1}, 400)], [[0, "|u1"], [2, "|u1"], [5, "<u2"]]),
        ([(2**40, 3, 2**40, 4)], [[1, "|u1"], [0, "<i8"]]),  # 16 bytes are full
        (
            [{"n": 2**40, "cls": 1, "label": 2, 3: 4, "s": "x"}],
            [["label", "|u1"], ["cls", "|u1"], ["n", "<i8"], [3, "|u1"]],
        ),
        ([tuple(range(30))], [[key, "|u1"] for key in (1, 0, *range(2, 16))]),
    ],
)  # fmt: skip
def test_whole_numbers_that_all_samples_have_are_columns(
    tmp_path: Path, samples: list[Any], expected: list[list[Any]]
) -> None:
    path = write(tmp_path / "d", samples)
    assert columns(path) == [expected]
    dataset = LMDBDataset(path)
    assert (path / "shard-00000.lab").exists() == bool(expected)
    for key, _ in expected:
        assert dataset.column(key) == [sample[key] for sample in samples]


def test_columns_hold_what_the_samples_hold(tmp_path: Path) -> None:
    generator = random.Random(0)
    bounds = [2**bits for bits in (1, 8, 15, 16, 31, 32, 63)]
    samples = [
        {"a": np.int64(generator.randint(-bound, bound - 1)), "target": generator.randint(-bound, bound - 1)}
        for bound in bounds
        for _ in range(20)
    ]
    path = write(tmp_path / "d", samples, samples_per_shard=20)
    dataset = LMDBDataset(path)
    assert columns(path)[0] == [["target", "|i1"], ["a", "|i1"]]
    assert columns(path)[-1] == [["target", "<i8"], ["a", "<i8"]]
    assert dataset.targets == [sample["target"] for sample in samples]
    assert dataset.column("a") == [sample["a"] for sample in samples]
    as_of_an_earlier_release(path)
    assert columns(path) == [[]] * len(bounds)
    assert LMDBDataset(path).targets == dataset.targets
    assert LMDBDataset(path).column("a") == [sample["a"] for sample in samples]
    assert verify(path).ok


def test_where_one_shard_has_no_column_its_samples_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "d", [(IMAGE, 1), (IMAGE, 2), (IMAGE, "three"), (IMAGE, 4)], samples_per_shard=2)
    assert columns(path) == [[[1, "|u1"]], []]
    assert LMDBDataset(path).targets == [1, 2, "three", 4]


def test_targets_take_a_few_bytes_each(tmp_path: Path) -> None:
    path = write(tmp_path / "d", [(b"", index % 1000) for index in range(20_000)])
    dataset = LMDBDataset(path)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    targets = dataset.targets
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert targets[19_999] == 999
    assert 40_000 <= held < 60_000


def test_a_resumed_writer_writes_the_same_columns(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        write_and_fail(tmp_path / "d", 13, samples_per_shard=10)
    write_numbered(tmp_path / "d", 25, samples_per_shard=10, resume=True)
    write_numbered(tmp_path / "whole", 25, samples_per_shard=10)
    files = [sorted(each.name for each in (tmp_path / name).glob("*.lab")) for name in ("d", "whole")]
    assert files == [[f"shard-0000{number}.lab" for number in range(3)]] * 2
    assert columns(tmp_path / "d") == columns(tmp_path / "whole") == [[[1, "|u1"]]] * 3
    for name in files[0]:
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert LMDBDataset(tmp_path / "d").targets == list(range(25))


def test_a_shard_without_its_columns_is_not_finished(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        write_and_fail(tmp_path / "d", 25, samples_per_shard=10)
    (tmp_path / ".d.building/shard-00001.lab").unlink()
    plan = {"built_by": "LMDBWriter", "samples_per_shard": 10}
    with Staging(tmp_path / "d", overwrite=False, resume=True, plan=plan) as staging:
        assert sorted(staging.finished()) == [0]


def test_damaged_columns_are_an_error_that_names_their_file(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "d", 25, samples_per_shard=10)
    file = path / "shard-00001.lab"
    flip(file, 33)
    dataset = LMDBDataset(path)
    for ask in (lambda: dataset.targets, lambda: dataset.column(1), lambda: targets_of(dataset)):
        with pytest.raises(StorageError, match=rf"^{file}: not the label columns .* copy it again"):
            ask()
    assert dataset[13][1] == 13  # samples are not concerned
    report = verify(path)
    assert (report.num_samples, report.num_problems) == (25, 1)
    assert report.problems[0][0] is None
    assert report.problems[0][1].startswith(f"{file}: not the label columns listed in the manifest")
    assert wrong_files(path, dataset.manifest) == []
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match=rf"^{file}: 9 bytes long; expected 10: copy it again"):
        LMDBDataset(path).targets  # noqa: B018
    assert [text.split(":")[0] for text in wrong_files(path, dataset.manifest)] == [str(file)]
    file.unlink()
    with pytest.raises(StorageError, match=rf"^{file}: the file of the shard's labels is missing; copy it again"):
        LMDBDataset(path).targets  # noqa: B018
    assert [text.split(":")[0] for text in wrong_files(path, dataset.manifest)] == [str(file)]
    assert [text.split(":")[0] for _, text in verify(path).problems] == [str(file)]


def test_columns_of_another_dataset_are_refused(tmp_path: Path) -> None:
    write_numbered(tmp_path / "d", 25)
    dataset = LMDBDataset(tmp_path / "d")
    write(tmp_path / "d", [(b"", 1)] * 25, overwrite=True)
    with pytest.raises(DamagedError, match="if the dataset was built again meanwhile, open it again"):
        dataset.targets  # noqa: B018
    assert LMDBDataset(tmp_path / "d").targets == [1] * 25


def test_a_dataset_with_columns_replaced_by_one_without_leaves_none(tmp_path: Path) -> None:
    write_numbered(tmp_path / "d", 5)
    write(tmp_path / "d", [b"a", b"b"], overwrite=True)
    assert [file.name for file in (tmp_path / "d").glob("*.lab")] == []


@pytest.mark.parametrize(
    ("labels", "kept"),
    [
        ([0, 1, True, False], list),  # of two types: as a list has them
        ([np.uint32(1), np.uint32(2), np.datetime64(1, "s"), np.datetime64(2, "s")], list),
        ([np.uint64(2**63), np.uint64(1), np.int64(-1), np.int64(2)], list),
        ([1, 2, np.uint8(3), np.uint8(4)], Labels),
    ],
)
def test_labels_of_several_types_are_those_of_the_samples(tmp_path: Path, labels: list[Any], kept: type) -> None:
    with LMDBWriter(tmp_path / "data", samples_per_shard=2) as writer:
        for label in labels:
            writer.write((b"x", label))
    targets = LMDBDataset(tmp_path / "data").targets
    assert type(targets) is kept
    assert [*targets] == LMDBDataset(tmp_path / "data").column(1)
    assert [type(each) is bool for each in targets] == [type(each) is bool for each in labels]
