"""What a build does with images: made smaller, kept exact, decoded in full, or left out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import LMDBInfo
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.source_files import image_file, stored, write_folder, write_tar


def build(source: Any, path: Path, **options: Any) -> LMDBInfo:
    return build_lmdb(source, path, progress=False, **options)


def sizes(path: Path) -> list[tuple[str | None, tuple[int, int]]]:
    opened = [Image.open(io.BytesIO(data)) for data in stored(path)]
    return [(image.format, image.size) for image in opened]


def test_larger_images_are_brought_down(tmp_path: Path) -> None:
    kinds = [("JPEG", (100, 51)), ("PNG", (57, 100)), ("JPEG", (400, 1000)), ("PNG", (300, 20)), ("JPEG", (25, 25))]
    images = [EncodedImage(image_file(i, kind, size)) for i, (kind, size) in enumerate(kinds)]
    build(images, tmp_path / "out", image_size=25)
    small = [("JPEG", (49, 25)), ("JPEG", (25, 43)), ("JPEG", (25, 62)), ("PNG", (300, 20)), ("JPEG", (25, 25))]
    assert sizes(tmp_path / "out") == small
    assert stored(tmp_path / "out")[3:] == images[3:]


def test_a_smaller_image_is_upright_and_looks_the_same(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(0, 255, 64)[None, :, None], (32, 1, 3)).astype(np.uint8)  # dark left, bright right
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise: dark at the top
    out = io.BytesIO()
    Image.fromarray(ramp).save(out, "JPEG", exif=exif, quality=95)
    build([EncodedImage(out.getvalue())], tmp_path / "out", image_size=16, image_quality=95)
    image = Image.open(io.BytesIO(stored(tmp_path / "out")[0]))
    assert (image.size, image.getexif().get(0x0112, 1)) == ((16, 32), 1)
    means = np.asarray(image).mean(axis=(1, 2))
    assert np.abs(means - np.linspace(0, 255, 32)).max() < 6
    assert np.all(np.diff(means) > 0)


def test_the_quality_is_that_of_what_is_made_smaller(tmp_path: Path) -> None:
    images = [EncodedImage(image_file(0, size=(200, 200)))]
    sizes = []
    for quality in (20, 90):
        build(images, tmp_path / "out", image_size=100, image_quality=quality, overwrite=True)
        sizes.append(len(stored(tmp_path / "out")[0]))
    assert sizes[0] * 2 < sizes[1]


def test_a_broken_image_is_left_out_where_images_are_made_smaller(tmp_path: Path) -> None:
    images = [EncodedImage(image_file(0, size=(64, 64))[:-500]), EncodedImage(image_file(1, size=(64, 64)))]
    with pytest.warns(UserWarning, match="1 of 2 samples are skipped"):
        build(images, tmp_path / "out", image_size=32)


def test_pil_images_and_images_in_dicts_are_made_smaller_too(tmp_path: Path) -> None:
    samples = [{"a": [Image.new("RGBA", (64, 32), "red")], "b": 1}]
    build(samples, tmp_path / "out", image_size=16)
    sample = LMDBDataset(tmp_path / "out")[0]
    assert (sample["a"][0].size, sample["b"]) == ((32, 16), 1)


# --- exact images ------------------------------------------------------------------------------------------------


def exact_images() -> list[Image.Image]:
    """A PIL image of each mode whose values count, 8 pixels wide and 6 high."""
    ramp = np.arange(48).reshape(6, 8)
    palette = Image.fromarray((ramp % 5).astype(np.uint8), "P")
    palette.putpalette([channel for index in range(5) for channel in (index * 50, 255 - index, index)])
    return [
        Image.fromarray((ramp * 5).astype(np.uint8)),
        Image.fromarray(ramp % 3 == 0),
        palette,
        Image.fromarray((ramp * 1000).astype(np.uint16)),
        Image.fromarray((ramp * -100_000).astype(np.int32)),
        Image.fromarray((ramp / 7).astype(np.float32)),
        Image.fromarray(np.stack([ramp] * 4, 2).astype(np.uint8), "RGBA"),
    ]


MODES = ["L", "1", "P", "I;16", "I", "F", "RGBA"]


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_images_that_are_no_photographs_keep_mode_and_values(tmp_path: Path) -> None:
    images = exact_images()
    assert [image.mode for image in images] == MODES
    build(images, tmp_path / "out")
    build(tmp_path / "out", tmp_path / "again")
    for path in ("out", "again"):
        found = list(LMDBDataset(tmp_path / path))
        assert [image.mode for image in found] == MODES
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(found, images, strict=True))


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_exact_images_are_made_smaller_by_nearest_neighbour_with_the_photograph_s_geometry(tmp_path: Path) -> None:
    images = exact_images()
    photograph = Image.new("RGB", (8, 6), "red")
    build([*images, photograph], tmp_path / "out", image_size=3)
    build(tmp_path / "out", tmp_path / "again", image_size=3)
    for path in ("out", "again"):
        found = list(LMDBDataset(tmp_path / path))
        assert [image.mode for image in found] == [*MODES, "RGB"]
        assert {image.size for image in found} == {(4, 3)}
        for small, image in zip(found, images, strict=False):
            assert np.array_equal(np.asarray(small), np.asarray(image)[1::2, 1::2])
    palettes = [found[2].convert("RGB"), images[2].convert("RGB").resize((4, 3), Image.Resampling.NEAREST)]
    assert palettes[0].tobytes() == palettes[1].tobytes()


def test_an_exact_image_that_is_small_already_stays_byte_for_byte(tmp_path: Path) -> None:
    mask = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8)).save(mask, "PNG", compress_level=9)
    build([EncodedImage(mask.getvalue(), "L")], tmp_path / "out", image_size=6)
    assert stored(tmp_path / "out") == [mask.getvalue()]
    assert LMDBDataset(tmp_path / "out")[0].mode == "L"


# --- checks ------------------------------------------------------------------------------------------------------


def test_decode_finds_what_the_header_does_not_tell(tmp_path: Path) -> None:
    bad_head = image_file(1)
    broken = bad_head[:20] + bytes([0xFF, 0xD9])
    images = [EncodedImage(image_file(0)), EncodedImage(broken_scan(image_file(2))), EncodedImage(broken)]
    with pytest.warns(UserWarning, match="1 of 3 samples are skipped"):
        assert build(images, tmp_path / "header").num_skipped == 1
    with pytest.warns(UserWarning, match=r"2 of 3 samples are skipped.*list\[1\]: "):
        assert build(images, tmp_path / "decode", check="decode").num_skipped == 2
    with pytest.raises(StorageError, match=r"list\[1\]: cannot be decoded"):
        build(images, tmp_path / "strict", check="decode", strict=True)
    with pytest.raises(ValueError, match="check: expected one of 'header', 'decode', got 'all'"):
        build(images, tmp_path / "wrong", check="all")


def broken_scan(data: bytes) -> bytes:
    """A JPEG with a good header and a good end, and a quantization table missing in between."""
    at = data.index(b"\xff\xdb")
    length = int.from_bytes(data[at + 2 : at + 4], "big")
    return data[:at] + data[at + 2 + length :]


class Failing:
    """A Dataset of images that fail in the many ways that PIL has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise Image.DecompressionBombError("Image size (1000000000 pixels) exceeds limit")
        return Image.open(self._folder / f"{index}").convert("RGB")


@pytest.fixture
def failing(tmp_path: Path) -> Failing:
    """Number 4 is a good image, 3 too large."""
    good = image_file(0, size=(200, 200))
    png = image_file(0, "PNG", (300, 300))
    second = png.index(b"IDAT", png.index(b"IDAT") + 4)
    for index, data in enumerate([b"no image", good[:-2000], png[:second] + b"\0\0\0\0" + png[second + 4 :]]):
        (tmp_path / f"{index}").write_bytes(data)
    (tmp_path / "4").write_bytes(good)
    return Failing(tmp_path)


def test_images_that_a_dataset_cannot_decode_are_left_out(tmp_path: Path, failing: Failing) -> None:
    with pytest.warns(UserWarning, match=r"4 of 5 samples are skipped.*Failing\[0\]: cannot identify image file"):
        info = build(failing, tmp_path / "out")
    assert (info.num_samples, info.num_skipped) == (1, 4)
    rows = (tmp_path / "out/skipped.csv").read_text().splitlines()
    reasons = ["cannot identify", "image file is truncated", "broken PNG file", "exceeds limit"]
    assert all(reason in row for reason, row in zip(reasons, rows[1:], strict=True))
    with pytest.raises(StorageError, match=r"Failing\[0\]: cannot be decoded"):
        build(failing, tmp_path / "strict", strict=True)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        PermissionError(13, "denied"),
        FileNotFoundError(2, "No such file or directory"),
        OSError("Can't synchronously read data"),
        SyntaxError("mine"),
        ValueError("y"),
    ],
)
def test_other_errors_of_a_dataset_end_the_build(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Failing, index: int) -> Any:
        raise error

    monkeypatch.setattr(Failing, "__getitem__", fail)
    with pytest.raises(RuntimeError, match=f"raised {type(error).__name__}.*resume=True"):
        build(Failing(tmp_path), tmp_path / "out")


class OnStorage:
    """A Dataset on a storage that fails for 30 of 100 samples until it is repaired."""

    repaired = False

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index >= 70 and not OnStorage.repaired:
            if self._folder is None:
                raise OSError("Can't synchronously read data (file read failed)")  # h5py's: no errno
            return Image.open(self._folder / "gone.png").convert("RGB"), index
        return Image.new("RGB", (4, 4), (index, 0, 0)), index


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("files", [False, True])
def test_storage_that_fails_stops_the_build_which_can_go_on(
    tmp_path: Path, num_proc: int, files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = OnStorage(tmp_path if files else None)
    with pytest.raises(RuntimeError, match=r"OnStorage\[70\] raised (OSError|FileNotFoundError).*resume=True"):
        build(dataset, tmp_path / "out", num_proc=num_proc)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(OnStorage, "repaired", True)
    info = build(dataset, tmp_path / "out", num_proc=num_proc, resume=True)
    assert (info.num_samples, info.num_skipped) == (100, 0)


def test_files_of_a_folder_that_are_gone_stop_the_build(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "in", {"a": 2, "b": 1})
    gone = tmp_path / "in/b/00000.jpg"
    gone.rename(tmp_path / "elsewhere")
    gone.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"resume=True: '.*b/00000\.jpg'"):
        build(tmp_path / "in", tmp_path / "out")
    gone.unlink()
    (tmp_path / "elsewhere").rename(gone)
    assert build(tmp_path / "in", tmp_path / "out", resume=True).num_samples == len(files) == 3


class Connection(io.BytesIO):
    """A file that can be read until it breaks."""

    broken = False

    def read(self, size: int | None = -1) -> bytes:
        if self.broken:
            raise OSError("connection broken")
        return super().read(size)


def test_an_image_whose_file_cannot_be_read_is_no_bad_image(tmp_path: Path) -> None:
    connection = Connection(image_file(0))
    image = Image.open(connection)
    connection.broken = True
    with pytest.raises(
        RuntimeError, match=r"list\[0\]: its image cannot be read \(OSError: connection broken\).*resume"
    ):
        build([(image, 0)], tmp_path / "out")


def test_broken_images_in_a_tar_are_left_out(tmp_path: Path) -> None:
    good = image_file(0, size=(200, 200))
    write_tar(tmp_path / "x.tar", {"0.jpg": good, "0.cls": b"1", "1.jpg": good[:-2000], "1.cls": b"2", "2.png": b""})
    with pytest.warns(UserWarning, match=r"2 of 3 samples are skipped.*x\.tar: 1: jpg: image file is truncated"):
        build(tmp_path / "x.tar", tmp_path / "out")
    assert stored(tmp_path / "out") == [{"__key__": "0", "jpg": good, "cls": 1}]
    with pytest.raises(StorageError, match=r"x\.tar: 1: cannot be decoded \(jpg: image file is truncated"):
        build(tmp_path / "x.tar", tmp_path / "strict", strict=True)
