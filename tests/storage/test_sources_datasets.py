"""Map-style Datasets as sources: samples as they come, image files and stored samples as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import IterableDataset, Subset, TensorDataset

from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.sources import open_source
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.source_files import image_file, samples, stored, write_folder


class Squares:
    classes = ("even", "odd")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, str]:
        if index == 3:
            raise KeyError("lost")
        return index * index, "x"


def test_a_dataset_s_samples_come_as_they_are() -> None:
    source = open_source(Squares())
    assert ([source.read(i) for i in range(3)], source.classes) == ([(0, "x"), (1, "x"), (4, "x")], ("even", "odd"))
    with pytest.raises(RuntimeError, match=r"source: Squares\[3\] raised KeyError: 'lost'") as caught:
        source.read(3)
    assert isinstance(caught.value.__cause__, KeyError)
    tensors = TensorDataset(torch.arange(4), torch.ones(4, 2))
    assert torch.equal(open_source(tensors).read(2)[1], torch.ones(2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


def test_what_is_no_dataset_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a path or a map-style Dataset .* got a Stream"):
        open_source(Stream())
    with pytest.raises(ValueError, match="source: the list has no samples"):
        open_source([])


def test_one_of_our_own_datasets_is_built_again_with_its_images(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "images", {"a": 2, "b": 1})
    build_lmdb(tmp_path / "images", tmp_path / "one", progress=False)
    expected = [(data, int(path[0] == "b")) for path, data in files.items()]
    for given in (tmp_path / "one", LMDBDataset(tmp_path / "one")):
        source = open_source(given)
        assert (samples(source), source.classes, source.kind) == (expected, ("a", "b"), "lightning-gpuopt")
        assert type(source.read(0)[0]) is EncodedImage
    changed = open_source(LMDBDataset(tmp_path / "one", transform=lambda image: image.size))
    assert changed.read(2) == ((24, 16), 1)


def test_damage_in_one_of_our_own_datasets_is_found_when_it_is_built_again(tmp_path: Path) -> None:
    write_folder(tmp_path / "images", {"a": 3})
    build_lmdb(tmp_path / "images", tmp_path / "one", progress=False)
    shard = tmp_path / "one/shard-00000.mdb"
    data = bytearray(shard.read_bytes())
    where = data.index((tmp_path / "images/a/00001.jpg").read_bytes())
    data[where + 300] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedError, match=r"one: sample 1 \(shard-00000\): .*checksum"):
        samples(open_source(tmp_path / "one"))


def test_pil_images_of_a_dataset_may_be_what_was_opened(tmp_path: Path) -> None:
    """An image that was opened and not touched is stored as the file that it is."""
    data = image_file(3)
    (tmp_path / "x.jpg").write_bytes(data)
    build_lmdb([Image.open(tmp_path / "x.jpg")], tmp_path / "out", progress=False)
    assert LMDBDataset(tmp_path / "out", decode="raw")[0] == data


# --- datasets of image files -------------------------------------------------------------------------------------


class ImageFolder:
    """What torchvision's ImageFolder is, as far as one can see from outside."""

    classes = ("a", "b")
    transform: Any = None
    target_transform: Any = None
    transforms: Any = None

    def __init__(self, root: Path) -> None:
        files = sorted(root.glob("*/*"))
        self.samples = [(str(file), self.classes.index(file.parent.name)) for file in files]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, label = self.samples[index]
        with open(path, "rb") as stream:
            image = Image.open(stream).convert("RGB")
        return (image if self.transform is None else self.transform(image)), label


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return write_folder(tmp_path / "images", {"a": 3, "b": 2})


def test_an_image_folder_is_stored_as_its_files(tmp_path: Path, files: dict[str, bytes]) -> None:
    source = open_source(ImageFolder(tmp_path / "images"))
    expected = [(data, int(name[0] == "b")) for name, data in files.items()]
    assert (source.kind, source.classes, samples(source)) == ("image files", ("a", "b"), expected)
    assert type(source.read(0)[0]) is EncodedImage
    assert source.name(3) == f"{tmp_path}/images/b/00000.jpg"
    assert source.num_bytes == sum(map(len, files.values()))
    info = build_lmdb(ImageFolder(tmp_path / "images"), tmp_path / "out", num_proc=2, progress=False)
    assert (stored(tmp_path / "out"), info.classes) == (expected, ("a", "b"))


def test_a_subset_of_an_image_folder_or_of_a_stored_dataset_is_its_files_too(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    build_lmdb(tmp_path / "images", tmp_path / "one", progress=False)
    expected = [(data, int(name[0] == "b")) for name, data in files.items()]
    for dataset in (ImageFolder(tmp_path / "images"), LMDBDataset(tmp_path / "one")):
        subset = Subset(Subset(dataset, [4, 0, 2, -2]), torch.tensor([3, 0, 2]))  # type: ignore[arg-type]
        source = open_source(subset)
        assert samples(source) == [expected[3], expected[4], expected[2]]
        assert (source.classes, len(source)) == (("a", "b"), 3)
        assert source.fingerprint() != open_source(Subset(dataset, [0, 1, 2])).fingerprint()  # type: ignore[arg-type]
    numbers: Subset[int] = Subset([5, 6, 7], [2, 0])  # type: ignore[arg-type]
    assert samples(open_source(numbers)) == [7, 5]
    with pytest.raises(ValueError, match="the Subset has no samples"):
        open_source(Subset(LMDBDataset(tmp_path / "one"), []))


def test_a_broken_file_is_left_out_and_one_that_is_gone_stops_the_build(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    dataset = ImageFolder(tmp_path / "images")
    (tmp_path / "images/a/00000.jpg").write_bytes(b"broken")
    (tmp_path / "images/b/00001.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"resume=True: '.*b/00001\.jpg'"):
        build_lmdb(dataset, tmp_path / "out", progress=False)
    (tmp_path / "images/b/00001.jpg").write_bytes(files["b/00001.jpg"])
    with pytest.warns(UserWarning, match="1 of 5 samples are skipped"):
        build_lmdb(dataset, tmp_path / "out", progress=False, resume=True)
    names = ("a/00001.jpg", "a/00002.jpg", "b/00000.jpg", "b/00001.jpg")
    assert [data for data, _ in stored(tmp_path / "out")] == [files[name] for name in names]


def test_a_path_that_cannot_be_looked_at_is_met_when_it_is_read(tmp_path: Path, files: dict[str, bytes]) -> None:
    dataset = ImageFolder(tmp_path / "images")
    dataset.samples[4] = (f"{dataset.samples[0][0]}/below-a-file.jpg", 1)
    assert open_source(dataset).num_bytes == sum(map(len, files.values())) - len(files["b/00001.jpg"])
    with pytest.raises(NotADirectoryError, match=r"resume=True: '.*below-a-file\.jpg'"):
        build_lmdb(dataset, tmp_path / "out", progress=False)


class Mirrored(ImageFolder):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(index)
        return ImageOps.mirror(image), label


class Relabelled(ImageFolder):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(index)
        return image, label + 1


class Gray(ImageFolder):
    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = super().__getitem__(index)
        return image.convert("L"), label


def with_transform(root: Path) -> ImageFolder:
    dataset = ImageFolder(root)
    dataset.transform = np.asarray
    return dataset


def with_other_samples(root: Path) -> ImageFolder:
    dataset = ImageFolder(root)
    dataset.samples = [(path, str(label)) for path, label in dataset.samples]  # type: ignore[misc]
    return dataset


@pytest.mark.parametrize("make", [Mirrored, Relabelled, Gray, with_transform, with_other_samples])
@pytest.mark.usefixtures("files")
def test_a_dataset_that_changes_its_images_is_stored_as_it_gives_them(tmp_path: Path, make: Any) -> None:
    dataset = make(tmp_path / "images")
    source = open_source(dataset)
    assert source.kind == "dataset"
    build_lmdb(dataset, tmp_path / "out", progress=False)
    found = LMDBDataset(tmp_path / "out")[1]
    assert np.array_equal(np.asarray(found[0]), np.asarray(dataset[1][0]))
    assert found[1] == dataset[1][1]


def test_files_with_an_orientation_are_files_too(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "images/a").mkdir(parents=True)
    data = image_file(0, exif=exif)
    (tmp_path / "images/a/x.jpg").write_bytes(data)
    assert samples(open_source(ImageFolder(tmp_path / "images"))) == [(data, 0)]
