"""What the kernels of a step say of its settings. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpuopt.diagnosis.record import Hint
from lightning_gpuopt.measurements.kernels import StepKernels

_WORTH: Final = 0.1  # share of the GPU's work from which on a kind of kernel is worth a hint
# TF32 is at most 8x float32 on an A100, 7x on an H100, less on others (NVIDIA's data sheets); memory may limit it
_TENSOR_CORES_FASTER: Final = 8.0
_CHAINS: Final = 0.3
_MANY_LAUNCHES: Final = 20


def kernel_hints(kernels: StepKernels | None, work_share: float, known: Sequence[Hint]) -> list[Hint]:
    """Settings to gain from, by the kernels of a mean step, after those ``known``, to which the kernels may add."""
    if kernels is None:
        return list(known)
    text, evidence = _plain_products(kernels, work_share)
    names = {each.name for each in known}
    told = [
        replace(each, text=each.text + text, evidence=each.evidence | evidence)
        if each.name in ("float32_matmul_precision", "precision")
        else each
        for each in known
    ]
    return [*told, *(each for each in _hints(kernels, work_share) if each.name not in names)]


def _plain_products(kernels: StepKernels, work_share: float) -> tuple[str, dict[str, float]]:
    """What matrix products without tensor cores take, and what they could gain at most."""
    share = kernels.kinds.get("matmul", 0.0)
    if share < _WORTH:
        return "", {}
    most = _gain_of(share * (1 - 1 / _TENSOR_CORES_FASTER), work_share)
    text = f" Matrix products without tensor cores take {share:.0%} of the GPU's work: {most:.2f}x at most."
    return text, {"matmul_percent": round(share * 100, 1), "gain_at_most": round(most, 2)}


def _hints(kernels: StepKernels, work_share: float) -> Iterator[Hint]:
    transposes = kernels.transposes_share
    if transposes >= _WORTH / 2:
        most = _gain_of(transposes, work_share)
        text = (
            f"cuDNN converts images between memory formats for {transposes:.0%} of the GPU's work. Images already in "
            f"its convolutions' format need no conversion: the gain is {most:.2f}x at most."
        )
        evidence = {"transposes_percent": round(transposes * 100, 1), "gain_at_most": round(most, 2)}
        yield Hint(
            "channels_last", text, "model.to(memory_format=torch.channels_last), and the same for batches", evidence
        )
    optimizer = kernels.kinds.get("optimizer", 0.0)
    if optimizer >= _WORTH and kernels.optimizer_per_step >= _MANY_LAUNCHES:
        text = (
            f"The optimizer takes {optimizer:.0%} of the GPU's work in {kernels.optimizer_per_step:.0f} kernels a "
            "step: a fused one reads weights, gradients and states once."
        )
        evidence = {"optimizer_percent": round(optimizer * 100, 1), "kernels": round(kernels.optimizer_per_step)}
        yield Hint("fused_optimizer", text, "optimizer(..., fused=True)", evidence)
    chains = kernels.kinds.get("elementwise", 0.0)
    if chains >= _CHAINS:
        text = (
            f"Elementwise kernels take {chains:.0%} of the GPU's work: they wait for memory, and torch.compile fuses "
            "consecutive ones."
        )
        yield Hint("compile", text, "torch.compile(model)", {"elementwise_percent": round(chains * 100, 1)})
    if kernels.short_share >= _WORTH:
        text = (
            f"{kernels.short_per_step:.0f} kernels a step are shorter than 10 µs, {kernels.short_share:.0%} of the "
            "GPU's work: most of the GPU is idle in each. Larger batches, or CUDA graphs, help."
        )
        evidence = {
            "short_kernels": round(kernels.short_per_step),
            "short_percent": round(kernels.short_share * 100, 1),
        }
        yield Hint("short_kernels", text, 'torch.compile(model, mode="reduce-overhead")', evidence)


def _gain_of(spared: float, work_share: float) -> float:
    """Steps per second, after over before, where so much of the GPU's work is spared and the GPU works that much."""
    return 1 / max(1 - spared * min(work_share, 1.0), 0.05)
