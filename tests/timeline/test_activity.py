"""Activity records of a few steps: what the GPU was idle for, and what the host did."""

from __future__ import annotations

import pytest

from lightning_gpuopt.measurements.gpu import StepLook
from lightning_gpuopt.timeline.activity import (
    CALL,
    COLLECTIVE,
    COPY,
    KERNEL,
    WAIT,
    Activity,
    ActivitySpan,
    kind_of,
    look_of,
)


@pytest.mark.parametrize(
    ("name", "on_device", "kind"),
    [
        ("volta_sgemm_128x64_nn", True, KERNEL),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True, COLLECTIVE),
        ("Memcpy HtoD (Pinned -> Device)", True, COPY),
        ("Memset (Device)", True, KERNEL),
        ("Memcpy DtoD (Device -> Device)", True, KERNEL),
        ("ProfilerStep#3", True, None),
        ("cudaLaunchKernel", False, CALL),
        ("cudaMemcpyAsync", False, CALL),
        ("cudaStreamSynchronize", False, WAIT),
        ("cudaDeviceSynchronize", False, WAIT),
        ("hipMemcpy", False, WAIT),
        ("aten::add", False, None),
    ],
)
def test_a_records_name_says_what_it_is(name: str, on_device: bool, kind: str | None) -> None:
    assert kind_of(name, on_device=on_device) == kind


def kernels(*parts: tuple[float, float]) -> list[Activity]:
    return [Activity(KERNEL, *part) for part in parts]


def test_gaps_between_kernels_are_launching() -> None:
    # 10 kernels of 1 ms, every 4 ms; the host needs 40 ms for them
    records = kernels(*((index * 0.004, index * 0.004 + 0.001) for index in range(10)))
    records += [Activity(CALL, index * 0.004 - 1e-5, index * 0.004) for index in range(10)]
    look = look_of(records, [ActivitySpan(0.0, 0.037, -1e-5, 0.036)])
    assert look == StepLook(1, pytest.approx(0.01), pytest.approx(0.027), 0.0, 0.0, calls=10)


def test_what_follows_a_wait_is_waiting_unless_the_host_is_too_slow_anyway() -> None:
    # forward 20 ms, issued in 5; the host waits for it, and then needs 25 ms to issue the 10 ms of the backward
    records = kernels((0.0, 0.02), *((0.0225 + index * 0.0025, 0.0235 + index * 0.0025) for index in range(10)))
    records.append(Activity(WAIT, 0.005, 0.02))
    look = look_of(records, [ActivitySpan(0.0, 0.046, 0.0, 0.045)])
    assert look is not None
    assert (look.busy_s, look.launch_idle_s) == (pytest.approx(0.03), pytest.approx(0.0))
    assert look.sync_idle_s == pytest.approx(0.016)


def test_a_host_that_is_too_slow_is_so_with_a_wait_at_the_end_too() -> None:
    records = kernels(*((index * 0.004, index * 0.004 + 0.001) for index in range(10)))
    records.append(Activity(WAIT, 0.0361, 0.037))
    look = look_of(records, [ActivitySpan(0.0, 0.037, 0.0, 0.037)])
    assert look is not None
    assert look.sync_idle_s < 0.002 < look.launch_idle_s


def test_a_collective_that_waits_is_busy_and_exposed_where_nothing_else_runs() -> None:
    records = [*kernels((0.0, 0.03), (0.05, 0.06)), Activity(COLLECTIVE, 0.02, 0.05)]
    look = look_of(records, [ActivitySpan(0.0, 0.06, 0.0, 0.01)])
    assert look is not None
    assert (look.busy_s, look.idle_s, look.communication_s) == (
        pytest.approx(0.06),
        pytest.approx(0),
        pytest.approx(0.02),
    )


@pytest.mark.parametrize(("at", "found"), [((0.01, 0.012), True), ((0.03, 0.05), False)])
def test_a_collective_in_the_forward_is_seen(at: tuple[float, float], found: bool) -> None:
    records = [*kernels((0.0, 0.06)), Activity(COLLECTIVE, *at)]
    look = look_of(records, [ActivitySpan(0.0, 0.06, 0.0, 0.01, (0.0, 0.02))])
    assert look is not None
    assert look.forward_collectives is found


def test_copies_alone_are_idle_time() -> None:
    look = look_of([*kernels((0.0, 0.01)), Activity(COPY, 0.01, 0.02)], [ActivitySpan(0.0, 0.02, 0.0, 0.005)])
    assert look is not None
    assert look.launch_idle_s == pytest.approx(0.01)


def test_kernels_of_other_steps_and_streams_are_laid_over_each_other_and_cut() -> None:
    records = kernels((-0.01, 0.002), (0.001, 0.004), (0.003, 0.003), (0.009, 0.02))
    look = look_of(records, [ActivitySpan(0.0, 0.01, 0.0, 0.001)])
    assert look is not None
    assert (look.busy_s, look.idle_s) == (pytest.approx(0.005), pytest.approx(0.005))


def test_without_a_record_in_the_steps_there_is_nothing_to_say() -> None:
    assert look_of([], [ActivitySpan(0, 1, 0, 1)]) is None
    assert look_of(kernels((5, 6)), [ActivitySpan(0, 1, 0, 1)]) is None
    assert look_of(kernels((0, 1)), []) is None
