"""Masks and depth maps in files of several images: mode and values are kept, and photographs stay photographs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.images.pictures import encoded, photo, with_orientation
from tests.storage.source_files import write_pickled, write_tar

IDS = np.repeat(np.array([0, 15, 255], np.uint8), 20)[None].repeat(40, 0)
DEPTH = np.arange(40 * 60).reshape(40, 60) % 1024
JPEG = encoded(photo(60, 40))


def palette(ids: np.ndarray[Any, Any] = IDS) -> Image.Image:
    image = Image.frombytes("P", ids.shape[::-1], ids.tobytes())
    image.putpalette([value for index in range(256) for value in (index, 255 - index, 7)])
    return image


GREY = Image.fromarray(IDS)
IMAGES: dict[str, Image.Image] = {
    "P": palette(),
    "L": GREY,
    "1": Image.fromarray(IDS > 9),
    "I;16": Image.fromarray(DEPTH.astype(np.uint16)),
    "I": Image.fromarray(DEPTH.astype(np.int32) * -1000),
    "F": Image.fromarray(DEPTH.astype(np.float32) / 7),
    "RGB": photo(60, 40),
}
FILES = {mode: encoded(image, "TIFF" if mode in ("I", "F") else "PNG") for mode, image in IMAGES.items()}
DTYPES = {"1": torch.bool, "I;16": torch.uint16, "I": torch.int32, "F": torch.float32}


def tar(path: Path, parts: dict[str, bytes]) -> Path:
    write_tar(path / "x.tar", {f"{number}.{name}": data for number in range(2) for name, data in parts.items()})
    return path / "x.tar"


def parquet(path: Path, parts: dict[str, bytes]) -> Path:
    pq.write_table(pa.table({name: [data] * 2 for name, data in parts.items()}), path / "x.parquet")
    return path / "x.parquet"


def hdf5(path: Path, parts: dict[str, bytes]) -> Path:
    with h5py.File(path / "x.h5", "w") as file:
        for name, data in parts.items():
            rows = file.create_dataset(name, (2,), h5py.vlen_dtype(np.uint8))
            rows[0] = rows[1] = np.frombuffer(data, np.uint8)
    return path / "x.h5"


def pickled(path: Path, parts: dict[str, bytes]) -> Path:
    write_pickled(path / "x.lmdb", {str(number).encode(): parts for number in range(2)})
    return path / "x.lmdb"


SOURCES: dict[str, Callable[[Path, dict[str, bytes]], Path]] = {
    "tar": tar,
    "parquet": parquet,
    "hdf5": hdf5,
    "pickled": pickled,
}


def read(tmp_path: Path, source: str, parts: dict[str, bytes], decode: Any = "tensor", **options: Any) -> Any:
    out = tmp_path / f"out-{source}"
    build_lmdb(SOURCES[source](tmp_path, parts), out, progress=False, allow_pickle=source == "pickled", **options)
    return LMDBDataset(out, decode=decode)[1]


def assert_kept(tensor: torch.Tensor, mode: str) -> None:
    pixels = np.asarray(IMAGES[mode])
    expected = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    assert tensor.dtype == DTYPES.get(mode, torch.uint8)
    assert np.array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mode", IMAGES)
def test_a_part_that_is_named_so_keeps_its_values_whatever_its_mode(tmp_path: Path, source: str, mode: str) -> None:
    name = {"P": "mask.png", "L": "left.seg.png", "1": "LABEL", "RGB": "panoptic_label.png"}.get(mode, "depth_0.tif")
    if source == "tar" and "." not in name:
        name += ".png"
    if source == "tar":
        name = name.replace(".tif", ".png")  # which is told by its content
    key = name.lower() if source == "tar" else name
    both = read(tmp_path, source, {"jpg": JPEG, name: FILES[mode]})
    assert_kept(both[key], mode)
    assert (both["jpg"].shape, both["jpg"].dtype) == ((3, 40, 60), torch.uint8)


@pytest.mark.parametrize("source", SOURCES)
def test_alone_too(tmp_path: Path, source: str) -> None:
    alone = read(tmp_path, source, {"mask.png": FILES["P"]})
    assert_kept(alone if source == "hdf5" else alone["mask.png"], "P")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mode", IMAGES)
def test_without_such_a_name_the_mode_decides_where_there_are_several_images(
    tmp_path: Path, source: str, mode: str
) -> None:
    for index, parts in enumerate(({"jpg": JPEG, "png": FILES[mode]}, {"png": FILES[mode]})):
        (tmp_path / str(index)).mkdir()
        sample = read(tmp_path / str(index), source, parts)
        found = sample["png"] if isinstance(sample, dict) else sample
        if index == 0 and mode not in ("L", "RGB"):
            assert_kept(found, mode)
        else:  # the only image, or a grey one, is a photograph
            assert (found.shape, found.dtype) == ((3, 40, 60), torch.uint8)


def test_a_palette_png_with_a_class_is_a_photograph(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"0.png": FILES["P"], "0.cls": b"3"})
    build_lmdb(tmp_path / "x.tar", tmp_path / "out", progress=False)
    sample = LMDBDataset(tmp_path / "out")[0]
    assert (sample["png"].mode, sample["cls"]) == ("RGB", 3)
    assert np.array_equal(np.asarray(sample["png"]), np.asarray(palette().convert("RGB")))


@pytest.mark.parametrize("name", ["unmasked.png", "segment.png", "labels2go.png", "indepth.png"])
def test_a_name_that_only_contains_such_a_word_is_another(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, "tar", {name: FILES["L"]})[name].shape == (3, 40, 60)


def test_a_column_of_images_makes_several_where_a_row_has_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [JPEG, None], "png": [FILES["P"]] * 2}), tmp_path / "x.parquet")
    build_lmdb(tmp_path / "x.parquet", tmp_path / "out", progress=False)
    assert [LMDBDataset(tmp_path / "out")[index]["png"].mode for index in (0, 1)] == ["P", "P"]


def test_pil_gives_them_in_their_mode(tmp_path: Path) -> None:
    sample = read(tmp_path, "tar", {"jpg": JPEG, "mask.png": FILES["P"], "depth.png": FILES["I;16"]}, "pil")
    assert (sample["jpg"].mode, sample["mask.png"].mode, sample["depth.png"].mode) == ("RGB", "P", "I;16")
    assert np.array_equal(np.asarray(sample["mask.png"]), IDS)
    assert np.array_equal(np.asarray(sample["depth.png"]), DEPTH)


@pytest.mark.parametrize("source", ["tar", "parquet"])
def test_they_are_cropped_by_nearest_neighbour_and_never_normalised(tmp_path: Path, source: str) -> None:
    parts = {"jpg": JPEG, "mask.png": FILES["P"], "depth.png": FILES["I;16"]}
    out = tmp_path / "out"
    build_lmdb(SOURCES[source](tmp_path, parts), out, progress=False)
    datamodule = LMDBDataModule(
        out, batch_size=2, num_workers=0, decode="tensor", crop_size=24, normalize=((0.5,) * 3, (0.5,) * 3)
    )
    datamodule.setup("fit")
    (batch,) = datamodule.train_dataloader()
    batch = datamodule.on_after_batch_transfer(batch, 0)
    assert batch["jpg"].dtype == torch.float32
    assert (batch["mask.png"].dtype, batch["mask.png"].shape) == (torch.uint8, (2, 1, 24, 24))
    assert set(batch["mask.png"].unique().tolist()) <= {0, 15, 255}
    assert (batch["depth.png"].dtype, batch["depth.png"].shape) == (torch.uint16, (2, 1, 24, 24))
    assert set(batch["depth.png"].numpy().ravel().tolist()) <= set(range(1024))
    assert batch["depth.png"].numpy().max() > 255


def test_smaller_ones_keep_their_values(tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_lmdb(tar(tmp_path, {"jpg": JPEG, "mask.png": FILES["P"]}), out, progress=False, image_size=20)
    sample = LMDBDataset(out)[0]
    assert (sample["jpg"].size, sample["mask.png"].size, sample["mask.png"].mode) == ((30, 20), (30, 20), "P")
    assert set(np.unique(np.asarray(sample["mask.png"]))) == {0, 15, 255}


def test_the_orientation_of_a_mask_in_a_file_is_applied(tmp_path: Path) -> None:
    mask = with_orientation(palette(), 6, kind="PNG")
    sample = read(tmp_path, "tar", {"jpg": with_orientation(photo(60, 40), 6), "mask.png": mask}, "pil")
    assert (sample["jpg"].size, sample["mask.png"].size) == ((40, 60), (40, 60))
    assert np.array_equal(np.asarray(sample["mask.png"]), np.rot90(IDS, -1))


def test_a_mask_that_is_no_image_is_left_out(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", {"0.jpg": JPEG, "0.mask.png": b"broken", "1.jpg": JPEG, "1.mask.png": FILES["P"]})
    with pytest.warns(UserWarning, match=r"1 of 2 samples are skipped.*mask\.png: not an image file"):
        build_lmdb(tmp_path / "x.tar", tmp_path / "out", progress=False)
    assert LMDBDataset(tmp_path / "out")[0]["__key__"] == "1"


def test_a_dataset_of_this_package_is_cut_anew_as_it_is(tmp_path: Path) -> None:
    """Also where it was built when all files were photographs."""
    from lightning_gpuopt.storage.codec import EncodedImage
    from lightning_gpuopt.storage.writer import LMDBWriter

    with LMDBWriter(tmp_path / "old") as writer:
        writer.write({"jpg": EncodedImage(JPEG), "mask.png": EncodedImage(FILES["P"])})
    build_lmdb(tmp_path / "old", tmp_path / "new", progress=False)
    for path in (tmp_path / "old", tmp_path / "new"):
        assert LMDBDataset(path)[0]["mask.png"].mode == "RGB"


@pytest.mark.parametrize("source", SOURCES)
def test_kinds_decide_where_the_rule_is_wrong(tmp_path: Path, source: str) -> None:
    parts = {"jpg": JPEG, "mask.png": FILES["P"], "grey.png": FILES["L"]}
    given = read(tmp_path, source, parts, kinds={"mask.png": "photograph", "grey.png": "exact"})
    assert given["mask.png"].shape == given["jpg"].shape == (3, 40, 60)
    assert_kept(given["grey.png"], "L")


@pytest.mark.parametrize("source", SOURCES)
def test_a_part_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path, source: str) -> None:
    with pytest.raises(ValueError, match=r"kinds: expected names of parts of .*'jpg', 'png'\), got 'mask'"):
        read(tmp_path, source, {"jpg": JPEG, "png": FILES["P"]}, kinds={"mask": "exact", "png": "exact"})
    assert not (tmp_path / f"out-{source}").exists()


def test_a_kind_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kinds\['png'\]"):
        read(tmp_path, "tar", {"jpg": JPEG, "png": FILES["P"]}, kinds={"png": "mask"})


def test_other_kinds_are_another_plan(tmp_path: Path) -> None:
    read(tmp_path, "tar", {"jpg": JPEG, "png": FILES["P"]}, kinds={"png": "photograph"})
    with pytest.raises(FileExistsError, match="kinds was"):
        read(tmp_path, "tar", {"jpg": JPEG, "png": FILES["P"]}, resume=True)
