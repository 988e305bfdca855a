"""What a table of kernels says of a script's settings."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt.diagnosis.kernel_hints import kernel_hints
from lightning_gpuopt.diagnosis.record import Hint
from lightning_gpuopt.measurements.kernels import KERNEL_KINDS, StepKernels

TF32 = Hint(
    "float32_matmul_precision", "A step multiplies.", "torch.set_float32_matmul_precision", {"work_percent": 90}
)


def kernels(**shares: Any) -> StepKernels:
    more = {name: shares.pop(name) for name in list(shares) if name not in KERNEL_KINDS}
    return StepKernels(0.1, {kind: shares.get(kind, 0.0) for kind in KERNEL_KINDS}, **more)


def names(table: StepKernels | None, known: tuple[Hint, ...] = ()) -> list[str]:
    return [each.name for each in kernel_hints(table, 0.9, known)]


def test_without_a_look_the_hints_are_as_they_were() -> None:
    assert kernel_hints(None, 0.9, [TF32]) == [TF32]


def test_products_without_tensor_cores_say_what_the_others_could_bring() -> None:
    (hint,) = kernel_hints(kernels(matmul=0.5), 0.9, [TF32])
    assert hint.evidence["matmul_percent"] == 50.0
    assert hint.evidence["gain_at_most"] == pytest.approx(1 / (1 - 0.5 * 7 / 8 * 0.9), abs=0.01)
    assert hint.text.endswith("take 50% of the GPU's work: 1.65x at most.")
    assert kernel_hints(kernels(matmul=0.05), 0.9, [TF32]) == [TF32]


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (kernels(convolution=0.6, transposes_share=0.06), "channels_last"),
        (kernels(optimizer=0.12, optimizer_per_step=40.0), "fused_optimizer"),
        (kernels(elementwise=0.4), "compile"),
        (kernels(other=0.9, short_per_step=900.0, short_share=0.2), "short_kernels"),
    ],
)
def test_each_kind_has_its_remedy(table: StepKernels, name: str) -> None:
    assert names(table) == [name]


@pytest.mark.parametrize(
    "table",
    [
        kernels(matmul_tensor_core=0.9),
        kernels(convolution=0.6, transposes_share=0.04),
        kernels(optimizer=0.12, optimizer_per_step=2.0),  # fused already
        kernels(elementwise=0.2),
        kernels(other=0.9, short_per_step=900.0, short_share=0.05),
    ],
)
def test_what_is_little_has_none(table: StepKernels) -> None:
    assert names(table) == []


def test_a_gain_is_told_only_where_it_can_be_computed() -> None:
    hints = kernel_hints(
        kernels(elementwise=0.4, optimizer=0.3, optimizer_per_step=40.0, transposes_share=0.1), 1.0, []
    )
    assert {each.name: "gain_at_most" in each.evidence for each in hints} == {
        "channels_last": True,
        "fused_optimizer": False,
        "compile": False,
    }
