"""What comes out of the pipelines, against PIL and torchvision's arithmetic."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps, PngImagePlugin

from lightning_gpuopt import DALIDataModule, ImageFolderDataModule, LMDBDataModule, build_lmdb
from lightning_gpuopt.images.normalize import IMAGENET_MEAN, IMAGENET_STD
from tests.fork_server import run_code
from tests.images.pictures import encoded, photo, with_orientation

SIZES = [(500, 375), (375, 500), (300, 900), (90, 100), (257, 256), (1200, 801), (224, 224)]
BATCH = 3
AVIF = "AVIF" if ".avif" in Image.registered_extensions() else "GIF"
"""Pillow before 11.3 writes no AVIF."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs of many sizes in two classes."""
    root = tmp_path_factory.mktemp("values") / "folder"
    for number, size in enumerate(SIZES):
        path = root / ("ant", "bee")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(*size)))
    return root


def in_order(root: Path) -> list[Path]:
    return sorted(root.rglob("*.*"))


def reference(path: Path, crop: int = 224, resize: int = 256) -> torch.Tensor:
    """torchvision's Resize, CenterCrop, ToTensor and Normalize, in PIL and numpy: float32 ``[3, crop, crop]``."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    width, height = image.size
    longer = int(resize * max(width, height) / min(width, height))
    size = (resize, longer) if width <= height else (longer, resize)
    resized = image.resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - crop) / 2.0), round((size[1] - crop) / 2.0)
    pixels = np.asarray(resized.crop((left, top, left + crop, top + crop)), np.float32) / 255
    return torch.from_numpy((pixels - np.float32(IMAGENET_MEAN)) / np.float32(IMAGENET_STD)).permute(2, 0, 1)


def batches(loader: Any) -> tuple[torch.Tensor, list[int]]:
    given = [(images.clone(), labels.tolist()) for images, labels in loader]
    return torch.cat([images for images, _ in given]), [label for _, labels in given for label in labels]


def evaluated(source: Any, **options: Any) -> tuple[torch.Tensor, list[int]]:
    datamodule = DALIDataModule(val=source, **{"batch_size": BATCH, "device": "cpu", **options})
    found = batches(datamodule.val_dataloader())
    datamodule.teardown("fit")
    return found


def test_evaluation_is_torchvision_s(folder: Path) -> None:
    images, labels = evaluated(folder)
    expected = torch.stack([reference(path) for path in in_order(folder)])
    assert images.dtype == torch.float32
    assert images.shape == expected.shape
    assert (images - expected).abs().mean((1, 2, 3)).max() < 0.01
    assert labels == [0] * 4 + [1] * 3


def test_an_lmdb_gives_what_its_folder_gives(tmp_path: Path, folder: Path) -> None:
    build_lmdb(folder, tmp_path / "lmdb", progress=False)
    images, labels = evaluated(folder)
    again, same = evaluated(tmp_path / "lmdb")
    assert torch.equal(images, again)
    assert labels == same


@pytest.mark.parametrize("kind", ["folder", "lmdb"])
def test_training_crops_what_the_other_datamodules_crop(tmp_path: Path, folder: Path, kind: str) -> None:
    """Same ids, areas and mirrored images for a seed; values differ by how they are resized and decoded smaller."""
    if kind == "lmdb":
        build_lmdb(folder, tmp_path / "lmdb", progress=False)
    source, peer = (folder, ImageFolderDataModule) if kind == "folder" else (tmp_path / "lmdb", LMDBDataModule)
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 11, "crop_size": 64}
    ours = DALIDataModule(source, device="cpu", **options)
    theirs = peer(source, decode="tensor", num_workers=0, normalize=(IMAGENET_MEAN, IMAGENET_STD), **options)
    for datamodule in (ours, theirs):
        datamodule.setup("fit")
    loader, other = ours.train_dataloader(), theirs.train_dataloader()
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        other.sampler.set_epoch(epoch)
        images, labels = batches(loader)
        expected = [theirs.on_after_batch_transfer(batch, 0) for batch in other]
        assert labels == [int(label) for _, labels in expected for label in labels]
        assert (images - torch.cat([each for each, _ in expected])).abs().mean(
            (1, 2, 3)
        ).max() < 0.2  # another area: about 1


def test_epochs_are_cropped_anew(folder: Path) -> None:
    datamodule = DALIDataModule(folder, batch_size=BATCH, shuffle=False, device="cpu", crop_size=32)
    loader = datamodule.train_dataloader()
    first, second = batches(loader)[0], batches(loader)[0]
    assert not torch.equal(first, second)
    for epoch, expected in ((0, first), (1, second)):
        loader.sampler.set_epoch(epoch)
        assert torch.equal(batches(loader)[0], expected)


@pytest.mark.parametrize(("layout", "shape"), [("CHW", (3, 32, 32)), ("HWC", (32, 32, 3))])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_dtype_and_layout(folder: Path, dtype: str, layout: str, shape: tuple[int, ...]) -> None:
    options: dict[str, Any] = {"crop_size": 32, "resize_size": 32}
    images, _ = evaluated(folder, dtype=dtype, layout=layout, **options)
    assert images.shape == (len(SIZES), *shape)
    assert images.dtype == getattr(torch, dtype)
    channels = images.double() if layout == "CHW" else images.double().permute(0, 3, 1, 2)
    expected, _ = evaluated(folder, **options)
    if dtype == "uint8":
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD))
        channels = (channels / 255 - mean) / std
    assert torch.allclose(channels, expected.double(), atol=1e-2 if dtype == "float16" else 1e-4)


def test_mean_and_std_are_on_the_scale_of_0_to_1(folder: Path) -> None:
    images, _ = evaluated(folder, mean=[0, 0, 0], std=[1, 1, 1])
    raw, _ = evaluated(folder, dtype="uint8")
    assert torch.allclose(images, raw / 255, atol=1e-6)


def _turned_by_xmp(kind: str) -> bytes:
    """An image whose orientation is in its XMP metadata alone, which not every decoder reads."""
    text = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    if kind == "WEBP":
        return encoded(photo(), kind, xmp=text.encode())
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", text)
    return encoded(photo(), kind, pnginfo=info)


MODES = {
    "gray.jpg": lambda: encoded(photo().convert("L")),
    "cmyk.jpg": lambda: encoded(photo().convert("CMYK")),
    "progressive.jpg": lambda: encoded(photo(), progressive=True),
    "turned.jpg": lambda: with_orientation(photo(), 6),
    "mirrored.jpg": lambda: with_orientation(photo(), 5),
    "colour.png": lambda: encoded(photo(), "PNG"),
    "alpha.png": lambda: encoded(photo().convert("RGBA"), "PNG"),
    "palette.png": lambda: encoded(photo().convert("P"), "PNG"),
    "gray.png": lambda: encoded(photo().convert("LA"), "PNG"),
    "bits.png": lambda: encoded(photo().convert("1"), "PNG"),
    "lossy.webp": lambda: encoded(photo(), "WEBP"),
    "lossless.webp": lambda: encoded(photo(), "WEBP", lossless=True),
    "plain.tiff": lambda: encoded(photo(), "TIFF"),
    "turned.tiff": lambda: with_orientation(photo(), 6, kind="TIFF"),
    "turned.png": lambda: with_orientation(photo(), 8, kind="PNG"),
    "turned.webp": lambda: with_orientation(photo(), 5, kind="WEBP"),
    "turned by xmp.png": lambda: _turned_by_xmp("PNG"),
    "turned by xmp.webp": lambda: _turned_by_xmp("WEBP"),
    "avif.jpg": lambda: encoded(photo(), AVIF),
    "plain.bmp": lambda: encoded(photo(), "BMP"),
    "gif.jpg": lambda: encoded(photo(), "GIF"),
}
"""Image files by name; those that are called .jpg and are not are ones that DALI does not read."""


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("stage", ["train", "val"])
def test_every_kind_of_image_becomes_rgb(tmp_path: Path, name: str, stage: str) -> None:
    for other in ("a.jpg", "z.jpg"):
        (tmp_path / "f/c").mkdir(parents=True, exist_ok=True)
        (tmp_path / "f/c" / other).write_bytes(encoded(photo()))
    (tmp_path / "f/c" / f"m_{name}").write_bytes(MODES[name]())
    if stage == "val":
        images, _ = evaluated(tmp_path / "f", crop_size=100, resize_size=110)
        expected = torch.stack([reference(path, 100, 110) for path in in_order(tmp_path / "f")])
        assert (images - expected).abs().mean((1, 2, 3)).max() < 0.02
        return
    options: dict[str, Any] = {"crop_size": 100, "batch_size": 3, "shuffle": False}
    ours = DALIDataModule(tmp_path / "f", device="cpu", dtype="uint8", **options)
    theirs = ImageFolderDataModule(tmp_path / "f", decode="tensor", num_workers=0, **options)
    for datamodule in (ours, theirs):
        datamodule.setup("fit")
    images, _ = next(iter(ours.train_dataloader()))
    expected, _ = next(iter(theirs.train_dataloader()))
    assert (images.float() - expected.float()).abs().mean((1, 2, 3)).max() < 6  # of 255


@pytest.mark.matrix
def test_files_that_dali_does_not_know_among_many(tmp_path: Path) -> None:
    """In a process of its own: DALI may crash at one of them."""
    kinds = [encoded(photo(300, 200)), encoded(photo(300, 200), "GIF"), encoded(photo(300, 200), AVIF)]
    lines = []
    for number in range(120):
        (tmp_path / f"{number}.jpg").write_bytes(kinds[0 if number % 40 else 1 + number // 40 % 2])
        lines.append(f"{number}.jpg {number}\n")
    (tmp_path / "list.txt").write_text("".join(lines))
    program = (
        "import sys; from lightning_gpuopt import DALIDataModule\n"
        "module = DALIDataModule(val=sys.argv[1], batch_size=32, device='cpu', num_threads=4, crop_size=64)\n"
        "print([label for _, labels in module.val_dataloader() for label in labels.tolist()] == list(range(120)))"
    )
    ended = run_code(program, tmp_path / "list.txt")
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_a_batch_keeps_its_values_while_others_are_made(folder: Path) -> None:
    datamodule = DALIDataModule(val=folder, batch_size=1, device="cpu")
    kept = [images for images, _ in datamodule.val_dataloader()]
    assert torch.equal(torch.cat(kept), evaluated(folder)[0])


@pytest.fixture
def torchvision() -> Any:
    """DALI's operators in torchvision's style, which want a newer torchdata than the oldest one."""
    try:
        return importlib.import_module("nvidia.dali.experimental.torchvision")
    except ImportError as error:
        pytest.skip(f"DALI cannot import them: {error}")


class TestOwnPipelines:
    def test_a_pipeline_def(self, folder: Path) -> None:
        from nvidia.dali import fn
        from nvidia.dali.pipeline import pipeline_def

        @pipeline_def(enable_conditionals=True)
        def doubled(encoded: Any, labels: Any) -> Any:
            images = fn.resize(fn.decoders.image(encoded, device="cpu"), size=[8, 8])
            if labels == 1:
                labels = labels * 10
            return images, labels

        images, labels = evaluated(folder, eval_pipeline=doubled)
        assert images.shape == (len(SIZES), 8, 8, 3)
        assert labels == [0] * 4 + [10] * 3

    @pytest.mark.matrix
    @pytest.mark.parametrize("composed", [False, True])
    def test_torchvision_style_operators(self, folder: Path, torchvision: Any, composed: bool) -> None:
        operators = [torchvision.Resize(256), torchvision.CenterCrop(224)]
        given = torchvision.Compose(operators) if composed else operators
        images, labels = evaluated(folder, eval_pipeline=given)
        expected = torch.stack([reference(path) for path in in_order(folder)])
        assert (images - expected).abs().mean((1, 2, 3)).max() < 0.05
        assert labels == [0] * 4 + [1] * 3

    @pytest.mark.matrix
    def test_a_normalize_among_them_takes_the_place_of_ours(self, folder: Path, torchvision: Any) -> None:
        operators = [torchvision.Resize([16, 16]), torchvision.Normalize([0.0] * 3, [2.0] * 3)]
        plain, _ = evaluated(folder, eval_pipeline=operators[:1], dtype="uint8")
        halved, _ = evaluated(folder, eval_pipeline=operators)
        assert halved.shape == (len(SIZES), 3, 16, 16)
        assert torch.allclose(halved, plain / 2.0)
