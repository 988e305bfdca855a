"""One trial, with real workers and a clock that goes when the test says so."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_gpuopt.tuning import trial
from lightning_gpuopt.tuning.trial import OutOfTime, run_trial
from lightning_gpuopt.tuning.trial_samples import own_sampling
from tests.helpers import Clock
from tests.tuning.datasets import Numbers, Stuck


class Pace(Clock):
    """Time passes only while the consumer sleeps, and at each look at the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look_s: float = 0.0) -> None:
        super().__init__()
        self.slept: list[float] = []
        self.look_s = look_s
        fake = SimpleNamespace(perf_counter=self, sleep=self.sleep, process_time=lambda: 0.0)
        monkeypatch.setattr(trial, "time", fake)

    def __call__(self) -> float:
        self.now_s += self.look_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    def trial(self, loader: DataLoader[Any], workers: int, sampling: Any = None, **arguments: Any) -> Any:
        given = {"prefetch_factor": 2, "step_time_s": 0.1, "deadline_s": self.now_s + 100, **arguments}
        return run_trial(loader, sampling or own_sampling(loader), workers, **given)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Pace:
    return Pace(monkeypatch)


@pytest.mark.parametrize(("workers", "batches"), [(1, 8), (3, 9)])
def test_a_trial_consumes_whole_rounds_at_the_pace_of_the_step(pace: Pace, workers: int, batches: int) -> None:
    measured = pace.trial(DataLoader(Numbers(size=1000), 4, collate_fn=list), workers)
    assert pace.slept[:batches] == [0.1] * batches
    assert len(pace.slept) <= batches + 1  # and a pause, after which a batch must lie ready
    assert measured.trial.num_workers == workers
    assert measured.trial.batches_per_s == pytest.approx(10)
    assert (measured.trial.data_wait_s, measured.consumer_s) == pytest.approx((0, 0.1))
    assert measured.service_s > 0
    assert measured.worker_bytes > 1_000_000
    assert (measured.batch_bytes, measured.batch_tensors) == (4 * 1000 * 4, 4)


def test_where_a_batch_takes_long_its_wait_does_not_pass_for_the_cost_of_taking_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "_MAX_PAUSE_S", 0.0)  # any batch takes long
    measured = Pace(monkeypatch, look_s=1.0).trial(DataLoader(Numbers(), 4), 1, step_time_s=0.0)
    assert measured.trial.data_wait_s == 1.0
    assert measured.consumer_s == pytest.approx(1 / measured.trial.batches_per_s - 1.0 + 0.0008)


@pytest.mark.parametrize(
    ("step_time_s", "left_s", "slept"), [(0.1, 0.25, [0.1, 0.1, 0.05]), (30.0, 2.0, [2.0])], ids=["steps", "long step"]
)
def test_the_deadline_ends_a_trial_and_what_was_seen_counts(
    pace: Pace, step_time_s: float, left_s: float, slept: list[float]
) -> None:
    measured = pace.trial(DataLoader(Numbers(), 4), 1, step_time_s=step_time_s, deadline_s=pace.now_s + left_s)
    assert pace.slept[:3] == pytest.approx(slept)
    assert measured.trial.num_workers == 1


def test_without_a_batch_before_the_deadline_there_is_no_trial() -> None:
    loader = DataLoader(Stuck(from_the_start=True), 4)
    with pytest.raises(OutOfTime):
        run_trial(
            loader,
            own_sampling(loader),
            1,
            prefetch_factor=2,
            step_time_s=0,
            deadline_s=time.perf_counter() + 0.2,
        )


def test_a_trial_goes_on_where_the_last_one_ended(pace: Pace) -> None:
    loader = DataLoader(Numbers(length=100_000), 4)
    sampling = own_sampling(loader)
    walk = sampling["batch_sampler"].sampler
    begin = next(walk)
    for workers, batches in ((1, 9), (2, 10)):
        pace.trial(loader, workers, sampling)
        end = next(walk)
        assert (end - begin) % 100_000 > 4 * batches
        begin = end
