"""What the user asked of a detector, and what a listener of its windows has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_gpuopt.detector.kernel_profiling import Profile
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Change, Finding
from lightning_gpuopt.measurements.loading import LoaderFacts


@dataclass(frozen=True)
class DetectorOptions:
    threshold: float  # share of wall time, 0-1
    window_size: int  # training batches
    warmup_steps: int  # training batches that are left out of findings
    hang_timeout: float | None  # seconds without progress; None: no watch
    nvtx: bool  # phases as NVTX ranges
    profile: Profile = "auto"


class WindowListener(Protocol):
    """Acts on findings while training runs; the report lists its changes and notes."""

    changes: list[Change]
    notes: list[str]

    def window_closed(
        self, window: Measurement, findings: list[Finding], loader: LoaderFacts, set_ups: tuple[float, int]
    ) -> bool:
        """A window ends, on every rank at the same step; returns whether measurements have to start anew.

        ``findings`` are since warm-up; ``set_ups`` are seconds of the set-ups of epochs until now, and their number.
        """

    def training_ended(self) -> None:
        """Last call before the report: conclude what is under way."""
