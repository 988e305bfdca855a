"""The door to DDP: what its reducer tells, and that it is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_gpuopt.compat import ddp
from lightning_gpuopt.compat.ddp import Reducer, reducer_of
from lightning_gpuopt.measurements.ranks import GradientSync, ReducerTimes


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(torch.nn.Linear(4, 3), **options)


def as_they_are(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which are texts here
    """A communication hook that leaves no call of Python's to gloo's threads.

    torch waits for those threads as the process group goes, and holds the GIL meanwhile.
    """
    done = torch.futures.Future()  # type: ignore[no-untyped-call,var-annotated]
    done.set_result(bucket.buffer())
    return done


def run(model: DistributedDataParallel, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.usefixtures("alone")
class TestOfARealModel:
    def test_how_gradients_are_reduced(self) -> None:
        model = wrapped(find_unused_parameters=True, gradient_as_bucket_view=True)
        reducer = Reducer(model, timed=True)
        run(model, 3)
        reducer.read()
        facts = reducer.facts
        assert (facts.bytes, facts.buckets) == (60, 1)
        assert (facts.find_unused_parameters, facts.bucket_view, facts.static_graph) == (True, True, False)
        assert facts.unused in (False, None)  # not told before torch 2.5

    def test_the_communication_hook(self) -> None:
        model = wrapped()
        model.register_comm_hook(None, as_they_are)
        reducer = Reducer(model, timed=True)
        run(model, 2)
        reducer.read()
        assert "as_they_are" in reducer.facts.hook

    def test_as_many_passes_were_timed_as_is_reckoned(self) -> None:
        model = wrapped()
        reducer = Reducer(model, timed=True)
        exposed_s, seen = 0.0, 0
        for _ in range(41):
            run(model, 1)
            data: dict[str, Any] = model._get_ddp_logging_data()
            if data.get("iteration", 0) != seen:  # the pass before was timed
                seen = data["iteration"]
                exposed_s += (data["backward_comm_time"] - data["backward_compute_comm_overlap_time"]) / 1e9
        reducer.read()
        assert reducer.times is not None
        assert (reducer.times.backwards, reducer.times.sampled) == (40, 18)
        assert reducer.times.exposed_s == pytest.approx(exposed_s, rel=1e-3)  # torch rounds its means to nanoseconds

    def test_it_is_left_as_it_was(self) -> None:
        model = wrapped()
        reducer = Reducer(model, timed=True)
        reducer.close()
        run(model, 45)
        assert model._get_ddp_logging_data()["iteration"] == 10

    def test_on_cuda_torch_times_as_often_as_by_itself(self) -> None:
        model = wrapped()
        reducer = Reducer(model, timed=False)
        run(model, 45)
        reducer.read()
        assert reducer.times is not None
        assert (reducer.times.backwards, reducer.times.sampled) == (10, 10)

    def test_a_torch_that_tells_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = wrapped()
        monkeypatch.delattr(DistributedDataParallel, "_get_ddp_logging_data")
        monkeypatch.delattr(DistributedDataParallel, "_set_ddp_runtime_logging_sample_rate")
        reducer = Reducer(model, timed=True)
        reducer.read()
        reducer.close()
        assert (reducer.times, reducer.facts) == (None, GradientSync())


def test_a_model_that_is_not_wrapped_has_none() -> None:
    assert reducer_of(torch.nn.Linear(1, 1), timed=True) is None


def test_passes_that_were_not_timed_are_reckoned_like_the_others() -> None:
    data = {"iteration": 40, "avg_backward_comm_time": 9_000_000, "avg_backward_compute_comm_overlap_time": 1_000_000}
    times = ddp._times_of(data, 4)
    assert times == ReducerTimes(40, 18, pytest.approx(0.144))
    assert times.all_exposed_s == pytest.approx(0.32)


def test_before_the_first_pass_nothing_is_known() -> None:
    assert ddp._times_of({"iteration": 0}, 4) is None
    assert ReducerTimes().all_exposed_s is None
