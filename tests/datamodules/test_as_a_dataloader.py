"""A SampleLoader where DataLoader, and the Trainer around it, have habits of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, get_worker_info

from lightning_gpuopt import LMDBDataModule, SampleLoader
from lightning_gpuopt.loading.engine.iterator import EngineIterator
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from tests.loaders.programs import nothing_is_left
from tests.tuning.test_segments_by_sample import same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    with nothing_is_left(collect=True):
        yield


class Samples(list[Any], Dataset[Any]):
    """Samples as they are given."""


class Numbers(Dataset[Any]):
    def __init__(self, number: int = 24) -> None:
        self.number, self.offset = number, 0

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor([float(index)]), index


class Net(pl.LightningModule):
    """Notes the samples of each epoch's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for numbers, _ in batch.values() if isinstance(batch, dict) else [batch]:
            self.seen.setdefault(self.current_epoch, []).extend(numbers[:, 0].int().tolist())
            loss = self.layer(numbers).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(tmp_path: Path, loader: Any, epochs: int, ckpt_path: Any = None, **more: Any) -> dict[int, list[int]]:
    given: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, **more}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=epochs, default_root_dir=tmp_path, **given)
    trainer.fit(net := Net(), loader, ckpt_path=ckpt_path)
    return net.seen


def loader_of(**more: Any) -> SampleLoader:
    return SampleLoader(Numbers(), 4, shuffle=True, num_workers=1, **more)


class TestResumeUnderATrainer:
    @pytest.mark.parametrize("limit", [1.0, 5])
    def test_the_checkpoint_of_an_epochs_end_goes_on_with_the_next_order(self, tmp_path: Path, limit: Any) -> None:
        keep = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
        whole = train(tmp_path, loader_of(), 4, callbacks=[keep], limit_train_batches=limit)
        assert len({tuple(each) for each in whole.values()}) == 4
        again = train(
            tmp_path, loader_of(), 4, tmp_path / "epoch=1.ckpt", enable_checkpointing=False, limit_train_batches=limit
        )
        assert again == {epoch: whole[epoch] for epoch in (2, 3)}

    def test_a_checkpoint_of_the_last_batch_of_a_limit_goes_on_with_the_next_order(self, tmp_path: Path) -> None:
        keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=5, filename="{step}")
        whole = train(tmp_path, loader_of(), 4, callbacks=[keep], limit_train_batches=5)
        again = train(
            tmp_path, loader_of(), 4, tmp_path / "step=10.ckpt", enable_checkpointing=False, limit_train_batches=5
        )
        assert again == {epoch: whole[epoch] for epoch in (2, 3)}

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.parametrize(("limit", "every", "name"), [(5, None, "epoch=1"), (5, 5, "step=10"), (0.5, 3, "step=6")])
    def test_so_does_a_datamodule(self, tmp_path: Path, workers: int, limit: Any, every: int | None, name: str) -> None:
        def data() -> LMDBDataModule:
            return LMDBDataModule(Numbers(), batch_size=4, num_workers=workers)

        filename = f"{{{name.partition('=')[0]}}}"
        keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=every, filename=filename)
        whole = train(tmp_path, data(), 4, callbacks=[keep], limit_train_batches=limit)
        again = train(
            tmp_path, data(), 4, tmp_path / f"{name}.ckpt", enable_checkpointing=False, limit_train_batches=limit
        )
        assert again == {epoch: whole[epoch] for epoch in (2, 3)}

    def test_a_second_trainer_begins_with_the_first_order(self, tmp_path: Path) -> None:
        loader = loader_of()
        first = train(tmp_path, loader, 3, enable_checkpointing=False)
        assert train(tmp_path, loader, 3, enable_checkpointing=False) == first

    def test_a_loader_that_is_cycled_is_whole_in_its_next_cycle(self, tmp_path: Path) -> None:
        def loaders() -> CombinedLoader:
            short = SampleLoader(Numbers(8), 4, num_workers=1)
            return CombinedLoader(
                {"long": SampleLoader(Numbers(24), 4, num_workers=1), "short": short}, "max_size_cycle"
            )

        keep = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1, filename="{step}")
        whole = train(tmp_path, loaders(), 1, callbacks=[keep])
        rest = train(tmp_path, loaders(), 1, tmp_path / "step=3.ckpt", enable_checkpointing=False)
        assert rest == {0: whole[0][3 * 8 :]}


def test_a_look_into_a_resumed_epoch_leaves_its_position_and_a_cycle_begins_it_anew() -> None:
    sampler = ElasticSampler(Order(12, shuffle=False), 4)
    sampler.set_epoch(0)
    sampler.resume(0, 8, 2)
    assert [list(sampler), list(sampler), sampler.consumed_after(3)] == [[8, 9, 10, 11], [8, 9, 10, 11], 12]
    sampler.start_over()
    assert list(sampler) == list(range(12))


FLOATS = [torch.tensor([float(n)]) for n in range(8)]


@pytest.mark.parametrize(
    "samples",
    [
        [*FLOATS[:5], FLOATS[5].double(), *FLOATS[6:]],
        [*(each.half() for each in FLOATS[:6]), *FLOATS[6:]],
        [*(each.numpy() for each in FLOATS[:6]), FLOATS[6].double().numpy(), FLOATS[7].numpy()],
        [*({"x": each, "y": 1} for each in FLOATS[:4]), *({"y": 1, "x": each} for each in FLOATS[4:])],
    ],
    ids=["float64 among float32", "float32 among float16", "of numpy", "keys in another order"],
)
def test_samples_unlike_the_first_make_the_batches_of_a_worker(samples: list[Any]) -> None:
    loader = SampleLoader(Samples(samples), 4, num_workers=1)
    plain = list(DataLoader(Samples(samples), 4, num_workers=1))
    batches = list(loader)
    assert same(batches, plain)
    assert [list(each) if isinstance(each, dict) else None for each in batches] == [
        list(each) if isinstance(each, dict) else None for each in plain
    ]
    assert isinstance(loader._iterator, EngineIterator)


def test_a_dtype_that_a_worker_refuses_is_refused() -> None:
    samples = Samples([*(each.long() for each in FLOATS[:6]), *FLOATS[6:]])
    batches = iter(SampleLoader(samples, 4, num_workers=1))
    next(batches)
    with pytest.raises(RuntimeError, match="differ in type or shape"):
        next(batches)


@pytest.mark.parametrize(("kind", "by_sample"), [(np.int64, True), (np.int32, False), (np.uint8, False)])
def test_indices_of_numpy_stay_what_they_are(kind: Any, by_sample: bool) -> None:
    def sampler() -> Any:
        return SubsetRandomSampler(np.arange(8, dtype=kind), generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]

    loader = SampleLoader(Numbers(), 4, sampler=sampler(), num_workers=1)
    assert same(list(loader), list(DataLoader(Numbers(), 4, sampler=sampler(), num_workers=1)))
    assert isinstance(loader._iterator, EngineIterator) == by_sample


def test_an_index_that_no_row_has_room_for_is_loaded_by_torchs_workers() -> None:
    loader = SampleLoader(Large(), 2, sampler=[1 << 63, 1], num_workers=1)
    assert next(iter(loader)).tolist() == [1, 0]


class Large(Numbers):
    def __getitem__(self, index: int) -> int:
        return index >> 63


def _open(worker: int) -> None:
    get_worker_info().dataset.offset = 5  # type: ignore[union-attr]


class Offset(Numbers):
    def __getitem__(self, index: Any) -> Any:
        return self.offset


def test_worker_init_fn_finds_the_users_dataset() -> None:
    loader = SampleLoader(Offset(), 4, num_workers=1, worker_init_fn=_open)
    assert next(iter(loader)).tolist() == [5] * 4
    assert isinstance(loader._iterator, EngineIterator)


class Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


def test_a_sampler_or_dataset_without_a_length_can_be_resumed() -> None:
    def loader() -> SampleLoader:
        return SampleLoader(Unsized(), 2, sampler=Endless(), num_workers=1)

    batches = iter(first := loader())
    next(batches)
    state = first.state_dict()
    assert state == {"num_samples": None, "seed": 0, "shuffle": None, "epoch": 0, "batches": 1}
    again = loader()
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == [1, 1]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataset_that_has_grown_or_shrunk_is_read_as_it_is(workers: int, shuffle: bool) -> None:
    dataset = Numbers(8)
    loader = SampleLoader(dataset, 4, num_workers=workers, shuffle=shuffle)
    for number in (8, 14, 6):
        dataset.number = number
        assert sorted(int(each) for batch in loader for each in batch[1]) == list(range(number))
        assert len(loader) == -(-number // 4)


class Fails(Numbers):
    def __getitem__(self, index: int) -> int:
        if not index:
            raise KeyError("no first sample")
        return index


def test_where_the_first_sample_fails_torchs_workers_raise_what_it_raises(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="no first sample"), caplog.at_level("INFO"):
        next(iter(SampleLoader(Fails(), 4, num_workers=1)))
    assert "its first sample is not read" in caplog.text


def test_a_tensor_is_a_dataset() -> None:
    values = torch.arange(8.0).reshape(4, 2)
    assert same(list(SampleLoader(values, 2, shuffle=None, num_workers=1)), [values[:2], values[2:]])  # type: ignore[arg-type]
