"""The reduction of metrics in steps: timed there only, and the same to Lightning as what it stands for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from lightning_gpuopt.detector.metric_sync import TimedReduce
from lightning_gpuopt.measurements.ranks import MetricSync
from lightning_gpuopt.timeline.phases import Timeline


class Strategy:
    """Its ``reduce`` takes the value as it is."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return (tensor, group, reduce_op)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy)

    def __hash__(self) -> int:
        return 1


def started() -> Timeline:
    timeline = Timeline()
    timeline.start()
    return timeline


@pytest.mark.parametrize(
    ("action", "calls"),
    [
        ("[Strategy]DDPStrategy.training_step", 1),
        ("[Callback]Mine.on_train_batch_end", 1),
        ("[Callback]Mine.on_train_epoch_end", 0),
        ("[Callback]Mine.on_validation_epoch_end", 0),
        ("run_training_epoch", 0),
    ],
)
def test_only_what_lies_in_a_step_is_timed(action: str, calls: int) -> None:
    timeline = started()
    reduce = TimedReduce(Strategy().reduce, timeline)
    with timeline.span(action):
        assert reduce(3, reduce_op="sum") == (3, None, "sum")
    timeline.stop()
    assert reduce.times.calls == calls
    assert (timeline.times().phases["logging"] > 0) is (calls > 0)
    assert (reduce.times.seconds > 0) is (calls > 0)


def test_an_error_is_the_strategys_own() -> None:
    timeline = started()

    def fail(tensor: Any) -> Any:
        raise RuntimeError("connection closed")

    reduce = TimedReduce(fail, timeline)
    with pytest.raises(RuntimeError, match="connection closed"), timeline.span("[Strategy]DDPStrategy.training_step"):
        reduce(1)
    assert reduce.times.calls == 1


def test_it_is_equal_to_what_it_stands_for() -> None:
    """Lightning compares it with that of the last ``self.log``, which may have been in a fit without a detector."""
    strategy, timeline = Strategy(), started()
    reduce = TimedReduce(strategy.reduce, timeline)
    assert reduce == strategy.reduce
    assert strategy.reduce == reduce
    assert reduce == TimedReduce(strategy.reduce, started())
    assert hash(reduce) == hash(strategy.reduce)
    assert reduce != print


def test_it_is_pickled_as_what_it_stands_for() -> None:
    reduce = TimedReduce(Strategy().reduce, started())
    again = pickle.loads(pickle.dumps(reduce))
    assert (again.__self__, again.__name__) == (Strategy(), "reduce")


def test_off_the_training_thread_nothing_is_measured() -> None:
    timeline = Timeline()
    reduce = TimedReduce(Strategy().reduce, timeline)
    assert reduce(1) == (1, None, "mean")
    assert reduce.times == MetricSync()
