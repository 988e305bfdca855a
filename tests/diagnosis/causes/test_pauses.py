"""Collections and compilations, from numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose, remarks
from lightning_gpuopt.measurements.gpu import DeviceState, StepLook
from lightning_gpuopt.measurements.host import Collections, Compilations
from tests.diagnosis.numbers import STEPS, gpu, measurement, times

OFTEN = Collections((400, 20, 100), seconds=2.0, longest_s=0.05, tracked=900_000)
RECOMPILES = Compilations(30, 20, "f (m.py:3)", "tensor 'x' size mismatch at index 0. expected 3, actual 4")


def test_a_collection_is_not_also_the_callback_that_it_stopped() -> None:
    hook = "Slow.on_train_batch_end"
    stopped = replace(times(callbacks={hook: 2.5}), collecting={hook: 2.0})
    (finding,) = diagnose(measurement(stopped, collections=OFTEN), 0.1)
    assert (finding.cause, finding.share) == ("garbage_collection", 0.2)
    assert finding.evidence == {
        "ms_per_step": 20.0,
        "step_ms": 100.0,
        "generation_0_per_step": 4.0,
        "generation_1_per_step": 0.2,
        "generation_2_per_step": 1.0,
        "longest_pause_ms": 50.0,
        "objects_tracked": 900_000,
    }
    assert "gc.freeze()" in finding.advice
    assert "gc.collect(1) every n steps" in finding.advice
    assert finding.predicted_speedup == pytest.approx((100 / 90, 100 / 80, 1.08 * 100 / 80), rel=0.03)


def test_a_program_that_asks_for_collections_is_told_where() -> None:
    stopped = replace(times(), collecting={"forward": 2.0})
    asked = replace(OFTEN, where="training_step (model.py:12)", where_share=0.9)
    (finding,) = diagnose(measurement(stopped, collections=asked), 0.1)
    assert finding.evidence["where"] == "90 % training_step (model.py:12)"
    assert "at training_step (model.py:12): remove it there" in finding.advice


def test_one_long_collection_is_a_note() -> None:
    stopped = replace(times(), collecting={"forward": 2.0})
    measured = measurement(stopped, collections=replace(OFTEN, longest_s=1.2))
    assert diagnose(measured, 0.1) == []
    assert remarks(measured, 0.1) == [
        "Python's garbage collector took 20% of the time, most of it in one collection of 1.20 s: in a longer run this "
        "share shrinks."
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("tensor 'x' size mismatch at index 0. expected 3, actual 4", "drop_last=True"),
        ("number == 2", "pass it as a tensor"),
        ("self.training", "Keep it the same"),
    ],
)
def test_the_remedy_for_recompilation_follows_from_the_reason(reason: str, words: str) -> None:
    stopped = replace(times(), compiling={"forward": 3.0})
    (finding,) = diagnose(measurement(stopped, compilations=replace(RECOMPILES, reason=reason)), 0.1)
    assert (finding.cause, finding.share) == ("recompilation", 0.3)
    assert finding.evidence == {
        "ms_per_step": 30.0,
        "step_ms": 100.0,
        "compilations": 30,
        "ms_per_compilation": 100.0,
        "function": "f (m.py:3)",
        "reason": reason,
    }
    assert words in finding.advice


def test_without_a_reason_the_advice_says_how_to_get_one() -> None:
    stopped = replace(times(), compiling={"forward": 3.0})
    (finding,) = diagnose(measurement(stopped, compilations=Compilations(30, 20)), 0.1)
    assert "TORCH_LOGS=recompiles" in finding.advice
    assert "function" not in finding.evidence


def test_a_late_first_compilation_is_a_note() -> None:
    stopped = replace(times(), compiling={"forward": 3.0})
    measured = measurement(stopped, compilations=Compilations(4, 2, given_up=("f (m.py:3)",)))
    assert diagnose(measured, 0.1) == []
    assert remarks(measured, 0.1) == [
        "torch.compile took 30% of the time, in 2 of 100 steps after the warm-up: in a longer run this share shrinks, "
        "and a larger warmup_steps excludes it.",
        "torch.compile gave up on f (m.py:3) after too many recompilations: it now runs eagerly.",
    ]


class TestOnAGpu:
    def test_a_look_at_steps_without_one_does_not_hide_the_pauses(self) -> None:
        # 30 of 100 steps have a pause of 100 ms, the GPU needs 50 ms a step
        run = gpu(compute_s=8.0, compute_bound_s=4.0, paused={"garbage_collection": 3.0}, paused_steps=30)
        look = StepLook(3, busy_s=0.05, launch_idle_s=0.0, sync_idle_s=0.0)
        measured = measurement(times(), gpu=replace(run, paused_compute_s=4.5), look=look, collections=OFTEN)
        (finding,) = diagnose(measured, 0.1)
        assert (finding.cause, finding.share) == ("garbage_collection", 3 / 8)

    def test_where_every_step_has_one_a_look_between_them_does_not_hide_them(self) -> None:
        run = gpu(compute_s=8.0, compute_bound_s=4.0, paused={"garbage_collection": 2.0}, paused_steps=STEPS)
        look = StepLook(3, busy_s=0.05, launch_idle_s=0.0, sync_idle_s=0.0)
        measured = measurement(times(), gpu=replace(run, paused_compute_s=8.0), look=look, collections=OFTEN)
        (finding,) = diagnose(measured, 0.1)
        assert (finding.cause, finding.share) == ("garbage_collection", 0.25)

    def test_what_is_left_of_the_idle_time_is_launching(self) -> None:
        run = gpu(compute_s=8.0, compute_bound_s=7.0, paused={"recompilation": 1.0})
        look = StepLook(3, busy_s=0.03, launch_idle_s=0.05, sync_idle_s=0.0)
        measured = measurement(times(), gpu=run, look=look, compilations=RECOMPILES)
        assert [(each.cause, each.share) for each in diagnose(measured, 0.1)] == [
            ("launch_bound", 0.5),
            ("recompilation", 0.125),
        ]
        assert measured.waterfall.idle_s == pytest.approx(5.0)

    def test_pauses_behind_a_busy_gpu_cost_nothing(self) -> None:
        run = gpu(compute_s=8.0, compute_bound_s=7.0, paused={"garbage_collection": 3.0})
        look = StepLook(3, busy_s=0.08, launch_idle_s=0.0, sync_idle_s=0.0)
        assert diagnose(measurement(times(), gpu=run, look=look, collections=OFTEN), 0.1) == []

    def test_steps_with_a_pause_that_are_longer_need_no_look(self) -> None:
        # 10 steps of 250 ms among 90 of 50 ms, and NVML says nothing
        run = gpu(compute_s=7.0, compute_bound_s=4.0, paused={"recompilation": 2.2}, paused_steps=10)
        measured = measurement(times(), gpu=replace(run, paused_compute_s=2.5), compilations=RECOMPILES)
        (finding,) = diagnose(measured, 0.1)
        assert (finding.cause, finding.share) == ("recompilation", pytest.approx(2.0 / 7.0))

    def test_the_rest_of_nvmls_idle_time_is_within_its_error(self) -> None:
        run = gpu(compute_s=10.0, compute_bound_s=9.0, paused={"garbage_collection": 2.0})
        state = DeviceState(utilization=70.0, seconds=10.0)
        measured = measurement(times(), gpu=run, device=state, collections=OFTEN)
        assert [each.cause for each in diagnose(measured, 0.1)] == ["garbage_collection"]
        assert measured.waterfall.unsure_s == pytest.approx(1.0)
        assert measured.waterfall.steps == STEPS
