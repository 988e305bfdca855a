"""Images that cannot be decoded: named, or left out and listed, and never the end of a run that leaves them out."""

from __future__ import annotations

import csv
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gpuopt import DALIDataModule, LMDBWriter
from lightning_gpuopt.dali import library
from lightning_gpuopt.dali.pipelines import PipelineSettings, undecodable
from lightning_gpuopt.images.errors import CorruptSampleError
from tests.dali.runs import SIZE, Notes, small
from tests.helpers import tiny_trainer
from tests.images.pictures import encoded, photo
from tests.ranks import run_ranks

WHOLE = encoded(photo())


def unknown_table(data: bytes) -> bytes:
    """A JPEG whose scan names a Huffman table that it does not have: it looks whole until it is decoded."""
    at = data.index(b"\xff\xda") + 6  # marker, length, number of components, the first one's id (T.81, B.2.3)
    return data[:at] + b"\x33" + data[at + 1 :]


DAMAGED = {
    "empty": b"",
    "no image": b"hello world, this is no image",
    "broken off": WHOLE[: len(WHOLE) // 2],
    "header only": WHOLE[:200],
    "no such table": unknown_table(WHOLE),
}
FOUND_BEFORE = {"empty", "no image", "broken off", "header only"}
"""Those that are found when the folder is opened."""


def folder_with(root: Path, damage: dict[int, bytes], count: int = 12) -> Path:
    """JPEGs by number in one class; some are damaged."""
    for number in range(count):
        path = root / "c" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damage.get(number, WHOLE))
    return root


def list_with(root: Path, damage: dict[int, bytes], count: int = 12) -> Path:
    """The same as a list, in which the label is the number."""
    folder_with(root, damage, count)
    path = root / "list.txt"
    path.write_text("".join(f"c/{number:02d}.jpg {number}\n" for number in range(count)))
    return path


def labels_of(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def listed(path: Path = Path("gpuopt/skipped.csv")) -> dict[str, str]:
    with path.open(newline="") as stream:
        return {Path(name).name: reason for name, reason in csv.reader(stream)}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("stage", ["train", "val"])
def test_the_error_names_the_file(tmp_path: Path, what: str, stage: str) -> None:
    data = folder_with(tmp_path / "f", {7: DAMAGED[what]})
    datamodule = DALIDataModule(data, data, **small(batch_size=4))
    loader = datamodule.train_dataloader() if stage == "train" else datamodule.val_dataloader()
    with pytest.raises(CorruptSampleError, match=r"f/c/07\.jpg: "):
        labels_of(loader)


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.filterwarnings("ignore:.*left out")
def test_it_is_left_out_counted_and_listed(tmp_path: Path, what: str) -> None:
    data = list_with(tmp_path / "f", {7: DAMAGED[what], 2: DAMAGED[what]})
    datamodule = DALIDataModule(data, data, **small(batch_size=4, on_corrupt="skip"))
    val, train = datamodule.val_dataloader(), datamodule.train_dataloader()
    expected = [number for number in range(12) if number not in (2, 7)]
    for loader in (val, train):
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            given = labels_of(loader)
            assert sorted(label for labels in given for label in labels) == expected
            assert len(given) == len(loader) == 3
    if what in FOUND_BEFORE:
        assert labels_of(val) == [[0, 1, 3, 4], [5, 6, 8, 9], [10, 11]]
    else:
        assert labels_of(val) == [[0, 1, 3], [4, 5, 6], [8, 9, 10, 11]]
    assert datamodule.num_skipped == 2
    assert listed().keys() == {"02.jpg", "07.jpg"}
    assert all(listed().values())


@pytest.mark.filterwarnings("ignore:.*left out")
def test_the_images_around_it_are_what_they_were(tmp_path: Path) -> None:
    """The pipeline is built anew at the batch with the bad image: nothing is lost, doubled or cropped otherwise."""
    whole = DALIDataModule(list_with(tmp_path / "whole", {}), **small(batch_size=4))
    bad = DALIDataModule(
        list_with(tmp_path / "bad", {5: unknown_table(WHOLE)}), **small(batch_size=4, on_corrupt="skip")
    )

    def by_label(datamodule: DALIDataModule) -> dict[int, torch.Tensor]:
        loader = datamodule.train_dataloader()
        return {int(label): image for images, labels in loader for image, label in zip(images, labels, strict=True)}

    expected, found = by_label(whole), by_label(bad)
    del expected[5]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[label], expected[label]) for label in expected)


@pytest.mark.filterwarnings("ignore:.*left out")
def test_through_a_trainer(tmp_path: Path) -> None:
    data = list_with(tmp_path / "f", {3: unknown_table(WHOLE), 8: b"no image"})
    datamodule = DALIDataModule(data, data, **small(batch_size=4, on_corrupt="skip"))
    model = Notes()
    options: dict[str, Any] = {"max_steps": -1, "max_epochs": 2, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
    with pytest.warns(UserWarning, match="2 samples cannot be read and were skipped"):
        tiny_trainer(tmp_path / "run", **options).fit(model, datamodule)
    expected = [number for number in range(12) if number not in (3, 8)]
    for epoch in range(2):
        assert sorted(label for at, labels in model.steps if at == epoch for label in labels) == expected
    assert model.validations == [expected] * 2
    assert listed(tmp_path / "run/gpuopt/skipped.csv").keys() == {"03.jpg", "08.jpg"}


def test_a_batch_without_an_image_is_an_error(tmp_path: Path) -> None:
    data = folder_with(tmp_path / "f", {4: unknown_table(WHOLE), 5: unknown_table(WHOLE)})
    datamodule = DALIDataModule(val=data, **small(batch_size=2, on_corrupt="skip"))
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(CorruptSampleError, match="none of the 2 samples of a batch can be read"),
    ):
        labels_of(datamodule.val_dataloader())


def test_a_folder_of_bad_images_only(tmp_path: Path) -> None:
    data = folder_with(tmp_path / "f", dict.fromkeys(range(3), b"no image"), count=3)
    datamodule = DALIDataModule(val=data, **small(on_corrupt="skip"))
    with pytest.raises(
        MisconfigurationException, match=r"none of the 3 images can be decoded; .*00\.jpg: not an image"
    ):
        datamodule.val_dataloader()


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
def test_a_file_that_vanishes_is_named(tmp_path: Path, on_corrupt: str) -> None:
    data = folder_with(tmp_path / "f", {})
    datamodule = DALIDataModule(val=data, **small(batch_size=4, on_corrupt=on_corrupt))
    loader = datamodule.val_dataloader()
    batches = iter(loader)
    next(batches)
    (data / "c/11.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"11\.jpg"):
        labels_of(loader)


def test_damage_in_an_lmdb_is_named(tmp_path: Path) -> None:
    from lightning_gpuopt.storage.codec import EncodedImage

    with LMDBWriter(tmp_path / "lmdb") as writer:
        for number in range(6):
            writer.write((EncodedImage(unknown_table(WHOLE) if number == 4 else WHOLE), number))
    datamodule = DALIDataModule(val=tmp_path / "lmdb", **small(batch_size=2))
    with pytest.raises(CorruptSampleError, match="lmdb: sample 4: it is not an image that can be decoded"):
        labels_of(datamodule.val_dataloader())


def test_what_was_found_is_kept_and_a_mended_file_comes_back(tmp_path: Path) -> None:
    data = list_with(tmp_path / "f", {2: b"no image", 7: b"no image"})

    def given() -> list[int]:
        datamodule = DALIDataModule(val=data, **small(on_corrupt="skip"))
        return [label for labels in labels_of(datamodule.val_dataloader()) for label in labels]

    with pytest.warns(UserWarning, match="skipped"):
        assert given() == [number for number in range(12) if number not in (2, 7)]
    (data.parent / "c/02.jpg").write_bytes(WHOLE)
    with pytest.warns(UserWarning, match="skipped"):
        assert given() == [number for number in range(12) if number != 7]


@pytest.mark.matrix
def test_all_ranks_leave_out_the_same(tmp_path: Path) -> None:
    data = list_with(tmp_path / "f", {2: b"no image", 7: unknown_table(WHOLE)})
    what: dict[str, Any] = {"data": str(data), "work": str(tmp_path), "batch_size": 2, "devices": 2}
    what["module_kwargs"] = {"on_corrupt": "skip"}
    steps = [step for rank in run_ranks("tests.dali.runs:rank", 2, **what) for step in rank]
    for epoch in range(3):
        given = sorted(label for at, labels in steps if at == epoch for label in labels)
        assert given == [number for number in range(12) if number not in (2, 7)]


def test_the_last_image_of_the_epoch_and_of_an_own_pipeline(tmp_path: Path) -> None:
    from nvidia.dali import fn
    from nvidia.dali.pipeline import pipeline_def

    @pipeline_def
    def plain(encoded: Any, labels: Any) -> Any:
        return fn.resize(fn.decoders.image(encoded, device="cpu"), size=[SIZE, SIZE]), labels

    data = list_with(tmp_path / "f", {11: unknown_table(WHOLE)})
    datamodule = DALIDataModule(val=data, **small(batch_size=4, on_corrupt="skip", eval_pipeline=plain))
    with pytest.warns(UserWarning, match="skipped"):
        assert labels_of(datamodule.val_dataloader()) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_the_errors_of_a_trial_keep_no_pipeline() -> None:
    gc.collect()
    before = len(library._pipelines)
    broken = np.frombuffer(b"\xff\xd8\xff\xe0 and no JPEG", np.uint8)
    settings = PipelineSettings(4, 1, None, SIZE, (0.0,) * 3, (1.0,) * 3, "uint8", "CHW", 0.0)
    gc.disable()
    try:
        errors = undecodable(settings, [broken, broken])
        assert sorted(errors) == [0, 1]
        assert len(library._pipelines) == before
    finally:
        gc.enable()


def test_the_error_of_a_loader_keeps_no_pipeline_and_takes_no_traceback(tmp_path: Path) -> None:
    gc.collect()
    before = len(library._pipelines)
    datamodule = DALIDataModule(val=list_with(tmp_path / "f", {5: unknown_table(WHOLE)}), **small(batch_size=4))
    loader = datamodule.val_dataloader()
    gc.disable()
    try:
        try:
            raise LookupError("the user's own, which is being handled")
        except LookupError as error:
            with pytest.raises(CorruptSampleError) as found:
                labels_of(loader)
            handled = error
        assert handled.__traceback__ is not None
        assert "05.jpg" in str(found.value)
        loader.close()
        assert len(library._pipelines) == before
    finally:
        gc.enable()
