"""An image object comes back as its caller saw it; the EXIF orientation is applied to files."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.images.pictures import encoded, photo, with_orientation
from tests.storage.source_files import stored, write_tar

ORIENTATION = 0x0112
MASK = Image.fromarray(np.arange(40 * 80, dtype=np.uint16).reshape(40, 80).astype(np.uint8))


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def by_xmp(orientation: int) -> bytes:
    """A JPEG file that has its orientation in XMP only."""
    packet = b"http://ns.adobe.com/xap/1.0/\0" + f'<x tiff:Orientation="{orientation}"/>'.encode()
    segment = b"\xff\xe1" + (len(packet) + 2).to_bytes(2, "big") + packet
    data = encoded(photo(80, 40))
    return data[:2] + segment + data[2:]


FILES = {
    **{f"JPEG {value}": with_orientation(photo(80, 40), value) for value in range(1, 9)},
    "PNG 6": with_orientation(photo(80, 40), 6, kind="PNG"),
    "PNG without": encoded(photo(80, 40), "PNG"),
    "WEBP 6": with_orientation(photo(80, 40), 6, kind="WEBP", lossless=True),
    "TIFF 6": with_orientation(photo(80, 40), 6, kind="TIFF"),
    "XMP 6": by_xmp(6),
}


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("kind", FILES)
def test_an_object_comes_back_as_its_caller_saw_it(tmp_path: Path, kind: str, loaded: bool) -> None:
    image = opened(FILES[kind])
    if loaded:
        image.load()
    with LMDBWriter(tmp_path / "data") as writer:
        writer.write((image, MASK))
    seen = np.asarray(image)  # the caller goes on with it
    pil, mask = LMDBDataset(tmp_path / "data")[0]
    assert np.array_equal(np.asarray(pil), seen)
    assert mask.size == (80, 40)
    tensor, _ = LMDBDataset(tmp_path / "data", decode="tensor")[0]
    assert np.abs(tensor.permute(1, 2, 0).numpy().astype(int) - seen).max() <= 3  # two decoders of JPEG


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind.startswith(("JPEG", "PNG without"))])
def test_the_file_stays_as_it_is_but_for_its_orientation(tmp_path: Path, kind: str) -> None:
    with LMDBWriter(tmp_path / "data") as writer:
        writer.write(opened(FILES[kind]))
    (data,) = stored(tmp_path / "data")
    assert len(data) == len(FILES[kind])
    assert sum(one != other for one, other in zip(data, FILES[kind], strict=True)) == (
        kind not in ("JPEG 1", "PNG without")
    )


def test_a_draft_comes_back_as_small_as_it_is(tmp_path: Path) -> None:
    image = opened(encoded(photo(80, 40)))
    image.draft("RGB", (40, 20))
    with LMDBWriter(tmp_path / "data") as writer:
        writer.write(image)
    assert np.array_equal(np.asarray(LMDBDataset(tmp_path / "data")[0]), np.asarray(image))
    assert image.size == (40, 20)


class Objects:
    """A Dataset that returns the images as it opens them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return opened(FILES["JPEG 6"]), index


@pytest.mark.parametrize("image_size", [None, 20])
def test_a_datasets_objects_are_as_it_returns_them_and_files_are_upright(tmp_path: Path, image_size: Any) -> None:
    options: dict[str, Any] = {"progress": False, "image_size": image_size}
    build_lmdb(Objects(), tmp_path / "objects", **options)
    write_tar(tmp_path / "x.tar", {"0.jpg": FILES["JPEG 6"]})
    build_lmdb(tmp_path / "x.tar", tmp_path / "tar", **options)
    (tmp_path / "folder/a").mkdir(parents=True)
    (tmp_path / "folder/a/0.jpg").write_bytes(FILES["JPEG 6"])
    build_lmdb(tmp_path / "folder", tmp_path / "out", **options)
    wide, tall = ((80, 40), (40, 80)) if image_size is None else ((40, 20), (20, 40))
    assert LMDBDataset(tmp_path / "objects")[1][0].size == wide
    assert LMDBDataset(tmp_path / "tar")[0]["jpg"].size == tall
    upright = LMDBDataset(tmp_path / "out")[0][0]
    assert upright.size == tall
    if image_size is None:
        assert np.array_equal(np.asarray(upright), np.asarray(ImageOps.exif_transpose(opened(FILES["JPEG 6"]))))
