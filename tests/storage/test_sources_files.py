"""Sources that are one file: NumPy, HDF5, Parquet, and LMDB of pickled values."""

from __future__ import annotations

import datetime
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from lightning_gpuopt.images.checks import BadImage
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.sources import hdf5 as hdf5_module
from lightning_gpuopt.storage.sources import open_source
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.source_files import image_file, npy, same, samples, write_pickled

# --- arrays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">i4").reshape(4, 2, 3),
        np.asfortranarray(np.arange(24.0).reshape(4, 6)),
        np.arange(5, dtype=np.int64),
        np.zeros((3, 0), np.float32),
        np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i2"), ("b", "f8")]),
    ],
    ids=["big-endian", "column-order", "scalars", "empty-rows", "records"],
)
@pytest.mark.parametrize("form", ["npy", "npz", "npz-compressed"])
def test_a_sample_of_a_numpy_file_is_a_row(tmp_path: Path, array: np.ndarray[Any, Any], form: str) -> None:
    path = tmp_path / f"x.{form[:3]}"
    {"npy": np.save, "npz": np.savez, "npz-compressed": np.savez_compressed}[form](path, array)
    source = open_source(path)
    rows = samples(source)
    assert all(same(np.asarray(row), np.asarray(array[i])) and row.dtype == array.dtype for i, row in enumerate(rows))
    assert len(rows) == len(array)
    assert same(np.asarray(source.read(0)), np.asarray(array[0]))  # back to the first
    assert source.num_bytes == array.nbytes


def test_several_arrays_of_a_npz_are_a_dict(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", image=np.arange(6).reshape(3, 2), label=np.array([5, 6, 7], np.int8))
    assert same(open_source(tmp_path / "x.npz").read(2), {"image": np.array([4, 5]), "label": np.int8(7)})


def test_numpy_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    def refused(error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            open_source(tmp_path / "x.npy")

    np.save(tmp_path / "x.npy", np.array([{}, []], dtype=object))
    refused(ValueError, "an array of Python objects, which would need pickle")
    np.save(tmp_path / "x.npy", np.array(3))
    refused(ValueError, "a single value; expected an array with a row for each sample")
    np.save(tmp_path / "x.npy", np.zeros((0, 3)))
    refused(ValueError, "there is no row in it")
    (tmp_path / "x.npy").write_bytes(b"no array")
    refused(ValueError, r"not a \.npy file that can be read")
    (tmp_path / "x.npy").write_bytes(npy(np.zeros(100))[:-1])
    refused(DamagedError, "927 bytes long, its header says 928")
    np.savez(tmp_path / "y.npz", a=np.zeros(3), b=np.zeros(4))
    with pytest.raises(ValueError, match="expected arrays with the same number of rows, got a 3, b 4"):
        open_source(tmp_path / "y.npz")


def test_a_damaged_compressed_npz_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, np.random.default_rng(0).integers(0, 255, (100, 100), dtype=np.uint8))
    data = bytearray(path.read_bytes())
    data[5000:5100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"x\.npz: arr_0 cannot be read"):
        samples(open_source(path))
    path.write_bytes(data[:3000])
    with pytest.raises(DamagedError, match=r"x\.npz: not a whole \.npz"):
        open_source(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", b"x")
    with pytest.raises(ValueError, match="there is no array in it"):
        open_source(path)


def test_an_hdf5_file_is_its_datasets_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    images = np.arange(5000 * 12, dtype=np.uint8).reshape(5000, 3, 4)
    files = [image_file(i) for i in range(5000 // 250)] * 250
    with h5py.File(path, "w") as file:
        file.create_dataset("group/images", data=images, chunks=(7, 3, 4), compression="gzip")
        file["labels"] = np.arange(5000, dtype=np.int16)
        file.create_dataset("text", data=[f"ä{i}" for i in range(5000)], dtype=h5py.string_dtype())
        raw = file.create_dataset("jpeg", (5000,), dtype=h5py.vlen_dtype(np.uint8))
        raw[:] = np.array([np.frombuffer(data, np.uint8) for data in files] + [None], dtype=object)[:-1]
    source = open_source(path)
    for index in (0, 1, 4999, 1023, 1024, 3):
        row = source.read(index)
        expected = {"images": images[index], "jpeg": EncodedImage(files[index])}
        assert same(row, {"group/images": expected["images"], **{k: row[k] for k in ("jpeg", "labels", "text")}})
        assert (row["jpeg"], row["labels"], row["text"]) == (files[index], index, f"ä{index}")
        assert (type(row["jpeg"]), row["labels"].dtype) == (EncodedImage, np.int16)
    with h5py.File(tmp_path / "one.hdf5", "w") as file:
        file["only"] = images[:10]
    assert same(open_source(tmp_path / "one.hdf5").read(9), images[9])


def test_hdf5_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"no HDF5")
    with pytest.raises(DamagedError, match=r"x\.h5: not an HDF5 file that can be read"):
        open_source(path)
    with h5py.File(path, "w") as file:
        file.create_group("empty")
    with pytest.raises(ValueError, match=r"x\.h5: there is no dataset in it"):
        open_source(path)
    with h5py.File(path, "w") as file:
        file["a"], file["b"] = np.zeros(3), 5
    with pytest.raises(ValueError, match="got a 3, b a single value; pass a Dataset"):
        open_source(path)
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=r'needs h5py .*pip install "lightning-gpuopt\[sources\]"'):
        hdf5_module.HDF5Source(str(path))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt", ".safetensors"])
def test_a_damaged_file_gives_its_rows_or_is_named(tmp_path: Path, suffix: str) -> None:
    path, draw, rows = tmp_path / f"x{suffix}", random.Random(0), np.arange(60.0).reshape(20, 3)
    if suffix == ".npy":
        np.save(path, rows)
    elif suffix == ".npz":
        np.savez_compressed(path, a=rows, b=np.array(["x", "yy"] * 10))
    elif suffix == ".pt":
        torch.save({"a": torch.from_numpy(rows)}, path)
    else:
        save_file({"a": torch.from_numpy(rows)}, path)
    whole = path.read_bytes()
    errors: list[str] = []
    for _ in range(150):
        damaged = bytearray(whole)
        if draw.random() < 0.3:
            del damaged[draw.randrange(len(damaged)) :]
        else:
            for _ in range(draw.choice([1, 1, 4])):
                damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.unlink()  # it may still be mapped
        path.write_bytes(damaged)
        try:
            source = open_source(path)
            for index in range(min(len(source), 30)):
                source.read(index)
        except (StorageError, ValueError) as error:
            errors.append(str(error))
    assert [error for error in errors if not error.startswith(f"{path}: ")] == []
    assert 50 < len(errors) < 150


# --- Parquet -----------------------------------------------------------------------------------------------------


def test_a_parquet_file_is_a_dict_a_row(tmp_path: Path) -> None:
    jpeg = [image_file(i) for i in range(50)]
    day = datetime.datetime(2024, 5, 6, 7, 8, 9)
    table = pa.table(
        {
            "image": [{"bytes": data, "path": f"{i}.jpg"} for i, data in enumerate(jpeg)],
            "plain": jpeg,
            "other": [b"bytes", None] * 25,
            "label": pa.array(range(50), pa.int64()),
            "text": [None if i == 3 else f"t{i}" for i in range(50)],
            "vector": pa.array([[i, i + 1] for i in range(50)], pa.list_(pa.float32())),
            "matrix": pa.array([[[i, 1], [2, 3]] for i in range(50)], pa.list_(pa.list_(pa.int16()))),
            "gaps": [[1, None]] * 50,
            "ragged": [[[1], [2, 3]]] * 50,
            "words": [["a", None]] * 50,
            "when": pa.array([day] * 50, pa.timestamp("us")),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=20)
    source = open_source(tmp_path / "x.parquet")
    assert len(source) == 50
    for index in (0, 19, 20, 3, 49, 21):
        row = source.read(index)
        assert (row["image"], row["plain"], row["label"]) == (jpeg[index], jpeg[index], index)
        assert (type(row["image"]), type(row["plain"]), type(row["label"])) == (EncodedImage, EncodedImage, int)
        assert same(row["vector"], np.array([index, index + 1], np.float32))
        assert same(row["matrix"], np.array([[index, 1], [2, 3]], np.int16))
        assert [part.tolist() for part in row["ragged"]] == [[1], [2, 3]]
        assert (row["words"], row["gaps"], row["when"]) == (["a", None], [1, None], np.datetime64(day))
        assert row["text"] == (None if index == 3 else f"t{index}")
        assert (row["other"], type(row["other"])) in ((b"bytes", bytes), (None, type(None)))


def test_a_parquet_file_is_read_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gpuopt.storage.sources.parquet._MAX_ROWS", 4)
    pq.write_table(pa.table({"x": np.arange(50)}), tmp_path / "x.parquet", row_group_size=20)
    source = open_source(tmp_path / "x.parquet")
    order = [19, 3, 4, 8, 2, 49, 40, 0, 20, 39]
    assert [source.read(index)["x"] for index in order] == order


def test_an_image_column_of_hugging_face_with_names_of_classes(tmp_path: Path) -> None:
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": None, "path": "far/away.jpg"}, {"bytes": b"broken", "path": None}, None]
    table = pa.table({"image": pa.array(rows, kind), "label": [0, 1, 0]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_source(tmp_path / "x.parquet")
    assert source.classes == ("cat", "dog")
    with pytest.raises(BadImage, match=r"image: its bytes are not in the file, only its path, 'far/away\.jpg'"):
        source.read(0)
    assert source.read(1) == {"image": EncodedImage(b"broken"), "label": 1}
    assert type(source.read(1)["image"]) is EncodedImage
    assert source.read(2) == {"image": None, "label": 0}


def test_several_parquet_files_must_have_the_same_columns(tmp_path: Path) -> None:
    for number in range(3):
        pq.write_table(pa.table({"x": [number * 2, number * 2 + 1]}), tmp_path / f"{number}.parquet")
    assert [row["x"] for row in samples(open_source(tmp_path))] == list(range(6))
    pq.write_table(pa.table({"y": [1]}), tmp_path / "3.parquet")
    with pytest.raises(ValueError, match=r"3\.parquet: other columns than .*0\.parquet"):
        open_source(tmp_path)


def test_parquet_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": pa.array([], pa.int8())}), path)
    with pytest.raises(ValueError, match=r"x\.parquet: there is no row in it"):
        open_source(path)
    pq.write_table(pa.table({"x": np.arange(10000)}), path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedError, match=r"x\.parquet: not a whole Parquet file"):
        open_source(path)


# --- LMDB of pickled values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("subdir", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_a_pickled_lmdb_is_read_where_that_is_allowed(tmp_path: Path, subdir: bool, version: int) -> None:
    jpeg = image_file(0)
    values: dict[bytes, Any] = {str(i).encode(): (jpeg, i, {"mask": jpeg, "raw": b"r"}) for i in range(12)}
    write_pickled(tmp_path / "old", {**values, b"__len__": 12, b"7": jpeg}, subdir=subdir, lib_version=version)
    with pytest.raises(StorageError, match=r"unpickling runs code .* only with allow_pickle=True"):
        open_source(tmp_path / "old")
    source = open_source(tmp_path / "old", allow_pickle=True)
    found = samples(source)
    assert [sample[1] for i, sample in enumerate(found) if i != 7] == [i for i in range(12) if i != 7]
    assert found[2] == (jpeg, 2, {"mask": jpeg, "raw": b"r"})
    kinds = (type(found[2][0]), type(found[2][2]["mask"]), type(found[2][2]["raw"]), type(found[7]))
    assert kinds == (EncodedImage, EncodedImage, bytes, EncodedImage)
    assert source.name(10) == "key b'10'"


def test_the_order_of_a_pickled_lmdb_is_that_of_its_list_of_keys(tmp_path: Path) -> None:
    keys = [b"zebra", b"ape", b"cat"]
    values: dict[bytes, Any] = {key: key.decode() for key in keys}
    write_pickled(tmp_path / "listed", {**values, b"__keys__": keys, b"__classes__": ["x", "y"]})
    source = open_source(tmp_path / "listed", allow_pickle=True)
    assert samples(source) == ["zebra", "ape", "cat"]
    assert source.classes == ("x", "y")
    write_pickled(tmp_path / "sorted", values)
    assert samples(open_source(tmp_path / "sorted", allow_pickle=True)) == ["ape", "cat", "zebra"]


def test_pickled_lmdbs_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    write_pickled(tmp_path / "short", {b"0": 1, b"__len__": 2})
    with pytest.raises(DamagedError, match="short: __len__ says 2, but there are 1 samples"):
        open_source(tmp_path / "short", allow_pickle=True)
    write_pickled(tmp_path / "other", {b"0": 1, b"__keys__": [b"1"]})
    with pytest.raises(DamagedError, match="other: __keys__ lists 1 samples"):
        open_source(tmp_path / "other", allow_pickle=True)
    write_pickled(tmp_path / "empty", {})
    with pytest.raises(ValueError, match="empty: there is no sample in it"):
        open_source(tmp_path / "empty", allow_pickle=True)
    write_pickled(tmp_path / "bad", {b"0": b"\x80\x04cnowhere\nnothing\n."})
    with pytest.raises(StorageError, match=r"bad: key b'0' cannot be unpickled \(ModuleNotFoundError"):
        open_source(tmp_path / "bad", allow_pickle=True).read(0)


def test_a_truncated_lmdb_is_an_error_and_no_death(tmp_path: Path) -> None:
    write_pickled(tmp_path / "x", {str(i).encode(): bytes(10000) for i in range(100)}, subdir=False)
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedError, match=r"x: .* bytes long, but by LMDB's header .*: it is truncated"):
        open_source(tmp_path / "x", allow_pickle=True)


def test_a_damaged_lmdb_does_not_kill_the_build(tmp_path: Path) -> None:
    """Garbage in the tree's pages: LMDB dies of it, or finds too little; this process lives, and nothing is built."""
    write_pickled(tmp_path / "x", {b"%05d" % i: i for i in range(5000)}, subdir=False)
    data = bytearray((tmp_path / "x").read_bytes())
    data[2 * 4096 :] = np.random.default_rng(0).bytes(len(data) - 2 * 4096)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises((StorageError, ValueError), match=f"{tmp_path}/x: "):
        build_lmdb(tmp_path / "x", tmp_path / "out", allow_pickle=True, progress=False)
    assert not (tmp_path / "out").exists()


def test_an_lmdb_of_files_needs_no_pickle(tmp_path: Path) -> None:
    jpeg = image_file(0)
    values = {b"%d" % index: jpeg if index % 2 else b"text %d" % index for index in range(12)}
    # Pickled, but the last.
    meta = {b"__len__": 12, b"__keys__": [b"5"], b"__classes__": ["a"], b"num-samples": b"12"}
    write_pickled(tmp_path / "x", {**values, **meta})
    source = open_source(tmp_path / "x")
    assert samples(source) == list(values.values())
    assert [type(sample) for sample in samples(source)[:2]] == [bytes, EncodedImage]
    assert (source.kind, source.classes, source.name(10)) == ("lmdb", None, "key b'10'")
    source.close()
    build_lmdb(tmp_path / "x", tmp_path / "out", progress=False)
    assert list(LMDBDataset(tmp_path / "out", decode="raw")) == list(values.values())
    write_pickled(tmp_path / "short", {b"0": b"x", b"__len__": b"2"})
    with pytest.raises(DamagedError, match="short: __len__ says 2, but there are 1 samples"):
        open_source(tmp_path / "short")


def test_a_pickle_within_an_lmdb_of_files_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pickled(tmp_path / "x", {b"0": b"plain", b"1": (1, 2), b"__keys__": [b"1", b"0"]})
    monkeypatch.setattr("pickle.loads", None)
    source = open_source(tmp_path / "x")
    assert source.read(0) == b"plain"
    with pytest.raises(StorageError, match=r"x: key b'1' is pickled; .* only with allow_pickle=True"):
        source.read(1)


def test_empty_parquet_files_and_row_groups_are_passed_over(tmp_path: Path) -> None:
    schema = pa.schema([("image", pa.binary()), ("x", pa.int64())])
    empty = schema.empty_table()
    two = pa.table({"image": [image_file(0), image_file(1)], "x": [0, 1]}, schema)
    for name, tables in (("0", [empty]), ("1", [empty, two, empty, two]), ("2", [empty]), ("3", [two])):
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", schema) as writer:
            for table in tables:
                writer.write_table(table)
    assert pq.ParquetFile(tmp_path / "1.parquet").metadata.row_group(0).num_rows == 0
    assert pq.ParquetFile(tmp_path / "0.parquet").metadata.num_rows == 0
    for paths in ([0, 1, 2, 3], [1, 3]):
        source = open_source([tmp_path / f"{number}.parquet" for number in paths])
        assert [row["x"] for row in samples(source)] == [0, 1] * 3
        assert type(source.read(0)["image"]) is EncodedImage


def test_an_npz_is_loaded_once_in_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(100), b=np.arange(100) * 2)
    source = open_source(tmp_path / "x.npz")
    loaded: list[Any] = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda *args, **kwargs: loaded.append(args) or load(*args, **kwargs))
    assert [row["b"] for row in samples(source)] == list(range(0, 200, 2))
    assert len(loaded) == 1
    source.close()
    assert source.read(3) == {"a": 3, "b": 6}
    assert len(loaded) == 2
