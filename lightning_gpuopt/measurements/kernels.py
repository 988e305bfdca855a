"""What the work of a step consists of, as plain data: by kind, and the dearest kernels or operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

KERNEL_KINDS: Final = (
    "matmul_tensor_core",
    "matmul",
    "convolution",
    "attention",
    "normalization",
    "elementwise",
    "reduction",
    "optimizer",
    "copy",
    "communication",
    "other",
)
"""Kinds of work; ``"matmul"`` is without tensor cores, and on a CPU all of it."""


@dataclass(frozen=True, slots=True)
class KernelShare:
    """One of the kernels that take most of the GPU's time; on a CPU, an operator. Guide: ``docs/reports.md``.

    Attributes:
        name: as the profiler gives it.
        kind: one of :data:`KERNEL_KINDS`.
        share: of the time of all kernels and copies of the steps that were looked at, 0-1.
        calls_per_step: how often a mean step runs it.
        module: the user's module that launches most of it, by its name in the LightningModule: ``"net.layer4.1"``;
            empty where that is not known.
    """

    name: str
    kind: str
    share: float
    calls_per_step: float
    module: str = ""


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The work of a mean step.

    Attributes:
        seconds: of all kernels and copies of a mean step, added up; on a CPU of all operators, without those inside.
        kinds: share of each kind, 0-1.
        dearest: those that take most of the time, the first most.
        short_per_step: kernels of a mean step that are shorter than 10 µs.
        short_share: their share of the time, 0-1.
        transposes_share: share of kernels that bring images from one memory format to another.
        optimizer_per_step: kernels that a mean step's optimizer launches.
        unassigned: share of the time that is of no module, 0-1; None where modules were not watched.
        on_gpu: whether these are kernels; else they are operators of a CPU.
    """

    seconds: float
    kinds: dict[str, float] = field(default_factory=dict)
    dearest: tuple[KernelShare, ...] = ()
    short_per_step: float = 0.0
    short_share: float = 0.0
    transposes_share: float = 0.0
    optimizer_per_step: float = 0.0
    unassigned: float | None = None
    on_gpu: bool = True

    @property
    def summary(self) -> dict[str, float]:
        """What the report keeps beside kinds and kernels; what is not known is absent."""
        known = {"ms_per_step": round(self.seconds * 1e3, 3)}
        if self.on_gpu:
            known |= {"short_per_step": round(self.short_per_step, 1), "short_share": self.short_share}
        return known | ({"unassigned_share": self.unassigned} if self.unassigned is not None else {})
