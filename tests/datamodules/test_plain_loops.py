"""Loaders of ours where nobody says which epoch it is: in a plain loop, and under Fabric; with Lightning, as ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import Dataset

from lightning_gpuopt import DALIDataModule, ImageFolderDataModule, LMDBDataModule
from lightning_gpuopt.datamodules.resumable import ResumableDataModule
from tests.datamodules.training import Notes, build
from tests.helpers import tiny_trainer
from tests.images.pictures import photo
from tests.ranks import run_ranks

EPOCHS = 4


class Sample(dict[str, int]):
    """A dict that may do anything."""


class Odd(Dataset[Any]):
    """Samples without a layout in memory, which is seen once loader processes have begun: torch's workers load them."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> Any:
        return Sample(index=index)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for index in range(12):
        (root / f"class{index % 2}").mkdir(exist_ok=True)
        photo(40 + index, 40).save(root / f"class{index % 2}" / f"{index}.jpg")
    return root


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("numbers") / "data")


MAKERS: dict[str, Callable[[Path, Path], ResumableDataModule]] = {
    "gathered": lambda folder, numbers: LMDBDataModule(numbers, batch_size=4, num_workers=0),
    "engine": lambda folder, numbers: LMDBDataModule(numbers, batch_size=4, num_workers=2),
    "not persistent": lambda folder, numbers: LMDBDataModule(
        numbers, batch_size=4, num_workers=1, persistent_workers=False
    ),
    "torch's workers": lambda folder, numbers: LMDBDataModule(Odd(), batch_size=4, num_workers=1),
    "crops": lambda folder, numbers: ImageFolderDataModule(
        folder, batch_size=4, crop_size=16, decode="tensor", num_workers=0
    ),
    "dali": lambda folder, numbers: DALIDataModule(folder, batch_size=4, crop_size=16, device="cpu"),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, folder: Path, numbers: Path) -> Callable[[], ResumableDataModule]:
    def made() -> ResumableDataModule:
        datamodule = MAKERS[request.param](folder, numbers)
        datamodule.setup("fit")
        return datamodule

    return made


def content(batches: Any) -> list[Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return plain(list(value.values()))
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

    return [plain(batch) for batch in batches]


def told(datamodule: ResumableDataModule, epochs: int = EPOCHS) -> list[Any]:
    """The epochs by ``set_epoch``."""
    loader, found = datamodule.train_dataloader(), []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        found.append(content(loader))
    return found


def test_each_iteration_of_a_loader_is_the_next_epoch(make: Callable[[], ResumableDataModule]) -> None:
    loader, expected = make().train_dataloader(), told(make())
    assert [content(loader) for _ in range(EPOCHS)] == expected
    assert len({str(epoch) for epoch in expected}) == EPOCHS


def test_and_so_is_that_of_each_new_loader(make: Callable[[], ResumableDataModule]) -> None:
    datamodule = make()
    assert [content(datamodule.train_dataloader()) for _ in range(EPOCHS)] == told(make())


def test_one_that_is_left_early_counts_and_one_that_gives_nothing_does_not(numbers: Path) -> None:
    datamodule = LMDBDataModule(numbers, batch_size=4, num_workers=0)
    datamodule.setup("fit")
    loader, expected = datamodule.train_dataloader(), told(datamodule)
    iter(loader)
    for epoch in range(EPOCHS - 1):
        iterator = iter(loader)
        assert content(next(iterator) for _ in range(epoch + 1)) == expected[epoch][: epoch + 1]
    assert content(loader) == expected[-1]


def test_after_a_resume_the_rest_of_that_epoch_comes_first(make: Callable[[], ResumableDataModule]) -> None:
    datamodule = make()
    order = datamodule._what_makes(datamodule.train_dataloader().sampler.order)
    whole = told(make(), 6)
    for new_loaders in (False, True):
        datamodule.load_state_dict({**order, "epoch": 3, "consumed": 8, "batches": 2})
        loader = datamodule.train_dataloader()
        epochs = [content(loader)]
        epochs += [content(datamodule.train_dataloader() if new_loaders else loader) for _ in range(2)]
        assert epochs == [whole[3][2:], whole[4], whole[5]]
    datamodule.load_state_dict({**order, "epoch": 1, "consumed": order["num_samples"], "batches": len(whole[0])})
    assert content(datamodule.train_dataloader()) == whole[2]


def test_whoever_sets_epochs_is_given_these_alone(make: Callable[[], ResumableDataModule]) -> None:
    datamodule, expected = make(), told(make())
    for epoch in (2, 2, 0, 3):
        loader = datamodule.train_dataloader()
        loader.sampler.set_epoch(epoch)
        assert [content(loader), content(loader)] == [expected[epoch]] * 2


def fabric_epochs(path: str, new_loaders: bool) -> list[list[Any]]:
    """What a rank is given: the samples of three epochs."""
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    datamodule = LMDBDataModule(path, batch_size=4, num_workers=0)
    datamodule.setup("fit")
    loader = fabric.setup_dataloaders(datamodule.train_dataloader())
    epochs = []
    for _ in range(3):
        loader = datamodule.train_dataloader() if new_loaders else loader
        epochs.append([index for _, indices in loader for index in indices.tolist()])
    return epochs


@pytest.mark.parametrize("new_loaders", [False, True])
def test_ranks_of_fabric_share_each_epoch(numbers: Path, new_loaders: bool) -> None:
    ranks = run_ranks(f"{__name__}:fabric_epochs", 2, path=str(numbers), new_loaders=new_loaders)
    epochs = [first + second for first, second in zip(*ranks, strict=True)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(53))] * 3
    assert len({str(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_with_lightning_epochs_are_those_of_the_trainer(numbers: Path, tmp_path: Path, workers: int) -> None:
    datamodule = LMDBDataModule(numbers, val=numbers, batch_size=4, num_workers=workers)
    trainer = tiny_trainer(tmp_path, max_epochs=3, max_steps=-1, limit_train_batches=5, num_sanity_val_steps=2)
    module = Notes()
    trainer.fit(module, datamodule=datamodule)
    other = LMDBDataModule(numbers, batch_size=4, num_workers=0)
    other.setup("fit")
    expected = [(epoch, batch[1]) for epoch, batches in enumerate(told(other, 3)) for batch in batches[:5]]
    assert module.steps == expected
