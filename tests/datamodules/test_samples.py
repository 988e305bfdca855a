"""What people train on every day, through a real Trainer: masks, depth, boxes, text, vectors."""

import collections
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_gpuopt.datamodules import resumable
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.loading.engine.iterator import EngineIterator
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.helpers import tiny_trainer
from tests.images.pictures import photo

SIZE = 12


def labelled_regions(width: int = 60, height: int = 40) -> np.ndarray[Any, Any]:
    """A mask of 24 regions, each with a value of its own, far from those of its neighbours."""
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 6 // width
    return ((rows[:, None] * 6 + columns) * 37 % 256).astype(np.uint8)


def palette(values: np.ndarray[Any, Any]) -> Image.Image:
    image = Image.fromarray(values).convert("L").point(range(256))
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette([value for index in range(256) for value in (index, 255 - index, 7)])
    return image


def depth(values: np.ndarray[Any, Any]) -> Image.Image:
    return Image.fromarray(values.astype(np.uint16) * 257)


KINDS: dict[str, Callable[[np.ndarray[Any, Any]], Image.Image]] = {
    "L": Image.fromarray,
    "P": palette,
    "1": lambda values: Image.fromarray(values > 99),
    "I;16": depth,
    "I": lambda values: Image.fromarray(values.astype(np.int32) * -100_000),
    "F": lambda values: Image.fromarray(values.astype(np.float32) / 7),
    "LA": lambda values: Image.merge("LA", [Image.fromarray(values), Image.fromarray(255 - values)]),
    "RGBA": lambda values: Image.merge("RGBA", [Image.fromarray(values + i) for i in range(4)]),
    "CMYK": lambda values: Image.merge("CMYK", [Image.fromarray(values + i) for i in range(4)]),
    "YCbCr": lambda values: Image.merge("YCbCr", [Image.fromarray(values + i) for i in range(3)]),
    "HSV": lambda values: Image.merge("HSV", [Image.fromarray(values + i) for i in range(3)]),
}


def bands(image: Image.Image) -> np.ndarray[Any, Any]:
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def write(path: Path, *samples: Any) -> Path:
    with LMDBWriter(path) as writer:
        for sample in samples:
            writer.write(sample)
    return path


class Keeps(LightningModule):
    """Keeps every batch of a stage, and has a weight in the Trainer's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(3, 1, 1)
        self.batches: list[Any] = []
        self.predicted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        return self.layer.weight.sum()

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.predicted.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(tmp_path: Path, data: Path, model: Keeps | None = None, **options: Any) -> Any:
    """The only batch of an epoch, as the step sees it."""
    trainer_options = {name: options.pop(name) for name in ("precision",) if name in options}
    model = model or Keeps()
    datamodule = LMDBDataModule(data, **{"batch_size": 4, "num_workers": 0, "shuffle": False, **options})
    tiny_trainer(tmp_path, max_steps=1, **trainer_options).fit(model, datamodule)
    return model.batches[0]


@pytest.mark.parametrize("mode", KINDS)
def test_an_image_in_another_mode_than_rgb_comes_back_as_it_was_written(tmp_path: Path, mode: str) -> None:
    image = KINDS[mode](labelled_regions())
    assert image.mode == mode
    path = write(tmp_path / "data", (photo(60, 40), image))
    _, back = LMDBDataset(path)[0]
    assert (back.mode, back.size) == (mode, image.size)
    assert np.array_equal(np.asarray(back), np.asarray(image))
    assert back.getpalette() == image.getpalette()
    tensor = LMDBDataset(path, decode="tensor")[0][1]
    assert tensor.is_contiguous()
    assert np.array_equal(tensor.numpy(), bands(image))
    assert tensor.numpy().dtype == bands(image).dtype


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("stage", ["train", "predict"])
def test_masks_are_cropped_by_nearest_neighbour_with_their_image(tmp_path: Path, mode: str, stage: str) -> None:
    regions = labelled_regions()
    twin = Image.fromarray(np.stack([regions] * 3, 2))  # an image whose crops show where they come from
    path = write(tmp_path / "data", (twin, KINDS[mode](regions)))
    datamodule = LMDBDataModule(
        path,
        predict=path,
        batch_size=1,
        num_workers=0,
        decode="tensor",
        crop_size=SIZE,
        scale=(0.3, 0.6),
        interpolation="nearest",
    )
    mirrored = set()
    for epoch in range(8 if stage == "train" else 1):
        datamodule.setup(None)
        loader = datamodule.train_dataloader() if stage == "train" else datamodule.predict_dataloader()
        loader.sampler.set_epoch(epoch)
        ((images, masks),) = loader
        assert images.shape == (1, 3, SIZE, SIZE)
        # The image is cropped by nearest neighbour here too, so it tells which value the mask has to have.
        expected = bands(KINDS[mode](images[0, 0].numpy()))
        assert np.array_equal(masks[0].numpy(), expected)
        assert masks.dtype == torch.from_numpy(expected).dtype
        mirrored.add(bool(images[0, 0, 0, 0] > images[0, 0, 0, -1]))
    assert stage == "predict" or mirrored == {True, False}


def test_a_mask_of_half_the_resolution_gets_the_same_area(tmp_path: Path) -> None:
    columns = np.tile(np.arange(120, dtype=np.uint8) * 2, (80, 1))
    image = Image.fromarray(np.stack([columns] * 3, 2))
    path = write(tmp_path / "data", {"image": image, "mask": Image.fromarray(columns[::2, ::2])})
    datamodule = LMDBDataModule(path, batch_size=1, num_workers=0, decode="tensor", crop_size=SIZE, scale=(0.2, 0.9))
    for epoch in range(10):
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
        loader.sampler.set_epoch(epoch)
        (batch,) = loader
        difference = batch["image"][0, 0].int() - batch["mask"][0, 0].int()
        assert difference.abs().max() <= 12  # three columns of the image: half a pixel of the crop, and rounding


def test_only_photographs_are_normalised(tmp_path: Path) -> None:
    regions = labelled_regions()
    sample = {
        "image": photo(60, 40),
        "mask": Image.fromarray(regions),
        "other": KINDS["YCbCr"](regions),
        "array": np.full((3, 2, 2), 51, np.uint8),
    }
    data = write(tmp_path / "data", sample, sample)
    batch = fit(tmp_path, data, decode="tensor", normalize=((0.2, 0.2, 0.2), (0.5, 0.5, 0.5)))
    assert {name: part.dtype for name, part in batch.items()} == {
        "image": torch.float32, "mask": torch.uint8, "other": torch.uint8, "array": torch.uint8,
    }  # fmt: skip
    assert batch["array"].unique().tolist() == [51]
    grey = fit(tmp_path, data, decode="tensor", normalize=((0.2,), (0.5,)))
    assert grey["mask"].dtype == torch.uint8


ARRAY = np.full((3, 40, 60), 51, np.uint8)
HALF: Any = ((0.5,) * 3, (0.25,) * 3)


def dtypes(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: dtypes(value) for key, value in batch.items()}
    return [dtypes(value) for value in batch] if isinstance(batch, (list, tuple)) else batch.dtype


FLOAT, UINT8 = torch.float32, torch.uint8


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ((photo(60, 40), ARRAY), [FLOAT, UINT8]),
        ((np.int64(4), ARRAY, photo(60, 40)), [torch.int64, UINT8, FLOAT]),
        ((photo(60, 40), torch.from_numpy(ARRAY)), [FLOAT, UINT8]),
        ((photo(60, 40), photo(60, 40)), [FLOAT, FLOAT]),
        (
            {"views": [photo(60, 40), photo(60, 40)], "more": {"array": ARRAY}},
            {"views": [FLOAT] * 2, "more": {"array": UINT8}},
        ),
        (photo(60, 40), FLOAT),
    ],
)
def test_every_photograph_is_normalised_and_no_array(tmp_path: Path, sample: Any, expected: Any, workers: int) -> None:
    data = write(tmp_path / "data", *[sample] * 4)
    assert dtypes(fit(tmp_path, data, decode="tensor", normalize=HALF, num_workers=workers)) == expected


ROWS = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
TENSOR = torch.from_numpy(ARRAY)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ((ARRAY, 1), [FLOAT, torch.int64]),
        ((ROWS, ARRAY), [FLOAT, UINT8]),
        ((TENSOR, ROWS), [FLOAT, UINT8]),
        (ARRAY, FLOAT),
        ((ARRAY, photo(60, 40)), [FLOAT, FLOAT]),
        ({"y": ROWS, "x": ROWS}, {"y": UINT8, "x": FLOAT}),
        ({"img": ARRAY, "mask": ARRAY}, {"img": FLOAT, "mask": UINT8}),
        ({"in": {"Image": TENSOR, "depth": TENSOR}}, {"in": {"Image": FLOAT, "depth": UINT8}}),
        ({"pixel_values": ROWS, "target": [ROWS]}, {"pixel_values": FLOAT, "target": [UINT8]}),
        ({"seg": {"image": ROWS}, "image": ROWS}, {"seg": {"image": UINT8}, "image": FLOAT}),
        (({"image": ARRAY, "other": ARRAY}, ARRAY), [{"image": FLOAT, "other": UINT8}, UINT8]),
    ],
)
@pytest.mark.parametrize("read", ["path", "own dataset"])
def test_an_array_in_the_place_of_the_image_is_normalised(
    tmp_path: Path, sample: Any, expected: Any, read: str
) -> None:
    data: Any = write(tmp_path / "data", *[sample] * 4)
    batch = fit(tmp_path, Subset(LMDBDataset(data, decode="tensor"), range(4)) if read != "path" else data,
                decode="tensor", normalize=HALF)  # fmt: skip
    assert dtypes(batch) == expected


@pytest.mark.parametrize("array", [ROWS, ROWS.transpose(2, 0, 1), torch.from_numpy(ROWS)])
def test_a_normalised_array_keeps_its_shape(tmp_path: Path, array: Any) -> None:
    data = write(tmp_path / "data", *[(array, array[:2])] * 4)
    images, others = fit(tmp_path, data, normalize=((0.5, 0.25, 0.125), (0.25, 0.5, 1.0)))
    values, channel = torch.tensor(np.asarray(array)).double() / 255, -1 if array.shape[-1] == 3 else 0
    shape = [3 if at == channel % 3 else 1 for at in range(3)]
    mean, std = (torch.tensor(each).view(shape) for each in ((0.5, 0.25, 0.125), (0.25, 0.5, 1.0)))
    torch.testing.assert_close(images, ((values - mean) / std).float().expand(4, -1, -1, -1))
    assert (images.shape[1:], others.dtype) == (array.shape, UINT8)


@pytest.mark.parametrize("sample", [(ARRAY.astype(np.int16), 1), {"array": ARRAY}, (ARRAY[:2], ARRAY)])
def test_other_arrays_are_as_they_were_written(tmp_path: Path, sample: Any) -> None:
    data = write(tmp_path / "data", *[sample] * 4)
    with pytest.warns(UserWarning, match="of stored arrays and tensors it applies to the first part, or to one"):
        batch = fit(tmp_path, data, normalize=HALF)
    first = batch["array"] if isinstance(batch, dict) else batch[0]
    assert (first.is_floating_point(), first.unique().tolist()) == (False, [51])


def flipped(sample: Any) -> Any:
    return sample[0], sample[0].flip(-1)


class Twice(Subset[Any]):
    """A Subset that makes two views of the first part."""

    def __getitem__(self, index: Any) -> Any:
        return flipped(super().__getitem__(index))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Views(LMDBDataset):
    """A subclass that does."""

    def __getitem__(self, index: int) -> Any:
        return flipped(super().__getitem__(index))


@pytest.mark.parametrize("how", ["train_transform", "transform", "subset", "subclass"])
def test_photographs_in_the_place_of_an_array_are_normalised(tmp_path: Path, how: str) -> None:
    data: Any = write(tmp_path / "data", *[(photo(60, 40), ARRAY)] * 4)
    options: dict[str, Any] = {}
    if how == "train_transform":
        options = {"train_transform": flipped}
    elif how == "transform":
        data = LMDBDataset(data, flipped, decode="tensor")
    elif how == "subset":
        data = Twice(LMDBDataset(data, decode="tensor"), range(4))
    else:
        data = Views(data, decode="tensor")
    assert dtypes(fit(tmp_path, data, decode="tensor", normalize=HALF, **options)) == [FLOAT, FLOAT]


def test_subsets_and_what_is_put_together_keep_arrays(tmp_path: Path) -> None:
    datasets = [
        LMDBDataset(write(tmp_path / name, *[(photo(60, 40), ARRAY)] * 2), decode="tensor") for name in ("a", "b")
    ]
    both = Subset(ConcatDataset(datasets), [3, 0, 1])
    assert dtypes(fit(tmp_path, both, normalize=HALF)) == [FLOAT, UINT8]  # type: ignore[arg-type]


def test_a_target_transform_makes_no_photograph(tmp_path: Path) -> None:
    data = write(tmp_path / "data", *[(photo(60, 40), ARRAY)] * 2)
    batch = fit(tmp_path, data, decode="tensor", normalize=HALF, target_transform=lambda array: array + 1)
    assert dtypes(batch) == [FLOAT, UINT8]
    assert batch[1].unique().tolist() == [52]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-true", torch.bfloat16), ("16-true", torch.float16), ("64-true", torch.float64), ("32-true", torch.float32)],
)
def test_normalisation_is_in_the_trainers_precision(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    class Steps(Keeps):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            super().training_step(batch, batch_idx)
            return self.layer(batch[0]).sum()

    data = write(tmp_path / "data", *[(photo(60, 40), index) for index in range(4)])
    images, _ = fit(tmp_path, data, Steps(), precision=precision, decode="tensor", normalize=((0.5,) * 3, (0.25,) * 3))
    assert images.dtype == dtype
    expected = (torch.from_numpy(np.asarray(photo(60, 40))).permute(2, 0, 1).double() / 255 - 0.5) / 0.25
    torch.testing.assert_close(images[0], expected.to(dtype))


@pytest.mark.filterwarnings("error:.*overridden.*on_after_batch_transfer.*")
def test_the_modules_hook_comes_after_normalisation(tmp_path: Path) -> None:
    class Own(Keeps):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            images, labels = batch
            assert images.dtype == torch.float32
            return images + 100, labels

    data = write(tmp_path / "data", (photo(60, 40), 1))
    images, _ = fit(tmp_path, data, Own(), decode="tensor", normalize=((0.5,) * 3, (0.25,) * 3))
    assert images.min() > 90


def test_nothing_to_normalise_is_said_once(tmp_path: Path) -> None:
    data = write(tmp_path / "data", *[(np.zeros((3, 4, 4), np.float32), index) for index in range(4)])
    with pytest.warns(UserWarning, match="nothing to normalise") as told:
        fit(tmp_path, data, normalize=((0.5,) * 3, (0.25,) * 3), batch_size=1)
    texts = [str(each.message) for each in told if "nothing to normalise" in str(each.message)]
    assert len(texts) == 1
    assert "expected uint8 images [B, 3, H, W], got [float32 [1, 3, 4, 4], int64 [1]]" in texts[0]


def boxes(count: int) -> dict[str, Any]:
    return {"boxes": torch.arange(count * 4.0).view(count, 4), "labels": list(range(count)), "name": f"{count} boxes"}


def as_lists(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def test_detection_has_joint_transforms_and_a_collate_fn(tmp_path: Path) -> None:
    seen = []

    def joint(sample: Any) -> Any:
        image, target = sample
        seen.append(target["name"])
        return image.flip(-1), {**target, "boxes": target["boxes"] + 1}

    data = write(tmp_path / "data", *[(photo(60 + count, 40), boxes(count)) for count in (1, 0, 3)])
    images, targets = fit(
        tmp_path, data, decode="tensor", train_transform=joint, collate_fn=as_lists, normalize=((0.5,) * 3, (1.0,) * 3)
    )
    assert seen == ["1 boxes", "0 boxes", "3 boxes"]
    assert [image.shape for image in images] == [(3, 40, 61), (3, 40, 60), (3, 40, 63)]
    assert all(image.dtype == torch.float32 for image in images)
    assert [target["boxes"].tolist() for target in targets] == [(boxes(n)["boxes"] + 1).tolist() for n in (1, 0, 3)]


def test_text_of_any_length_is_collated_by_the_user(tmp_path: Path) -> None:
    data = write(tmp_path / "data", *[{"tokens": np.arange(n), "text": "x" * n} for n in (3, 1, 2)])

    def pad(samples: list[Any]) -> dict[str, Any]:
        tokens = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(each["tokens"]) for each in samples], True)
        return {"tokens": tokens, "text": [each["text"] for each in samples]}

    batch = fit(tmp_path, data, collate_fn=pad)
    assert batch["tokens"].tolist() == [[0, 1, 2], [0, 0, 0], [0, 1, 0]]
    assert batch["text"] == ["xxx", "x", "xx"]


@pytest.mark.parametrize("decode", ["pil", "tensor", "raw"])
def test_a_transform_sees_the_whole_of_richer_samples(tmp_path: Path, decode: Any) -> None:
    mask = Image.fromarray(labelled_regions())
    rich = [(photo(8, 8), mask), [photo(8, 8), {"a": 1}], (photo(8, 8), np.zeros((2, 2))), {"image": photo(8, 8)}]
    rich += [(photo(8, 8), 1, 2), (photo(8, 8), [1])]
    plain = [(photo(8, 8), label) for label in (1, 1.5, "cat", None, np.int64(3), np.zeros(4), True)]
    for index, (samples, whole) in enumerate(((rich, True), (plain, False))):
        for number, sample in enumerate(samples):
            path = write(tmp_path / f"{index}-{number}", sample)
            got: list[Any] = []
            LMDBDataset(path, transform=got.append, decode=decode)[0]
            assert (type(got[0]) is type(sample)) is whole, (sample, got)


def test_target_transforms_get_the_second_part(tmp_path: Path) -> None:
    data = write(tmp_path / "data", *[(photo(8, 8), index) for index in range(3)])
    _, labels = fit(tmp_path, data, decode="tensor", target_transform=lambda label: label * 10)
    assert labels.tolist() == [0, 10, 20]


def test_frames_are_written_one_by_one(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (10, 20, 30)]
    for kind in ("TIFF", "GIF"):
        stack = tmp_path / f"stack.{kind}"
        frames[0].save(stack, kind, save_all=True, append_images=frames[1:])
        with Image.open(stack) as image, LMDBWriter(tmp_path / kind) as writer:
            for frame in (2, 0, 1):
                image.seek(frame)
                writer.write(image)
        dataset = LMDBDataset(tmp_path / kind)
        assert [np.asarray(dataset[index].convert("L"))[0, 0] for index in range(3)] == [30, 10, 20]


def test_what_one_stage_has_exact_another_normalises(tmp_path: Path) -> None:
    """Training on photographs, predicting on bare masks."""
    photos = write(tmp_path / "photos", *[(photo(60, 40), index) for index in range(4)])
    masks = write(tmp_path / "masks", *[Image.fromarray(np.stack([labelled_regions()] * 3, 2), "HSV")] * 2)
    model = Keeps()
    datamodule = LMDBDataModule(
        photos, predict=masks, batch_size=2, num_workers=0, decode="tensor", normalize=((0.5,) * 3, (0.2,) * 3)
    )
    trainer = tiny_trainer(tmp_path, max_steps=1)
    trainer.fit(model, datamodule)
    trainer.predict(model, datamodule)
    assert model.batches[0][0].dtype == torch.float32
    assert model.predicted[0].dtype == torch.uint8


def test_a_transform_that_makes_rgb_of_grey_images_is_normalised(tmp_path: Path) -> None:
    data = write(tmp_path / "data", *[(Image.fromarray(labelled_regions()), index) for index in range(2)])
    images, _ = fit(
        tmp_path,
        data,
        decode="tensor",
        train_transform=lambda image: image.expand(3, -1, -1),
        normalize=((0.5,) * 3, (0.2,) * 3),
    )
    assert images.dtype == torch.float32


def test_a_batch_that_is_a_mapping_of_its_own_type_keeps_it(tmp_path: Path) -> None:
    class Batch(collections.UserDict):  # type: ignore[type-arg]
        """A type of the user's own."""

    def collate(samples: list[Any]) -> Batch:
        return Batch(image=torch.stack([image for image, _ in samples]))

    data = write(tmp_path / "data", *[(photo(60, 40), index) for index in range(2)])
    batch = fit(tmp_path, data, decode="tensor", collate_fn=collate, normalize=((0.5,) * 3, (0.2,) * 3))
    assert (type(batch), batch["image"].dtype) == (Batch, torch.float32)


@pytest.mark.parametrize("mode", ["I;16L", "I;16B"])
def test_16_bit_images_of_any_byte_order_keep_their_values(tmp_path: Path, mode: str) -> None:
    values = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    image = Image.frombytes(mode, (4, 3), values.astype(">u2" if mode == "I;16B" else "<u2").tobytes())
    path = write(tmp_path / "data", (1, image))
    assert np.array_equal(LMDBDataset(path, decode="tensor")[0][1][0].numpy(), values)


class HoldsFile(Dataset[Any]):
    """Reads numbers at the position of a file that it has open."""

    def __init__(self, path: Path) -> None:
        np.arange(200, dtype=np.int64).tofile(path)
        self.file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        self.file.seek(8 * index)
        return int.from_bytes(self.file.read(8), "little"), index


def test_a_file_that_processes_would_share_is_read_in_the_training_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "usable_cpus", lambda: 2.0)
    datamodule = LMDBDataModule(HoldsFile(tmp_path / "numbers"), batch_size=8)
    with pytest.warns(UserWarning, match="num_workers='auto' is 0 here, not [0-9]+: its dataset holds .*cannot share"):
        loader = datamodule.train_dataloader()
    assert loader.num_workers == 0
    assert all(torch.equal(values, indices) for values, indices in loader)
    assert LMDBDataModule(HoldsFile(tmp_path / "others"), num_workers=2).train_dataloader().num_workers == 2


class HoldsGenerator(Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return self.generator.random(), index


@pytest.mark.parametrize(("num_workers", "ours"), [("auto", False), (2, False), (1, True), (0, False)])
def test_what_a_generator_of_the_datasets_draws_is_the_same_in_every_run(
    num_workers: Any, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "usable_cpus", lambda: 2.0)
    runs = []
    for _ in range(3):
        loader = LMDBDataModule(HoldsGenerator(), batch_size=8, num_workers=num_workers).train_dataloader()
        iterator = iter(loader)
        assert (type(iterator) is EngineIterator) == ours
        runs.append([(values.tolist(), indices.tolist()) for values, indices in iterator])
    assert runs[0] == runs[1] == runs[2]


def test_no_process_is_left_while_an_exception_is_held(tmp_path: Path) -> None:
    """A notebook holds the last one, with all that its traceback has."""

    class Fails(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return 1 // (20 - index), super().__getitem__(index)

    before = multiprocessing.active_children()
    datamodule = LMDBDataModule(Fails(torch.ones(50, 2)), batch_size=2, num_workers=2)
    with pytest.raises(ZeroDivisionError) as held:
        tiny_trainer(tmp_path, max_steps=-1).fit(Keeps(), datamodule)
    assert multiprocessing.active_children() == before
    assert held.value.__traceback__ is not None
