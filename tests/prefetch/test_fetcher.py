"""When LookAheadFetcher fetches and stages, with a loader that is ready when a test says so."""

from __future__ import annotations

import inspect
import queue
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import WorkerBatches, has_workers
from lightning_gpuopt.prefetch.fetcher import LookAheadFetcher, Ready


class Iterator:
    """As torch's iterator over workers: batches come into a queue, and for each that goes one more is asked for."""

    def __init__(self, batches: int | None, *, dataset_kind: int = 0, asked_ahead: int = 4) -> None:
        self.batches = batches
        self._dataset_kind = dataset_kind
        self._data_queue: queue.Queue[Any] = queue.Queue()
        self._task_info: dict[int, Any] = {}
        self._persistent_workers = False
        self._rcvd_idx = self._send_idx = self._tasks_outstanding = 0
        self.asked: list[int] = []
        for _ in range(asked_ahead):
            self._try_put_index()

    def arrive(self, index: int) -> None:
        self._data_queue.put((index, f"batch {index}"))

    def _try_put_index(self) -> None:
        if self._send_idx == self.batches:
            return
        self._task_info[self._send_idx] = (0,)
        self.asked.append(self._send_idx)
        self._send_idx += 1
        self._tasks_outstanding += 1

    def _next_data(self) -> Any:
        if self._rcvd_idx >= self._send_idx:
            raise StopIteration
        while len(self._task_info[self._rcvd_idx]) < 2:
            index, data = self._data_queue.get_nowait()  # a fetch that would wait fails the test
            self._task_info[index] += (data,)
        data = self._task_info.pop(self._rcvd_idx)[1]
        self._rcvd_idx += 1
        self._try_put_index()
        if isinstance(data, Exception):
            raise data
        return data

    __next__ = _next_data


class Stock:
    """As ``lightning_loops.StockFetcher`` over one loader."""

    next_restarts_a_loader = False
    is_stateful = has_one_loader = True

    def __init__(self, iterator: Any, length: int | None, loader: Any = None) -> None:
        self.iterators, self.loaders, self.length = [iterator], [loader], length
        self.fetcher = SimpleNamespace(
            done=False, fetched=0, _start_profiler=lambda: None, _stop_profiler=lambda: None, teardown=lambda: None
        )
        self.number = 0

    def take_batches(self) -> list[Any]:
        return []

    def states(self) -> Any:
        return [f"state {self.number}"]

    def __next__(self) -> Any:
        batch = next(self.iterators[0])
        self.number += 1
        return batch, self.number - 1, 0


class Stage:
    """Notes what is staged, handed out and dropped."""

    def __init__(self) -> None:
        self.staged: list[Any] = []
        self.handed_out: list[Any] = []
        self.dropped: list[Any] = []
        self.there: list[Any] = []
        self.looked_at: list[Any] = []

    def is_there(self, batch: Any, loaders: list[Any]) -> bool:
        self.looked_at.append((batch, loaders))
        return batch in self.there

    def stage(self, batch: Any, dataloader_idx: int) -> Ready:
        self.staged.append(batch)
        return Ready(batch, None)

    def advance(self, ready: Ready) -> bool:
        return True

    def drop(self, ready: Ready) -> None:
        self.dropped.append(ready.converted)

    def hand_out(self, batch: Any, ready: Ready | None) -> None:
        self.handed_out.append(batch)


class Rig:
    def __init__(self, length: int | None = 6, depth: int = 1, **iterator: Any) -> None:
        self.iterator = Iterator(length, **iterator)
        self.stage = Stage()
        self.last = 99
        self.fetcher = LookAheadFetcher(
            Stock(self.iterator, length),  # type: ignore[arg-type]
            depth,
            self.stage,  # type: ignore[arg-type]
            lambda number, step_done: self.fetcher.fetched + number <= self.last,
            lambda loaders: None,
        )

    def step(self) -> Any:
        return next(self.fetcher)[0]


def test_a_batch_that_is_there_is_staged_before_the_step() -> None:
    rig = Rig()
    rig.iterator.arrive(0)
    rig.iterator.arrive(1)
    assert rig.step() == "batch 0"
    assert rig.fetcher.look_ahead(step_done=False) is True
    assert rig.stage.staged == ["batch 0", "batch 1"]
    assert rig.stage.looked_at == [("batch 0", [None])]
    assert rig.fetcher.fetched == 1


def test_one_that_is_not_is_asked_for_again_and_waited_for_when_the_work_is_issued() -> None:
    rig = Rig()
    rig.iterator.arrive(0)
    rig.step()
    assert rig.fetcher.look_ahead(step_done=False) is False
    rig.iterator.arrive(2)  # another worker was faster
    assert rig.fetcher.look_ahead(step_done=False) is False
    assert rig.fetcher.look_ahead(step_done=True) is True
    with pytest.raises(queue.Empty):  # it has waited: here that is an error
        rig.step()


def test_workers_are_asked_for_more_when_the_turn_of_a_batch_has_come() -> None:
    rig = Rig()
    rig.iterator.arrive(0)
    rig.iterator.arrive(1)
    rig.step()
    assert rig.iterator.asked == [0, 1, 2, 3, 4]
    rig.fetcher.look_ahead(step_done=False)
    assert rig.iterator.asked == [0, 1, 2, 3, 4]
    rig.step()
    assert rig.iterator.asked == [0, 1, 2, 3, 4, 5]
    assert "_try_put_index" not in vars(rig.iterator)


def test_those_of_an_iterable_dataset_at_once() -> None:
    rig = Rig(dataset_kind=1)
    rig.iterator.arrive(0)
    rig.iterator.arrive(1)
    rig.step()
    rig.fetcher.look_ahead(step_done=False)
    assert rig.iterator.asked == [0, 1, 2, 3, 4, 5]


def test_nothing_is_taken_that_no_worker_was_asked_for() -> None:
    """It would look like the end of the loader."""
    rig = Rig(depth=3, asked_ahead=1)
    for index in range(3):
        rig.iterator.arrive(index)
    rig.step()
    assert rig.fetcher.look_ahead(step_done=True) is False
    assert rig.stage.staged == ["batch 0", "batch 1"]
    assert rig.step() == "batch 1"


def test_the_end_is_foreseen() -> None:
    rig = Rig(length=3, depth=2)
    for index in range(3):
        rig.iterator.arrive(index)
    rig.last = 2
    rig.step()
    assert rig.fetcher.look_ahead(step_done=True) is False
    assert rig.stage.staged == ["batch 0", "batch 1"]
    rig.last = 3
    rig.step()
    assert rig.fetcher.look_ahead(step_done=True) is True
    assert rig.fetcher.done is False
    rig.step()
    assert rig.fetcher.done is True
    with pytest.raises(StopIteration):
        rig.step()


def test_without_a_length_the_last_batch_is_known_by_the_fetch_after_it() -> None:
    rig = Rig(length=None)
    rig.iterator.batches = 3
    rig.iterator._send_idx = 0
    rig.iterator.asked.clear()
    rig.iterator._task_info.clear()
    for index in range(3):
        rig.iterator._try_put_index()
        rig.iterator.arrive(index)
    done = []
    for _ in range(3):
        rig.step()
        done.append(rig.fetcher.done)
        rig.fetcher.look_ahead(step_done=False)
    assert done == [False, False, True]
    assert rig.stage.staged == ["batch 0", "batch 1", "batch 2"]
    with pytest.raises(StopIteration):
        rig.step()


def test_what_the_dataset_raises_waits_for_its_turn() -> None:
    rig = Rig(depth=2)
    rig.iterator.arrive(0)
    rig.iterator._data_queue.put((1, OSError("disk error")))
    rig.step()
    assert rig.fetcher.look_ahead(step_done=True) is True
    assert rig.stage.staged == ["batch 0"]
    with pytest.raises(OSError, match="disk error"):
        rig.step()


def test_the_state_for_a_checkpoint_is_that_before_the_first_batch_ahead() -> None:
    rig = Rig(depth=2)
    for index in range(4):
        rig.iterator.arrive(index)
    rig.step()
    assert rig.fetcher.states is None
    rig.fetcher.look_ahead(step_done=False)
    assert rig.fetcher.states == ["state 1"]
    rig.step()
    assert rig.fetcher.states == ["state 2"]
    rig.fetcher.end_epoch()
    assert rig.fetcher.states == ["state 2"]
    assert rig.stage.dropped == ["batch 2"]


def test_when_it_has_to_stop_what_was_fetched_is_still_handed_out() -> None:
    rig = Rig(depth=2)
    for index in range(4):
        rig.iterator.arrive(index)
    rig.step()
    rig.fetcher.look_ahead(step_done=False)
    rig.fetcher.is_active = False
    assert rig.stage.dropped == []
    rig.fetcher.drop_staged()
    assert rig.stage.dropped == ["batch 1", "batch 2"]
    assert [rig.step() for _ in range(3)] == ["batch 1", "batch 2", "batch 3"]
    assert rig.stage.staged == ["batch 0", "batch 1", "batch 2"]
    assert rig.iterator.asked == [0, 1, 2, 3, 4, 5]


def test_without_a_pin_memory_thread_it_is_counted_whether_the_next_batch_must_be_there() -> None:
    iterator = Iterator(6)
    for index in range(4):
        iterator._task_info[index] = (index % 2,)  # two workers, two batches each
    arrived = [0]
    iterator._data_queue = SimpleNamespace(qsize=lambda: arrived[0])  # type: ignore[assignment]
    workers = WorkerBatches(iterator)
    ready = []
    for arrived[0] in range(5):
        ready.append(workers.is_next_ready)
    assert ready == [False, False, False, True, True]  # two may be the other worker's


def test_workers_that_live_on_over_an_iterable_dataset_are_asked_for_nothing_ahead() -> None:
    rig = Rig(dataset_kind=1)
    rig.iterator._persistent_workers = True
    rig.iterator.arrive(0)
    rig.iterator.arrive(1)
    rig.step()
    assert rig.fetcher.look_ahead(step_done=True) is False
    assert rig.stage.staged == ["batch 0"]


def test_an_iterator_of_another_kind_has_no_workers() -> None:
    assert has_workers(Iterator(3))
    assert not has_workers(iter([1]))


def test_batches_that_are_on_the_device_are_not_looked_ahead_of() -> None:
    rig = Rig()
    rig.stage.there = ["batch 0"]
    for number in range(6):
        rig.iterator.arrive(number)
    seen = []
    for _ in range(6):
        seen.append(rig.step())
        assert rig.fetcher.look_ahead(step_done=True) is True
        assert rig.fetcher.left_alone == "its batches are already on the device"
    assert seen == [f"batch {number}" for number in range(6)]
    assert (rig.stage.staged, rig.stage.handed_out) == ([], seen)
    assert rig.stage.looked_at == [("batch 0", [None])]


def test_new_iterators_are_looked_at_again() -> None:
    rig = Rig()
    rig.stage.there = ["batch 0"]
    rig.iterator.arrive(0)
    rig.step()
    other = Iterator(3)
    rig.fetcher._stock.iterators = [other]  # type: ignore[misc]
    other._data_queue.put((0, "another"))
    rig.step()
    assert rig.fetcher.left_alone is None
    assert [batch for batch, _ in rig.stage.looked_at] == ["batch 0", "another"]
    assert rig.stage.staged == ["another"]


@pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="this torch's DataLoader has no in_order"
)
def test_without_an_order_looking_ahead_farther_than_the_workers_loses_no_batch() -> None:
    source = DataLoader(list(range(20)), num_workers=2, prefetch_factor=1, in_order=False)  # type: ignore[arg-type]
    iterator = iter(source)
    batches, seen, asked = WorkerBatches(iterator), [], []
    while len(seen) < 20:
        while len(asked) < 4 and batches.may_be_taken_ahead:
            batches.take_ahead()
            seen.append(int(next(iterator)))
            asked.append(batches.taken())
        batches.ask_for_more(asked.pop(0))
    assert sorted(seen) == list(range(20))
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def test_batches_from_memory_are_looked_ahead_of_without_end_and_without_the_workers() -> None:
    rig = Rig(length=3)
    rig.iterator.arrive(0)
    rig.iterator.arrive(1)
    assert rig.step() == "batch 0"
    rig.fetcher.look_ahead(step_done=False)
    rig.fetcher.replay()
    assert rig.stage.dropped == ["batch 1"]
    asked = list(rig.iterator.asked)
    rig.fetcher._stock.iterators[0] = iter(["first", "second"] * 5)
    for _ in range(3):
        assert rig.step() == "first"
        rig.fetcher.look_ahead(step_done=False)
        assert rig.stage.staged[-1] == "second"
        assert rig.step() == "second"
    assert not rig.fetcher.done
    assert rig.iterator.asked == asked
