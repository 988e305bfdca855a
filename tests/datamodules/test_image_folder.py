"""Folders of image files as they are, through a real Trainer."""

import contextlib
import dataclasses
import io
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_gpuopt import ImageFolderDataModule, LMDBDataModule, build_lmdb
from lightning_gpuopt.datamodules import image_folder as image_folder_module
from lightning_gpuopt.images import files as files_module
from lightning_gpuopt.images.cost import ImageCosts
from lightning_gpuopt.images.errors import CorruptSampleError
from lightning_gpuopt.loading.image_folder import ImageFolder
from tests.datamodules.test_lmdb import Sees, epoch_trainer, labels
from tests.datamodules.test_samples import Keeps
from tests.datamodules.training import Interrupted, SaveAndEnd
from tests.helpers import safely, tiny_trainer
from tests.images.pictures import encoded, photo

CLASSES = ("bee", "ant", "cat")
IMAGES = 21


def write_folder(path: Path, count: int = IMAGES) -> Path:
    """Images of one colour, which says their number in torchvision's order; the class is a third of it."""
    each = count // len(CLASSES)
    for label, name in enumerate(sorted(CLASSES)):
        folder = path / name / "nested"
        folder.mkdir(parents=True)
        for index in range(each):
            number = label * each + index
            Image.new("RGB", (30 + number, 20), (number * 10, 0, 0)).save(folder / f"{index:03d}.png")
        (path / name / ".hidden.png").write_bytes(b"")
        (path / name / "notes.txt").write_bytes(b"")
    return path


def numbers(batches: list[Any]) -> list[int]:
    """Which images batches of uint8 tensors are made of."""
    return [
        round(int(image[0, 0, 0]) / 10)
        for batch in batches
        for image in (batch if isinstance(batch, torch.Tensor) else batch[0])
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "train")


def options(**more: Any) -> dict[str, Any]:
    return {"batch_size": 4, "num_workers": 0, "decode": "tensor", "crop_size": 8, **more}


def test_every_image_comes_once_an_epoch_with_its_label(tmp_path: Path, folder: Path) -> None:
    model = Sees()
    datamodule = ImageFolderDataModule(folder, folder, test=folder, **options(num_workers=2))
    trainer = epoch_trainer(tmp_path, num_sanity_val_steps=0)
    trainer.fit(model, datamodule)
    trainer.test(model, datamodule, verbose=False)
    assert sorted(numbers(model.seen["train"])) == list(range(IMAGES)) != numbers(model.seen["train"])
    assert numbers([batch for _, batch in model.seen["val"]]) == list(range(IMAGES)) == numbers(model.seen["test"])
    for batches in (model.seen["train"], model.seen["test"]):
        assert [number // 7 for number in numbers(batches)] == labels(batches)


def test_it_gives_what_an_lmdb_of_the_folder_gives(tmp_path: Path, folder: Path) -> None:
    build_lmdb(folder, tmp_path / "lmdb", progress=False)
    seen = []
    for kind, path in ((ImageFolderDataModule, folder), (LMDBDataModule, tmp_path / "lmdb")):
        model = Sees()
        epoch_trainer(tmp_path).fit(model, kind(path, seed=4, normalize=((0.5,) * 3, (0.2,) * 3), **options()))
        seen.append(model.seen["train"])
    for (images, targets), (others, other_targets) in zip(*seen, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(targets, other_targets)


def test_a_prediction_folder_needs_no_classes(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / "in" / "more").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20), (number * 10, 0, 0)).save(
            tmp_path / "in" / ("more" if number == 4 else "") / f"{number}.png"
        )
    model = Keeps()
    datamodule = ImageFolderDataModule(predict=tmp_path / "in", **options())
    tiny_trainer(tmp_path).predict(model, datamodule)
    assert numbers(model.predicted) == [0, 1, 2, 3, 4]
    assert all(isinstance(batch, torch.Tensor) for batch in model.predicted)
    shutil.rmtree(tmp_path / "in" / "more")
    with pytest.raises(ValueError, match=r"4 images, but no class subfolders"):
        tiny_trainer(tmp_path).fit(model, ImageFolderDataModule(tmp_path / "in", **options()))


def test_labelled_prediction_folders_keep_their_labels(tmp_path: Path, folder: Path) -> None:
    model = Keeps()
    tiny_trainer(tmp_path).predict(model, ImageFolderDataModule(predict=folder, **options()))
    assert [number // 7 for number in numbers(model.predicted)] == labels(model.predicted)


@pytest.mark.parametrize("workers", [0, 2])
def test_training_goes_on_with_the_next_image(tmp_path: Path, folder: Path, workers: int) -> None:
    def run(save: SaveAndEnd | None = None, resume: Path | None = None, batch_size: int = 4) -> list[Any]:
        model = Sees()
        trainer = epoch_trainer(tmp_path, max_epochs=3, callbacks=[] if save is None else [save])
        datamodule = ImageFolderDataModule(folder, seed=2, **options(num_workers=workers, batch_size=batch_size))
        with contextlib.suppress(Interrupted):
            trainer.fit(model, datamodule, ckpt_path=resume, **safely(resume))
        return model.seen["train"]

    whole = run()
    first = run(SaveAndEnd(tmp_path / "last.ckpt", "on_train_batch_end", 2))
    rest = run(resume=tmp_path / "last.ckpt", batch_size=3)
    assert numbers(first) + numbers(rest) == numbers(whole)
    crops = [image for batch in first + rest for image in batch[0]]
    assert all(torch.equal(a, b) for a, b in zip(crops, [i for batch in whole for i in batch[0]], strict=True))


def test_any_map_style_dataset_is_taken(tmp_path: Path, folder: Path) -> None:
    images = ImageFolder(folder, decode="tensor")
    nest = ConcatDataset([Subset(images, [20, 0]), ImageFolder(folder)])
    model = Sees()
    epoch_trainer(tmp_path).fit(model, ImageFolderDataModule(nest, shuffle=False, **options()))
    assert numbers(model.seen["train"]) == [20, 0, *range(IMAGES)]
    other = TensorDataset(torch.zeros(9, 1), torch.arange(9))
    model = Sees()
    epoch_trainer(tmp_path).fit(model, ImageFolderDataModule(other, batch_size=4, num_workers=0))
    assert sorted(labels(model.seen["train"])) == list(range(9))


def test_what_an_lmdb_would_bring_is_said_once(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        epoch_trainer(tmp_path, max_epochs=2).fit(Sees(), ImageFolderDataModule(folder, folder, **options()))
    lines = [record.getMessage() for record in caplog.records if "lmdb build" in record.getMessage()]
    assert len(lines) == 1
    assert f"{folder} is read file by file, " in lines[0]


@pytest.mark.parametrize(
    ("small_s", "words"), [(0.5e-3, ", and with --image-size 9 (smaller images) up to 2.40x"), (1e-3, "")]
)
def test_smaller_images_are_proposed_where_they_are_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, small_s: float, words: str
) -> None:
    plain = {field.name: 0 for field in dataclasses.fields(ImageCosts)}
    costs = ImageCosts(**{**plain, "images": 16, "read_s": 0.2e-3, "fast_decode_s": 1e-3, "small_decode_s": small_s})
    monkeypatch.setattr(image_folder_module, "measure_images", lambda *arguments: costs)
    datamodule = ImageFolderDataModule(folder, **options())
    datamodule.trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with caplog.at_level(logging.INFO):
        datamodule.setup("fit")
    line = next(record.getMessage() for record in caplog.records if "lmdb build" in record.getMessage())
    assert line == (
        f"ImageFolderDataModule: {folder} is read file by file, 0.20 ms an image, and decoded in 1.00 ms (medians of "
        f"16). An LMDB, which opens no files, would give up to 1.20x the samples per second and worker{words}: "
        f"lightning-gpuopt lmdb build {folder} DST"
    )


def test_targets_and_balanced_weights_read_no_image(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "train")
    for extra in range(21, 60):
        (path / "bee" / f"{extra}.png").write_bytes(b"not read")
    dataset = ImageFolder(path)
    assert dataset.targets == [0] * 7 + [1] * 46 + [2] * 7
    assert dataset.class_to_idx == {"ant": 0, "bee": 1, "cat": 2}
    datamodule = ImageFolderDataModule(path, weights="balanced", batch_size=60, num_workers=0)
    datamodule.setup("fit")
    sampler = datamodule.train_dataloader().sampler
    drawn = []
    for epoch in range(50):
        sampler.set_epoch(epoch)
        drawn += [dataset.targets[index] for index in sampler]
    share = np.bincount(drawn) / len(drawn)
    assert np.abs(share - 1 / 3).max() < 0.03


# --- when things go wrong ----------------------------------------------------------------------------------------


def test_an_empty_class_folder_keeps_its_label(tmp_path: Path, folder: Path) -> None:
    (folder / "ape").mkdir()
    with pytest.warns(UserWarning, match=r"no image in 1 of 4 class subfolders \(ape\)"):
        dataset = ImageFolder(folder)
    assert dataset.classes == ["ant", "ape", "bee", "cat"]
    assert set(dataset.targets) == {0, 2, 3}


@pytest.mark.parametrize("make", ["missing", "file", "empty", "empty classes"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, make: str) -> None:
    path = tmp_path / "in"
    if make == "file":
        path.write_bytes(b"")
    elif make != "missing":
        (path / "class" if make == "empty classes" else path).mkdir(parents=True)
    with pytest.raises((ValueError, OSError), match=r"/in: (there is no|expected)"):
        tiny_trainer(tmp_path).fit(Sees(), ImageFolderDataModule(path, **options()))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["broken", "truncated", "empty"])
def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path, folder: Path, workers: int, damage: str) -> None:
    datamodule = ImageFolderDataModule(folder, shuffle=False, **options(num_workers=workers))
    datamodule.setup("fit")
    file = folder / "bee" / "nested" / "003.png"
    whole = file.read_bytes()
    file.write_bytes({"broken": b"no image", "truncated": whole[:-30], "empty": b""}[damage])
    with pytest.raises(CorruptSampleError, match=r"train/bee/nested/003\.png: it is not an image that can be decoded"):
        epoch_trainer(tmp_path).fit(Sees(), datamodule)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["gone", "a folder"])
@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_a_file_that_cannot_be_read_ends_training(
    tmp_path: Path, folder: Path, workers: int, damage: str, on_corrupt: Any
) -> None:
    datamodule = ImageFolderDataModule(folder, shuffle=False, on_corrupt=on_corrupt, **options(num_workers=workers))
    datamodule.setup("fit")
    file = folder / "bee" / "nested" / "003.png"
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    with pytest.raises((FileNotFoundError, IsADirectoryError), match=r"train/bee/nested/003\.png"):
        epoch_trainer(tmp_path).fit(Sees(), datamodule)


class OnStorage(Dataset[Any]):
    """Images of which one cannot be decoded and another cannot be read."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5 and self.error is not None:
            raise self.error
        data = b"no image" if index == 2 else encoded(photo(8, 8), "PNG")
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).copy(), index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*left out")
def test_an_image_that_a_dataset_cannot_decode_is_skipped(tmp_path: Path, workers: int) -> None:
    datamodule = LMDBDataModule(OnStorage(None), batch_size=4, num_workers=workers, shuffle=False, on_corrupt="skip")
    model = Sees()
    epoch_trainer(tmp_path).fit(model, datamodule)
    assert labels(model.seen["train"]) == [0, 1, 3, 4, 5, 6, 7]
    assert datamodule.num_skipped == 1


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [OSError("unable to read"), EOFError("x"), FileNotFoundError(2, "x")])
@pytest.mark.filterwarnings("ignore:.*left out")
def test_what_the_storage_of_a_dataset_says_ends_training(tmp_path: Path, workers: int, error: Exception) -> None:
    datamodule = LMDBDataModule(OnStorage(error), batch_size=4, num_workers=workers, shuffle=False, on_corrupt="skip")
    with pytest.raises(type(error)):
        epoch_trainer(tmp_path).fit(Sees(), datamodule)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [ImageFolderDataModule, LMDBDataModule])
def test_corrupt_samples_are_skipped_counted_and_listed(
    tmp_path: Path, folder: Path, workers: int, kind: type[ImageFolderDataModule | LMDBDataModule]
) -> None:
    path = folder
    if kind is LMDBDataModule:
        path = tmp_path / "lmdb"
        build_lmdb(folder, path, progress=False)
        file = path / "shard-00000.mdb"
        content = bytearray(file.read_bytes())
        for number in (3, 10):
            data = (folder / sorted(CLASSES)[number // 7] / "nested" / f"{number % 7:03d}.png").read_bytes()
            content[content.index(data) + 20] ^= 255
        file.write_bytes(content)
    else:
        (folder / "ant" / "nested" / "003.png").write_bytes(b"no image")
        (folder / "bee" / "nested" / "003.png").write_bytes(b"")
    datamodule = kind(path, on_corrupt="skip", **options(num_workers=workers, shuffle=False))
    model = Sees()
    with pytest.warns(UserWarning, match="2 samples cannot be read and were skipped"):
        epoch_trainer(tmp_path, max_epochs=2).fit(model, datamodule)
    left = [number for number in range(IMAGES) if number not in (3, 10)]
    assert numbers(model.seen["train"]) == left * 2
    assert [len(batch[1]) for batch in model.seen["train"][:6]] == [3, 4, 3, 4, 4, 1]
    assert datamodule.num_skipped == 2
    (listed,) = tmp_path.rglob("skipped-train.csv")
    text = listed.read_text()
    assert len(text.splitlines()) >= 2
    names = ("ant/nested/003.png", "bee/nested/003.png") if kind is ImageFolderDataModule else ("sample 3", "sample 10")
    assert all(name in text for name in names)


def test_a_batch_of_nothing_but_corrupt_samples_is_an_error(tmp_path: Path, folder: Path) -> None:
    for file in folder.rglob("[0-9]*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(CorruptSampleError, match="none of the 4 samples of a batch can be read"), pytest.warns():
        epoch_trainer(tmp_path).fit(Sees(), ImageFolderDataModule(folder, on_corrupt="skip", **options()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_raises_comes_through(tmp_path: Path, folder: Path, workers: int) -> None:
    def broken(image: Any) -> Any:
        raise KeyError("mine")

    datamodule = ImageFolderDataModule(
        folder, train_transform=broken, on_corrupt="skip", **options(num_workers=workers)
    )
    with pytest.raises(KeyError, match="mine"):
        epoch_trainer(tmp_path).fit(Sees(), datamodule)


@pytest.mark.matrix
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_of_every_kind_read_it(folder: Path, context: str) -> None:
    datamodule = ImageFolderDataModule(folder, on_corrupt="skip", shuffle=False, **options(num_workers=1))
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    loader.multiprocessing_context = context
    assert numbers(list(loader)) == list(range(IMAGES))


def test_arguments_that_do_not_go_together_are_refused(folder: Path) -> None:
    with pytest.raises(MisconfigurationException, match="decode='tensor'"):
        ImageFolderDataModule(folder, crop_size=8)
    with pytest.raises(MisconfigurationException, match="target_transform is for paths"):
        ImageFolderDataModule(TensorDataset(torch.zeros(3)), target_transform=str)
    for name, value in {"scale": (0.5, 0.1), "ratio": (0, 1), "interpolation": "cubic", "memory_format": "nhwc",
                        "on_corrupt": "ignore", "collate_fn": 3, "flip": 1}.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: expected"):
            ImageFolderDataModule(folder, **{name: value})


def test_it_is_configured_from_yaml(tmp_path: Path, folder: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"data:\n  train: {folder}\n  decode: tensor\n  crop_size: 8\n  scale: [0.5, 1.0]\n  weights: balanced\n"
        "  memory_format: contiguous\n  on_corrupt: skip\n"
    )
    cli = LightningCLI(
        Sees, ImageFolderDataModule, run=False, save_config_callback=None, args=["--config", str(config)]
    )
    cli.datamodule.setup("fit")
    images, _ = next(iter(cli.datamodule.train_dataloader()))
    assert images.is_contiguous()


# --- the list of a large folder ----------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, listed long after it was written, with a list that is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files_module, "CACHE_FROM", IMAGES)
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        os.utime(each, (1e9, 1e9))
    assert len(ImageFolder(folder)) == IMAGES
    return folder


def names(folder: Path) -> list[str]:
    files = ImageFolder(folder).files
    return [files.name(index) for index in range(len(files))]


def test_a_large_folder_is_listed_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(kept)
    monkeypatch.setattr(files_module, "_walk", None)  # listing it again would fail
    assert names(kept) == before
    assert ImageFolder(kept).targets == [0] * 7 + [1] * 7 + [2] * 7


def test_a_folder_that_changed_is_listed_again(kept: Path) -> None:
    Image.new("RGB", (3, 3)).save(kept / "bee" / "nested" / "new.png")
    assert "bee/nested/new.png" in names(kept)
    shutil.rmtree(kept / "cat")
    assert ImageFolder(kept).classes == ["ant", "bee"]


def test_a_list_that_is_damaged_is_made_anew(tmp_path: Path, kept: Path) -> None:
    (file,) = (tmp_path / "cache").rglob("*.npz")
    before = names(kept)
    file.write_bytes(file.read_bytes()[:100])
    assert names(kept) == before


def test_a_folder_that_was_just_changed_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files_module, "CACHE_FROM", 1)
    names(write_folder(tmp_path / "new"))
    assert not list(tmp_path.rglob("*.npz"))


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_bytes(b"a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    monkeypatch.setattr(files_module, "CACHE_FROM", 1)
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        os.utime(each, (1e9, 1e9))
    assert len(names(folder)) == IMAGES


def test_several_evaluation_loaders_do_not_all_keep_their_workers(folder: Path) -> None:
    datamodule = ImageFolderDataModule(folder, [folder, folder], test=folder, batch_size=4, num_workers=1)
    datamodule.setup(None)
    assert [loader.persistent_workers for loader in datamodule.val_dataloader()] == [False, False]
    assert datamodule.test_dataloader().persistent_workers
    assert datamodule.train_dataloader().persistent_workers


def test_the_photographs_of_a_folder_are_rgb_whatever_their_mode(tmp_path: Path) -> None:
    for index, mode in enumerate(("L", "P", "RGBA", "CMYK")):
        (tmp_path / "in" / "a").mkdir(parents=True, exist_ok=True)
        photo(20, 10).convert(mode).save(tmp_path / "in" / "a" / f"{index}.{'jpg' if mode == 'CMYK' else 'png'}")
    assert {image.mode for image, _ in map(ImageFolder(tmp_path / "in").__getitem__, range(4))} == {"RGB"}


def test_a_stage_opens_what_it_reads_only(tmp_path: Path, folder: Path) -> None:
    datamodule = ImageFolderDataModule(folder, predict=tmp_path / "comes later", **options())
    epoch_trainer(tmp_path).fit(Sees(), datamodule)
    assert set(datamodule._datasets) == {"train", "val"}


def test_it_is_used_without_a_trainer(folder: Path) -> None:
    datamodule = ImageFolderDataModule(folder, folder, **options())
    datamodule.prepare_data()
    datamodule.setup("fit")
    assert len(datamodule.train_dataloader()) == 6


def test_a_folder_is_listed_once_a_process(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    walk = files_module._walk
    monkeypatch.setattr(files_module, "_walk", lambda top, count: listed.append(top) or walk(top, count))
    (folder / "ape").mkdir()
    with pytest.warns(UserWarning, match="no image in 1 of 4") as told:
        epoch_trainer(tmp_path).fit(Sees(), ImageFolderDataModule(folder, **options()))
    assert sorted(map(os.path.basename, listed)) == ["ant", "ape", "bee", "cat"]
    assert sum("no image in 1 of 4" in str(each.message) for each in told) == 1


def test_several_sets_of_a_stage_come_from_yaml(tmp_path: Path, folder: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"data:\n  train: {folder}\n  val: [{folder}, {folder}]\n  test: {folder}\n")
    cli = LightningCLI(
        Sees, ImageFolderDataModule, run=False, save_config_callback=None, args=["--config", str(config)]
    )
    cli.datamodule.setup(None)
    assert [len(cli.datamodule._datasets[name]) for name in ("train", "val", "test")] == [1, 2, 1]


def test_each_run_lists_its_own_skipped_samples(tmp_path: Path, folder: Path) -> None:
    (folder / "ant" / "nested" / "003.png").write_bytes(b"no image")
    datamodule = ImageFolderDataModule(folder, on_corrupt="skip", **options())
    for name in ("first", "second"):
        with pytest.warns(UserWarning, match="1 samples cannot be read"):
            epoch_trainer(tmp_path / name).fit(Sees(), datamodule)
        (listed,) = (tmp_path / name).rglob("skipped-train.csv")
        assert "BytesIO" not in listed.read_text()
        assert listed.read_text().count("003.png") == 1


def test_an_error_of_a_transform_is_no_corrupt_sample(tmp_path: Path, folder: Path) -> None:
    def font(image: Any) -> Any:
        raise OSError("cannot open resource")

    datamodule = ImageFolderDataModule(folder, on_corrupt="skip", train_transform=font, **options())
    with pytest.raises(OSError, match="cannot open resource"):
        epoch_trainer(tmp_path).fit(Sees(), datamodule)


def test_weights_that_are_no_file_name_the_choices(folder: Path) -> None:
    datamodule = ImageFolderDataModule(folder, weights="Balanced", **options())
    datamodule.setup("fit")
    with pytest.raises(ValueError, match=r"weights: expected numbers, the path of a \.npy file, or 'balanced'"):
        datamodule.train_dataloader()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_scale_ratio_and_interpolation_reach_the_crops(folder: Path, interpolation: Any) -> None:
    datamodule = ImageFolderDataModule(
        folder, shuffle=False, scale=(1.0, 1.0), ratio=(1.5, 2.5), flip=False, interpolation=interpolation, **options()
    )
    datamodule.setup("fit")
    crops = datamodule.train_dataloader().dataset.crops
    assert (crops.scale, crops.ratio, crops.interpolation, crops.flip) == ((1.0, 1.0), (1.5, 2.5), interpolation, False)
    images, _ = next(iter(datamodule.train_dataloader()))
    assert images.shape == (4, 3, 8, 8)
