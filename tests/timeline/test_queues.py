"""What is seen at the loader's queues, with real loaders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt._measured import QueueTimes
from lightning_gpuopt.timeline.queues import QueueProbe


class Data(Dataset[Any]):
    def __init__(self, sleep_s: float = 0.0, late: int = -1, late_s: float = 0.0) -> None:
        self.sleep_s, self.late, self.late_s = sleep_s, late, late_s

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.late_s if index == self.late else self.sleep_s)
        return torch.tensor(index)


def walk(iterator: Any, probe: QueueProbe, pause: Any = None) -> list[int]:
    """Take every batch as the loop would; ``pause`` comes before each fetch."""
    seen = [int(next(iterator))]
    probe.watch([iterator])
    while True:
        if pause is not None:
            pause(iterator)
        probe.before_fetch()
        begin = time.perf_counter()
        try:
            seen.append(int(next(iterator)))
        except StopIteration:
            return seen
        probe.after_fetch(time.perf_counter() - begin)


def until_full(iterator: Any) -> None:
    """Wait until the workers have made all that they were asked for."""
    under_way = len(iterator._task_info)
    deadline = time.monotonic() + 30
    while iterator._data_queue.qsize() + sum(len(info) == 2 for info in iterator._task_info.values()) < under_way:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def test_a_loop_that_is_slower_than_its_loader_finds_full_queues() -> None:
    probe = QueueProbe()
    iterator = iter(DataLoader(Data(), batch_size=None, num_workers=2))
    assert walk(iterator, probe, pause=until_full) == list(range(24))
    times = probe.times()
    assert times.fetches == 24
    assert times.empty <= 1  # the one that ends the epoch
    assert times.mean_ready is not None
    assert times.mean_ready > 2


def test_a_loop_that_is_faster_waits() -> None:
    probe = QueueProbe()
    walk(iter(DataLoader(Data(sleep_s=0.01), batch_size=None, num_workers=1)), probe)
    times = probe.times()
    assert times.waits >= 20
    assert times.wait_s > 0.15
    assert times.late_wait_s == 0.0
    assert times.unpinned_wait_s == 0.0


@pytest.mark.parametrize(("workers", "prefetch"), [(2, 2), (2, 4), (4, 2)])
def test_one_late_batch_that_holds_up_the_rest_is_known_as_such(workers: int, prefetch: int) -> None:
    probe = QueueProbe()
    # while the twelfth is late, all that the other workers were asked for gets ready
    loader = DataLoader(Data(late=12, late_s=0.3), batch_size=None, num_workers=workers, prefetch_factor=prefetch)
    iterator = iter(loader)
    assert walk(iterator, probe) == list(range(24))
    times = probe.times()
    assert times.late_wait_s > 0.2
    assert times.late_wait_s > 0.8 * times.wait_s


def test_results_that_wait_to_be_pinned_are_known_as_such() -> None:
    class Queue:
        def __init__(self, size: int) -> None:
            self.size = size

        def qsize(self) -> int:
            return self.size

    class Pinning:
        _data_queue, _worker_result_queue, _task_info = Queue(0), Queue(3), {1: (0,), 2: (1,)}
        _rcvd_idx = 1

    probe = QueueProbe()
    probe.watch([Pinning()])
    probe.before_fetch()
    probe.after_fetch(0.02)
    assert probe.times() == QueueTimes(fetches=1, empty=1, waits=1, wait_s=0.02, unpinned_wait_s=0.02)


class Filling:
    """An iterator whose queue is as full as the test says, and which counts how often that is asked."""

    _task_info: ClassVar[dict[int, Any]] = {}
    _rcvd_idx = 0

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.fetch = self.asked = 0
        self._data_queue = self._worker_result_queue = self

    def qsize(self) -> int:
        self.asked += 1
        return self.sizes[self.fetch % len(self.sizes)]


def fetched(iterator: Filling, fetches: int, waits: Callable[[int], float]) -> QueueTimes:
    probe = QueueProbe()
    probe.watch([iterator])
    iterator.asked = 0
    for iterator.fetch in range(fetches):
        probe.before_fetch()
        probe.after_fetch(waits(iterator.fetch))
    return probe.times()


@pytest.mark.parametrize("sizes", [[3], [0, 6], [0, 0, 0, 8], [1, 2, 3, 4, 5, 6, 7]], ids=str)
def test_where_hardly_any_fetch_waits_some_stand_for_the_others(sizes: list[int]) -> None:
    iterator = Filling(sizes)
    times = fetched(iterator, 8000, lambda fetch: 0.01 if fetch % 100 == 0 else 0.0)
    assert 8000 - 6 <= times.fetches <= 8000
    assert times.mean_ready == pytest.approx(sum(sizes) / len(sizes), rel=0.1)
    assert times.empty / times.fetches == pytest.approx(sizes.count(0) / len(sizes), rel=0.1)
    assert (times.waits, times.wait_s) == (80, pytest.approx(0.8))
    assert iterator.asked < 8000 / 3


def test_where_many_fetches_wait_each_is_looked_at() -> None:
    iterator = Filling([0, 2])
    times = fetched(iterator, 800, lambda fetch: 0.01 if fetch % 4 == 0 else 0.0)
    assert (times.fetches, times.ready, times.empty, times.waits) == (800, 800, 400, 200)


def test_a_wait_without_a_look_is_not_said_to_be_for_pinning() -> None:
    class Queue:
        asked = 0

        def __init__(self, size: int) -> None:
            self.size = size

        def qsize(self) -> int:
            Queue.asked += 1
            return self.size

    class Pinning:
        _data_queue, _worker_result_queue = Queue(0), Queue(3)
        _task_info: ClassVar[dict[int, Any]] = {}
        _rcvd_idx = 0

    probe = QueueProbe()
    probe.watch([Pinning()])
    for _ in range(200):
        asked = Queue.asked
        probe.before_fetch()
        if Queue.asked == asked:
            probe.after_fetch(2.0)
            break
        probe.after_fetch(0.0)
    times = probe.times()
    assert (times.waits, times.wait_s, times.unpinned_wait_s) == (1, 2.0, 0.0)


@pytest.mark.parametrize(
    "iterator", [iter([1]), iter(DataLoader(Data(), batch_size=None)), object()], ids=["list", "no-workers", "object"]
)
def test_iterators_of_another_kind_are_left_out(iterator: Any) -> None:
    probe = QueueProbe()
    assert probe.watch([iterator]) == []
    probe.before_fetch()
    probe.after_fetch(1.0)
    assert probe.times() == QueueTimes()


def test_a_queue_without_a_size_is_left_out() -> None:
    class NoSize:
        def qsize(self) -> int:
            raise NotImplementedError

    class Mac:
        _data_queue = _worker_result_queue = NoSize()

        def __init__(self) -> None:
            self._task_info: dict[int, Any] = {}
            self._rcvd_idx = 0

    assert QueueProbe().watch([Mac()]) == []
