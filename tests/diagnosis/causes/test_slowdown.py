"""The finding of a run that gets slower, and what other causes are left with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.measurements.gpu import DeviceState, StepLook
from lightning_gpuopt.measurements.phases import WindowRecord
from tests.diagnosis.numbers import WALL_S, gpu, host, measurement, times

HOOK = "Slow.on_train_batch_end"


def samples(before_ms: float, after_ms: float, part: str, held: dict[str, float] | None = None, **more: Any) -> Any:
    """Ten samples of ten steps, the last five slower."""
    grown = held or {}
    return tuple(
        WindowRecord(
            10,
            10 * (index + 1),
            each / 100,
            {part: (each - 50) / 100, "backward": 0.5},
            {name: value if index >= 5 else 0.0 for name, value in grown.items()},
            **more,
        )
        for index, each in enumerate([before_ms] * 5 + [after_ms] * 5)
    )


def slower(part: str = "forward", held: dict[str, float] | None = None, **more: Any) -> Measurement:
    return measurement(
        times(**({"callbacks": {HOOK: 3.0}} if part == HOOK else {})), history=samples(80, 120, part, held), **more
    )


def test_it_says_since_when_and_what() -> None:
    (finding,) = diagnose(slower(held={"rss_mib": 3000.0, "open_files": 3, "alloc_retries": 12}), 0.1)
    assert (finding.cause, finding.share) == ("slowdown", pytest.approx(0.2))
    assert finding.evidence == {
        "from_ms": 80.0,
        "to_ms": 120.0,
        "since_step": 50,
        "phase": "forward",
        "phase_from_ms": 30.0,
        "phase_to_ms": 70.0,
        "rss_mib_grown": 3000.0,
        "alloc_retries_grown": 12.0,
    }
    assert finding.advice.startswith("A step took 80 ms, and takes 120 ms since step 50: forward grows. ")
    assert "expandable_segments:True" in finding.advice


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("data_wait", "a dataset that keeps what it reads"),
        ("logging", "what the logger keeps"),
        ("garbage_collection", "More and more Python objects"),
        ("gpu_work", "longer sequences"),
        (HOOK, f"what {HOOK} iterates over"),
        ("backward_of_mine", "a growing list, hook or graph"),
    ],
)
def test_the_advice_follows_from_what_grows(part: str, words: str) -> None:
    finding = diagnose(slower(part), 0.1)[0]
    assert finding.cause == "slowdown"
    assert words in finding.advice


def test_a_list_that_keeps_graphs_is_named() -> None:
    grows = "Model.losses (list) grew from 0 to 12,000 entries and holds 3 GiB of tensors with their autograd graphs"
    (finding,) = diagnose(slower(grows=grows), 0.1)
    assert finding.evidence["grows"] == grows
    assert f"{grows}. Keep loss.detach()" in finding.advice


def test_the_hook_that_grows_is_no_second_cause() -> None:
    assert [each.cause for each in diagnose(slower(HOOK), 0.1)] == ["slowdown"]


def test_a_hook_that_was_slow_before_keeps_its_share() -> None:
    measured = measurement(times(callbacks={HOOK: 7.0}), history=samples(120, 160, HOOK))
    assert [(each.cause, each.share) for each in diagnose(measured, 0.1)] == [
        ("callback", pytest.approx(0.5)),
        ("slowdown", pytest.approx(0.2)),
    ]


def test_steps_that_slow_down_with_the_clocks_are_throttled() -> None:
    hot = DeviceState(throttled_percent=80.0, sm_clock_mhz=1000.0, sm_clock_mhz_max=1980.0)
    run = gpu(compute_s=WALL_S)
    look = StepLook(3, busy_s=0.1, launch_idle_s=0.0, sync_idle_s=0.0)
    measured = slower("gpu_work", {"sm_clock_mhz": 1.0}, gpu=run, device=hot, look=look)
    assert [each.cause for each in diagnose(measured, 0.1)] == ["gpu_throttled"]
    cool = replace(measured, device=replace(hot, throttled_percent=0.0))
    assert [each.cause for each in diagnose(cool, 0.1)] == ["slowdown"]


def test_a_clock_that_falls_meanwhile_is_said() -> None:
    falling = tuple(
        replace(sample, held={"sm_clock_mhz": 1900.0 - 100 * index})
        for index, sample in enumerate(samples(80, 120, "gpu_work"))
    )
    (finding,) = diagnose(measurement(times(), history=falling), 0.1)
    assert (finding.evidence["sm_clock_from_mhz"], finding.evidence["sm_clock_to_mhz"]) == (1900, 1000)
    assert "The GPU's clock fell meanwhile" in finding.advice


class TestInsideTheStep:
    """A GPU that is idle inside the steps for another reason than launching."""

    def idle(self, **more: Any) -> Measurement:
        run = gpu(compute_s=8.0, compute_bound_s=8.0)
        look = StepLook(3, busy_s=0.04, launch_idle_s=0.04, sync_idle_s=0.0)
        return measurement(times(), gpu=run, look=look, **more)

    def test_it_is_launching_by_itself(self) -> None:
        assert [each.cause for each in diagnose(self.idle(), 0.1)] == ["launch_bound"]

    def test_retries_of_the_allocator_wait_for_the_gpu(self) -> None:
        retried = tuple(
            replace(sample, held={"alloc_retries": sample.end_step * 2.0}) for sample in samples(80, 80, "gpu_work")
        )
        (finding,) = diagnose(self.idle(history=retried), 0.1)
        assert (finding.cause, finding.share) == ("gpu_sync", 0.5)
        assert finding.evidence["alloc_retries_per_step"] == 2.0
        assert "expandable_segments:True" in finding.advice

    def test_a_host_bound_to_one_full_cpu_is_saturated(self) -> None:
        (finding,) = diagnose(self.idle(host=host(free=0.05, usable=1.0, affinity=1)), 0.1)
        assert finding.cause == "cpu_saturated"
        assert finding.evidence["cpu_affinity"] == 1
        assert "--cpu-bind" in finding.advice

    def test_one_cpu_that_is_not_full_is_evidence(self) -> None:
        (finding,) = diagnose(self.idle(host=host(free=0.5, usable=1.0, affinity=1)), 0.1)
        assert finding.cause == "launch_bound"
        assert finding.evidence["cpu_affinity"] == 1

    def test_memory_that_comes_back_from_swap_is_evidence(self) -> None:
        (finding,) = diagnose(self.idle(host=host(swapped_in_mib_s=20.0)), 0.1)
        assert finding.evidence["swap_mib_per_s"] == 20.0
        assert "short of memory" in finding.advice


def test_loading_in_a_process_bound_to_one_cpu_says_so() -> None:
    measured = measurement(times(data_wait=5.0), host=host(0.9, free=0.05, usable=1.0, affinity=1))
    (finding,) = diagnose(measured, 0.1)
    assert finding.cause == "cpu_saturated"
    assert finding.evidence["cpu_affinity"] == 1
    assert "taskset" in finding.advice
