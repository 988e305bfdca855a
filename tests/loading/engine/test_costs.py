"""What reading costs: the interpreter's lock, and waiting."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable

import pytest

from lightning_gpuopt.loading.engine.costs import MOST_THREADS, Costs, LookAhead
from tests.fork_server import start
from tests.helpers import wait_for

MS = 1_000_000


def batches_ahead(*, made_ms: float, slow_ms: int, every: int, taken_ms: float, paused_ms: int = 0) -> int:
    """Of 300 batches, where each so-manieth has a slow sample."""
    look, now_ns = LookAhead(), 5_000 * MS
    for number in range(300):
        slow = number % every == every - 1
        look.note(made_ms * MS, (slow_ms if slow else 4) * MS, now_ns)
        now_ns += round(taken_ms * MS) + (paused_ms * MS if number == 200 else 0)
    return look.batches()


@pytest.mark.parametrize("paused_ms", [0, 60_000])  # a validation
@pytest.mark.parametrize(
    ("made_ms", "slow_ms", "every", "taken_ms", "batches"),
    [
        (5, 175, 25, 1, 36),  # as fast as they are made
        (5, 175, 25, 50, 5),  # training takes longer
        (5, 4, 25, 1, 2),  # none is slow
        (5, 2_000, 120, 1, 2),  # two alone are no rule
        (10, 700, 30, 1, 71),
    ],
)
def test_as_many_batches_are_made_ahead_as_a_slow_sample_takes(
    made_ms: float, slow_ms: int, every: int, taken_ms: float, batches: int, paused_ms: int
) -> None:
    found = batches_ahead(made_ms=made_ms, slow_ms=slow_ms, every=every, taken_ms=taken_ms, paused_ms=paused_ms)
    assert found == batches


def costs_of(work: Callable[[], object]) -> Costs:
    costs = Costs()
    costs.begin()
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        work()
    costs.end()
    return costs


@pytest.mark.timed
def test_python_holds_the_lock_and_waits_for_nothing() -> None:
    costs = costs_of(lambda: sum(range(20_000)))
    assert costs.held > 0.8
    assert costs.blocked < 0.2
    assert (costs.threads(), costs.share(64)) == (1, (64, 1))


BUSY = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    pass
"""


def test_waiting_for_a_cpu_is_no_waiting_for_storage() -> None:
    cpus = os.sched_getaffinity(0)
    busy = start(["-c", BUSY, str(min(cpus))])
    try:
        wait_for(lambda: len(busy.lines()) == 1)
        os.sched_setaffinity(0, {min(cpus)})
        costs = costs_of(lambda: sum(range(20_000)))
    finally:
        os.sched_setaffinity(0, cpus)
        busy.kill()
    assert costs.blocked < 0.2


@pytest.mark.timed
def test_waiting_holds_no_lock() -> None:
    costs = costs_of(lambda: time.sleep(0.02))
    assert costs.blocked > 0.9
    assert costs.held < 0.5


@pytest.mark.parametrize(
    ("held", "blocked", "cpus", "threads", "share"),
    [
        (0.0, 0.0, 2, 1, (2, 1)),  # few CPUs: a process for each
        (0.15, 0.0, 2, 1, (2, 1)),
        (0.15, 0.0, 8, 1, (4, 2)),  # JPEG: at most five threads in a process
        (0.15, 0.0, 64, 1, (13, 5)),
        (0.9, 0.0, 64, 1, (64, 1)),
        (0.0, 0.5, 4, 2, (4, 2)),  # half of the time nobody uses a CPU
        (0.0, 0.99, 1, MOST_THREADS, (1, MOST_THREADS)),
        (0.0, 1.0, 2, MOST_THREADS, (2, MOST_THREADS)),
        (0.4, 0.9, 2, 2, (2, 2)),  # the lock allows no more
    ],
)
def test_threads_and_processes(held: float, blocked: float, cpus: int, threads: int, share: tuple[int, int]) -> None:
    costs = Costs()
    costs.held, costs.blocked = held, blocked
    assert (costs.threads(), costs.share(cpus)) == (threads, share)


def test_what_was_found_travels() -> None:
    costs = costs_of(lambda: None)
    costs.held, costs.blocked = 0.25, 0.5
    there = pickle.loads(pickle.dumps(costs))
    assert (there.held, there.blocked, there.threads()) == (0.25, 0.5, 2)


def test_nothing_measured_is_nothing_found() -> None:
    costs = Costs()
    costs.end()
    assert (costs.held, costs.blocked) == (0.0, 0.0)
