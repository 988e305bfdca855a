"""``num_workers="auto"`` where /dev/shm is small: Docker's has 64 MiB."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from lightning_gpuopt import SampleLoader
from lightning_gpuopt.datamodules import resumable, sample_loader
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.telemetry import resources
from tests.datamodules.test_lmdb import Sees
from tests.helpers import tiny_trainer

MIB = 2**20

pytestmark = pytest.mark.filterwarnings("ignore:.*DataLoader will create")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "data"
    with LMDBWriter(path) as writer:
        for index in range(10):
            writer.write((Image.new("RGB", (300, 240), (index * 20, 100, 200)), index))
    return path


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of 64 CPUs; call it with the free bytes of its /dev/shm."""

    def has(free: int) -> None:
        usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free))
        monkeypatch.setattr(resources, "shutil", usage)

    monkeypatch.setattr(resumable, "usable_cpus", lambda: 64.0)
    has(64 * MIB)
    return has


def crops(train: Any, **kwargs: Any) -> LMDBDataModule:
    """Crops of 150,528 bytes, with labels of 8, whose batches a function of the user's makes."""
    options = {"decode": "tensor", "crop_size": 224, "pin_memory": False, "collate_fn": default_collate}
    return LMDBDataModule(train, **{**options, **kwargs})


class Reads(Dataset[Any]):
    """Samples of 1,000,000 bytes; notes in a file which process reads which."""

    def __init__(self, path: Path, fails: bool = False) -> None:
        self.path = path
        self.fails = fails

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        with self.path.open("a") as stream:
            print(os.getpid(), index, file=stream)
        if self.fails:
            raise OSError("gone")
        return torch.rand(250_000)

    def reads(self) -> list[list[int]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [[int(word) for word in line.split()] for line in lines]


@contextmanager
def said() -> Iterator[list[str]]:
    """What is said of ``num_workers="auto"`` meanwhile; torch says something of many workers, too."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    lines += [text for text in (str(each.message) for each in caught) if "num_workers='auto'" in text]


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ({"batch_size": 32}, 5),  # 4.6 MiB: 51.2 MiB hold 11.1 of them, and one is with the consumer
        ({"batch_size": 32, "prefetch_factor": 1}, 10),
        ({"batch_size": 32, "prefetch_factor": 5}, 2),
        ({"batch_size": 64}, 2),
        ({"batch_size": 118}, 1),  # 3.02 batches
        ({"batch_size": 119}, 0),  # 2.997
        ({"batch_size": 2}, 64),
    ],
)
def test_as_many_workers_are_taken_as_have_room(images: Path, arguments: dict[str, int], workers: int) -> None:
    with said() as lines:
        loader = crops(images, **arguments).train_dataloader()
    assert (loader.num_workers, loader.persistent_workers) == (workers, workers > 0)
    assert [f"is {workers} here, not 64: " in line for line in lines] == [True] * (workers < 64)


def test_the_warning_comes_once_and_says_what_helps(images: Path) -> None:
    datamodule = crops(images, val=images, batch_size=16)
    with said() as lines:
        assert datamodule.train_dataloader().num_workers == 5  # half of the room: batches of both lie there at once
        assert datamodule.val_dataloader().num_workers == 5
    assert lines == [
        "LMDBDataModule: num_workers='auto' is 5 here, not 64: /dev/shm has 64 MiB free, and a batch is 2.3 MiB. All "
        "fit after `docker run --shm-size=741m` (or --ipc=host); a smaller batch_size or prefetch_factor lets more "
        "fit, and num_workers=<number> is used unchanged"
    ]


class Batches:
    """A user's own, of whose size nothing is known."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3]] * 5)

    def __len__(self) -> int:
        return 5


def test_of_batches_of_the_users_own_a_list_shows_how_large_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_loader, "usable_cpus", lambda: 64.0)
    with said() as lines:
        loader = SampleLoader(Reads(tmp_path / "reads"), batch_sampler=[[0, 1, 2, 3]] * 5)
        assert SampleLoader(Reads(tmp_path / "reads"), batch_sampler=Batches()).num_workers == 64
    assert loader.num_workers == 6  # 3.8 MiB: 51.2 MiB hold 13.4 of them
    assert [line.partition(":")[0] for line in lines] == ["SampleLoader"]


def test_what_is_advised_is_enough(images: Path, machine: Any) -> None:
    machine(740 * MIB)
    with pytest.warns(UserWarning, match="is 63 here, not 64"):
        crops(images, val=images, batch_size=16).train_dataloader()
    machine(741 * MIB)
    assert crops(images, val=images, batch_size=16).train_dataloader().num_workers == 64


def test_the_ranks_of_a_node_share_the_room(images: Path, tmp_path: Path) -> None:
    datamodule = crops(images, batch_size=4)
    datamodule.trainer = tiny_trainer(tmp_path, devices=8, strategy="ddp")
    with pytest.warns(UserWarning, match="is 5 here, not 8"):
        assert datamodule.train_dataloader().num_workers == 5


def test_a_number_is_taken_as_it_is(images: Path) -> None:
    with said() as lines:
        assert crops(images, batch_size=256, num_workers=7).train_dataloader().num_workers == 7
    assert lines == []


def test_batches_that_are_filled_in_place_need_no_room_there(images: Path, tmp_path: Path, machine: Any) -> None:
    machine(0)
    dataset = Reads(tmp_path / "reads")
    with said() as lines:
        assert crops(images, batch_size=32, collate_fn=None).train_dataloader().num_workers == 64
        assert LMDBDataModule(dataset, batch_size=10).train_dataloader().num_workers == 64
    assert (lines, dataset.reads()) == ([], [])


def test_the_first_sample_is_read_in_another_process(tmp_path: Path) -> None:
    dataset = Reads(tmp_path / "reads")
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="is 2 here"):
        assert LMDBDataModule(dataset, batch_size=10, collate_fn=default_collate).train_dataloader().num_workers == 2
    ((pid, index),) = dataset.reads()
    assert (pid != os.getpid(), index) == (True, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_sample_is_read_where_batches_of_any_size_have_room(tmp_path: Path, machine: Any) -> None:
    machine(83_000 * MIB)
    dataset = Reads(tmp_path / "reads")
    assert LMDBDataModule(dataset, batch_size=10, collate_fn=default_collate).train_dataloader().num_workers == 64
    assert dataset.reads() == []


def test_where_the_first_sample_cannot_be_read_training_says_so(tmp_path: Path) -> None:
    dataset = Reads(tmp_path / "reads", fails=True)
    assert LMDBDataModule(dataset, batch_size=10, collate_fn=default_collate).train_dataloader().num_workers == 64
    assert len(dataset.reads()) == 1


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*num_workers='auto' is")
def test_a_fit_sees_the_same_batches(
    images: Path, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "usable_cpus", lambda: 2.0)
    seen = []
    for free in (1, 6 * MIB, 50_000 * MIB):
        machine(free)
        model = Sees()
        datamodule = crops(images, val=images, batch_size=5, flip=True)
        trainer = tiny_trainer(tmp_path, max_epochs=1, max_steps=-1, limit_val_batches=1.0, num_sanity_val_steps=0)
        trainer.fit(model, datamodule)
        seen.append((trainer.train_dataloader.num_workers, model.seen["train"], model.seen["val"]))
    assert [workers for workers, *_ in seen] == [0, 1, 2]
    for _, train, val in seen:
        assert len(train) == len(val) == 2
        for one, other in zip(train, seen[0][1], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_full_shared_memory_has_room_for_none(images: Path, machine: Any) -> None:
    machine(0)
    with said() as lines:
        loader = crops(images, batch_size=32, prefetch_factor=1).train_dataloader()
    assert (loader.num_workers, ["is 0 here, not 64: " in line for line in lines]) == (0, [True])
