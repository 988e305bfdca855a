"""Datasets damaged for real, each read in a process of its own: an error that names the file, never a signal."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb
import pytest

from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.fork_server import run_code
from tests.storage.parts import flip, numbered, write_numbered


def read_all(path: Path, errors: Connection) -> None:
    try:
        for index, (_, number) in enumerate(LMDBDataset(path)):
            assert number == index
    except Exception as err:
        errors.send(f"{type(err).__name__}: {err}")
    else:
        errors.send("no error")


def refusal(path: Path) -> str:
    """The error with which a process of its own ends that reads a dataset; it must not die by a signal."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=read_all, args=(path, there))
    process.start()
    there.close()
    process.join(60)
    assert process.exitcode == 0
    text: str = here.recv()
    return text


DAMAGED = "DamagedError: "
FILE = "DamagedFileError: "
STORAGE = "StorageError: "


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A dataset of 25 numbered samples in three shards."""
    return write_numbered(tmp_path / "dataset", 25, samples_per_shard=10)


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, size)


def garbage(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        size = (path / name).stat().st_size
        (path / name).write_bytes(random.Random(0).randbytes(size))

    return damage


def swap(path: Path) -> None:
    os.rename(path / "shard-00000.mdb", path / "x")
    os.rename(path / "shard-00001.mdb", path / "shard-00000.mdb")
    os.rename(path / "x", path / "shard-00001.mdb")


def swap_with_tables(path: Path) -> None:
    swap(path)
    os.rename(path / "shard-00000.tab", path / "x")
    os.rename(path / "shard-00001.tab", path / "shard-00000.tab")
    os.rename(path / "x", path / "shard-00001.tab")


def a_table_of_another(path: Path) -> None:
    shutil.copy(path / "shard-00001.tab", path / "shard-00000.tab")


def offsets_of_another_sample(path: Path) -> None:
    table = bytearray((path / "shard-00000.tab").read_bytes())
    table[32 + 8 * 3 : 32 + 8 * 4] = table[32 + 8 * 4 : 32 + 8 * 5]
    (path / "shard-00000.tab").write_bytes(table)


def offsets_out_of_the_file(path: Path) -> None:
    table = bytearray((path / "shard-00000.tab").read_bytes())
    table[32:40] = b"\xff" * 8
    (path / "shard-00000.tab").write_bytes(table)


def manifest(**changes: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**raw, **changes}))

    return damage


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            truncate("shard-00001.mdb", 8192),
            FILE + "{path}: sample 10 (shard-00001): {path}/shard-00001.mdb: 8192",
        ),
        (truncate("shard-00001.mdb", 0), FILE + "{path}: sample 10 (shard-00001): {path}/shard-00001.mdb: 0 bytes"),
        (
            lambda path: os.unlink(path / "shard-00002.mdb"),
            "{path}/shard-00002.mdb: this shard is missing; copy it again",
        ),
        (
            lambda path: os.unlink(path / "shard-00002.tab"),
            "{path}/shard-00002.tab: the shard's record table is missing",
        ),
        (truncate("shard-00000.tab", 100), "{path}/shard-00000.tab: 100 bytes long; expected 160"),
        (truncate("shard-00000.tab", 0), "{path}/shard-00000.tab: 0 bytes long; expected 160"),
        (garbage("shard-00000.mdb"), "{path}: sample 0 (shard-00000): "),
        (garbage("shard-00000.tab"), "{path}/shard-00000.tab: not the record table listed in the manifest"),
        (garbage("manifest.json"), DAMAGED + "{path}/manifest.json: not a readable manifest"),
        (truncate("manifest.json", 0), DAMAGED + "{path}/manifest.json: not a readable manifest"),
        (truncate("manifest.json", 300), DAMAGED + "{path}/manifest.json: not a readable manifest"),
        (
            lambda path: os.unlink(path / "manifest.json"),
            STORAGE + "{path}: not a lightning-gpuopt dataset (there is no",
        ),
        (manifest(version=2), STORAGE + "{path}/manifest.json: written by a newer lightning-gpuopt (format version 2;"),
        (manifest(format="other"), STORAGE + "{path}/manifest.json: the format is 'other'"),
        (manifest(checksum="md5"), STORAGE + "{path}/manifest.json: checksums are 'md5'"),
        (manifest(num_samples=24), "{path}/manifest.json: not a readable manifest"),
        (manifest(shards=[]), "{path}/manifest.json: not a readable manifest"),
        (swap, "{path}: sample 0 (shard-00000): "),
        (swap_with_tables, "{path}/shard-00000.tab: not the record table listed in the manifest"),
        (a_table_of_another, "{path}/shard-00000.tab: not the record table listed in the manifest"),
        (
            offsets_of_another_sample,
            "DamagedSampleError: {path}: sample 3 (shard-00000): another sample lies in its place; run `",
        ),
        (offsets_out_of_the_file, "{path}: sample 0 (shard-00000): the record table says it ends at byte "),
    ],
)
def test_damage_is_an_error_that_names_it(path: Path, damage: Callable[[Path], None], text: str) -> None:
    damage(path)
    assert text.format(path=path) in refusal(path)


@pytest.mark.matrix
def test_flipped_bits_never_kill_and_never_give_another_sample(path: Path) -> None:
    """Many flips in every file, all in one process: with the checksums every sample is right or an error."""
    code = """
import random, sys
from pathlib import Path
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.reader import LMDBDataset
from tests.storage.parts import flip, numbered
path, generator, errors = Path(sys.argv[1]), random.Random(0), 0
for file in sorted(path.iterdir()):
    for _ in range(60):
        bit = generator.randrange(file.stat().st_size * 8)
        flip(file, bit)
        try:
            dataset = LMDBDataset(path, verify_checksum=True)
        except StorageError as err:
            assert file.name == "manifest.json" and str(path) in str(err)
            errors += 1
            dataset = ()
        for index in range(len(dataset)):
            try:
                data, number = dataset[index]
            except StorageError as err:
                assert str(path) in str(err)
                errors += 1
            else:
                assert (bytes(data), number) == (bytes(numbered(index)[0]), index), (file, bit)
        flip(file, bit)
print(errors)
"""
    result = run_code(code, path)
    assert result.returncode == 0, result.stderr
    # Every flip of the manifest, and many in shards and tables
    assert int(result.stdout) > 100


def test_flipped_bits_without_checksums_never_kill_either(path: Path) -> None:
    generator = random.Random(1)
    file = path / "shard-00000.mdb"
    code = """
import sys
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.reader import LMDBDataset
dataset = LMDBDataset(sys.argv[1])
for index in range(25):
    try:
        dataset[index]
    except DamagedError as err:
        assert f"sample {index} (shard-00000)" in str(err)
"""
    for _ in range(2):
        for _ in range(400):
            flip(file, generator.randrange(file.stat().st_size * 8))
        result = run_code(code, path)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("version", "name"), [(0, "format 0.9"), (1, "a newer format")])
@pytest.mark.parametrize("subdir", [True, False])
def test_an_lmdb_of_pickles_is_named_and_not_opened(tmp_path: Path, version: int, name: str, subdir: bool) -> None:
    target = tmp_path / "pickled.lmdb"
    env = lmdb.open(str(target), subdir=subdir, lib_version=version)
    with env, env.begin(write=True) as txn:
        txn.put(b"0", pickle.dumps((b"image", 1)))
    with pytest.raises(Exception, match=re.escape(f"{target}: an LMDB file of ")) as caught:
        LMDBDataset(target)
    assert name in str(caught.value)
    assert "not a lightning-gpuopt dataset; convert it with build_lmdb(" in str(caught.value)
    assert "allow_pickle=True) if you trust its source" in str(caught.value)


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such directory; give the path of a dataset"):
        LMDBDataset(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("x")
    for wrong in (tmp_path, tmp_path / "file.txt"):
        with pytest.raises(Exception, match="not a lightning-gpuopt dataset") as caught:
            LMDBDataset(wrong)
        assert str(wrong) in str(caught.value)


def test_a_whole_shard_of_another_dataset_is_found_out(path: Path, tmp_path: Path) -> None:
    """Same name, same sizes, same indices: only the digest in its table tells."""
    other = write_numbered(tmp_path / "other", 25, samples_per_shard=10)
    data = (other / "shard-00001.mdb").read_bytes()
    assert len(data) == (path / "shard-00001.mdb").stat().st_size
    with LMDBWriter(other, samples_per_shard=10, overwrite=True) as writer:
        for index in range(25):
            array, number = numbered(index)
            writer.write((array + 1, number))
    for name in ("shard-00001.mdb", "shard-00001.tab"):
        shutil.copy(other / name, path)
    assert f"{path}/shard-00001.tab: not the record table" in refusal(path)
