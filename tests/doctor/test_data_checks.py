"""The checks of a dataset: rates in, checks out."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpuopt.doctor.data_checks import data_check, lmdb_check
from lightning_gpuopt.doctor.facts import DataFacts, ReadRates

FILES = DataFacts(
    "photos/train",
    "folder",
    "ext4",
    files=4000,
    total_mib=400.0,
    sizes={"4_kib": 1000, "16_kib": 0, "64_kib": 0, "128_kib": 2000, "512_kib": 1000, "2048_kib": 0, "more": 0},
    read=ReadRates(512, 1000.0, 40000.0, 100.0),
    as_lmdb=ReadRates(512, 5200.0, 120000.0, 520.0),
    image_folder=True,
)
BUILD = "lightning-gpuopt lmdb build photos/train photos/train.lmdb"


def test_what_was_read_is_told_cold_and_warm():
    check = data_check(FILES)
    assert (check.status, check.found) == (
        "ok",
        "4,000 files, 75% of them up to 128 KiB on ext4; random reads 1,000 samples/s cold (100 MiB/s), "
        "40,000 samples/s warm",
    )
    assert check.measured == {
        "path": "photos/train",
        "kind": "folder",
        "file_system": "ext4",
        "files": 4000,
        "files_complete": True,
        "total_mib": 400.0,
        "files_up_to": FILES.sizes,
        "samples": 512,
        "warm_samples_per_s": 40000.0,
        "cold_samples_per_s": 1000.0,
        "cold_mib_s": 100.0,
    }


def test_a_page_cache_that_could_not_be_emptied_is_a_note():
    check = data_check(replace(FILES, read=ReadRates(512, None, 40000.0)))
    assert check.status == "note"
    assert check.found.endswith("random reads 40,000 samples/s warm")


def test_what_could_not_be_read_is_not_known():
    check = data_check(replace(FILES, read=None, failure="0 files of a sample's size; 8 are needed"))
    assert check.status == "unknown"
    assert check.found.endswith("0 files of a sample's size; 8 are needed")
    check = data_check(replace(FILES, files=0, read=None, failure="/data: Permission denied"))
    assert check.found == "not known: /data: Permission denied"
    assert lmdb_check(replace(FILES, read=None)) is None


def test_a_folder_that_would_gain_from_lmdb_is_a_problem_with_the_command():
    check = lmdb_check(FILES)
    assert check is not None
    assert (check.status, check.found) == (
        "problem",
        "read from LMDB: 5.2x cold, 3.0x warm: this folder would gain",
    )
    assert check.fix == BUILD
    assert check.measured == {
        "warm_read_gain": 3.0,
        "cold_read_gain": 5.2,
        "lmdb_warm_samples_per_s": 120000.0,
        "samples": 512,
        "lmdb_cold_samples_per_s": 5200.0,
    }


def test_of_images_the_gain_is_that_of_a_worker_which_decodes_as_well():
    # a file takes 1 ms, a record 1/5.2 ms, decoding 4 ms: (1 + 4) / (0.19 + 4)
    check = lmdb_check(replace(FILES, decode_s=0.004))
    assert check is not None
    assert (check.status, check.measured["worker_gain"]) == ("ok", 1.19)
    assert check.found == (
        "read from LMDB: 5.2x cold, 3.0x warm; with decoding (4.0 ms an image) a worker runs 1.2x as fast: "
        "this folder would gain little"
    )
    slow_disk = replace(FILES, decode_s=0.004, read=ReadRates(512, 100.0, 40000.0), as_lmdb=ReadRates(512, 500.0, 9e4))
    check = lmdb_check(slow_disk)
    assert check is not None
    assert (check.status, check.measured["worker_gain"]) == ("problem", 2.33)  # (10 + 4) / (2 + 4)


def test_warm_alone_is_a_note_at_most():
    warm = replace(FILES, read=ReadRates(512, None, 40000.0))
    check = lmdb_check(warm)
    assert check is not None
    assert (check.status, check.found) == ("note", "read from LMDB: 3.0x warm: this folder would gain")
    check = lmdb_check(replace(warm, failure="only warm reads are compared"))
    assert check is not None
    assert check.found == "read from LMDB: 3.0x warm (only warm reads are compared): this folder would gain"


def test_what_lmdb_build_does_not_read_is_written_by_hand():
    check = lmdb_check(replace(FILES, image_folder=False))
    assert check is not None
    assert check.fix == "write the samples with LMDBWriter, or pass a Dataset to build_lmdb"


def test_a_path_with_blanks_is_quoted():
    check = lmdb_check(replace(FILES, path="my photos/"))
    assert check is not None
    assert check.fix == "lightning-gpuopt lmdb build 'my photos' 'my photos.lmdb'"


def test_an_lmdb_and_a_file_are_not_compared():
    assert lmdb_check(replace(FILES, kind="lmdb")) is None
    assert lmdb_check(replace(FILES, kind="file")) is None
