"""``pin_memory="in_place"``: the memory that loader processes fill is what is copied to the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import Dataset

from lightning_gpuopt import CudaPrefetcher
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.loading.engine.shared_blocks import BlockRing
from tests.helpers import tiny_trainer
from tests.simulators.gpu import ManualClock, SimulatedGpu, simulated_gpu


class Rows(Dataset[Any]):
    """Sixty-four of them, each full of its index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return np.full(1000, index), {"index": index}


class Sees(LightningModule):
    """Keeps the numbers of its batches, and how many blocks were registered as it had them."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []
        self.registered: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, rest = batch
        assert rows.is_cuda
        assert rows.plain()[:, 0].tolist() == rows.plain()[:, 999].tolist() == rest["index"].plain().tolist()
        self.seen.append(rest["index"].plain().tolist())
        self.registered.append(len(self.gpu.host_memory))
        return self.layer.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Moves(Sees):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class MovingData(LMDBDataModule):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    with simulated_gpu(ManualClock()) as gpu:
        yield gpu


def data(**options: Any) -> LMDBDataModule:
    return LMDBDataModule(Rows(), **{"batch_size": 4, "num_workers": 2, "pin_memory": "in_place", **options})


def fit(tmp_path: Path, gpu: SimulatedGpu, module: Sees, datamodule: Any, **options: Any) -> Any:
    trainer = tiny_trainer(tmp_path, **gpu.trainer_arguments(), max_steps=-1, max_epochs=2, **options)
    trainer.fit(module, datamodule)
    return trainer.train_dataloader


def test_the_batches_are_those_of_other_ways(tmp_path: Path, gpu: SimulatedGpu) -> None:
    seen, registered = [], []
    for number, (pin_memory, prefetch) in enumerate(
        (("in_place", False), ("in_place", True), ("auto", False), (False, False))
    ):
        module = Sees(gpu)
        callbacks = [CudaPrefetcher()] if prefetch else []
        loader = fit(tmp_path / str(number), gpu, module, data(pin_memory=pin_memory), callbacks=callbacks)
        assert loader.pin_memory is (pin_memory is not False)
        assert gpu.host_memory == {}  # after the run
        seen.append(module.seen)
        registered.append(max(module.registered))
    assert len(seen[0]) == 32
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert min(registered[:2]) > 0
    assert registered[2:] == [0, 0]


@pytest.fixture
def early(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that were taken while a copy out of them was on its way."""
    copies: list[tuple[int, Any]] = []
    found: list[int] = []
    copy_in, take = gpu.copy_in, BlockRing.take

    def copy_and_note(source: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        copy_in(source, *args, **kwargs)
        event = torch.cuda.Event()
        event.record()
        copies.append((source.data_ptr(), event))

    def take_and_look(ring: BlockRing) -> int:
        number = take(ring)
        begin = torch.frombuffer(ring.map(number), dtype=torch.uint8).data_ptr() if number in ring._maps else 0
        found.extend(number for at, event in copies if begin <= at < begin + ring.num_bytes and not event.query())
        return number

    monkeypatch.setattr(gpu, "copy_in", copy_and_note)
    monkeypatch.setattr(BlockRing, "take", take_and_look)
    gpu.copy_s = 0.1
    return found


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("begins", [None, "on_train_start", "on_train_epoch_start"])
def test_no_batch_is_written_while_it_is_copied(
    tmp_path: Path, gpu: SimulatedGpu, early: list[int], begins: str | None, prefetch: bool
) -> None:
    """Also where the training thread has a stream of its own, from some moment on."""
    module = Sees(gpu)
    if begins is not None:
        other = torch.cuda.Stream()
        setattr(module, begins, lambda: torch.cuda.set_stream(other))
    loader = fit(tmp_path, gpu, module, data(), callbacks=[CudaPrefetcher()] if prefetch else [])
    assert loader.pins_in_place
    assert len(module.seen) == 32
    assert max(module.registered) > 0
    assert early == []


class Prepares(Sees):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Takes(Sees):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        (rows, _), _, _ = next(dataloader_iter)
        self.seen.append(rows[:, 0].tolist())
        return self.layer.weight.sum()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Prepares, "Prepares.on_before_batch_transfer processes each batch before its copy"),
        (Takes, "a step of Takes fetches batches from dataloader_iter itself"),
    ],
)
def test_where_others_may_copy_batches_are_copied_before(
    tmp_path: Path, gpu: SimulatedGpu, module: Any, why: str
) -> None:
    model = module(gpu)
    with pytest.warns(UserWarning, match=f"pin_memory='in_place' works like True here: {why}"):
        loader = fit(tmp_path, gpu, model, data())
    assert (loader.pin_memory, loader.pins_in_place) == (True, False)
    assert len(model.seen) == 32
    assert model.registered == [] or max(model.registered) == 0


def test_without_a_trainer_nobody_knows_who_copies(gpu: SimulatedGpu) -> None:
    datamodule = data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    assert (loader.pin_memory, loader.pins_in_place) == (True, False)


def test_batches_lie_in_memory_that_is_registered(gpu: SimulatedGpu) -> None:
    datamodule = data()
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    loader.pins_in_place = True
    iterator = iter(loader)
    for rows, rest in iterator:
        assert rows.is_pinned()
        assert rest["index"].is_pinned()
        assert rows.data_ptr() in gpu.host_memory
    del rows, rest, iterator
    loader._iterator = None  # as Lightning does at a run's end
    assert gpu.host_memory == {}


@pytest.mark.parametrize(
    ("module", "datamodule"),
    [(Moves, data), (Sees, lambda: MovingData(Rows(), pin_memory="in_place"))],
    ids=["module", "datamodule"],
)
def test_copies_of_the_users_own_are_refused(tmp_path: Path, gpu: SimulatedGpu, module: Any, datamodule: Any) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"(Moves|MovingData)\.transfer_batch_to_device may copy.*pin_memory=True"
    ):
        fit(tmp_path, gpu, module(gpu), datamodule())


def test_what_gives_batches_of_its_own_is_copied(gpu: SimulatedGpu) -> None:
    """A `collate_fn` of the user's, whose batches torch's workers send."""
    datamodule = data(collate_fn=torch.utils.data.default_collate)
    datamodule.setup("fit")
    rows, _ = next(iter(datamodule.train_dataloader()))
    assert rows.is_pinned()
    assert gpu.host_memory == {}


def test_on_a_cpu_nothing_is_pinned(tmp_path: Path) -> None:
    datamodule = data()
    datamodule.setup("fit")
    assert datamodule.train_dataloader().pin_memory is False


@pytest.mark.parametrize("given", ["inplace", 3, None])
def test_what_it_may_be(given: Any) -> None:
    with pytest.raises(ValueError, match=r"pin_memory: expected True, False, 'auto' or 'in_place', got"):
        data(pin_memory=given)
