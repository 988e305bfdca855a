"""The memory of workers is read beside training, and more rarely where that is dear."""

from __future__ import annotations

import threading

from lightning_gpuopt.telemetry.memory_watch import MemoryWatch
from tests.helpers import Clock, wait_for


class Reader:
    """Gives what it has for each process; a reading takes its time on the clock."""

    def __init__(self, clock: Clock, sizes: dict[int, int | None], takes_s: float = 0.0) -> None:
        self.clock, self.sizes, self.takes_s = clock, sizes, takes_s
        self.read: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, pid: int) -> int | None:
        self.read.append(pid)
        self.threads.add(threading.get_ident())
        self.clock.now_s += self.takes_s
        return self.sizes[pid]


def settle(watch: MemoryWatch) -> None:
    wait_for(lambda: watch._reading is None)


def test_the_largest_is_read_on_another_thread_which_ends() -> None:
    clock = Clock()
    reader = Reader(clock, {7: 30, 8: 50, 9: None})
    watch = MemoryWatch(reader, clock)
    watch.look([])
    assert watch.largest is None
    watch.look([7, 8, 9])
    watch.await_first()
    assert watch.largest == 50
    assert threading.get_ident() not in reader.threads
    settle(watch)
    wait_for(lambda: not [each for each in threading.enumerate() if each.name == "gpuopt-worker-memory"])


def test_a_reading_is_due_after_5_s_and_where_it_is_dear_after_20_times_its_cost() -> None:
    clock = Clock()
    reader = Reader(clock, {7: 30})
    watch = MemoryWatch(reader, clock)
    for seconds in (0.0, 4.9, 0.2, 4.9):
        clock.now_s += seconds
        watch.look([7])
        settle(watch)
    assert reader.read == [7, 7]
    reader.takes_s = 0.5
    clock.now_s += 0.2
    watch.look([7])
    settle(watch)
    clock.now_s += 9.9
    watch.look([7])
    settle(watch)
    assert reader.read == [7] * 3
    clock.now_s += 0.2
    watch.look([7])
    settle(watch)
    assert reader.read == [7] * 4


def test_while_one_reads_no_other_begins_and_nobody_waits() -> None:
    goes_on = threading.Event()
    begun: list[int] = []

    def read(pid: int) -> int:
        begun.append(pid)
        goes_on.wait(20)
        return 30

    watch = MemoryWatch(read, Clock())
    watch.look([7])
    wait_for(lambda: begun == [7])
    watch.look([8])
    assert watch.largest is None
    goes_on.set()
    settle(watch)
    assert (begun, watch.largest) == ([7], 30)


def test_what_is_gone_leaves_the_last_figure() -> None:
    clock = Clock()
    reader = Reader(clock, {7: 30, 8: None})
    watch = MemoryWatch(reader, clock)
    watch.look([7])
    settle(watch)
    clock.now_s += 6
    watch.look([8])
    settle(watch)
    assert watch.largest == 30
