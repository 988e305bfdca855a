"""What the work of a step consists of, as plain data: by kind, and the dearest kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# kinds of work; ``"matmul"`` is without tensor cores
KERNEL_KINDS: Final = (
    *("matmul_tensor_core", "matmul", "convolution", "attention", "normalization", "elementwise", "reduction"),
    *("optimizer", "copy", "communication", "other"),
)


@dataclass(frozen=True, slots=True)
class KernelShare:
    """One of the kernels that take most of the GPU's time.

    Attributes:
        name: as the profiler gives it.
        kind: one of :data:`KERNEL_KINDS`.
        share: of the time of all kernels and copies of the steps that were looked at, 0-1.
        calls_per_step: how often a mean step runs it.
        module: the user's module that launches most of it, by its name in the LightningModule: ``"net.layer4.1"``;
            empty if that is not known.
    """

    name: str
    kind: str
    share: float
    calls_per_step: float
    module: str = ""


@dataclass(frozen=True, slots=True)
class StepKernels:
    seconds: float  # all kernels and copies, added up
    kinds: dict[str, float] = field(default_factory=dict)  # share of each kind, 0-1
    dearest: tuple[KernelShare, ...] = ()  # those that take most of the time, the first most
    short_per_step: float = 0.0  # kernels shorter than 10 µs
    short_share: float = 0.0  # their share of the time, 0-1
    transposes_share: float = 0.0  # kernels that bring images from one memory format to another
    optimizer_per_step: float = 0.0  # kernels that the optimizer launches
    unassigned: float | None = None  # share of time of no module, 0-1; None: modules were not watched

    @property
    def summary(self) -> dict[str, float]:
        """What the report keeps beside kinds and kernels; what is not known is absent."""
        known = {
            "ms_per_step": round(self.seconds * 1e3, 3),
            "short_per_step": round(self.short_per_step, 1),
            "short_share": self.short_share,
        }
        return known | ({"unassigned_share": self.unassigned} if self.unassigned is not None else {})
