"""What is timed inside workers: right, out of the way, and never a change to a batch."""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import pickle
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import sharedctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lightning_gpuopt.measurements.loading import WorkerTimes
from lightning_gpuopt.timeline.worker_clock import TimedCollate, WorkerClock, _bin_of, nbytes_of, watch_workers
from lightning_gpuopt.tuning.segments import SegmentedIterator

BATCHES = 20
SLEEP_S = 0.004
SPIN_S = 0.002


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Data(Dataset[Any]):
    def __len__(self) -> int:
        return BATCHES * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLEEP_S / 4)
        spin(SPIN_S / 4)
        return torch.full((16,), float(index))


class Batched(Data):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        data = Data()
        return (data[index] for index in range(len(data)))


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.003)
    return torch.stack(samples)


def measured(loader: DataLoader[Any]) -> tuple[WorkerTimes, list[torch.Tensor]]:
    watched = watch_workers(loader)
    assert watched is not None
    clock, undo = watched
    batches = list(loader)
    undo()
    return clock.times(), batches


@pytest.mark.parametrize(
    ("workers", "method"),
    [
        (0, None),
        (2, "fork"),
        pytest.param(2, "spawn", marks=pytest.mark.matrix),
        pytest.param(2, "forkserver", marks=pytest.mark.matrix),
    ],
)
def test_dataset_and_collate_are_told_apart_in_wall_and_cpu_time(workers: int, method: str | None) -> None:
    loader = DataLoader(
        Data(), batch_size=4, num_workers=workers, collate_fn=slow_collate, multiprocessing_context=method
    )
    times, batches = measured(loader)
    assert times.batches == BATCHES - max(workers, 1)  # the first of each worker finds the fetcher
    # spinning takes at least as much CPU as asked for, and what sleeps takes none, however busy the machine is
    assert times.data_cpu_s / times.batches >= SPIN_S
    assert (times.data_wall_s - times.data_cpu_s) / times.batches >= SLEEP_S
    assert (times.collate_wall_s - times.collate_cpu_s) / times.batches >= 0.003
    assert times.batch_bytes == 4 * 16 * 4
    assert loader.collate_fn is slow_collate
    assert torch.equal(torch.cat(batches)[:, 0], torch.arange(BATCHES * 4, dtype=torch.float32))


@pytest.mark.parametrize("data", [Batched(), Stream()], ids=["getitems", "iterable"])
def test_other_ways_into_the_data_are_timed_too(data: Any) -> None:
    times, _ = measured(DataLoader(data, batch_size=4, num_workers=1))
    assert times.batches == BATCHES - 1
    assert times.data_wall_s / times.batches >= SLEEP_S + SPIN_S


def test_single_samples_without_batching_are_timed() -> None:
    times, samples = measured(DataLoader(Data(), batch_size=None))
    assert (times.batches, len(samples)) == (BATCHES * 4 - 1, BATCHES * 4)
    assert times.data_wall_s / times.batches >= (SLEEP_S + SPIN_S) / 4


@pytest.mark.parametrize("segmented", [False, True])
def test_persistent_workers_of_an_earlier_fit_are_still_heard(segmented: bool) -> None:
    loader = DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=True)
    if segmented:
        made: Any = partial(SegmentedIterator, loader, lambda make: make(), own_workers=1, depth=2)
        vars(loader)["_get_iterator"] = made
    clock, undo = watch_workers(loader) or pytest.fail("not watched")
    list(loader)
    undo()
    before = clock.times().batches
    again, undo_again = watch_workers(loader) or pytest.fail("not watched")
    assert again is clock
    list(loader)
    undo_again()
    assert clock.times().batches > before
    assert loader.collate_fn is default_collate


def test_workers_that_started_without_us_cannot_be_heard() -> None:
    loader = DataLoader(Data(), batch_size=4, num_workers=1, persistent_workers=True)
    iter(loader)
    assert watch_workers(loader) is None
    assert loader.collate_fn is default_collate


@pytest.mark.parametrize("loader", [range(3), [1, 2], iter([])], ids=["range", "list", "iterator"])
def test_what_has_no_collate_function_is_left_alone(loader: Any) -> None:
    assert watch_workers(loader) is None


def test_a_collate_function_that_does_not_pickle_works_under_fork() -> None:
    loader = DataLoader(Data(), batch_size=4, num_workers=1, collate_fn=lambda samples: torch.stack(samples))
    times, batches = measured(loader)
    assert (times.batches, len(batches)) == (BATCHES - 1, BATCHES)


class Broken(Data):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 30:
            raise KeyError("sample 30 is broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_data_arrives_as_it_was(workers: int) -> None:
    loader = DataLoader(Broken(), batch_size=4, num_workers=workers)
    watch_workers(loader)
    with pytest.raises(KeyError, match="sample 30 is broken"):
        list(loader)


def test_random_numbers_in_workers_are_as_without_it() -> None:
    class Noise(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1) + np.random.rand()

    def drawn(watch: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        loader = DataLoader(Noise(), batch_size=4, num_workers=2)
        if watch:
            watch_workers(loader)
        return list(loader)

    assert all(torch.equal(a, b) for a, b in zip(drawn(False), drawn(True), strict=True))


def test_a_copy_for_anything_but_a_worker_notes_nothing() -> None:
    timed = TimedCollate(default_collate)
    for twin in (pickle.loads(pickle.dumps(timed)), copy.deepcopy(timed)):
        assert torch.equal(twin([torch.ones(1)]), torch.ones(1, 1))
    assert timed.gpuopt_clock is not None
    assert timed.gpuopt_clock.times() == WorkerTimes()


def test_attributes_of_the_own_collate_function_show_through() -> None:
    class Collate:
        padding = 7

        def __call__(self, samples: Any) -> Any:
            return samples

    assert TimedCollate(Collate()).padding == 7


def test_attributes_set_on_it_are_set_on_the_own_collate_function() -> None:
    class Collate:
        length = 1

        def __call__(self, samples: Any) -> Any:
            return samples[0][: self.length]

    loader = DataLoader([torch.arange(4)] * 4, batch_size=1, collate_fn=Collate())
    _, undo = watch_workers(loader) or pytest.fail("not watched")
    lengths = []
    for batch in loader:
        lengths.append(len(batch))
        loader.collate_fn.length = len(lengths) + 1
    undo()
    assert lengths == [1, 2, 3, 4]
    assert loader.collate_fn.length == 5


def test_it_takes_whatever_arguments_its_caller_gives() -> None:
    clock = TimedCollate(lambda samples, pad, *, dtype: (samples, pad, dtype))
    assert clock([1], 0, dtype="x") == ([1], 0, "x")


def test_a_loader_that_is_no_dataloader_is_left_alone() -> None:
    class Own:
        collate_fn = staticmethod(default_collate)

    own = Own()
    assert watch_workers(own) is None
    assert own.collate_fn is default_collate


def test_a_loader_that_cannot_be_hashed_is_watched() -> None:
    class Odd(DataLoader[Any]):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    times, batches = measured(Odd(Data(), batch_size=4, num_workers=1, persistent_workers=True))
    assert (times.batches, len(batches)) == (BATCHES - 1, BATCHES)


def test_a_generator_behind_the_data_is_closed_with_its_last_use() -> None:
    closed = []

    class Generating(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            try:
                for number in range(100):
                    yield torch.tensor(number)
            finally:
                closed.append(True)

    loader = DataLoader(Generating(), batch_size=2)
    watch_workers(loader)
    gc.disable()
    try:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        del iterator
        assert closed == [True]
    finally:
        gc.enable()


def test_a_worker_says_what_it_does() -> None:
    clock = WorkerClock()
    assert clock.doing(0) == "has made no batch yet"
    assert clock.doing(10_000) == "is not monitored"
    loader = DataLoader(Data(), batch_size=4, num_workers=1)
    watched, undo = watch_workers(loader) or pytest.fail("not watched")
    list(loader)
    undo()
    assert watched.doing(0).startswith("waits for work for ")


def test_workers_forked_from_a_process_that_loaded_itself_each_have_their_row() -> None:
    loader = DataLoader(Data(), batch_size=4, multiprocessing_context=None)
    clock, undo = watch_workers(loader) or pytest.fail("not watched")
    list(loader)
    loader.num_workers, loader.multiprocessing_context, loader.prefetch_factor = 2, "fork", 2
    list(loader)
    undo()
    assert clock.doing(1).startswith("waits for work for ")
    assert clock.times().batches == BATCHES - 1 + BATCHES - 2


class FakeTime:
    """Clocks that the dataset and the collate function move: nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 1
        self.cpu_readings = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.wall)
        monkeypatch.setattr(time, "thread_time_ns", self.read_cpu)

    def read_cpu(self) -> int:
        self.cpu_readings += 1
        return self.cpu

    def spend(self, wall: int, cpu: int) -> None:
        self.wall += wall
        self.cpu += cpu


def timed_in_process(fake: FakeTime, batches: int, costs: Any) -> WorkerTimes:
    """Batches of one sample each; ``costs(number)`` is ((wall, cpu) of the data, (wall, cpu) of the collate)."""

    class Made(Dataset[Any]):
        def __len__(self) -> int:
            return batches

        def __getitem__(self, number: int) -> int:
            fake.spend(*costs(number)[0])
            return number

    def collate(samples: list[int]) -> list[int]:
        fake.spend(*costs(samples[0])[1])
        return samples

    loader = DataLoader(Made(), batch_size=1, collate_fn=collate)
    clock, _ = watch_workers(loader) or pytest.fail("not watched")
    assert len(list(loader)) == batches
    return clock.times()


def test_of_fast_batches_the_cpu_clock_is_read_now_and_then_and_reckoned_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeTime(monkeypatch)
    times = timed_in_process(fake, 1001, lambda number: ((100_000, 25_000), (40_000, 30_000)))
    assert times.batches == 1000
    assert times.data_wall_s == pytest.approx(0.1)
    assert times.data_cpu_s == pytest.approx(0.025)
    assert times.collate_wall_s == pytest.approx(0.04)
    assert times.collate_cpu_s == pytest.approx(0.03)
    assert times.squares_s2 == pytest.approx(1000 * 140e-6**2)
    assert times.sized > 8
    assert 3 * 64 < fake.cpu_readings < 3 * 400


def test_of_slow_batches_the_cpu_clock_is_read_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    times = timed_in_process(fake, 201, lambda number: ((2_000_000, 500_000), (0, 0)))
    assert fake.cpu_readings == 3 * 200
    assert times.data_cpu_s == pytest.approx(0.1)


@pytest.mark.parametrize("rhythm", [2, 4, 7, 8])
def test_no_rhythm_of_the_data_falls_in_with_ours(monkeypatch: pytest.MonkeyPatch, rhythm: int) -> None:
    fake = FakeTime(monkeypatch)
    dear, cheap = ((200_000, 200_000), (0, 0)), ((100_000, 10_000), (0, 0))
    times = timed_in_process(fake, 8001, lambda number: cheap if number % rhythm else dear)
    true_s = sum(200e-6 if number % rhythm == 0 else 10e-6 for number in range(1, 8001))
    assert times.data_cpu_s == pytest.approx(true_s, rel=0.1)


class SharedTime:
    """A wall clock that the training process and its workers share: nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_ns = sharedctypes.RawValue("q", 1)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.wall_ns.value)


class Paced(IterableDataset[Any]):
    """Samples that take a millisecond each on a shared clock."""

    def __init__(self, clock: SharedTime) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(BATCHES * 4):
            self.clock.wall_ns.value += 1_000_000
            yield torch.tensor(number)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_time_between_epochs_is_nobodys(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    fake = SharedTime(monkeypatch)
    loader = DataLoader(Paced(fake), batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    clock, _ = watch_workers(loader) or pytest.fail("not watched")
    for _ in range(3):
        assert len(list(loader)) == BATCHES
        fake.wall_ns.value += 10**12
    times = clock.times()
    assert times.batches >= 3 * (BATCHES - 1)
    assert times.data_wall_s == pytest.approx(times.batches * 0.004)


def test_one_slow_batch_among_fast_ones_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    times = timed_in_process(fake, 1001, lambda number: ((10**8 if number == 500 else 100_000, 50_000), (0, 0)))
    assert times.data_wall_s == pytest.approx(0.1 + 999 * 1e-4)
    assert times.squares_s2 == pytest.approx(0.1**2 + 999 * 1e-8)
    assert times.took == {int(4 * math.log2(100_000)): 999, int(4 * math.log2(10**8)): 1}


def test_no_process_is_left() -> None:
    measured(DataLoader(Data(), batch_size=4, num_workers=2))
    assert multiprocessing.active_children() == []


def test_unevenness_is_variance_over_squared_mean() -> None:
    # 9 batches of 1 s and one of 11 s: mean 2, variance 9
    times = WorkerTimes(batches=10, data_wall_s=20.0, squares_s2=9 + 121)
    assert times.unevenness == pytest.approx(9 / 4)
    assert WorkerTimes(batches=4, data_wall_s=8.0, squares_s2=16.0).unevenness == 0.0
    assert WorkerTimes().unevenness is None


def test_figures_add_and_subtract() -> None:
    a = WorkerTimes(1, 2.0, 1.0, 0.5, 0.25, 100, 1, 6.25, {124: 1})
    b = WorkerTimes(3, 5.0, 2.0, 1.0, 0.5, 300, 2, 36.0, {124: 2, 127: 1})
    assert a + b - a == b
    assert (b.busy_s, b.cpu_s, b.batch_bytes) == (6.0, 2.5, 150.0)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(2, 3), 24),
        (np.zeros(4, dtype=np.int16), 8),
        ({"x": torch.zeros(2), "y": [b"abc", "de"]}, 13),
        ([torch.zeros(1)] * 1000, 4000),
        ((torch.zeros(1), None, 3), 4),
        ([], 0),
    ],
    ids=["tensor", "array", "nested", "long", "others", "empty"],
)
def test_bytes_of_a_batch(batch: Any, size: int) -> None:
    assert nbytes_of(batch) == size


def test_a_batchs_bin_is_four_times_the_binary_logarithm_of_its_nanoseconds() -> None:
    values = [1, 2, 3, 4, 5, 6, 7, 1_000, 1_189, 1_190, 1_414, 1_415, 123_456_789, 2**39, 2**40 - 1]
    assert [_bin_of(value) for value in values] == [int(4 * math.log2(value)) for value in values]
