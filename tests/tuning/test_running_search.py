from __future__ import annotations

import pytest

from lightning_gpuopt.tuning.running_search import LivePolicy, LoaderStats
from lightning_gpuopt.tuning.worker_limits import Cap

CAP = Cap(32, "max_num_workers")


class Machine:
    """A loader, its consumer and its CPUs, in numbers."""

    def __init__(self, service_s: float, step_s: float, cpu_s: float = 0.0, cpus: float = 8.0) -> None:
        self.service_s, self.step_s, self.cpu_s, self.cpus = service_s, step_s, cpu_s, cpus

    def seen(self, workers: int) -> LoaderStats:
        if not workers:
            return LoaderStats(self.step_s + self.service_s, self.service_s, None, self.cpu_s)
        pace_s = max(self.step_s, self.service_s / workers, self.cpu_s / self.cpus)
        busy = min(self.service_s / pace_s, float(workers))
        return LoaderStats(pace_s, pace_s - self.step_s, busy, self.cpu_s)

    def run(self, policy: LivePolicy, steps: int, cap: Cap = CAP) -> list[tuple[int, int]]:
        """Let a run of so many steps pass; the steps at which the number changed, and to what."""
        changes: list[tuple[int, int]] = []
        at = policy.skip + policy.window
        while at <= steps:
            before = policy.num_workers
            if policy.decide(self.seen(before), cap) != before:
                changes.append((at, policy.num_workers))
            at += policy.skip + policy.window
        return changes


def policy(workers: int, cpus: float = 8.0) -> LivePolicy:
    return LivePolicy(workers, cpus=cpus)


@pytest.mark.parametrize(
    ("service_s", "changes"),
    [(0.025, [(8, 3)]), (0.04, [(8, 5)]), (0.07, [(8, 8)]), (0.2, [(8, 8), (26, 22)])],
)
def test_a_starved_consumer_gets_what_it_needs_within_sixty_steps(
    service_s: float, changes: list[tuple[int, int]]
) -> None:
    machine, live = Machine(service_s, 0.01), policy(1)
    assert machine.run(live, 60) == changes
    assert machine.seen(live.num_workers).step_s <= 1.1 * 0.01


def test_the_search_ends_and_says_what_limits_it() -> None:
    live = policy(1)
    Machine(0.07, 0.01).run(live, 100)
    assert live.settled
    assert live.limited_by == "consumer"
    assert [(trial.num_workers, trial.batches_per_s) for trial in live.trials] == [
        (1, pytest.approx(1 / 0.07)),
        (8, pytest.approx(100)),
    ]


@pytest.mark.parametrize(
    ("machine", "workers", "cap", "changes", "limited_by"),
    [
        (Machine(0.018, 0.01), 2, CAP, [], "consumer"),  # a loader that keeps up is left alone
        (Machine(0.04, 0.01, cpu_s=0.04, cpus=2.0), 1, CAP, [(8, 3)], "cpu"),
        (Machine(0.2, 0.01), 1, Cap(3, "memory"), [(8, 3)], "memory"),
    ],
    ids=["keeps up", "CPUs in use", "cap"],
)
def test_what_ends_the_growth_is_named(
    machine: Machine, workers: int, cap: Cap, changes: list[tuple[int, int]], limited_by: str
) -> None:
    live = policy(workers, cpus=machine.cpus)
    assert machine.run(live, 20_000, cap) == changes
    assert (live.settled, live.limited_by) == (True, limited_by)


def test_looks_become_rare() -> None:
    live, pauses = policy(2), []
    for _ in range(8):
        live.decide(Machine(0.018, 0.01).seen(2), CAP)
        pauses.append(live.skip)
    assert pauses == [200, 400, 800, 1600, 3200, 3200, 3200, 3200]


def test_idle_workers_are_taken_away_after_a_long_look() -> None:
    live = policy(16)
    assert Machine(0.03, 0.01).run(live, 16 + 16 + 49) == []
    assert Machine(0.03, 0.01).run(policy(16), 20_000) == [(82, 4)]


def test_a_worker_that_was_missed_comes_back_and_stays() -> None:
    live = policy(8)
    machine = Machine(0.03, 0.01)
    assert live.decide(machine.seen(8), CAP) == 8
    assert live.decide(machine.seen(8), CAP) == 4
    # four are not enough after all: bursts, or a disk that reads more slowly now
    assert live.decide(LoaderStats(0.015, 0.005, 4.0), CAP) == 8
    assert live.settled
    assert machine.run(live, 20_000) == []


def test_workers_that_gain_nothing_are_taken_back_and_not_tried_again() -> None:
    live = policy(2)
    live.decide(LoaderStats(0.02, 0.01), CAP)  # a lock that all share: the model cannot know
    assert live.num_workers == 5
    assert live.decide(LoaderStats(0.0195, 0.0095), CAP) == 2
    assert (live.settled, live.limited_by) == (True, "cpu")
    assert live.decide(LoaderStats(0.02, 0.01), CAP) == 2
    assert (live.settled, live.limited_by) == (True, "cpu")


def test_another_step_makes_it_try_again() -> None:
    live = policy(2)
    for seen in (LoaderStats(0.02, 0.01), LoaderStats(0.02, 0.01)):
        live.decide(seen, CAP)
    assert live.num_workers == 2
    assert live.decide(LoaderStats(0.04, 0.03), CAP) > 2


def test_uneven_batches_get_more_ahead() -> None:
    live = policy(4)
    # on average four would do; one slow batch in fifty stalls the step
    assert live.decide(LoaderStats(step_s=0.011, wait_s=0.001, busy=3.0, worker_cpu_s=0.0), CAP) == 5


def test_a_number_that_others_decided_on_is_looked_at_anew_or_left() -> None:
    live = policy(1)
    live.set(4)
    assert (live.num_workers, live.settled, live.skip, live.window) == (4, False, 6, 8)
    live.set(6, settle=True)
    assert (live.num_workers, live.settled, live.skip) == (6, True, 3200)
    live.wake()
    assert (live.settled, live.skip, live.window) == (False, 0, 6)
