"""Records of a few steps: what the GPU was idle for, and what the host did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.measurements.gpu import StepCopies, StepLook
from lightning_gpuopt.measurements.kernels import KernelShare
from lightning_gpuopt.timeline.activity import ActivitySpan, look_of
from lightning_gpuopt.timeline.records import Kind, Record


def record(kind: Kind, start_s: float, end_s: float, number: int = 0, name: str = "", nbytes: int = 0) -> Record:
    return Record(kind, name or kind, start_s, end_s, number, 7, nbytes)


def kernels(*parts: tuple[float, float]) -> list[Record]:
    return [record("kernel", *part) for part in parts]


def wait(start_s: float, end_s: float) -> Record:
    return record("call", start_s, end_s, name="cudaStreamSynchronize")


def test_gaps_between_kernels_are_launching() -> None:
    # 10 kernels of 1 ms, every 4 ms; the host needs 40 ms for them
    records = kernels(*((index * 0.004, index * 0.004 + 0.001) for index in range(10)))
    records += [record("call", index * 0.004 - 1e-5, index * 0.004) for index in range(10)]
    look = look_of(records, [ActivitySpan(0.0, 0.037, -1e-5, 0.036)])
    assert look is not None
    assert replace(look, kernels=None) == StepLook(
        1, pytest.approx(0.01), pytest.approx(0.027), 0.0, calls=10, correlated=False
    )


def test_what_follows_a_wait_is_waiting_unless_the_host_is_too_slow_anyway() -> None:
    # forward 20 ms, issued in 5; the host waits for it, and then needs 25 ms to issue the 10 ms of the backward
    records = kernels((0.0, 0.02), *((0.0225 + index * 0.0025, 0.0235 + index * 0.0025) for index in range(10)))
    records.append(wait(0.005, 0.02))
    look = look_of(records, [ActivitySpan(0.0, 0.046, 0.0, 0.045)])
    assert look is not None
    assert (look.busy_s, look.launch_idle_s) == (pytest.approx(0.03), pytest.approx(0.0))
    assert look.sync_idle_s == pytest.approx(0.016)


def test_a_host_that_is_too_slow_is_so_with_a_wait_at_the_end_too() -> None:
    records = kernels(*((index * 0.004, index * 0.004 + 0.001) for index in range(10)))
    records.append(wait(0.0361, 0.037))
    look = look_of(records, [ActivitySpan(0.0, 0.037, 0.0, 0.037)])
    assert look is not None
    assert look.sync_idle_s < 0.002 < look.launch_idle_s


def test_a_collective_that_waits_is_busy_and_exposed_where_nothing_else_runs() -> None:
    records = [*kernels((0.0, 0.03), (0.05, 0.06)), record("collective", 0.02, 0.05)]
    look = look_of(records, [ActivitySpan(0.0, 0.06, 0.0, 0.01)])
    assert look is not None
    assert (look.busy_s, look.idle_s, look.communication_s) == (
        pytest.approx(0.06),
        pytest.approx(0),
        pytest.approx(0.02),
    )


@pytest.mark.parametrize(("at", "found"), [((0.01, 0.012), True), ((0.03, 0.05), False)])
def test_a_collective_in_the_forward_is_seen(at: tuple[float, float], found: bool) -> None:
    records = [*kernels((0.0, 0.06)), record("collective", *at)]
    look = look_of(records, [ActivitySpan(0.0, 0.06, 0.0, 0.01, (0.0, 0.02))])
    assert look is not None
    assert look.forward_collectives is found


TO_HOST, TO_DEVICE = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
STEP = ActivitySpan(0.0, 0.1, 0.0, 0.09)


def issued(
    kind: Kind, start_s: float, end_s: float, number: int, at_s: float, name: str = "", to_s: float = 0.0
) -> list[Record]:
    """A record of the GPU, and the call that issued it."""
    call = record(
        "call", at_s, to_s or at_s + 5e-6, number, "cudaMemcpyAsync" if kind == "copy" else "cudaLaunchKernel"
    )
    return [record(kind, start_s, end_s, number, name, 1000 if kind == "copy" else 0), call]


def test_the_gpu_waits_for_a_copy_if_the_next_kernel_was_issued_before_its_end() -> None:
    records = issued("kernel", 0.0, 0.04, 1, 0.0) + issued("copy", 0.04, 0.07, 2, 0.001, TO_HOST)
    look = look_of([*records, *issued("kernel", 0.07, 0.1, 3, 0.002)], [STEP])
    assert look is not None
    assert (look.busy_s, look.copy_idle_s, look.launch_idle_s, look.sync_idle_s) == pytest.approx((0.07, 0.03, 0, 0))
    assert look.copies == StepCopies("device to host", pytest.approx(0.03), 1000)


def test_a_copy_beside_a_host_that_is_too_slow_costs_nothing() -> None:
    records = issued("kernel", 0.0, 0.04, 1, 0.0) + issued("copy", 0.04, 0.06, 2, 0.001, TO_HOST)
    look = look_of([*records, *issued("kernel", 0.08, 0.1, 3, 0.08)], [STEP])
    assert look is not None
    assert (look.copy_idle_s, look.launch_idle_s) == pytest.approx((0.0, 0.04))


def test_a_copy_that_another_step_has_issued_is_not_the_steps() -> None:
    records = issued("kernel", 0.0, 0.04, 1, 0.0) + issued("copy", 0.04, 0.07, 2, -0.01, TO_DEVICE)
    look = look_of([*records, *issued("kernel", 0.07, 0.1, 3, 0.002)], [STEP])
    assert look is not None
    assert (look.copy_idle_s, look.copies) == (0.0, None)


def test_a_call_that_comes_back_with_its_copy_is_a_wait() -> None:
    # 20 ms of kernels, then 1 ms of a copy of pageable memory, which blocks; the host needs 40 ms for the other 10
    records = issued("kernel", 0.0, 0.02, 1, 0.0) + issued("copy", 0.02, 0.021, 2, 0.005, TO_HOST, to_s=0.021)
    for index in range(10):
        records += issued("kernel", 0.025 + index * 0.004, 0.026 + index * 0.004, 3 + index, 0.025 + index * 0.004)
    look = look_of(records, [ActivitySpan(0.0, 0.062, 0.0, 0.0615)])
    assert look is not None
    assert look.copy_idle_s == pytest.approx(0.001)
    assert look.launch_idle_s == pytest.approx(0.0615 - 0.016 - 0.03 - 0.001)
    assert look.sync_idle_s == pytest.approx(0.031 - 0.0145)


def test_the_end_of_a_step_waits_for_its_last_copy() -> None:
    records = issued("kernel", 0.0, 0.04, 1, 0.0) + issued("copy", 0.04, 0.1, 2, 0.001, TO_DEVICE)
    look = look_of(records, [ActivitySpan(0.0, 0.1, 0.0, 0.005)])
    assert look is not None
    assert (look.copy_idle_s, look.launch_idle_s) == pytest.approx((0.06, 0.0))


def test_copies_of_both_directions_are_told() -> None:
    records = issued("kernel", 0.0, 0.04, 1, 0.0) + issued("copy", 0.04, 0.07, 2, 0.001, TO_HOST)
    look = look_of([*records, *issued("copy", 0.07, 0.1, 3, 0.002, TO_DEVICE)], [STEP])
    assert look is not None
    assert look.copies == StepCopies("both", pytest.approx(0.06), 2000)


def test_what_was_issued_before_the_look_is_the_steps_between_whose_kernels_it_lies_on_their_stream() -> None:
    before = [record("kernel", 0.0, 0.04, 1), record("copy", 0.04, 0.07, 2, TO_HOST), record("kernel", 0.07, 0.1, 3)]
    known = issued("kernel", 0.1, 0.2, 4, 0.09)
    look = look_of([*before, *known], [STEP])
    assert look is not None
    assert (look.copy_idle_s, look.launch_idle_s) == pytest.approx((0.03, 0.0))
    elsewhere = [replace(each, stream=9) if each.kind == "copy" else each for each in before]
    look = look_of([*elsewhere, *known], [STEP])
    assert look is not None
    assert (look.copy_idle_s, look.launch_idle_s) == pytest.approx((0.0, 0.03))


def test_without_correlation_the_host_is_what_a_gap_after_a_copy_is_attributed_to() -> None:
    records = [*kernels((0.0, 0.01)), record("copy", 0.01, 0.02, name=TO_HOST), *kernels((0.03, 0.04))]
    look = look_of(records, [ActivitySpan(0.0, 0.04, 0.0, 0.035)])
    assert look is not None
    assert (look.launch_idle_s, look.copy_idle_s, look.correlated) == (pytest.approx(0.02), 0.0, False)


def test_kernels_of_other_steps_and_streams_are_laid_over_each_other_and_cut() -> None:
    records = kernels((-0.01, 0.002), (0.001, 0.004), (0.003, 0.003), (0.009, 0.02))
    look = look_of(records, [ActivitySpan(0.0, 0.01, 0.0, 0.001)])
    assert look is not None
    assert (look.busy_s, look.idle_s) == (pytest.approx(0.005), pytest.approx(0.005))


def test_without_a_record_in_the_steps_there_is_nothing_to_say() -> None:
    assert look_of([], [ActivitySpan(0, 1, 0, 1)]) is None
    assert look_of(kernels((5, 6)), [ActivitySpan(0, 1, 0, 1)]) is None
    assert look_of(kernels((0, 1)), []) is None


def test_what_a_step_has_issued_is_in_its_table() -> None:
    own = issued("kernel", 0.0, 0.04, 1, 0.0, "ampere_sgemm_128x64_tn") + issued("copy", 0.04, 0.06, 2, 0.01, TO_HOST)
    update = issued("kernel", 0.06, 0.08, 3, 0.05, "multiply") + issued("collective", 0.0, 0.02, 4, 0.02)
    other = issued("kernel", 0.1, 0.2, 5, 0.095, "of_a_hook")
    step = replace(STEP, optimizer_s=((0.04, 0.06),))
    modules = {0.0: "net.0", 0.01: "", 0.02: "net.1"}
    look = look_of([*own, *update, *other], [step], lambda moment_s: modules[moment_s])
    assert look is not None
    assert look.kernels is not None
    assert {kind: share for kind, share in look.kernels.kinds.items() if share} == pytest.approx(
        {"matmul": 0.4, "copy": 0.2, "optimizer": 0.2, "communication": 0.2}
    )
    assert look.kernels.dearest[0] == KernelShare("ampere_sgemm_128x64_tn", "matmul", pytest.approx(0.4), 1.0, "net.0")
    assert look.kernels.unassigned == pytest.approx(0.4)  # the copy, and the optimizer
    assert look.kernels.optimizer_per_step == 1.0


def test_other_threads_of_the_program_hold_up_no_step() -> None:
    # 10 kernels of 1 ms, every 4 ms; another thread copies all the time, and waits for its copies
    records: list[Record] = []
    for index in range(10):
        records += issued("kernel", index * 0.004, index * 0.004 + 0.001, 1 + index, index * 0.004 - 1e-5)
    alone = look_of(records, [ActivitySpan(0.0, 0.037, -1e-5, 0.036)])
    for index in range(10):
        copy, call = issued("copy", index * 0.004 + 0.001, index * 0.004 + 0.0035, 50 + index, index * 0.004, TO_DEVICE)
        waits = record("call", index * 0.004, index * 0.004 + 0.0035, name="cudaStreamSynchronize")
        records += [copy, replace(call, thread=7), replace(waits, thread=7)]
    beside = look_of(records, [ActivitySpan(0.0, 0.037, -1e-5, 0.036)])
    assert alone is not None
    assert beside is not None
    assert (beside.launch_idle_s, beside.sync_idle_s, beside.copy_idle_s) == pytest.approx((0.027, 0.0, 0.0))
    assert replace(beside, kernels=None) == replace(alone, kernels=None)
