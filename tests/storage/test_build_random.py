"""Random order, and random numbers that Datasets draw: the same whoever builds, and in how many processes."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.errors import StorageError
from lightning_gpuopt.storage.format import LMDBInfo
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.source_files import stored, write_folder


def build(source: Any, path: Path, **options: Any) -> LMDBInfo:
    return build_lmdb(source, path, progress=False, **options)


# --- shuffle_seed ------------------------------------------------------------------------------------------------


def test_a_shuffled_dataset_is_the_same_in_processes_in_parts_and_after_a_resume(tmp_path: Path) -> None:
    numbers = list(range(3000))  # in three shards
    build(numbers, tmp_path / "one", shuffle_seed=7)
    build(numbers, tmp_path / "three", shuffle_seed=7, num_proc=2)
    build(numbers, tmp_path / "parts", shuffle_seed=7, part=(1, 2))
    build(numbers, tmp_path / "parts", shuffle_seed=7, resume=True)
    order = stored(tmp_path / "one")
    assert sorted(order) == numbers
    assert order == stored(tmp_path / "three") == stored(tmp_path / "parts")
    assert abs(np.corrcoef(order, numbers)[0, 1]) < 0.1
    build(numbers, tmp_path / "other", shuffle_seed=8)
    assert stored(tmp_path / "other") != order


def test_the_seed_of_the_order_belongs_to_the_plan(tmp_path: Path) -> None:
    build(list(range(3000)), tmp_path / "out", shuffle_seed=7, part=(0, 2))
    with pytest.raises(StorageError, match="shuffle_seed was 7, now 8"):
        build(list(range(3000)), tmp_path / "out", shuffle_seed=8, resume=True)
    for wrong in (-1, 1.5):
        with pytest.raises(ValueError, match="shuffle_seed: expected a seed, at least 0, or None"):
            build([1], tmp_path / "wrong", shuffle_seed=wrong)


def test_the_skipped_are_listed_by_their_index_in_the_source(tmp_path: Path) -> None:
    samples = [EncodedImage(b"bad") if index % 100 == 7 else index for index in range(2000)]
    with pytest.warns(UserWarning, match=r"20 of 2000 samples are skipped.*list\[7\]"):
        build(samples, tmp_path / "out", shuffle_seed=1)
    with (tmp_path / "out/skipped.csv").open(newline="") as stream:
        assert [int(row["index"]) for row in csv.DictReader(stream)] == list(range(7, 2000, 100))


def test_one_of_our_own_datasets_can_be_shuffled(tmp_path: Path) -> None:
    build(list(range(3000)), tmp_path / "one")
    build(tmp_path / "one", tmp_path / "two", shuffle_seed=3)
    build(list(range(3000)), tmp_path / "three", shuffle_seed=3)
    assert stored(tmp_path / "two") == stored(tmp_path / "three")


# --- random numbers of a Dataset ---------------------------------------------------------------------------------


class Drawn:
    """Samples of random numbers, as a Dataset with random transforms has them."""

    def __len__(self) -> int:
        return 2500  # in three shards

    def __getitem__(self, index: int) -> tuple[float, float, float, int]:
        return random.random(), float(np.random.rand()), float(torch.rand(())), torch.get_num_threads()


def test_random_numbers_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    torch.manual_seed(3)
    build(Drawn(), tmp_path / "one")
    build(Drawn(), tmp_path / "two", num_proc=2)
    build(Drawn(), tmp_path / "parts", part=(1, 2))
    build(Drawn(), tmp_path / "parts", resume=True)
    one = [sample[:3] for sample in stored(tmp_path / "one")]
    assert one == [sample[:3] for sample in stored(tmp_path / "two")]
    assert one == [sample[:3] for sample in stored(tmp_path / "parts")]
    for column in zip(*one, strict=True):
        assert len(set(column)) > 2490  # no shard repeats another's
    torch.manual_seed(4)
    build(Drawn(), tmp_path / "other")
    assert not {first for first, *_ in stored(tmp_path / "other")} & {first for first, *_ in one}


def test_a_build_leaves_the_random_state_of_its_process_alone(tmp_path: Path) -> None:
    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index]

    before = states()
    threads = torch.get_num_threads()
    build(Drawn(), tmp_path / "out")
    assert (states(), torch.get_num_threads()) == (before, threads)
    with pytest.raises(TypeError):
        build([{1}], tmp_path / "failed")
    assert states() == before


def test_workers_compute_in_one_thread(tmp_path: Path) -> None:
    build(Drawn(), tmp_path / "out", num_proc=2)
    assert {sample[3] for sample in stored(tmp_path / "out")} == {1}


def test_a_folder_is_shuffled_with_its_labels(tmp_path: Path) -> None:
    files = write_folder(tmp_path / "images", {"a": 20, "b": 20})
    build(tmp_path / "images", tmp_path / "out", shuffle_seed=0)
    labels = [label for _, label in stored(tmp_path / "out")]
    assert sorted(labels) == [0] * 20 + [1] * 20 != labels
    pairs = {(data, int(name[0] == "b")) for name, data in files.items()}
    assert set(stored(tmp_path / "out")) == pairs
