"""What is seen at the loader's queues, with real loaders."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt.measurements.loading import QueueTimes
from lightning_gpuopt.timeline.queues import QueueProbe
from tests.helpers import wait_for


class Data(Dataset[Any]):
    """Samples that come at once, but for those that wait until they are allowed."""

    def __init__(self, held: Sequence[int] = ()) -> None:
        self.held = held
        self.allowed = multiprocessing.Semaphore(0)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.held:
            assert self.allowed.acquire(timeout=60)
        return torch.tensor(index)


def walk(
    iterator: Any, probe: QueueProbe, *, pause: Callable[[int], object], wait_s: Callable[[int], float]
) -> list[int]:
    """Take every batch as the loop would.

    Args:
        iterator: of a loader's batches, each a number.
        probe: looks on.
        pause: called between the probe's look and the fetch of a number.
        wait_s: how long the fetch of a number is said to have taken.
    """
    seen = [int(next(iterator))]
    probe.watch([iterator])
    while True:
        probe.before_fetch()
        pause(len(seen))
        try:
            seen.append(int(next(iterator)))
        except StopIteration:
            return seen
        probe.after_fetch(wait_s(seen[-1]))


def until_ready(iterator: Any, worker: int | None = None) -> None:
    """Wait until the workers have made all that they were asked for; but for one of them."""

    def asked_for() -> int:
        return sum(len(info) == 1 and info[0] != worker for info in iterator._task_info.values())

    wait_for(lambda: iterator._data_queue.qsize() >= asked_for())


def test_a_loop_that_is_slower_than_its_loader_finds_full_queues() -> None:
    probe = QueueProbe()
    # one worker: of two, a batch may come before its turn, and lie elsewhere than in the queue
    iterator = iter(DataLoader(Data(), batch_size=None, num_workers=1, prefetch_factor=4))
    seen = [int(next(iterator))]
    probe.watch([iterator])
    for _ in range(23):
        until_ready(iterator)
        probe.before_fetch()
        seen.append(int(next(iterator)))
        probe.after_fetch(0.0)
    assert seen == list(range(24))
    # four batches are ahead; three, two and one at the end
    times = probe.times()
    assert (times.fetches, times.empty, times.waits) == (23, 0, 0)
    assert times.ready / times.fetches == (20 * 4 + 3 + 2 + 1) / 23


def test_a_loop_that_is_faster_waits() -> None:
    probe, data = QueueProbe(), Data(held=range(24))
    data.allowed.release()
    iterator = iter(DataLoader(data, batch_size=None, num_workers=1))
    assert walk(iterator, probe, pause=lambda _: data.allowed.release(), wait_s=lambda _: 0.02) == list(range(24))
    assert probe.times() == QueueTimes(fetches=24, empty=24, waits=23, wait_s=pytest.approx(0.46))


@pytest.mark.parametrize(("workers", "prefetch"), [(2, 2), (2, 4), (4, 2)])
def test_one_late_batch_that_holds_up_the_rest_is_known_as_such(workers: int, prefetch: int) -> None:
    probe, data = QueueProbe(), Data(held=[12])
    iterator = iter(DataLoader(data, batch_size=None, num_workers=workers, prefetch_factor=prefetch))

    def pause(number: int) -> None:
        if number == 12:  # while it is late, all that the other workers were asked for gets ready
            until_ready(iterator, worker=iterator._task_info[12][0])
            data.allowed.release()

    assert walk(iterator, probe, pause=pause, wait_s=lambda number: 0.3 if number == 12 else 0.0) == list(range(24))
    times = probe.times()
    assert (times.waits, times.wait_s, times.late_wait_s) == (1, 0.3, 0.3)


@pytest.mark.usefixtures("quick_checks")
def test_of_two_loaders_the_one_that_has_all_ready_hides_nothing_of_the_other() -> None:
    data = Data(held=range(24))
    slow = iter(DataLoader(data, batch_size=None, num_workers=1))
    fast = iter(DataLoader(Data(), batch_size=None, num_workers=2))
    until_ready(fast)
    probe = QueueProbe()
    probe.watch([fast, slow])
    probe.before_fetch()
    data.allowed.release()
    assert (int(next(fast)), int(next(slow))) == (0, 0)
    probe.after_fetch(0.3)
    times = probe.times()
    assert (times.fetches, times.ready, times.empty) == (1, 0, 1)
    assert (times.waits, times.wait_s, times.late_wait_s) == (1, 0.3, 0.0)


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
    iterator = Pinning()
    probe.watch([iterator])
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
    assert times.ready / times.fetches == pytest.approx(sum(sizes) / len(sizes), rel=0.1)
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
    iterator = Pinning()
    probe.watch([iterator])
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
