"""Datasets of every kind in a loader: each gives its own samples, and no user's object is changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_gpuopt.images.crop import CenterCrops
from lightning_gpuopt.loading.datasets import balanced_weights, targets_of
from lightning_gpuopt.loading.elastic_loader import make_loader
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter


def write(path: Path, count: int = 10) -> Path:
    with LMDBWriter(path, samples_per_shard=4) as writer:
        for index in range(count):
            writer.write((np.full(2, index, np.float32), index))
    return path


def loaded(dataset: Any, **options: Any) -> list[Any]:
    """All that a loader gives, in order, as torch's own DataLoader would."""
    sampler = ElasticSampler(Order(len(dataset), shuffle=False), 3)
    return list(make_loader(dataset, sampler, **options))


class Wrapper(Dataset[Any]):
    """What many write: everything else is the wrapped dataset's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        values, label = self.inner[index]
        return values, label + 100


class Half(LMDBDataset):
    def __len__(self) -> int:
        return super().__len__() // 2


class Negative(LMDBDataset):
    def read(self, index: int, image: Any) -> Any:
        values, label = super().read(index, image)
        return -values, -label


class InBatches(LMDBDataset):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [(np.zeros(2, np.float32), -1) for _ in indices]


class Slotted(LMDBDataset):
    __slots__ = ("extra",)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.extra = 5

    def __getitem__(self, index: int) -> Any:
        values, label = super().__getitem__(index)
        return values, label + self.extra


class Again(Subset[Any]):
    """Every sample twice."""

    def __len__(self) -> int:
        return 2 * len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[self.indices[index // 2]]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Unsized(Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return torch.zeros(1), int(index)


KINDS: dict[str, Any] = {
    "plain": LMDBDataset,
    "wrapper": lambda path: Wrapper(LMDBDataset(path)),
    "half": Half,
    "negative": Negative,
    "in batches": InBatches,
    "slotted": Slotted,
    "again": lambda path: Again(LMDBDataset(path), [3, 1]),
    "of an unsized one": lambda path: Subset(Unsized(), [3, 1, 2]),
    "with keys of texts": lambda path: Subset(Unsized(), ["3", "1"]),  # type: ignore[list-item]
    "two halves": lambda path: ConcatDataset([Half(path), Half(path)]),
    "a nest": lambda path: ConcatDataset([Subset(Negative(path), [-1, 0]), Wrapper(LMDBDataset(path))]),
    "an alien in a nest": lambda path: ConcatDataset([LMDBDataset(path), Subset(Wrapper(LMDBDataset(path)), [2])]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_what_torchs_own_gives(tmp_path: Path, kind: str, workers: int) -> None:
    dataset = KINDS[kind](write(tmp_path / "d"))
    expected = list(DataLoader(dataset, batch_size=3))
    for got, batch in zip(loaded(dataset, num_workers=workers), expected, strict=True):
        assert [part.tolist() for part in got] == [part.tolist() for part in batch]
        assert [part.dtype for part in got] == [part.dtype for part in batch]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_own_collate_fn_gets_a_plain_list(tmp_path: Path, workers: int) -> None:
    for dataset in (LMDBDataset(write(tmp_path / "d")), Unsized3()):
        batches = loaded(dataset, collate_fn=as_it_is_too, num_workers=workers)
        assert all(type(batch) is list for batch in batches)
        assert [label for batch in batches for _, label in batch] == list(range(len(dataset)))


class Unsized3(Unsized):
    def __len__(self) -> int:
        return 3


def as_it_is_too(samples: list[Any]) -> Any:
    return samples


def test_the_users_datasets_stay_as_they_are(tmp_path: Path) -> None:
    dataset = LMDBDataset(write(tmp_path / "d"), transform=abs)
    part = Subset(dataset, [1, 2])
    before = dict(vars(dataset))
    loaded(part, num_workers=0)
    assert part.dataset is dataset
    assert {name: value for name, value in vars(dataset).items() if name in before} == before


def test_batches_of_other_datasets_are_contiguous_as_torch_makes_them() -> None:
    class Strided(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(8, 9, 3, dtype=torch.uint8).permute(2, 0, 1)

    (batch,) = loaded(Strided())
    (expected,) = DataLoader(Strided(), batch_size=3)
    assert batch.stride() == expected.stride()


def test_a_wrapper_lets_nobody_decode_its_images(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Wrapper has no method with_decoder"):
        loaded(Wrapper(LMDBDataset(write(tmp_path / "d"))), crops=CenterCrops(8))


def test_an_error_that_is_not_about_the_samples_comes_through(tmp_path: Path) -> None:
    class Full(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.stack:
                raise RuntimeError("No space left on device")
            return super().__torch_function__(function, types, args, kwargs or {})

    class Gives(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return torch.zeros(2).as_subclass(Full)

    with pytest.raises(RuntimeError, match=r"^No space left on device$"):
        loaded(Gives())


def test_targets_go_through_nests_and_balance(tmp_path: Path) -> None:
    dataset = LMDBDataset(write(tmp_path / "d"))
    nest = ConcatDataset([Subset(dataset, [9, 0]), dataset])
    assert targets_of(nest).tolist() == [9, 0, *range(10)]
    assert balanced_weights(np.array([0, 0, 1, 2, 2, 2])).tolist() == pytest.approx([1 / 2, 1 / 2, 1] + [1 / 3] * 3)
    for wrong in (np.array([b"x"]), np.zeros((3, 2))):
        with pytest.raises(ValueError, match="needs one label per sample"):
            balanced_weights(wrong)
    with pytest.raises(TypeError, match="Unsized3 has no targets"):
        targets_of(Unsized3())


def test_the_targets_of_masks_are_none(tmp_path: Path) -> None:
    from PIL import Image

    with LMDBWriter(tmp_path / "d") as writer:
        writer.write((Image.new("RGB", (2, 2)), Image.new("L", (2, 2))))
    with pytest.raises(TypeError, match="has no targets"):
        targets_of(LMDBDataset(tmp_path / "d"))
