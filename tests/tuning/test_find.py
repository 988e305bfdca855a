"""``find_num_workers`` with real loaders and real workers."""

from __future__ import annotations

import inspect
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from lightning_gpuopt.timeline.worker_clock import watch_workers
from lightning_gpuopt.tuning import find, trial
from lightning_gpuopt.tuning.find import find_num_workers
from lightning_gpuopt.tuning.search_result import Measured
from lightning_gpuopt.tuning.worker_limits import Room
from tests.helpers import Clock
from tests.loaders.programs import nothing_is_left
from tests.tuning.datasets import (
    Broken,
    Interrupting,
    Killed,
    Numbers,
    Stream,
    Stuck,
    Unpicklable,
    fail_in_worker,
)
from tests.tuning.test_search import World

QUICK: dict[str, Any] = {"max_num_workers": 2, "step_time_s": 0.01}


@pytest.fixture(scope="module")
def warm() -> None:
    """Python's own helpers are there, and stay: the resource tracker, and a first block of shared memory."""
    resource_tracker.ensure_running()
    assert find_num_workers(DataLoader(Numbers(), 4), max_seconds=60, max_num_workers=1, step_time_s=0.01).trials


@pytest.fixture(autouse=True)
def _nothing_is_left(warm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trial, "_MIN_S", 0.02)  # how exact the figures are does not matter here
    with nothing_is_left(collect=True):
        yield


def test_the_result_is_what_to_give_a_dataloader() -> None:
    result = find_num_workers(DataLoader(Numbers(), 4), step_time_s=0.01, max_num_workers=1)
    assert result.num_workers == 1
    assert [trial.num_workers for trial in result.trials] == [1]
    assert result.settings == {
        "num_workers": 1,
        "prefetch_factor": result.prefetch_factor,
        "pin_memory": False,
        "persistent_workers": True,
    }
    assert (result.prefetch_factor or 0) >= 2  # more where a batch was late
    assert result.predicted_batches_per_s == result.trials[0].batches_per_s
    DataLoader(Numbers(), 4, **result.settings)


class CountingSampler(RandomSampler):
    asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return super().__iter__()


def test_the_loader_its_parts_and_the_random_state_are_as_before() -> None:
    dataset = Numbers()
    sampler = CountingSampler(dataset, generator=torch.Generator().manual_seed(7))
    loader = DataLoader(dataset, 4, sampler=sampler, generator=torch.Generator().manual_seed(8), timeout=30)

    def state() -> list[Any]:
        generators = [torch.get_rng_state(), sampler.generator.get_state(), loader.generator.get_state()]
        numpy_state = np.random.get_state()
        return [
            *(bytes(each.numpy()) for each in generators),
            random.getstate(),
            numpy_state[1].tobytes(),  # type: ignore[index, union-attr]
            numpy_state[2:],
            vars(loader).copy(),
        ]

    before = state()
    find_num_workers(loader, **QUICK)
    assert state() == before
    assert (dataset.read, sampler.asked) == ([], 0)


def test_the_loaders_own_parts_do_the_work(tmp_path: Path) -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        (tmp_path / f"collated {len(samples)}").touch()
        return torch.stack(samples)

    def begin(worker_id: int) -> None:
        (tmp_path / f"begun {worker_id}").touch()

    loader = DataLoader(
        Numbers(), 5, collate_fn=collate, worker_init_fn=begin, multiprocessing_context="fork", num_workers=1,
        prefetch_factor=3, **({"in_order": False} if "in_order" in inspect.signature(DataLoader).parameters else {}),
    )  # fmt: skip
    watched = watch_workers(loader)
    assert watched is not None
    clock, undo = watched
    result = find_num_workers(loader, step_time_s=0.01, max_num_workers=1)
    undo()
    assert {file.name for file in tmp_path.iterdir()} == {"collated 5", "begun 0"}
    assert (result.prefetch_factor or 0) >= 3
    assert clock.times().batches == 0  # another clock's figures are its own
    assert loader.collate_fn is collate


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(), batch_size=None),
        DataLoader(Numbers(), batch_size=None, sampler=BatchSampler(range(1000), 4, False)),  # type: ignore[arg-type]
        DataLoader(Numbers(), batch_sampler=BatchSampler(WeightedRandomSampler([1.0] * 1000, 1000), 4, False)),
        DataLoader(Numbers(length=3), 8),
        DataLoader(Numbers(), 4, sampler=[5, 6, 7], drop_last=True),
    ],
    ids=["unbatched", "lists", "batch sampler", "tiny", "list as sampler"],
)
def test_loaders_of_every_kind(loader: DataLoader[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if loader.batch_size is None and isinstance(loader.sampler, BatchSampler):
        monkeypatch.setattr(Numbers, "__getitem__", lambda self, indices: torch.tensor(indices, dtype=torch.float32))
    found = find_num_workers(loader, max_num_workers=1, step_time_s=0.01)
    assert found.num_workers in {trial.num_workers for trial in found.trials}


@pytest.mark.usefixtures("quick_checks")
@pytest.mark.parametrize(
    ("loader", "error", "text"),
    [
        (DataLoader(Broken(), 4), KeyError, "no sample"),
        (DataLoader(Killed(), 4), RuntimeError, "DataLoader worker"),
        (DataLoader(Numbers(), 4, worker_init_fn=fail_in_worker), LookupError, "worker 0 cannot begin"),
        (DataLoader(Interrupting(), 4), KeyboardInterrupt, None),
        (DataLoader(Unpicklable(), 4, multiprocessing_context="spawn", num_workers=1), ValueError, "'spawn'.*Unpickl"),
        (DataLoader(Stuck(True), 4, timeout=0.1, num_workers=1), RuntimeError, "timed out after 0.1 seconds"),
    ],
    ids=["broken", "killed", "worker_init_fn", "ctrl-c", "unpicklable", "the loader's own timeout"],
)
def test_what_goes_wrong_comes_out_as_in_training(
    loader: DataLoader[Any], error: type[BaseException], text: str | None
) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=text) as raised:
        find_num_workers(loader, **QUICK)
    assert raised.traceback  # which holds the iterator
    assert set(multiprocessing.active_children()) <= before


def test_a_dataset_that_gives_nothing_takes_no_longer_than_the_budget() -> None:
    result = find_num_workers(DataLoader(Stuck(from_the_start=True), 4), max_seconds=0.3)
    assert (result.num_workers, result.trials, result.limited_by) == (1, (), "time")
    assert result.predicted_batches_per_s is None


@pytest.mark.timed
def test_a_worker_that_gets_stuck_ends_the_trial_and_what_was_seen_counts() -> None:
    result = find_num_workers(DataLoader(Stuck(), 4), max_seconds=2, max_num_workers=1)
    assert (result.num_workers, len(result.trials)) == (1, 1)


@pytest.mark.parametrize(
    ("loader", "arguments", "complaint"),
    [
        ([1, 2], {}, r"dataloader: expected a torch.utils.data.DataLoader, got \[1, 2\]"),
        (DataLoader(Stream(10)), {}, "dataloader: expected a map-style dataset, or iterable=True"),
        (DataLoader(Numbers(length=0), sampler=[0]), {}, "a dataset with at least one sample"),
        (DataLoader(iter([1]), sampler=[0]), {}, "a dataset with __len__"),  # type: ignore[arg-type]
        (DataLoader(Numbers()), {"step_time_s": -1}, "step_time_s: expected seconds, at least 0, got -1"),
        (DataLoader(Numbers()), {"max_num_workers": 0}, "max_num_workers: expected a number of workers, at least 1"),
        (DataLoader(Numbers()), {"max_seconds": 0}, "max_seconds: expected seconds above 0, got 0"),
        (DataLoader(Numbers()), {"tolerance": 0.6}, "tolerance: expected a share above 0 and at most 0.5, got 0.6"),
        (DataLoader(Numbers()), {"local_world_size": 0}, "local_world_size: expected a number of ranks, at least 1"),
        (DataLoader(Numbers()), {"iterable": 1}, "iterable: expected True or False, got 1"),
    ],
)
def test_wrong_arguments_are_named(loader: Any, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        find_num_workers(loader, **arguments)


@pytest.mark.parametrize("length", [3, 100_000])
def test_an_iterable_dataset_is_tried_when_asked_for(length: int) -> None:
    result = find_num_workers(DataLoader(Stream(length), 4), iterable=True, max_num_workers=1, step_time_s=0.01)
    assert (result.num_workers, [trial.num_workers for trial in result.trials]) == (1, [1])


def test_without_shared_memory_there_are_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refused)
    result = find_num_workers(DataLoader(Numbers(), 4), **QUICK)
    assert (result.num_workers, result.trials, result.limited_by) == (0, (), "shared_memory")
    DataLoader(Numbers(), 4, **result.settings)


def test_memory_and_half_a_core_limit_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "room", lambda: Room(0.5, memory_bytes=1, shared_memory_bytes=1 << 30))
    loader = DataLoader(Numbers(), 4, sampler=range(1000))
    result = find_num_workers(loader)
    assert (result.num_workers, [trial.num_workers for trial in result.trials]) == (1, [1])
    monkeypatch.setattr(find, "room", lambda: Room(0.5, 1 << 40, shared_memory_bytes=(3 * 2**20)))
    large = DataLoader(Numbers(size=1 << 18), 1)
    result = find_num_workers(large, local_world_size=1)
    assert (result.num_workers, result.prefetch_factor) == (1, 1)  # a batch of 1 MiB each


@pytest.mark.parametrize(("trial_s", "tried"), [(1.0, [1, 16, 5, 3, 2, 3]), (1.5, [1, 16, 5, 3, 2])])
def test_late_in_the_budget_nothing_is_tried_again_only_to_be_surer(
    trial_s: float, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, world, seen = Clock(), World(0.02, at_most_per_s=100), []

    def trial(loader: Any, sampling: Any, num_workers: int, **_: Any) -> Measured:
        seen.append(num_workers)
        clock.now_s += trial_s
        return world.try_(num_workers)

    monkeypatch.setattr(find, "run_trial", trial)
    monkeypatch.setattr(find, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(find, "room", lambda: Room(2.0, 1 << 40, 1 << 40))
    find_num_workers(DataLoader(Numbers(), 4), max_seconds=10.0)
    assert seen == tried
