"""DALIDataModule on a real GPU: where its batches are, what is in them, which they are, and what they cost."""

from __future__ import annotations

import contextlib
import csv
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image

from lightning_gpuopt import CudaPrefetcher, DALIDataModule
from lightning_gpuopt.images.errors import CorruptSampleError
from tests.datamodules.training import Interrupted, SaveAndEnd
from tests.gpu.kernels import milliseconds
from tests.gpu.no_synchronize import NoSynchronize
from tests.helpers import safely, tiny_trainer
from tests.images.pictures import encoded, photo

pytest.importorskip("nvidia.dali")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SAMPLES = 53
BATCH = 8
SIZE = 64
"""Side of the crops in pixels."""
MIB = 2**20

SAME, NOTHING = 5e-3, 500.0
"""How far sums over a batch may be apart, and from 0 where it is normalised: decoding engines differ a little."""


# ---- data and runs ----


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of photographs, JPEG files of several sizes; the label of each is its number."""
    folder = tmp_path_factory.mktemp("photographs")
    for number in range(SAMPLES):
        (folder / f"{number}.jpg").write_bytes(encoded(photo(240 + number, 160 + 2 * number)))
    return listed(folder, [f"{number}.jpg" for number in range(SAMPLES)])


def listed(folder: Path, names: list[str]) -> Path:
    path = folder / "files.txt"
    path.write_text("".join(f"{name} {number}\n" for number, name in enumerate(names)))
    return path


def made(train: Any = None, val: Any = None, **options: Any) -> DALIDataModule:
    defaults = {"device": "gpu", "batch_size": BATCH, "crop_size": SIZE, "resize_size": 72, "seed": 5}
    return DALIDataModule(train, val, **{**defaults, **options})


def batches(stage: str, data: Path, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """An epoch's batches, on the CPU."""
    datamodule = made(**{stage: data}, **options)
    return [(images.cpu(), labels.cpu()) for images, labels in getattr(datamodule, f"{stage}_dataloader")()]


class Notes(LightningModule):
    """Notes what each step is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.steps: list[tuple[int, list[int]]] = []
        self.sums: list[float] = []
        self.validations: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        self.steps.append((self.current_epoch, labels.tolist()))
        self.sums.append(images.double().sum().item())
        return self.layer(images.mean((2, 3))).pow(2).mean()

    def on_validation_epoch_start(self) -> None:
        self.validations.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validations[-1] += batch[1].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def labels(self, epoch: int) -> list[int]:
        return [label for at, labels in self.steps if at == epoch for label in labels]


def fit(folder: Path, model: LightningModule, datamodule: Any, *callbacks: Callback, **options: Any) -> Trainer:
    resume = options.pop("resume", None)
    defaults = {"accelerator": "gpu", "max_steps": -1, "max_epochs": 2, "callbacks": list(callbacks)}
    trainer = tiny_trainer(folder, **{**defaults, **options})
    with contextlib.suppress(Interrupted):
        trainer.fit(model, datamodule, ckpt_path=resume, **safely(resume))
    return trainer


# ---- where batches are ----


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", torch.float32), ("float16", torch.float16), ("uint8", torch.uint8)]
)
@pytest.mark.parametrize("layout", ["CHW", "HWC"])
def test_batches_come_on_the_gpu(data: Path, dtype: Any, expected: torch.dtype, layout: Any) -> None:
    loader = made(data, dtype=dtype, layout=layout).train_dataloader()
    shape = (3, SIZE, SIZE) if layout == "CHW" else (SIZE, SIZE, 3)
    sizes = []
    for images, labels in loader:
        sizes.append(len(images))
        assert (images.device.type, images.dtype, images.shape[1:]) == ("cuda", expected, shape)
        assert (labels.device.type, labels.dtype, labels.shape) == ("cuda", torch.int64, (len(images),))
    assert len(sizes) == len(loader)
    assert sum(sizes) == SAMPLES


def test_auto_is_the_gpu_that_the_trainer_is_on(data: Path, tmp_path: Path) -> None:
    class Looks(Notes):
        def on_train_start(self) -> None:
            assert self.trainer.train_dataloader.on_gpu

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert batch[0].device == batch[1].device == self.device
            return super().training_step(batch, batch_idx)

    model = Looks()
    fit(tmp_path, model, made(data, device="auto"), max_epochs=1)
    assert sorted(model.labels(0)) == list(range(SAMPLES))


def test_auto_is_the_cpu_under_a_trainer_on_the_cpu(data: Path, tmp_path: Path) -> None:
    class Looks(Notes):
        def on_train_start(self) -> None:
            assert not self.trainer.train_dataloader.on_gpu

    fit(tmp_path, Looks(), made(data, device="auto"), max_epochs=1, accelerator="cpu")


def test_lightning_copies_nothing(data: Path, tmp_path: Path) -> None:
    pointers: list[tuple[int, int]] = []

    class Looks(Notes):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
            pointers.extend((before.data_ptr(), after.data_ptr()) for before, after in zip(batch, moved, strict=True))
            return moved

    fit(tmp_path, Looks(), made(data), max_epochs=1)
    assert len(pointers) == 2 * -(-SAMPLES // BATCH)
    assert all(before == after for before, after in pointers)


def test_cuda_prefetcher_leaves_its_batches_alone(data: Path, tmp_path: Path) -> None:
    plain, ahead, prefetcher = Notes(), Notes(), CudaPrefetcher()
    fit(tmp_path, plain, made(data))
    fit(tmp_path, ahead, made(data), prefetcher)
    assert ahead.steps == plain.steps
    assert ahead.sums == pytest.approx(plain.sums, rel=SAME, abs=NOTHING)
    assert prefetcher.stats["staged"] == 0
    assert prefetcher.stats["copied_bytes"] == 0


# ---- what is in them ----


def assert_close(first: torch.Tensor, second: torch.Tensor, mean: float = 2.0, most: float = 24.0) -> None:
    """uint8 images that two JPEG decoders may have decoded: they differ in rounding, and in how chroma is enlarged."""
    difference = (first.float() - second.float()).abs()
    assert difference.mean().item() <= mean
    assert difference.flatten().quantile(0.99).item() <= most


@pytest.mark.parametrize("hw_decoder_load", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("stage", ["train", "val"])
def test_images_are_those_of_the_cpu(data: Path, stage: str, hw_decoder_load: float) -> None:
    on_gpu = batches(stage, data, dtype="uint8", hw_decoder_load=hw_decoder_load)
    on_cpu = batches(stage, data, dtype="uint8", device="cpu")
    assert [labels.tolist() for _, labels in on_gpu] == [labels.tolist() for _, labels in on_cpu]
    for (images, _), (expected, _) in zip(on_gpu, on_cpu, strict=True):
        assert_close(images, expected)


def test_normalised_values_are_those_of_the_cpu(data: Path) -> None:
    on_gpu, on_cpu = batches("val", data), batches("val", data, device="cpu")
    for (images, _), (expected, _) in zip(on_gpu, on_cpu, strict=True):
        assert (images - expected).abs().mean().item() <= 2 / 255 / 0.225


def test_files_without_loss_are_the_same_but_for_rounding(tmp_path: Path) -> None:
    for number in range(4):
        photo(200 + number, 120).save(tmp_path / f"{number}.png")
    paths = listed(tmp_path, [f"{number}.png" for number in range(4)])
    (on_gpu, _), (on_cpu, _) = (batches("val", paths, dtype="uint8", device=device)[0] for device in ("gpu", "cpu"))
    assert (on_gpu.float() - on_cpu.float()).abs().max().item() <= 2


FORMATS: dict[str, Any] = {
    "rgb.jpg": lambda image: encoded(image),
    "progressive.jpg": lambda image: encoded(image, progressive=True),
    "gray.jpg": lambda image: encoded(image.convert("L")),
    "cmyk.jpg": lambda image: encoded(image.convert("CMYK")),
    "rgb.png": lambda image: encoded(image, "PNG"),
    "gray.png": lambda image: encoded(image.convert("L"), "PNG"),
    "alpha.png": lambda image: encoded(image.convert("RGBA"), "PNG"),
    "lossless.webp": lambda image: encoded(image, "WEBP", lossless=True),
    "lossy.webp": lambda image: encoded(image, "WEBP", quality=95),
    "rgb.bmp": lambda image: encoded(image, "BMP"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_rgb(tmp_path: Path, name: str) -> None:
    image = photo(SIZE, SIZE)
    (tmp_path / name).write_bytes(FORMATS[name](image))
    (tmp_path / "other.jpg").write_bytes(encoded(image))  # a batch of two formats
    paths = listed(tmp_path, [name, "other.jpg"])
    ((images, labels),) = batches("val", paths, dtype="uint8", layout="HWC", resize_size=SIZE)
    with Image.open(tmp_path / name) as opened:
        expected = torch.from_numpy(np.array(opened.convert("RGB")))
    assert labels.tolist() == [0, 1]
    # Images of CMYK go through other colour tables in every library.
    assert_close(images[0], expected, *((12.0, 64.0) if name == "cmyk.jpg" else ()))


# ---- which they are ----


def test_each_sample_comes_once_an_epoch_whatever_validation_does(data: Path, tmp_path: Path) -> None:
    model = Notes()
    fit(
        tmp_path,
        model,
        made(data, data),
        max_epochs=3,
        num_sanity_val_steps=2,
        limit_val_batches=3,
        val_check_interval=2,
    )
    assert all(sorted(model.labels(epoch)) == list(range(SAMPLES)) for epoch in range(3))
    assert model.labels(0) != model.labels(1)
    sanity, *runs = model.validations
    assert sanity == list(range(2 * BATCH))
    assert len(runs) >= 3 * 3
    assert all(run == list(range(3 * BATCH)) for run in runs)


def test_training_and_validation_take_turns_within_an_epoch(data: Path) -> None:
    datamodule = made(data, data, dtype="uint8")
    alone_train, alone_val = batches("train", data, dtype="uint8"), batches("val", data, dtype="uint8")
    both = zip(datamodule.train_dataloader(), datamodule.val_dataloader(), strict=True)
    taken = [tuple(part.cpu() for batch in pair for part in batch) for pair in both]
    assert len(taken) == len(alone_train) == len(alone_val)
    for (train, train_labels, val, val_labels), one, other in zip(taken, alone_train, alone_val, strict=True):
        assert torch.equal(train_labels, one[1])
        assert torch.equal(val_labels, other[1])
        assert_close(train, one[0], 0.5, 2.0)
        assert_close(val, other[0], 0.5, 2.0)


def test_a_resume_in_the_middle_of_an_epoch_goes_on_with_the_same_batches(data: Path, tmp_path: Path) -> None:
    whole, first, second = Notes(), Notes(), Notes()
    fit(tmp_path, whole, made(data))
    checkpoint = tmp_path / "middle.ckpt"
    fit(tmp_path, first, made(data), SaveAndEnd(checkpoint, "on_train_batch_end", 3))
    fit(tmp_path, second, made(data), resume=checkpoint)
    done = len(first.steps)
    assert 0 < done < len(whole.steps)
    assert first.steps == whole.steps[:done]
    assert second.steps == whole.steps[done:]
    assert second.sums == pytest.approx(whole.sums[done:], rel=SAME, abs=NOTHING)


def test_epochs_that_end_early_begin_anew(data: Path) -> None:
    loader = made(data).train_dataloader()
    for count in (1, 2, 3):
        found = []
        for number, (_, labels) in enumerate(loader):
            found += labels.tolist()
            if number + 1 == count:
                break
        assert len(set(found)) == count * BATCH
    assert sorted(label for _, labels in loader for label in labels.tolist()) == list(range(SAMPLES))


# ---- files that cannot be decoded ----


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Twenty images; the fifth is text, the tenth a JPEG file without its pixels."""
    for number in range(20):
        (tmp_path / f"{number}.jpg").write_bytes(encoded(photo(100 + number, 80)))
    (tmp_path / "5.jpg").write_bytes(b"this is no image")
    (tmp_path / "10.jpg").write_bytes((tmp_path / "10.jpg").read_bytes()[:300])
    return listed(tmp_path, [f"{number}.jpg" for number in range(20)])


def test_a_corrupt_file_is_named(broken: Path) -> None:
    with pytest.raises(CorruptSampleError, match=r"5\.jpg: it is not an image that can be decoded"):
        batches("val", broken, batch_size=4)


def test_corrupt_files_are_left_out_and_listed(broken: Path, tmp_path: Path) -> None:
    model, datamodule = Notes(), made(broken, batch_size=4, on_corrupt="skip")
    with pytest.warns(UserWarning, match="2 samples"):
        fit(tmp_path, model, datamodule)
    expected = [number for number in range(20) if number not in (5, 10)]
    assert sorted(model.labels(0)) == sorted(model.labels(1)) == expected
    assert datamodule.num_skipped == 2
    with (tmp_path / "gpuopt" / "skipped.csv").open() as stream:
        rows = list(csv.reader(stream))
    assert {Path(name).name for row in rows for name in row if name.endswith(".jpg")} == {"5.jpg", "10.jpg"}


# ---- memory ----


def test_batches_that_users_keep_stay_as_they_were(data: Path) -> None:
    loader = made(data).train_dataloader()
    kept = []
    for images, labels in loader:
        kept.append((images, images.clone(), labels, labels.clone()))
    for _ in loader:
        pass
    torch.cuda.synchronize()
    assert len({images.data_ptr() for images, *_ in kept}) == len(kept)
    for images, images_then, labels, labels_then in kept:
        assert torch.equal(images, images_then)
        assert torch.equal(labels, labels_then)


def test_batches_outlive_their_pipeline(data: Path) -> None:
    datamodule = made(data)
    images, labels = next(iter(datamodule.train_dataloader()))
    then = images.clone()
    datamodule.teardown("fit")
    del datamodule
    gc.collect()
    torch.cuda.synchronize()
    assert torch.equal(images, then)
    assert len(labels) == BATCH


def used() -> int:
    """Bytes of the GPU in use: DALI's memory is not torch's."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_does_not_grow_from_epoch_to_epoch(data: Path) -> None:
    loader = made(data).train_dataloader()
    device, allocated = [], []
    for _ in range(20):
        for batch in loader:
            batch[0].mean().item()
        del batch
        gc.collect()
        device.append(used())
        allocated.append(torch.cuda.memory_allocated())
    assert device[-1] <= device[9] + 16 * MIB
    assert allocated[-1] <= allocated[1]


def test_the_memory_goes_back_when_training_ends(data: Path, tmp_path: Path) -> None:
    after = []
    for _ in range(5):
        fit(tmp_path, Notes(), made(data, data), limit_val_batches=1)
        gc.collect()
        torch.cuda.empty_cache()
        after.append(used())
    assert after[-1] <= after[1] + 16 * MIB


# ---- streams ----


def in_turn(loader: Any, streams: list[torch.cuda.Stream]) -> Iterator[float]:
    """Sums of the batches, each read on another stream than the one before, behind work that holds it up."""
    weights = torch.randn(1024, 1024, device="cuda")
    iterator = iter(loader)
    for number in range(len(loader)):
        with torch.cuda.stream(streams[number % len(streams)]):
            for _ in range(50):
                weights @ weights
            images, _ = next(iterator)
            yield images.double().sum().item()


def test_batches_are_ready_on_the_stream_that_asks(data: Path) -> None:
    loader = made(data, dtype="uint8").train_dataloader()
    expected = [images.double().sum().item() for images, _ in made(data, dtype="uint8").train_dataloader()]
    assert list(in_turn(loader, [torch.cuda.Stream() for _ in range(3)])) == pytest.approx(expected, rel=SAME)


def test_a_batch_that_is_dropped_stays_until_the_gpu_has_read_it(data: Path) -> None:
    expected = [
        images.double().sum().item() for images, _ in made(data, dtype="uint8", batch_size=2).train_dataloader()
    ]
    kernel, sums = milliseconds(), []
    for images, _ in made(data, dtype="uint8", batch_size=2).train_dataloader():
        kernel(50.0)  # the host is several batches ahead of the GPU when that reads this one
        sums.append(images.double().sum())
        del images
    assert [each.item() for each in sums] == pytest.approx(expected, rel=SAME)


def test_a_step_synchronizes_nothing(data: Path, tmp_path: Path) -> None:
    class Plain(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0].mean((2, 3))).pow(2).mean()

    trainer = fit(tmp_path, Plain(), made(data, batch_size=2), NoSynchronize(), max_epochs=1)
    assert trainer.global_step == -(-SAMPLES // 2)
