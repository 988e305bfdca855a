"""The work of steps added up, in made-up kernels."""

from __future__ import annotations

import pytest

from lightning_gpuopt.measurements.kernels import KERNEL_KINDS, KernelShare
from lightning_gpuopt.timeline.kernel_table import StepWork, table_of


def test_shares_are_of_all_work_and_calls_of_a_mean_step() -> None:
    works = [StepWork("gemm", "matmul", 0.03, "net.0"), StepWork("gemm", "matmul", 0.01, "net.1")] * 2
    table = table_of([*works, StepWork("relu", "elementwise", 0.02, "net.1")], steps=2, modules_watched=True)
    assert table is not None
    assert table.seconds == pytest.approx(0.05)
    assert tuple(table.kinds) == KERNEL_KINDS
    assert {kind: share for kind, share in table.kinds.items() if share} == pytest.approx(
        {"matmul": 0.8, "elementwise": 0.2}
    )
    assert sum(table.kinds.values()) == pytest.approx(1.0)
    assert table.dearest == (
        KernelShare("gemm", "matmul", pytest.approx(0.8), 2.0, "net.0"),
        KernelShare("relu", "elementwise", pytest.approx(0.2), 0.5, "net.1"),
    )
    assert table.unassigned == 0.0


def test_the_five_dearest_are_kept() -> None:
    table = table_of([StepWork(f"k{index}", "other", 0.001 * index) for index in range(1, 9)], steps=1)
    assert table is not None
    assert [each.name for each in table.dearest] == ["k8", "k7", "k6", "k5", "k4"]
    assert table.unassigned is None


def test_short_kernels_are_those_under_ten_microseconds() -> None:
    works = [StepWork("tiny", "elementwise", 5e-6)] * 20 + [StepWork("large", "matmul", 1e-4)]
    table = table_of([*works, StepWork("Memcpy HtoD", "copy", 2e-6)], steps=1)
    assert table is not None
    assert table.short_per_step == 20
    assert table.short_share == pytest.approx(1e-4 / 2.02e-4)


def test_what_cudnn_transposes_is_told() -> None:
    table = table_of([StepWork("nchwToNhwcKernel", "copy", 1.0), StepWork("conv", "convolution", 3.0)], steps=1)
    assert table is not None
    assert table.transposes_share == 0.25


def test_without_work_there_is_no_table() -> None:
    assert table_of([], steps=3) is None
    assert table_of([StepWork("k", "other", 1.0)], steps=0) is None
