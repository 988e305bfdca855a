"""One trial, with real workers and a clock that goes when the test says so."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_gpuopt.tuning import probe
from lightning_gpuopt.tuning.indices import own_sampling
from lightning_gpuopt.tuning.probe import Clocks, OutOfTime, run_trial
from tests.helpers import Clock
from tests.tuning.datasets import Numbers, Stuck


class Pace(Clock):
    """Time passes only while the consumer sleeps; ``slept`` is how often it did."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def trial(loader: DataLoader[Any], workers: int, clock: Pace, **arguments: Any) -> Any:
    given = {"prefetch_factor": 2, "step_time_s": 0.1, "deadline": clock.now_s + 100, **arguments}
    clocks = Clocks(clock, clock.sleep, lambda: 0.0)
    return run_trial(loader, own_sampling(loader), workers, clocks=clocks, **given)


@pytest.mark.parametrize(("workers", "batches"), [(1, 8), (3, 9)])
def test_a_trial_consumes_whole_rounds_at_the_pace_of_the_step(workers: int, batches: int) -> None:
    clock = Pace()
    measured = trial(DataLoader(Numbers(size=1000), 4), workers, clock)
    assert clock.slept[:batches] == [0.1] * batches
    assert len(clock.slept) <= batches + 1  # and a pause, after which a batch must lie ready
    assert measured.trial.num_workers == workers
    assert measured.trial.batches_per_s == pytest.approx(10)
    assert (measured.trial.data_wait_s, measured.consumer_s) == pytest.approx((0, 0.1))
    assert measured.service_s > 0
    assert measured.worker_bytes > 1_000_000


def test_where_a_batch_takes_long_its_wait_does_not_pass_for_the_cost_of_taking_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "_MAX_PAUSE_S", 0.0)  # any batch takes long

    class Late(Pace):
        def __call__(self) -> float:  # every look at the clock takes a second
            self.now_s += 1.0
            return self.now_s

    measured = trial(DataLoader(Numbers(), 4), 1, Late(), step_time_s=0.0)
    assert measured.trial.data_wait_s == 1.0
    assert measured.consumer_s == pytest.approx(1 / measured.trial.batches_per_s - 1.0 + 0.0008)


def test_the_size_of_a_batch_is_counted() -> None:
    assert trial(DataLoader(Numbers(size=1000), 4), 1, Pace()).batch_bytes == 4 * 1000 * 4


def test_the_deadline_ends_a_trial_and_what_was_seen_counts() -> None:
    clock = Pace()
    measured = trial(DataLoader(Numbers(), 4), 1, clock, deadline=clock.now_s + 0.25)
    assert measured.trial.batches_per_s == pytest.approx(10)
    assert clock.slept[:3] == pytest.approx([0.1, 0.1, 0.05])
    with pytest.raises(OutOfTime):
        run_trial(
            loader := DataLoader(Stuck(from_the_start=True), 4),
            own_sampling(loader),
            1,
            prefetch_factor=2,
            step_time_s=0,
            deadline=Clocks().now() + 0.2,
        )


def test_a_trial_goes_on_where_the_last_one_ended() -> None:
    loader = DataLoader(Numbers(length=100_000), 4)
    sampling = own_sampling(loader)
    walk = sampling["batch_sampler"].sampler
    begin, clock = next(walk), Pace()
    for workers, batches in ((1, 9), (2, 10)):
        run_trial(
            loader,
            sampling,
            workers,
            prefetch_factor=2,
            step_time_s=0.1,
            deadline=clock.now_s + 100,
            clocks=Clocks(clock, clock.sleep, lambda: 0.0),
        )
        end = next(walk)
        assert (end - begin) % 100_000 > 4 * batches
        begin = end


def test_a_step_longer_than_the_time_that_is_left_ends_with_it() -> None:
    clock = Pace()
    seen = trial(DataLoader(Numbers(), 4), 1, clock, step_time_s=30.0, deadline=clock.now_s + 2)
    assert sum(clock.slept) == 2.0
    assert seen.trial.num_workers == 1


def test_the_files_of_a_batch_are_counted() -> None:
    clock = Pace()
    assert trial(DataLoader(Numbers(), 4, collate_fn=list), 1, clock).batch_tensors == 4
