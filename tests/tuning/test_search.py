"""Which numbers of workers are tried and chosen, in worlds made of numbers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from benchmarks import workers_rules
from lightning_gpuopt.tuning.search import Search, model_of
from lightning_gpuopt.tuning.search_result import LimitedBy, Measured, Trial
from lightning_gpuopt.tuning.worker_limits import Cap
from tests.diagnosis.numbers import data_finding, host, measurement, times, workers

CAP = Cap(16, "max_num_workers")


@dataclass(frozen=True)
class World:
    """A loader and its consumer; seconds per batch."""

    wall_s: float
    cpu_s: float = 0.0
    step_s: float = 0.0
    receive_s: float = 0.001
    own_cpu_s: float = 0.001
    cpus: float = 2.0
    at_most_per_s: float = 1e9
    unevenness: float = 0.0

    def rate(self, count: int) -> float:
        return min(
            count / self.wall_s,
            self.cpus / (self.cpu_s + self.own_cpu_s),
            1 / (self.step_s + self.receive_s),
            self.at_most_per_s,
        )

    def try_(self, count: int) -> Measured:
        rate = self.rate(count)
        shared_s = max(count * (self.cpu_s + self.own_cpu_s) / self.cpus, count / self.at_most_per_s)
        return Measured(
            Trial(count, rate, 1 / rate - self.step_s),
            service_s=max(self.wall_s, shared_s),
            cpu_s=self.cpu_s,
            consumer_s=self.step_s + self.receive_s,
            consumer_cpu_s=self.own_cpu_s,
            unevenness=self.unevenness,
        )


class Choice(NamedTuple):
    """A number of workers, why not more, and the batches per second to expect."""

    num_workers: int
    limited_by: LimitedBy
    batches_per_s: float | None


def choice(search: Search, cap: Cap = CAP) -> Choice:
    """What a search chooses; its trials are those that it has seen."""
    result = search.choose(cap)
    assert result.trials == tuple(each.trial for each in search.seen)
    return Choice(result.num_workers, result.limited_by, result.predicted_batches_per_s)


def search(world: World, cap: Cap = CAP) -> tuple[list[int], Choice]:
    """The numbers that were tried, and the choice."""
    search = Search(world.cpus)
    while (count := search.next_count(cap)) is not None:
        search.seen.append(world.try_(count))
    return [each.trial.num_workers for each in search.seen], choice(search, cap)


@pytest.mark.parametrize(
    ("world", "tried", "chosen", "limited_by"),
    [
        (World(0.032), [1, 16], 16, "max_num_workers"),  # waits for storage
        (World(0.032, step_s=0.005), [1, 6], 6, "consumer"),
        (World(0.032, step_s=0.05), [1], 1, "consumer"),
        (World(0.032, 0.032), [1, 3, 2, 3], 2, "cpu"),  # computes
        (World(0.0002, 0.0002), [1, 2, 2], 1, "consumer"),  # taking a batch costs more than making one
        (World(0.04, 0.008), [1, 10], 10, "cpu"),
        (World(0.032, at_most_per_s=100), [1, 16, 8, 5, 8], 5, "cpu"),  # a disk that gives no more than this
    ],
)
def test_a_few_trials_lead_to_the_knee(world: World, tried: list[int], chosen: int, limited_by: str) -> None:
    assert search(world) == (tried, Choice(chosen, limited_by, pytest.approx(world.rate(chosen))))  # type: ignore[arg-type]


@pytest.mark.parametrize("cpus", [0.5, 2.0, 16.0])
def test_in_every_world_the_choice_is_good_and_not_too_large(cpus: float) -> None:
    walls = (0.0005, 0.004, 0.02, 0.1, 0.7)
    for wall_s, cpu_share, step_s, shared in itertools.product(
        walls, (0.0, 0.1, 0.5, 1.0), (0.0, 0.005, 0.05), (1e9, 60.0)
    ):
        world = World(wall_s, wall_s * cpu_share, step_s, cpus=cpus, at_most_per_s=shared)
        tried, choice = search(world)
        assert is_good(choice.num_workers, world), (world, tried, choice)
        assert len(tried) <= 10


def is_good(chosen: int, world: World) -> bool:
    """Whether a choice is nearly as fast as can be, and hardly larger than need be."""
    best = max(map(world.rate, range(1, CAP.num_workers + 1)))
    smallest = next(count for count in range(1, CAP.num_workers + 1) if world.rate(count) >= 0.95 * best)
    return world.rate(chosen) >= 0.95 * best and chosen <= 1.5 * smallest


def test_the_cap_is_never_passed_and_named_where_it_is_what_limits() -> None:
    tried, choice = search(World(0.032), Cap(3, "memory"))
    assert max(tried) == choice.num_workers == 3
    assert choice.limited_by == "memory"
    assert search(World(0.032), Cap(1, "shared_memory")) == ([1], Choice(1, "shared_memory", pytest.approx(31.25)))
    assert search(World(0.032, 0.032), Cap(2, "memory"))[1].limited_by == "cpu"


def seen(world: World, *trials: tuple[int, float]) -> Search:
    """A search that has seen these throughputs."""
    search = Search(world.cpus)
    for count, rate in trials:
        search.seen.append(replace(world.try_(count), trial=Trial(count, rate, 1 / rate - world.step_s)))
    return search


@pytest.mark.parametrize(
    ("search", "cap", "chosen", "limited_by", "rate"),
    [
        (seen(World(0.032), (1, 31.25), (8, 250), (16, 500)), Cap(8, "memory"), 8, "memory", 250.0),  # 16 no longer fit
        (seen(World(0.05, step_s=0.004), (1, 20), (11, 200)), Cap(8, "memory"), 8, "time", 160.0),  # by the model
        (seen(World(0.032, step_s=0.005), (1, 1 / 0.032)), CAP, 6, "time", 1 / 0.006),  # by the model
        (seen(World(0.032, at_most_per_s=100), (1, 31.25), (16, 100)), CAP, 16, "time", 100.0),  # it was stopped
    ],
)
def test_what_is_chosen_of_what_fits_and_was_seen(
    search: Search, cap: Cap, chosen: int, limited_by: LimitedBy, rate: float
) -> None:
    assert choice(search, cap) == Choice(chosen, limited_by, pytest.approx(rate))  # type: ignore[arg-type]


def test_what_was_prepared_before_a_trial_does_not_count() -> None:
    starved = World(0.032, step_s=0.005).try_(4)
    lucky = replace(starved, trial=Trial(4, 166.0, 0.001))
    search = Search(cpus=2.0)
    search.seen += [World(0.032, step_s=0.005).try_(1), lucky]
    assert search.next_count(CAP) == 6


SHARED = World(0.02, at_most_per_s=100)
"""A disk gives no more than 100 batches a second; one worker could give 50."""


@pytest.mark.parametrize(
    ("world", "trials", "again", "chosen"),
    [
        # first the one that would do with fewer, until two trials agree, or there are three
        (SHARED, [(1, 50), (3, 100), (2, 85)], 2, 3),
        (SHARED, [(1, 50), (3, 100), (2, 85), (2, 86)], None, 3),
        (SHARED, [(1, 50), (3, 100), (2, 70), (2, 86)], 2, 3),
        (SHARED, [(1, 50), (3, 100), (2, 70), (2, 80), (2, 90)], None, 3),
        (SHARED, [(1, 50), (3, 100), (2, 93), (2, 94)], None, 3),
        (SHARED, [(1, 50), (3, 97), (2, 93), (2, 94)], 3, 2),
        # not what could not do however undisturbed, nor what was too far from it
        (World(0.04), [(1, 25), (12, 300), (16, 400)], None, 16),
        (SHARED, [(1, 50), (3, 100), (2, 63)], 2, 3),
        (SHARED, [(1, 50), (3, 100), (2, 62)], None, 3),
        # the best of the larger ones that were worse
        (SHARED, [(1, 50), (3, 80), (2, 96)], 3, 2),
        (SHARED, [(1, 50), (3, 80), (2, 96), (3, 99)], 3, 2),
        (SHARED, [(1, 50), (3, 80), (2, 90), (3, 99)], 2, 3),
        (SHARED, [(1, 50), (3, 80), (2, 96), (3, 81)], None, 2),
        (SHARED, [(1, 50), (3, 81), (2, 96), (3, 81), (5, 85)], 5, 2),
        (SHARED, [(1, 50), (3, 90), (2, 96), (3, 91)], None, 2),
    ],
)
def test_what_may_have_been_disturbed_is_tried_again(
    world: World, trials: list[tuple[int, float]], again: int | None, chosen: int
) -> None:
    search = seen(world, *trials)
    cap = Cap(max(count for count, _ in trials), "max_num_workers")
    assert search.next_count(cap) == again
    assert search.next_count(cap, in_haste=True) is None
    assert choice(search, cap).num_workers == chosen


def test_a_wide_tolerance_makes_more_numbers_rivals() -> None:
    search = Search(cpus=2.0, tolerance=0.5)
    world = World(0.2, step_s=0.05)
    search.seen += [world.try_(1), world.try_(5), replace(world.try_(3), trial=Trial(3, 8.2, 0.07))]
    assert search.next_count(Cap(5, "memory")) == 3


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([100.0], 100.0),
        ([100.0, 97.0], 98.5),  # they agree
        ([100.0, 70.0], 100.0),  # something else ran
        ([70.0, 98.0, 100.0], 99.0),
        ([108.0, 100.0, 100.0], 100.0),  # it was lucky
        ([80.0, 90.0, 100.0], 100.0),
    ],
)
def test_of_repeated_trials_those_that_agree_count(rates: list[float], expected: float) -> None:
    search = seen(World(0.016), (1, 60), *((2, rate) for rate in rates))
    assert choice(search, Cap(2, "memory")).batches_per_s == pytest.approx(expected)


@pytest.mark.parametrize(("rate", "chosen"), [(97.0, 5), (95.5, 6)])
def test_fewer_workers_are_chosen_within_the_tolerance_only(rate: float, chosen: int) -> None:
    search = Search(cpus=2.0)
    for count, per_s in ((1, 20.0), (5, rate), (6, 100.0), (7, 100.0)):
        search.seen.append(replace(World(0.05).try_(count), trial=Trial(count, per_s, 0.01)))
    assert choice(search).num_workers == chosen


def test_the_first_guess_is_what_the_diagnosis_advises_from_the_same_measurement() -> None:
    # 100 steps of 100 ms on two workers: 50 ms of waiting; a batch takes a worker 190 ms, next to no CPU
    seen = measurement(times(data_wait=5.0), workers=workers(data_s=0.19, cpu=0.01), host=host(0.01, process_cpus=0.1))
    advised = data_finding(seen).settings["num_workers"]
    trial = Measured(Trial(1, 1 / 0.19, 0.14), 0.19, 0.0019, consumer_s=0.05 + 0.0008, consumer_cpu_s=0.01)
    search = Search(cpus=8.0)
    search.seen.append(trial)
    assert advised == search.next_count(Cap(32, "max_num_workers")) == model_of(trial, 8.0).workers_needed() == 4


@pytest.mark.parametrize("disturbed", range(6))
@pytest.mark.parametrize("step_s", [0.0, 0.005, 0.05])
@pytest.mark.parametrize("wall_s", [0.004, 0.02, 0.1])
def test_one_disturbed_trial_does_not_change_what_is_found(wall_s: float, step_s: float, disturbed: int) -> None:
    for cpu_share, shared in itertools.product((0.0, 0.1, 1.0), (1e9, 60.0)):
        world = World(wall_s, wall_s * cpu_share, step_s, at_most_per_s=shared)
        search = Search(world.cpus)
        while (count := search.next_count(CAP)) is not None:
            seen = world.try_(count)
            if len(search.seen) == disturbed:
                rate = 0.7 * seen.trial.batches_per_s
                seen = replace(seen, trial=Trial(count, rate, 1 / rate - step_s))
            search.seen.append(seen)
        assert is_good(choice(search).num_workers, world), (world, search.seen)


def test_on_cases_that_no_rule_was_fitted_to_the_choices_are_good_and_lean() -> None:
    chance = random.Random(1)
    found = workers_rules.score(Search, [workers_rules.draw(chance) for _ in range(400)], 1)
    assert found["at_least_95_percent"] >= 0.95
    assert found["at_most_1.5x"] >= 0.95
    assert found["trials"] < 4
