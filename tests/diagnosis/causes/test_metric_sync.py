"""Metrics that are reduced over the ranks in each step: logging, but for the wait for a slower rank."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.measurements.gpu import StepLook
from lightning_gpuopt.measurements.ranks import GradientSync, MetricSync, RankWork
from tests.diagnosis.numbers import TWO_WORKERS, gpu, measurement, times


def find(*syncs_s: float | None, logging_s: float = 3.0, sync_s: float = 3.0, compute_s: float = 0.0) -> list[Any]:
    """Findings of 100 steps in 10 s, of which this rank's logging took so much; others by ms of their steps."""
    ranks = tuple(RankWork(rank, 0.0, compute_s * rank, metric_sync_s=each) for rank, each in enumerate(syncs_s))
    metrics = MetricSync(200, sync_s, ("loss", "accuracy"))
    measured = times(logging=logging_s)
    return diagnose(measurement(measured, TWO_WORKERS, ranks=ranks, metrics=metrics), 0.1)


def test_what_every_rank_waits_for_metrics_is_logging() -> None:
    (finding,) = find(0.03, 0.025)
    assert (finding.cause, finding.share) == ("logging", pytest.approx(0.25))
    assert finding.evidence == {
        "ms_per_step": 25.0,
        "step_ms": 100.0,
        "metric": "loss, accuracy",
        "sync_ms_per_step": 25.0,
        "syncs_per_step": 2.0,
    }
    assert "sync_dist=True" in finding.advice


def test_the_wait_for_a_slower_rank_is_not() -> None:
    (finding,) = find(0.03, 0.001, compute_s=0.029)
    assert (finding.cause, finding.evidence["rank"]) == ("straggler", 1)


def test_without_the_other_ranks_figures_it_is_not() -> None:
    assert find() == find(0.03) == find(0.03, None) == []


def test_calls_of_the_loggers_are_logging_beside_it() -> None:
    (finding,) = find(0.005, 0.005, logging_s=3.0, sync_s=0.5)
    assert (finding.cause, finding.share) == ("logging", pytest.approx(0.3))
    assert "log_every_n_steps" in finding.advice
    assert finding.evidence["sync_ms_per_step"] == 5.0
    (alone,) = find(logging_s=3.0, sync_s=0.5)
    assert alone.share == pytest.approx(0.25)
    assert "metric" not in alone.evidence


def test_on_cuda_communication_names_the_metrics_reduced_in_the_forward() -> None:
    look = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.03, calls=9, forward_collectives=True)
    known: dict[str, Any] = {"gradients": GradientSync(), "metrics": MetricSync(100, 9.0, ("loss",))}
    (finding,) = diagnose(measurement(times(), gpu=gpu(), look=look, **known), 0.1)
    assert (finding.cause, finding.evidence["metric"]) == ("communication", "loss")
    assert "reduce loss once an epoch" in finding.advice
    outside = StepLook(3, 0.1, 0.0, 0.0, communication_s=0.03, calls=9)
    (finding,) = diagnose(measurement(times(), gpu=gpu(), look=outside, **known), 0.1)
    assert "metric" not in finding.evidence
