import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from lightning_gpuopt.datamodules import resumable
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.datamodules.training import SAMPLES, Notes, build
from tests.helpers import tiny_trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("lmdb") / "data")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "data"
    with LMDBWriter(path) as writer:
        for index in range(10):
            out = io.BytesIO()
            Image.new("RGB", (40 + index, 30), (index * 20, 100, 200)).save(out, "PNG")
            writer.write((EncodedImage(out.getvalue()), index))
    return path


class Sees(LightningModule):
    """Keeps what each stage was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[str, list[Any]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch)
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen["val"].append((dataloader_idx, batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["test"].append(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["predict"].append(batch)
        return batch[1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def labels(batches: list[Any]) -> list[int]:
    return [label for batch in batches for label in batch[1].tolist()]


def epoch_trainer(tmp_path: Path, **options: Any) -> Trainer:
    return tiny_trainer(tmp_path, **{"max_steps": -1, "max_epochs": 1, "limit_val_batches": 1.0, **options})


def test_all_four_stages_have_loaders(tmp_path: Path, data: Path) -> None:
    datamodule = LMDBDataModule(data, val=data, test=data, predict=data, batch_size=8)
    trainer, model = epoch_trainer(tmp_path, num_sanity_val_steps=0), Sees()
    trainer.fit(model, datamodule)
    trainer.test(model, datamodule)
    predictions = trainer.predict(model, datamodule)
    in_order = list(range(SAMPLES))
    assert sorted(labels(model.seen["train"])) == in_order
    assert labels(model.seen["train"]) != in_order
    assert labels([batch for _, batch in model.seen["val"]]) == in_order
    assert labels(model.seen["test"]) == in_order
    assert predictions is not None
    assert torch.cat(predictions).tolist() == in_order  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error:.*custom batch sampler.*")
def test_prediction_goes_without_a_warning(tmp_path: Path, data: Path) -> None:
    epoch_trainer(tmp_path).predict(Sees(), LMDBDataModule(predict=data, batch_size=8))


def test_several_validation_sets_have_a_loader_each(tmp_path: Path, data: Path) -> None:
    model = Sees()
    datamodule = LMDBDataModule(data, val=[data, Subset(LMDBDataset(data), [3, 1])], batch_size=30)
    epoch_trainer(tmp_path, num_sanity_val_steps=0).fit(model, datamodule)
    assert [(index, len(batch[1])) for index, batch in model.seen["val"]] == [(0, 30), (0, 23), (1, 2)]


def test_subsets_splits_and_other_datasets_are_taken(tmp_path: Path, data: Path) -> None:
    train, val = random_split(LMDBDataset(data), [40, 13], torch.Generator().manual_seed(0))
    model = Sees()
    epoch_trainer(tmp_path, num_sanity_val_steps=0).fit(model, LMDBDataModule(train, val=val, batch_size=8))
    seen = labels(model.seen["train"]), labels([batch for _, batch in model.seen["val"]])
    assert sorted(seen[0] + seen[1]) == list(range(SAMPLES))
    other = TensorDataset(torch.zeros(9, 1), torch.arange(9))
    model = Sees()
    epoch_trainer(tmp_path).fit(model, LMDBDataModule(other, batch_size=4, num_workers=0))
    assert sorted(labels(model.seen["train"])) == list(range(9))


def test_epochs_are_shuffled_anew_and_the_seed_decides(data: Path, tmp_path: Path) -> None:
    def orders(seed: int) -> list[list[int]]:
        model = Notes()
        trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=2)
        trainer.fit(model, LMDBDataModule(data, batch_size=60, seed=seed))
        return [indices for _, indices in model.steps]

    first, again, other = orders(1), orders(1), orders(2)
    assert first == again
    assert len({tuple(order) for order in (*first, *other)}) == 4


def test_without_shuffle_training_is_in_order(data: Path, tmp_path: Path) -> None:
    model = Notes()
    tiny_trainer(tmp_path, max_steps=2).fit(model, LMDBDataModule(data, batch_size=4, shuffle=False))
    assert [indices for _, indices in model.steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_weights_draw_with_replacement(data: Path, tmp_path: Path) -> None:
    weights = [0.0] * SAMPLES
    weights[7], weights[11] = 1.0, 3.0
    model = Notes()
    tiny_trainer(tmp_path, max_steps=-1, max_epochs=1).fit(model, LMDBDataModule(data, batch_size=8, weights=weights))
    drawn = [index for _, indices in model.steps for index in indices]
    assert len(drawn) == SAMPLES
    assert set(drawn) == {7, 11}
    np.save(tmp_path / "weights.npy", weights)
    again = Notes()
    from_file = LMDBDataModule(data, batch_size=8, weights=tmp_path / "weights.npy")
    tiny_trainer(tmp_path, max_steps=-1, max_epochs=1).fit(again, from_file)
    assert again.steps == model.steps
    with pytest.raises(ValueError, match=r"shape \(53,\)"):
        tiny_trainer(tmp_path).fit(Notes(), LMDBDataModule(data, weights=[1.0, 2.0]))


def test_overfitting_a_few_batches_works(data: Path, tmp_path: Path) -> None:
    model = Notes()
    trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=2, overfit_batches=2)
    trainer.fit(model, LMDBDataModule(data, val=data, batch_size=4))
    assert [indices for _, indices in model.steps] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_reloading_loaders_every_epoch_keeps_the_orders(data: Path, tmp_path: Path) -> None:
    def steps(**options: Any) -> Any:
        model = Notes()
        trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=3, **options)
        trainer.fit(model, LMDBDataModule(data, batch_size=8))
        return model.steps

    assert steps(reload_dataloaders_every_n_epochs=1) == steps()


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_images_travel_as_uint8_and_are_normalised_after_the_transfer(images: Path, tmp_path: Path) -> None:
    model = Sees()
    datamodule = LMDBDataModule(
        images,
        val=images,
        batch_size=5,
        decode="tensor",
        crop_size=16,
        normalize=IMAGENET,
        num_workers=1,
        shuffle=False,
    )
    datamodule.setup()
    raw, _ = next(iter(datamodule.val_dataloader()))
    assert (raw.dtype, raw.shape) == (torch.uint8, (5, 3, 16, 16))
    epoch_trainer(tmp_path, num_sanity_val_steps=0).fit(model, datamodule)
    got, got_labels = model.seen["val"][0][1]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in IMAGENET)
    torch.testing.assert_close(got, (raw / 255 - mean) / std)
    assert (got.dtype, got_labels.dtype) == (torch.float32, torch.int64)
    assert model.seen["train"][0][0].shape == (5, 3, 16, 16)


def test_normalisation_leaves_everything_else_alone() -> None:
    normalize = LMDBDataModule(normalize=((0.5,), (0.25,))).normalize
    assert normalize is not None
    image = torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    batch = {"image": image, "mask": image.long(), "more": [(image, "name"), torch.zeros(2, 3, dtype=torch.uint8)]}
    done, found = normalize(batch)
    assert found == 2
    for got in (done["image"], done["more"][0][0]):
        torch.testing.assert_close(got, torch.tensor([[[[-2.0, 2.0]]]]))
    assert done["mask"] is batch["mask"]
    assert done["more"][0][1] == "name"
    assert done["more"][1] is batch["more"][1]  # type: ignore[index]


@pytest.mark.filterwarnings("error:.*across ranks is zero.*")
def test_without_val_there_is_no_validation(data: Path, tmp_path: Path) -> None:
    model = Sees()
    epoch_trainer(tmp_path).fit(model, LMDBDataModule(data))
    assert model.seen["val"] == []


def test_the_modules_own_transfer_hook_stays_in_force(data: Path, tmp_path: Path) -> None:
    class Own(Notes):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0], batch[1] + 1000]

    model = Own()
    tiny_trainer(tmp_path, max_steps=1).fit(model, LMDBDataModule(data, batch_size=4, shuffle=False))
    assert model.steps == [(0, [1000, 1001, 1002, 1003])]


def test_transforms_belong_to_their_stages(images: Path, tmp_path: Path) -> None:
    datamodule = LMDBDataModule(
        images,
        val=images,
        batch_size=5,
        num_workers=0,
        train_transform=_width,
        eval_transform=_height,
    )
    datamodule.setup("fit")
    assert sorted(w for batch in datamodule.train_dataloader() for w in batch[0].tolist()) == list(range(40, 50))
    assert [h for batch in datamodule.val_dataloader() for h in batch[0].tolist()] == [30] * 10


def _width(image: Image.Image) -> int:
    return image.width


def _height(image: Image.Image) -> int:
    return image.height


def test_auto_chooses_workers_and_memory_by_the_machine(images: Path, data: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(resumable, "usable_cpus", lambda: 7.5)
    decoding = LMDBDataModule(images, decode="tensor", crop_size=8)
    decoding.setup("fit")
    loader = decoding.train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.pin_memory) == (7, True, False)
    arrays = LMDBDataModule(data)
    arrays.setup("fit")
    loader = arrays.train_dataloader()
    assert (loader.num_workers, loader.persistent_workers) == (0, False)
    told = LMDBDataModule(data, num_workers=2, persistent_workers=False, prefetch_factor=5)
    told.setup("fit")
    loader = told.train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (2, False, 5)


@pytest.mark.filterwarnings("error:.*does not have many workers.*")
def test_lightning_does_not_advise_workers_where_none_are_better(data: Path, tmp_path: Path) -> None:
    tiny_trainer(tmp_path).fit(Notes(), LMDBDataModule(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected samples per batch and rank, at least 1, got 0"),
        ({"num_workers": -1}, "num_workers: expected processes"),
        ({"decode": "jpeg"}, "decode: expected one of 'pil', 'tensor', 'raw', got 'jpeg'"),
        ({"shuffle": 1}, "shuffle"),
        ({"shuffle_window": 0}, "shuffle_window: expected samples, at least 1, or None, got 0"),
        ({"normalize": (0.5, 0.5)}, r"normalize: expected \(mean, std\)"),
        ({"normalize": ((0.5,), (0.5, 0.5))}, "normalize: expected a mean and a standard deviation for each"),
        ({"normalize": ((0.5,), (0.0,))}, "normalize: expected standard deviations above 0"),
        ({"prefetch_factor": 0}, "prefetch_factor: expected batches, at least 1"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LMDBDataModule(**options)


def test_arguments_that_do_not_go_together_are_refused(data: Path) -> None:
    with pytest.raises(MisconfigurationException, match="decode='tensor'"):
        LMDBDataModule(data, crop_size=224)
    with pytest.raises(MisconfigurationException, match="brings its own transform"):
        LMDBDataModule(LMDBDataset(data), train_transform=_width)
    for weights in ("balanced", [1.0] * SAMPLES, "weights.npy"):
        with pytest.raises(MisconfigurationException, match=r"shuffle_window=8 .*expected one of them, got both"):
            LMDBDataModule(data, weights=weights, shuffle_window=8)
    with pytest.raises(MisconfigurationException, match="one dataset"):
        LMDBDataModule([data, data])  # type: ignore[arg-type]


def test_crops_of_other_datasets_are_refused(images: Path, tmp_path: Path) -> None:
    both = ConcatDataset([LMDBDataset(images), TensorDataset(torch.zeros(3, 1))])
    with pytest.raises(MisconfigurationException, match=r"crop_size=8 .*got a ConcatDataset"):
        tiny_trainer(tmp_path).fit(Sees(), LMDBDataModule(both, decode="tensor", crop_size=8))


def test_transforms_follow_the_crop(images: Path) -> None:
    datamodule = LMDBDataModule(
        images, batch_size=10, num_workers=0, decode="tensor", crop_size=8, train_transform=_doubled, shuffle=False
    )
    datamodule.setup("fit")
    ((batch, batch_labels),) = datamodule.train_dataloader()
    assert (batch.shape, batch.dtype) == ((10, 3, 8, 8), torch.int64)
    assert batch_labels.tolist() == list(range(10))


def _doubled(image: torch.Tensor) -> torch.Tensor:
    return image.long() * 2


def test_hooks_of_subclasses_stay_in_force(data: Path, tmp_path: Path) -> None:
    class Own(LMDBDataModule):
        def val_dataloader(self) -> Any:
            return [torch.zeros(2)]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch if isinstance(batch, torch.Tensor) else [batch[0], batch[1] + 1000]

    model = Sees()
    trainer = epoch_trainer(tmp_path, num_sanity_val_steps=0)
    trainer.fit(model, Own(data, batch_size=60, normalize=((0.5,), (0.5,))))
    assert len(model.seen["val"]) == 2
    assert min(labels(model.seen["train"])) == 1000


def test_page_locked_memory_without_cuda_is_no_error(data: Path, tmp_path: Path) -> None:
    tiny_trainer(tmp_path).fit(Notes(), LMDBDataModule(data, pin_memory=True))


def test_missing_data_is_told_when_it_is_asked_for(data: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tiny_trainer(tmp_path).fit(Notes(), LMDBDataModule(tmp_path / "nowhere"))
    with pytest.raises(MisconfigurationException, match="without test="):
        tiny_trainer(tmp_path).test(Sees(), LMDBDataModule(data))


@pytest.mark.filterwarnings("ignore:.*LightningCLI.*")
def test_it_is_configured_from_yaml(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"data:\n  train: {data}\n  batch_size: 16\n  num_workers: auto\n  pin_memory: false\n  shuffle_window: 32\n"
        "  normalize: [[0.5], [0.25]]\n"
    )
    cli = LightningCLI(Notes, LMDBDataModule, run=False, args=["--config", str(config)], save_config_callback=None)
    assert (cli.datamodule.batch_size, cli.datamodule.shuffle_window, cli.datamodule.pin_memory) == (16, 32, False)
    assert cli.datamodule.normalize.mean == (0.5,)
    cli.datamodule.setup("fit")
    assert len(cli.datamodule.train_dataloader()) == 4


def test_a_damaged_image_is_an_error_and_no_wrong_image(images: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(images, copy)
    dataset = LMDBDataset(copy)
    start = (copy / "shard-00000.mdb").read_bytes().index(bytes(dataset.value(4)))
    with (copy / "shard-00000.mdb").open("r+b") as stream:
        stream.seek(start + len(dataset.value(4)) - 1)  # the label
        stream.write(b"\x01")
    datamodule = LMDBDataModule(copy, batch_size=10, num_workers=0, decode="tensor", crop_size=8)
    datamodule.setup("fit")
    with pytest.raises(DamagedError, match=r"sample 4 .*checksum"):
        next(iter(datamodule.train_dataloader()))
