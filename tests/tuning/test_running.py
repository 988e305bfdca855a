"""A loader that runs: its fetches timed by a clock of the test's, its room and its costs in numbers."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_gpuopt.compat.dataloader import copy_of, workers_of
from lightning_gpuopt.tuning import running, worker_limits
from lightning_gpuopt.tuning.fetch_times import FetchMeter
from lightning_gpuopt.tuning.running import LostWorkers, RunningLoader, assign, length_of
from lightning_gpuopt.tuning.running_search import LivePolicy, LoaderStats
from lightning_gpuopt.tuning.search_result import Trial
from lightning_gpuopt.tuning.segments import Segments
from lightning_gpuopt.tuning.sharing import note_own_workers, own_workers
from lightning_gpuopt.tuning.worker_limits import Cap, Room
from tests.helpers import Clock
from tests.tuning.datasets import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MIB = 1 << 20


class Pulled:
    """An iterator of no kind that is known; what it gives costs nothing but what a test says."""

    def __init__(self, give: Any = lambda: 0) -> None:
        self.give = give

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.give()


def loader(workers: int = 1, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(160), **{"batch_size": 2, "shuffle": True, "num_workers": workers, **kwargs})


def follower(
    workers: int = 1, *, clock: Clock | None = None, most: int | None = None, ranks: int = 1, **kwargs: Any
) -> RunningLoader:
    policy = LivePolicy(workers, cpus=8.0)
    source = loader(workers, **kwargs)
    made = RunningLoader(source, policy, most, ranks, clock=clock or Clock())
    vars(made)["source"] = source  # which is held by whoever uses it, as by a Trainer
    return made


def made_by(made: RunningLoader) -> Any:
    """An iterator, as the registry has it made."""
    return made.iterator_wanted()(lambda make: make())


def decided(policy: LivePolicy, number: int) -> LivePolicy:
    """A policy that decides on this number."""
    policy.decide = lambda seen, cap: policy._change(number, seen)  # type: ignore[method-assign]
    return policy


STATS = LoaderStats(step_s=0.1, wait_s=0.05, batch_bytes=4.0 * MIB, batch_tensors=2)


class TestFetches:
    """Of the time between two batches, what training waited for, and what it did itself."""

    def meter(self, skip: int, window: int) -> tuple[FetchMeter, Clock]:
        clock = Clock()
        return FetchMeter(skip, window, clock), clock

    def fetch(self, meter: FetchMeter, clock: Clock, *, own_s: float, wait_s: float) -> None:
        def take() -> Any:
            clock.now_s += wait_s
            return torch.zeros(4), torch.zeros(4)

        clock.now_s += own_s
        meter.fetch(Pulled(), take)

    def test_a_window_is_complete_after_as_many_steps_and_its_first_fetch(self) -> None:
        meter, clock = self.meter(0, 3)
        self.fetch(meter, clock, own_s=9.0, wait_s=9.0)  # before it nothing is known of the step
        for _ in range(2):
            self.fetch(meter, clock, own_s=0.25, wait_s=0.5)
        assert meter.seen is None
        self.fetch(meter, clock, own_s=0.25, wait_s=0.5)
        assert meter.seen is not None
        assert (meter.seen.step_s, meter.seen.wait_s, meter.seen.busy) == (0.75, 0.5, None)
        assert (meter.seen.batch_bytes, meter.seen.batch_tensors) == (32.0, 2)
        assert meter.asleep > 1 << 50  # until it is told what to look at next

    def test_another_window_begins_with_nothing_of_the_last(self) -> None:
        meter, clock = self.meter(0, 1)
        for _ in range(2):
            self.fetch(meter, clock, own_s=0.25, wait_s=0.5)
        meter.begin(5, 1)
        assert (meter.seen, meter.asleep) == (None, 5)
        self.fetch(meter, clock, own_s=9.0, wait_s=9.0)
        assert meter.seen is None

    def test_an_epoch_that_begins_interrupts_a_window_and_ends_none(self) -> None:
        meter, clock = self.meter(0, 2)
        self.fetch(meter, clock, own_s=0.25, wait_s=0.5)
        self.fetch(meter, clock, own_s=0.25, wait_s=0.5)
        meter.epoch_begins(4)
        assert meter.asleep == 4
        self.fetch(meter, clock, own_s=99.0, wait_s=99.0)  # the pause between the epochs
        assert meter.seen is None
        self.fetch(meter, clock, own_s=0.25, wait_s=0.5)
        assert meter.seen is not None
        assert meter.seen.step_s == 0.75
        meter.epoch_begins(4)
        assert meter.asleep > 1 << 50

    def test_fewer_fetches_are_not_left_out_than_the_policy_wanted(self) -> None:
        meter, _ = self.meter(10, 2)
        meter.epoch_begins(4)
        assert meter.asleep == 10


class TestDecisions:
    def test_before_a_window_is_complete_there_is_no_news(self) -> None:
        assert follower().decide() is None

    def test_a_window_is_decided_on_once_and_the_next_begins(self) -> None:
        made = follower()
        made.meter.seen = STATS
        decided(made.policy, 3)
        assert made.decide() == 3
        assert (made.meter.seen, made.meter.asleep) == (None, made.policy.skip)
        assert made.decide() is None

    def test_the_policy_hears_of_what_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = follower(most=2)
        made.meter.seen = LoaderStats(step_s=0.1, wait_s=0.09)
        assert made.decide() == 2
        assert (made.policy.limited_by, made.policy.trials) == ("max_num_workers", [Trial(1, 10.0, 0.09)])

    def test_frozen_it_looks_at_nothing(self) -> None:
        made = follower()
        made.freeze()
        made.look()
        assert (made.frozen, made.meter.asleep > 1 << 50) == (True, True)

    def test_nor_while_a_change_waits_for_the_next_epoch(self) -> None:
        made = follower()
        made.note_start()
        iterator, later = Pulled(), Pulled()
        made.follow(iterator)
        made.apply(2)
        assert made.meter.asleep > 1 << 50
        made.follow(later)
        assert made.meter.asleep == made.policy.skip

    def test_what_was_seen_of_a_sampler_holds_for_another_of_its_class_alone(self) -> None:
        made, alike, other = follower(), loader(), loader(shuffle=False)
        seen = made.order
        seen.watched(made.loader)
        made.go_on_with(alike)
        assert made.order is seen
        made.go_on_with(other)
        assert made.order is not seen

    def test_a_loader_that_replaces_it_goes_on_where_it_stopped(self) -> None:
        made, new = follower(), loader()
        made.apply(4)
        made.meter.seen = STATS
        made.go_on_with(new)
        assert (made.loader, new.num_workers) == (new, 4)
        assert made.meter.seen is None  # what was not acted on was no training


class TestRoom:
    @pytest.mark.parametrize(
        ("given", "is_known", "cap"),
        [
            ({"most": 3}, False, Cap(3, "max_num_workers")),
            ({}, False, Cap(16, "max_num_workers")),
            # four fifths of 50 MiB, less a batch with the consumer: nine batches of 4 MiB, two for each worker
            ({}, True, Cap(4, "shared_memory")),
            ({"ranks": 2}, True, Cap(2, "shared_memory")),
        ],
    )
    def test_it_is_what_is_allowed_and_what_shared_memory_has_for_batches_ahead(
        self, given: Any, is_known: bool, cap: Cap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = follower(**given)
        if is_known:
            made.meter.seen = STATS
            made.decide()
        monkeypatch.setattr(running, "room", lambda files: Room(2.0, None, 50 * MIB))
        assert made.cap() == cap

    def test_it_is_looked_at_every_five_seconds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        made = follower(4, clock=clock)
        monkeypatch.setattr(RunningLoader, "cap", lambda self, keep: Cap(3 if keep else 1, "memory"))
        clock.now_s += 4.9
        assert made.no_longer_fits() is None
        clock.now_s += 0.1
        assert made.no_longer_fits() == Cap(3, "memory")
        assert made.no_longer_fits() is None
        clock.now_s += 5.0
        assert made.no_longer_fits() == Cap(3, "memory")
        monkeypatch.setattr(RunningLoader, "cap", lambda self, keep: Cap(4, "memory"))
        clock.now_s += 5.0
        assert made.no_longer_fits() is None


class TestAnotherNumber:
    def test_before_anything_runs_it_is_written_down(self) -> None:
        made = follower()
        made.apply(3)
        assert (made.loader.num_workers, made.policy.num_workers, made.no_more) == (3, 3, None)
        assert made.meter.asleep == made.policy.skip  # and nothing waits

    def test_of_an_iterator_that_cannot_be_changed_the_next_has_it(self) -> None:
        made = follower()
        made.note_start()
        iterator = Pulled()
        made.follow(iterator)
        assert made.problem is not None
        made.apply(3)
        assert made.loader.num_workers == 3

    def test_workers_of_an_earlier_fit_get_no_more_beside_them(self) -> None:
        made = follower()
        iterator = Pulled()
        made.follow(iterator)
        made.apply(3)
        assert made.no_more == "its workers were started by an earlier fit, and their dataset may have changed since"
        assert (made.loader.num_workers, made.policy.settled) == (1, True)

    def test_a_dataset_that_has_changed_is_not_given_to_more_beside_those_that_persist(self) -> None:
        for persist, number in ((True, 1), (False, 3)):
            made = follower(persistent_workers=persist)
            made.note_start()
            iterator = Pulled()
            made.follow(iterator)
            made.loader.dataset.size = 5  # type: ignore[attr-defined]
            made.apply(3)
            assert made.loader.num_workers == number
            assert (made.no_more is not None) is persist

    def test_what_an_iterator_without_a_class_of_its_own_gives_cannot_be_timed(self) -> None:
        made = follower()
        made.follow(each for each in range(3))
        assert made.unknown == "generator"


class TestWhetherAStartPays:
    """Workers that are not forked, and started anew for each epoch of 80 batches."""

    def pays(self, wanted: int, *, set_up_s: float, wait_s: float, **kwargs: Any) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running, "usable_cpus", lambda: 2.0)
            made = follower(2, **{"multiprocessing_context": "spawn", **kwargs})
            clock: Any = made._clock
            made._began = clock()
            clock.now_s += set_up_s
            iterator = Pulled()
            made.follow(iterator)
            made._wait_s = wait_s
            return made._pays(wanted)

    @pytest.mark.parametrize(
        ("set_up_s", "pays"),
        [
            (4.0, False),  # twice as many on two CPUs take 4 s more, and save half of 80 waits of 0.1 s
            (3.9, True),
        ],
    )
    def test_they_save_of_the_waits_as_much_as_they_are_more(self, set_up_s: float, pays: bool) -> None:
        assert self.pays(4, set_up_s=set_up_s, wait_s=0.1) is pays

    @pytest.mark.parametrize(
        "kwargs", [{"multiprocessing_context": "fork"}, {"persistent_workers": True}], ids=["forked", "persistent"]
    )
    def test_those_that_are_forked_or_live_on_always_do(self, kwargs: dict[str, Any]) -> None:
        assert self.pays(4, set_up_s=1000.0, wait_s=0.0, **kwargs)

    def test_where_they_do_not_none_is_added_and_it_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = follower(2)
        made.note_start()
        monkeypatch.setattr(RunningLoader, "_pays", lambda self, number: False)
        made.apply(4)
        assert made.loader.num_workers == 2
        assert made.no_more == (
            "starting 4 for every epoch would take longer than they save; give the DataLoader persistent_workers=True"
        )


@pytest.mark.parametrize(("start_s", "pays"), [(1.0, True), (6.3, True), (6.4, False), (30.0, False)])
def test_in_an_epoch_workers_start_where_its_rest_is_long_enough(start_s: float, pays: bool) -> None:
    made = follower(1, batch_size=4)
    iterator = made_by(made)
    for _ in range(19):
        next(iterator)
    made.follow(iterator)
    assert iterator.batches_left == 19  # of 40: two are under way
    iterator.started, made._wait_s = (start_s, 1), 1.0  # three take three times as long
    made.apply(3)
    assert (iterator.num_workers, made.loader.num_workers) == (3 if pays else 1, 3)
    iterator._shutdown_workers()


class TestGrowthThatFails:
    def grown(self) -> tuple[RunningLoader, Any]:
        made = follower(2)
        iterator = made_by(made)
        made.follow(iterator)
        assert made.problem is None
        return made, iterator

    def test_it_is_given_up_once_and_the_next_epoch_changes(self) -> None:
        made, iterator = self.grown()
        assert made.lost() is None
        iterator.failure = "one died"
        assert made.lost() == LostWorkers("growth", "one died")
        assert made.problem == "one died"
        assert made.lost() is None
        made.apply(4)
        assert (iterator.num_workers, made.loader.num_workers) == (2, 4)

    def test_the_loader_after_it_does_not_try_again(self) -> None:
        made, iterator = self.grown()
        iterator.failure = "one died"
        made.lost()
        new = loader()
        made.go_on_with(new)
        made.follow(made_by(made))
        assert made.problem == "one died"

    def test_no_other_iterator_fails(self) -> None:
        made = follower()
        assert made.lost() is None
        made.follow(Pulled())
        assert made.lost() is None
        assert not made.draws


def test_no_workers_have_no_batches_ahead() -> None:
    source = loader(2)
    assert length_of(source) == 80
    assign(source, 0)
    assert (source.num_workers, source.prefetch_factor) == (0, None)
    assign(source, 3)
    assert (source.num_workers, source.prefetch_factor) == (3, 2)


def test_a_length_that_is_not_known_is_none() -> None:
    class Unsized:
        def __len__(self) -> int:
            raise NotImplementedError

    source: Any = Unsized()
    assert length_of(source) is None


def test_the_users_own_number_is_remembered_after_the_fit() -> None:
    made = follower(2)
    made.apply(5)
    made.done()
    assert own_workers(made.loader) == 2


class Compared(DataLoader[Any]):
    """One that can be no key of a dict."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError


def test_what_is_noted_of_a_loader_that_cannot_be_hashed_is_with_it_and_with_no_copy() -> None:
    source = Compared(range(8), num_workers=1)
    note_own_workers(source, 1)
    shared = Segments.of(source)
    source.num_workers = 3
    note_own_workers(source, 1)
    assert Segments.of(source) is shared
    for twin in (copy.copy(source), copy.deepcopy(source), pickle.loads(pickle.dumps(source)), copy_of(source)):
        assert (own_workers(source), own_workers(twin)) == (1, 3)
        assert Segments.of(twin) is not shared
    source.num_workers = 2  # set by its user
    assert own_workers(source) == 2


@pytest.mark.parametrize(
    ("owns", "step_s"),
    [
        ([0.1, 0.1, 0.1, 0.9] * 2, 0.3),  # gradients accumulate
        ([0.1] * 5 + [30.0], 0.1),  # a validation
        (([0.1] * 4 + [30.0]) * 2, 0.1),
    ],
)
def test_a_step_that_is_longer_now_and_then_counts_with_all_of_it_but_for_pauses(
    owns: list[float], step_s: float
) -> None:
    clock = Clock()
    meter = FetchMeter(0, len(owns), clock)
    for own_s in [0.0, *owns]:
        clock.now_s += own_s
        meter.fetch(object(), lambda: 0)
    assert meter.seen is not None
    assert meter.seen.step_s == pytest.approx(step_s)


def test_a_settled_meter_reads_no_clock() -> None:
    reads: list[float] = []

    def clock() -> float:
        reads.append(time.perf_counter())
        return reads[-1]

    meter = FetchMeter(1 << 40, 4, clock)
    assert meter.asleep == 1 << 40
    source: Any = loader(0)
    made = RunningLoader(source, LivePolicy(0, cpus=1.0))
    made.meter = meter
    iterator = iter(source)
    made.follow(iterator)
    assert len(list(iterator)) == 80
    assert reads == []
    assert meter.asleep == (1 << 40) - 81


def seeds(worker: int) -> None:
    random.seed(42 + worker)


def seeds_by_a_helper(worker: int) -> None:
    seed_everything(worker, verbose=False)


@pytest.mark.parametrize(
    ("own", "kwargs", "reason"),
    [
        (1, {"timeout": 60}, "the first batches of new workers may take longer than the loader's timeout=60"),
        (1, {"worker_init_fn": seeds}, "they seed themselves by their number"),
        (1, {"worker_init_fn": seeds_by_a_helper}, "they seed themselves by their number"),
        (0, {}, "workers started by 'spawn' take seconds"),
    ],
)
def test_where_other_workers_should_not_take_over_the_next_epoch_changes(
    own: int, kwargs: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:
        monkeypatch.setattr(RunningLoader, "_why_not_live", lambda self: reason)
    source = loader(own, **kwargs)
    assign(source, 1)
    made = RunningLoader(source, LivePolicy(1, cpus=1.0), own_workers=own)
    iterator = made_by(made)
    next(iterator)
    made.follow(iterator)
    made.apply(3)
    assert reason in (made.problem or "")
    assert (iterator.num_workers, len(workers_of(iterator)), source.num_workers) == (1, 1, 3)
    iterator._shutdown_workers()


def test_workers_that_are_not_forked_do_not_take_over() -> None:
    why = follower(multiprocessing_context="spawn")._why_not_live() or ""
    assert why.startswith("workers started by 'spawn' take seconds")


def test_workers_that_run_are_kept_where_no_more_would_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    source = loader(3)
    made = RunningLoader(source, LivePolicy(3, cpus=1.0))
    iterator = made_by(made)
    next(iterator)
    gib = 1 << 30
    readers: list[int] = []
    monkeypatch.setattr(running, "worker_memory", lambda pid: readers.append(threading.get_ident()) or 24 * gib)
    made.follow(iterator)
    monkeypatch.setattr(running, "room", lambda files: worker_limits.Room(0.25, 20 * gib, None, 20, 30))
    assert made.cap().num_workers == 1
    assert made.cap(keep=True).num_workers == 3
    monkeypatch.setattr(running, "room", lambda files: worker_limits.Room(0.25, 0, None, 20, 30))
    assert made.cap(keep=True) == worker_limits.Cap(2, "memory")
    assert len(readers) == 2  # the first and the last worker, once
    assert threading.get_ident() not in readers
    iterator._shutdown_workers()
